"""The language model of Emu3 (Wang et al. 2024, arXiv:2409.18869): LLaMA, whose vocabulary includes tokens of images."""

from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import llama
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]

PREPENDS_BOS = False


def config(hf: HFConfig) -> DecoderConfig:
    biases = {name: hf.get(name, False) for name in ("attention_bias", "mlp_bias")}  # in a config only if it sets them
    return llama.config(hf.changed(**biases))
