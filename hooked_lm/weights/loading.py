"""Fill a model from a checkpoint by rows, and write it back.

Both directions plan before they act: names and shapes are compared in full, and everything that does not
fit is said at once. `load` then makes every new parameter before it puts the first in place, so that a
model is filled or as it was. Nothing is computed: in the checkpoint's dtype on its device a parameter *is*
a view of their tensor, strides included; otherwise each is converted by itself, and keeps the order of its
strides.

For whoever builds on these parameters: weights cut from one fused tensor are views of one storage.
`copy.deepcopy`, `torch.save` of a model or state dict, and optimiser steps are right as they are (each
element is stored once; no two parameters overlap). `torch.save` of one such weight, and plain `pickle` of
the model, would store the fused tensor once for each of them: `compact` gives a weight a storage of its
own, `compact_model` all of a model's, which also lets go of the file.
"""

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor, nn

from hooked_lm.weights.rows import Row, check_coverage, placeholders, unprefixed
from hooked_lm.weights.shards import Checkpoint
from hooked_lm.weights.write import Planned


@dataclass
class Slot:
    """Where a parameter or persistent buffer of a model lives: in several modules, if these share it."""

    places: list[tuple[nn.Module, str]]
    tensor: Tensor

    def like(self, tensor: Tensor) -> Tensor:
        """`tensor` as a parameter (or buffer) of the same kind as the one that is here."""
        if not isinstance(self.tensor, nn.Parameter):
            return tensor
        return nn.Parameter(tensor, requires_grad=self.tensor.requires_grad)

    def put(self, tensor: Tensor) -> None:
        """Replace what is here by what `like` made."""
        for owner, leaf in self.places:
            home = owner._parameters if isinstance(self.tensor, nn.Parameter) else owner._buffers
            home[leaf] = tensor  # type: ignore[assignment]


@dataclass
class Problem:
    """One thing that does not match, told when it is asked for: the nearest name takes long to find."""

    text: str
    name: str = ""
    among: Collection[str] = ()

    def __str__(self) -> str:
        near = get_close_matches(self.name, self.among, n=1, cutoff=0.8)
        return self.text + (f" (did you mean {near[0]!r}?)" if near else "")


def slots(model: nn.Module) -> dict[str, Slot]:
    """All parameters and persistent buffers of a model by name; a shared one by the first of its names."""
    found: dict[str, Slot] = {}
    known: dict[int, Slot] = {}
    for path, module in model.named_modules():
        buffers = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for leaf, tensor in {**module._parameters, **buffers}.items():
            if tensor is None:
                continue
            if id(tensor) in known:
                known[id(tensor)].places.append((module, leaf))
            else:
                slot = known[id(tensor)] = Slot([(module, leaf)], tensor)
                found[f"{path}.{leaf}" if path else leaf] = slot
    return found


