"""Settings of a model's config that its components follow in each run. They change no result beyond rounding."""

from typing import NamedTuple

from torch import nn

FUSED = ("auto", "never")  # fused kernels run while nothing listens inside them, or never


class RunSettings(NamedTuple):
    """The settings in a model's config that components read in each run.

    `fused` allows fused kernels where nothing listens to the sites inside them; without it results do not depend on which sites
    are recorded, bit for bit. A flag for on-demand sites computes them whenever something listens near them, and without fused
    kernels in every run.
    """

    fused: bool = True
    attn_in: bool = False  # hook_attn_in
    split_qkv: bool = False  # hook_q_input, hook_k_input, hook_v_input
    attn_result: bool = False  # hook_result
    rotary_table_length: int = 2048  # positions in attn.rotary_sin and attn.rotary_cos


def apply_run_settings(model: nn.Module, settings: RunSettings) -> None:
    """Sets these settings on every component of a model."""
    for module in model.modules():
        if isinstance(getattr(type(module), "settings", None), RunSettings):
            module.__dict__["settings"] = settings
