"""The memory of a cache, before the run that fills it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from hooked_lm.hooks import Cache, HookedRootModule, NamesFilter


@dataclass(frozen=True)
class CacheEstimate:
    """The size of the cache of a run: `cache` holds its values as tensors that have shape, dtype and device but no memory."""

    cache: Cache

    @property
    def nbytes(self) -> int:
        """The memory of the values in bytes; shared memory is counted once, as in `cache.nbytes`."""
        storages = [value.untyped_storage() for value in self.cache.values()]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    def memory_report(self, by: str = "site") -> dict[str, int]:
        """Bytes by "site" (of all layers), "name", "dtype" or "device", as in `cache.memory_report`."""
        return self.cache.memory_report(by)

    def __str__(self) -> str:
        rows = [f"{n / 2**20:12.3f} MiB  {site}" for site, n in self.memory_report().items()]
        dtypes = ", ".join(self.memory_report("dtype"))
        return "\n".join([*rows, f"{self.nbytes / 2**20:12.3f} MiB  in all, {len(self.cache)} tensors of {dtypes}"])


class _EvenRouting(TorchFunctionMode):
    """Counts of values that do not exist: every expert gets as many tokens as the others.

    How many tokens an expert gets depends on values; how many all experts of a layer get does not.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not Tensor.bincount or not isinstance(args[0], FakeTensor):
            return func(*args, **kwargs)
        n_choices, n = kwargs["minlength"] - 1, args[0].numel()  # the first bin is of wrong choices
        return _Counts([0, *(n // n_choices + (i < n % n_choices) for i in range(n_choices))])


class _Counts(list[int]):
    """Numbers with the one method of a tensor that counts need."""

    def tolist(self) -> list[int]:
        return [*self]


def estimate_cache(
    model: HookedRootModule, inputs: tuple[object, ...], names_filter: NamesFilter, options: Mapping[str, Any]
) -> CacheEstimate:
    """The size of the cache of `model.run_with_cache(*inputs, **options)`, from a run on tensors without values.

    A tuple of integers among the inputs is the shape of token ids. Registered hooks run too, on tensors without values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def without_values(x: object) -> object:
        if isinstance(x, Tensor):
            return mode.from_tensor(x)
        is_shape = isinstance(x, tuple) and bool(x) and all(isinstance(n, int) for n in x)
        if is_shape and min(x) < 1:  # type: ignore[call-overload]
            raise ValueError(f"the shape of token ids must be numbers of at least 1, got {x}")
        return torch.empty(torch.Size(x), dtype=torch.long) if is_shape else x  # type: ignore[arg-type]

    texts = [isinstance(x, str) or (isinstance(x, list) and all(isinstance(part, str) for part in x)) for x in inputs]
    given = [model.to_tokens(x) if text else x for x, text in zip(inputs, texts, strict=True)]
    with torch.no_grad(), mode, _EvenRouting():
        named: dict[str, Any] = {name: without_values(x) for name, x in options.items()}
        _, cache = model.run_with_cache(*map(without_values, given), names_filter=names_filter, **named)
    return CacheEstimate(cache)
