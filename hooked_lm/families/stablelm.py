"""StableLM 2 and StableLM-Epoch (Bellagente et al. 2024, arXiv:2402.17834): layer norms, partial rotary, a gated MLP."""

from hooked_lm.components.block import PreNormBlock, SharedNormBlock
from hooked_lm.components.norm import HeadwiseLayerNorm, LayerNorm
from hooked_lm.families import _llama_like as llama_like
from hooked_lm.families._llama_like import IGNORED, PREFIX
from hooked_lm.families._reader import HFConfig
from hooked_lm.models.config import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("partial_rotary_factor", "rope_pct")  # rope_parameters repeat it where it counts


def config(hf: HFConfig) -> DecoderConfig:
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps)
    attn = llama_like.attention(hf, qkv_bias=hf.use_qkv_bias, **(_head_norms(hf) if hf.qk_layernorm else {}))
    mlp = llama_like.gated_mlp(hf)
    if hf.use_parallel_residual:
        block: SharedNormBlock.Config | PreNormBlock.Config = SharedNormBlock.Config(attn=attn, ln1=norm, mlp=mlp)
    else:
        block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm)


def _head_norms(hf: HFConfig) -> dict[str, HeadwiseLayerNorm.Config]:
    """Every head of the queries and of the keys has a norm of its own."""
    d_head, eps = hf.hidden_size // hf.num_attention_heads, hf.layer_norm_eps
    heads = {"qk_norm": hf.num_attention_heads, "k_norm": hf.num_key_value_heads}
    return {name: HeadwiseLayerNorm.Config(d_head, eps, bias=False, n_heads=n) for name, n in heads.items()}


def rows(tree: DecoderConfig) -> list[Row]:
    attn = tree.blocks[0].attn
    theirs, ours = "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    return [
        *llama_like.rows(tree),
        Row(theirs + "q_layernorm.norms.{n}.weight", ours + "q_norm.w_heads.{n}", n=attn.n_heads),
        Row(theirs + "k_layernorm.norms.{n}.weight", ours + "k_norm.w_heads.{n}", n=attn.n_kv),
    ]
