"""From hooks as users give them (objects, pairs, lists of these) to the changes of a run that the engine carries out."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.engine.edit import Change, Edit, Rewrite
from hooked_lm.engine.experiment import obstacle
from hooked_lm.engine.site_info import places
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.hook_spec import companions_of, parse_hook
from hooked_lm.hooks.select import is_shorthand
from hooked_lm.interventions.base import Controller, Detector, HookObject, rewrite
from hooked_lm.models.decoder import Decoder

Hooks = Any  # a hook object, a pair (site, function), a change of the engine, or a sequence of these
PARTS = {"heads": "H", "positions": "pos", "features": "feature", "rows": "row", "rest": "rest"}
ERRORS = (IndexError, KeyError, TypeError, ValueError)


def changes_of(
    model: HookedRootModule, tokens: Int[Tensor, "batch pos"], cells: Sequence[Hooks], names: Sequence[str] = ()
) -> list[list[Change]]:
    """The changes that each cell of hooks makes in a run of these tokens.

    Raises, with the name of the cell and the hook, what the hooks would raise in the run: KeyError for a site that does not
    exist, IndexError for an index out of range, ValueError for settings that do not fit the site; TypeError for what changes no
    value, such as a detector or a controller of gradients.
    """
    labels = names or [str(number) for number in range(len(cells))]
    located = [
        [(hook, point) for hook in listed_hooks(cell) for point in _points(model, hook, label)]
        for label, cell in zip(labels, cells, strict=True)
    ]
    like = _values_like(model, tokens, {point.name or "" for cell in located for _, point in cell})
    return [
        [_change(hook, point, like, label) for hook, point in cell] for label, cell in zip(labels, located, strict=True)
    ]


def listed_hooks(cell: Hooks) -> list[Any]:
    """The hooks of a cell, in the order in which they run; those that are switched off left out."""
    hooks = list(_flat(cell))
    early = [hook for hook in hooks if getattr(hook, "when", "post") == "pre"]
    late = [hook for hook in hooks if getattr(hook, "when", "post") != "pre"]
    return [hook for hook in (*early, *late) if not (isinstance(hook, HookObject) and not hook.is_enabled)]


def _flat(cell: Hooks) -> Iterator[Any]:
    is_pair = isinstance(cell, tuple) and len(cell) == 2 and callable(cell[1]) and not hasattr(cell[1], "hook_point")
    if is_pair or not isinstance(cell, Sequence) or isinstance(cell, str):
        yield cell
        return
    for part in cell:
        yield from _flat(part)


def _points(model: HookedRootModule, hook: Any, cell: str) -> list[HookPoint]:
    """The points at which a hook changes something; raises TypeError if it changes no value."""
    with naming(cell, hook):
        if isinstance(hook, (Edit, Rewrite)):
            return model.points(hook.site)
        site, function, direction, when = parse_hook(hook)
        if isinstance(function, Detector) or companions_of([parse_hook(hook)]):
            raise TypeError("it watches a run, and a cell holds what changes one")
        if direction == "bwd":
            raise TypeError("it changes gradients, and the runs of a sweep have none")
        return model.points_for(site, when)


def _change(hook: Any, point: HookPoint, like: Mapping[str, Tensor], cell: str) -> Change:
    if isinstance(hook, (Edit, Rewrite)):
        return hook
    with naming(cell, hook):
        function = parse_hook(hook).function
        return (
            function.as_edit(point, like.get(point.name or ""))
            if isinstance(function, Controller)
            else rewrite(function, point)
        )


@contextmanager
def naming(cell: str, hook: Any) -> Iterator[None]:
    """Errors inside the block say in which cell and at which hook they arose."""
    try:
        yield
    except ERRORS as error:
        raise type(error)(f"cell '{cell}', {hook!r}: {error}") from error


def _values_like(model: Any, tokens: Int[Tensor, "batch pos"], sites: set[str]) -> dict[str, Tensor]:
    """Tensors on the meta device like the values at these sites, as a run of one token shows: of sites with a batch and positions
    that hold floating-point numbers. None where the engine runs whole forward passes anyway."""
    if not isinstance(model, Decoder) or obstacle(model, places(model), tokens) is not None:
        return {}
    sizes = {"batch": tokens.shape[0]} | dict.fromkeys(("pos", "query_pos", "key_pos"), tokens.shape[1])
    found: dict[str, Tensor] = {}

    def look(value: Any, hook: HookPoint) -> None:
        dims = hook.dims
        is_known = isinstance(value, Tensor) and value.ndim == len(dims) and dims[:1] == ("batch",)
        if is_known and value.is_floating_point() and (dims[1] == "pos" or "query_pos" in dims):
            shape = [sizes.get(dim, size) for dim, size in zip(dims, value.shape, strict=True)]
            found[hook.name or ""] = torch.empty(shape, dtype=value.dtype, device="meta")

    look.records = True  # type: ignore[attr-defined]
    with torch.no_grad():
        model.run_with_hooks(tokens[:1, :1], return_type=None, fwd_hooks=[(site, look) for site in sites])
    return found


# ---- labels ----------------------------------------------------------------------------------------------------------


def labels_of(model: HookedRootModule, cells: Sequence[Hooks]) -> list[str]:
    """A label for each cell, such as "ZeroAblate z L5H3"; equal ones are numbered."""
    labels: list[str] = []
    for cell in cells:
        label = " + ".join(map(label_of, listed_hooks(cell))) or "unchanged"
        others = sum(one == label or one.startswith(f"{label} (") for one in labels)
        labels.append(f"{label} ({others + 1})" if others else label)
    return labels


def label_of(hook: Any) -> str:
    """What a hook does and where, in few words.

    >>> from hooked_lm.interventions import ZeroAblate
    >>> label_of(ZeroAblate("z", 5, heads=[3], positions=-1)), label_of(ZeroAblate("resid_pre", 2))
    ('ZeroAblate z L5H3 pos -1', 'ZeroAblate resid_pre L2')
    """
    if isinstance(hook, (Edit, Rewrite)):
        return f"{type(hook).__name__} {hook.site}"
    site, function, _, _ = parse_hook(hook)
    if not isinstance(function, HookObject):
        return f"{getattr(function, '__name__', type(function).__name__)} {_site(site)}"
    words = [type(function).__name__, _site(site)]
    for name, word in PARTS.items():
        given = getattr(function, name, None)
        if isinstance(given, Sequence) and len(given) == 1 and not isinstance(given, str):
            given = given[0]
        if given not in (None, ()):
            words.append(f"{word}{given}" if name == "heads" else f"{word} {given}")
    return " ".join(words).replace(" H", "H") if words[1][-1].isdigit() else " ".join(words)


def _site(site: Any) -> str:
    """A site in few words: "z L5" for ("z", 5)."""
    if is_shorthand(site) and len(site) == 2 and isinstance(site[0], str):
        return f"{site[0]} L{site[1]}"
    return site if isinstance(site, str) else repr(site)
