"""BOS tokens of tokenizers and texts, and the tokenizer that a decoder has under the name `transformer_lens`."""

from copy import deepcopy
from typing import Any

from hooked_lm.models.config.tree import VisionLanguageConfig

__all__ = ["get_input_with_manually_prepended_bos", "get_tokenizer_with_bos", "with_specials"]

# TransformerLens leaves the tokenizers of these as they are, and prepends BOS to their texts itself.
WITHOUT_BOS = ("OlmoForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM")


def get_tokenizer_with_bos(tokenizer: Any) -> Any:
    """A tokenizer that prepends its BOS to texts: this one if it does so already, otherwise a copy.

    A tokenizer without BOS is returned unchanged, and so is one whose BOS cannot be used in a template (it contains a colon).

    >>> from hooked_lm import HookedTransformer
    >>> tokenizer = HookedTransformer.from_pretrained("demo").tokenizer
    >>> get_tokenizer_with_bos(tokenizer).decode(
    ...     get_tokenizer_with_bos(tokenizer).encode("Mary")
    ... )
    '<|endoftext|>Mary'
    """
    if tokenizer.bos_token is None or getattr(tokenizer, "add_bos_token", False):
        return tokenizer
    with_bos = deepcopy(tokenizer)
    try:
        with_bos.add_bos_token = True
    except ValueError:
        return tokenizer
    return with_bos


def with_specials(tokenizer: Any, cfg: Any) -> Any:
    """A copy of a tokenizer that prepends BOS and can pad, as that of a decoder of TransformerLens 3.9.0.

    Without a padding token it pads with EOS, without a BOS it has EOS as BOS, which it does not prepend. It pads on the side
    that the config says, or else on its own. Tokenizers without EOS keep what they have. That of a model that reads images is
    returned unchanged, because the checkpoint's processor writes prompts for it.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> copy = with_specials(model.tokenizer, model.cfg)
    >>> copy(["Mary went", "Mary"], padding=True)["attention_mask"]
    [[1, 1, 1], [1, 1, 0]]
    """
    if isinstance(cfg.tree, VisionLanguageConfig):
        return tokenizer
    made = tokenizer if cfg.original_architecture in WITHOUT_BOS else get_tokenizer_with_bos(tokenizer)
    made = deepcopy(tokenizer) if made is tokenizer else made
    made.padding_side = cfg.default_padding_side or made.padding_side
    if made.eos_token is not None:
        made.pad_token = made.eos_token if made.pad_token is None else made.pad_token
        made.bos_token = made.eos_token if made.bos_token is None else made.bos_token
    return made


def get_input_with_manually_prepended_bos(bos_token: str | None, input: str | list[str]) -> str | list[str]:
    """The text, or each of several texts, with the BOS prepended; unchanged if there is none."""
    bos = bos_token or ""
    return bos + input if isinstance(input, str) else [bos + text for text in input]
