"""Next-token loss and accuracy."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.readable import check
from hooked_lm.errors import ArgumentError


class Output(NamedTuple):
    """The result of `return_type="both"`."""

    logits: Float[Tensor, "batch pos d_vocab"]
    loss: Float[Tensor, "*batch_pos"]


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
    return counted_losses(next_token_losses(logits, tokens[:, 1:]), tokens, attention_mask, per_token)


def next_token_losses(
    logits: Float[Tensor, "batch pos d_vocab"], following: Int[Tensor, "batch next"]
) -> Float[Tensor, "batch next"]:
    """The cross entropy of the tokens that follow the first positions, which may be all or all but the last."""
    log_probs = logits.float().log_softmax(-1)[
        :, : following.shape[1]
    ]  # of all positions: softmax copies a slice first
    return -log_probs.gather(-1, from_the_end(following[..., None], logits.shape[-1]))[..., 0]


def counted_losses(
    losses: Float[Tensor, "batch next"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Tensor | None,
    per_token: bool,
) -> Float[Tensor, "*batch_pos"]:
    """The losses of real tokens after real ones [batch, pos - 1], or their mean; see `lm_cross_entropy_loss`."""
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
