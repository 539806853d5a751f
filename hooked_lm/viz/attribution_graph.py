"""Attribution graphs as a page: nodes by token and layer, whose edges a reader follows, pins and groups."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hooked_lm.viz.labels import visible
from hooked_lm.viz.token_views import STYLE as TEXT_STYLE
from hooked_lm.viz.view import View, as_json

__all__ = ["GraphNode", "attribution_graph_view"]

FEATURE, ERROR, TOKEN, TARGET = KINDS = ("feature", "error", "token", "target")
STYLE, SCRIPT = (Path(__file__).with_suffix(kind).read_text(encoding="utf-8") for kind in (".css", ".js"))
HEIGHT = 760  # of the view, until its script has measured it
WORDS = {
    "none": "No node is chosen",
    "how": "Point at a node to see its edges, click it to keep it.",
    "inputs": "Inputs, by their edges",
    "outputs": "Outputs, by their edges",
    "pinned": "Pinned",
    "members": "Nodes of the supernode",
}


@dataclass(frozen=True)
class GraphNode:
    """A node of an attribution graph, for its page.

    Args:
        name: the name, such as "L2F17@5".
        kind: "feature", "error", "token" or "target".
        layer: None for tokens and targets.
        position: the place among the tokens.
        text: what a token or target says.
        label: a description of a feature.
        share: the share of the influence that nodes up to this one have together, from the largest on; a reader hides nodes
            with a larger share.
        influence, activation, probability, total, bias, others: numbers that the page says; None for those that there are not.
        card: the index of a card.
    """

    name: str
    kind: str
    layer: int | None
    position: int
    text: str = ""
    label: str = ""
    share: float = 0.0
    influence: float | None = None
    activation: float | None = None
    probability: float | None = None
    total: float | None = None
    bias: float = 0.0
    others: float = 0.0
    card: int | None = None


def attribution_graph_view(
    nodes: Sequence[GraphNode],
    edges: Sequence[tuple[int, int, float]],
    tokens: Sequence[str],
    *,
    groups: Mapping[str, Sequence[int]] | None = None,
    cards: Sequence[str] = (),
    title: str = "",
    subtitle: str = "",
    unit: str = FEATURE,
) -> View:
    """A page of an attribution graph; it loads nothing.

    Tokens are along x, layers along y, outputs on top. A reader points at a node or moves with the arrow keys to see its edges,
    keeps it with a click or Enter, pins nodes, draws pinned nodes alone, groups them as a supernode, and hides nodes of little
    influence.

    Args:
        edges: source, target and weight of each edge; sources and targets are indices of nodes.
        groups: supernodes by name, each with the indices of its nodes; they are drawn as one node.
        cards: HTML about features, with all text escaped.
        unit: what nodes of kind "feature" are, as "neuron".

    Raises ValueError for a node of another kind, or at a position without a token, and for edges and groups with unknown nodes.

    >>> nodes = [
    ...     GraphNode("The@0", "token", None, 0, "The"),
    ...     GraphNode("L0F7@0", "feature", 0, 0, activation=1.5),
    ...     GraphNode("logit", "target", None, 0, "end", probability=0.9),
    ... ]
    >>> attribution_graph_view(nodes, [(0, 1, 2.0), (1, 2, -3.0)], ["The"], title="A graph")
    View('A graph', 3 nodes, 2 edges; .show() opens it in a browser, .write_html(path) saves it)
    """
    _check(nodes, edges, tokens, groups or {}, cards)
    layers = sorted({node.layer for node in nodes if node.layer is not None})
    most = max((node.influence or 0.0 for node in nodes if node.kind == FEATURE), default=0.0)
    data = {
        "nodes": [_written(node, layers, most) for node in nodes],
        "edges": [[source, target, _digits(weight)] for source, target, weight in edges],
        "tokens": [visible(token, 40) for token in tokens],
        "layers": layers,
        "groups": [[name, list(of)] for name, of in (groups or {}).items()],
        "cards": list(cards),
        "words": {
            **WORDS,
            "unit": unit,
            "drawing": f"Attribution graph{': ' * bool(title)}{title}, {len(nodes)} nodes and {len(edges)} edges",
        },
    }
    largest = max((node.share for node in nodes if node.kind in (FEATURE, ERROR)), default=1.0)
    smallest = min((node.share for node in nodes if node.kind in (FEATURE, ERROR)), default=0.0)
    head = f"<h2>{html.escape(title)}</h2>" * bool(title) + f'<p class="below">{html.escape(subtitle)}</p>' * bool(
        subtitle
    )
    first, last = int(smallest * 1000), -int(-largest * 1000 // 1)
    body = BODY.format(
        head=head, unit=html.escape(unit), data=as_json(data), first=first, last=last, hidden="" if groups else "hidden"
    )
    about = f"{len(nodes)} nodes, {len(edges)} edge{'s' * (len(edges) != 1)}"
    return View(title or "Attribution graph", body, TEXT_STYLE + STYLE, SCRIPT, HEIGHT, about)


def _check(
    nodes: Sequence[GraphNode],
    edges: Sequence[tuple[int, int, float]],
    tokens: Sequence[str],
    groups: Mapping[str, Sequence[int]],
    cards: Sequence[str],
) -> None:
    for node in nodes:
        if node.kind not in KINDS:
            raise ValueError(f"node {node.name!r} has kind {node.kind!r}; the kinds are {', '.join(KINDS)}")
        if not 0 <= node.position < len(tokens):
            raise ValueError(f"node {node.name!r} is at position {node.position}, and there are {len(tokens)} tokens")
        if (node.layer is None) != (node.kind in (TOKEN, TARGET)):
            raise ValueError(
                f"node {node.name!r} of kind {node.kind!r} has layer {node.layer}; features and errors have one"
            )
        if node.card is not None and not 0 <= node.card < len(cards):
            raise ValueError(f"node {node.name!r} has card {node.card}, and there are {len(cards)} cards")
    for what, ends in [("an edge", edge[:2]) for edge in edges] + [
        (f"group {name!r}", tuple(of)) for name, of in groups.items()
    ]:
        if wrong := [end for end in ends if not 0 <= end < len(nodes)]:
            raise ValueError(f"{what} has node {wrong[0]}, and there are {len(nodes)} nodes")


def _written(node: GraphNode, layers: Sequence[int], most: float) -> dict[str, Any]:
    """A node as the script reads it; row 0 has the tokens."""
    row = 0 if node.kind == TOKEN else len(layers) + 1 if node.layer is None else layers.index(node.layer) + 1
    numbers = {name: None if (value := getattr(node, name)) is None else _digits(value) for name in NUMBERS}
    return {
        "name": node.name,
        "kind": node.kind,
        "row": row,
        "position": node.position,
        "text": visible(node.text, 40) if node.kind == TOKEN else node.text,
        "label": node.label,
        "strength": round(min(1.0, (node.influence or 0.0) / most) ** 0.5, 3) if most else 0.0,
        "card": node.card,
        **numbers,
    }


NUMBERS = ("share", "influence", "activation", "probability", "total", "bias", "others")


def _digits(value: float) -> float:
    """A number with five significant digits, as many as a page needs."""
    return float(f"{value:.5g}")


BODY = """<div class="traced">
<script type="application/json" class="data">{data}</script>
{head}<div class="bar">
<label>Influence shown <input type="range" class="share" min="{first}" max="{last}" value="{last}">
<output></output></label>
<label><input type="checkbox" class="only" disabled> Pinned only</label>
<label {hidden}><input type="checkbox" class="collapse" checked> Supernodes closed</label>
<span><input type="text" class="group-name" aria-label="Name of a new supernode" placeholder="name" size="10">
<button type="button" class="group-pins" disabled>Group pinned</button>
<button type="button" class="clear" disabled>Clear pins</button></span>
<span class="count" role="status"></span>
</div>
<div class="both">
<div><div class="frame"><div class="rows"></div><div class="scroll" tabindex="-1"></div></div>
<div class="legend">
<span><svg width="16" height="16"><g class="unit feature" transform="translate(8 8)" style="--share:.6">
<circle class="shape" r="6"/></g></svg>{unit}: the stronger its colour, the more influence</span>
<span><svg width="16" height="16"><g class="unit error" transform="translate(8 8)"><path class="shape" d="M0-6L6 0 0 6-6 0Z"/></g>
</svg>error</span>
<span><svg width="28" height="10"><path class="edge up" d="M0 5H28" stroke-width="3"/></svg>positive</span>
<span><svg width="28" height="10"><path class="edge down" d="M0 5H28" stroke-width="3"/></svg>negative</span>
</div>
<p class="hint"><kbd>arrows</kbd> move, <kbd>Enter</kbd> keeps a node, <kbd>p</kbd> or <kbd>Shift</kbd>+click pins it,
<kbd>i</kbd> and <kbd>o</kbd> follow its strongest input and output, <kbd>g</kbd> groups pinned nodes, <kbd>Esc</kbd> lets go.</p>
<div class="card" hidden></div></div>
<div class="panel"></div>
</div>
<div class="live" aria-live="polite"></div>
</div>"""
