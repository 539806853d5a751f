"""Whether one text follows another, asked of an encoder that was trained on the question (BERT, ALBERT)."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.models.encoder import Encoder
from hooked_lm.models.encoder_outputs import SEQUENTIAL

Pairs = tuple[str, str] | Sequence[str] | Sequence[tuple[str, str]] | Int[Tensor, "*batch pos"]


class BertNextSentencePrediction:
    """An encoder seen through its next sentence head; the encoder itself is `model`.

    A pair of texts is a tuple, or a list of two strings; several are a list of tuples. Of the two logits, the first says
    that the second text follows the first.

    >>> import torch
    >>> from hooked_lm import HookedEncoder
    >>> from hooked_lm.models.next_sentence import BertNextSentencePrediction
    >>> model = HookedEncoder(dict(n_layers=1, d_model=16, n_heads=2, n_ctx=32, d_vocab=10, act_fn="gelu"))
    >>> asked = BertNextSentencePrediction(model)
    >>> asked(torch.tensor([[5, 3, 1]]), token_type_ids=torch.tensor([[0, 0, 1]])).shape
    torch.Size([1, 2])
    """

    def __init__(self, model: Encoder) -> None:
        if model.nsp_head is None:
            raise ValueError(
                "this encoder has no next sentence head; checkpoints of BertForPreTraining and "
                "BertForNextSentencePrediction have one"
            )
        self.model = model

    def __call__(
        self,
        input: Pairs,
        return_type: str | None = "logits",
        token_type_ids: Int[Tensor, "*batch pos"] | None = None,
        one_zero_attention_mask: Tensor | None = None,
    ) -> Any:
        """ "logits" [batch, 2], "predictions" in words (a string for one pair, else a list), or None.

        Ids come with `token_type_ids`, which say where the second text begins; ValueError without, if the model has types.
        """
        pairs = self._pairs(input, token_type_ids)
        logits = self.model(pairs, _checked(return_type), token_type_ids, one_zero_attention_mask)
        return self._finished(logits, return_type)

    forward = __call__

    def to_tokens(
        self, input: Pairs, move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, token types and which ids are real, each [batch, pos]."""
        return self.model.to_tokens(_as_pairs(input), move_to_device, truncate)

    def run_with_cache(
        self,
        input: Pairs,
        return_type: str | None = "logits",
        token_type_ids: Int[Tensor, "*batch pos"] | None = None,
        one_zero_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """The same, and what the run left at the encoder's sites."""
        pairs = self._pairs(input, token_type_ids)
        inputs = (pairs, _checked(return_type), token_type_ids, one_zero_attention_mask)
        logits, cache = self.model.run_with_cache(*inputs, **kwargs)
        return self._finished(logits, return_type), cache

    def _pairs(self, input: Pairs, token_type_ids: Tensor | None) -> Any:
        if isinstance(input, Tensor) and token_type_ids is None and self.model.embed.token_type_embed is not None:
            raise ValueError(
                "ids of two texts need token_type_ids, 0 for the first and 1 for the second; or give the texts"
            )
        return _as_pairs(input)

    def _finished(self, logits: Float[Tensor, "batch 2"] | None, return_type: str | None) -> Any:
        if return_type != "predictions" or logits is None:
            return logits
        found = [SEQUENTIAL[int(i)] for i in logits.argmax(-1)]
        return found[0] if len(found) == 1 else found


def _as_pairs(input: Any) -> Any:
    """A list of two strings is one pair; single texts are refused."""
    if isinstance(input, Tensor):
        return input
    if isinstance(input, list) and len(input) == 2 and all(isinstance(text, str) for text in input):
        return tuple(input)
    if isinstance(input, str) or (isinstance(input, list) and any(isinstance(text, str) for text in input)):
        raise ValueError("the question is about two texts: give a tuple, a list of two strings, or a list of tuples")
    return input


def _checked(return_type: str | None) -> str | None:
    if return_type not in ("logits", "predictions", None):
        raise ValueError(f"return_type must be 'logits', 'predictions' or None, got {return_type!r}")
    return None if return_type is None else "nsp"
