"""A view of a conversation: its turns one below the other, coloured by whose they are, or by a number for each token."""

import html
from collections.abc import Sequence
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.viz.labels import LETTER, Who, token_label, who
from hooked_lm.viz.scales import scale_of
from hooked_lm.viz.token_views import LONGEST, SCRIPT, coloured_text
from hooked_lm.viz.token_views import STYLE as OF_TOKENS
from hooked_lm.viz.view import View

STYLE = (
    OF_TOKENS
    + """
.tokens-view .turn th { border-left: 5px solid var(--line); padding-left: 10px; }
.tokens-view .turn.user th { border-left-color: var(--up); }
.tokens-view .turn.assistant th { border-left-color: var(--third); }
.tokens-view .turn.system th, .tokens-view .turn.developer th { border-left-color: var(--marker); }
.tokens-view .turn.tool th { border-left-color: var(--down); }
.tokens-view .turn.template .text, .tokens-view .turn.padding .text { color: var(--faint); }
.tokens-view .turn.thinking .text { font-style: italic; }
"""
)


def conversation(
    tokens: Sequence[str],
    labels: Sequence[Who],
    values: Sequence[float] | Float[Tensor, " token"] | None = None,
    *,
    title: str = "Conversation",
    limit: float | None = None,
) -> View:
    """A view of a conversation, a row for each part of a turn, with its role; what a template adds is grey.

    Args:
        tokens: the strings, in order.
        labels: the turn, the role and the part of each token.
        values: a number for each token, by which it is then coloured as in `tokens`.
        limit: the absolute value of the strongest colour; the largest if None.

    Raises ValueError for other numbers of labels or values than of tokens.

    >>> labels = [(-1, "template", "marker"), (0, "user", "content"), (0, "user", "content")]
    >>> conversation(["<user>", "Hello", " you"], labels)
    View('Conversation', 3 tokens in 2 rows; .show() opens it in a browser, .write_html(path) saves it)
    """
    numbers = None if values is None else [float(value) for value in values]
    for what, several in (("labels", labels), ("values", numbers)):
        if several is not None and len(several) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens for {len(several)} {what}")
    scale = None if numbers is None else scale_of(torch.tensor(numbers), 0.0, limit)
    rows, start = [], 0
    for label, stretch in groupby(labels):
        stop = start + len(list(stretch))
        if scale is None or numbers is None:
            text = "".join(_plain(token) for token in tokens[start:stop])
        else:
            text = coloured_text(tokens[start:stop], numbers[start:stop], scale)
        head, (_, role, part) = html.escape(who(label)), label
        kinds = html.escape(f"turn {role} {part}", quote=True)
        rows.append(f'<tr class="{kinds}"><th scope="row">{head}</th><td class="text">{text}</td></tr>')
        start = stop
    body = (
        f'<div class="tokens-view"><h2>{html.escape(title)}</h2><table class="snippets">{"".join(rows)}</table></div>'
    )
    lines = len(rows) + sum(len(token) for token in tokens) * LETTER // 700
    height = min(700, 90 + 34 * int(lines))
    about = f"{len(tokens)} tokens in {len(rows)} rows"
    return View(title, body, style=STYLE, script=SCRIPT if scale is not None else "", height=height, text=about)


def _plain(token: str) -> str:
    return f"<span>{token_label(token, LONGEST)}</span>{'<br>' * token.endswith(chr(10))}"
