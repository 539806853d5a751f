"""Fills a model from a checkpoint by rows.

Names, shapes and dtypes are compared in full before the first tensor is read, and all mismatches are reported at once. Every
new parameter is made before the first one is put into the model, so an error leaves the model unchanged. Loading computes
nothing: in the checkpoint's dtype and on its device, a parameter *is* a view of the checkpoint's tensor, strides included.
Otherwise the parameters are converted one at a time, and keep the order of their strides.
"""

import fnmatch
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hooked_lm.components.float8 import float8_problem
from hooked_lm.weights.mapped import in_file
from hooked_lm.weights.matching import Problem, group_by_name, name_problems, refuse, same_bits
from hooked_lm.weights.parameters import Slot, slots
from hooked_lm.weights.rows import Row, check_coverage, unprefixed
from hooked_lm.weights.shards import Checkpoint, Headers


def load(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    rows: Iterable[Row],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | Callable[[str], torch.device] | None = None,
    ignore: Iterable[str] = (),
    prefix: str = "",
    copy: bool | Callable[[str], bool] = False,
    on_disk: Callable[[str], bool] | None = None,
    own_dtype: Collection[str] = (),
) -> None:
    """Replaces every parameter and persistent buffer of `model` by tensors of a checkpoint, as the rows say.

    The model is usually on the meta device. Peak memory is the model plus one tensor; without a change of
    dtype or device no memory is allocated. Parameters keep their `requires_grad`. Buffers that are not persistent
    do not change.

    Args:
        model: any module.
        tensors: names in the checkpoint -> tensors, looked up one at a time (`open_checkpoint`, or any mapping).
        rows: concrete rows (`expand` them first).
        dtype: of floating point tensors; None keeps the checkpoint's.
        device: of all tensors, or a function from a parameter's name to its device; None keeps the checkpoint's.
        ignore: globs of names in the checkpoint that need no row (`"*.attn.masked_bias"`).
        prefix: what the names in the checkpoint begin with in the rows, and in this file either all or none
            (`"transformer."`).
        copy: copy every parameter, or those of these names, even where a view is possible.
        on_disk: whether the parameter of a name is in a file: its copy is in a temporary one, see `weights.mapped.in_file`.
        own_dtype: names of parameters that keep the dtype which they have in the model, whatever `dtype` is.

    Raises:
        ValueError: a tensor of the checkpoint that no row reads and `ignore` does not cover; a parameter
            that no row fills; a name or shape that does not fit; a tied tensor that differs. The model is
            unchanged then.

    >>> import torch
    >>> from hooked_lm.weights import Row, export, load
    >>> model = torch.nn.Linear(3, 2, bias=False, device="meta")
    >>> rows = [Row("w", "weight", "m h -> h m")]
    >>> load(model, {"w": torch.arange(6.0).view(3, 2)}, rows)
    >>> model.weight[1].tolist(), export(model, rows)["w"].tolist()
    ([1.0, 3.0, 5.0], [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    """
    rows, ignore, targets = list(rows), list(ignore), slots(model)
    if prefix and not any(name.startswith(prefix) for name in tensors):
        rows, ignore = unprefixed(rows, prefix), [glob.removeprefix(prefix) for glob in ignore]
    groups = _plan_load(targets, tensors, rows, ignore)
    filled: dict[str, Tensor] = {}
    shared: set[int] = set()  # addresses of the checkpoint's tensors of which parameters are views
    for source, group in groups:
        tensor = tensors[source].detach()
        for row in group:
            if row.tied is not None and row.source == source and not same_bits(tensor, tensors[row.tied]):
                raise ValueError(f"{_described(tensors, source)} differs from {row.tied!r}, to which {row} ties it")
        # Two names of the same memory become two parameters: an edit of one must not change the other.
        is_alias = tensor.data_ptr() in shared
        for row in group:
            slot = targets[row.target]
            view = row.to_target(tensor, slot.tensor.shape)
            kind = slot.tensor.dtype if row.target in own_dtype else dtype
            where = device(row.target) if callable(device) else device
            must_copy = is_alias or (copy(row.target) if callable(copy) else copy)
            move = _to_file if on_disk is not None and on_disk(row.target) else _move
            filled[row.target] = slot.like(move(view, kind, where, must_copy))
        if any(filled[row.target].untyped_storage()._cdata == tensor.untyped_storage()._cdata for row in group):
            shared.add(tensor.data_ptr())
    for name, tensor in filled.items():
        targets[name].replace(tensor)


