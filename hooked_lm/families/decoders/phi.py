"""Phi-1, 1.5 and 2 (Gunasekar et al. 2023, arXiv:2306.11644): attention and MLP in parallel after one norm, partial
rotary, biases in all linear layers."""

from hooked_lm.components.blocks.parallel import SharedNormBlock
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREPENDS_BOS = False
NO_EFFECT = ("partial_rotary_factor",)  # repeated in `rope_parameters`


def config(hf: HFConfig) -> DecoderConfig:
    norm, d_head = LayerNorm.Config(hf.hidden_size, hf.layer_norm_eps), hf.hidden_size // hf.num_attention_heads
    attn = llama_like.attention(
        hf,
        partial=True,
        qkv_bias=True,
        out_bias=True,
        qk_norm=LayerNorm.Config(d_head, hf.layer_norm_eps) if hf.qk_layernorm else None,
    )
    mlp = MLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_act)
    block = SharedNormBlock.Config(attn=attn, ln1=norm, mlp=mlp)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm, bias=True)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.", "blocks.{l}."
    attn = source + "self_attn."
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        *classic.norm(source + "input_layernorm", target + "ln1"),
        *classic.into_attention(attn + "q_proj", attn + "k_proj", attn + "v_proj"),
        *classic.norm(attn + "q_layernorm", target + "attn.q_norm"),
        *classic.norm(attn + "k_layernorm", target + "attn.k_norm"),
        *classic.out_of_attention(attn + "dense"),
        *classic.into_mlp(source + "mlp.fc1"),
        *classic.out_of_mlp(source + "mlp.fc2"),
        *classic.norm("model.final_layernorm", "ln_final"),
        *classic.head("lm_head", tree, "model.embed_tokens.weight"),
    ]
