"""Inputs that say themselves how a model is run on them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hooked_lm.hooks.module import HookedRootModule


class OwnRun(ABC):
    """An input with a `run` of its own."""

    @abstractmethod
    def run(self, model: HookedRootModule, forward: Callable[..., Any], *args: object, **options: object) -> Any:
        """The output of the model for this input; `forward` runs it on what its forward pass takes."""


class RunsInputs(HookedRootModule):
    """A model that leaves the run to an input with one of its own."""

    def __call__(self, *args: object, **options: object) -> Any:
        input = args[0] if args else options.get("input")
        if not isinstance(input, OwnRun):
            return super().__call__(*args, **options)
        others = {name: value for name, value in options.items() if name != "input"}
        return input.run(self, super().__call__, *args[1:], **others)