def load(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    rows: Iterable[Row],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ignore: Iterable[str] = (),
    prefix: str = "",
    copy: bool = False,
    own_dtype: Collection[str] = (),
) -> None:
    """Replace every parameter and persistent buffer of `model` by what the rows read from `tensors`.

    The model is usually on the meta device. Peak memory is the model plus one tensor; without a change of
    dtype or device, nothing. Parameters keep their `requires_grad`; buffers that are not persistent are
    left alone.

    Args:
        model: any module.
        tensors: their names -> tensors, looked up one at a time (`open_checkpoint`, or any mapping).
        rows: concrete rows (`expand` them first).
        dtype: for floating point tensors; None keeps each as it is in the checkpoint.
        device: where to; None leaves each where it is.
        ignore: globs of their names that need no row (`"*.attn.masked_bias"`).
        prefix: what their names begin with in the rows, and in this checkpoint either all or none
            (`"transformer."`).
        copy: give every parameter memory of its own even where a view would do.
        own_dtype: names of ours that get the dtype which they have in the model, whatever `dtype` says.

    Raises:
        ValueError: a tensor of theirs that no row reads and `ignore` does not cover; a parameter of ours
            that no row fills; a name or shape that does not fit; a tied tensor that differs. The model is
            then as it was.

    >>> import torch
    >>> from hooked_lm.weights.loading import export, load
    >>> from hooked_lm.weights.rows import Row
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
    lent: set[int] = set()  # addresses of tensors that parameters look into
    for source, group in groups:
        theirs = tensors[source].detach()
        for row in group:
            if row.tied is not None and row.theirs == source and not _same_bits(theirs, tensors[row.tied]):
                raise ValueError(f"{_place(tensors, source)} differs from {row.tied!r}, to which {row} ties it")
        # Two names of one memory become two parameters: editing one must not edit the other.
        alias = theirs.data_ptr() in lent
        for row in group:
            slot = targets[row.ours]
            view = row.to_ours(theirs, slot.tensor.shape)
            kind = slot.tensor.dtype if row.ours in own_dtype else dtype
            filled[row.ours] = slot.like(_move(view, kind, device, copy or alias))
        if any(filled[row.ours].untyped_storage()._cdata == theirs.untyped_storage()._cdata for row in group):
            lent.add(theirs.data_ptr())
    for name, tensor in filled.items():
        targets[name].put(tensor)


def export(model: nn.Module, rows: Iterable[Row], *, write_tied: bool = False) -> dict[str, Tensor]:
    """The checkpoint that `load` would fill this model from, bit for bit: their names -> tensors.

    Tensors are views of the parameters where torch can make one, so the model and what is exported share
    memory.

    Args:
        model: a model whose every parameter has a row.
        rows: concrete rows.
        write_tied: also write the tensors that rows call tied to another (each a view of our own parameter).

    Raises:
        ValueError: a parameter without a row, a row without a parameter, a tensor of theirs that would be
            filled in part or twice, parts of different dtypes, or a tied weight that is no longer equal to
            what it is tied to.
    """
    return {name: planned.make() for name, planned in plan_export(model, rows, write_tied=write_tied).items()}


def plan_export(model: nn.Module, rows: Iterable[Row], *, write_tied: bool = False) -> dict[str, Planned]:
    """What `export` gives, after the same checks, each tensor made only when it is asked for."""
    rows, targets = list(rows), slots(model)
    _refuse(_unfit_names(targets, rows))
    groups = _by_source((row.theirs, row) for row in rows)
    planned = {theirs: _planned(theirs, group, targets) for theirs, group in groups.items()}
    for row in rows:
        if row.tied is None:
            continue
        if row.tied not in planned:
            raise ValueError(f"{row}: tied to {row.tied!r}, which no row writes")
        if not _same_bits(planned[row.theirs].make(), planned[row.tied].make()):
            raise ValueError(
                f"{row.ours!r} was changed apart from what the checkpoint ties it to: {row.theirs!r} would "
                f"differ from {row.tied!r}. Export with rows that do not tie them (and a config that says so)"
            )
    tied = {row.theirs for row in rows if row.tied is not None}
    return {name: tensor for name, tensor in planned.items() if write_tied or name not in tied}


def compact(tensor: Tensor) -> Tensor:
    """The tensor in a storage that holds its elements and nothing else, strides in the same order.

    The tensor itself when that is so already, else a copy. For `torch.save`, pickling and sharing single
    weights.

    >>> import torch
    >>> from hooked_lm.weights.loading import compact
    >>> part = torch.zeros(4, 30)[:, 10:20].transpose(0, 1)
    >>> compact(part).untyped_storage().nbytes(), compact(part).stride()
    (160, (1, 10))
    """
    if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.detach().clone(memory_format=torch.preserve_format)


def compact_model(model: nn.Module) -> None:
    """Give every parameter and buffer memory of its own, in place: no shared storage, no mapped file.

    The parameter objects stay, so optimisers keep hold of them. Costs the model's bytes once.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = tensor.data.clone(memory_format=torch.preserve_format)


def _plan_load(
    targets: Mapping[str, Slot], tensors: Mapping[str, Tensor], rows: Sequence[Row], ignore: Sequence[str]
) -> list[tuple[str, list[Row]]]:
    """Which rows read which tensor; raises with everything in which names, shapes and rows disagree."""
    problems = _unfit_names(targets, rows)
    sourced = []
    for row in rows:
        source = row.theirs if row.theirs in tensors or row.tied is None else row.tied
        if source not in tensors:
            where = f" in {tensors.where}" if isinstance(tensors, Checkpoint) else ""
            problems.append(Problem(f"no tensor {source!r}{where} for {row.ours!r}", source, tensors))
        elif row.tied is not None and row.tied not in tensors:
            problems.append(Problem(f"no tensor {row.tied!r}, to which {row} ties it", row.tied, tensors))
        elif row.ours in targets:
            sourced.append((source, row))
    read = {row.theirs for row in rows}
    for name in tensors:
        if name not in read and not any(fnmatch.fnmatchcase(name, glob) for glob in ignore):
            problems.append(Problem(f"no row for the tensor {_place(tensors, name)}", name, read))
    own = _by_source((source, row) for source, row in sourced if source == row.theirs)
    groups = [*own.items(), *((source, [row]) for source, row in sourced if source != row.theirs)]
    problems += [
        Problem(f"{_place(tensors, source)} is {dtype}, not floating point as {row.ours!r} is")
        for source, row in sourced
        if not (dtype := _dtype(tensors, source)).is_floating_point and targets[row.ours].tensor.is_floating_point()
    ]
    fitting = set()  # one layer answers for all of the same kinds and shapes
    for source, group in groups:
        shapes = _shape(tensors, source), tuple(targets[row.ours].tensor.shape for row in group)
        if (alike := (shapes, tuple(row.rearrangement(len(shapes[0])) for row in group))) not in fitting:
            unfit = _unfit_shapes(_place(tensors, source), *shapes, group)
            problems += unfit
            fitting |= set() if unfit else {alike}
    _refuse(problems)
    return groups


