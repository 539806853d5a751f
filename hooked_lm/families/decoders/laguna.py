"""Laguna (Poolside 2026): attention gated by a softplus with its own number of heads in each layer, and experts weighted by
sigmoids of capped logits."""

from dataclasses import replace

from hooked_lm.components.attention.gated import GatedAttention
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = moe.NO_EFFECT
GATES = {True: True, "per-head": True, "per-element": False}


def config(hf: HFConfig) -> DecoderConfig:
    hf.require(moe_apply_router_weight_on_input=False)
    if (
        hf.gating not in GATES
    ):  # transformers has a gate per element for any other value (modeling_laguna.py: LagunaAttention)
        raise ValueError(f"gating={hf.gating!r} is not supported; {', '.join(map(repr, GATES))} are")
    bias, qk_norm = hf.attention_bias, llama_like.head_norm(hf)
    plain = llama_like.attention(hf, rotary=None, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm)
    attn = GatedAttention.Config(**vars(plain), gate_act_fn="softplus", gate_per_head=GATES[hf.gating])
    rotaries = {name: rotary(hf, attn.d_head, name, partial=True) for name in dict.fromkeys(hf.layer_types)}
    by_layer = zip(llama_like.by_window(hf, attn), hf.layer_types, hf.num_attention_heads_per_layer, strict=True)
    attns = [replace(each, rotary=rotaries[kind], n_heads=n_heads) for each, kind, n_heads in by_layer]
    router = GroupedSigmoidRouter(
        scale=hf.moe_routed_scaling_factor,
        in_fp32=False,
        eps=0.0,
        soft_cap=hf.moe_router_logit_softcapping or None,
    )
    experts = moe.experts(hf, hf.num_experts, router, hf.moe_intermediate_size)
    experts = replace(experts, shared=replace(experts.expert, d_mlp=hf.shared_expert_intermediate_size))
    return moe.decoder(hf, attns, moe.some_sparse(hf, experts, moe.of_sparse_type(hf)))


def rows(tree: DecoderConfig) -> list[Row]:
    gate = "model.layers.{l}.self_attn.g_proj"
    return [
        *llama_like.rows(tree),
        *classic.heads_in(gate, "gate"),
        *moe.sparse_rows(tree, shared="shared_expert", correction="experts.e_score_correction_bias"),
    ]
