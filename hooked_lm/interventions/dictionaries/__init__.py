"""Sparse dictionaries (autoencoders and transcoders): hooks, file formats, training, evaluation."""

from typing import TYPE_CHECKING

from hooked_lm.interventions.dictionaries.architectures import BatchTopK, Gated, JumpReLU, TopK, Transcoder
from hooked_lm.interventions.dictionaries.circuit_tracer import load_circuit_tracer, save_circuit_tracer
from hooked_lm.interventions.dictionaries.crosscoder import Crosscoder, PairedActivations, train_crosscoder
from hooked_lm.interventions.dictionaries.evaluate import evaluate_dictionary
from hooked_lm.interventions.dictionaries.floors import pca_dictionary, random_dictionary
from hooked_lm.interventions.dictionaries.formats import load_dictionary_learning, load_saelens, save_saelens
from hooked_lm.interventions.dictionaries.hook import Dictionary, Features, run_with_features
from hooked_lm.interventions.dictionaries.labelled import evaluate_labels
from hooked_lm.interventions.dictionaries.normalized import Normalized
from hooked_lm.interventions.dictionaries.pretrained import load, load_transcoders
from hooked_lm.interventions.dictionaries.published import releases
from hooked_lm.interventions.dictionaries.recovery import evaluate_recovery
from hooked_lm.interventions.dictionaries.sae import SAE
from hooked_lm.interventions.dictionaries.scopes import load_gemma_scope, load_llama_scope
from hooked_lm.interventions.dictionaries.scores import DictionaryEvaluation, DictionaryScores
from hooked_lm.interventions.dictionaries.stream import ActivationBatches, Activations
from hooked_lm.interventions.dictionaries.synthetic import SyntheticFeatures, SyntheticSample, synthetic_features
from hooked_lm.interventions.dictionaries.train import TrainedDictionary, train_dictionary, train_on
from hooked_lm.interventions.dictionaries.training import TrainingConfig
from hooked_lm.interventions.dictionaries.transcode import Transcode
from hooked_lm.interventions.dictionaries.transcoder_set import CrossLayerTranscoder, LayerTranscoders, TranscoderSet
from hooked_lm.keywords import answer_keywords
from hooked_lm.renamed import former_names

__all__ = [
    "SAE",
    "ActivationBatches",
    "Activations",
    "BatchTopK",
    "CrossLayerTranscoder",
    "Crosscoder",
    "Dictionary",
    "DictionaryEvaluation",
    "DictionaryScores",
    "Features",
    "Gated",
    "JumpReLU",
    "LayerTranscoders",
    "Normalized",
    "PairedActivations",
    "SyntheticFeatures",
    "SyntheticSample",
    "TopK",
    "TrainedDictionary",
    "TrainingConfig",
    "Transcode",
    "Transcoder",
    "TranscoderSet",
    "evaluate_dictionary",
    "evaluate_labels",
    "evaluate_recovery",
    "load",
    "load_circuit_tracer",
    "load_dictionary_learning",
    "load_gemma_scope",
    "load_llama_scope",
    "load_saelens",
    "load_transcoders",
    "pca_dictionary",
    "random_dictionary",
    "releases",
    "run_with_features",
    "save_circuit_tracer",
    "save_saelens",
    "synthetic_features",
    "train_crosscoder",
    "train_dictionary",
    "train_on",
]  # fmt: skip

answer_keywords(__name__)

if not TYPE_CHECKING:  # type checkers know the present names alone
    __getattr__ = former_names(
        __name__, Settings="TrainingConfig", Trained="TrainedDictionary", Vectors="ActivationBatches"
    )
