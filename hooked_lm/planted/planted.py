"""A model whose circuit is known, and the check of what is said of it by exact patching."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.edge_patching import patch_edges
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.engine.pairs import Pairs
from hooked_lm.engine.result import SweepResult
from hooked_lm.extras import lazy_import
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.patching.sweeps import sweep
from hooked_lm.pretrained import HookedTransformer
from hooked_lm.results.scores import Scores

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

N_PAIRS = 24  # of each kind of prompts: those to study, and those held out
ROUNDING = 1e-4
FIELDS = ("clean", "corrupted", "answers", "wrong_answers")
DIRECTIONS = ("denoise", "noise")
Example = tuple[Sequence[str], Sequence[str], str, str]  # clean and corrupted tokens, right and wrong answer


@dataclass(frozen=True, eq=False, repr=False)
class Planted(NotebookRepr):
    """A small model, its task, and its circuit, which is known because the weights were made for it.

    `truth` has the edges that carry what differs between clean and corrupted prompts to the logits. What is the same in both,
    such as positions, is on no true edge: exchanging it changes nothing.

    Args:
        name, description: the name of the model, and what it computes and how, in a sentence.
        model: the model.
        vocabulary: the names of its tokens.
        pairs, held_out: prompts with answers, and further ones.
        truth: the true edges, over `Graph.of(model)`.
        neurons: [layer, neuron], the true neurons; None where the truth is by edges only.
        misleading: where single ablations or correlations mislead, in a sentence; "" where they do not.
        rounding: effects below this share of the largest are none. Of a model whose weights were made it is that of numbers; of a
            trained one it decides what is in its truth.

    >>> from hooked_lm import planted
    >>> example = planted.load("previous-token")
    >>> example
    Planted('previous-token': 2 true edges of 46; 24 pairs of prompts, 24 held out)
    >>> example.text(example.pairs.clean[0])
    '^ g h e a'
    """

    name: str
    description: str
    model: HookedTransformer
    vocabulary: tuple[str, ...]
    pairs: Pairs
    held_out: Pairs
    truth: Circuit
    neurons: Bool[Tensor, "layer neuron"] | None = None
    misleading: str = ""
    rounding: float = ROUNDING

    def text(self, tokens: Sequence[int] | Tensor) -> str:
        """The names of tokens in a row."""
        return " ".join(self.vocabulary[int(token)] for token in tokens)

    def accuracy(self, pairs: Pairs, model: HookedTransformer | None = None) -> float:
        """How often the right answer has the highest logit after the clean prompts, in this model or another, such as its
        untrained twin.

        >>> from hooked_lm import planted
        >>> example = planted.load("induction")
        >>> example.accuracy(example.held_out)
        1.0
        """
        found = (model or self.model)(pairs.clean)[:, -1].argmax(-1)
        return float((found == torch.as_tensor(pairs.answers)).double().mean())

    def check(self, of: str = "edges") -> "pd.DataFrame":
        """Compares the truth with exact patching of all edges, or neurons, on all prompts, held-out ones included.

        Sizes are the largest over prompts, relative to the largest of all. What two components do together cannot be seen in
        either alone: for true edges, `joint` closes two at a time.

        Args:
            of: "edges" or "neurons".

        Returns a table with a row for each edge (`writer`, `reader`) or neuron (`layer`, `neuron`):

        - `true`: whether the truth has it;
        - `denoise`, `noise`: the size of its effect if it alone is exchanged, in the corrupted or in the clean run;
        - `joint`, of edges: for a true one, the size of the largest effect of closing it in the clean run where another true
          edge is closed already; for others, of closing all of them together;
        - `agrees`: whether a true one has an effect, and another one has none.

        Raises ValueError for something of which this model has no truth.

        >>> from hooked_lm import planted
        >>> table = planted.load("backup").check()
        >>> bool(table["agrees"].all())
        True
        >>> table[table["true"]].round(1).to_string(index=False).splitlines()[0].split()
        ['writer', 'reader', 'true', 'denoise', 'noise', 'joint', 'agrees']
        """
        if of not in ("edges", "neurons"):
            raise ValueError(f"of must be 'edges' or 'neurons', got {of!r}")
        if of == "neurons":
            return self._check_neurons(self.true_neurons)
        graph = self.truth.graph
        sizes = {
            direction: self._sizes(partial(patch_edges, direction=direction, control=None)) for direction in DIRECTIONS
        }
        sizes["joint"] = self._sizes(self._joint)
        names = pd.DataFrame(list(graph.named(graph.is_edge)), columns=["writer", "reader"])
        sizes = {key: size[graph.is_edge] for key, size in sizes.items()}
        return self._table(names, self.truth.edges[graph.is_edge], sizes)

    @property
    def true_neurons(self) -> Bool[Tensor, "layer neuron"]:
        """As `neurons`; raises ValueError for a model whose truth is by edges only."""
        if self.neurons is None:
            raise ValueError(
                f"the truth of {self.name!r} is by edges only, it has none by neuron: see planted.load({self.name!r}).truth"
            )
        return self.neurons

    def _check_neurons(self, true: Bool[Tensor, "layer neuron"]) -> "pd.DataFrame":
        sizes = {
            direction: self._sizes(partial(sweep, by="neuron", neurons="each", direction=direction)).flatten()
            for direction in DIRECTIONS
        }
        layers, neurons = torch.ones_like(true).nonzero().T.tolist()
        return self._table(pd.DataFrame({"layer": layers, "neuron": neurons}), true.flatten(), sizes)

    def _sizes(self, effects: Callable[..., Scores]) -> Float[Tensor, "*cell"]:
        """The largest size over all prompts of what is measured of each cell."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "its attention is not causal")  # which here takes a second
            found = effects(self.model, _together(self.pairs, self.held_out), progress=False)
        values = found.effects().values if isinstance(found, SweepResult) else found.values
        return values.abs().amax(-1)

    def _joint(self, model: HookedTransformer, pairs: Pairs, progress: bool | None = None) -> Scores:
        """The effect on each prompt of closing an edge: of a true one beside another, the largest; of others, all together."""
        runner, graph = Runner(model, pairs), self.truth.graph
        true = self.truth.edges.nonzero().tolist()
        gates = torch.ones(len(true), len(true), *graph.is_edge.shape)  # [closed before, closed then]
        for i, (writer, reader) in enumerate(true):
            gates[i, :, writer, reader] = gates[:, i, writer, reader] = 0
        values = runner.values(gates.flatten(0, 1), progress).unflatten(0, gates.shape[:2])
        before = values.diagonal().T[:, None]
        effects = (runner.values(self.truth.edges[None]) - runner.full).expand(*graph.is_edge.shape, -1).clone()
        effects[self.truth.edges] = (values - before).abs().amax(0)
        axes = {"writer": [node.name for node in graph.writers], "reader": [node.name for node in graph.readers]}
        return Scores(effects, axes)

    def _table(
        self, names: "pd.DataFrame", true: Bool[Tensor, " row"], sizes: Mapping[str, Float[Tensor, " row"]]
    ) -> "pd.DataFrame":
        """The table of what was measured, relative to the largest, and whether it agrees with the truth."""
        every = torch.stack(list(sizes.values()))
        every = every / every.max()
        has_effect = every.amax(0) > self.rounding
        columns = dict(zip(sizes, every.numpy(), strict=True))
        return names.assign(true=true.numpy(), **columns, agrees=(has_effect == true).numpy())

    def repr_table(self) -> Table:
        """What the model does, with an example."""
        ends = ((name, getattr(self.pairs, name)[:1]) for name in FIELDS)
        prompts = [(name.replace("_", " "), self.text(torch.as_tensor(tokens).flatten())) for name, tokens in ends]
        edges = ", ".join(" > ".join(edge) for edge in self.truth.graph.named(self.truth.edges))
        rows = [("task", self.description), *prompts, ("true edges", edges)]
        return Table(("", "value"), [*rows, *([("misleading", self.misleading)] if self.misleading else [])])

    def __repr__(self) -> str:
        n_true, n_edges = self.truth.n_edges, self.truth.graph.n_edges
        prompts = f"{len(self.pairs)} pairs of prompts, {len(self.held_out)} held out"
        return f"Planted({self.name!r}: {n_true} true edges of {n_edges}; {prompts})"