def _plan_load(
    targets: Mapping[str, Slot], tensors: Mapping[str, Tensor], rows: Sequence[Row], ignore: Sequence[str]
) -> list[tuple[str, list[Row]]]:
    """(tensor, the rows that read it) for all tensors; raises a ValueError with all mismatches of names, shapes and dtypes."""
    problems = name_problems(targets, rows)
    sourced = []
    for row in rows:
        source = row.source if row.source in tensors or row.tied is None else row.tied
        if source not in tensors:
            where = f" in {tensors.where}" if isinstance(tensors, Checkpoint) else ""
            problems.append(Problem(f"no tensor {source!r}{where} for {row.target!r}", source, tensors))
        elif row.tied is not None and row.tied not in tensors:
            problems.append(Problem(f"no tensor {row.tied!r}, to which {row} ties it", row.tied, tensors))
        elif row.target in targets:
            sourced.append((source, row))
    read = {row.source for row in rows}
    for name in tensors:
        if name not in read and not any(fnmatch.fnmatchcase(name, glob) for glob in ignore):
            problems.append(Problem(f"no row for the tensor {_described(tensors, name)}", name, read))
    own = group_by_name((source, row) for source, row in sourced if source == row.source)
    groups = [*own.items(), *((source, [row]) for source, row in sourced if source != row.source)]
    problems += [
        Problem(f"{_described(tensors, source)} is {dtype}, not floating point as {row.target!r} is")
        for source, row in sourced
        if not (dtype := dtype_of(tensors, source)).is_floating_point and targets[row.target].tensor.is_floating_point()
    ]
    if eighths := float8_problem({source: dtype_of(tensors, source) for source, _ in sourced}.items()):
        problems.append(Problem(eighths))
    fitting = set()  # layers with the same patterns and shapes are checked once
    for source, group in groups:
        shapes = shape_of(tensors, source), tuple(targets[row.target].tensor.shape for row in group)
        if (key := (shapes, tuple(row.rearrangement(len(shapes[0])) for row in group))) not in fitting:
            found = _shape_problems(_described(tensors, source), *shapes, group)
            problems += found
            fitting |= set() if found else {key}
    refuse(problems)
    return groups


def _shape_problems(
    name: str, source_shape: Sequence[int], target_shapes: Sequence[Sequence[int]], rows: Sequence[Row]
) -> list[Problem]:
    """Why the rows of one tensor cannot turn it into parameters of these shapes."""
    try:
        for row, shape in zip(rows, target_shapes, strict=True):
            row.sizes(source_shape, shape)
        if not any(row.partial for row in rows):
            check_coverage(rows, target_shapes, source_shape)
    except ValueError as error:
        return [Problem(f"{name}: {error}")]
    return []


def _move(view: Tensor, dtype: torch.dtype | None, device: torch.device | str | None, copy: bool) -> Tensor:
    """Converts a view, with strides in the same order; returns the view itself if nothing changes."""
    return view.to(device=view.device if device is None else device, dtype=_new_dtype(view, dtype), copy=copy)


def _to_file(view: Tensor, dtype: torch.dtype | None, device: torch.device | str | None, copy: bool) -> Tensor:
    """As `_move`, but a copy is in a temporary file."""
    kind = _new_dtype(view, dtype)
    return in_file(view, kind) if copy or kind != view.dtype else view


def _new_dtype(view: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and view.is_floating_point() else view.dtype


def shape_of(tensors: Headers | Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """The shape of a tensor, without a look-up where its header is known."""
    return tensors.shape(name) if isinstance(tensors, Headers) else tuple(tensors[name].shape)


def dtype_of(tensors: Headers | Mapping[str, Tensor], name: str) -> torch.dtype:
    """The dtype of a tensor, without a look-up where its header is known."""
    return tensors.dtype(name) if isinstance(tensors, Headers) else tensors[name].dtype


def _described(tensors: Headers | Mapping[str, Tensor], name: str) -> str:
    """The name of a tensor, and its file if there is one."""
    return f"{name!r} in {tensors.file(name)}" if isinstance(tensors, Checkpoint) else repr(name)
