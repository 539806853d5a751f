"""Text to token ids and back, for one model.

Vocabulary: `batch` and `pos` are the dimensions of ids; a *row* is the ids of one text before padding; BOS is what a
row begins with, which for a few tokenizers is more than one token.

The tokenizer is only ever asked for ids and strings. BOS, truncation and padding are done here, on the ids, so nothing
on a tokenizer that others use too (another thread, another model) is switched for the time of a call.
"""

import copy
import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.models.stack import checked_ids


def own_prefix(tokenizer: Any) -> list[int]:
    """What `tokenizer` begins every text with by itself: nothing, BOS, or for a few more than one token."""
    around = ids_of(tokenizer, [""], specials=True)[0]
    if tokenizer.bos_token_id in around:
        return around[: around.index(tokenizer.bos_token_id) + 1]
    ends = (tokenizer.eos_token_id, getattr(tokenizer, "sep_token_id", None))
    while around and around[-1] in ends:
        around = around[:-1]
    return around


def prepends_bos(tokenizer: Any) -> bool:
    """Whether `tokenizer` itself begins every text with a special token (Llama and Gemma do, GPT-2 does not).

    >>> from tokenizers import Tokenizer, models, processors
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="<s>"))
    >>> prepends_bos(PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))
    False
    >>> words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    >>> prepends_bos(PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>"))
    True
    """
    return bool(own_prefix(tokenizer))


