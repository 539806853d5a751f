"""An encoder's side of text: single texts and pairs of texts into ids, token types and masks, and back."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.models.text.methods import TextMethods
from hooked_lm.models.text.tokens import ids_of, padded

Pair = tuple[str, str]
Text = str | Pair | Sequence[str] | Sequence[Pair]
Ids = Int[Tensor, "batch pos"]
Row = tuple[list[int], list[int]]  # ids and token types


class EncoderText(TextMethods):
    """The same for an encoder, whose tokenizer puts special tokens around a text.

    A text is a string, or a pair of strings as a tuple; several are a list of these.
    """

    def to_tokens(self, input: Text, move_to_device: bool = True, truncate: bool = True) -> tuple[Ids, Ids, Ids]:
        """Ids, token types and which ids are real, each [batch, pos], with the tokenizer's special tokens.

        With `truncate` the longer of two texts is cut first, and the special tokens stay.
        """
        rows = [self._row(text, truncate) for text in texts_of(input)]
        if not all(ids for ids, _ in rows):
            raise ValueError("a text becomes zero tokens, and a model needs at least one")
        side = self.cfg.default_padding_side
        tokens, mask = padded([ids for ids, _ in rows], self.tokens.pad_id, side)
        types, _ = padded([types for _, types in rows], 0, side)
        if move_to_device:
            return tokens.to(self.device), types.to(self.device), mask.to(self.device)
        return tokens, types, mask

    def _row(self, text: str | Pair, truncate: bool) -> Row:
        """The ids and token types of one text or pair, cut if wanted."""
        ids, types, owners = encoded(self.tokens.need_tokenizer(), [text] if isinstance(text, str) else list(text))
        excess = len(ids) - self.cfg.n_ctx if truncate else 0
        while excess > 0:
            lengths = {owner: owners.count(owner) for owner in (0, 1)}
            longer = max(lengths, key=lambda owner: lengths[owner])
            if not lengths[longer]:
                raise ValueError(f"n_ctx is {self.cfg.n_ctx}, too short for the tokenizer's special tokens alone")
            last = len(owners) - 1 - owners[::-1].index(longer)
            for row in (ids, types, owners):
                del row[last]
            excess -= 1
        return ids, types

    def to_str_tokens(self, input: Any) -> list[str] | list[list[str]]:
        """The tokens of text, with the tokenizer's special ones, or of ids, each as a string."""
        if isinstance(input, Tensor) or not _is_text(input):
            return self.tokens.to_str_tokens(input)
        rows = [self._row(text, truncate=True)[0] for text in texts_of(input)]
        strings = [self.tokens.to_str_tokens(torch.tensor(row)) for row in rows]
        return strings[0] if isinstance(input, (str, tuple)) else strings  # type: ignore[return-value]

    def get_token_position(self, single_token: str | int, input: Any, mode: str = "first") -> int:
        """Where a token stands in a text with its special tokens, or in ids: its "first" or "last" position."""
        ids = torch.tensor(self._row(input, truncate=True)[0]) if _is_text(input) else input
        return self.tokens.get_token_position(single_token, ids, mode)


def texts_of(input: Any) -> list[str | Pair]:
    """The texts and pairs of an input; raises TypeError for what is neither, ValueError for none at all."""
    texts = [input] if isinstance(input, (str, tuple)) else input
    if not isinstance(texts, list):
        raise TypeError(f"text is a string, a pair as a tuple, or a list of these, got {type(input).__name__}")
    if not texts:
        raise ValueError("an empty list of texts: give at least one")
    for i, text in enumerate(texts):
        if not _is_text(text):
            raise TypeError(f"a text is a string or a tuple of two, got {text!r} at [{i}]")
    return texts


def _is_text(input: Any) -> bool:
    """Whether this is one text or one pair, or a list that begins with one."""
    if isinstance(input, list):
        return bool(input) and not isinstance(input[0], list) and _is_text(input[0])
    return isinstance(input, str) or (
        isinstance(input, tuple) and len(input) == 2 and all(isinstance(part, str) for part in input)
    )


def encoded(tokenizer: Any, parts: list[str]) -> tuple[list[int], list[int], list[int | None]]:
    """The ids of one text or of two with special tokens, their types, and whose they are: of part 0, of 1, of neither.

    Nothing is cut or padded, whatever others have set on the tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    owners: list[int | None]
    if backend is None:
        found = tokenizer(*parts, return_token_type_ids=True, return_special_tokens_mask=True, verbose=False)
        ids, types, special = (list(found[name]) for name in ("input_ids", "token_type_ids", "special_tokens_mask"))
        n_first = len(ids_of(tokenizer, parts[:1], specials=False)[0])
        bare = [i for i, is_special in enumerate(special) if not is_special]
        owners = [None if is_special else int(bare.index(i) >= n_first) for i, is_special in enumerate(special)]
    else:
        encoding = backend.encode(*parts)
        if encoding.overflowing or 0 in encoding.attention_mask:
            backend = type(backend).from_str(backend.to_str())
            backend.no_truncation()
            backend.no_padding()
            encoding = backend.encode(*parts)
        ids, types, owners = list(encoding.ids), list(encoding.type_ids), list(encoding.sequence_ids)
    reads_types = "token_type_ids" in getattr(tokenizer, "model_input_names", ())
    return ids, types if reads_types else [0] * len(ids), owners
