"""The untrained twin of a model as a control: what a method finds in it, it does not find by training."""

import warnings
from collections.abc import Callable
from typing import TypeVar

from hooked_lm.engine.controls import with_control
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.study import SwapWarning, SweepInterrupted
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.base import BaseModel
from hooked_lm.models.twins import has_small_twin, twin_of
from hooked_lm.results.control import UNTRAINED

CONTROLS = ("auto", "untrained", None)
Own = TypeVar("Own", bound=SweepResult)


def check_control(control: str | None) -> None:
    """Raises ValueError for another word than those of `with_untrained_twin`."""
    if control not in CONTROLS:
        raise ValueError(f"control must be 'auto', 'untrained' (the twin of the model) or None, got {control!r}")


def untrained_twin(
    model: HookedRootModule, control: str | None, is_cheap: bool = True, seed: int = 0
) -> BaseModel | None:
    """The untrained twin of a model if a method has to run on it, or None.

    "auto" has it if the run `is_cheap` beside the work that is done, for a model of at most ten million parameters to which
    nobody listens, whose twin lacks nothing but training. Raises TypeError for a module that has no twin, if it is asked for.
    """
    if control is None:
        return None
    if control == "auto":
        listens = any(point.is_listening for point in model.hook_points())
        if listens or not is_cheap or not has_small_twin(model):
            return None
    return twin_of(model, seed)


def with_untrained_twin(
    model: HookedRootModule,
    found: Own,
    effects: SweepResult,
    run: Callable[[BaseModel], SweepResult],
    control: str | None,
    is_cheap: bool,
    seed: int = 0,
) -> Own:
    """A result with the model's untrained twin as its control, if there is one (see `untrained_twin`).

    `run` runs the same method on it, without its warnings. An interrupt of it raises SweepInterrupted with the result.
    """
    twin = untrained_twin(model, control, is_cheap, seed)
    if twin is None:
        return found
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SwapWarning)
            warnings.filterwarnings("ignore", ".* hardly differ")  # which is the point
            other = run(twin)
    except KeyboardInterrupt:
        raise SweepInterrupted(found) from None
    return with_control(found, effects, other, UNTRAINED, "training")
