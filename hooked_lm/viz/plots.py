"""Figures of bars, and of attention patterns."""

import html
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.viz.attention_heads import LONG, Heads, Layers, check_tokens, chosen_heads, head_label, layers_of
from hooked_lm.viz.figure import (
    Interval,
    Values,
    and_missing,
    as_numbers,
    ends_of,
    finite,
    room_above,
    said_of,
    style,
    widen,
)
from hooked_lm.viz.heatmaps import evenly, heatmap
from hooked_lm.viz.labels import LETTER, MOST, Axis
from hooked_lm.viz.numbers import rounded, short
from hooked_lm.viz.scales import usual_limit
from hooked_lm.viz.theme import DOWN, FAINT, GRID, INK, PAPER, UP

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = lazy_import("plotly.graph_objects", "viz")

MOST_UPRIGHT, MOST_DOWN = 24, 80  # bars with turned labels beside each other; labels below each other
SHORT = 10  # tokens of patterns that are small enough for four in a row


def bars(
    values: Values,  # [bar]
    labels: Sequence[Any] | None = None,
    interval: Interval | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    baselines: Mapping[str, float] | None = None,
    subtitle: str = "",
    note: str = "",
    references: Collection[str] = (),
) -> "go.Figure":
    """A bar chart, with optional confidence intervals. Bars without a value and infinite ones are left out, and counted below
    the title. More than 24 with long labels are drawn from left to right, the first at the top.

    Args:
        labels: one for each bar; may contain duplicates. Indices if None.
        interval: the lower and upper bounds of each bar.
        baselines: values with a name, drawn as lines; bars start from the first one instead of zero.
        subtitle: a line below the title, such as what the intervals are.
        note: the last line on hover, such as the number of prompts.
        references: the labels of bars to compare with, such as random directions, which are grey.

    Raises ValueError for the wrong number of labels, or an interval of another shape.

    >>> import torch
    >>> figure = bars(
    ...     torch.tensor([0.5, -0.25]),
    ...     ["L1H7", "L2H1"],
    ...     (torch.tensor([0.25, -0.5]), torch.tensor([1.0, 0.0])),
    ... )
    >>> figure.data[0].error_y.array, figure.data[0].error_y.arrayminus
    (array([0.5 , 0.25], dtype=float32), array([0.25, 0.25], dtype=float32))
    """
    heights = _of_one_axis(values)
    start = next(iter(finite(baselines).values()), 0.0)
    axis = Axis.of(labels, len(heights), "bars", x_title)
    ends = ends_of(heights, interval)
    said = and_missing(subtitle, heights, baselines)
    looks = {"base": start or None, **_looks(heights, start, axis, note, ends, references)}
    if len(heights) > MOST_UPRIGHT and axis.is_turned:
        figure = _sideways(heights - start, axis, _whiskers(heights, ends), looks, title, said, y_title)
        mark_levels(figure, baselines, upright=False)
        return figure
    places, lengths = list(range(len(heights))), (heights - start).numpy()
    figure = go.Figure(go.Bar(x=places, y=lengths, width=0.6, error_y=_whiskers(heights, ends), **looks))
    top, bottom = room_above(title, said), axis.height
    style(figure, title, height=200 + top + bottom, margin={"t": top, "b": bottom, "l": axis.left}, subtitle=said)
    figure.update_layout(plot_bgcolor=PAPER)
    widen(figure, 140 + round(0.75 * axis.width) + 12 * min(len(heights), MOST))
    figure.update_xaxes(axis.settings(True))
    figure.update_yaxes(_ruler(y_title))
    mark_levels(figure, baselines)
    return figure


