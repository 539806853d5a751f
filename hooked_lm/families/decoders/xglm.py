"""XGLM (Lin et al. 2021, arXiv:2112.10668): sinusoidal positions in fairseq's order, scaled embeddings."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.pos_embed import FairseqSinusoidalEmbed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "model."
IGNORED = ("model.embed_positions.weights",)
NO_EFFECT = ("layerdrop", "init_std")

OFFSET = 2  # the sinusoidal table's index of position 0


def config(hf: HFConfig) -> DecoderConfig:
    blank = (
        hf.pad_token_id if (hf.pad_token_id or 0) >= OFFSET else None
    )  # as in fairseq, whose positions begin after it
    d_model, n_heads = hf.d_model, hf.attention_heads
    attn = Attention.Config(d_model, n_heads, d_model // n_heads, qkv_bias=True, out_bias=True)
    norm = LayerNorm.Config(d_model, 1e-5)
    mlp = MLP.Config(d_model, hf.ffn_dim, hf.activation_function)
    return DecoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=Embed.Config(hf.vocab_size, d_model, scale=d_model**0.5 if hf.scale_embedding else 1.0),
        pos_embed=FairseqSinusoidalEmbed.Config(d_model, offset=OFFSET, blank=blank),
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.num_layers,
        ln_final=norm,
        unembed=Unembed.Config(d_model, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        *classic.fairseq_layer("model.layers.{l}."),
        *classic.norm("model.layer_norm", "ln_final"),
        *classic.head("lm_head", tree, "model.embed_tokens.weight"),
    ]
