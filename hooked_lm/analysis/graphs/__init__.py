"""Attribution graphs: which features, neurons and tokens of a prompt lead to an output, with exact edges between them."""

from hooked_lm.analysis.graphs.graph import AttributionGraph

__all__ = ["AttributionGraph"]
