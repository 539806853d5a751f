"""CLIP (Radford et al. 2021, arXiv:2103.00020): causal text, read at its end token."""

from dataclasses import replace

from hooked_lm.components.heads import EndToken
from hooked_lm.components.vision.heads import Projection
from hooked_lm.families._shared import dual_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DualEncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = ""
IGNORED = ("*embeddings.position_ids",)
NO_EFFECT = ("tie_word_embeddings", "initializer_factor", "logit_scale_init_value", "projection_dim")
WRONG_END = 2  # what configs said before https://github.com/huggingface/transformers/pull/24773


def config(hf: HFConfig) -> DualEncoderConfig:
    end = dual_like.text_part(hf, NO_EFFECT).eos_token_id
    return pair(hf, None if end == WRONG_END else end)


def pair(hf: HFConfig, end: int | None) -> DualEncoderConfig:
    """The tree of a config, for this end token."""
    part, vision = dual_like.text_part(hf, NO_EFFECT), dual_like.vision_side(hf)
    d_model, d_out = part.hidden_size, hf.projection_dim
    return DualEncoderConfig(
        vision=replace(vision, projection=Projection.Config(vision.embed.d_model, d_out)),
        text=dual_like.text_tower(part, EndToken.Config(d_model, end), Projection.Config(d_model, d_out), causal=True),
        vision_type=hf.vision_config["model_type"],
    )


def rows(tree: DualEncoderConfig) -> list[Row]:
    return [
        *dual_like.vision_rows(tree),
        *dual_like.text_rows(tree),
        Row("text_projection.weight", "text.projection.W", "o m -> m o"),
        Row("logit_scale", "logit_scale"),
    ]
