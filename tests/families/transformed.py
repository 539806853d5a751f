"""Decoders with a transform before the unembedding."""

from typing import Any

from tests.families._case import SIZES, Case
from tests.families.composites import embed_padding

MODERN = {
    **SIZES,
    "pad_token_id": 0,
    "num_hidden_layers": 3,
    "norm_eps": 0.02,
    "local_attention": 10,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}


def by_type(full: float, local: float, **more: Any) -> dict[str, Any]:
    """A rotary embedding for each type of layers."""
    rope = {"rope_type": "default", **more}
    types = {"full_attention": {**rope, "rope_theta": full}, "sliding_attention": {**rope, "rope_theta": local}}
    return {"rope_parameters": types}


# fmt: off
CASES: list[Case] = [
    Case("modernbert-decoder", "local", {**MODERN, **by_type(300.0, 40.0)}, adjust=embed_padding),
    Case("modernbert-decoder", "biased-relu-untied", {**MODERN, **by_type(50.0, 400.0), "norm_bias": True,
         "attention_bias": True, "mlp_bias": True, "classifier_bias": True, "decoder_bias": False,
         "classifier_activation": "relu", "hidden_activation": "silu", "tie_word_embeddings": False,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, adjust=embed_padding),
]
# fmt: on
