"""Applies controllers in the engine, which computes some positions of a prompt at a time."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hooked_lm.engine.edit import WindowFunction
from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.generation_step import GenerationStep
from hooked_lm.interventions.base import Controller


@dataclass(frozen=True, eq=False)
class Window(WindowFunction):
    """A controller applied to some positions of a site. `axis` is the axis of positions."""

    controller: Controller
    site: str
    dims: tuple[str, ...]
    axis: int

    def __call__(self, value: Tensor, first: int, n_pos: int) -> Tensor:
        return self.controller.change(value, _point(self.site, self.dims, first, value.shape[self.axis], n_pos))


@lru_cache(1024)
def _point(name: str, dims: tuple[str, ...], first: int, n: int, n_pos: int) -> HookPoint:
    """A hook point for `n` positions from `first` on of a prompt of `n_pos`, like a generation step on part of the prompt."""
    point, end = HookPoint(*dims), first + n
    point.name, point.own_step = name, GenerationStep(end - n_pos, torch.ones(1, end, dtype=torch.bool), n)
    return point


@lru_cache(64)
def constant(number: float, n_axes: int) -> Tensor:
    """A number that broadcasts to a site; cached, so that the engine compares it with the base run only once."""
    return torch.full([1] * n_axes, number, dtype=torch.float64)
