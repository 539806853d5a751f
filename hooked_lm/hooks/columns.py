"""Columns: some of the query positions of scores and patterns, for hooks that need no others.

A hook object that reads or changes some query positions only has a method `query_columns(point, shape)`, which gives them for a
value of this shape. If all hooks at the scores and the pattern of a layer have it, attention computes these rows explicitly, and
all else by its fused kernel. The point that such a hook is called with has `columns`: those of the value.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from hooked_lm.hooks.point import HookPoint

MOST_NUMBERS = 1 << 22  # of a block of rows: 16 MiB in fp32


class QueryColumns(NamedTuple):
    """Some columns of the axis of positions, ascending, of a value of a point that has `n` of them."""

    shown: Sequence[int]
    n: int
    point: HookPoint


def showing(point: HookPoint, shown: Sequence[int], n: int) -> HookPoint:
    """The point, for a value that has these of its `n` columns."""
    found = point.under_name(point.name)
    found.columns = QueryColumns(shown, n, point)
    return found


def row_blocks(n_rows: int, row_size: int) -> list[slice]:
    """The rows in blocks of so many that they have about MOST_NUMBERS numbers; one block if they are fewer."""
    size = max(1, MOST_NUMBERS // max(1, row_size))
    return [slice(start, min(start + size, n_rows)) for start in range(0, n_rows, size)]


def wanted_rows(points: Sequence[nn.Module], shape: tuple[int, int, int, int]) -> list[Sequence[int]] | None:
    """The query positions that the hooks of these points read or change, of scores [batch, head, query_pos, key_pos] of this
    shape, in blocks; None: all at once, or unknown.

    One block, if not all hooks have `in_blocks`: then a hook is called once for each block of what it reads.
    """
    found, in_blocks = set[int](), True
    for point in points:
        if not isinstance(point, HookPoint) or point._has_torch_hooks() or point._has_custom_forward():
            return None
        if point.hook_conversion is not None:
            return None
        for hook in point.active_hooks():
            kind: Any = type(hook.user_hook)
            if hook.has_aliases or not hasattr(kind, "query_columns"):
                return None
            if (columns := kind.query_columns(hook.user_hook, point, shape)) is None:
                return None
            found.update(columns)
            in_blocks = in_blocks and getattr(kind, "in_blocks", False)
    rows, (batch, n_heads, n_query, n_key) = sorted(found), shape
    if not in_blocks:
        return None if len(rows) == n_query else [rows] if rows else []
    return [rows[block] for block in row_blocks(len(rows), batch * n_heads * n_key)]
