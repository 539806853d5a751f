"""GPT-2 (Radford et al. 2019, Language Models are Unsupervised Multitask Learners)."""

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

PREFIX = "transformer."
IGNORED = ("*.attn.bias", "*.attn.masked_bias")
NO_EFFECT = ("n_ctx", "reorder_and_upcast_attn")  # an old name of `n_positions`; rounding only


def config(hf: HFConfig) -> DecoderConfig:
    d_head = hf.n_embd // hf.n_head
    norm = LayerNorm.Config(hf.n_embd, hf.layer_norm_epsilon)
    mlp = MLP.Config(hf.n_embd, hf.n_inner or 4 * hf.n_embd, hf.activation_function)
    scale = d_head**-0.5 if hf.scale_attn_weights else 1.0
    scales = [scale / (layer + 1 if hf.scale_attn_by_inverse_layer_idx else 1) for layer in range(hf.n_layer)]
    attns = [Attention.Config(hf.n_embd, hf.n_head, d_head, scale=x, qkv_bias=True, out_bias=True) for x in scales]
    return DecoderConfig(
        n_ctx=hf.n_positions,
        embed=Embed.Config(hf.vocab_size, hf.n_embd),
        pos_embed=PosEmbed.Config(hf.n_positions, hf.n_embd),
        blocks=tuple(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm) for attn in attns),
        ln_final=norm,
        unembed=Unembed.Config(hf.n_embd, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        Row("transformer.wte.weight", "embed.W_E"),
        Row("transformer.wpe.weight", "pos_embed.W_pos"),
        *block_rows(),
        *classic.norm("transformer.ln_f", "ln_final"),
        *classic.head("lm_head", tree, "transformer.wte.weight"),
    ]


def block_rows() -> list[Row]:
    """The rows of each block, in the names of GPT and GPT-2."""
    source, target = "transformer.h.{l}.", "blocks.{l}."
    return [
        *classic.norm(source + "ln_1", target + "ln1"),
        Row(source + "attn.c_attn.weight", target + "attn.W_{qkv}", "m (qkv n h) -> n m h", qkv="QKV"),
        Row(source + "attn.c_attn.bias", target + "attn.b_{qkv}", "(qkv n h) -> n h", qkv="QKV"),
        Row(source + "attn.c_proj.weight", target + "attn.W_O", "(n h) m -> n h m"),
        Row(source + "attn.c_proj.bias", target + "attn.b_O"),
        *classic.norm(source + "ln_2", target + "ln2"),
        Row(source + "mlp.c_fc.weight", target + "mlp.W_in"),
        Row(source + "mlp.c_fc.bias", target + "mlp.b_in"),
        Row(source + "mlp.c_proj.weight", target + "mlp.W_out"),
        Row(source + "mlp.c_proj.bias", target + "mlp.b_out"),
    ]
