"""Defaults that change when the package is imported as `transformer_lens`, which sets them."""

from collections.abc import Callable
from typing import Any


def same_tokenizer(tokenizer: object, cfg: object) -> Any:
    """The tokenizer."""
    return tokenizer


fused_attention = "auto"
padding_side: str | None = "right"  # None: the side of the tokenizer
tokenizer_for: Callable[[Any, Any], Any] = same_tokenizer  # what a decoder of this config has of a tokenizer
