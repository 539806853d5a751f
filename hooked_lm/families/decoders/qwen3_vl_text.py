"""The language model of Qwen3-VL (Qwen Team 2025, arXiv:2511.21631): Qwen3 with interleaved rotary positions on three axes.

Image features are also added to the stream after the first layers, which does nothing on text alone. It is the language model of
Cosmos 3, too.
"""

from hooked_lm.families._shared import mrope
from hooked_lm.families._shared.cosmos3 import RENAMED, text_names
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import qwen3
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "RENAMED", "config", "rows", "text_names"]

PREPENDS_BOS = False


def config(hf: HFConfig) -> DecoderConfig:
    full = ["full_attention"] * hf.num_hidden_layers
    return qwen3.config(mrope.on_text(hf, layer_types=full, sliding_window=None))
