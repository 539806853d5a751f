"""Turns of a conversation along an axis of positions: kept in `about` of a result, for figures and for means of each turn."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hooked_lm.hooks.token_labels import TokenLabel, current, token_groups
from hooked_lm.results.labels import POSITION, Label

TURNS = "turns"  # in `about`: the start, the stop, and the turn, role and part of each stretch of tokens with one label
AXIS = "position"
Axes = Mapping[str, Sequence[Label]]


def turns_read_now() -> dict[str, Any]:
    """For `about`: the turns of the conversation that is read now, where all rows agree; nothing for prompts without roles."""
    rows = current()
    if not rows:
        return {}
    columns = [each[0] if len({*each}) == 1 else None for each in zip(*rows, strict=True)]
    return {TURNS: stretches(columns)}


def stretches(labels: Sequence[TokenLabel | None]) -> list[list[Any]]:
    """[start, stop, turn, role, part] of each stretch of equal labels.

    >>> stretches(
    ...     [TokenLabel(-1, "template", "marker"), *[TokenLabel(0, "user", "content")] * 3]
    ... )
    [[0, 1, -1, 'template', 'marker'], [1, 4, 0, 'user', 'content']]
    """
    found = []
    for label, several in groupby(enumerate(labels), key=lambda each: each[1]):
        places = [place for place, _ in several]
        found += [[places[0], places[-1] + 1, *label]] if label is not None else []
    return found


def turns_along(about: Mapping[str, Any], labels: Sequence[Label]) -> list[TokenLabel | None] | None:
    """What the token of each label of an axis of positions is; None for what no label tells, or if `about` has no turns."""
    if TURNS not in about:
        return None
    by_place = {place: TokenLabel(*label) for start, stop, *label in about[TURNS] for place in range(start, stop)}
    return [by_place.get(place) if (place := _number(label)) is not None else None for label in labels]


def _number(label: Label) -> int | None:
    """The number of a position such as "10  Mary"."""
    if isinstance(label, int):
        return label
    found = POSITION.fullmatch(label)
    return int(found[1]) if found else None


def means_by(axes: Axes, about: Mapping[str, Any], by: str) -> tuple[Axes, dict[str, Any], Callable[[Tensor], Tensor]]:
    """The axes and `about` of means over positions, and the function of values that takes them; raises as `Scores.mean_by`."""
    labels = None if AXIS not in axes else turns_along(about, axes[AXIS])
    if labels is None:
        which = "has, of prompts without roles" if AXIS in axes else "lacks"
        raise ValueError(
            f"means by {by} need an axis 'position' of a conversation, which this result ({', '.join(axes)}) {which}: give "
            "model.chat(messages) as the prompt"
        )
    if unknown := [label for label, token in zip(axes[AXIS], labels, strict=True) if token is None]:
        raise ValueError(f"position {unknown[0]!r} is not of the same {by} in all prompts, so that there are no means")
    groups = token_groups([token for token in labels if token is not None], by)
    at = list(axes).index(AXIS)

    def means(values: Tensor) -> Tensor:
        return torch.stack([values[(slice(None),) * at + (places,)].mean(at) for places in groups.values()], at)

    others = {name: value for name, value in about.items() if name != TURNS}
    return {by if name == AXIS else name: [*groups] if name == AXIS else of for name, of in axes.items()}, others, means
