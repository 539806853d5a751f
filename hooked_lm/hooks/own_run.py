"""Inputs that say themselves how a model is run on them."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from hooked_lm.hooks.module import HookedRootModule
from hooked_lm.keywords import explain, is_ours


class OwnRun(ABC):
    """An input that defines how a model runs on it."""

    @abstractmethod
    def run(self, model: HookedRootModule, forward: Callable[..., Any], *args: object, **options: object) -> Any:
        """The output of the model for this input; `forward` runs it on what its forward pass takes."""


class RunsInputs(HookedRootModule):
    """A model that leaves the run to such an input; a run with `chunk=` to `_run_in_chunks`, if it reads prompts in pieces."""

    _run_in_chunks: Callable[..., Any] | None = None

    def __call__(self, *args: object, **options: object) -> Any:
        if self._run_in_chunks is not None and (chunk := options.pop("chunk", None)) is not None:
            return self._run_in_chunks(*args, chunk=chunk, **options)
        input = args[0] if args else options.get("input")
        if not isinstance(input, OwnRun):
            try:
                return super().__call__(*args, **options)
            except TypeError as error:
                if is_ours(type(self).forward):  # and not of a user's subclass
                    explain(error, type(self).forward, (self, *args), options, 1)
                raise
        others = {name: value for name, value in options.items() if name != "input"}
        return input.run(self, super().__call__, *args[1:], **others)
