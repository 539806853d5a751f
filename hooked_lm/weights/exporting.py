"""Writes a model back as a checkpoint, by the rows that loaded it.

Names, shapes and dtypes are checked before the first tensor is made.
"""

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn

from hooked_lm.weights.matching import group_by_name, name_problems, refuse, same_bits
from hooked_lm.weights.parameters import Slot, slots
from hooked_lm.weights.rows import Row, check_coverage
from hooked_lm.weights.write import Planned


def export(model: nn.Module, rows: Iterable[Row], *, write_tied: bool = False) -> dict[str, Tensor]:
    """The checkpoint from which `load` would fill this model, bit for bit: names in the checkpoint -> tensors.

    A tensor is a view of a parameter where torch can make one, so the result shares memory with the model.

    Args:
        model: a model whose every parameter has a row.
        rows: concrete rows.
        write_tied: also return the tensors that rows call tied to another (each a view of its own parameter).

    Raises:
        ValueError: a parameter without a row, a row without a parameter, a tensor of which a part would be missing or
            written twice, parts of different dtypes, or a tied weight that differs from what it is tied to.
    """
    return {name: planned.make() for name, planned in plan_export(model, rows, write_tied=write_tied).items()}


def plan_export(model: nn.Module, rows: Iterable[Row], *, write_tied: bool = False) -> dict[str, Planned]:
    """Like `export`, with the same checks, but each tensor is made when its `make` is called."""
    rows, targets = list(rows), slots(model)
    refuse(name_problems(targets, rows))
    groups = group_by_name((row.source, row) for row in rows)
    planned = {source: _planned(source, group, targets) for source, group in groups.items()}
    for row in rows:
        if row.tied is None:
            continue
        if row.tied not in planned:
            raise ValueError(f"{row}: tied to {row.tied!r}, which no row writes")
        if not same_bits(planned[row.source].make(), planned[row.tied].make()):
            raise ValueError(
                f"{row.target!r} no longer equals the weight that the checkpoint ties it to: {row.source!r} would "
                f"differ from {row.tied!r}. Export with rows that do not tie them (and a config that says so)"
            )
    tied = {row.source for row in rows if row.tied is not None}
    return {name: tensor for name, tensor in planned.items() if write_tied or name not in tied}


def _planned(source: str, group: Sequence[Row], targets: Mapping[str, Slot]) -> Planned:
    """A tensor of the checkpoint, made from all parameters that are parts of it."""
    parameters = [targets[row.target].tensor.detach() for row in group]
    shape = group[0].source_shape(parameters[0].shape)
    check_coverage(group, [tensor.shape for tensor in parameters], shape)
    if len({tensor.dtype for tensor in parameters}) > 1:
        parts = ", ".join(f"{row.target!r} {tensor.dtype}" for row, tensor in zip(group, parameters, strict=True))
        raise ValueError(f"the parts of {source!r} have different dtypes: {parts}")

    def make() -> Tensor:
        if len(group) == 1 and not group[0].partial_dims:
            return group[0].to_source(parameters[0])
        whole = parameters[0].new_empty(shape)
        for row, tensor in zip(group, parameters, strict=True):
            row.write(tensor, whole)
        return whole

    return Planned(tuple(shape), parameters[0].dtype, make)
