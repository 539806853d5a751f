"""Types for annotations, and `get_supported_heads`."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.reading.head_detector import HEAD_NAMES

AxisNames = Literal["layer", "pos", "head_index", "head", "src_pos", "dest_pos"]
DeviceType = torch.device | None
ErrorMeasure = Literal["abs", "mul"]
HeadName = Literal["previous_token_head", "duplicate_token_head", "induction_head"]
LayerHeadTuple = tuple[int, int]
LayerToHead = dict[int, list[int]]
SingleLoss = Float[Tensor, ""]
LossPerToken = Float[Tensor, "batch pos_minus_1"]
Loss = SingleLoss | LossPerToken
OUTPUT_EMBEDDING = "unembed.W_U"


def get_supported_heads() -> None:
    """Prints the kinds of heads that `detect_head` accepts by name."""
    print(", ".join(HEAD_NAMES))
