"""Labels of axes, and which entries of an axis `Scores.select` means: labels, indices, tokens and heads."""

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, SupportsIndex

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.hooks.head_labels import LABEL, parse_head_label

Label = str | int
"""The label of one entry of an axis, such as `"L1H7"` or the layer `3`."""
Wanted = Label | SupportsIndex | Iterable[Label | SupportsIndex]  # one entry of an axis, or several
# of the tables, which are not allowed as names of axes
COLUMNS = ("prompt", "value", "effect", "restored", "kept", "mean", "low", "high")
APART = ("metric", "statistic")  # axes whose labels have units of their own
POSITION = re.compile(r"(\d+) (.*)", re.DOTALL)  # "10  Mary": the position and its token


def check_labels(axes: Mapping[str, Sequence[Label]]) -> None:
    """Raises ValueError for an axis called as a column, and for labels of the wrong type or two alike."""
    for name, labels in axes.items():
        if name in COLUMNS:
            raise ValueError(f"an axis cannot be called {name!r}: the tables have a column of that name")
        if odd := [label for label in labels if not isinstance(label, Label) or isinstance(label, bool)]:
            raise ValueError(f"labels are strings or ints, and axis {name!r} has {odd[0]!r}")
        if len(set(labels)) < len(labels):
            twice = next(label for label in labels if labels.count(label) > 1)
            raise ValueError(f"axis {name!r} has the label {twice!r} twice")


def chosen_places(axes: Mapping[str, Sequence[Label]], wanted: Mapping[str, Wanted]) -> dict[str, int | list[int]]:
    """The index or indices in each axis. Raises ValueError for unknown axes, and for unknown or ambiguous labels.

    >>> axes = {"layer": [0, 1], "head": [0, 1, 2], "position": ["0 <bos>", "1  Mary"]}
    >>> chosen_places(axes, {"layer": -1, "head": [2, 0], "position": " Mary"})
    {'layer': 1, 'head': [2, 0], 'position': 1}
    >>> chosen_places(axes, {"head": "L1H2"})
    {'head': 2, 'layer': 1}
    """
    if unknown := [name for name in wanted if name not in axes]:
        raise ValueError(f"there is no axis {unknown[0]!r}; the axes are {', '.join(axes) or 'none'}")
    wanted = {name: _listed(some) for name, some in wanted.items()}
    return {
        name: [_place(name, axes[name], one) for one in some]
        if isinstance(some, list)
        else _place(name, axes[name], some)
        for name, some in _layers_of_heads(axes, wanted).items()
    }


def _listed(wanted: Any) -> Any:
    """Several entries as a list; one entry unchanged."""
    is_one = isinstance(wanted, str) or not isinstance(wanted, Iterable) or getattr(wanted, "ndim", 1) == 0
    return wanted if is_one else list(wanted)


