"""How the parts of a model compute what can be computed in several ways; the results agree to rounding."""

from typing import NamedTuple

from torch import nn

FUSED = ("auto", "never")  # whether fused kernels run: while nothing listens inside, or not at all


class Manner(NamedTuple):
    """What the flags of a model's config ask of all its parts.

    Fused kernels run while nothing listens to the sites inside; with `fused` off they never run, so that the bits of a result do
    not depend on who listens. The others say that sites on demand are passed in every run in which something listens near them
    (without fused kernels: in every run).
    """

    fused: bool = True
    per_head: bool = False  # hook_attn_in
    split: bool = False  # hook_q_input, hook_k_input, hook_v_input
    results: bool = False  # hook_result
    n_tabulated: int = 2048  # positions in the tables of rotary embeddings


def follow(model: nn.Module, manner: Manner) -> None:
    """Tell every part of a model."""
    for module in model.modules():
        if isinstance(getattr(type(module), "manner", None), Manner):
            module.__dict__["manner"] = manner
