"""Attribution graphs: which features, neurons and tokens of a prompt lead to an output, with exact edges between them."""

from hooked_lm.analysis.graphs.agreement import GraphInterventions
from hooked_lm.analysis.graphs.attribution_graph import attribution_graph
from hooked_lm.analysis.graphs.graph import AttributionGraph
from hooked_lm.analysis.graphs.interventions import intervene
from hooked_lm.analysis.graphs.targets import Target

__all__ = ["AttributionGraph", "GraphInterventions", "Target", "attribution_graph", "intervene"]
