"""Granite MoE with local layers (IBM 2026): granite_swa's attention, granitemoeshared's experts."""

from hooked_lm.families._shared import llama_like, moe
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import granite_swa, granitemoeshared
from hooked_lm.families.decoders.granitemoe import NO_EFFECT
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    return granite_swa.with_local_layers(hf, granitemoeshared.config(hf))


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, e = "model.layers.{l}.block_sparse_moe.", "blocks.{l}.mlp.", moe.n_experts(tree)
    expert = target + "experts.{e}.W_"
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        *llama_like.attention_rows(),
        Row(source + "router.weight", target + "W_router", "e m -> m e"),
        Row(source + "experts.gate_up_proj", expert + "{x}", "e (x f) m -> m f", e=e, x=["gate", "in"]),
        Row(source + "experts.down_proj", expert + "out", "e m f -> f m", e=e),
        *granitemoeshared.shared_rows(target + "shared."),
    ]
