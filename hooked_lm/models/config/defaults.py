"""Defaults that change when the package is imported as `transformer_lens`, which sets them."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def same_tokenizer(tokenizer: T, cfg: object) -> T:
    """The tokenizer."""
    return tokenizer


fused_attention = "auto"
padding_side: str | None = "right"  # None: the side of the tokenizer
tokenizer_for: Callable[..., Any] = same_tokenizer  # what a decoder has of a tokenizer, which is given with its config