def _together(one: Pairs, other: Pairs) -> Pairs:
    """The pairs of both."""
    parts = [[torch.as_tensor(getattr(some, name)) for some in (one, other)] for name in FIELDS]
    return Pairs(*map(torch.cat, parts))


def edges_of(model: HookedTransformer, edges: Sequence[str]) -> Circuit:
    """The circuit of edges that are written as "input > L0H1<v>"."""
    return Circuit.of(Graph.of(model), [tuple(edge.split(" > ")) for edge in edges], method="planted")  # type: ignore[misc]


def neurons_of(model: HookedTransformer, neurons: Mapping[int, Iterable[int]]) -> Bool[Tensor, "layer neuron"]:
    """A mask of the neurons of some layers."""
    found = torch.zeros(model.cfg.n_layers, model.cfg.d_mlp or 0, dtype=torch.bool)
    for layer, some in neurons.items():
        found[layer, list(some)] = True
    return found


def draw_pairs(example: Callable[[Random], Example], vocabulary: Sequence[str], seed: int) -> tuple[Pairs, Pairs]:
    """Pairs of prompts drawn with a seed, and as many held-out ones; no pair occurs twice."""
    rng, ids = Random(seed), {token: i for i, token in enumerate(vocabulary)}
    drawn: dict[tuple[str, ...], Example] = {}
    while len(drawn) < 2 * N_PAIRS:
        found = example(rng)
        drawn[(*found[0], *found[1])] = found
    columns = zip(*drawn.values(), strict=True)
    clean, corrupted = (torch.tensor([[ids[token] for token in row] for row in next(columns)]) for _ in range(2))
    answers, wrong = (torch.tensor([ids[token] for token in next(columns)]) for _ in range(2))
    both = Pairs(clean, corrupted, answers, wrong)
    return both[:N_PAIRS], both[N_PAIRS:]
