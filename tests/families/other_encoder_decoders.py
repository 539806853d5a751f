"""Encoder-decoders with decoders of other kinds: one softmax over own keys and the encoder's."""

from typing import Any

from tests.families._case import LLAMA3, Case
from tests.families._composite import SIGLIP
from tests.families.encoder_decoders import GEMMA, without_pad_in_decoder

ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 60.0},
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
}
STRETCHED = {**ROPES, "full_attention": LLAMA3["rope_parameters"]}
TEXT: dict[str, Any] = {**GEMMA, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": ROPES}
LOCAL, GLOBAL = ({"layer_types": [f"{kind}_attention"] * 2} for kind in ("sliding", "full"))
SPECIAL = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 3}


def t5gemma2(name: str, encoder: dict[str, Any], decoder: dict[str, Any], eoi: int = 7, **fields: Any) -> Case:
    """Encoder and decoder have configs of their own; that of the encoder has a tower of images."""
    side = {"text_config": {**TEXT, **encoder}, "vision_config": SIGLIP, "eoi_token_index": eoi}
    parts = {"encoder": {**side, "mm_tokens_per_image": 4}, "decoder": {**TEXT, **decoder}}
    fields = {**SPECIAL, "image_token_index": 8, **parts, **fields}
    return Case("t5gemma2", name, fields, auto="AutoModelForSeq2SeqLM", adjust=without_pad_in_decoder)


CASES: list[Case] = [
    t5gemma2("even-windows", {"sliding_window": 4}, {}),
    t5gemma2(
        "one-kv-biased-untied",
        {"attention_bias": True, "num_key_value_heads": 1, "hidden_activation": "silu"},
        {"attention_bias": True, "num_attention_heads": 2, "final_logit_softcapping": None, "rms_norm_eps": 0.3},
        eoi=60,
        tie_word_embeddings=False,
    ),
    t5gemma2(
        "all-local-or-none-llama3",
        {**LOCAL, "rope_parameters": STRETCHED, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        {**GLOBAL, "rope_parameters": STRETCHED, "query_pre_attn_scalar": 16, "intermediate_size": 40},
        eoi=4000,
    ),
]
