"""How a mixture of experts chooses: from one logit per expert to the chosen experts and their weights.

Everything here is a value: a router is a frozen description, called with the logits. The weights that give the logits belong
to the `MoE`. Where several experts are equally good, `topk` decides.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.norm import wide

Logits = Float[Tensor, "*batch expert"]
Choice = tuple[Float[Tensor, "*batch top_k"], Int[Tensor, "*batch top_k"]]


@dataclass(frozen=True)
class SoftmaxRouter:
    """A softmax over all experts, then the top k (Shazeer et al. 2017, arXiv:1701.06538).

    With `renormalize` the weights of the chosen sum to one.
    """

    renormalize: bool = False
    in_fp32: ClassVar[bool] = False  # whether the logits are computed in fp32 whatever the weights are
    corrected: ClassVar[bool] = False  # whether a trained number per expert is added for the choice alone
    kept_wide: ClassVar[tuple[str, ...]] = ()  # weights that stay in fp32 when a model is cast to less

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        weights, indices = wide(logits).softmax(-1).topk(top_k, -1)
        return _summing_to_one(weights) if self.renormalize else weights, indices


@dataclass(frozen=True)
class TopKRouter:
    """The top k logits, then a softmax over these."""

    in_fp32: ClassVar[bool] = False
    corrected: ClassVar[bool] = False
    kept_wide: ClassVar[tuple[str, ...]] = ()

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        values, indices = logits.topk(top_k, -1)
        return wide(values).softmax(-1), indices


@dataclass(frozen=True)
class GroupedSoftmaxRouter:
    """A softmax over all experts; the top k out of the groups with the best single expert, times `scale`.

    DeepSeek-V2 (2024, arXiv:2405.04434): experts that lie on one device are a group.
    """

    n_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    in_fp32: ClassVar[bool] = True
    corrected: ClassVar[bool] = False
    kept_wide: ClassVar[tuple[str, ...]] = ()

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        scores = wide(logits).softmax(-1)
        best = _grouped(scores, self.n_groups).amax(-1)
        weights, indices = _outside(scores, best, self.top_groups, 0.0).topk(top_k, -1)
        return weights * self.scale, indices


@dataclass(frozen=True)
class GroupedSigmoidRouter:
    """A sigmoid for each expert; the top k out of the groups with the best pair of experts, times `scale`.

    Groups and experts are chosen by the sigmoid plus the correction, which balances the experts' loads and does not
    enter the weights. DeepSeek-V3 (2024, arXiv:2412.19437).
    """

    n_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    scale: float = 1.0
    in_fp32: ClassVar[bool] = True
    corrected: ClassVar[bool] = True
    kept_wide: ClassVar[tuple[str, ...]] = ("b_choice",)

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        scores = wide(logits).sigmoid()
        attraction = scores if correction is None else scores + correction
        if self.n_groups > 1:
            best = _grouped(attraction, self.n_groups).topk(2, -1).values.sum(-1)
            attraction = _outside(attraction, best, self.top_groups, float("-inf"))
        indices = attraction.topk(top_k, -1).indices
        weights = scores.gather(-1, indices)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, indices


@dataclass(frozen=True)
class CorrectedSoftmaxRouter:
    """A softmax over all experts; the top k of it plus the correction, their weights without it summing to one.

    `least` bounds the sum that is divided by. ERNIE 4.5 (Baidu 2025).
    """

    least: float = 1e-12
    in_fp32: ClassVar[bool] = True
    corrected: ClassVar[bool] = True
    kept_wide: ClassVar[tuple[str, ...]] = ("W_router", "b_choice")

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        scores = wide(logits).softmax(-1)
        indices = (scores if correction is None else scores + correction).topk(top_k, -1).indices
        return _summing_to_one(scores.gather(-1, indices), self.least), indices


@dataclass(frozen=True)
class SparseMixerRouter:
    """The best expert, and then the best of the others, each by a softmax over those that come near it.

    SparseMixer (Liu et al. 2023, arXiv:2310.00811) as it is at inference: an expert comes near the best if it is behind by
    no more than `2 * tolerance` of the larger magnitude. The weights of the chosen do not sum to one.
    """

    tolerance: float = 0.01
    in_fp32: ClassVar[bool] = False
    corrected: ClassVar[bool] = False
    kept_wide: ClassVar[tuple[str, ...]] = ()

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        remaining, weights, indices = logits, list[Tensor](), list[Tensor]()
        for _ in range(top_k):
            best, index = remaining.detach().max(-1, keepdim=True)
            magnitude = torch.maximum(logits.detach().abs(), best)
            is_far = (best - logits.detach()) / magnitude > 2 * self.tolerance
            near = wide(remaining.masked_fill(is_far, float("-inf"))).softmax(-1)
            weights.append(near.gather(-1, index))
            indices.append(index)
            remaining = remaining.scatter(-1, index, float("-inf"))
        return torch.cat(weights, -1), torch.cat(indices, -1)


@dataclass(frozen=True)
class CapacityRouter:
    """A softmax, then the best expert, which takes at most the first `capacity` tokens of a row that come to it; the weight of
    later ones is zero (Fedus et al. 2021, arXiv:2101.03961). What the model reads in one run is one row."""

    capacity: int
    in_fp32: ClassVar[bool] = True
    corrected: ClassVar[bool] = False
    kept_wide: ClassVar[tuple[str, ...]] = ()

    def __call__(self, logits: Logits, top_k: int, correction: Tensor | None = None) -> Choice:
        weights, indices = wide(logits).softmax(-1).topk(top_k, -1)
        sent = torch.zeros_like(logits, dtype=torch.long).scatter(-1, indices, 1)
        fits = (sent.cumsum(-2) <= self.capacity).gather(-1, indices)
        return weights * fits, indices


Router = (
    CapacityRouter
    | SoftmaxRouter
    | TopKRouter
    | GroupedSoftmaxRouter
    | GroupedSigmoidRouter
    | CorrectedSoftmaxRouter
    | SparseMixerRouter
)


def _summing_to_one(weights: Tensor, least: float = 0.0) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=least)


def _grouped(scores: Float[Tensor, "*batch expert"], n_groups: int) -> Float[Tensor, "*batch group in_group"]:
    return scores.unflatten(-1, (n_groups, -1))


def _outside(
    scores: Float[Tensor, "*batch expert"], of_groups: Float[Tensor, "*batch group"], top_groups: int, fill: float
) -> Float[Tensor, "*batch expert"]:
    """The scores with `fill` for the experts that are not in the best groups."""
    chosen = torch.zeros_like(of_groups, dtype=torch.bool).scatter(-1, of_groups.topk(top_groups, -1).indices, True)
    return scores.masked_fill(~chosen.repeat_interleave(scores.shape[-1] // chosen.shape[-1], -1), fill)