def _unfit_shapes(
    place: str, theirs: Sequence[int], ours: Sequence[Sequence[int]], rows: Sequence[Row]
) -> list[Problem]:
    """What keeps the rows that read one tensor from taking it apart into our shapes."""
    try:
        for row, shape in zip(rows, ours, strict=True):
            row.sizes(theirs, shape)
        check_coverage(rows, ours, theirs)
    except ValueError as error:
        return [Problem(f"{place}: {error}")]
    return []


def _unfit_names(targets: Mapping[str, Slot], rows: Sequence[Row]) -> list[Problem]:
    """Parameters filled by no row or by two, rows for no parameter, rows that are not concrete."""
    problems, filled = [], set[str]()
    for row in rows:
        if open_names := placeholders(row.theirs) | placeholders(row.ours):
            problems.append(Problem(f"{row} still has {', '.join(sorted(open_names))}: call expand(rows, ...) first"))
        elif row.ours not in targets:
            problems.append(Problem(f"{row}: the model has no {row.ours!r}", row.ours, targets))
        elif row.ours in filled:
            problems.append(Problem(f"two rows fill {row.ours!r}"))
        filled.add(row.ours)
    empty = [name for name in targets if name not in filled]
    return problems + [Problem(f"no row for {name!r} of the model", name, filled) for name in empty]


def _planned(theirs: str, group: Sequence[Row], targets: Mapping[str, Slot]) -> Planned:
    """One tensor of theirs out of all of ours that lie in it."""
    ours = [targets[row.ours].tensor.detach() for row in group]
    shape = group[0].their_shape(ours[0].shape)
    check_coverage(group, [tensor.shape for tensor in ours], shape)
    if len({tensor.dtype for tensor in ours}) > 1:
        parts = ", ".join(f"{row.ours!r} {tensor.dtype}" for row, tensor in zip(group, ours, strict=True))
        raise ValueError(f"the parts of {theirs!r} have different dtypes: {parts}")

    def make() -> Tensor:
        if len(group) == 1 and not group[0].partial_dims:
            return group[0].to_theirs(ours[0])
        whole = ours[0].new_empty(shape)
        for row, tensor in zip(group, ours, strict=True):
            row.write(tensor, whole)
        return whole

    return Planned(tuple(shape), ours[0].dtype, make)


def _move(view: Tensor, dtype: torch.dtype | None, device: torch.device | str | None, copy: bool) -> Tensor:
    """Convert, keeping the order of the strides; the view itself when there is nothing to convert."""
    kind = dtype if dtype is not None and view.is_floating_point() else view.dtype
    return view.to(device=view.device if device is None else device, dtype=kind, copy=copy)


def _by_source(pairs: Iterable[tuple[str, Row]]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for source, row in pairs:
        groups.setdefault(source, []).append(row)
    return groups


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit: NaN equals itself, 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().view(bits), b.detach().view(bits))


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return tensors.shape(name) if isinstance(tensors, Checkpoint) else tuple(tensors[name].shape)


def _dtype(tensors: Mapping[str, Tensor], name: str) -> torch.dtype:
    return tensors.dtype(name) if isinstance(tensors, Checkpoint) else tensors[name].dtype


def _place(tensors: Mapping[str, Tensor], name: str) -> str:
    """A tensor's name, with its file when it has one."""
    return f"{name!r} in {tensors.file(name)}" if isinstance(tensors, Checkpoint) else repr(name)


def _refuse(problems: Sequence[Problem]) -> None:
    """Raise with all problems, one a line, the first twenty in words."""
    if problems:
        more = f"\n- and {len(problems) - 20} more" if len(problems) > 20 else ""
        listing = "\n- ".join(str(problem) for problem in problems[:20])
        raise ValueError(f"the checkpoint and the model do not match; nothing was changed:\n- {listing}{more}")
