"""Text methods of encoder-decoders: texts to encoder ids and decoder ids, and back."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.models.config.flat import HookedEncoderDecoderConfig
from hooked_lm.models.stack import checked_ids
from hooked_lm.models.text.bos import ids_of
from hooked_lm.models.text.methods import TextMethods
from hooked_lm.models.text.tokenizer import Tokenizer
from hooked_lm.models.text.tokens import Tokens, checked_texts, padded

Padded = tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]
DecoderInput = str | Sequence[str] | Int[Tensor, "*rows target_pos"]


class SourceAndTargetText(TextMethods):
    """Text methods of an encoder-decoder, which reads a source and continues a target."""

    cfg: HookedEncoderDecoderConfig

    pads_on = "right"

    def set_tokenizer(self, tokenizer: Tokenizer | None) -> None:  # type: ignore[override]
        """Sets the model's tokenizer, which is never modified."""
        super().set_tokenizer(tokenizer)

    @property
    def decoder_tokens(self) -> Tokens:
        """The tokenizer with the vocabulary size of the decoder, which may differ from the encoder's."""
        return Tokens(self.tokenizer, False, "right", n_ctx=self.cfg.n_ctx, d_vocab=self.cfg.d_vocab_out)

    def to_tokens(self, input: str | Sequence[str], move_to_device: bool = True, truncate: bool = True) -> Padded:
        """Returns encoder ids and attention mask, each [batch, pos], padded on the right.

        Includes the tokenizer's special tokens; truncation keeps a final end token.
        """
        rows = self.tokens.ids(checked_texts(input), specials=True)
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
        """Returns decoder ids and attention mask: start token, text, end token.

        The end token is added if the tokenizer adds it to texts; `end=False` omits it, for a target to be continued.
        """
        texts, tokenizer = checked_texts(input), self.tokens.need_tokenizer()
        if getattr(tokenizer, "backend_tokenizer", None) is None:  # it may have a separate vocabulary for targets
            rows = tokenizer(text_target=texts, add_special_tokens=False, verbose=False)["input_ids"]
        else:
            rows = self.tokens.ids(texts)
        forced = [] if self.cfg.forced_bos_token_id is None else [self.cfg.forced_bos_token_id]
        last = [self.tokenizer.eos_token_id] if end and self._ends_texts() else []
        rows = [[self.start_id(), *forced, *row, *last] for row in rows]
        tokens, mask = padded(rows, self.pad_id(), "right")
        return tokens.to(self.device), mask.to(self.device)

    def _ends_texts(self) -> bool:
        """Whether the tokenizer appends an end token to a text."""
        return self.tokenizer.eos_token_id in ids_of(self.tokenizer, [""], specials=True)[0]

    def to_str_tokens(self, input: str | Sequence[str] | Tensor) -> list[str] | list[list[str]]:
        """Returns the tokens of text (with special tokens) or of ids, each as a string."""
        if isinstance(input, Tensor):
            return self.tokens.to_str_tokens(input)
        rows = self.tokens.ids(checked_texts(input), specials=True)
        strings = [self.tokens.to_str_tokens(torch.tensor(row)) for row in rows]
        return strings[0] if isinstance(input, str) else strings  # type: ignore[return-value]

    def start_id(self) -> int:
        """The first token of the decoder's input; ValueError if the config does not name it."""
        if self.cfg.decoder_start_token_id is None:
            raise ValueError(
                "the config does not name the decoder's start token: give decoder_input=..., or set "
                "model.cfg.decoder_start_token_id (for T5 it is the pad token)"
            )
        return self.cfg.decoder_start_token_id

    def end_ids(self) -> list[int]:
        """The tokens that end a text; empty if neither the config nor the tokenizer names any."""
        known = (self.cfg.eos_token_id, getattr(self.tokenizer, "eos_token_id", None))
        end = next((token for token in known if token is not None), [])
        return [end] if isinstance(end, int) else list(end)

    def pad_id(self) -> int:
        """The id that pads short rows; any valid id will do, as padding is masked."""
        known = (self.cfg.pad_token_id, getattr(self.tokenizer, "pad_token_id", None), *self.end_ids(), 0)
        return next(
            token for token in known if token is not None and token < min(self.cfg.d_vocab, self.cfg.d_vocab_out)
        )

    def _source_tokens(
        self, input: str | Sequence[str] | Tensor, mask: Tensor | None
    ) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
        """Encoder ids and their mask; a mask given by the caller takes precedence."""
        if isinstance(input, Tensor):
            return checked_ids(self._ids(input), self.cfg.d_vocab).to(self.device), mask
        tokens, own = self.to_tokens(input, False, truncate=False)
        return checked_ids(tokens, self.cfg.d_vocab).to(self.device), own if mask is None else mask

    def _target_tokens(
        self, input: DecoderInput | None, mask: Tensor | None, batch: int, end: bool = True
    ) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
        """Decoder ids and their mask; only the start token if `input` is None. Text gets an end token if `end`."""
        if input is None:
            return torch.full((batch, 1), self.start_id(), device=self.device), mask
        if isinstance(input, Tensor):
            return checked_ids(self._ids(input), self.cfg.d_vocab_out).to(self.device), mask
        tokens, own = self.to_decoder_tokens(input, end)
        return tokens, own if mask is None else mask
