"""Text methods of encoders: texts and pairs of texts to ids, token types and masks, and back."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.models.text.bos import ids_of
from hooked_lm.models.text.methods import TextMethods
from hooked_lm.models.text.tokenizer import Tokenizer
from hooked_lm.models.text.tokens import padded

Pair = tuple[str, str]
Text = str | Pair | Sequence[str] | Sequence[Pair]
Ids = Int[Tensor, "batch pos"]
Row = tuple[list[int], list[int]]  # ids and token types


class EncoderText(TextMethods):
    """Text methods of an encoder, whose tokenizer adds special tokens before and after a text.

    A text is a string, or a pair of strings as a tuple; a batch is a list of these.
    """

    def to_tokens(self, input: Text, move_to_device: bool = True, truncate: bool = True) -> tuple[Ids, Ids, Ids]:
        """Returns ids, token types and attention mask, each [batch, pos], with the tokenizer's special tokens.

        `truncate` shortens the longer text of a pair first and keeps the special tokens.
        """
        rows = [self._row(text, truncate) for text in texts_of(input)]
        if not all(ids for ids, _ in rows):
            raise ValueError("a text becomes zero tokens, but a model needs at least one")
        side = self.padding_side
        tokens, mask = padded([ids for ids, _ in rows], self.tokens.pad_id, side)
        types, _ = padded([types for _, types in rows], 0, side)
        if move_to_device:
            return tokens.to(self.device), types.to(self.device), mask.to(self.device)
        return tokens, types, mask

    def _row(self, text: str | Pair, truncate: bool) -> Row:
        """The ids and token types of one text or pair, truncated if requested."""
        texts = [text] if isinstance(text, str) else list(text)
        ids, types, parts = encoded(self.tokens.need_tokenizer(), texts)
        self.tokens.check_known([" ".join(texts)], [ids])
        excess = len(ids) - self.cfg.n_ctx if truncate else 0
        while excess > 0:
            lengths = {part: parts.count(part) for part in (0, 1)}
            longer = max(lengths, key=lambda part: lengths[part])
            if not lengths[longer]:
                raise ValueError(f"n_ctx is {self.cfg.n_ctx}, too short for the tokenizer's special tokens alone")
            last = len(parts) - 1 - parts[::-1].index(longer)
            for row in (ids, types, parts):
                del row[last]
            excess -= 1
        return ids, types

    def to_str_tokens(self, input: Any) -> list[str] | list[list[str]]:
        """Returns the tokens of text (with special tokens) or of ids, each as a string."""
        if isinstance(input, Tensor) or not _is_text(input):
            return self.tokens.to_str_tokens(input)
        rows = [self._row(text, truncate=True)[0] for text in texts_of(input)]
        strings = [self.tokens.to_str_tokens(torch.tensor(row)) for row in rows]
        return strings[0] if isinstance(input, (str, tuple)) else strings  # type: ignore[return-value]

    def get_token_position(self, single_token: str | int, input: Any, mode: str = "first") -> int:
        """Returns the "first" or "last" position of a token in a text (with special tokens) or in ids."""
        ids = torch.tensor(self._row(input, truncate=True)[0]) if _is_text(input) else input
        return self.tokens.get_token_position(single_token, ids, mode)


def texts_of(input: object) -> list[str | Pair]:
    """The input as a list of texts and pairs; TypeError for anything else, ValueError for an empty list."""
    texts = [input] if isinstance(input, (str, tuple)) else input
    if not isinstance(texts, list):
        raise TypeError(f"text must be a string, a pair as a tuple, or a list of these, got {type(input).__name__}")
    if not texts:
        raise ValueError("an empty list of texts: give at least one")
    for i, text in enumerate(texts):
        if not _is_text(text):
            raise TypeError(f"a text must be a string or a tuple of two strings, got {text!r} at [{i}]")
    return texts


def _is_text(input: object) -> bool:
    """Whether the input is one text or pair, or a list whose first item is one."""
    if isinstance(input, list):
        return bool(input) and not isinstance(input[0], list) and _is_text(input[0])
    return isinstance(input, str) or (
        isinstance(input, tuple) and len(input) == 2 and all(isinstance(part, str) for part in input)
    )


def encoded(tokenizer: Tokenizer, parts: list[str]) -> tuple[list[int], list[int], list[int | None]]:
    """The ids of one text or a pair with special tokens, their token types, and the part (0, 1, None) of each id.

    Never truncates or pads, whatever is set on the tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    part_of: list[int | None]
    if backend is None:
        found = tokenizer(*parts, return_token_type_ids=True, return_special_tokens_mask=True, verbose=False)
        ids, types, special = (list(found[name]) for name in ("input_ids", "token_type_ids", "special_tokens_mask"))
        n_first = len(ids_of(tokenizer, parts[:1], specials=False)[0])
        bare = [i for i, is_special in enumerate(special) if not is_special]
        part_of = [None if is_special else int(bare.index(i) >= n_first) for i, is_special in enumerate(special)]
    else:
        encoding = backend.encode(*parts)
        if encoding.overflowing:
            backend = type(backend).from_str(backend.to_str())
            backend.no_truncation()
            encoding = backend.encode(*parts)
        real = [
            i for i, there in enumerate(encoding.attention_mask) if there
        ]  # many tokenizers come with padding switched on
        columns = (encoding.ids, encoding.type_ids, encoding.sequence_ids)
        ids, types, part_of = ([column[i] for i in real] for column in columns)
    reads_types = "token_type_ids" in getattr(tokenizer, "model_input_names", ())
    return ids, types if reads_types else [0] * len(ids), part_of
