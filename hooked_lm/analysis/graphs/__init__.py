"""Attribution graphs: which features, neurons and tokens of a prompt lead to an output, with exact edges between them."""

from hooked_lm.analysis.graphs.agreement import GraphInterventions
from hooked_lm.analysis.graphs.graph import AttributionGraph
from hooked_lm.analysis.graphs.interventions import intervene
from hooked_lm.analysis.graphs.loadings import head_loadings
from hooked_lm.analysis.graphs.neuronpedia import from_neuronpedia, to_neuronpedia
from hooked_lm.analysis.graphs.page import graph_page
from hooked_lm.analysis.graphs.qk import QKAttribution, qk_attribution
from hooked_lm.analysis.graphs.supernodes import clustered, supernode_edges
from hooked_lm.analysis.graphs.targets import Target
from hooked_lm.analysis.graphs.trace import attribution_graph

__all__ = [
    "AttributionGraph",
    "GraphInterventions",
    "QKAttribution",
    "Target",
    "attribution_graph",
    "clustered",
    "from_neuronpedia",
    "graph_page",
    "head_loadings",
    "intervene",
    "qk_attribution",
    "supernode_edges",
    "to_neuronpedia",
]
