"""Kinds of models."""

from hooked_lm.compat.architectures import (
    MASKED_LM_ARCHITECTURES,
    POST_NORM_ARCHITECTURES,
    SEQ2SEQ_ARCHITECTURES,
    classify_architecture,
    classify_model_config,
    classify_model_name,
    get_architectures_for_config,
    is_audio_model,
    is_encoder_decoder_model,
    is_masked_lm_model,
    is_multimodal_model,
)
