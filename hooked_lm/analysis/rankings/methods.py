"""Methods that rank the edges of a model for a task, and what they cost."""

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.analysis.attribution import edges
from hooked_lm.analysis.attribution.edge_patching import patch_edges
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.discover import SEARCHES, discover, scores_of
from hooked_lm.engine.identity import identities
from hooked_lm.engine.pairs import Pairs
from hooked_lm.engine.prompts import kind_of, rows_of
from hooked_lm.engine.result import SweepResult
from hooked_lm.keywords import nearest
from hooked_lm.models.decoder import Decoder

EXACT, RANDOM = "exact", "random"
METHODS = (EXACT, *edges.METHODS, RANDOM)
"""The methods of a leaderboard, unless it is given others."""
BY_SIZE = tuple(name for name, (_, limit) in SEARCHES.items() if limit == "n_edges")
Found = Circuit | SweepResult | Tensor
Method = Callable[[Decoder, Pairs], Found]
"""Ranks the edges of a model for pairs of prompts: measured effects, a circuit with scores, or scores [writer, reader] that are
effects of ablating edges."""


@dataclass(frozen=True)
class Ranking:
    """The scores of all edges by one method, and their cost: forward and backward passes of the model over all prompts."""

    scores: Float[Tensor, "writer reader"]
    is_effect: bool  # whether scores are effects of ablating edges, with a sign and a size
    has_sign: bool  # whether this sign says of which edges the metric has more: not that of random scores
    passes: float
    seconds: float


@dataclass(frozen=True)
class NamedMethod:
    """A method and its name in tables. `through_blocks`: whether all it runs are the blocks of the model, called as modules, so
    that hooks of torch count its passes."""

    name: str
    rank: Method
    through_blocks: bool = False

    @classmethod
    def known(cls, name: str, settings: Mapping[str, Any]) -> "NamedMethod":
        """A method of the library, with `replace_with`, `steps`, `seed` and `max_memory`; raises ValueError."""
        common = {each: settings[each] for each in ("replace_with", "max_memory")}
        if name == EXACT:
            return cls(name, partial(patch_edges, direction="noise", progress=False, control=None, **common))
        if name == RANDOM:
            return cls(name, partial(_random, seed=settings["seed"]))
        if name in edges.METHODS:
            options = {"method": name, "steps": settings["steps"], "check": False, "direction": "noise"}
            return cls(name, partial(edges.attribute_edges, **options, **common), through_blocks=True)
        if name in BY_SIZE:
            options = {"method": name, "n_edges": 1, "held_out": 0, "seed": settings["seed"], "progress": False}
            return cls(name, partial(discover, **options, **common), through_blocks=True)
        if name in SEARCHES:
            raise ValueError(
                f"method {name!r} finds one circuit and ranks no edges: compare circuits with circuits.evaluate"
            )
        near = ", ".join(map(repr, nearest(name, (*METHODS, *BY_SIZE))))
        raise ValueError(f"there is no method {name!r}; did you mean {near}?")

    def ranking(self, model: Decoder, pairs: Pairs) -> Ranking:
        """The ranking for these pairs; raises TypeError and ValueError for a result that ranks no edges."""
        graph, started = Graph.of(model), time.perf_counter()
        with _counted(model if self.through_blocks else None) as counted:
            found = self.rank(model, pairs)
        seconds = time.perf_counter() - started
        n_rows = len(model.blocks) * rows_of(model, pairs.clean).shape.numel()  # of a pass
        if isinstance(found, SweepResult):
            passes = counted.rows / n_rows if self.through_blocks else _passes(found.cost or {}, n_rows)
            return Ranking(scores_of(graph, found), True, True, passes, seconds)
        passes = counted.rows / n_rows
        is_effect = isinstance(found, Tensor)
        if isinstance(found, Circuit):
            found.check(graph)
            if found.scores is None:
                raise ValueError(f"method {self.name!r} returned a circuit without scores: it ranks no edges")
            found = found.scores
        if not isinstance(found, Tensor):
            raise TypeError(
                f"method {self.name!r} must return measured effects, a Circuit with scores or a tensor [writer, reader] of "
                f"scores, got {kind_of(found)}"
            )
        if found.shape != graph.is_edge.shape:
            raise ValueError(
                f"method {self.name!r} must return scores {list(graph.is_edge.shape)} [writer, reader], got {list(found.shape)}"
            )
        scores = found.detach().float().cpu().masked_fill(~graph.is_edge, torch.nan)
        return Ranking(scores, is_effect, is_effect and self.name != RANDOM, passes, seconds)


def methods_of(methods: Sequence[str] | Mapping[str, Method] | None, settings: Mapping[str, Any]) -> list[NamedMethod]:
    """The methods; raises ValueError for unknown ones and for none, TypeError for what is no function."""
    if isinstance(methods, Mapping):
        if wrong := [name for name, method in methods.items() if not callable(method)]:
            got = kind_of(methods[wrong[0]])
            raise TypeError(f"method {wrong[0]!r} must be a function of a model and pairs, got {got}")
        return [NamedMethod(name, method) for name, method in methods.items()]
    names = METHODS if methods is None else (methods,) if isinstance(methods, str) else tuple(methods)
    if not names:
        raise ValueError(f"there are no methods to compare: name some of {', '.join((*METHODS, *BY_SIZE))}")
    return [NamedMethod.known(name, settings) for name in names]


def _random(model: Decoder, pairs: Pairs, *, seed: int) -> Tensor:
    """Scores that know nothing; those of other prompts are others."""
    drawn_for = zlib.crc32("".join(identities(model, rows_of(model, pairs.clean))).encode(), seed & 0xFFFFFFFF)
    return torch.randn(Graph.of(model).is_edge.shape, generator=torch.Generator().manual_seed(drawn_for))


def _passes(cost: Mapping[str, int | float], n_rows: int) -> float:
    """The passes of a result that counted them: whole ones, and rows of single layers."""
    return cost.get("forwards", 0) + cost.get("backwards", 0) + cost.get("layer_rows", 0) / n_rows


# ---- cost ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Counter:
    """Counts the tokens that layers read, forward, and backward where a gradient comes back to them."""

    rows: int = 0

    def forward(self, block: nn.Module, given: tuple[Any, ...], stream: Tensor) -> None:
        n_rows = stream.shape[:2].numel()
        self.rows += n_rows
        if stream.requires_grad:
            stream.register_hook(partial(self._backward, n_rows))

    def _backward(self, n_rows: int, gradient: Tensor) -> None:
        self.rows += n_rows


@contextmanager
def _counted(model: Decoder | None) -> Iterator[_Counter]:
    """Counts what runs through the blocks of a model inside this context."""
    counter = _Counter()
    handles = [block.register_forward_hook(counter.forward) for block in model.blocks] if model is not None else []
    try:
        yield counter
    finally:
        for handle in handles:
            handle.remove()
