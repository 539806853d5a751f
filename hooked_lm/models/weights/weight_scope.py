"""Weights with other values inside a `with` block, in the thread or task that opened it alone.

A component reads `self.W_Q`, which PyTorch looks up in the module's dictionary of parameters. While a scope is open, that
dictionary is a `ScopedWeights`: it gives the value of the scope to the context that opened it, and the parameter to all others.
The parameters themselves do not change: `named_parameters`, `state_dict` and saved files have them as they were.
"""

import copy
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, SupportsIndex, runtime_checkable

import torch
from torch import Tensor, nn

from hooked_lm.hooks import checkpoint
from hooked_lm.models.dry_run import DryRun, dry_run_now

Holder = tuple[nn.Module, str]  # a module, and the name of its parameter


@runtime_checkable
class WeightChange(Protocol):
    """How a weight gets its value in a scope, from these `tensors`."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    def __call__(self, weight: Tensor) -> Tensor: ...


@runtime_checkable
class AdapterLike(Protocol):
    """What gives weights of a model other values, such as a `hub.LoRA`."""

    def scope(self, model: Any, /) -> "WeightScope": ...


AdapterOrPath = AdapterLike | str | os.PathLike[str]  # a path: a folder that peft wrote, or a repository of the hub

_lock = threading.RLock()  # held while dictionaries are exchanged


@dataclass
class _Value:
    """A value that was computed without gradients, and the weight of which it was, with the number of edits of all tensors.

    PyTorch does not count edits in place of `weight.data`.
    """

    weight: Tensor
    versions: tuple[int, ...]
    value: Tensor


class ScopedWeights(dict[str, Any]):
    """The parameters of a module, of which some have other values in the contexts that opened a scope."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__(weights)
        self.before, self.n_scopes = weights, 0

    def __getitem__(self, name: str) -> Any:
        weight = super().__getitem__(name)
        for scope in _open.get() if weight is not None else ():
            weight = scope.value(self, name, weight)
        return weight

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        """The copy of a model is one outside of all scopes."""
        return copy.deepcopy(dict(self.items()), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise ValueError(
            "a model is not pickled or sent to another process while weights of it have other values in a `with` block: the "
            "adapter would stay behind. Do so outside of the block; for other processes load the adapter merged, "
            "from_pretrained(folder)"
        )


class WeightScope:
    """The context manager in which some weights of a model have other values; `model` is what `with` gives.

    Scopes nest: an inner one changes the values of the outer one. A value that needs no gradients is computed once in a scope,
    at its first use, and freed with it, also with what was edited in it in place.
    """

    def __init__(
        self, model: nn.Module, changes: Mapping[str, tuple[Sequence[Holder], Sequence[WeightChange]]], name: str
    ) -> None:
        self.model, self.changes, self.name = model, changes, name
        self._of: dict[tuple[int, str], Sequence[WeightChange]] = {}
        self._known: dict[tuple[tuple[int, str], DryRun | None], _Value] = {}
        self._dicts: dict[int, tuple[ScopedWeights, list[nn.Module]]] = {}
        self._is_open = False

    def __enter__(self) -> Any:
        if self._is_open:
            raise RuntimeError(f"{self!r} is already open: call model.with_adapter(...) for each with block")
        with _lock:
            by_dict: dict[int, list[nn.Module]] = {}
            for module in self.model.modules():
                by_dict.setdefault(id(module._parameters), []).append(module)
            for holders, changes in self.changes.values():
                for module, leaf in holders:
                    if not isinstance(module._parameters, ScopedWeights):
                        weights, sharing = ScopedWeights(module._parameters), by_dict[id(module._parameters)]
                        for each in sharing:
                            each._parameters = weights
                        by_dict[id(weights)] = sharing
                    held = module._parameters
                    assert isinstance(held, ScopedWeights)
                    if id(held) not in self._dicts:
                        self._dicts[id(held)] = held, by_dict[id(held)]
                        held.n_scopes += 1
                    self._of[id(held), leaf] = changes
        self._is_open = True
        _open.set((*(scope for scope in _open.get() if scope._is_open), self))
        return self.model

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        _open.set(tuple(scope for scope in _open.get() if scope is not self))
        with _lock:
            for weights, modules in self._dicts.values():
                weights.n_scopes -= 1
                if not weights.n_scopes:
                    weights.before.clear()
                    weights.before.update(weights.items())  # with what was assigned in the meantime
                    for module in modules:
                        if module._parameters is weights:
                            module._parameters = weights.before
        for kept in (self._of, self._known, self._dicts):
            kept.clear()

    @property
    def n_edits(self) -> int:
        """How often the tensors of its changes were edited in place."""
        return sum(_version(of) for _, changes in self.changes.values() for change in changes for of in change.tensors)

    def value(self, weights: ScopedWeights, name: str, weight: Tensor) -> Tensor:
        """What a weight is in this scope."""
        key = id(weights), name
        if not self._is_open or (changes := self._of.get(key)) is None:
            return weight
        if torch.is_grad_enabled():
            if checkpoint.active_calls() is not None:
                raise ValueError(
                    f"{self.name} is switched on in a `with` block, and activation checkpointing computes the forward pass again "
                    "outside of it: run without checkpointing, or load the adapter merged, from_pretrained(folder)"
                )
            return _changed(weight, changes)
        versions = tuple(map(_version, (weight, *(tensor for change in changes for tensor in change.tensors))))
        kept = key, dry_run_now()
        known = self._known.get((key, None)) or self._known.get(kept)
        if known is None or known.weight is not weight or known.versions != versions:
            known = self._known[kept] = _Value(weight, versions, _changed(weight, changes))
        return known.value

    def __repr__(self) -> str:
        return f"WeightScope({self.name}: {len(self.changes)} weights{'; open' if self._is_open else ''})"


_open: ContextVar[tuple[WeightScope, ...]] = ContextVar("open_weight_scopes", default=())


def open_scopes(model: nn.Module) -> list[WeightScope]:
    """The scopes of a model that are open in this context, outermost first."""
    return [scope for scope in _open.get() if scope._is_open and scope.model is model]


def under_adapter(model: nn.Module, adapter: AdapterOrPath | None) -> AbstractContextManager[Any]:
    """The scope of an adapter; one that does nothing for None."""
    if adapter is None:
        return nullcontext()
    with_adapter = getattr(model, "with_adapter", None)
    if with_adapter is None:
        raise ValueError(
            f"a {type(model).__name__} has no with_adapter: load the model with HookedTransformer.from_pretrained"
        )
    scope: AbstractContextManager[Any] = with_adapter(adapter)
    return scope


def refuse_open_scopes(model: nn.Module, what: str) -> None:
    """Raises ValueError for what rewrites weights in place while a scope is open: it would write the values of the scope."""
    if scopes := open_scopes(model):
        raise ValueError(
            f"{what} rewrites the weights in place, and {scopes[-1].name} is switched on: what is written would stay in them "
            "after the `with` block, or be lost with it. Do so outside of the block"
        )


def scoped_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model that have other values in this context, by name, with these."""
    if _open.get():
        for path, module in model.named_modules():
            if isinstance(held := module._parameters, ScopedWeights):
                for leaf, weight in held.items():
                    if weight is not None and (value := held[leaf]) is not weight:
                        yield f"{path}.{leaf}".lstrip("."), value


def _changed(weight: Tensor, changes: Sequence[WeightChange]) -> Tensor:
    for change in changes:
        weight = change(weight)
    return weight


def _version(weight: Tensor) -> int:
    return 0 if weight.is_inference() else weight._version
