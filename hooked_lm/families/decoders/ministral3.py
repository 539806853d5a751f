"""Ministral 3 (Mistral AI 2025, mistral.ai/news/mistral-3): the scores of late queries are multiplied by a factor."""

from hooked_lm.components.attention.position_scale import PositionScale, PositionScaledAttention
from hooked_lm.families._shared import llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX, rows
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["IGNORED", "PREFIX", "config", "rows"]


def config(hf: HFConfig) -> DecoderConfig:
    given = dict(hf.rope_parameters)
    given.pop("max_position_embeddings", None)  # repeats that of the config
    scale = PositionScale(float(given.pop("llama_4_scaling_beta")), given["original_max_position_embeddings"])
    if given.get("rope_type", "default") in ("default", "linear", "dynamic"):  # they do not read it
        del given["original_max_position_embeddings"]
    attn = llama_like.attention(hf.changed(rope_parameters=given), window=hf.sliding_window)
    return llama_like.decoder(hf, PositionScaledAttention.Config(**vars(attn), position_scale=scale))