def contributions(
    values: Values,  # [part]
    labels: Sequence[Any] | None = None,
    interval: Interval | None = None,
    title: str = "",
    value_name: str = "",
    n: int = 24,
    subtitle: str = "",
    note: str = "",
) -> "go.Figure":
    """What each part adds to a whole, such as the heads to a logit: bars from left to right, sorted from the most positive to
    the most negative, with optional confidence intervals.

    Args:
        labels: one for each part; may contain duplicates. Indices if None.
        interval: the lower and upper bounds of each part.
        value_name: what is measured, with its unit.
        n: the number of parts with the largest absolute values that are drawn, from 1. The sum of the others is said below the
            title.
        subtitle: a line below the title.
        note: the last line on hover, such as the number of prompts.

    Raises ValueError for the wrong number of labels, or an interval of another shape.

    >>> import torch
    >>> figure = contributions(
    ...     torch.tensor([0.5, -0.25, 0.01]), ["L1H7", "L2H1", "mlp 0"], n=2
    ... )
    >>> figure.layout.yaxis.ticktext, figure.layout.title.subtitle.text
    (('L1H7', 'L2H1'), '2 of 3 parts; the others add up to 0.01')
    """
    if n < 1:
        raise ValueError(f"n is the number of parts that are drawn, from 1, got {n}")
    sums = _of_one_axis(values)
    whole, ends = Axis.of(labels, len(sums), "bars"), ends_of(sums, interval)
    sizes = sums.abs().nan_to_num(nan=-1.0, posinf=-1.0)
    kept, others = (part.tolist() for part in sizes.argsort(descending=True, stable=True).tensor_split([n]))
    order = sorted((i for i in kept if sizes[i] >= 0), key=lambda i: -float(sums[i]))
    rest = short(float(sums[others].nan_to_num(0.0, 0.0, 0.0).sum()))
    said = f"{len(order)} of {len(sums)} parts; the others add up to {rest}" if others else ""
    said = and_missing("; ".join(filter(None, [subtitle, said])), sums)
    axis, shown = Axis(tuple(whole.names[i] for i in order), ""), sums[order]
    bounds = None if ends is None else ends[order]
    return _sideways(
        shown, axis, _whiskers(shown, bounds), _looks(shown, 0.0, axis, note, bounds), title, said, value_name
    )


def _sideways(
    lengths: Float[Tensor, " bar"],
    axis: Axis,
    whiskers: dict[str, Any] | None,
    looks: dict[str, Any],
    title: str,
    subtitle: str,
    value_name: str,
) -> "go.Figure":
    """Bars from left to right, the first at the top."""
    axis, n = replace(axis, most=MOST_DOWN), len(lengths)
    bars = {"x": lengths.numpy(), "y": list(range(n)), "error_x": whiskers}
    figure = go.Figure(go.Bar(**bars, orientation="h", width=0.7, **looks))
    top, height = room_above(title, subtitle), max(120, 20 * min(n, MOST_DOWN))
    style(figure, title, height=height + top + 56, margin={"t": top, "b": 56}, subtitle=subtitle)
    figure.update_layout(plot_bgcolor=PAPER)
    widen(figure, axis.width + 180)
    figure.update_yaxes(axis.settings(False), range=[n - 0.5, -0.5])
    figure.update_xaxes(_ruler(value_name))
    return figure


def _of_one_axis(values: Values) -> Float[Tensor, " bar"]:
    """The values of bars. Raises ValueError for values with several axes."""
    found = as_numbers(values)
    if found.ndim != 1:
        raise ValueError(f"values of bars have one axis, got {list(found.shape)}: heatmap draws two")
    return found


def _looks(
    heights: Tensor, start: float, axis: Axis, note: str, ends: np.ndarray | None, references: Collection[str] = ()
) -> dict[str, Any]:
    """The colours and hover texts of bars."""
    said = said_of(note, has_interval=ends is not None)
    signs = [DOWN if number < start else UP for number in heights.tolist()]
    colours = [FAINT if name in references else sign for name, sign in zip(axis.names, signs, strict=True)]
    return {
        "marker": {"color": colours},
        "customdata": ends,
        "text": [rounded(number, 3) for number in heights.tolist()],
        "textposition": "none",
        "hovertext": [html.escape(name, quote=False) for name in axis.names],
        "hovertemplate": f"%{{hovertext}}<br><b>%{{text}}</b>{said}<extra></extra>",
    }


def _whiskers(heights: Tensor, ends: np.ndarray | None) -> dict[str, Any] | None:
    """The intervals of bars, as lines."""
    if ends is None:
        return None
    below, above = heights.numpy() - ends[..., 0], ends[..., 1] - heights.numpy()
    line = {"color": INK, "thickness": 1.2, "width": 5}
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, **line}


