"""Several devices on a machine that has none: labels which tensors carry, and which every operation compares.

`lazy:0` and `lazy:1` are devices that PyTorch knows and that compute nothing. Within `labelled_devices`, a tensor moved there is
a `Placed`: its values are on the CPU, and an operation on tensors of two devices raises RuntimeError, as on GPUs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

LABELS = ("lazy:0", "lazy:1")
PAIRS = [LABELS, *([("cuda:0", "cuda:1")] if torch.cuda.device_count() > 1 else [])]
MOVES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class Placed(Tensor):
    """A tensor with values on the CPU and the label of another device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> "Placed":
        size, strides = inner.size(), inner.stride()
        made = Tensor._make_wrapper_subclass(cls, size, strides=strides, dtype=inner.dtype, device=device)
        made.inner = inner
        return made

    def __init__(self, inner: Tensor, device: torch.device) -> None: ...

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Placed({self.inner!r}, {self.device})"

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    devices = {t.device for t in tensors if isinstance(t, Placed) or t.ndim}
    if len(devices) > 1 and func not in MOVES:
        raise RuntimeError(f"{func} of tensors on {', '.join(sorted(map(str, devices)))}")
    target = kwargs.get("device") or next((t.device for t in tensors if isinstance(t, Placed)), None)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": "cpu" if torch.device(target).type == "lazy" else target}
    args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Placed) else x, (args, kwargs))
    if func is torch.ops.aten._pin_memory.default:
        return args[0]
    out = func(*args, **kwargs)
    if target is None or torch.device(target).type != "lazy":
        return out
    return tree_map(lambda x: Placed(x, torch.device(target)) if isinstance(x, Tensor) else x, out)


class _Dispatch(TorchDispatchMode):
    """Labels new tensors, and lists the moves from one labelled device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[tuple[torch.device, torch.device]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _run(func, args, kwargs or {})
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], Placed) and out.device != args[0].device:
            self.moves.append((args[0].device, out.device))
        return out


class _Constructors(TorchFunctionMode):
    """New tensors from lists are filled outside of dispatch, so they are made on the CPU and then moved."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu").type == "lazy":
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if args and isinstance(args[0], Placed) and func is Tensor.new_tensor:
            return torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)).to(args[0].device)
        if args and isinstance(args[0], Placed) and func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            made = tuple(torch.tensor(i).to(args[0].device) if isinstance(i, list) else i for i in index)
            args = (args[0], made, *args[2:])
        return func(*args, **kwargs)


@contextmanager
def labelled_devices() -> Iterator[list[tuple[torch.device, torch.device]]]:
    """Within the block, tensors may be on the devices of `LABELS`; yields the list of moves from one of them to another device.

    Real devices are used as they are.
    """
    with _Dispatch() as mode, _Constructors():
        yield mode.moves


def values(x: Any) -> Tensor:
    """The values of a tensor on any device, on the CPU."""
    return x.detach().inner if isinstance(x, Placed) else x.detach().cpu()
