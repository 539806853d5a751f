"""The language model of HunyuanOCR (Tencent 2025, arXiv:2511.19575): Hunyuan with rotary positions on four axes."""

from hooked_lm.families._shared import mrope
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import hunyuan_v1_dense
from hooked_lm.families.decoders.hunyuan_v1_dense import rows
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]

PREPENDS_BOS = False


def config(hf: HFConfig) -> DecoderConfig:
    return hunyuan_v1_dense.config(mrope.on_text(hf))
