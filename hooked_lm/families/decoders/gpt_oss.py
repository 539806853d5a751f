"""gpt-oss (OpenAI 2025, arXiv:2508.10925): attention sinks, every other layer local, clamped experts with biases."""

from hooked_lm.components.experts.moe import ClampedGatedMLP, MoE
from hooked_lm.components.experts.router import TopKRouter
from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# the experts have a fixed activation; the last two repeat other fields
NO_EFFECT = (*moe.NO_EFFECT, "hidden_act", "experts_per_token", "initial_context_length")


def config(hf: HFConfig) -> DecoderConfig:
    attn = llama_like.attention(hf, qkv_bias=hf.attention_bias, out_bias=hf.attention_bias, sinks=True)
    expert = ClampedGatedMLP.Config(hf.hidden_size, hf.intermediate_size, hf.swiglu_alpha, hf.swiglu_limit)
    experts = MoE.Config(expert, hf.num_local_experts, hf.num_experts_per_tok, TopKRouter(), router_bias=True)
    return moe.decoder(hf, llama_like.by_window(hf, attn), [experts] * hf.num_hidden_layers)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, e = "model.layers.{l}.mlp.", "blocks.{l}.mlp.", moe.n_experts(tree)
    expert = target + "experts.{e}."
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *llama_like.attention_rows(),
        Row(source + "router.weight", target + "W_router", "e m -> m e"),
        Row(source + "router.bias", target + "b_router"),
        Row(source + "experts.gate_up_proj", expert + "W_gate_in", "e m x -> m x", e=e),
        Row(source + "experts.gate_up_proj_bias", expert + "b_gate_in", "e x -> x", e=e),
        Row(source + "experts.down_proj", expert + "W_out", "e f m -> f m", e=e),
        Row(source + "experts.down_proj_bias", expert + "b_out", "e m -> m", e=e),
    ]
