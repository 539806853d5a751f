"""Modules whose weights are split over ranks: only their own computation may read the parts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn, TypeVar

from torch import Tensor, nn

from hooked_lm.parallel.points import _in_split_module, remade
from hooked_lm.parallel.ranks import Ranks

Split = TypeVar("Split", bound="SplitModule")


class SplitWeight:
    """A weight of a split module as an attribute. Outside of the module's computation, where a part would be taken for the
    weight, it raises RuntimeError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: "SplitModule | None", owner: type) -> Any:
        if module is None:
            return self
        if self.name not in module._parameters:
            raise AttributeError(f"this {type(module).__name__} has no {self.name}")
        if _in_split_module.get() or module._parameters[self.name] is None:
            return module._parameters[self.name]
        raise RuntimeError(
            f"{self.name} of {type(module).__name__} is split over {module.ranks.size} ranks: this rank's part is "
            f"module._parameters[{self.name!r}], and parallel.full_state_dict(model) gathers the weights of all ranks"
        )


class SplitModule(nn.Module):
    """A module of which each rank computes a part.

    `guarded` are the names of the weights that may be split; `parts` are those that are, also of submodules, with the axis.
    """

    guarded: ClassVar[tuple[str, ...]] = ()
    ranks: Ranks
    parts: dict[str, int]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in cls.guarded:
            setattr(cls, name, SplitWeight(name))

    def take_part(self, name: str, axis: int) -> None:
        """Replaces the values of a parameter by this rank's part of them; the memory of the others is freed."""
        weight = parameter(self, name)
        part = self.ranks.slice_of(weight.shape[axis])
        weight.data = weight.data.narrow(axis, part.start, part.stop - part.start).clone()
        self.parts[name] = axis

    def sum_gradient(self, name: str) -> None:
        """Makes the gradient of a replicated parameter, which on each rank is that of its part, the sum over ranks."""
        weight, ranks = parameter(self, name), self.ranks
        is_trained = weight.requires_grad
        weight.requires_grad_(True).register_hook(lambda gradient: ranks.add_up(gradient))
        weight.requires_grad_(is_trained)

    def full_weights(self) -> Iterator[tuple[nn.Parameter, Callable[[], Tensor]]]:
        """Each parameter that is split, with a function that gathers it on every rank."""
        for name, axis in self.parts.items():
            weight = parameter(self, name)
            yield weight, partial(self.ranks.gathered, weight, axis)

    def _save_to_state_dict(self, destination: object, prefix: str, keep_vars: bool) -> NoReturn:
        raise RuntimeError(
            f"'{prefix.rstrip('.')}' is split over {self.ranks.size} ranks, so a state dict would have this rank's part: "
            "parallel.full_state_dict(model) gathers the weights of all ranks"
        )


@contextmanager
def computing() -> Iterator[None]:
    """Within the block weights of split modules are this rank's parts."""
    token = _in_split_module.set(True)
    try:
        yield
    finally:
        _in_split_module.reset(token)


def parameter(module: nn.Module, name: str) -> nn.Parameter:
    """A parameter by its dotted name below a module, which may be split."""
    path, _, own = name.rpartition(".")
    found = module.get_submodule(path)._parameters[own]
    assert found is not None, f"{name} is a parameter"
    return found


def split_class(module: nn.Module, kind: type[Split], ranks: Ranks) -> Split:
    """The module of a split class for this one, with its weights, submodules and hooks."""
    made = remade(module, kind)
    made.ranks, made.parts = ranks, {}
    return made
