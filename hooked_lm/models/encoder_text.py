"""An encoder's side of text: texts and pairs of texts become tokens, token types and a mask."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.models.encoder_config import HookedEncoderConfig
from hooked_lm.models.text import TextMethods
from hooked_lm.models.tokens import Tokens, checked_texts

Texts = str | Sequence[str] | Sequence[tuple[str, str]]
Tokenized = tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]


class EncoderText(TextMethods):
    """`to_tokens` and its like, with the special tokens that the tokenizer itself puts around texts."""

    cfg: HookedEncoderConfig

    @property
    def tokens(self) -> Tokens:
        """The tokenizer, without anything put before a text."""
        return Tokens(self.tokenizer, False, "right", n_ctx=self.cfg.n_ctx, d_vocab=self.cfg.d_vocab)

    def set_tokenizer(self, tokenizer: Any, default_padding_side: str | None = None) -> None:
        """Give the model a tokenizer; it is used as it is and never changed."""
        self.tokenizer = tokenizer
        self.cfg.default_padding_side = default_padding_side or self.cfg.default_padding_side
        if tokenizer is not None:
            self.cfg.tokenizer_name = self.cfg.tokenizer_name or getattr(tokenizer, "name_or_path", None)

    def to_tokens(self, input: Texts, move_to_device: bool = True, truncate: bool = True) -> Tokenized:  # type: ignore[override]
        """Ids, token types and mask (1: real), each [batch, pos], of texts or of pairs of texts, padded on the right.

        Types tell the second text of a pair (1) from the first (0). `truncate` cuts the longer text of a row down to
        `n_ctx`.
        """
        pairs = [input] if isinstance(input, str) else list(input)
        is_paired = bool(pairs) and not any(isinstance(pair, str) for pair in pairs)
        firsts = checked_texts([pair[0] for pair in pairs] if is_paired else pairs)
        seconds = checked_texts([pair[1] for pair in pairs]) if is_paired else None
        encoded = self.tokens.need_tokenizer()(
            firsts,
            seconds,
            truncation=truncate,
            max_length=self.cfg.n_ctx if truncate else None,
            return_token_type_ids=True,
            verbose=False,
        )
        rows, types = encoded["input_ids"], encoded["token_type_ids"]
        longest = max(len(row) for row in rows)
        shape = (len(rows), longest)
        tokens = torch.full(shape, self.tokens.pad_id)
        token_types, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
        for i, (row, kinds) in enumerate(zip(rows, types, strict=True)):
            tokens[i, : len(row)], token_types[i, : len(row)] = torch.tensor(row), torch.tensor(kinds)
            mask[i, : len(row)] = 1
        device = self.device if move_to_device else None
        return tokens.to(device), token_types.to(device), mask.to(device)

    def _inputs(
        self, input: Any, types: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Ids, types and mask of any input; what the caller gives goes before what the tokenizer says."""
        if not isinstance(input, Tensor):
            tokens, own_types, own_mask = self.to_tokens(input, truncate=False)
            return tokens, own_types if types is None else types, own_mask if mask is None else mask
        if input.is_floating_point() or input.ndim not in (1, 2):
            raise ValueError(f"token ids are integers [batch, pos] or [pos], got {input.dtype} {tuple(input.shape)}")
        tokens = (input if input.ndim == 2 else input[None]).to(self.device, torch.long)
        for name, given in (("token_type_ids", types), ("an attention mask", mask)):
            if given is not None and given.shape != tokens.shape:
                raise ValueError(
                    f"{name} is {tuple(given.shape)}; expected {tuple(tokens.shape)}, as the token ids are"
                )
        return tokens, types, mask
