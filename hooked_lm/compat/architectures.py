"""What kind of model a transformers class is, by its name, by a config, or by the name of a checkpoint."""

import re
from types import SimpleNamespace
from typing import Any

from hooked_lm.compat.downloads import download_file_from_hf

__all__ = [
    "MASKED_LM_ARCHITECTURES", "POST_NORM_ARCHITECTURES", "SEQ2SEQ_ARCHITECTURES", "classify_architecture",
    "classify_model_config", "classify_model_name", "get_architectures_for_config", "is_audio_model",
    "is_encoder_decoder_model", "is_masked_lm_model", "is_multimodal_model",
]  # fmt: skip

# Of the families that this package loads: encoder-decoders, encoders, and decoders that normalise what a sublayer writes
# and not what it reads.
SEQ2SEQ_ARCHITECTURES = {
    "BartForConditionalGeneration", "BlenderbotForConditionalGeneration", "M2M100ForConditionalGeneration",
    "MarianMTModel", "MBartForConditionalGeneration", "MT5ForConditionalGeneration", "PegasusForConditionalGeneration",
    "SwitchTransformersForConditionalGeneration", "T5ForConditionalGeneration", "T5WithLMHeadModel",
    "UMT5ForConditionalGeneration",
}  # fmt: skip
MASKED_LM_ARCHITECTURES = {
    "AlbertForMaskedLM", "BertForMaskedLM", "DebertaV2ForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM",
    "EsmForMaskedLM", "ModernBertForMaskedLM", "MPNetForMaskedLM", "RobertaForMaskedLM", "XLMRobertaForMaskedLM",
}  # fmt: skip
POST_NORM_ARCHITECTURES = {"Exaone4ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM"}

# the end of a class's name -> the kind, for classes that are in none of the sets
BY_ENDING = {
    "ForMaskedLM": "masked_lm",
    "ForCTC|ForAudioClassification|ForAudioFrameClassification": "audio",
    "ForImageClassification": "vision",
    "ForConditionalGeneration|ForVision2Seq|ForImageTextToText": "multimodal",
}


def classify_architecture(architecture: str) -> str:
    """The kind of a transformers class: "seq2seq", "masked_lm", "multimodal", "audio", "vision", or else "causal_lm".

    >>> classify_architecture("MarianMTModel"), classify_architecture("BertForMaskedLM")
    ('seq2seq', 'masked_lm')
    """
    if architecture in SEQ2SEQ_ARCHITECTURES:
        return "seq2seq"
    endings = (kind for ending, kind in BY_ENDING.items() if re.search(f"({ending})$", architecture))
    return next(endings, "causal_lm")


def get_architectures_for_config(config: Any) -> list[str]:
    """The classes that a config names, of ours or of transformers."""
    original = getattr(config, "original_architecture", None)
    return [*([original] if original else []), *(getattr(config, "architectures", None) or [])]


def classify_model_config(config: Any) -> str:
    """The kind of model that a config is of; an encoder-decoder says so itself."""
    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    kinds = map(classify_architecture, get_architectures_for_config(config))
    return next((kind for kind in kinds if kind != "causal_lm"), "causal_lm")


def classify_model_name(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> str:
    """The kind of a checkpoint: of a directory, a hub id or a short name.

    Only its config.json is read; code that comes with it is never run, whatever `trust_remote_code` says. Raises what the
    hub raises if there is no such checkpoint.
    """
    fields = download_file_from_hf(model_name, "config.json", token=token)
    return classify_model_config(SimpleNamespace(**fields))


def is_masked_lm_model(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> bool:
    """Whether a checkpoint is of an encoder that predicts masked tokens."""
    return classify_model_name(model_name, trust_remote_code, token) == "masked_lm"


def is_encoder_decoder_model(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> bool:
    """Whether a checkpoint is of an encoder-decoder."""
    return classify_model_name(model_name, trust_remote_code, token) == "seq2seq"


def is_multimodal_model(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> bool:
    """Whether a checkpoint reads images beside text."""
    return classify_model_name(model_name, trust_remote_code, token) == "multimodal"


def is_audio_model(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> bool:
    """Whether a checkpoint is of an encoder of sound."""
    return classify_model_name(model_name, trust_remote_code, token) == "audio"
