"""FNet (Lee-Thorp et al. 2021, arXiv:2105.03824): BERT with Fourier transforms in the place of attention."""

from hooked_lm.components.blocks.deep_norm import DeepNormMixerBlock
from hooked_lm.components.mlp import MLP
from hooked_lm.families._shared import bert_like, classic
from hooked_lm.families._shared.bert_like import IGNORED, RENAMED
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.encoders.bert import HEADS
from hooked_lm.families.encoders.fnet import identities as identities
from hooked_lm.families.encoders.fnet.fourier import FourierMixer
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

PREFIX = "fnet."
NO_EFFECT = (*bert_like.NO_EFFECT, "tpu_short_seq_length")


def config(hf: HFConfig) -> EncoderConfig:
    hf.require(use_tpu_fourier_optimizations=False)  # which computes the transform of a text of another length
    norm, mixer = bert_like.layer_norm(hf), FourierMixer.Config(hf.hidden_size)
    mlp = MLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act)
    embed = bert_like.embed(hf, n_types=hf.type_vocab_size)
    return EncoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=bert_like.projected(embed, hf.hidden_size),
        blocks=(DeepNormMixerBlock.Config(mixer=mixer, ln1=norm, mlp=mlp, ln2=norm),) * hf.num_hidden_layers,
        **bert_like.heads(hf, HEADS, mlm=hf.hidden_act),
    )


def rows(tree: EncoderConfig) -> list[Row]:
    layer = PREFIX + "encoder.layer.{l}."
    return [
        *bert_like.embedding_rows(PREFIX + "embeddings."),
        *bert_like.projection_rows(PREFIX + "embeddings.projection"),
        *classic.norm(layer + "fourier.output.LayerNorm", "blocks.{l}.ln1"),
        *classic.into_mlp(layer + "intermediate.dense"),
        *classic.out_of_mlp(layer + "output.dense"),
        *classic.norm(layer + "output.LayerNorm", "blocks.{l}.ln2"),
        *bert_like.head_rows(tree, HEADS, PREFIX),
    ]
