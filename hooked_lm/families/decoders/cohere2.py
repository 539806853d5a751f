"""Command R7B and Command A (Cohere 2025, arXiv:2504.00698): Command R with local layers, and full-attention layers in between
without positions."""

from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import cohere
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# the first three repeat `layer_types`; the others have the same values in all these models
NO_EFFECT = (
    *cohere.NO_EFFECT,
    *("layer_switch", "order_of_interleaved_layers", "sliding_window_pattern"),
    *("position_embedding_type", "rotary_pct", "use_embedding_sharing", "use_gated_activation", "use_parallel_*"),
)


def config(hf: HFConfig) -> DecoderConfig:
    blocks = [
        cohere.block(hf, window=window) if window else cohere.block(hf, rotary=None)
        for window in llama_like.windows(hf)
    ]
    return llama_like.around(hf, blocks, blocks[0].ln1, logit_scale=hf.logit_scale)
