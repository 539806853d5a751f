"""BOS tokens of tokenizers and texts."""

from copy import deepcopy
from typing import Any

__all__ = ["get_input_with_manually_prepended_bos", "get_tokenizer_with_bos"]


def get_tokenizer_with_bos(tokenizer: Any) -> Any:
    """A tokenizer that prepends its BOS to texts: this one if it does so already, otherwise a copy.

    A tokenizer without BOS is returned unchanged, and so is one whose BOS cannot be used in a template (it contains a colon).

    >>> from hooked_lm import HookedTransformer
    >>> tokenizer = HookedTransformer.from_pretrained("demo").tokenizer
    >>> get_tokenizer_with_bos(tokenizer).decode(get_tokenizer_with_bos(tokenizer).encode("Mary"))
    '<|endoftext|>Mary'
    """
    if tokenizer.bos_token is None or tokenizer.encode("a")[:1] == [tokenizer.bos_token_id]:
        return tokenizer
    with_bos = deepcopy(tokenizer)
    try:
        with_bos.add_bos_token = True
    except ValueError:
        return tokenizer
    return with_bos


def get_input_with_manually_prepended_bos(bos_token: str | None, input: str | list[str]) -> str | list[str]:
    """The text, or each of several texts, with the BOS prepended; unchanged if there is none."""
    bos = bos_token or ""
    return bos + input if isinstance(input, str) else [bos + text for text in input]
