"""The table of architectures: a line per tiny config, a module per group. The tests of families say what each line buys.

A line turns on an option that no other line of any family turns on: how heads are grouped, what is tied, which biases there are,
windows shorter than the prompt, how much of a head is rotary and how it is stretched. `python -m tests.families.cover` says what
each line adds.
"""

from tests.families import (
    attention_options,
    classic,
    compact_encoders,
    composites,
    compressed,
    delta_nets,
    dual_encoders,
    encoder_decoders,
    encoders,
    gated_attention,
    gemma_olmo_cohere_phi,
    latent,
    linear_attention,
    llama,
    moe,
    other_encoder_decoders,
    other_mixing,
    recent_dense,
    recent_moe,
    recent_state_space,
    sparse_attention,
    state_space,
    streams,
    transformed,
    vision_encoders,
    vision_languages,
)
from tests.families._case import Case, known, reference

DECODERS = (
    *(classic, llama, gemma_olmo_cohere_phi, recent_dense, moe, latent, recent_moe),
    sparse_attention,
    streams,
    compressed,
    transformed,
    *(state_space, recent_state_space, delta_nets, linear_attention),
    *(attention_options, other_mixing, gated_attention, composites),
)

DECODER_CASES = known(case for module in DECODERS for case in module.CASES)
ENCODER_CASES = known([*encoders.CASES, *compact_encoders.CASES])
ENCODER_DECODER_CASES = known([*encoder_decoders.CASES, *other_encoder_decoders.CASES])
CASES = [*DECODER_CASES, *ENCODER_CASES, *ENCODER_DECODER_CASES]
# of models that read images; `CASES` are of text
VISION_CASES = [*vision_encoders.CASES, *vision_languages.CASES, *dual_encoders.CASES]

# Fields that a family does not read and that may have an effect: it refuses a config in which they are not at their default.
REFUSED = {
    name: fields
    for module in (*DECODERS, encoders, encoder_decoders, other_encoder_decoders)
    for name, fields in getattr(module, "REFUSED", {}).items()
}

__all__ = [
    "CASES",
    "DECODER_CASES",
    "ENCODER_CASES",
    "ENCODER_DECODER_CASES",
    "REFUSED",
    "VISION_CASES",
    "Case",
    "reference",
]