def _layers_of_heads(axes: Mapping[str, Sequence[Label]], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The choices with heads such as "L1H7" replaced by a layer and the index of a head."""
    found: dict[str, Any] = dict(wanted)
    for name, some in wanted.items():
        layers = name.removesuffix("head") + "layer"
        if not name.endswith("head") or layers not in axes:
            continue
        heads = some if isinstance(some, list) else [some]
        labels = [head for head in heads if isinstance(head, str) and LABEL.fullmatch(head) and head not in axes[name]]
        if not labels:
            continue
        own = {parse_head_label(label)[0] for label in labels}
        if len(own) > 1 or len(labels) < len(heads):
            raise ValueError(f"{name}={some!r} is not a part of the grid: select heads of one layer at a time")
        [layer] = own
        if found.setdefault(layers, layer) != layer:
            raise ValueError(f"head {labels[0]!r} is in layer {layer}, and {layers}={found[layers]!r} was given")
        numbers = [parse_head_label(label)[1] for label in labels]
        found[name] = numbers if isinstance(some, list) else numbers[0]
    return found


def _place(name: str, labels: Sequence[Label], wanted: Any) -> int:
    """The index of a label, of an integer (see `Scores.select`) or of the position of a token."""
    if not isinstance(wanted, bool) and wanted in labels:
        return labels.index(wanted)
    tokens = [found if isinstance(label, str) and (found := POSITION.fullmatch(label)) else None for label in labels]
    if isinstance(wanted, str):
        same = [i for i, token in enumerate(tokens) if token is not None and token[2] == wanted]
    else:
        same = _numbered(
            [label if token is None else int(token[1]) for label, token in zip(labels, tokens, strict=True)], wanted
        )
    if len(same) == 1:
        return same[0]
    if same:
        several = ", ".join(repr(labels[i]) for i in same)
        raise ValueError(f"{wanted!r} is {len(same)} labels of axis {name!r}: {several}; give one of these")
    shown = ", ".join(map(repr, labels[:12])) + (f", ... {len(labels)} in all" if len(labels) > 12 else "")
    raise ValueError(f"axis {name!r} has no label {wanted!r}{_nearest(labels, tokens, wanted)}; its labels are {shown}")


def _numbered(numbers: Sequence[Label], wanted: Any) -> list[int]:
    """The indices that an integer means in an axis: those of an equal number, of an axis without numbers any index, and of an
    axis of ascending numbers from 0 on an index from its end."""
    try:
        index = operator.index(wanted)
    except TypeError:
        return []
    if isinstance(wanted, bool):
        return []
    if index in numbers:
        return [numbers.index(index)]
    is_word = [isinstance(number, str) for number in numbers]
    if all(is_word):
        return [range(len(numbers))[index]] if -len(numbers) <= index < len(numbers) else []
    if any(is_word) or not -len(numbers) <= index < 0:
        return []
    is_ascending = sorted(numbers) == list(numbers) and numbers[0] >= 0  # type: ignore[operator]
    return [len(numbers) + index] if is_ascending else []


def _nearest(labels: Sequence[Label], tokens: Sequence[re.Match[str] | None], wanted: object) -> str:
    """The labels that are most similar to a string, for an error."""
    if not isinstance(wanted, str):
        return ""
    words = {str(label): label for label in labels} | {
        token[2]: label for token, label in zip(tokens, labels, strict=True) if token is not None
    }
    near = dict.fromkeys(words[word] for word in get_close_matches(wanted, words, 3, 0.5))
    return f"; did you mean {', '.join(map(repr, near))}?" if near else ""


def headline(of: str, axes: Mapping[str, Sequence[Label]]) -> str:
    """The title of a figure of which all that is known is what the values are.

    >>> headline("loss", {"layer": [0, 1], "position": [0, 1]}), headline("loss", {})
    ('Loss by layer and position', 'Loss')
    """
    long = [name for name, labels in axes.items() if len(labels) > 1 and name not in APART]
    *first, last = [name.replace("_", " ") for name in long] or [""]
    by = f" by {' and '.join(filter(None, [', '.join(first), last]))}" if last else ""
    return f"{of[0].upper()}{of[1:]}{by}" if of else ""


def labels_at(axes: list[list[Label]], place: int) -> list[Label]:
    """The label on each axis of a place in the flattened grid."""
    found: list[Label] = []
    for labels in reversed(axes):
        place, at = divmod(place, len(labels))
        found.insert(0, labels[at])
    return found


def entries_at(of_metrics: Tensor | list[bool] | None, index: int | list[int]) -> Tensor | list[bool] | None:
    """The entries of some metrics; that of one metric in a list is still a list."""
    if isinstance(of_metrics, list):
        return [of_metrics[i] for i in ([index] if isinstance(index, int) else index)]
    return None if of_metrics is None else of_metrics[index]


def over_image(
    values: Float[Tensor, "*axis patch"], labels: Sequence[Label]
) -> Float[Tensor, "*axis row column"] | None:
    """Values of patches by their places, for labels such as "0,1"; NaN where there is none. Labels without a place are left out;
    None if no label is one.

    >>> over_image(torch.tensor([9.0, 1.0, 2.0]), [0, "0,0", "1,0"])
    tensor([[1.],
            [2.]])
    """
    places = {i: tuple(map(int, label.split(","))) for i, label in enumerate(labels) if isinstance(label, str)}
    if not places:
        return None
    n_rows, n_columns = (max(place) + 1 for place in zip(*places.values(), strict=True))
    picture = values.new_full((*values.shape[:-1], n_rows, n_columns), torch.nan)
    for index, (row, column) in places.items():
        picture[..., row, column] = values[..., index]
    return picture
