"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786): Gemma 2 with normalised queries and keys instead of soft caps, and with
rotary frequencies of their own in local layers."""

from dataclasses import replace

from hooked_lm.components.norm import RMSNorm
from hooked_lm.families import _llama_like as llama_like
from hooked_lm.families import gemma2
from hooked_lm.families._llama_like import IGNORED, PREFIX
from hooked_lm.families._reader import HFConfig
from hooked_lm.families.gemma2 import rows
from hooked_lm.models.config import DecoderConfig

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# layer_types say the same as the pattern, and rope_parameters as the base.
NO_EFFECT = ("sliding_window_pattern", "rope_local_base_freq")


def config(hf: HFConfig) -> DecoderConfig:
    norm = RMSNorm.Config(hf.hidden_size, hf.rms_norm_eps, offset=1.0)
