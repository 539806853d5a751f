"""A weight of any shape whose values are stored as one packed matrix [out, in], such as a tensor of torchao."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from hooked_lm.models.weights.kept import Kept

IDENTITY_ROWS = 1024  # of an identity matrix that is multiplied by a packed matrix at once

VIEWS = {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
VIEWS |= {Tensor.transpose, Tensor.swapaxes, Tensor.permute, Tensor.movedim, Tensor.flatten, Tensor.unflatten}
VIEWS |= {Tensor.reshape, Tensor.view, Tensor.squeeze, Tensor.unsqueeze, Tensor.detach}
VIEWS |= {torch.transpose, torch.swapaxes, torch.permute, torch.movedim, torch.flatten, torch.unflatten}
VIEWS |= {torch.reshape, torch.squeeze, torch.unsqueeze, torch.detach}
PARTS = {Tensor.__getitem__, Tensor.select, Tensor.narrow, torch.select, torch.narrow}  # views, for some arguments
WITH_VALUES = {Tensor.data, Tensor.real, Tensor.T, Tensor.mT, Tensor.H, Tensor.mH}  # attributes that are tensors
FACTS = {  # functions of shape, dtype, device and the like
    attribute.__get__
    for attribute in vars(torch._C.TensorBase).values()
    if type(attribute).__name__ == "getset_descriptor" and attribute not in WITH_VALUES
}
FACTS |= {
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.stride,
    Tensor.storage_offset,
    Tensor.numel,
    Tensor.nelement,
}
FACTS |= {Tensor.element_size, Tensor.is_contiguous, Tensor.get_device, Tensor.__len__, Tensor.is_floating_point}
FACTS |= {Tensor.is_complex, torch.is_floating_point, torch.is_complex, torch.numel}
FACTS |= {Tensor.data_ptr, Tensor.untyped_storage}  # of which none has memory


class QuantizedWeight(Tensor):
    """A weight with the shape and strides of an ordinary one, whose values are a packed matrix [out, in].

    `packed` is a tensor that `F.linear` accepts as its weight, or a `Kept`, of any number of axes. The weight is a view of that
    matrix: transposing and flattening give further views without computing anything, and `F.linear` with the view that is
    the matrix itself runs the kernel of `packed`, if it has one. All other functions get the dequantised values (`plain`): these
    are computed each time, and are an ordinary tensor. Gradients flow to the input of `F.linear`, by the dequantised values.
    Writing to the weight and training it raise ValueError.

    >>> import torch
    >>> import torch.nn.functional as F
    >>> matrix = torch.arange(6.0).reshape(2, 3)  # here an ordinary tensor
    >>> weight = QuantizedWeight(matrix, matrix.to("meta").T, "W")
    >>> weight.shape, F.linear(torch.ones(3), weight.T)
    (torch.Size([3, 2]), tensor([ 3., 12.]))
    """

    packed: Tensor | Kept
    strided: Tensor  # shape, strides and offset, as a view of a matrix [out, in] on the meta device
    path: str  # the name of the parameter, for messages

    def __new__(cls, packed: Tensor | Kept, strided: Tensor, path: str) -> "QuantizedWeight":
        return Tensor._make_wrapper_subclass(
            cls,
            strided.shape,
            strides=strided.stride(),
            storage_offset=strided.storage_offset(),
            dtype=packed.dtype,
            device=packed.device,
        )

    def __init__(self, packed: Tensor | Kept, strided: Tensor, path: str) -> None:
        self.packed, self.strided, self.path = packed, strided, path

    # ---- values ------------------------------------------------------------------------------------------------------

    def plain(self) -> Tensor:
        """The dequantised values, as an ordinary tensor with the shape and strides of this one."""
        view, packed = self.strided, self.packed
        values = packed if isinstance(packed, Kept) else dequantized(packed)
        return values.as_strided(view.shape, view.stride(), int(view.storage_offset()))

    @property
    def is_matrix(self) -> bool:
        """Whether this view is the packed matrix itself."""
        own, matrix = self.strided, self.packed
        return own.shape == matrix.shape and own.is_contiguous() and own.storage_offset() == 0

    def factor(self) -> Tensor:
        """The weight that `F.linear` gets: the packed matrix if this view is it and it has a kernel, else the values."""
        return self.packed if self.is_matrix and isinstance(self.packed, Tensor) else self.plain()

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """The memory of the packed values in bytes; of a view of some of them, its share."""
        return packed_bytes(self.packed) * self.numel() // math.prod(self.packed.shape)

    @property
    def method(self) -> str:
        """How the values are packed."""
        return self.packed.method if isinstance(self.packed, Kept) else type(self.packed).__name__

    def remedy(self, otherwise: str) -> str:
        """What to do about something that quantised weights do not allow."""
        return "load the checkpoint without quantize='keep'" if isinstance(self.packed, Kept) else otherwise

    def to_device(self, device: torch.device) -> "QuantizedWeight":
        """The packed weight on another device."""
        return type(self)(self.packed.to(device), self.strided, self.path)

    # ---- functions of torch ------------------------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in FACTS:
            return super().__torch_function__(func, types, args, kwargs)
        if isinstance(first, QuantizedWeight):
            if func in VIEWS or (func in PARTS and _is_basic(args[1:])):
                return first._view(func, args[1:], kwargs)
            if func == Tensor.data.__get__:  # type: ignore[attr-defined]
                return first._view(Tensor.detach, (), {})
            if func is Tensor.to and (moved := first._moved(*args[1:], **kwargs)) is not None:
                return moved
        if _writes(func):
            _refuse_writing(func, *args, *kwargs.values())
            if isinstance(first, QuantizedWeight):
                return first
        elif kwargs.get("out") is not None:
            _refuse_writing(func, kwargs["out"])
        if func is F.linear and (done := _linear(*args, **kwargs)) is not None:
            return done
        return func(*_plain(args), **{name: _plain(value) for name, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What reaches a weight below the functions of torch."""
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].packed, args[0].strided, args[0].path)
        return func(*_plain(args), **{name: _plain(value) for name, value in (kwargs or {}).items()})

    def _view(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """The result of a function that returns a view, where it can; else of the dequantised values."""
        strided = func(self.strided, *args, **kwargs)
        is_view = strided.untyped_storage()._cdata == self.strided.untyped_storage()._cdata
        if is_view and strided.dtype == self.strided.dtype:
            return type(self)(self.packed, strided, self.path)
        return func(self.plain(), *args, **kwargs)

    def _moved(self, *args: object, copy: bool = False, **kwargs: object) -> "QuantizedWeight | None":
        """The result of `Tensor.to` if that computes nothing."""
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[call-overload]
        return None if copy or dtype not in (None, self.dtype) else self.to_device(device or self.device)

    def refuse(self) -> NoReturn:
        remedy = self.remedy("load the model again, and change or train its weights before quantize()")
        raise ValueError(f"{self.path!r} is quantised ({self.method}), so it cannot be changed or trained: {remedy}")

    # ---- what Tensor defines in Python -------------------------------------------------------------------------------

    def __repr__(self) -> str:  # type: ignore[override]
        shape, packed = tuple(self.shape), f"{self.method} {tuple(self.packed.shape)}"
        return f"QuantizedWeight({self.path!r}, shape={shape}, dtype={self.dtype}, packed as {packed})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copies share the packed values, which nothing changes."""
        copied: Tensor = type(self)(self.packed, self.strided, self.path)
        if isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=False)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        remedy = self.remedy("keep the checkpoint, and call quantize() after loading it")
        raise ValueError(f"{self.path!r} is quantised, and quantised weights cannot be pickled or saved: {remedy}")


