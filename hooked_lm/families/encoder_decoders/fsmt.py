"""FSMT, the winner of WMT 2019 (Ng et al. 2019, arXiv:1907.06616): post-norm blocks, sinusoidal positions, two vocabularies.

With `use_cache`, transformers' `FSMTModel.forward` makes no causal mask: in one pass over a target its logits depend on later
tokens. Without, and token by token, they are those of this model.
"""

from hooked_lm.components.embeddings.pos_embed import FixedPosEmbed
from hooked_lm.families._shared import bart_like
from hooked_lm.families._shared.bart_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = (*bart_like.NO_EFFECT, "langs")


def config(hf: HFConfig) -> EncoderDecoderConfig:
    hf.require(tie_word_embeddings=False)
    pos_embed = FixedPosEmbed.Config(hf.max_position_embeddings, hf.d_model, offset=hf.pad_token_id + 1)
    source = hf.changed(vocab_size=hf.src_vocab_size)
    return bart_like.encoder_decoder(
        source, pos_embed, pre_norm=False, d_target_vocab=hf.tgt_vocab_size, logits_bias=False
    )


def rows(tree: EncoderDecoderConfig) -> list[Row]:
    return bart_like.rows(tree, head="model.decoder.output_projection")
