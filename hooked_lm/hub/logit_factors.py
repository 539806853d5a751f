"""What a language model does to its logits, and the classes of composites in transformers leave out.

Most of these classes have an unembedding of their own, without the scale and the soft cap that the language model alone applies
and was trained with: those of Aya Vision, Granite Speech, LLaVA-NeXT around Granite, or Gemma 3. Here every class applies them.
"""

from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.embeddings.embed import Unembed, soft_capped

# Composites whose class in transformers applies them, or calls a language model with an unembedding.
APPLIED = frozenset(
    (
        *("cohere_compass", "gemma3n", "gemma4", "gemma4_unified", "granite4_vision", "granite_docling"),
        *("hyperclovax_vision_v2", "muse_glimmer", "paligemma"),
        *("blip-2", "instructblip", "instructblipvideo", "llama4"),
    )
)


def left_out_by_transformers(model_type: str | None, unembed: Unembed.Config) -> str:
    """What the class of a composite leaves out of the logits of its language model, as a phrase; empty if nothing.

    `model_type` is that of the composite, None if the model is none.

    >>> unembed = Unembed.Config(8, 16, scale=0.25, soft_cap=30.0)
    >>> (
    ...     left_out_by_transformers("llava_next", unembed),
    ...     left_out_by_transformers("gemma4", unembed),
    ... )
    ('the scale of 0.25 and the soft cap of 30', '')
    """
    if model_type is None or model_type in APPLIED:
        return ""
    scale = "" if unembed.scale == 1.0 else f"the scale of {unembed.scale:g}"
    cap = "" if unembed.soft_cap is None else f"the soft cap of {unembed.soft_cap:g}"
    return " and ".join(filter(None, (scale, cap)))


def with_factors(logits: Float[Tensor, "*batch d_vocab"], unembed: Unembed.Config) -> Float[Tensor, "*batch d_vocab"]:
    """Logits of a class that leaves out the scale and the soft cap, with both."""
    return soft_capped(logits * unembed.scale, unembed.soft_cap)
