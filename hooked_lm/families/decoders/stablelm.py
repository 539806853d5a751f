"""StableLM 2 and StableLM 3B (Bellagente et al. 2024, arXiv:2402.17834): layer norms, partial rotary; the larger
models compute attention and MLP in parallel after one norm, with separate query and key norms for each head."""

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.parallel import SharedNormBlock
from hooked_lm.components.norms.layer_norm import HeadLayerNorm, LayerNorm
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("partial_rotary_factor",)  # repeated in `rope_parameters`


def config(hf: HFConfig) -> DecoderConfig:
    norm, d_head = LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps), hf.hidden_size // hf.num_attention_heads
    q_norm = HeadLayerNorm.Config(d_head, hf.layer_norm_eps, n_heads=hf.num_attention_heads)
    k_norm = HeadLayerNorm.Config(d_head, hf.layer_norm_eps, n_heads=hf.num_key_value_heads)
    norms = {"qk_norm": q_norm, "k_norm": k_norm} if hf.qk_layernorm else {}
    attn, mlp = llama_like.attention(hf, partial=True, qkv_bias=hf.use_qkv_bias, **norms), llama_like.gated_mlp(hf)
    block: SharedNormBlock.Config | PreNormBlock.Config
    if hf.use_parallel_residual:
        block = SharedNormBlock.Config(attn=attn, ln1=norm, mlp=mlp)
    else:
        block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    attn, source, target = tree.blocks[0].attn, "model.layers.{l}.self_attn.", "blocks.{l}.attn."
    return [
        *llama_like.rows(tree),
        Row(source + "q_layernorm.norms.{n}.weight", target + "q_norm.heads.{n}", n=attn.n_heads),
        Row(source + "k_layernorm.norms.{n}.weight", target + "k_norm.heads.{n}", n=attn.n_kv),
    ]
