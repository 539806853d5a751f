"""BioGPT (Luo et al. 2022, arXiv:2210.10341): GPT-2 as fairseq builds it, with scaled embeddings."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "biogpt."
IGNORED = ()
NO_EFFECT = ("layerdrop", "layer_norm_eps")  # transformers uses eps 1e-5 regardless of the config

OFFSET = 2  # row of position 0 in the position embedding


def config(hf: HFConfig) -> DecoderConfig:
    d_model, n_heads = hf.hidden_size, hf.num_attention_heads
    attn = Attention.Config(d_model, n_heads, d_model // n_heads, qkv_bias=True, out_bias=True)
    norm = LayerNorm.Config(d_model, 1e-5)
    mlp = MLP.Config(d_model, hf.intermediate_size, hf.hidden_act)
    return DecoderConfig(
        n_ctx=hf.max_position_embeddings,
        embed=Embed.Config(hf.vocab_size, d_model, scale=d_model**0.5 if hf.scale_embedding else 1.0),
        pos_embed=PosEmbed.Config(hf.max_position_embeddings, d_model, offset=OFFSET),
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.num_hidden_layers,
        ln_final=norm,
        unembed=Unembed.Config(d_model, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        Row("biogpt.embed_tokens.weight", "embed.W_E"),
        *classic.positions("biogpt.embed_positions.weight", "pos_embed", tree.pos_embed),
        *classic.fairseq_layer("biogpt.layers.{l}."),
        *classic.norm("biogpt.layer_norm", "ln_final"),
        *classic.head("output_projection", tree, "biogpt.embed_tokens.weight"),
    ]
