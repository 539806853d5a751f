"""What can be read off a run and its gradients: attribution, circuits, alignments, lenses, heads, weights."""

from hooked_lm.analysis import circuits, graphs, metrics, rankings
from hooked_lm.analysis.alignment.alignment import Alignment, BoundlessAlignment
from hooked_lm.analysis.alignment.interchange import Location, interchange, interchange_accuracy
from hooked_lm.analysis.alignment.search import sweep_alignments, train_alignment
from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.attribution.backward_rules import BackwardRules
from hooked_lm.analysis.attribution.edge_patching import patch_edges
from hooked_lm.analysis.attribution.edges import attribute_edges
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.attribution.nodes import attribute, attribute_nodes
from hooked_lm.analysis.circuits import Circuit
from hooked_lm.analysis.comparing.compare_models import compare_models
from hooked_lm.analysis.comparing.model_comparison import ModelComparison
from hooked_lm.analysis.evaluation import evaluate
from hooked_lm.analysis.graphs import AttributionGraph, QKAttribution, attribution_graph, qk_attribution
from hooked_lm.analysis.probes import Probes, RegressionProbes, train_probe
from hooked_lm.analysis.rankings import CircuitTask, Leaderboard, TaskRankings, leaderboard
from hooked_lm.analysis.reading.composition import head_composition
from hooked_lm.analysis.reading.dashboards import write_dashboards
from hooked_lm.analysis.reading.direct import direct_logit_attribution, source_attribution
from hooked_lm.analysis.reading.feature_report import FeatureReport, feature_report
from hooked_lm.analysis.reading.features_table import FeaturesTable, features_table, top_features
from hooked_lm.analysis.reading.head_detector import detect_head
from hooked_lm.analysis.reading.heads import attention_statistics, head_scores, repeated_random_tokens
from hooked_lm.analysis.reading.images import attention_to_images, nearest_words, on_image
from hooked_lm.analysis.reading.jacobian_fit import fit_jacobian_lens
from hooked_lm.analysis.reading.jacobian_lens import JacobianLens
from hooked_lm.analysis.reading.lens import Lens, logit_lens
from hooked_lm.analysis.reading.lens_decomposition import LensDecomposition, lens_decomposition
from hooked_lm.analysis.reading.lens_recall import lens_recall
from hooked_lm.analysis.reading.max_activating import MaxActivating, max_activating_examples
from hooked_lm.analysis.reading.neurons import copying_scores, head_top_tokens, neuron_top_tokens
from hooked_lm.analysis.reading.patchscopes import Patchscope, patchscope
from hooked_lm.analysis.reading.saliency import Saliency, saliency
from hooked_lm.analysis.reading.svd_interpreter import SVDInterpreter
from hooked_lm.analysis.reading.tuned_lens import TunedLens, train_tuned_lens
from hooked_lm.analysis.reading.verbalize import Verbalization, verbalize
from hooked_lm.analysis.thoughts.anchors import ThoughtAnchors, thought_anchors
from hooked_lm.keywords import answer_keywords

__all__ = [
    "Alignment",
    "Attribution",
    "AttributionGraph",
    "BackwardRules",
    "BoundlessAlignment",
    "Circuit",
    "CircuitTask",
    "FeatureReport",
    "FeaturesTable",
    "Graph",
    "JacobianLens",
    "Leaderboard",
    "Lens",
    "LensDecomposition",
    "Location",
    "MaxActivating",
    "ModelComparison",
    "Patchscope",
    "Probes",
    "QKAttribution",
    "RegressionProbes",
    "SVDInterpreter",
    "Saliency",
    "TaskRankings",
    "ThoughtAnchors",
    "TunedLens",
    "Verbalization",
    "attention_statistics",
    "attention_to_images",
    "attribute",
    "attribute_edges",
    "attribute_nodes",
    "attribution_graph",
    "circuits",
    "compare_models",
    "copying_scores",
    "detect_head",
    "direct_logit_attribution",
    "evaluate",
    "feature_report",
    "features_table",
    "fit_jacobian_lens",
    "graphs",
    "head_composition",
    "head_scores",
    "head_top_tokens",
    "interchange",
    "interchange_accuracy",
    "leaderboard",
    "lens_decomposition",
    "lens_recall",
    "logit_lens",
    "max_activating_examples",
    "metrics",
    "nearest_words",
    "neuron_top_tokens",
    "on_image",
    "patch_edges",
    "patchscope",
    "qk_attribution",
    "rankings",
    "repeated_random_tokens",
    "saliency",
    "source_attribution",
    "sweep_alignments",
    "thought_anchors",
    "top_features",
    "train_alignment",
    "train_probe",
    "train_tuned_lens",
    "verbalize",
    "write_dashboards",
]

answer_keywords(__name__)
