"""Converts text to token ids and back, for one model.

Vocabulary: `batch` and `pos` are the dimensions of ids; a *row* is the ids of one text before padding; BOS is the prefix
of every row, which for a few tokenizers is more than one token.

BOS, truncation and padding are applied to the ids here and not by the tokenizer, so no call changes the state of a
tokenizer that another thread or model may share.
"""

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, SupportsIndex

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.errors import ArgumentError
from hooked_lm.models.stack import checked_ids
from hooked_lm.models.text.bos import ids_of, special_prefix, warn_if_eos_is_bos
from hooked_lm.models.text.byte_tokens import as_text
from hooked_lm.models.text.tokenizer import TokenIds, Tokenizer
from hooked_lm.models.text.unknown import leaves_out_text, warn_if_unknown
from hooked_lm.models.vision.inputs import VisionInputs


class Tokens:
    """Converts text to ids and ids to text for a model with a context of `n_ctx` and a vocabulary of `d_vocab`.

    BOS: `prepend_bos=None` means `default_prepend_bos`. If True, every row begins with BOS exactly once, even if the
    text already begins with it. If False, nothing is added, and a BOS written in the text is kept. BOS is the prefix
    that the tokenizer adds to every text, else its `bos_token`, else its `eos_token`; that is said once in a warning. The
    tokens that a tokenizer appends (an EOS) are dropped, because the model continues the text; an EOS in the text is kept.

    Padding: on `default_padding_side` unless a call overrides it, with the tokenizer's pad token, else its EOS,
    else id 0. The tokenizer is never modified.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(
        ...     models.WordLevel({"<s>": 0, "the": 1, "cat": 2, "sat": 3}, unk_token="<s>")
        ... )
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=words, bos_token="<s>", eos_token="<s>"
        ... )
        >>> text = Tokens(
        ...     tokenizer,
        ...     default_prepend_bos=True,
        ...     default_padding_side="right",
        ...     n_ctx=16,
        ...     d_vocab=4,
        ... )
        >>> text.to_tokens("the cat sat")
        tensor([[0, 1, 2, 3]])
        >>> tokens, mask = text.encode(["the cat sat", "the"], padding_side="left")
        >>> tokens, mask
        (tensor([[0, 1, 2, 3],
                [0, 0, 0, 1]]), tensor([[1, 1, 1, 1],
                [0, 0, 1, 1]]))
        >>> text.to_str_tokens("the cat", prepend_bos=False)
        ['the', 'cat']
        >>> text.get_token_position("cat", "the cat sat")
        2

    Raises:
        ValueError: text without a tokenizer, an empty list of prompts, or a prompt of zero tokens.
        TypeError: input that is neither text nor ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,  # a transformers fast or slow tokenizer, or None
        default_prepend_bos: bool,
        default_padding_side: str,
        *,
        n_ctx: int,
        d_vocab: int,
    ):
        self.tokenizer = tokenizer
        self.default_prepend_bos = default_prepend_bos
        self.default_padding_side = default_padding_side
        self.n_ctx = n_ctx
        self.d_vocab = d_vocab
        self._says_no_more = False  # about BOS
        self._warned_of_unknown = False

    @cached_property
    def _prefix(self) -> list[int]:
        return special_prefix(self.need_tokenizer())

    @property
    def bos_ids(self) -> list[int]:
        """The ids that `prepend_bos=True` puts before a row; empty for a tokenizer with neither BOS nor EOS."""
        if self._prefix:
            return self._prefix
        candidates = (self.need_tokenizer().bos_token_id, self.need_tokenizer().eos_token_id)
        return [token for token in candidates if token is not None][:1]

    @property
    def pad_id(self) -> int:
        """The id that pads short rows; always below `d_vocab`, so that the model can embed it."""
        candidates = (self.need_tokenizer().pad_token_id, self.need_tokenizer().eos_token_id, 0)
        return next(token for token in candidates if token is not None and token < self.d_vocab)

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
        device: torch.device | str | None = None,
    ) -> Int[Tensor, "batch pos"]:
        """Returns the ids of one or several texts, one row each, cut to `n_ctx` positions if `truncate`."""
        return self.encode(input, prepend_bos, padding_side, truncate, device)[0]

    def encode(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = False,
        device: torch.device | str | None = None,
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """Returns `(tokens, mask)`: the ids as in `to_tokens`, and 1 for real tokens, 0 for padding.

        Unlike `to_tokens`, does not truncate by default, so that a forward pass can refuse a prompt that is too long.
        The mask comes from the lengths of the rows, not from the ids, so it is right even if the pad token also
        occurs in text (GPT-2's pad, BOS and EOS are one token).
        """
        side = self._side(padding_side)
        rows = self._rows(input, prepend_bos, truncate)
        tokens, mask = padded(rows, self.pad_id, side)
        return tokens.to(device), mask.to(device)

    def attention_mask(
        self,
        tokens: Int[Tensor, "batch pos"],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> Int[Tensor, "batch pos"]:
        """Infers the mask of ids that have none: 1 for real tokens, 0 for padding.

        For text use `encode`, whose mask is exact. Here padding is inferred from the run of pad tokens on the padding
        side. If the pad token is not BOS or EOS, the whole run is padding. Otherwise:

        - with BOS and left padding, the run is padding, except for the BOS at its end;
        - in all other cases the shortest run of the batch counts as text in every row, because padding only
          equalizes lengths. So a single row is all text, including a trailing EOS.

        At least one token of each row is real. Without a tokenizer every token is real.
        """
        mask = torch.ones_like(tokens)
        if self.tokenizer is None or tokens.numel() == 0:
            return mask
        side = self._side(padding_side)
        padding_first = tokens if side == "left" else tokens.flip(-1)
        run_length = (padding_first == self.pad_id).long().cumprod(-1).sum(-1, keepdim=True)
        n_padding = run_length - self._n_text_in_run(run_length, side, prepend_bos)
        padding = torch.arange(tokens.shape[-1], device=tokens.device) < n_padding
        padding[:, -1] = False
        return mask.masked_fill(padding if side == "left" else padding.flip(-1), 0)

    def to_string(self, tokens: TokenIds) -> str | list[str]:
        """Decodes ids: a string for one id or [pos], a list of strings for [batch, pos].

        Ids are a tensor, an array or a list (of ids, or of rows of any lengths). Special tokens are included.
        """
        tokenizer = self.need_tokenizer()
        rows, rank = _to_rows(tokens)
        texts = [_decode(tokenizer, row) for row in rows]
        return texts if rank == 2 else texts[0]

    def to_str_tokens(
        self, input: str | TokenIds, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> list[str] | list[list[str]]:
        """Returns each token as a string. Bytes that are part of a character are written as `<0xE2>`; see `to_string`.

        A text, an id, or ids [pos] or [1, pos] give one list of strings. A list of texts, a list of rows or ids
        [batch, pos] give a list of such lists. The tokens of `VisionInputs` are read as if they were given.
        Text gets BOS according to `prepend_bos` and is cut to `n_ctx` tokens;
        it is never padded, so `padding_side` has no effect.
        """
        tokenizer = self.need_tokenizer()
        input = input.tokens if isinstance(input, VisionInputs) else input
        is_batch = isinstance(input, (list, tuple))
        if isinstance(input, str) or (isinstance(input, (list, tuple)) and (not input or isinstance(input[0], str))):
            rows = self._rows(input, prepend_bos, truncate=True)
        else:
            rows, rank = _to_rows(input)
            is_batch = rank == 2 and (is_batch or len(rows) != 1)
        strings = [_decode_each(tokenizer, row) for row in rows]
        return strings if is_batch else strings[0]

    def to_single_token(self, string: str) -> int:
        """Returns the id of a string that is exactly one token; ValueError with its tokens if it is several."""
        [row] = self._rows(string, prepend_bos=False, truncate=False)
        if len(row) > 1:
            other = string[1:] if string.startswith(" ") else f" {string}"
            fix = (
                f"{other!r} is one"
                if self._is_single_token(other)
                else "use a shorter string, or the id of its first token"
            )
            raise ValueError(
                f"{string!r} is not a single token: it becomes the {len(row)} tokens "
                f"{_decode_each(self.need_tokenizer(), row)}, ids {row}; {fix}"
            )
        return row[0]

    def _is_single_token(self, string: str) -> bool:
        return bool(string) and len(self._rows(string, prepend_bos=False, truncate=False)[0]) == 1

    def single_token_ids(self, tokens: object, device: torch.device | str | None = None) -> Int[Tensor, "..."]:
        """Returns the checked ids of a single-token string, a list of such strings, or ids of any shape."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        elif isinstance(tokens, (list, tuple)):
            tokens = [self.to_single_token(token) if isinstance(token, str) else token for token in tokens]
        ids = torch.as_tensor(tokens, device=device)
        self.check_ids(ids)
        return ids

    def answer_ids(self, answers: object, name: str = "answers", begins_text: bool = False) -> Int[Tensor, "..."]:
        """The ids of answers: a string that is one token, a list of such strings or ids, or a tensor of ids of any shape.

        Raises ValueError for a string of several tokens, and for a word without the leading space that the same word has
        after another word, where these are two different tokens, unless answers begin a text; TypeError for anything else. `name`
        is the argument in errors.
        """
        several = list(answers) if isinstance(answers, (list, tuple)) else [answers]
        for word in (answer for answer in several if isinstance(answer, str)):
            token = self.to_single_token(word)
            if not begins_text and self.without_space(word):
                raise ValueError(
                    f"{name}: {word!r} has no leading space, so it is not the token that follows a word: give {f' {word}'!r}, "
                    f"or the id {token} for the token without a space"
                )
        try:
            ids = self.single_token_ids(answers)
        except (TypeError, RuntimeError):
            raise TypeError(f"{name} must be strings, ids, or a tensor of ids; got {answers!r}") from None
        return ids

    def without_space(self, text: str) -> tuple[int, int] | None:
        """Of a text whose first word has no leading space, and would be another, single token with one: its first token, and that
        other one; else None."""
        word = text.split()[0] if text[:1].isalpha() else ""
        if not word or not self._is_single_token(f" {word}"):
            return None
        first, spaced = self._rows(word, prepend_bos=False, truncate=False)[0][0], self.to_single_token(f" {word}")
        return None if first == spaced else (first, spaced)

    def to_single_str_token(self, int_token: int) -> str:
        """Returns the string of one id. Bytes that are part of a character are written as `<0xE2>`."""
        token = _one_id(int_token)
        self.check_ids(torch.tensor(token))
        [string] = _decode_each(self.need_tokenizer(), [token])
        return string

    def get_token_position(
        self,
        single_token: str | SupportsIndex,
        input: str | TokenIds,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Returns the position of a token (a string or an id) in a text, or in ids [pos] or [1, pos].

        The ids may be whole numbers of any dtype. `mode` selects the "first" or "last" occurrence. A single text has no
        padding, so `padding_side` has no effect.
        """
        if mode not in ("first", "last"):
            raise ArgumentError(f"mode must be 'first' or 'last', got {mode!r}")
        rows = (
            self._rows(input, prepend_bos, truncate=True)
            if isinstance(input, str)
            else _to_rows(_as_integers(input))[0]
        )
        if len(rows) != 1:
            raise ArgumentError(f"a position is looked up in one text or one row of ids, got {len(rows)}")
        [row] = rows
        token = self.to_single_token(single_token) if isinstance(single_token, str) else _one_id(single_token)
        if token not in row:
            raise ArgumentError(f"token {single_token!r} (id {token}) is not among the {len(row)} tokens {row}")
        return row.index(token) if mode == "first" else len(row) - 1 - row[::-1].index(token)

    def ids(self, texts: list[str], specials: bool = False) -> list[list[int]]:
        """The ids of each text, neither padded nor truncated, with or without the tokenizer's special tokens.

        Warns, once, of text for which the tokenizer has no token; raises ValueError where that would be read as padding.
        """
        rows = ids_of(self.need_tokenizer(), texts, specials)
        self.check_known(texts, rows)
        return rows

    def check_known(self, texts: Sequence[str], rows: Sequence[Sequence[int]]) -> None:
        """Warns and raises as `ids`, of texts with their ids."""
        if not self._warned_of_unknown:
            self._warned_of_unknown = warn_if_unknown(self.need_tokenizer(), texts, rows, self._leaves_out_text)

    @cached_property
    def _leaves_out_text(self) -> bool:
        return leaves_out_text(self.need_tokenizer())

    def check_ids(self, tokens: Tensor) -> None:
        """Raises ValueError for ids outside the vocabulary; see `checked_ids`."""
        checked_ids(tokens, self.d_vocab)

    def _rows(self, input: str | Sequence[str], prepend_bos: bool | None, truncate: bool) -> list[list[int]]:
        """The ids of each text with BOS added or not, truncated if requested, without padding."""
        texts = checked_texts(input)
        bos = self._bos_wanted(prepend_bos)
        from_left = getattr(self.tokenizer, "truncation_side", "right") == "left"
        rows = []
        for i, ids in enumerate(self.ids(texts)):
            body = ids[len(bos) :] if ids[: len(bos)] == bos else ids
            excess = max(0, len(bos) + len(body) - self.n_ctx) if truncate else 0
            row = bos + (body[excess:] if from_left else body[: len(body) - excess])
            if not row:
                raise ValueError(
                    f"prompt {i}, {texts[i]!r}, becomes zero tokens, but a model needs at least one: "
                    "give a longer text, or prepend_bos=True with a tokenizer that has a BOS token"
                )
            rows.append(row)
        return rows

    def _bos_wanted(self, prepend_bos: bool | None) -> list[int]:
        self.need_tokenizer()
        wanted = self.default_prepend_bos if prepend_bos is None else prepend_bos
        if wanted not in (True, False):
            raise ValueError(f"prepend_bos must be True, False or None (the default), got {wanted!r}")
        bos = self.bos_ids if wanted else []
        if bos and prepend_bos is None and not (self._prefix or self._says_no_more):
            self._says_no_more = warn_if_eos_is_bos(self.need_tokenizer())
        if prepend_bos and not bos:
            raise ValueError(
                "prepend_bos=True, but the tokenizer has neither a BOS nor an EOS token to prepend: "
                'omit prepend_bos, or set one on the tokenizer (tokenizer.bos_token = "...")'
            )
        return bos

    def _n_text_in_run(
        self, run_length: Int[Tensor, "batch 1"], side: str, prepend_bos: bool | None
    ) -> Int[Tensor, ""] | int:
        """How many tokens at the inner end of each row's run of pad tokens are text."""
        pad, bos, tokenizer = self.pad_id, self.bos_ids, self.need_tokenizer()
        if pad == tokenizer.pad_token_id and pad not in (*bos, tokenizer.eos_token_id):
            return 0
        if side == "left" and self._bos_wanted(prepend_bos):
            return int(bos[0] == pad)
        return run_length.min()

    def _side(self, padding_side: str | None) -> str:
        side = self.default_padding_side if padding_side is None else padding_side
        if side not in ("left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', got {side!r}")
        return side

    def need_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer; ValueError if there is none."""
        if self.tokenizer is None:
            raise ArgumentError(
                "text needs a tokenizer, and this model has none: give one with "
                "tokenizer=... when building the model, or model.set_tokenizer(...), or pass token ids"
            )
        return self.tokenizer


def padded(
    rows: Sequence[Sequence[int]], fill: int, side: str
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
    """Returns `(tokens, mask)`: the rows padded with `fill` on one side, and 1 for real tokens, 0 for padding."""
    longest = max(len(row) for row in rows)
    if longest == 0:
        raise ValueError("a text becomes zero tokens, but a model needs at least one")
    tokens = torch.full((len(rows), longest), fill)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        span = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        tokens[i, span], mask[i, span] = torch.tensor(row, dtype=torch.long), 1
    return tokens, mask


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    if any(token < 0 for token in ids):
        raise ValueError(f"token id {min(ids)} is negative: ids start at 0")
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _decode_each(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [as_text(tokenizer, token, _decode(tokenizer, [token])) for token in ids]


def checked_texts(input: object) -> list[str]:
    texts = [input] if isinstance(input, str) else input
    if not isinstance(texts, (list, tuple)):
        raise TypeError(f"text must be a string or a list of strings, got {type(input).__name__}")
    if not texts:
        raise ValueError("an empty list of prompts: give at least one")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"text must be a string or a list of strings, got {type(text).__name__} at [{i}]")
    return list(texts)


def _to_rows(tokens: object) -> tuple[list[list[int]], int]:
    """Ids of rank 0, 1 or 2 as rows, and the rank; the rows of a list may differ in length. Of `VisionInputs`, their ids."""
    tokens = tokens.tokens if isinstance(tokens, VisionInputs) else tokens
    if isinstance(tokens, (Tensor, np.ndarray)):
        if tokens.ndim > 2 or not _is_integral(tokens):
            raise ValueError(
                f"token ids must be integers, one id, [pos] or [batch, pos], got {tokens.dtype} {list(tokens.shape)}"
            )
        nested, rank = tokens.tolist(), tokens.ndim
    elif isinstance(tokens, (list, tuple)):
        nested = [item.tolist() if isinstance(item, (Tensor, np.ndarray)) else item for item in tokens]
        rank = 2 if nested and isinstance(nested[0], (list, tuple)) else 1
    else:
        nested, rank = tokens, 0
    rows = nested if rank == 2 else [nested] if rank == 1 else [[nested]]
    return [[_one_id(token) for token in row] for row in rows], rank


def _as_integers(tokens: object) -> object:
    """A tensor of whole numbers as one of integers; anything else unchanged."""
    is_whole = isinstance(tokens, Tensor) and tokens.is_floating_point() and bool((tokens == tokens.round()).all())
    return tokens.long() if isinstance(tokens, Tensor) and is_whole else tokens


def _is_integral(tokens: Tensor | np.ndarray) -> bool:
    if isinstance(tokens, Tensor):
        return not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    return bool(np.issubdtype(tokens.dtype, np.integer))


def _one_id(token: Any) -> int:
    try:
        return operator.index(token)
    except TypeError:
        raise TypeError(f"a token id is an integer, got {type(token).__name__}") from None
