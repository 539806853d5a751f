"""The language model of Gemma 4 12B (Google DeepMind 2026), which reads images and sounds without towers: Gemma 4 without
experts and per-layer embeddings."""

from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import gemma4_text
from hooked_lm.families.decoders.gemma4_text import rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

NO_EFFECT = gemma4_text.NO_EFFECT


def config(hf: HFConfig) -> DecoderConfig:
    experts = dict.fromkeys(("num_experts", "top_k_experts", "moe_intermediate_size"))
    return gemma4_text.config(hf.changed(hidden_size_per_layer_input=0, enable_moe_block=False, **experts))
