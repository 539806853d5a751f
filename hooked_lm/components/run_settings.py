"""Settings of a model's config that its components follow in each run. They change no result beyond rounding."""

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

FUSED = ("auto", "never")  # fused kernels run while nothing listens inside them, or never
SOFTMAX, METHOD = F.softmax, Tensor.softmax  # as PyTorch has them


def softmax_is_replaced() -> bool:
    """Whether somebody put another function in the place of PyTorch's softmax, which fused kernels would not call."""
    return F.softmax is not SOFTMAX or Tensor.softmax is not METHOD


class RunSettings(NamedTuple):
    """The settings in a model's config that components read in each run.

    `fused` allows fused kernels where nothing listens to the sites inside them, and only while PyTorch's softmax is its own.
    Without it results do not depend on which sites are recorded, bit for bit. A flag for on-demand sites computes them whenever
    something listens near them, and without fused kernels in every run.
    """

    fuses: bool = True  # the config allows fused kernels
    attn_in: bool = False  # hook_attn_in
    split_qkv: bool = False  # hook_q_input, hook_k_input, hook_v_input
    attn_result: bool = False  # hook_result
    rotary_table_length: int = 2048  # positions in attn.rotary_sin and attn.rotary_cos

    @property
    def fused(self) -> bool:
        return self.fuses and not softmax_is_replaced()


def apply_run_settings(model: nn.Module, settings: RunSettings) -> None:
    """Sets these settings on every component of a model."""
    for module in model.modules():
        if isinstance(getattr(type(module), "settings", None), RunSettings):
            module.__dict__["settings"] = settings
