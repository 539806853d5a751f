"""From the logits of a next token to the token."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def sample_logits(
    final_logits: Float[Tensor, "batch d_vocab"],
    top_k: int | None = None,
    top_p: float | None = None,
    temperature: float = 1.0,
    freq_penalty: float = 0.0,
    tokens: Int[Tensor, "batch pos"] | None = None,
    real: Bool[Tensor, "batch pos"] | None = None,
    generator: torch.Generator | None = None,
    repetition_penalty: float = 1.0,
) -> Int[Tensor, " batch"]:
    """One token per row, drawn from its logits.

    Args:
        top_k: draw from the so many likeliest tokens only.
        top_p: draw from the fewest tokens that together have at least this probability (nucleus sampling, Holtzman et
            al. 2020, arXiv:1904.09751), after `top_k` if both are given.
        temperature: what logits are divided by; 0 takes the likeliest token and draws nothing.
        freq_penalty: what is taken off a token's logit, after the temperature, each time that it stands in `tokens`.
        real: which of `tokens` count; all if None.
        generator: where the randomness comes from; torch's own if None.
        repetition_penalty: what a token's logit is divided by, or multiplied with if it is negative, before the temperature,
            if it stands in `tokens` (Keskar et al. 2019, arXiv:1909.05858); 1 is none.

    Raises ValueError for a number out of its range, for a penalty without `tokens`, and for logits that are NaN, infinite or
    without exception -inf.

    >>> import torch
    >>> logits = torch.tensor([[0.0, 5.0, 1.0]])
    >>> sample_logits(logits, temperature=0.0), sample_logits(logits, top_k=1)
    (tensor([1]), tensor([1]))
    """
    check_sampling(top_k, top_p, temperature)
    logits = final_logits.float()
    counts = _counts(logits, tokens, real) if freq_penalty or repetition_penalty != 1 else None
    if counts is not None:
        penalised = torch.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
        logits = torch.where(counts > 0, penalised, logits)
    if temperature not in (0, 1):
        logits = logits / temperature
    if counts is not None:
        logits = logits - freq_penalty * counts
    _check_logits(logits)
    if temperature == 0:
        return logits.argmax(-1)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], float("-inf"))
    probs = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        probs = _nucleus(probs, top_p)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def next_tokens(
    choose: Callable[..., Tensor], logits: Float[Tensor, "batch d_vocab"], finished: Bool[Tensor, " batch"], step: int
) -> Int[Tensor, " batch"]:
    """What `choose` takes in a step of generation; of rows that are finished, the logits do not matter.

    ValueError with the step, where no token can be taken.
    """
    try:
        return choose(logits.masked_fill(finished[:, None], 0.0))
    except ValueError as error:
        raise ValueError(
            f"step {step} of the generation: {error}. NanGuard('*', nan_only=True) of hooked_lm.interventions, among the "
            "hooks of the same call, stops at the site that the first NaN comes from"
        ) from None


def _check_logits(logits: Float[Tensor, "batch d_vocab"]) -> None:
    """Raises ValueError for the first row that is no distribution."""
    unusable = ~logits.amax(-1).isfinite()  # NaN and inf are the maximum wherever they stand
    if not unusable.any():
        return
    row = int(unusable.nonzero()[0])
    for name, bad in (("NaN", logits[row].isnan()), ("inf", logits[row] == float("inf"))):
        if n := int(bad.sum()):
            what = f"{n} of {len(bad)} are {name}, the first is that of token {int(bad.nonzero()[0])}"
            break
    else:
        what = f"all {logits.shape[-1]} are -inf"
    raise ValueError(f"no token can be taken from the logits of row {row}: {what}")


def _counts(
    logits: Float[Tensor, "batch d_vocab"],
    tokens: Int[Tensor, "batch pos"] | None,
    real: Bool[Tensor, "batch pos"] | None,
) -> Float[Tensor, "batch d_vocab"]:
    """How often each token was seen."""
    if tokens is None:
        raise ValueError("a penalty needs the tokens that were seen so far: give tokens=...")
    seen = torch.ones_like(tokens) if real is None else real
    return torch.zeros_like(logits).scatter_add(1, tokens, seen.to(logits))


def check_sampling(top_k: int | None, top_p: float | None, temperature: float) -> None:
    """Raises ValueError for a number that no distribution goes with."""
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k is a number of tokens, at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p is a probability above 0 and at most 1, got {top_p}")
    if not temperature >= 0:
        raise ValueError(f"the temperature is 0 (greedy) or above, got {temperature}")


def _nucleus(probs: Float[Tensor, "batch d_vocab"], top_p: float) -> Float[Tensor, "batch d_vocab"]:
    """Only the likeliest tokens: one stays if those before it have less than `top_p` together."""
    ordered, index = probs.sort(-1, descending=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    return torch.zeros_like(probs).scatter(-1, index, ordered)
