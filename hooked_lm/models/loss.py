"""Next-token loss and accuracy."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.readable import check
from hooked_lm.errors import ArgumentError


def from_the_end(tokens: Int[Tensor, "*shape"], d_vocab: int) -> Int[Tensor, "*shape"]:
    """Token ids with negative ones replaced: they count from the end of the vocabulary."""
    return torch.where(tokens < 0, tokens + d_vocab, tokens)


def lm_cross_entropy_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None = None,
    per_token: bool = False,
) -> Float[Tensor, "*batch_pos"]:
    """Cross entropy of each next token in nats: the mean, or [batch, pos - 1] with `per_token`.

    With an `attention_mask` [batch, pos] (1: real) only predictions of a real token from a real token count; the
    others are zero per token. Negative ids count from the end of the vocabulary. Raises ValueError if there is nothing to
    predict, and for a mask of another shape than the ids.

    >>> import torch
    >>> lm_cross_entropy_loss(
    ...     torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.long)
    ... ).exp().round()
    tensor(4.)
    """
    log_probs = logits.float().log_softmax(-1)[:, :-1]  # of all positions: softmax copies a slice first
    losses = -log_probs.gather(-1, from_the_end(tokens[:, 1:, None], logits.shape[-1]))[..., 0]
    counts = torch.ones_like(losses, dtype=torch.bool)
    if attention_mask is not None:
        if attention_mask.shape != tokens.shape:
            raise ArgumentError(
                f"attention_mask is {tuple(attention_mask.shape)}, and the ids are {tuple(tokens.shape)}"
            )
        real = attention_mask.to(losses.device).bool()
        counts = real[:, 1:] & real[:, :-1]
        losses = losses.masked_fill(~counts, 0.0)  # an infinite one times zero would be NaN
    if per_token:
        return losses
    predicts = counts.any()
    check(
        predicts, f"a loss needs two real tokens in a row, one to predict the next; the ids are {tuple(tokens.shape)}"
    )
    return losses.sum() / counts.sum()


def lm_accuracy(
    logits: Float[Tensor, "batch pos d_vocab"], tokens: Int[Tensor, "batch pos"], per_token: bool = False
) -> Float[Tensor, ""] | Bool[Tensor, "batch next"]:
    """The fraction of next tokens that have the largest logit, or [batch, pos - 1] with `per_token`."""
    correct = logits[:, :-1].argmax(-1) == from_the_end(tokens[:, 1:], logits.shape[-1])
    return correct if per_token else correct.float().mean()
