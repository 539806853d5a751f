"""Identities between the sites of each component, and its weights that read and write the stream.

One file for each mechanism; importing this package registers them all.
"""

from hooked_lm.components.verification import (
    attention,
    blocks,
    compressed,
    cross_blocks,
    embed,
    fourier,
    global_stream,
    heads,
    latent,
    merged,
    mlp,
    mlstm,
    moe,
    narrow,
    ngram,
    other_attention,
    other_blocks,
    rwkv,
    ssm,
    streams,
)
from hooked_lm.components.verification.registry import (
    identities,
    input_weights,
    is_known,
    output_from_sites,
    output_weights,
    weights_after_norms,
)

__all__ = [
    "attention",
    "blocks",
    "compressed",
    "cross_blocks",
    "embed",
    "fourier",
    "global_stream",
    "heads",
    "identities",
    "input_weights",
    "is_known",
    "latent",
    "merged",
    "mlp",
    "mlstm",
    "moe",
    "narrow",
    "ngram",
    "other_attention",
    "other_blocks",
    "output_from_sites",
    "output_weights",
    "rwkv",
    "ssm",
    "streams",
    "weights_after_norms",
]
