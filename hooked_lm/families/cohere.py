"""Command R (Cohere 2024, docs.cohere.com/docs/command-r): attention and MLP side by side behind one norm without bias."""

from hooked_lm.components.block import SharedNormBlock
from hooked_lm.components.norm import LayerNorm
from hooked_lm.families import _llama_like as llama_like
from hooked_lm.families._llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._reader import HFConfig
from hooked_lm.families._rotary import rotary
from hooked_lm.models.config import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps, bias=False)
    d_head = hf.hidden_size // hf.num_attention_heads
    attn = llama_like.attention(
        hf,
        rotary=rotary(hf, d_head, adjacent_pairs=True),
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        **(_head_norms(hf, d_head) if hf.use_qk_norm else {}),
    )
    block = SharedNormBlock.Config(attn=attn, ln1=norm, mlp=llama_like.gated_mlp(hf))
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm, logit_scale=hf.logit_scale)


def _head_norms(hf: HFConfig, d_head: int) -> dict[str, LayerNorm.Config]:
    """Every head of the queries and of the keys has weights of its own."""
    heads = {"qk_norm": hf.num_attention_heads, "k_norm": hf.num_key_value_heads}
    return {name: LayerNorm.Config(d_head, hf.layer_norm_eps, bias=False, n_heads=n) for name, n in heads.items()}
