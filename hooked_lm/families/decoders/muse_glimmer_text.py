"""The language model of Muse Glimmer (Meta 2026, huggingface.co/meta-models/Muse-Glimmer-30B): embeddings, queries and keys are
normalised without a weight; attention has a gate, and every fourth layer attends without a window and without rotary."""

from dataclasses import replace

from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    norm = RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps, offset=1.0)
    post_norm, without_weight = replace(norm, eps=hf.post_norm_eps), replace(norm, weight=False, offset=0.0)
    plain = llama_like.attention(
        hf,
        scale=hf.qk_scale_factor * hf.head_dim**-0.5,
        qk_norm=replace(without_weight, d_model=hf.head_dim),
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
    )
    attn = GatedAttention.Config(**vars(plain))
    block = PreNormBlock.Config(
        attn=attn,
        mlp=GatedMLP.Config(hf.hidden_size, hf.intermediate_size, hf.hidden_activation),
        ln1=norm,
        ln1_post=post_norm,
        ln2=norm,
        ln2_post=post_norm,
    )
    blocks = [
        replace(block, attn=replace(attn, window=window, rotary=attn.rotary if has_rotary else None))
        for window, has_rotary in zip(llama_like.windows(hf), _has_rotary(hf), strict=True)
    ]
    options = {"logit_scale": hf.output_multiplier, "soft_cap": hf.final_logit_softcapping}
    tree = llama_like.around(hf, blocks, llama_like.rms_norm(hf), **options)
    return replace(tree, embed=replace(tree.embed, norm=without_weight))


def _has_rotary(hf: HFConfig) -> list[bool]:
    """Whether each layer has rotary. Raises ValueError for separate angles, which transformers would not use."""
    thetas, theta = hf.layer_rope_theta[: hf.num_hidden_layers], hf.rope_parameters["rope_theta"]
    if others := {each for each in thetas if each} - {theta}:
        raise ValueError(f"layer_rope_theta has {sorted(others)}; only 0 and rope_theta={theta} are supported")
    return [bool(each) for each in thetas]


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        *llama_like.outer_rows(tree),
        *llama_like.four_norm_rows(),
        *llama_like.attention_rows(),
        *classic.heads_in("model.layers.{l}.self_attn.gate_proj", "gate"),
        *llama_like.mlp_rows(),
    ]
