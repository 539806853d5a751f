"""Plotly figures from tensors and strings, and self-contained HTML pages of figures.

| picture of | function |
|---|---|
| a matrix, or one for each panel | `heatmap` |
| values of named things | `bars`; what each adds to a whole, sorted: `contributions` |
| values over layers or steps | `lines` |
| named points on two axes | `points` |
| attention of all heads, to explore; of a few heads, to print | `attention`; `attention_patterns` |
| numbers of tokens in one text, or in several | `tokens`, `snippets` |
| the turns of a conversation, with their roles | `conversation` |
| values over an image, maps of channels | `image_heat_map`, `feature_maps` |
| a graph with levels | `layered_graph` |

`attention`, `tokens`, `snippets` and `conversation` return a `View`, the others a figure of plotly; notebooks show both.
`write_html(picture, path)` writes one of them to a small page, `report` a page of `Section`s, whose parts are text, tables
(pandas), figures (alone or as a `CaptionedFigure`), `KeyFigures`, `TokenRow`s and `View`s. Pages need no network, and are light
or dark as readers prefer.
"""

from typing import TYPE_CHECKING

from hooked_lm.keywords import answer_keywords
from hooked_lm.renamed import former_names
from hooked_lm.viz.attention_view import attention
from hooked_lm.viz.conversations import conversation
from hooked_lm.viz.graphs import GraphView, layered_graph
from hooked_lm.viz.heatmaps import MOST_PANELS, feature_maps, heatmap
from hooked_lm.viz.images import image_heat_map
from hooked_lm.viz.labels import position_labels, token_label, visible
from hooked_lm.viz.line_plots import lines
from hooked_lm.viz.page import Section, report, write_html
from hooked_lm.viz.parts import CaptionedFigure, KeyFigures, TokenRow
from hooked_lm.viz.plots import attention_patterns, bars, contributions
from hooked_lm.viz.points import points
from hooked_lm.viz.token_views import snippets, tokens
from hooked_lm.viz.view import View

__all__ = [
    "MOST_PANELS",
    "CaptionedFigure",
    "GraphView",
    "KeyFigures",
    "Section",
    "TokenRow",
    "View",
    "attention",
    "attention_patterns",
    "bars",
    "contributions",
    "conversation",
    "feature_maps",
    "heatmap",
    "image_heat_map",
    "layered_graph",
    "lines",
    "points",
    "position_labels",
    "report",
    "snippets",
    "token_label",
    "tokens",
    "visible",
    "write_html",
]

answer_keywords(__name__)

if not TYPE_CHECKING:  # type checkers know the present names alone
    __getattr__ = former_names(__name__, Facts="KeyFigures", Plate="CaptionedFigure", TokenStrip="TokenRow")
