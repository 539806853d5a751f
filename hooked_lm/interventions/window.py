"""Applies controllers in the engine, which computes some positions of a prompt at a time."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hooked_lm.engine.edit import WindowFunction
from hooked_lm.hooks import HookPoint
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


class WindowPoint(HookPoint):
    """A hook point for `n` positions from `first` on of a prompt of `n_pos`, like a generation step on part of the prompt."""

    def __init__(self, name: str, dims: tuple[str, ...], first: int, n: int, n_pos: int) -> None:
        super().__init__(*dims)
        self.name, self.shown, self.n_pos = name, torch.arange(first, first + n), n_pos

    @property
    def positions(self) -> Tensor:
        return self.shown

    @property
    def step(self) -> int:
        return int(self.shown[-1]) + 1 - self.n_pos


_point = lru_cache(1024)(WindowPoint)


@lru_cache(64)
def constant(number: float, n_axes: int) -> Tensor:
    """A number that broadcasts to a site; cached, so that the engine compares it with the base run only once."""
    return torch.full([1] * n_axes, number, dtype=torch.float64)
