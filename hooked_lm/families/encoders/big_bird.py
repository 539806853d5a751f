"""BigBird (Zaheer et al. 2020, arXiv:2007.14062): BERT for long texts.

As transformers does, texts of up to (5 + 2 * num_random_blocks) * block_size tokens have full attention; longer ones, which
need sparse attention, are refused.
"""

from dataclasses import replace

from hooked_lm.families._shared import bert_like
from hooked_lm.families._shared.bert_like import IGNORED, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders import bert
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "bert."
NO_EFFECT = (*bert_like.NO_EFFECT, "block_size", "num_random_blocks")
HEADS = replace(bert.HEADS, pooler="pooler")


def config(hf: HFConfig) -> EncoderConfig:
    bert_like.check_bidirectional(hf)
    if hf.holds("qa_classifier.qa_outputs.weight") or hf.holds("classifier.dense.weight"):
        raise ValueError(
            "heads for texts and spans, with an unused pooler or an MLP, are not supported; load the bare model"
        )
    embed = bert_like.embed(hf, n_types=hf.type_vocab_size)
    scale = hf.hidden_size**0.5 if hf.rescale_embeddings else 1.0
    return EncoderConfig(
        n_ctx=bert_like.longest_full_attention(hf),
        embed=replace(embed, embed=replace(embed.embed, scale=scale)),
        blocks=bert_like.blocks(hf, bert_like.attention(hf, qkv_bias=hf.use_bias)),
        **bert_like.heads(hf, HEADS, mlm=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    return bert_like.rows(tree, HEADS, PREFIX)
