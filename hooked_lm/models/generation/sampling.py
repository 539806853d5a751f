"""Samples a token from next-token logits."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.errors import ArgumentError


def sample_logits(
    final_logits: Float[Tensor, "batch d_vocab"],
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    tokens: Int[Tensor, "batch pos"] | None = None,
    real: Bool[Tensor, "batch pos"] | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    repetition_penalty: float = 1.0,
) -> Int[Tensor, " batch"]:
    """Draws one token per row from its logits.

    Args:
        top_k: draw only from this many most likely tokens.
        top_p: draw from the fewest tokens that together have at least this probability (nucleus sampling, Holtzman et
            al. 2020, arXiv:1904.09751), after `top_k` if both are given.
        temperature: divides the logits; 0 takes the most likely token.
        freq_penalty: subtracted from a token's logit, after the temperature, for each occurrence in `tokens`.
        real: which of `tokens` count; all if None.
        generator: the random generator, or one on the CPU for each row; torch's global one if None.
        repetition_penalty: divides the logit of each token in `tokens` (multiplies it if negative) before the temperature
            (Keskar et al. 2019, arXiv:1909.05858); 1 means no penalty.

    Raises ValueError for an argument out of range, for a penalty without `tokens`, and for logits that are NaN, infinite or
    all -inf.

    >>> import torch
    >>> logits = torch.tensor([[0.0, 5.0, 1.0]])
    >>> sample_logits(logits, temperature=0.0), sample_logits(logits, top_k=1)
    (tensor([1]), tensor([1]))
    """
    check_sampling(top_k, top_p, temperature)
    logits = final_logits.float()
    if repetition_penalty != 1:
        logits = without_repetition(logits, tokens, repetition_penalty, real)
    if temperature not in (0, 1):
        logits = logits / temperature
    if freq_penalty:
        logits = logits - freq_penalty * _counts(logits, tokens, real)
    _check_logits(logits)
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        probs = _nucleus(probs, top_p)
    if isinstance(generator, torch.Generator | None):
        return torch.multinomial(probs, 1, generator=generator)[:, 0]
    return _drawn_by_row(probs, generator)


def _drawn_by_row(
    probs: Float[Tensor, "batch d_vocab"], generators: Sequence[torch.Generator]
) -> Int[Tensor, " batch"]:
    """A token for each row, from one number of its own generator, so that it does not depend on other rows."""
    if len(generators) != len(probs):
        raise ValueError(f"there are {len(generators)} generators for {len(probs)} rows: give one for each row")
    numbers = torch.stack([torch.rand(1, generator=each, dtype=torch.double) for each in generators])
    below = probs.double().cumsum(-1)
    return torch.searchsorted(below / below[:, -1:], numbers.to(probs.device), right=True)[:, 0]


def without_repetition(
    logits: Float[Tensor, "batch d_vocab"],
    tokens: Int[Tensor, "batch pos"] | None,
    penalty: float,
    real: Bool[Tensor, "batch pos"] | None = None,
) -> Float[Tensor, "batch d_vocab"]:
    """The logits, of which those of tokens in `tokens` are divided by a penalty, or multiplied if they are negative."""
    penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(_counts(logits, tokens, real) > 0, penalised, logits)


def next_tokens(
    choose: Callable[..., Tensor], logits: Float[Tensor, "batch d_vocab"], finished: Bool[Tensor, " batch"], step: int
) -> Int[Tensor, " batch"]:
    """The tokens that `choose` selects in a generation step; the logits of finished rows are ignored.

    Adds the step to the ValueError of unusable logits.
    """
    try:
        return choose(logits.masked_fill(finished[:, None], 0.0))
    except ValueError as error:
        raise ValueError(
            f"step {step} of the generation: {error}. To find the site of the first NaN, add "
            "hooked_lm.interventions.NanGuard('*', nan_only=True) to the hooks of the call"
        ) from None


def _check_logits(logits: Float[Tensor, "batch d_vocab"]) -> None:
    """Raises ValueError for the first row that defines no distribution."""
    unusable = ~logits.amax(-1).isfinite()  # NaN and inf propagate to the maximum
    if not unusable.any():
        return
    row = int(unusable.nonzero()[0])
    for name, bad in (("NaN", logits[row].isnan()), ("inf", logits[row] == float("inf"))):
        if n := int(bad.sum()):
            what = f"{n} of {len(bad)} are {name}, the first is that of token {int(bad.nonzero()[0])}"
            break
    else:
        what = f"all {logits.shape[-1]} are -inf"
    raise ValueError(f"no token can be sampled from the logits of row {row}: {what}")


def _counts(
    logits: Float[Tensor, "batch d_vocab"],
    tokens: Int[Tensor, "batch pos"] | None,
    real: Bool[Tensor, "batch pos"] | None,
) -> Float[Tensor, "batch d_vocab"]:
    """The number of occurrences of each token."""
    if tokens is None:
        raise ArgumentError("a penalty needs the previous tokens: give tokens=...")
    counted, last = tokens < logits.shape[-1], logits.shape[-1] - 1  # the token of images may be outside
    counted = counted if real is None else counted & real
    return torch.zeros_like(logits).scatter_add(1, tokens.clamp(max=last), counted.to(logits))


def check_sampling(top_k: int | None, top_p: float | None, temperature: float) -> None:
    """Raises ValueError for an option out of range."""
    if top_k is not None and top_k < 1:
        raise ArgumentError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ArgumentError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not temperature >= 0:
        raise ArgumentError(f"temperature must be 0 (greedy) or above, got {temperature}")


def _nucleus(probs: Float[Tensor, "batch d_vocab"], top_p: float) -> Float[Tensor, "batch d_vocab"]:
    """The probabilities of the nucleus, others zero: a token is kept if those before it sum to less than `top_p`."""
    ordered, index = probs.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    return torch.zeros_like(probs).scatter(-1, index, ordered)
