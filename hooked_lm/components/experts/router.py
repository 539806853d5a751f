"""Routers of a mixture of experts: from the logits of all experts to the chosen experts and their weights.

A router is a frozen dataclass without parameters; the weights that compute the logits belong to the `MoE`. `topk` breaks ties.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.norms.norm import upcast

Logits = Float[Tensor, "*batch expert"]
Choice = tuple[Float[Tensor, "*batch top_k"], Int[Tensor, "*batch top_k"]]


class Router:
    """The choice of experts by their logits."""

    in_fp32 = False  # whether the logits are computed in fp32 for weights of any dtype
    corrected = False  # whether a trained bias per expert is added for the choice only
    fp32_weights: ClassVar[tuple[str, ...]] = ()  # of the MoE, which stay in fp32 in a model of a lower precision

    @abstractmethod
    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        """The weights and the indices of the chosen experts."""

    def check(self, n_experts: int) -> None:
        """Raises ValueError if so many experts cannot form the groups, or too many of these are chosen."""


@dataclass(frozen=True)
class SoftmaxRouter(Router):
    """A softmax over all experts, then the top k (Shazeer et al. 2017, arXiv:1701.06538).

    With `renormalize` the weights of the chosen sum to one.
    """

    renormalize: bool = False

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        weights, indices = upcast(logits).softmax(-1).topk(top_k, -1)
        return _normalized(weights) if self.renormalize else weights, indices


@dataclass(frozen=True)
class TopKRouter(Router):
    """The top k logits, then a softmax over them."""

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        values, indices = logits.topk(top_k, -1)
        return upcast(values).softmax(-1), indices


@dataclass(frozen=True)
class TopKSigmoidRouter(Router):
    """The top k logits, then a sigmoid of each. Llama 4 (Meta 2025)."""

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        values, indices = logits.topk(top_k, -1)
        return upcast(values).sigmoid(), indices


@dataclass(frozen=True)
class GroupedSoftmaxRouter(Router):
    """A softmax over all experts; the top k from the groups with the best single experts, times `scale`.

    DeepSeek-V2 (2024, arXiv:2405.04434), where a group is the experts of one device. With `by_pairs` the groups with the best
    pairs of experts; with `renormalize` the weights sum to `scale`.
    """

    n_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    by_pairs: bool = False
    renormalize: bool = False
    in_fp32: bool = True

    def check(self, n_experts: int) -> None:
        _check_groups(n_experts, self.n_groups, self.top_groups, least=2 if self.by_pairs else 1)

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        scores = upcast(logits).softmax(-1)
        best = _grouped(scores, self.n_groups).topk(2 if self.by_pairs else 1, -1).values.sum(-1)
        weights, indices = _fill_other_groups(scores, best, self.top_groups, 0.0).topk(top_k, -1)
        return (_normalized(weights) if self.renormalize else weights) * self.scale, indices


@dataclass(frozen=True)
class GroupedSigmoidRouter(Router):
    """A sigmoid for each expert; the top k from the groups with the best pairs of experts, times `scale`.

    Groups and experts are chosen by the sigmoid plus the correction, which balances the load of the experts and is not part
    of the weights. DeepSeek-V3 (2024, arXiv:2412.19437). Without `corrected` they are chosen by the sigmoid; with
    `corrects_logits` by the logit plus the correction. `eps` is added to the sum by which weights are renormalised. A
    `soft_cap` bounds the logits: `soft_cap * tanh(logits / soft_cap)`. `keeps_weights` leaves `W_router` in fp32. With
    `score="sqrtsoftplus"` the root of a softplus takes the place of the sigmoid (DeepSeek-V4, DeepSeek-AI 2026).
    """

    n_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    corrected: bool = True
    in_fp32: bool = True
    eps: float = 1e-20
    fill: float = float("-inf")  # the corrected score of experts in other groups
    corrects_logits: bool = False
    soft_cap: float | None = None
    keeps_weights: bool = False
    score: Literal["sigmoid", "sqrtsoftplus"] = "sigmoid"

    @property
    def fp32_weights(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("b_choice",) * self.corrected + ("W_router",) * self.keeps_weights

    def check(self, n_experts: int) -> None:
        _check_groups(n_experts, self.n_groups, self.top_groups, least=2 if self.n_groups > 1 else 1)

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        logits = upcast(logits)
        if self.soft_cap is not None:
            logits = self.soft_cap * (logits / self.soft_cap).tanh()
        scores = self.scores(logits)
        compared = logits if self.corrects_logits else scores
        corrected_scores = compared if correction is None else compared + correction
        if self.n_groups > 1:
            best = _grouped(corrected_scores, self.n_groups).topk(2, -1).values.sum(-1)
            corrected_scores = _fill_other_groups(corrected_scores, best, self.top_groups, self.fill)
        indices = corrected_scores.topk(top_k, -1).indices
        return self.weights(scores, indices), indices

    def scores(self, logits: Logits) -> Logits:
        """The scores of experts, from their logits."""
        return logits.sigmoid() if self.score == "sigmoid" else F.softplus(logits).sqrt()

    def weights(self, scores: Logits, indices: Int[Tensor, "*batch top_k"]) -> Float[Tensor, "*batch top_k"]:
        """The weights of chosen experts, from the scores of all."""
        weights = scores.gather(-1, indices)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        return weights * self.scale


@dataclass(frozen=True)
class CorrectedSoftmaxRouter(Router):
    """A softmax over all experts; the top k of softmax plus correction, with weights from the softmax, times `scale`.

    With `renormalize` they sum to `scale`; `min_sum` is the smallest divisor of the weights. ERNIE 4.5 (Baidu 2025).
    """

    min_sum: float = 1e-12
    renormalize: bool = True
    scale: float = 1.0
    in_fp32 = True
    corrected = True
    fp32_weights = ("W_router", "b_choice")

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        scores = upcast(logits).softmax(-1)
        indices = (scores if correction is None else scores + correction).topk(top_k, -1).indices
        weights = scores.gather(-1, indices)
        return (_normalized(weights, self.min_sum) if self.renormalize else weights) * self.scale, indices


@dataclass(frozen=True)
class SparseMixerRouter(Router):
    """The best expert, then the best of the others, each weighted by a softmax over the experts near it.

    SparseMixer (Liu et al. 2023, arXiv:2310.00811) at inference: an expert is near the best if its logit is lower by at most
    `2 * tolerance` of the larger magnitude. The weights do not sum to one.
    """

    tolerance: float = 0.01

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        remaining, weights, indices = logits, list[Tensor](), list[Tensor]()
        for _ in range(top_k):
            best, index = remaining.detach().max(-1, keepdim=True)
            magnitude = torch.maximum(logits.detach().abs(), best)
            is_far = (best - logits.detach()) / magnitude > 2 * self.tolerance
            near = upcast(remaining.masked_fill(is_far, float("-inf"))).softmax(-1)
            weights.append(near.gather(-1, index))
            indices.append(index)
            remaining = remaining.scatter(-1, index, float("-inf"))
        return torch.cat(weights, -1), torch.cat(indices, -1)


@dataclass(frozen=True)
class CapacityRouter(Router):
    """A softmax, then the best expert. An expert takes at most `capacity` tokens of a row in one run, the first ones; later
    tokens have weight zero (Fedus et al. 2021, arXiv:2101.03961)."""

    capacity: int
    in_fp32 = True

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        weights, indices = upcast(logits).softmax(-1).topk(top_k, -1)
        sent = torch.zeros_like(logits, dtype=torch.long).scatter(-1, indices, 1)
        fits = (sent.cumsum(-2) <= self.capacity).gather(-1, indices)
        return weights * fits, indices


def _check_groups(n_experts: int, n_groups: int, top_groups: int, least: int) -> None:
    if n_groups < 1 or n_experts % n_groups or n_experts // n_groups < least:
        of_pairs = "" if least == 1 else f" with at least {least} each"
        raise ValueError(f"{n_experts} experts cannot form {n_groups} groups of one size{of_pairs} (n_group)")
    if not 1 <= top_groups <= n_groups:
        raise ValueError(f"{top_groups} of {n_groups} groups of experts cannot be chosen (topk_group of n_group)")


def _normalized(weights: Tensor, min_sum: float = 0.0) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=min_sum)


def _grouped(scores: Float[Tensor, "*batch expert"], n_groups: int) -> Float[Tensor, "*batch group in_group"]:
    return scores.unflatten(-1, (n_groups, -1))


def _fill_other_groups(
    scores: Float[Tensor, "*batch expert"], group_scores: Float[Tensor, "*batch group"], top_groups: int, fill: float
) -> Float[Tensor, "*batch expert"]:
    """The scores, with `fill` for experts outside the best groups."""
    chosen = torch.zeros_like(group_scores, dtype=torch.bool).scatter(
        -1, group_scores.topk(top_groups, -1).indices, True
    )
    return scores.masked_fill(~chosen.repeat_interleave(scores.shape[-1] // chosen.shape[-1], -1), fill)