class Tokens:
    """Turns text into ids and ids into text for a model with a context of `n_ctx` and a vocabulary of `d_vocab`.

    BOS: `prepend_bos=None` means `default_prepend_bos`. With it every row begins with BOS exactly once: a text that
    already begins with it gets no second one. Without it nothing is added, and a BOS that the text itself spells out
    stays. BOS is what the tokenizer puts before a text on its own, else its `bos_token`, else its `eos_token`. What a
    tokenizer would put *after* a text (an EOS) is left out, because the model is asked to continue the text; an EOS
    that the text spells out stays.

    Padding: on `default_padding_side` unless a call says otherwise, with the tokenizer's pad token, else its EOS,
    else id 0. The tokenizer object is never written to.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"<s>": 0, "the": 1, "cat": 2, "sat": 3}, unk_token="<s>"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>")
        >>> text = Tokens(tokenizer, default_prepend_bos=True, default_padding_side="right", n_ctx=16, d_vocab=4)
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
        ValueError: for text without a tokenizer, an empty list of prompts, or a prompt of zero tokens.
        TypeError: for what is neither text nor ids.
    """

    def __init__(
        self,
        tokenizer: Any,  # a transformers fast or slow tokenizer, or None
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

    @cached_property
    def _prefix(self) -> list[int]:
        return own_prefix(self.tokenizer)

    @property
    def bos_ids(self) -> list[int]:
        """What a row begins with when BOS is wanted; empty for a tokenizer that has neither BOS nor EOS."""
        if self._prefix:
            return self._prefix
        candidates = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return [token for token in candidates if token is not None][:1]

    @property
    def pad_id(self) -> int:
        """The id that fills short rows: always one that the model can embed, though its logits are never used."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(token for token in candidates if token is not None and token < self.d_vocab)

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = True,
        device: torch.device | str | None = None,
    ) -> Int[Tensor, "batch pos"]:
        """The ids of a text or of several, one row each, cut to `n_ctx` positions if `truncate`."""
        return self.encode(input, prepend_bos, padding_side, truncate, device)[0]

    def encode(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        truncate: bool = False,
        device: torch.device | str | None = None,
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
        """`(tokens, mask)`: the ids as `to_tokens` gives them, and 1 where a token is real, 0 where it is padding.

        Unlike `to_tokens` it cuts nothing off unless told to, so that a forward pass can refuse a prompt that is too
        long.

        The mask is known from the tokenization, not read off the ids, so it is right even where padding looks like
        text (GPT-2's pad, BOS and EOS are one token).
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
        """1 for real tokens, 0 for padding, read off ids that came without a mask.

        For text use `encode`, which knows. Ids only show a run of pad tokens on the padding side. If the pad token is
        no other special token, all of the run is padding. If it is also BOS or EOS, then:

        - on the left with BOS, the run is padding up to the BOS it ends with;
        - otherwise as much of the run as every row has is text, because padding only evens rows out. So a single
          row is all text, its trailing EOS too.

        The outermost token of the other side is always real: no row is masked entirely. Without a tokenizer every
        token is real.
        """
        mask = torch.ones_like(tokens)
        if self.tokenizer is None or tokens.numel() == 0:
            return mask
        side = self._side(padding_side)
        inward = tokens if side == "left" else tokens.flip(-1)  # padding comes first
        length = (inward == self.pad_id).long().cumprod(-1).sum(-1, keepdim=True)
        n_padding = length - self._real_in_run(length, side, prepend_bos)
        padding = torch.arange(tokens.shape[-1], device=tokens.device) < n_padding
        padding[:, -1] = False
        return mask.masked_fill(padding if side == "left" else padding.flip(-1), 0)

    def to_string(self, tokens: Any) -> str | list[str]:
        """The text of ids: a string for one id or [pos], a list of strings for [batch, pos].

        Ids are a tensor, an array or a list (of ids, or of rows that may differ in length); special tokens are
        spelled out.
        """
        tokenizer = self.need_tokenizer()
        rows, rank = _to_rows(tokens)
        texts = [_decode(tokenizer, row) for row in rows]
        return texts if rank == 2 else texts[0]

    def to_str_tokens(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> list[str] | list[list[str]]:
        """Each token as the string it stands for.

        A text, an id, or ids [pos] or [1, pos] give one list of strings. A list of texts, a list of rows or ids
        [batch, pos] give a list of such lists; texts get no padding here, whatever `padding_side` says. Text gets BOS
        as `prepend_bos` says and is cut to `n_ctx` tokens.
        """
        tokenizer = self.need_tokenizer()
        several = isinstance(input, (list, tuple))
        if isinstance(input, str) or (several and (not input or isinstance(input[0], str))):
            rows = self._rows(input, prepend_bos, truncate=True)
        else:
            rows, rank = _to_rows(input)
            several = rank == 2 and (several or len(rows) != 1)
        strings = [_decode_each(tokenizer, row) for row in rows]
        return strings if several else strings[0]

    def to_single_token(self, string: str) -> int:
        """The id of a string that is exactly one token; ValueError, listing its tokens, if it is several."""
        [row] = self._rows(string, prepend_bos=False, truncate=False)
        if len(row) > 1:
            raise ValueError(
                f"{string!r} is not a single token: it becomes the {len(row)} tokens "
                f"{_decode_each(self.tokenizer, row)}, ids {row}; a missing or extra leading space is the usual reason"
            )
        return row[0]

    def single_token_ids(self, tokens: Any, device: torch.device | str | None = None) -> Int[Tensor, "..."]:
        """The ids, checked, of a string that is one token, of a list of such strings, or of ids of any shape."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        elif isinstance(tokens, (list, tuple)):
            tokens = [self.to_single_token(token) if isinstance(token, str) else token for token in tokens]
        ids = torch.as_tensor(tokens, device=device)
        self.check_ids(ids)
        return ids

    def to_single_str_token(self, int_token: int) -> str:
        """The string that one id stands for."""
        token = _one_id(int_token)
        self.check_ids(torch.tensor(token))
        return _decode(self.need_tokenizer(), [token])

    def get_token_position(
        self,
        single_token: Any,
        input: Any,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Where a token (a string or an id) stands in a text, or in ids [pos] or [1, pos].

        `mode` chooses its "first" or "last" occurrence. One text has no padding, so `padding_side` changes nothing.
        """
        if mode not in ("first", "last"):
            raise ValueError(f"mode must be 'first' or 'last', got {mode!r}")
        rows = self._rows(input, prepend_bos, truncate=True) if isinstance(input, str) else _to_rows(input)[0]
        if len(rows) != 1:
            raise ValueError(f"a position is looked up in one text or one row of ids, got {len(rows)}")
        [row] = rows
        token = self.to_single_token(single_token) if isinstance(single_token, str) else _one_id(single_token)
        if token not in row:
            raise ValueError(f"token {single_token!r} (id {token}) is not among the {len(row)} tokens {row}")
        return row.index(token) if mode == "first" else len(row) - 1 - row[::-1].index(token)

    def check_ids(self, tokens: Tensor) -> None:
        """ValueError for ids that `checked_ids` refuses."""
        checked_ids(tokens, self.d_vocab)

    def _rows(self, input: str | Sequence[str], prepend_bos: bool | None, truncate: bool) -> list[list[int]]:
        """The ids of each text, BOS settled, cut if wanted, not padded."""
        texts = checked_texts(input)
        bos = self._bos_wanted(prepend_bos)
        from_left = getattr(self.tokenizer, "truncation_side", "right") == "left"
        rows = []
        for i, ids in enumerate(ids_of(self.need_tokenizer(), texts, specials=False)):
            body = ids[len(bos) :] if ids[: len(bos)] == bos else ids
            excess = max(0, len(bos) + len(body) - self.n_ctx) if truncate else 0
            row = bos + (body[excess:] if from_left else body[: len(body) - excess])
            if not row:
                raise ValueError(
                    f"prompt {i}, {texts[i]!r}, becomes zero tokens, and a model needs at least one: "
                    "give text, or prepend_bos=True with a tokenizer that has a BOS token"
                )
            rows.append(row)
        return rows

    def _bos_wanted(self, prepend_bos: bool | None) -> list[int]:
        self.need_tokenizer()
        wanted = self.default_prepend_bos if prepend_bos is None else prepend_bos
        bos = self.bos_ids if wanted else []
        if prepend_bos and not bos:
            raise ValueError(
                "prepend_bos=True, but the tokenizer has neither a BOS nor an EOS token to prepend: "
                'leave prepend_bos away, or give the tokenizer one (tokenizer.bos_token = "...")'
            )
        return bos

    def _real_in_run(
        self, length: Int[Tensor, "batch 1"], side: str, prepend_bos: bool | None
    ) -> Int[Tensor, ""] | int:
        """How many tokens at the inner end of each row's run of pad tokens are text."""
        pad, bos = self.pad_id, self.bos_ids
        if pad == self.tokenizer.pad_token_id and pad not in (*bos, self.tokenizer.eos_token_id):
            return 0
        if side == "left" and self._bos_wanted(prepend_bos):
            return int(bos[0] == pad)
        return length.min()

    def _side(self, padding_side: str | None) -> str:
        side = self.default_padding_side if padding_side is None else padding_side
        if side not in ("left", "right"):
            raise ValueError(f"padding_side must be 'left' or 'right', got {side!r}")
        return side

    def need_tokenizer(self) -> Any:
        """The tokenizer; ValueError that says how to give one, if there is none."""
        if self.tokenizer is None:
            raise ValueError(
                "text needs a tokenizer, and this model has none: give one with "
                "tokenizer=... when it is made, or model.set_tokenizer(...), or work with token ids"
            )
        return self.tokenizer


def padded(
    rows: Sequence[Sequence[int]], fill: int, side: str
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
    """Rows as one tensor, filled up on one side, and 1 where that has what is in the rows."""
    longest = max(len(row) for row in rows)
    if longest == 0:
        raise ValueError("a text becomes zero tokens, and a model needs at least one")
    tokens = torch.full((len(rows), longest), fill)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        span = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        tokens[i, span], mask[i, span] = torch.tensor(row, dtype=torch.long), 1
    return tokens, mask


def ids_of(tokenizer: Any, texts: list[str], specials: bool) -> list[list[int]]:
    """The ids of each text, with the tokenizer's own special tokens or without, never padded or cut."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return tokenizer(texts, add_special_tokens=specials, verbose=False)["input_ids"]
    # Calling a fast tokenizer itself would switch off, for all who use it, the padding and truncation that another
    # call has set. Its backend only reads them, so what they did is taken out here.
    encodings = backend.encode_batch(texts, add_special_tokens=specials)
    if any(encoding.overflowing for encoding in encodings):
        backend = copy.deepcopy(backend)
        backend.no_truncation()
        encodings = backend.encode_batch(texts, add_special_tokens=specials)
    return [
        [token for token, real in zip(encoding.ids, encoding.attention_mask, strict=True) if real]
        for encoding in encodings
    ]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    if any(token < 0 for token in ids):
        raise ValueError(f"token id {min(ids)} is negative and stands for no text")
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _decode_each(tokenizer: Any, ids: list[int]) -> list[str]:
    return [_decode(tokenizer, [token]) for token in ids]


def checked_texts(input: Any) -> list[str]:
    texts = [input] if isinstance(input, str) else input
    if not isinstance(texts, (list, tuple)):
        raise TypeError(f"text is a string or a list of strings, got {type(input).__name__}")
    if not texts:
        raise ValueError("an empty list of prompts: give at least one")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"text is a string or a list of strings, got {type(text).__name__} at [{i}]")
    return list(texts)


def _to_rows(tokens: Any) -> tuple[list[list[int]], int]:
    """Ids of rank 0, 1 or 2 as rows, and which rank it was; rows of a list may differ in length."""
    if isinstance(tokens, (Tensor, np.ndarray)):
        if tokens.ndim > 2 or not _is_integral(tokens):
            raise ValueError(
                f"token ids are integers, one or [pos] or [batch, pos], got {tokens.dtype} {list(tokens.shape)}"
            )
        nested, rank = tokens.tolist(), tokens.ndim
    elif isinstance(tokens, (list, tuple)):
        nested = [item.tolist() if isinstance(item, (Tensor, np.ndarray)) else item for item in tokens]
        rank = 2 if nested and isinstance(nested[0], (list, tuple)) else 1
    else:
        nested, rank = tokens, 0
    rows = nested if rank == 2 else [nested] if rank == 1 else [[nested]]
    return [[_one_id(token) for token in row] for row in rows], rank


def _is_integral(tokens: Tensor | np.ndarray) -> bool:
    if isinstance(tokens, Tensor):
        return not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    return bool(np.issubdtype(tokens.dtype, np.integer))


def _one_id(token: Any) -> int:
    try:
        return operator.index(token)
    except TypeError:
        raise TypeError(f"a token id is an integer, got {type(token).__name__}") from None
