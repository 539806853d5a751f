"""Pairs of towers: CLIP with both kinds of end tokens, MetaCLIP 2, and SigLIP."""

from typing import Any

from torch import nn

from tests.families._case import SIZES, Case
from tests.families._vision import TOWER


def sharp(model: nn.Module) -> None:
    """A scale that makes similarities of order one."""
    model.logit_scale.fill_(1.5)  # type: ignore[operator, union-attr]


TEXT = {**SIZES, "layer_norm_eps": 0.03, "pad_token_id": 0}
SMALL = {**TEXT, "hidden_size": 24, "num_attention_heads": 2, "max_position_embeddings": 12}


def case(family: str, name: str, text: dict[str, Any], vision: dict[str, Any], **fields: Any) -> Case:
    return Case(family, name, {"text_config": text, "vision_config": vision, **fields}, auto="AutoModel", adjust=sharp)


# fmt: off
CASES = [
    case("clip", "largest-id", TEXT, TOWER, projection_dim=20),
    case("metaclip_2", "end-token-2", TEXT, TOWER, projection_dim=20),
    case("siglip", "narrow-text", {**SMALL, "projection_size": 32}, TOWER),
]
# fmt: on
