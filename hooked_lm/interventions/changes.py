"""Converts hooks as users give them (objects, pairs, lists of these) to the changes that the engine applies."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hooked_lm.engine.edit import Change, Edit, Rewrite
from hooked_lm.engine.meta_values import meta_values
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.hooks.hook_spec import parse_hook
from hooked_lm.hooks.select import is_shorthand
from hooked_lm.interventions.base import Controller, Detector, HookObject, rewrite
from hooked_lm.models.vision.inputs import Rows

GivenHooks = Any  # a hook object, a pair (site, function), a change of the engine, or a sequence of these
PARTS = {"heads": "H", "positions": "pos", "features": "feature", "feature": "feature", "rows": "row", "rest": "rest"}
ERRORS = (IndexError, KeyError, TypeError, ValueError)


def changes_of(
    model: HookedRootModule,
    tokens: Rows,
    cells: Sequence[GivenHooks],
    names: Sequence[str] = (),
) -> list[list[Change]]:
    """The changes that the hooks of each cell make in a forward pass of these tokens.

    Raises the errors of the hooks in advance, with the cell and the hook: KeyError for a site that does not exist, IndexError
    for an index out of range, ValueError for settings that do not fit the site; TypeError for a hook that changes no value,
    such as a detector or a controller of gradients.
    """
    labels = names or [str(number) for number in range(len(cells))]
    known: dict[Any, list[HookPoint]] = {}
    located = [
        [(hook, point) for hook in listed_hooks(cell) for point in _points(model, hook, label, known)]
        for label, cell in zip(labels, cells, strict=True)
    ]
    sites = {point.name or "" for cell in located for _, point in cell}
    like = meta_values(model, tokens, sites) if sites else {}
    return [
        [_change(hook, point, like, label) for hook, point in cell] for label, cell in zip(labels, located, strict=True)
    ]


def listed_hooks(cell: GivenHooks) -> list[Any]:
    """The enabled hooks of a cell, in the order in which they run."""
    hooks = [hook for hook in _flat(cell) if not isinstance(hook, HookObject) or hook.is_enabled]
    return sorted(hooks, key=lambda hook: getattr(hook, "when", "post") != "pre")


def _flat(cell: GivenHooks) -> Iterator[Any]:
    is_pair = isinstance(cell, tuple) and len(cell) == 2 and callable(cell[1]) and not hasattr(cell[1], "hook_point")
    if isinstance(cell, (list, tuple)) and not is_pair:
        for part in cell:
            yield from _flat(part)
    else:
        yield cell


def _points(model: HookedRootModule, hook: object, cell: str, known: dict[Any, list[HookPoint]]) -> list[HookPoint]:
    """The points at which a hook acts; raises TypeError if it changes no value. `known` caches the points of sites."""
    try:
        if isinstance(hook, (Edit, Rewrite)):
            return model.points(hook.site)
        site, function, direction, when = parse_hook(hook)
        if isinstance(function, Detector) or (hasattr(function, "companions") and function.companions):
            raise TypeError("it only reads values; a cell consists of hooks that change values")
        if direction == "bwd":
            raise TypeError("it changes gradients, and a sweep computes none")
        parts = site if isinstance(site, tuple) else (site,)
        if not all(isinstance(part, (str, int)) for part in parts):
            return model.points_for(site, when)
        if (site, when) not in known:
            known[site, when] = model.points_for(site, when)
        return known[site, when]
    except ERRORS as error:
        raise _named(error, cell, hook) from error


def _change(hook: object, point: HookPoint, like: Mapping[str, Tensor], cell: str) -> Change:
    if isinstance(hook, (Edit, Rewrite)):
        return hook
    if not isinstance(hook, Controller):
        return rewrite(parse_hook(hook).function, point)
    try:
        return hook.as_edit(point, like.get(point.name or ""))
    except ERRORS as error:
        raise _named(error, cell, hook) from error


def _named(error: Exception, cell: str, hook: object) -> Exception:
    """The same error with the cell and the hook in its message."""
    return type(error)(f"cell '{cell}', {hook!r}: {error}")


# ---- labels ----------------------------------------------------------------------------------------------------------


def labels_of(model: HookedRootModule, cells: Sequence[GivenHooks]) -> list[str]:
    """A label for each cell, such as "ZeroAblate z L5H3"; duplicates are numbered."""
    labels: list[str] = []
    for cell in cells:
        label = " + ".join(map(label_of, listed_hooks(cell))) or "unchanged"
        others = sum(one == label or one.startswith(f"{label} (") for one in labels)
        labels.append(f"{label} ({others + 1})" if others else label)
    return labels


def label_of(hook: object) -> str:
    """A short description of a hook: what it does, and where.

    >>> from hooked_lm.interventions import ZeroAblate
    >>> (
    ...     label_of(ZeroAblate("z", 5, heads=[3], positions=-1)),
    ...     label_of(ZeroAblate("resid_pre", 2)),
    ... )
    ('ZeroAblate z L5H3 pos -1', 'ZeroAblate resid_pre L2')
    """
    if isinstance(hook, (Edit, Rewrite)):
        return f"{type(hook).__name__} {hook.site}"
    site, function, _, _ = parse_hook(hook)
    if not isinstance(function, HookObject):
        return f"{getattr(function, '__name__', type(function).__name__)} {_site(site)}"
    words = [type(function).__name__, _site(site)]
    for name, word in PARTS.items():
        given = vars(function).get(name)
        if isinstance(given, Sequence) and len(given) == 1 and not isinstance(given, str):
            given = given[0]
        if given not in (None, ()):
            words.append(f"{word}{given}" if name == "heads" else f"{word} {given}")
    return " ".join(words).replace(" H", "H") if words[1][-1].isdigit() else " ".join(words)


def _site(site: Any) -> str:
    """A short description of a site: "z L5" for ("z", 5)."""
    if is_shorthand(site) and len(site) == 2 and isinstance(site[0], str):
        return f"{site[0]} L{site[1]}"
    return site if isinstance(site, str) else repr(site)
