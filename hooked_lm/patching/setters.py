"""Patch setters: functions that copy one part of a clean activation into the corrupted one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from hooked_lm.engine.edit import Change, Edit, Rest, Rewrite
from hooked_lm.keywords import answer_keywords

Index = Sequence[int]
PatchSetter = Callable[[Tensor, Index, Tensor], Tensor]


def _copy_part(corrupted: Tensor, clean: Tensor, *where: int | slice) -> Tensor:
    """Overwrite the index `where` in every row of the batch with the clean value."""
    corrupted[(slice(None), *where)] = clean[(slice(None), *where)]
    return corrupted


def layer_pos_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Patch index (layer, pos) of an activation [batch, pos, ...]. Edits in place and returns it, as all setters do.

    >>> import torch
    >>> layer_pos_patch_setter(torch.zeros(1, 3, 1), [0, 1], torch.ones(1, 3, 1)).flatten()
    tensor([0., 1., 0.])
    """
    _, pos = index
    return _copy_part(corrupted_activation, clean_activation, pos)


def layer_pos_head_vector_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Patch index (layer, pos, head) of an activation [batch, pos, head, ...]."""
    _, pos, head = index
    return _copy_part(corrupted_activation, clean_activation, pos, head)


def layer_head_vector_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Patch index (layer, head) of an activation [batch, pos, head, ...]."""
    _, head = index
    return _copy_part(corrupted_activation, clean_activation, slice(None), head)


def layer_head_pattern_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Patch index (layer, head) of scores or patterns [batch, head, query_pos, key_pos]."""
    _, head = index
    return _copy_part(corrupted_activation, clean_activation, head)


def layer_head_pos_pattern_patch_setter(corrupted_activation: Tensor, index: Index, clean_activation: Tensor) -> Tensor:
    """Patch index (layer, head, query_pos) of scores or patterns [batch, head, query_pos, key_pos]."""
    _, head, query_pos = index
    return _copy_part(corrupted_activation, clean_activation, head, query_pos)


def layer_head_dest_src_pos_pattern_patch_setter(
    corrupted_activation: Tensor, index: Index, clean_activation: Tensor
) -> Tensor:
    """Patch index (layer, head, query_pos, key_pos) of scores or patterns [batch, head, query_pos, key_pos]."""
    _, head, query_pos, key_pos = index
    return _copy_part(corrupted_activation, clean_activation, head, query_pos, key_pos)


@dataclass(frozen=True)
class IndexLayout:
    """The axes of a setter's index, which of them is the position, and which index the dimensions after it."""

    axes: tuple[str, ...]
    position: int | None = None
    rest: tuple[int, ...] = ()


answer_keywords(__name__, [name for name in list(globals()) if name.startswith("layer_")])  # before they are keys

PATCH_SETTERS: dict[PatchSetter, IndexLayout] = {
    layer_pos_patch_setter: IndexLayout(("layer", "pos"), 1),
    layer_pos_head_vector_patch_setter: IndexLayout(("layer", "pos", "head"), 1, (2,)),
    layer_head_vector_patch_setter: IndexLayout(("layer", "head"), None, (1,)),
    layer_head_pattern_patch_setter: IndexLayout(("layer", "head_index"), None, (1,)),
    layer_head_pos_pattern_patch_setter: IndexLayout(("layer", "head_index", "dest_pos"), 2, (1,)),
    layer_head_dest_src_pos_pattern_patch_setter: IndexLayout(
        ("layer", "head_index", "dest_pos", "src_pos"), 2, (1, 3)
    ),
}
"""The index layout of each setter."""


def change(setter: PatchSetter, site: str, index: Index, clean: Tensor, n_pos: int) -> Change:
    """The change that a setter makes at a site: an `Edit` for a setter of `PATCH_SETTERS`, otherwise a `Rewrite`."""
    layout = PATCH_SETTERS.get(setter)
    if layout is None or len(layout.axes) != len(index):
        return Rewrite(site, lambda value: setter(value, list(index), clean))
    positions = None if layout.position is None else (index[layout.position] % n_pos,)
    rest: Rest = tuple(index[axis] for axis in layout.rest)
    return Edit(site, clean, positions, rest)
