"""Plotly figures from tensors and strings, and self-contained HTML pages of figures.

`heatmap`, `bars`, `attention_patterns` and `image_heat_map` return figures; `report` writes a page of `Section`s, whose parts
are text, tables (pandas), figures (plotly, alone or as a `Plate` with a caption), `Facts`, `TokenStrip`s and `View`s.
"""

from hooked_lm.viz.attention import attention
from hooked_lm.viz.graphs import layered_graph
from hooked_lm.viz.images import image_heat_map
from hooked_lm.viz.lines import lines
from hooked_lm.viz.maps import feature_maps
from hooked_lm.viz.page import Section, report
from hooked_lm.viz.panels import MOST_PANELS, heatmap_panels
from hooked_lm.viz.parts import Facts, Plate, TokenStrip
from hooked_lm.viz.plots import attention_patterns, bars, heatmap, position_labels, token_label, visible
from hooked_lm.viz.tokens import snippets, tokens
from hooked_lm.viz.view import View

__all__ = [
    "MOST_PANELS",
    "Facts",
    "Plate",
    "Section",
    "TokenStrip",
    "View",
    "attention",
    "attention_patterns",
    "bars",
    "feature_maps",
    "heatmap",
    "heatmap_panels",
    "image_heat_map",
    "layered_graph",
    "lines",
    "position_labels",
    "report",
    "snippets",
    "token_label",
    "tokens",
    "visible",
]