class _PackedLinear(torch.autograd.Function):
    """`F.linear`, with gradients for input and bias; kernels of packed weights may have none. What it saves is packed."""

    @staticmethod
    def forward(ctx: BackwardCFunction, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.factor(), bias)

    @staticmethod
    def backward(ctx: BackwardCFunction, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        of: Sequence[bool] = ctx.needs_input_grad
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if of[2] else None
        return gradient @ weight if of[0] else None, None, of_bias


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """`F.linear` by the kernel of a packed weight; None if it does not apply."""
    if not isinstance(weight, QuantizedWeight) or type(input) is not Tensor:
        return None
    mixed = input.dtype != weight.dtype or torch.is_autocast_enabled(input.device.type)
    if mixed or input.numel() == 0 or input.device != weight.device:
        return None
    if torch.is_grad_enabled() and (input.requires_grad or (bias is not None and bias.requires_grad)):
        product: Tensor = _PackedLinear.apply(input, weight, bias)
        return product
    return F.linear(input, weight.factor(), bias)


def _writes(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__")) or name[:3] == "__i"


def _refuse_writing(func: Callable[..., Any], target: object, *given: object) -> None:
    """Raises ValueError if a quantised weight would be changed; `requires_grad_(False)` and `grad = None` change nothing."""
    for weight in target if isinstance(target, list | tuple) else [target]:
        if isinstance(weight, QuantizedWeight):
            is_setter = getattr(func, "__name__", "") in ("requires_grad_", "__set__")
            if not (is_setter and len(given) == 1 and (given[0] is None or given[0] is False)):
                weight.refuse()


def _is_basic(index: object) -> bool:
    """Whether an index has no tensors, lists and masks, so that indexing gives a view."""
    if isinstance(index, tuple):
        return all(map(_is_basic, index))
    return index is None or index is ... or (isinstance(index, int | slice) and not isinstance(index, bool))


def _plain(value: object) -> Any:
    """A value with each quantised weight in it, also in lists and tuples, replaced by its dequantised values."""
    if isinstance(value, QuantizedWeight):
        return value.plain()
    if type(value) is list:
        return [_plain(item) for item in value]
    return tuple(_plain(item) for item in value) if type(value) is tuple else value


# ---- packed matrices -----------------------------------------------------------------------------------------------


def dequantized(packed: Tensor) -> Float[Tensor, "out in"]:
    """The values of a packed matrix, contiguous, in its dtype."""
    if type(packed) is Tensor:
        return packed.contiguous()
    try:
        return packed.dequantize().to(packed.dtype).contiguous()
    except (NotImplementedError, AttributeError):  # what tensor subclasses raise for an operation that they lack
        identity = torch.eye(packed.shape[1], dtype=packed.dtype, device=packed.device)
        with torch.no_grad():
            rows = [F.linear(part, packed) for part in identity.split(IDENTITY_ROWS)]
        return torch.cat(rows).T.contiguous()


def packed_bytes(packed: Tensor | Kept) -> int:
    """The memory of the tensors that make up a packed one, in bytes."""
    if not hasattr(packed, "__tensor_flatten__"):
        return packed.nbytes
    names, _ = packed.__tensor_flatten__()
    return sum(packed_bytes(getattr(packed, name)) for name in names)
