"""Which sites may be edited without a change of the logits: many in one run, each in a row of the batch.

Sites that a plain run passes are edited together. A component computes the others for listeners alone, some in place of what it
computes otherwise, so a run edits only one of each component: the component sees one listener, as in a run of that site alone.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.hooks import HookPoint
from tests.families._models import distance
from tests.families._sites import sizes


def dead_sites(model: HookedTransformer, tokens: Tensor) -> list[str]:
    """The sites that are edited without effect, for one prompt of shape [1, pos].

    Experts to whom no token went have nothing to edit, and the positions of an expert's tokens are for information.
    """
    points = {name: x for name, x in model.all_points().items() if not name.endswith("hook_routed_positions")}
    clean, passed = passed_by(lambda: model(tokens))
    dead, edited = list[str](), set[str]()
    for names in edited_together(points, passed):
        dead += dead_rows(model, tokens, clean, points, names, edited)
    routed = {name for name, point in points.items() if point.dims[0] == "routed"}
    assert not routed or routed & edited, "no token went to any expert"
    return [name for name in points if name in dead and (name in edited or name not in routed)]


def passed_by(run: Callable[[], Any]) -> tuple[Any, set[str]]:
    """What a run gives to which nobody listens, and the sites that are computed even so."""
    passed, call = set[str](), HookPoint.__call__

    def recorded(point: HookPoint, value: Any) -> Any:
        passed.add(point.name or "")
        return call(point, value)

    with patch.object(HookPoint, "__call__", recorded):
        return run(), passed


def edited_together(names: Iterable[str], passed: set[str]) -> Iterator[list[str]]:
    """The sites of each run."""
    names = list(names)
    everywhere = [name for name in names if name in passed]
    yield from ([everywhere] if everywhere else [])
    yield from rounds(name for name in names if name not in passed)


# what so many copies of the inputs give with these hooks
Ask = Callable[[int, list[tuple[str, Any]]], Sequence[Tensor]]


def without_effect(
    model: Any, ask: Ask, bend: Callable[[Tensor, Any], Tensor], least: float, together: bool = True
) -> list[str]:
    """The sites that are edited without a change of at least `least` in any output, of a model of any class.

    Each is edited in its own copy of the inputs; and alone, if that shows no effect, or if copies may not run `together`.
    """
    points = model.all_points()
    clean, passed = passed_by(lambda: ask(1, []))

    def unchanged(found: Sequence[Tensor]) -> bool:
        return all(distance(out, expected) < least for out, expected in zip(found, clean, strict=True))

    names = [name for name, point in points.items() if together and point.dims[0] != "routed"]
    alone = [name for name in points if name not in names]
    for some in edited_together(names, passed):
        place = {name: i for i, name in enumerate(some)}

        def edit(value: Tensor, hook: Any, place: dict[str, int] = place) -> Tensor:
            if len(value) % len(place):
                return value
            value, own = value.clone(), share(value, place[hook.name], len(place))
            value[own] = bend(value[own], hook)
            return value

        outputs = ask(len(some), [(name, edit) for name in some])
        alone += [name for name, i in place.items() if unchanged([out[share(out, i, len(some))] for out in outputs])]
    return [name for name in alone if unchanged(ask(1, [(name, bend)]))]


def share(value: Tensor, i: int, n: int) -> slice:
    """The rows of copy `i` of `n`."""
    return slice(i * len(value) // n, (i + 1) * len(value) // n)


def rounds(names: Iterable[str]) -> Iterator[list[str]]:
    """The sites, one of each component at a time."""
    by_component: dict[str, list[str]] = {}
    for name in names:
        by_component.setdefault(component(name), []).append(name)
    return ([name for name in names if name is not None] for names in zip_longest(*by_component.values()))


def component(name: str) -> str:
    return name.rpartition(".")[0]


def dead_rows(
    model: HookedTransformer,
    tokens: Tensor,
    clean: Tensor,
    points: dict[str, HookPoint],
    names: list[str],
    edited: set[str],
) -> list[str]:
    """The sites among these that are edited without effect, in one run with a row for each; adds to `edited` what was there."""
    rows = {name: row for row, name in enumerate(names)}
    rows_of_tokens: dict[str, Tensor] = {}  # of each expert

    def keep_rows(value: Tensor, hook: Any) -> None:
        rows_of_tokens[component(hook.name)] = value[:, 0]

    def edit(value: Tensor, hook: Any) -> Tensor:
        routed = hook.dims[0] == "routed"
        lines = rows_of_tokens[component(hook.name)] if routed else torch.arange(len(value))
        own = lines == rows[hook.name]
        edited.update([hook.name] if own.any() else [])
        value = value.clone()
        value[own] = bent(value[own], n_values(model, hook.name), hook.dims)
        return value

    experts = {component(name) for name in names if points[name].dims[0] == "routed"}
    hooks = [*((f"{expert}.hook_routed_positions", keep_rows) for expert in experts), *((name, edit) for name in names)]
    changed = (model.run_with_hooks(tokens.expand(len(names), -1), fwd_hooks=hooks) - clean).abs().amax((1, 2))
    return [name for name, change in zip(names, changed.tolist(), strict=True) if change < 1e-3]


def bent(value: Tensor, n_values: int, dims: tuple[str, ...]) -> Tensor:
    """Another value of the same shape; not a mere scale, which norms would not see. A mask then hides nothing.

    The divisors of pooled keys differ between blocks, as a common one would not change which of them an indexer chooses.
    """
    if value.dtype is torch.bool:
        return torch.ones_like(value)
    if not value.is_floating_point():
        return (value + 1) % n_values
    if dims[-2:] == ("block", "1"):
        return value * torch.linspace(0.5, 1.5, value.shape[1])[:, None]
    return value * torch.linspace(0.5, 1.5, value.shape[-1])


def n_values(model: HookedTransformer, name: str) -> int:
    """How many values an integer site may take: tokens of the vocabulary, or experts."""
    lengths = sizes(model.cfg.tree, name, 1, 8)
    return lengths["d_vocab"] if name == "hook_tokens" else lengths.get("expert", 8)


class Ignored(HookPoint):
    """A dead point: its hooks run, and the model goes on with the value from before."""

    def __call__(self, value: Any) -> Any:
        super().__call__(value)
        return value
