"""The untrained twin of a model as a control: what a method finds in it, it does not find by training."""

from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch

from hooked_lm.engine.controls import with_control
from hooked_lm.engine.result import SweepResult
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.base import BaseModel, as_model
from hooked_lm.results.control import UNTRAINED

CONTROLS = ("auto", "untrained", None)
MOST_PARAMETERS = 10_000_000  # of a model whose twin is made without being asked for
Own = TypeVar("Own", bound=SweepResult)
Twins = dict[tuple[int, torch.dtype, torch.device], BaseModel]

_twins: "WeakKeyDictionary[BaseModel, Twins]" = WeakKeyDictionary()


def check_control(control: str | None) -> None:
    """Raises ValueError for another word than those of `with_untrained_twin`."""
    if control not in CONTROLS:
        raise ValueError(f"control must be 'auto', 'untrained' (the twin of the model) or None, got {control!r}")


def with_untrained_twin(
    model: HookedRootModule,
    found: Own,
    effects: SweepResult,
    run: Callable[[BaseModel], SweepResult],
    control: str | None,
    is_cheap: bool,
    seed: int = 0,
) -> Own:
    """A result with the model's untrained twin as its control, which `run` runs the same method on.

    "auto" does so if it `is_cheap` beside the work that is done, for a model of at most ten million parameters to which nobody
    listens, whose twin lacks nothing but training. Raises TypeError for a module that has no twin, if it is asked for.
    """
    own = as_model(model)
    if control is None or (control == "auto" and (own is None or not is_cheap or not _is_small_and_unhooked(own))):
        return found
    if own is None:
        raise TypeError(f"an untrained twin is that of a model of this package, got a {type(model).__name__}")
    return with_control(found, effects, run(twin_of(own, seed)), UNTRAINED, "training")


def twin_of(model: BaseModel, seed: int = 0) -> BaseModel:
    """The untrained twin of a small model, which is made once."""
    weight = next(model.parameters())
    key = seed, weight.dtype, weight.device
    if _size(model) > MOST_PARAMETERS:
        return model.untrained(seed)
    made = _twins.setdefault(model, {})
    if key not in made:
        made[key] = model.untrained(seed).eval()
    return made[key]


def _is_small_and_unhooked(model: BaseModel) -> bool:
    return _size(model) <= MOST_PARAMETERS and not any(point.is_listening for point in model.hook_points())


def _size(model: BaseModel) -> int:
    return sum(weight.numel() for weight in model.parameters())
