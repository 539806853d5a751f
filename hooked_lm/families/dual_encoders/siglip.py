"""SigLIP and SigLIP 2 (Zhai et al. 2023, arXiv:2303.15343; Tschannen et al. 2025, arXiv:2502.14786): texts of one length, read at
their last position."""

from hooked_lm.components.heads import LastToken
from hooked_lm.components.vision.heads import Projection
from hooked_lm.families._shared import dual_like
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DualEncoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

PREFIX = ""
IGNORED = ("*embeddings.position_ids",)
NO_EFFECT = (
    "tie_word_embeddings",
    "initializer_factor",
)


def config(hf: HFConfig) -> DualEncoderConfig:
    part = dual_like.text_part(hf, NO_EFFECT)
    projection = Projection.Config(part.hidden_size, part.projection_size, bias=True)
    text = dual_like.text_tower(part, LastToken.Config(part.hidden_size), projection, causal=False, pads_to_n_ctx=True)
    return DualEncoderConfig(
        vision=dual_like.vision_side(hf),
        text=text,
        vision_type=hf.vision_config["model_type"],
        logit_bias=True,
    )


def rows(tree: DualEncoderConfig) -> list[Row]:
    return [
        *dual_like.vision_rows(tree),
        *dual_like.text_rows(tree),
        Row(dual_like.TEXT + "head.weight", "text.projection.W", "o m -> m o"),
        Row(dual_like.TEXT + "head.bias", "text.projection.b"),
        Row("logit_scale", "logit_scale", "1 -> "),
        Row("logit_bias", "logit_bias", "1 -> "),
    ]
