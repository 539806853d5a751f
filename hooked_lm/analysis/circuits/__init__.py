"""Circuits: find, evaluate, plot and compare the edges of a model that a task depends on."""

from hooked_lm.analysis.circuits.acdc import acdc
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.compare import Comparison
from hooked_lm.analysis.circuits.constants import mean_constants, optimal_constants
from hooked_lm.analysis.circuits.discover import discover
from hooked_lm.analysis.circuits.effects import exact_effects
from hooked_lm.analysis.circuits.evaluate import SHARES, Evaluation, evaluate
from hooked_lm.analysis.circuits.exchange import exchange
from hooked_lm.analysis.circuits.masks import train_masks
from hooked_lm.analysis.circuits.mib import from_mib, to_mib
from hooked_lm.analysis.circuits.minimality import minimality
from hooked_lm.analysis.circuits.neuronpedia import from_neuronpedia, to_neuronpedia
from hooked_lm.analysis.circuits.neurons import NeuronCircuit, neuron_circuit
from hooked_lm.analysis.circuits.null import null_circuits
from hooked_lm.analysis.circuits.prune import prune
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.keywords import answer_keywords

__all__ = [
    "SHARES",
    "Circuit",
    "Comparison",
    "Evaluation",
    "NeuronCircuit",
    "Runner",
    "acdc",
    "discover",
    "evaluate",
    "exact_effects",
    "exchange",
    "from_mib",
    "from_neuronpedia",
    "mean_constants",
    "minimality",
    "neuron_circuit",
    "null_circuits",
    "optimal_constants",
    "prune",
    "to_mib",
    "to_neuronpedia",
    "train_masks",
]

answer_keywords(__name__)
