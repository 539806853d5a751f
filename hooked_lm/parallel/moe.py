"""Mixtures whose experts are split over ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from hooked_lm.components.experts.moe import ExpertPoint, Indices, InputWeightedMoE, MoE, Routed, Stream, Weights
from hooked_lm.parallel import mlp
from hooked_lm.parallel.guard import SplitModule, computing, parameter, split_class
from hooked_lm.parallel.points import SplitExpertPoint, split_expert_point
from hooked_lm.parallel.ranks import Ranks, joined


class SplitMoE(SplitModule, MoE):
    """Each rank has some of the experts, in order; the router is replicated.

    An expert with hooks that need full values is computed on every rank, with weights that its rank sends to the others.
    """

    shapes: dict[str, torch.Size]  # of the weights of an expert

    def mix(self, x: Stream, weights: Weights, indices: Indices) -> Stream:
        """The weighted sum of the outputs of the chosen experts of all ranks."""
        shown = [i for i, expert in enumerate(self.experts) if self.hooked_points and is_shown(expert)]
        part = self.ranks.slice_of(self.cfg.n_experts)
        own = [i for i in range(part.start, part.stop) if i not in shown]
        # all ranks take part in the gradients of x and weights, also one whose experts have no tokens
        own_x, own_weights = self.ranks.enter(x), self.ranks.enter(weights)
        total = self.ranks.add_up(joined(self.sum_of(own, own_x, own_weights, indices), own_x, own_weights))
        if shown:
            total = total + self.sum_of(shown, x, weights, indices)
        return total.to(x.dtype)

    def weighted(self, expert: nn.Module, x: Routed, weight: Tensor) -> Routed:
        """The weighted outputs of an expert."""
        with self._complete(expert) if is_shown(expert) else nullcontext(), computing():
            return super().weighted(expert, x, weight)

    @contextmanager
    def _complete(self, expert: nn.Module) -> Iterator[None]:
        """Within the block this rank has the weights of an expert, its own or those of another rank."""
        number = next(i for i, other in enumerate(self.experts) if other is expert)
        stores = {name: expert.get_submodule(name.rpartition(".")[0])._parameters for name in self.shapes}
        own = {name: parameter(expert, name) for name in self.shapes}
        for name, store in stores.items():
            value = self._full_weight(number, name)
            if self.owner(number) != self.ranks.rank:
                store[name.rpartition(".")[2]] = value  # type: ignore[assignment]
        try:
            yield
        finally:
            for name, store in stores.items():
                store[name.rpartition(".")[2]] = own[name]

    def owner(self, number: int) -> int:
        """The rank that has an expert."""
        return number * self.ranks.size // self.cfg.n_experts

    def _full_weight(self, number: int, name: str) -> Tensor:
        """A weight of an expert, on every rank."""
        return self.ranks.broadcast(parameter(self.experts[number], name), self.owner(number), self.shapes[name])

    def full_weights(self) -> Iterator[tuple[nn.Parameter, Callable[[], Tensor]]]:
        """Each parameter of an expert, with a function that gathers it on every rank."""
        for number, expert in enumerate(self.experts):
            for name in self.shapes:
                yield parameter(expert, name), partial(self._full_weight, number, name)


class SplitInputWeightedMoE(SplitMoE, InputWeightedMoE):
    """A mixture whose weights multiply the inputs of experts, split by experts."""


CLASSES: dict[type[nn.Module], type[SplitMoE]] = {MoE: SplitMoE, InputWeightedMoE: SplitInputWeightedMoE}


EXPERTS: dict[tuple[type[nn.Module], tuple[str, ...]], type[SplitModule]] = {}


def expert_class(expert: nn.Module) -> type[SplitModule]:
    """The class of an expert that one rank has."""
    kind, weights = type(expert), tuple(name for name, _ in expert.named_parameters(recurse=False))
    if (kind, weights) not in EXPERTS:
        EXPERTS[kind, weights] = type(f"Split{kind.__name__}", (SplitModule, kind), {"guarded": weights})
    return EXPERTS[kind, weights]


def is_shown(expert: nn.Module) -> bool:
    """Whether a hook at a site of this expert needs its full value."""
    return any(isinstance(point, SplitExpertPoint) and point.is_shown for point in expert.children())


def obstacles(moe: MoE, ranks: Ranks) -> Iterator[str]:
    """Why this mixture cannot be split."""
    if moe.cfg.n_experts % ranks.size:
        yield f"{moe.cfg.n_experts} experts are no multiple of {ranks.size}"
    if moe.cfg.n_identity:
        yield "the router has choices without an expert"
    shapes = [{name: weight.shape for name, weight in expert.named_parameters()} for expert in moe.experts]
    if any(other != shapes[0] for other in shapes):
        yield "its experts differ in their weights"
    if moe.shared is not None:
        if type(moe.shared) not in mlp.CLASSES:
            yield f"its shared expert is a {type(moe.shared).__name__}"
        else:
            yield from (f"in its shared expert {reason}" for reason in mlp.obstacles(moe.shared, ranks))  # type: ignore[arg-type]


def split_moe(module: nn.Module, ranks: Ranks) -> SplitMoE:
    """The mixture for this one, split by experts; a shared expert is split by neurons."""
    moe = split_class(module, CLASSES[type(module)], ranks)
    moe.shapes = {name: weight.shape for name, weight in moe.experts[0].named_parameters()}
    for number, whole in enumerate(moe.experts):
        is_here = moe.owner(number) == ranks.rank
        moe.experts[number] = expert = split_class(whole, expert_class(whole), ranks)
        for name, point in list(expert.named_children()):
            if isinstance(point, ExpertPoint):
                setattr(expert, name, split_expert_point(point, is_here))
        for weight in expert.parameters():
            weight.data = weight.data.clone() if is_here else weight.data.new_empty(0)
    if moe.shared is not None:
        moe.shared = mlp.split_mlp(moe.shared, ranks)
    return moe
