"""Sparse dictionaries (autoencoders and transcoders): hooks, file formats, training, evaluation."""

from hooked_lm.interventions.dictionaries.architectures import BatchTopK, Gated, JumpReLU, TopK, Transcoder
from hooked_lm.interventions.dictionaries.evaluate import evaluate_dictionary
from hooked_lm.interventions.dictionaries.formats import (
    load,
    load_dictionary_learning,
    load_saelens,
    save_saelens,
)  # fmt: skip
from hooked_lm.interventions.dictionaries.hook import Dictionary, Features, Transcode, run_with_features
from hooked_lm.interventions.dictionaries.normalized import Normalized
from hooked_lm.interventions.dictionaries.sae import SAE
from hooked_lm.interventions.dictionaries.stream import Activations, Vectors
from hooked_lm.interventions.dictionaries.train import Settings, Trained, train_dictionary, train_on

__all__ = [
    "SAE", "Activations", "BatchTopK", "Dictionary", "Features", "Gated", "JumpReLU", "Normalized", "Settings", "TopK",
    "Trained", "Transcode", "Transcoder", "Vectors", "evaluate_dictionary", "load", "load_dictionary_learning",
    "load_saelens", "run_with_features", "save_saelens", "train_dictionary", "train_on",
]  # fmt: skip
