"""The text models of transformers that do not load here, and why."""

from collections.abc import Iterator
from contextlib import contextmanager

from hooked_lm.families import model_class, plugins, supported
from hooked_lm.hub.composite import text_config

NOT_YET = "not yet"

# Why -> the model types: what stands in the way, whoever does the work.
REASONS: dict[str, tuple[str, ...]] = {
    # transformers has no left-to-right model, or no exact one, to be compared with
    "its text model in transformers is not causal: earlier logits depend on later tokens": ("cpmant", "xlnet"),
    "its attention hashes at random, so that logits depend on a seed; not yet: models with local layers alone": (
        "reformer",
    ),
    "transformers uses no experts but 0 and 1 of it: there is nothing to compare with": ("nllb-moe",),
    # not a stack of blocks over tokens
    "another model divides the bytes into patches": ("blt",),
    "two models of any kind": ("encoder-decoder", "vision-encoder-decoder"),
    "a head for speculative decoding, which reads another model's cache": (
        "gemma4_assistant",
        "gemma4_unified_assistant",
    ),
    "its layers attend to images or proteins": ("evolla", "idefics"),
    "it writes codes of sound": ("moshi", "musicgen", "musicgen_melody"),
    "its input is sound": ("omniasr", "whisper"),
    "an encoder of sound beside that of text": ("seamless_m4t", "seamless_m4t_v2"),
    "a policy for robots, of two towers that attend jointly": ("pi0",),
    "it denoises blocks of text": ("diffusion_gemma",),
    "what a token sees depends on where the prompt ended: all of the prompt, and the last tokens of the answer": (
        "unlimited_ocr",
    ),
    "its layers depend on a delay of the sound that it writes down": ("voxtral_realtime",),
    "later layers have fewer positions, each the mean of several: positions of their sites are no tokens": ("funnel",),
    "latents that attend to bytes": ("perceiver",),
}

# What nobody has built here yet -> the model types that need it. A type that neither table names needs nothing that is known.
NOT_BUILT: dict[str, tuple[str, ...]] = {
    "a decoder that attends to an image in every layer": ("blip", "pix2struct", "pp_formulanet", "trocr"),
    "gates of the residual stream, and projections around its experts": ("muse_spark",),
    "tokens with boxes on a page, and images of it": ("udop",),
    "entities beside tokens": ("luke",),
    "blocks that are run again and again": ("dory", "hrm_text"),
    "an indexer that chooses blocks of keys": ("minimax_m3_vl", "minimax_m3_vl_text"),
    "learned factors of rotary, and scores scaled for each head": ("mistral_large4",),
    "hyper-connections of another kind, beside the delta rule": ("glm5_next",),
    "an indexer that chooses blocks of keys, and embeddings of n-grams": ("qwen4_exp", "qwen4_exp_text"),
    "attention with relative logits and convolutions": (
        "inkling2",
        "inkling2_loop",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_mm_model",
        "inkling_text",
    ),
    "a norm after the position embedding, and an image before the text": ("git",),
    "a LayerNorm of the mixed values of all heads together, and positions that skip the ids of padding": ("kosmos-2",),
    "positions that skip the ids of padding wherever they are": ("kosmos-2.5",),
    "images for a language model that is an encoder": ("modernvbert",),
    "an encoder of text and patches whose mixed values lose their part along the token's own value": ("neomme",),
    "attention approximated by landmarks, hashes or several resolutions": ("mra", "nystromformer", "yoso"),
    "a residual stream that is scaled at every sum": ("beam",),
    "an encoder that reads images with the text": ("ultravbert",),
    "files with integers and ranges of quantised training beside each weight": ("ibert",),
    "norms of one weight per head, and images among the tokens": ("chameleon",),
}


def missing() -> dict[str, str]:
    """Model type -> why it does not load, for each causal, masked, sequence-to-sequence and image-text type of transformers.

    >>> missing()["whisper"], missing()["hrm_text"]
    ('its input is sound', 'not yet: blocks that are run again and again')
    """
    from transformers.models.auto import modeling_auto as auto

    tables = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    all_reasons = {**REASONS, **{f"{NOT_YET}: {what}": model_types for what, model_types in NOT_BUILT.items()}}
    reasons = {model_type: reason for reason, model_types in all_reasons.items() for model_type in model_types}
    lacking = {model_type for table in tables for model_type in table} - set(supported()) - plugins.model_types()
    return {kind: reasons.get(kind, NOT_YET) for kind in sorted(lacking) if kind in reasons or not _is_composite(kind)}


@contextmanager
def _without_remarks() -> Iterator[None]:
    """Without what transformers logs about the defaults of configs that nobody uses."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _is_composite(model_type: str) -> bool:
    """Whether it has, by default, a language model that loads."""
    from transformers import CONFIG_MAPPING

    try:
        with _without_remarks():
            text = text_config(CONFIG_MAPPING[model_type]())
    except Exception:  # some configs have no defaults, or need another package
        return False
    if text is None or text.model_type not in supported():
        return False
    return model_class(text.model_type) != "HookedEncoder"
