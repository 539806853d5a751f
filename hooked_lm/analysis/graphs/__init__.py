"""Attribution graphs: which features, neurons and tokens of a prompt lead to an output, with exact edges between them."""

from hooked_lm.analysis.graphs.agreement import GraphInterventions
from hooked_lm.analysis.graphs.graph import AttributionGraph
from hooked_lm.analysis.graphs.interventions import intervene
from hooked_lm.analysis.graphs.supernodes import clustered, supernode_edges
from hooked_lm.analysis.graphs.targets import Target
from hooked_lm.analysis.graphs.trace import attribution_graph

__all__ = [
    "AttributionGraph",
    "GraphInterventions",
    "Target",
    "attribution_graph",
    "clustered",
    "intervene",
    "supernode_edges",
]
