"""Next sentence prediction with an encoder trained on it (BERT, ALBERT): does the second text follow the first?"""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.models.encoder import Encoder
from hooked_lm.models.encoder_outputs import SEQUENTIAL

Pairs = tuple[str, str] | Sequence[str] | Sequence[tuple[str, str]] | Int[Tensor, "*batch pos"]


class BertNextSentencePrediction:
    """An encoder with its next sentence head as output; `model` is the encoder.

    A pair of texts is a tuple or a list of two strings; a batch is a list of tuples. The first of the two logits is for
    "the second text follows the first".

    >>> import torch
    >>> from hooked_lm import HookedEncoder
    >>> from hooked_lm.models.next_sentence import BertNextSentencePrediction
    >>> model = HookedEncoder(
    ...     dict(n_layers=1, d_model=16, n_heads=2, n_ctx=32, d_vocab=10, act_fn="gelu")
    ... )
    >>> nsp = BertNextSentencePrediction(model)
    >>> nsp(torch.tensor([[5, 3, 1]]), token_type_ids=torch.tensor([[0, 0, 1]])).shape
    torch.Size([1, 2])
    """

    def __init__(self, model: Encoder) -> None:
        if model.nsp_head is None:
            raise ValueError(
                "this encoder has no next sentence head; load a checkpoint of BertForPreTraining or "
                "BertForNextSentencePrediction"
            )
        self.model = model

    def __call__(
        self,
        input: Pairs,
        return_type: str | None = "logits",
        token_type_ids: Int[Tensor, "*batch pos"] | None = None,
        one_zero_attention_mask: Tensor | None = None,
    ) -> Any:
        """Returns "logits" [batch, 2], "predictions" (a sentence for one pair, else a list of them), or None.

        Ids need `token_type_ids`, 0 for the first text and 1 for the second, if the model has token types; else ValueError.
        """
        pairs = self._pairs(input, token_type_ids)
        logits = self.model(pairs, _checked(return_type), token_type_ids, one_zero_attention_mask)
        return self._finished(logits, return_type)

    forward = __call__

    def to_tokens(
        self, input: Pairs, move_to_device: bool = True, truncate: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids, token types and attention mask, each [batch, pos]."""
        return self.model.to_tokens(_as_pairs(input), move_to_device, truncate)

    def run_with_cache(
        self,
        input: Pairs,
        return_type: str | None = "logits",
        token_type_ids: Int[Tensor, "*batch pos"] | None = None,
        one_zero_attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Returns the output as in a call, and the cache of the encoder's sites."""
        pairs = self._pairs(input, token_type_ids)
        inputs = (pairs, _checked(return_type), token_type_ids, one_zero_attention_mask)
        logits, cache = self.model.run_with_cache(*inputs, **kwargs)
        return self._finished(logits, return_type), cache

    def _pairs(self, input: Pairs, token_type_ids: Tensor | None) -> Any:
        if isinstance(input, Tensor) and token_type_ids is None and self.model.embed.token_type_embed is not None:
            raise ValueError(
                "ids of two texts need token_type_ids, 0 for the first and 1 for the second; or pass the texts"
            )
        return _as_pairs(input)

    def _finished(self, logits: Float[Tensor, "batch 2"] | None, return_type: str | None) -> Any:
        if return_type != "predictions" or logits is None:
            return logits
        found = [SEQUENTIAL[int(i)] for i in logits.argmax(-1)]
        return found[0] if len(found) == 1 else found


def _as_pairs(input: Any) -> Any:
    """The input with a list of two strings as one pair; ValueError for single texts."""
    if isinstance(input, Tensor):
        return input
    if isinstance(input, list) and len(input) == 2 and all(isinstance(text, str) for text in input):
        return tuple(input)
    if isinstance(input, str) or (isinstance(input, list) and any(isinstance(text, str) for text in input)):
        raise ValueError(
            "next sentence prediction needs pairs of texts: give a tuple, a list of two strings, or a list of tuples"
        )
    return input


def _checked(return_type: str | None) -> str | None:
    if return_type not in ("logits", "predictions", None):
        raise ValueError(f"return_type must be 'logits', 'predictions' or None, got {return_type!r}")
    return None if return_type is None else "nsp"
