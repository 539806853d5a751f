"""Tokens with numbers: in the cells of a grid, or as views of coloured text: one with several numbers, or several texts."""

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.viz.figure import WIDEST, as_numbers, widen
from hooked_lm.viz.heatmaps import BESIDE, heatmap
from hooked_lm.viz.labels import LETTER, Axis, Who, token_label, visible
from hooked_lm.viz.numbers import short
from hooked_lm.viz.scales import ColourScale, scale_of
from hooked_lm.viz.view import View

if TYPE_CHECKING:
    import plotly.graph_objects as go
else:
    go = lazy_import("plotly.graph_objects", "viz")

Values: TypeAlias = Float[Tensor, "..."] | Sequence[float] | Mapping[str, Sequence[float] | Float[Tensor, " token"]]

Snippet: TypeAlias = tuple[
    str, Sequence[str], Sequence[float], int
]  # a label, tokens, values, the place of a token to frame

LONGEST = 60
TOKEN, FEWEST = 12, 3  # letters of a token in a grid, at most; and the room for letters below which none are written
GAP = 10  # pixels between tokens of a grid
STYLE, SCRIPT = (Path(__file__).with_suffix(kind).read_text(encoding="utf-8") for kind in (".css", ".js"))


def token_grid(
    values: Float[Tensor, "row column"],
    tokens: Sequence[Sequence[str]],
    x_labels: Sequence[Any] | None = None,
    y_labels: Sequence[Any] | None = None,
    title: str = "",
    x_title: str = "",
    y_title: str = "",
    value_name: str = "",
    limit: float | None = None,
    details: Sequence[Sequence[Sequence[str]]] | None = None,
    x_turns: Sequence[Who | None] | None = None,
) -> "go.Figure":
    """A grid of tokens, coloured by their numbers as in `heatmap`; row 0 is at the top.

    Tokens that are longer than their cells are cut, and left out where cells are very narrow. On hover a cell shows its whole
    token and its number, or its lines in `details`. `x_turns` are as in `heatmap`. Raises ValueError for tokens,
    details or labels that do not fit.

    >>> import torch
    >>> figure = token_grid(
    ...     torch.tensor([[0.1, 0.9]]), [[" the", " Paris"]], y_labels=["layer 3"]
    ... )
    >>> [list(row) for row in figure.data[0].text]
    [['·the', '·Paris']]
    """
    sizes = [len(row) for row in tokens]
    if sizes != [values.shape[1]] * values.shape[0]:
        raise ValueError(f"tokens in rows of {sizes} do not fit values {list(values.shape)}")
    shown: dict[str, Any] = {"limit": limit, "centre": 0.0, "every_cell": True, "x_turns": x_turns}
    figure = heatmap(values, x_labels, y_labels, title, x_title, y_title, value_name, **shown)
    longest = max((len(visible(token, TOKEN)) for row in tokens for token in row), default=0)
    beside, letter = BESIDE + Axis.of(y_labels, len(tokens), "rows").width, LETTER + GAP / max(longest, 1)
    widen(figure, beside + round(values.shape[1] * longest * letter))
    fits = int((WIDEST - beside) / max(values.shape[1], 1) / letter)
    whole, cut = (
        [[token_label(token, n) if token and n >= FEWEST else "" for token in row] for row in tokens]
        for n in (LONGEST, min(TOKEN, fits))
    )
    figure.data[0].update(
        text=cut,
        texttemplate="%{text}",
        textfont={"size": 11},
        hovertext=whole,
        hovertemplate="%{y}<br>%{x}<br>%{hovertext}<br><b>%{z:.3f}</b><extra></extra>",
    )
    if details is not None:
        if [len(row) for row in details] != sizes:
            raise ValueError(
                f"details in rows of {[len(row) for row in details]} do not fit values {list(values.shape)}"
            )
        lines = [["<br>".join(html.escape(line, quote=False) for line in cell) for cell in row] for row in details]
        figure.data[0].update(hovertext=lines, hovertemplate="%{y}<br>%{x}<br>%{hovertext}<extra></extra>")
    return figure


