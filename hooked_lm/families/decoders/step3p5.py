"""Step 3.5 Flash (StepFun 2026), the language model of Step 3.7: attention with a gate for each head and more
heads in local layers, and experts with bounded branches in the last layers."""

from dataclasses import replace

from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.bounded_mlp import BoundedGatedMLP
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# layers for the prediction of several tokens, which the next token does not depend on
IGNORED = (*llama_like.IGNORED, "model.layers.45.*", "model.layers.46.*", "model.layers.47.*")
NO_EFFECT = (
    *(*moe.NO_EFFECT, "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    "num_sliding_attention_heads",  # repeated in `per_layer_config`
)


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(gating=True, use_bidirectional_attention=False)
    d_head, layers = hf.head_dim, range(hf.num_hidden_layers)
    norm = RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps, offset=1.0)
    plain = llama_like.attention(
        hf,
        rotary=None,
        qkv_bias=hf.attention_bias,
        out_bias=hf.attention_bias,
        qk_norm=replace(norm, d_model=d_head),
        scale=hf.query_pre_attn_scalar**-0.5,
    )
    attn = GatedAttention.Config(**vars(plain), gate_per_head=True)
    rotaries = {name: rotary(hf, d_head, name, partial=True) for name in dict.fromkeys(hf.layer_types)}
    of_kind = [
        replace(attn, rotary=rotaries[kind], window=window)
        for kind, window in zip(hf.layer_types, llama_like.windows(hf), strict=True)
    ]
    attns = [replace(each, n_heads=n_heads(hf, layer)) for layer, each in enumerate(of_kind)]
    is_sparse = moe.of_sparse_type(hf)
    shared_limits, limits = hf.swiglu_limits_shared or [None] * len(layers), hf.swiglu_limits or [None] * len(layers)
    router = GroupedSigmoidRouter(scale=hf.moe_router_scaling_factor, in_fp32=False, eps=0.0)
    experts = moe.experts(hf, hf.n_routed_experts, router, hf.moe_intermediate_size)
    dense = llama_like.gated_mlp(hf, hf.mlp_bias)
    expert = replace(dense, d_mlp=hf.moe_intermediate_size, bias=False)
    mlps: list[moe.MLPConfig] = []
    for layer in layers:
        if is_sparse(layer):
            shared = bounded(replace(dense, d_mlp=hf.share_expert_dim), shared_limits[layer])
            mlps.append(replace(experts, expert=bounded(expert, limits[layer]), shared=shared))
        else:
            mlps.append(bounded(dense, shared_limits[layer]))
    return moe.decoder(hf, attns, mlps, norm)


def n_heads(hf: HFConfig, layer: int) -> int:
    """The number of heads of a layer. Raises ValueError for other fields of `per_layer_config`."""
    own = {str(index): fields for index, fields in (hf.get("per_layer_config") or {}).items()}.get(str(layer), {})
    if unknown := own.keys() - {"num_attention_heads"}:
        raise ValueError(f"fields of per_layer_config that are not supported: {', '.join(sorted(unknown))}")
    return own.get("num_attention_heads", hf.num_attention_heads)


def bounded(mlp: GatedMLP.Config, limit: float | int | None) -> GatedMLP.Config:
    """The MLP with bounded branches; 0 and None are no bound."""
    return BoundedGatedMLP.Config(**vars(mlp), limit=float(limit)) if limit else mlp


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, e = "model.layers.{l}.moe.", "blocks.{l}.mlp.", moe.n_experts(tree)
    return [
        *llama_like.rows(tree),
        *classic.heads_in("model.layers.{l}.self_attn.g_proj", "gate"),
        Row(source + "gate.weight", target + "W_router", "e m -> m e"),
        Row(source + "router_bias", target + "b_choice"),
        Row(source + "gate_proj.weight", target + "experts.{e}.W_gate", "e f m -> m f", e=e),
        Row(source + "up_proj.weight", target + "experts.{e}.W_in", "e f m -> m f", e=e),
        Row(source + "down_proj.weight", target + "experts.{e}.W_out", "e m f -> f m", e=e),
        *classic.gated_mlp("model.layers.{l}.share_expert.", target + "shared."),
    ]