def _ruler(title: str) -> dict[str, Any]:
    """The axis along which bars reach."""
    name = {"text": html.escape(title, quote=False), "font": {"size": 12, "color": FAINT}}
    return {"gridcolor": GRID, "zerolinecolor": FAINT, "tickfont": {"size": 11}, "title": name}


def mark_levels(figure: "go.Figure", levels: Mapping[str, float] | None, upright: bool = True) -> None:
    """Adds a dashed line for each named value: of the vertical axis, with its name in the right margin, or of the horizontal
    one, with its name above the bars."""
    named = {name: (html.escape(name, quote=False), short(level)) for name, level in finite(levels).items()}
    for name, level in finite(levels).items():
        text = {"text": "<br>".join(named[name]), "font": {"size": 11, "color": FAINT}, "align": "left", "xshift": 4}
        line = {"color": FAINT, "width": 1, "dash": "dash"}
        if upright:
            figure.add_hline(level, line=line, annotation=text, annotation_position="right")
        else:
            figure.add_vline(level, line=line)
            text |= {"text": " ".join(named[name]), "xshift": 0, "y": 1, "yref": "paper", "yanchor": "bottom"}
            figure.add_annotation(x=level, showarrow=False, **text)
    if named and not upright:
        figure.update_layout(height=figure.layout.height + 18, margin={"t": figure.layout.margin.t + 18})
    elif named:
        longest = max(len(part) for parts in named.values() for part in parts)
        figure.update_layout(margin={"r": max(20, round(LETTER * longest) + 12)})


def attention_patterns(
    pattern: Layers,
    tokens: Sequence[str],
    head_labels: Sequence[str] | None = None,
    title: str = "",
    columns: int | None = None,
    *,
    key_tokens: Sequence[str] | None = None,
    heads: Heads | None = None,
) -> "go.Figure":
    """Attention patterns, one panel for each head; rows are queries, columns keys.

    Args:
        pattern: one layer [head, query_pos, key_pos], or several: a list from layer 0 on, or a dict by layer. Layers may have a
            batch of one prompt in front, as in a cache, which is dropped.
        tokens: one for each query, as strings.
        head_labels: a title for each panel; if None, labels such as "L1H7", or "head 7" in a layer without a number.
        columns: the number of panels in a row; None: at most four short ones or two long ones, as many in each row as possible.
        key_tokens: one for each key, where they differ from the queries, as in cross-attention.
        heads: show these alone, in this order: labels such as "L1H7", or indices in a single layer. Heads of a part of a layer,
            `pattern[[0, 7]]`, are counted from 0: choose them here, or name them with `head_labels`.

    Raises ValueError for other shapes, a batch of several prompts, tokens and labels that do not fit, heads that do not exist,
    and more than 32 heads.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> _, cache = model.run_with_cache("When Mary and John left")
    >>> tokens = model.to_str_tokens("When Mary and John left")
    >>> figure = attention_patterns({1: cache["pattern", 1]}, tokens, heads=["L1H0", "L1H7"])
    >>> [title.text for title in figure.layout.annotations]
    ['L1H0', 'L1H7']
    """
    layers = layers_of(pattern)
    places = chosen_heads(layers, heads)
    n_queries, n_keys = next(iter(layers.values())).shape[1:]
    check_tokens(tokens, key_tokens, n_queries, n_keys)
    known = [f"head {head}" if layer is None else head_label(layer, head) for layer, head in places]
    labels = known if head_labels is None else list(head_labels)
    if len(labels) != len(places):
        raise ValueError(f"{len(labels)} head labels for {len(places)} heads")
    shown = torch.stack([layers[layer][head].detach().float().cpu() for layer, head in places])
    looks: dict[str, Any] = {"x_title": "key", "y_title": "query", "value_name": "weight", "limit": 1.0}
    if max(n_queries, n_keys) > LONG:
        looks["limit"] = [usual_limit(each) for each in shown]
        labels = [f"{label}, colours to {short(end)}" for label, end in zip(labels, looks["limit"], strict=True)]
    across = columns or evenly(len(places), 4 if n_keys <= SHORT else 2)
    return heatmap(
        shown, tokens if key_tokens is None else key_tokens, tokens, title, **looks, panels=labels, columns=across
    )
