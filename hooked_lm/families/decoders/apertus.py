"""Apertus (Swiss AI Initiative 2025, arXiv:2509.14233): a trained activation, and queries and keys normalised per head."""

from hooked_lm.components.activations import XIELU
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import MLP
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = ("qk_norm",)  # queries and keys are always normalised


def config(hf: HFConfig) -> DecoderConfig:
    norm = llama_like.rms_norm(hf)
    attn = llama_like.attention(
        hf,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=llama_like.head_norm(hf),
    )
    act_fn = XIELU.Config() if hf.hidden_act == "xielu" else hf.hidden_act
    mlp = MLP.Config(hf.hidden_size, hf.intermediate_size, act_fn, bias=False)
    block = PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm)
    return llama_like.around(hf, [block] * hf.num_hidden_layers, norm)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target = "model.layers.{l}.", "blocks.{l}."
    numbers = ("alpha_p", "alpha_n", "beta", "eps")
    return [
        *llama_like.outer_rows(tree),
        Row(source + "attention_layernorm.weight", target + "ln1.w"),
        Row(source + "feedforward_layernorm.weight", target + "ln2.w"),
        *llama_like.attention_rows(),
        *llama_like.mlp_rows(),
        *(Row(f"{source}mlp.act_fn.{name}", f"{target}mlp.act_fn.{name}") for name in numbers),
    ]
