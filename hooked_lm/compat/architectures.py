"""Classifies models of transformers by class name, config, or checkpoint name."""

import re
from types import SimpleNamespace
from typing import Any

from hooked_lm.compat.downloads import download_file_from_hf

__all__ = [
    "MASKED_LM_ARCHITECTURES", "POST_NORM_ARCHITECTURES", "SEQ2SEQ_ARCHITECTURES", "classify_architecture",
    "classify_model_config", "classify_model_name", "get_architectures_for_config", "is_audio_model",
    "is_encoder_decoder_model", "is_masked_lm_model", "is_multimodal_model",
]  # fmt: skip

# Among the supported families: encoder-decoders, encoders, and decoders with norms after sublayers and not before them.
SEQ2SEQ_ARCHITECTURES = {
    "BartForConditionalGeneration", "BigBirdPegasusForConditionalGeneration", "BlenderbotForConditionalGeneration",
    "BlenderbotSmallForConditionalGeneration", "FSMTForConditionalGeneration", "LEDForConditionalGeneration",
    "LongT5ForConditionalGeneration", "M2M100ForConditionalGeneration", "MarianMTModel",
    "MBartForConditionalGeneration", "MT5ForConditionalGeneration", "MvpForConditionalGeneration",
    "PegasusForConditionalGeneration", "PegasusXForConditionalGeneration", "PLBartForConditionalGeneration",
    "ProphetNetForConditionalGeneration", "SwitchTransformersForConditionalGeneration", "T5ForConditionalGeneration",
    "T5Gemma2ForConditionalGeneration", "T5GemmaForConditionalGeneration", "T5WithLMHeadModel",
    "UMT5ForConditionalGeneration",
}  # fmt: skip
MASKED_LM_ARCHITECTURES = {
    "AlbertForMaskedLM", "BertForMaskedLM", "BigBirdForMaskedLM", "CamembertForMaskedLM", "ConvBertForMaskedLM",
    "Data2VecTextForMaskedLM",
    "DebertaForMaskedLM", "DebertaV2ForMaskedLM", "DistilBertForMaskedLM", "ElectraForMaskedLM", "ErnieForMaskedLM",
    "EsmcForMaskedLM", "EsmForMaskedLM", "EuroBertForMaskedLM", "FlaubertWithLMHeadModel", "FNetForMaskedLM", "GteForMaskedLM",
    "JinaEmbeddingsV3ForMaskedLM", "LayoutLMForMaskedLM", "LongformerForMaskedLM", "MegatronBertForMaskedLM",
    "MobileBertForMaskedLM", "ModernBertForMaskedLM", "MPNetForMaskedLM", "NomicBertForMaskedLM", "RemBertForMaskedLM",
    "RobertaForMaskedLM", "RobertaPreLayerNormForMaskedLM", "RoCBertForMaskedLM", "RoFormerForMaskedLM",
    "SqueezeBertForMaskedLM", "TapasForMaskedLM", "UltrabertForMaskedLM", "XLMRobertaForMaskedLM",
    "XLMRobertaXLForMaskedLM", "XLMWithLMHeadModel", "XmodForMaskedLM",
}  # fmt: skip
POST_NORM_ARCHITECTURES = {"Exaone4ForCausalLM", "FlexOlmoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM"}

# suffix of a class name -> kind, for classes that are in none of the sets
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
    if architecture in MASKED_LM_ARCHITECTURES:
        return "masked_lm"
    endings = (kind for ending, kind in BY_ENDING.items() if re.search(f"({ending})$", architecture))
    return next(endings, "causal_lm")


def get_architectures_for_config(config: Any) -> list[str]:
    """The class names in a config of hooked_lm or transformers."""
    original = getattr(config, "original_architecture", None)
    return [*([original] if original else []), *(getattr(config, "architectures", None) or [])]


def classify_model_config(config: Any) -> str:
    """The kind of model that a config describes."""
    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    kinds = map(classify_architecture, get_architectures_for_config(config))
    return next((kind for kind in kinds if kind != "causal_lm"), "causal_lm")


def classify_model_name(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> str:
    """The kind of a checkpoint: a directory, a hub id or a short name.

    Only its config.json is read; its code is never run, whatever `trust_remote_code` is. Raises the hub's error if there is
    no such checkpoint.
    """
    fields = download_file_from_hf(model_name, "config.json", token=token)
    return classify_model_config(SimpleNamespace(**fields))


def is_masked_lm_model(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> bool:
    """Whether a checkpoint is an encoder for masked tokens."""
    return classify_model_name(model_name, trust_remote_code, token) == "masked_lm"


def is_encoder_decoder_model(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> bool:
    """Whether a checkpoint is an encoder-decoder."""
    return classify_model_name(model_name, trust_remote_code, token) == "seq2seq"


def is_multimodal_model(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> bool:
    """Whether a checkpoint is a model of images and text."""
    return classify_model_name(model_name, trust_remote_code, token) == "multimodal"


def is_audio_model(model_name: str, trust_remote_code: bool = False, token: str | None = None) -> bool:
    """Whether a checkpoint is an audio encoder."""
    return classify_model_name(model_name, trust_remote_code, token) == "audio"
