"""An encoder-decoder's side of text: what goes into the encoder, what begins the decoder's input, and back to text."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.models.config.flat import HookedEncoderDecoderConfig
from hooked_lm.models.stack import checked_ids
from hooked_lm.models.text.methods import TextMethods
from hooked_lm.models.text.tokens import Tokens, checked_texts, ids_of, padded

Padded = tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]
DecoderInput = str | Sequence[str] | Int[Tensor, "*rows target_pos"]


class SourceAndTargetText(TextMethods):
    """The same for an encoder-decoder, which reads a source and continues a target."""

    cfg: HookedEncoderDecoderConfig

    def _text_defaults(self) -> tuple[bool, str]:
        return False, "right"

    def set_tokenizer(self, tokenizer: Any) -> None:  # type: ignore[override]
        """Give the model a tokenizer, which is never changed."""
        super().set_tokenizer(tokenizer)

    @property
    def decoder_tokens(self) -> Tokens:
        """The tokenizer for the decoder, whose vocabulary may be another."""
        return Tokens(self.tokenizer, False, "right", n_ctx=self.cfg.n_ctx, d_vocab=self.cfg.d_vocab_out)

    def to_tokens(self, input: str | Sequence[str], move_to_device: bool = True, truncate: bool = True) -> Padded:
        """Ids [batch, pos] of texts for the encoder and which are real, padded on the right.

        The tokenizer's own special tokens are there: a last one that ends every text stays when a text is cut.
        """
        rows = ids_of(self.tokens.need_tokenizer(), checked_texts(input), specials=True)
        if truncate:
            rows = [self._cut(row) for row in rows]
        tokens, mask = padded(rows, self.pad_id(), "right")
        return (tokens.to(self.device), mask.to(self.device)) if move_to_device else (tokens, mask)

    def _cut(self, row: list[int]) -> list[int]:
        n_ctx = self.cfg.n_ctx
        if len(row) <= n_ctx:
            return row
        end = row[-1:] if row[-1] in self.end_ids() else []
        return row[: n_ctx - len(end)] + end

    def to_decoder_tokens(self, input: str | Sequence[str], end: bool = True) -> Padded:
        """Ids of texts for the decoder: what its input begins with, the text, and what ends it.

        The end is the tokenizer's end token, if that is what it puts after texts; `end=False` leaves it out of a target
        that is to go on.
        """
        texts, tokenizer = checked_texts(input), self.tokens.need_tokenizer()
        if getattr(tokenizer, "backend_tokenizer", None) is None:  # it may have another vocabulary for targets
            rows = tokenizer(text_target=texts, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            rows = ids_of(tokenizer, texts, specials=False)
        forced = [] if self.cfg.forced_bos_token_id is None else [self.cfg.forced_bos_token_id]
        last = [self.tokenizer.eos_token_id] if end and self._ends_texts() else []
        rows = [[self.start_id(), *forced, *row, *last] for row in rows]
        tokens, mask = padded(rows, self.pad_id(), "right")
        return tokens.to(self.device), mask.to(self.device)

    def _ends_texts(self) -> bool:
        """Whether the tokenizer puts an end token after a text."""
        return self.tokenizer.eos_token_id in ids_of(self.tokenizer, [""], specials=True)[0]

    def to_str_tokens(self, input: Any) -> list[str] | list[list[str]]:
        """The tokens of text, with the tokenizer's special ones, or of ids, each as a string."""
        if isinstance(input, Tensor):
            return self.tokens.to_str_tokens(input)
        rows = ids_of(self.tokens.need_tokenizer(), checked_texts(input), specials=True)
        strings = [self.tokens.to_str_tokens(torch.tensor(row)) for row in rows]
        return strings[0] if isinstance(input, str) else strings  # type: ignore[return-value]

    def start_id(self) -> int:
        """What the decoder's input begins with."""
        if self.cfg.decoder_start_token_id is None:
            raise ValueError(
                "it is not known which token the decoder begins with: give decoder_input=..., or set "
                "model.cfg.decoder_start_token_id (that of T5 is its pad token)"
            )
        return self.cfg.decoder_start_token_id

    def end_ids(self) -> list[int]:
        """The tokens that end a text; none if they are not known."""
        known = (self.cfg.eos_token_id, getattr(self.tokenizer, "eos_token_id", None))
        end = next((token for token in known if token is not None), [])
        return [end] if isinstance(end, int) else list(end)

    def pad_id(self) -> int:
        """The id that fills short rows; what it is does not matter, as it is masked."""
        known = (self.cfg.pad_token_id, getattr(self.tokenizer, "pad_token_id", None), *self.end_ids(), 0)
        return next(
            token for token in known if token is not None and token < min(self.cfg.d_vocab, self.cfg.d_vocab_out)
        )

    def _source_tokens(self, input: Any, mask: Tensor | None) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
        """Ids for the encoder, and which are real; a mask that the caller gives wins."""
        if isinstance(input, Tensor):
            return checked_ids(self._ids(input), self.cfg.d_vocab), mask
        tokens, own = self.to_tokens(input, truncate=False)
        return tokens, own if mask is None else mask

    def _target_tokens(
        self, input: DecoderInput | None, mask: Tensor | None, batch: int, end: bool = True
    ) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
        """Ids for the decoder, and which are real; the start token of each row if nothing is given. Text gets an `end`."""
        if input is None:
            return torch.full((batch, 1), self.start_id(), device=self.device), mask
        if isinstance(input, Tensor):
            return checked_ids(self._ids(input), self.cfg.d_vocab_out), mask
        tokens, own = self.to_decoder_tokens(input, end)
        return tokens, own if mask is None else mask