def tokens(
    tokens: Sequence[str],
    values: Values,
    names: Sequence[str] | None = None,
    *,
    title: str = "Tokens",
    limit: float | None = None,
) -> View:
    """A view of a text whose tokens are coloured by numbers: blue above zero, orange and underlined below, hatched for NaN.

    The number of a token is shown on hover and focus; arrow keys move from token to token. Of several values for each token,
    buttons above the text choose one. Line breaks are shown and kept. Where scripts are forbidden, all but the arrow keys works.

    Args:
        tokens: the strings, in order.
        values: one number for each token; several as a tensor [value, token] or a dict by name.
        names: the names of several values; may contain duplicates.
        limit: the distance from white to the strongest colour; the largest of each value if None, as in `heatmap`.

    Raises ValueError for numbers or names that do not fit, and for tokens that are one text.

    >>> view = tokens(
    ...     ["The", " cat", " sat"], {"loss": [0.1, 2.5, 1.0], "norm": [9.0, 3.0, 4.0]}
    ... )
    >>> view
    View('Tokens', 3 tokens, 2 values; .show() opens it in a browser, .write_html(path) saves it)
    """
    if isinstance(tokens, str):
        raise ValueError("tokens is one text: give a list, a string for each token")
    if isinstance(values, Mapping):
        if names is not None:
            raise ValueError("values has names of its own: give no others")
        names = list(values)
        rows = [_row(row) for row in values.values()]
    else:
        table = as_numbers(values)
        if table.ndim not in (1, 2):
            raise ValueError(f"values are [token] or [value, token], got {list(table.shape)}")
        rows = [row.tolist() for row in (table if table.ndim == 2 else table[None])]
        names = [""] * len(rows) if names is None and len(rows) == 1 else names
        names = [str(i) for i in range(len(rows))] if names is None else [str(name) for name in names]
    if not rows or len(names) != len(rows):
        raise ValueError(f"{len(names)} names for {len(rows)} values: values are [token] or [value, token]")
    every = range(len(rows))
    chosen = "".join(f"#value-{i}:checked ~ .panel-{i} {{ display: block; }}\n" for i in every)
    buttons = "".join(_button(i, name) for i, name in enumerate(names)) if len(rows) > 1 else ""
    if len(rows) == 1:
        chosen = ".tokens-view .panel { display: block; }"
    panels = "".join(_panel(i, tokens, row, limit) for i, row in enumerate(rows))
    body = f'<div class="tokens-view"><h2>{html.escape(title)}</h2>{buttons}{panels}</div>'
    about = f"{len(tokens)} tokens" + f", {len(rows)} values" * (len(rows) > 1)
    return View(
        title,
        body,
        style=STYLE + chosen,
        script=SCRIPT,
        height=min(700, 110 + 36 * (len(rows) > 1) + 30 * -(-sum(len(token) + 1 for token in tokens) // 80)),
        text=about,
    )


def snippets(snippets: Sequence[Snippet], title: str = "Texts", limit: float | None = None) -> View:
    """A view of several texts, one below the other, whose tokens are coloured by numbers on a common scale, as in `tokens`.

    Args:
        snippets: the label of each text, its tokens, a number for each, and the place of the token in a frame.
        limit: the absolute value of the strongest colour; the largest of all texts if None.

    Raises ValueError for numbers that do not fit.

    >>> snippets([("2.50", ["The", " cat", " sat"], [0.1, 2.5, 1.0], 1)], "Top texts")
    View('Top texts', 1 text; .show() opens it in a browser, .write_html(path) saves it)
    """
    body = f'<div class="tokens-view"><h2>{html.escape(title)}</h2>{snippet_table(snippets, limit)}</div>'
    about = f"{len(snippets)} text{'s' * (len(snippets) != 1)}"
    return View(title, body, style=STYLE, script=SCRIPT, height=min(700, 90 + 34 * len(snippets)), text=about)


def snippet_table(snippets: Sequence[Snippet], limit: float | None = None) -> str:
    """The HTML of a table of texts, for an element of class "tokens-view" with `STYLE` and `SCRIPT`."""
    scale = scale_of(torch.tensor([value for _, _, values, _ in snippets for value in values]), 0.0, limit)
    rows = (
        f'<tr><th scope="row">{html.escape(label)}</th><td class="text">{coloured_text(tokens, values, scale, place)}</td></tr>'
        for label, tokens, values, place in snippets
    )
    return f'<table class="snippets">{"".join(rows)}</table>' if snippets else "<p>There is no text.</p>"


def coloured_text(tokens: Sequence[str], values: Sequence[float], scale: ColourScale, framed: int | None = None) -> str:
    """The HTML of tokens with their numbers, for an element of class "text"; raises ValueError if they differ in number.

    >>> coloured_text([" a", " b"], [0.0, float("nan")], scale_of(torch.ones(1))).count(
    ...     "no value"
    ... )
    2
    """
    if len(tokens) != len(values):
        raise ValueError(f"{len(tokens)} tokens for {len(values)} values")
    pairs = enumerate(zip(tokens, values, strict=True))
    return "".join(_token(token, value, scale, place == framed) for place, (token, value) in pairs)


def _row(row: Sequence[float] | Tensor) -> list[float]:
    return [float(value) for value in row]


def _button(i: int, name: str) -> str:
    checked = " checked" if i == 0 else ""
    return (
        f'<input class="choose" type="radio" name="value" id="value-{i}"{checked}>'
        f'<label for="value-{i}">{token_label(name, LONGEST)}</label>'
    )


def _panel(i: int, tokens: Sequence[str], row: Sequence[float], limit: float | None) -> str:
    scale = scale_of(torch.tensor(row), limit=limit)
    white = (scale.white - scale.low) / (scale.high - scale.low)
    below = f"var(--least), var(--down) {white / 4:.1%}, " * (white > 0)
    above = f", var(--up) {white + 0.75 * (1 - white):.1%}, var(--most)" * (white < 1)
    ramp = f"{below}transparent {white:.1%}{above}"
    gaps = sum(not math.isfinite(value) for value in row)
    missing = f" &ensp; hatched: no value ({gaps})" if gaps else ""
    text = coloured_text(tokens, row, scale)
    return (
        f'<div class="panel panel-{i}"><div class="text">{text}</div><p class="legend">{short(scale.low)}'
        f'<span class="ramp" style="background: linear-gradient(to right, {ramp})"></span>{short(scale.high)}{missing}</p></div>'
    )


def _token(token: str, value: float, scale: ColourScale, framed: bool) -> str:
    is_number = math.isfinite(value)
    strength = scale.strength(value) if is_number else 0.0
    kind = "none" if not is_number else "up" if strength >= 0 else "down"
    said = short(value) if is_number else "no value"
    label = token_label(token, LONGEST)
    spoken = label.replace('"', "&quot;")
    broken = "<br>" * token.endswith("\n")
    return (
        f'<span class="{kind}{" framed" * framed}" style="--s: {abs(strength):.3f}" tabindex="0" data-value="{said}" '
        f'aria-label="{spoken}: {said}">{label}</span>{broken}'
    )
