"""Circuits of neurons: neurons at positions as nodes, with effects and edges from backward passes (Arora et al. 2026, "Language
model circuits are sparse in the neuron basis", arXiv:2601.22594).

A first backward pass gives the effect of each neuron at each position. One more for each neuron that is kept gives what flows
into it: the gradient is stopped where it would enter the MLP of another layer, so an edge is what flows through the residual
stream and attention alone. So the effect of a neuron is the sum of its edges, into all later neurons and into the logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.attribution.backward_rules import BackwardRules
from hooked_lm.analysis.attribution.checking import Check
from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.attribution.nodes import attribute
from hooked_lm.analysis.circuits.circuit import SEEN
from hooked_lm.analysis.circuits.held_out import JUDGED, SAME, UNSEEN, HeldOut, MeasuredPairs, is_per_prompt, searched
from hooked_lm.analysis.circuits.neuron_runs import ALL, CIRCUIT, KEPT, NONE, Flows, PartialRuns
from hooked_lm.components.activations import Activated
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.identity import identities
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import NO_METRIC, Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.engine.result import metric_name
from hooked_lm.extras import lazy_import
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import ids_of
from hooked_lm.results import Label, stored
from hooked_lm.results.scores import Scores, provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd

    from hooked_lm.viz.graphs import GraphView
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.NeuronCircuit"
LOGITS, INPUT, OTHERS = "logits", "input", "other neurons"
SHOWN = 40  # edges of a figure


@dataclass(frozen=True, eq=False, repr=False)
class NeuronCircuit(Tabular):
    """Neurons at positions, their effects, and what flows between them.

    Args:
        neurons: [node, 3], the layer, position and index of each neuron, in the order of layers.
        effects: [node, prompt], the estimated change of the metric if the neuron alone is exchanged.
        edges: [source, target, prompt], the part of the effect of a source that flows directly into a target. Sources are the
            neurons and the embeddings; targets are the neurons, all other neurons together, and the logits.
        kept: the metric of exact runs with the axis "neurons": all neurons of the clean run, none, those of the circuit, and as
            many random ones; the others are those of the corrupted run. On prompts that the search did not see, if there are
            some (`about["judged_on"]`).
        tokens: the tokens of the first clean prompt, for labels.
        about: how it was found; `agreement` compares estimated effects with exact ones.

    A source's edges sum to its effect (`effects`; for the embeddings to that of exchanging them).
    """

    neurons: Int[Tensor, "node 3"]
    effects: Float[Tensor, "node prompt"]
    edges: Float[Tensor, "source target prompt"]
    kept: Scores
    tokens: Sequence[str] = ()
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n, n_prompts = len(self.neurons), self.effects.shape[-1]
        shapes = {"neurons": (n, 3), "effects": (n, n_prompts), "edges": (n + 1, n + 2, n_prompts)}
        for name, shape in shapes.items():
            if (found := tuple(getattr(self, name).shape)) != shape:
                raise ValueError(f"{name} of {n} neurons must be {list(shape)}, got {list(found)}")
        if list(self.kept.axes) != [KEPT] or [*self.kept.axes[KEPT]][:3] != [ALL, NONE, CIRCUIT]:
            raise ValueError(f"kept must have the axis {KEPT!r} that begins with {ALL}, {NONE} and {CIRCUIT}")

    @property
    def names(self) -> list[str]:
        """The names of the neurons: "L2N17@5" is neuron 17 of layer 2 at position 5."""
        return [f"L{layer}N{neuron}@{position}" for layer, position, neuron in self.neurons.tolist()]

    @property
    def sources(self) -> list[str]:
        return [*self.names, INPUT]

    @property
    def targets(self) -> list[str]:
        return [*self.names, OTHERS, LOGITS]

    @property
    def faithfulness(self) -> float:
        """The share of the metric that the circuit recovers, between no neurons (0) and all of them (1)."""
        return float(self._recovered(CIRCUIT))

    @property
    def random_faithfulness(self) -> Float[Tensor, " draw"]:
        """The same of as many random neurons."""
        return torch.tensor([self._recovered(name) for name in self.kept.axes[KEPT][3:]])

    def _recovered(self, name: Label) -> float:
        full, empty, own = (self.kept.select(neurons=each).values.double().mean() for each in (ALL, NONE, name))
        return float((own - empty) / (full - empty))

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each edge that is not 0, by descending size of its mean over prompts: `source`, `target`, `effect`."""
        means = self.edges.mean(-1)
        rows, columns = means.nonzero(as_tuple=True)
        table = pd.DataFrame(
            {
                "source": [self.sources[row] for row in rows.tolist()],
                "target": [self.targets[column] for column in columns.tolist()],
                "effect": means[rows, columns].numpy(),
            }
        )
        return table.sort_values("effect", key=abs, ascending=False, ignore_index=True, kind="stable")

    def nodes(self) -> "pd.DataFrame":
        """A row for each neuron, by descending size of its mean effect: `name`, `layer`, `position`, `token` (of the first
        prompt), `neuron`, `effect`, and of it `direct` (into the logits) and `inside` (into neurons of the circuit)."""
        n, mean = len(self.neurons), self.edges.mean(-1)
        layers, positions, neurons = self.neurons.T.numpy()
        table = pd.DataFrame({"name": self.names, "layer": layers, "position": positions})
        if self.tokens:
            table["token"] = [self.tokens[position] for position in positions]
        effects = {"effect": self.effects.mean(-1), "direct": mean[:n, -1], "inside": mean[:n, :n].sum(-1)}
        table = table.assign(neuron=neurons, **{name: values.numpy() for name, values in effects.items()})
        return table.sort_values("effect", key=abs, ascending=False, ignore_index=True, kind="stable")

    def plot(self, title: str = "", n_edges: int = SHOWN) -> "GraphView":
        """Draw the largest edges between neurons, the embeddings and the logits, layer by layer.

        >>> import torch
        >>> kept = Scores(torch.tensor([[2.0], [0.0], [1.5]]), {"neurons": [ALL, NONE, CIRCUIT]})
        >>> edges = torch.tensor([[[0.0], [0.5], [1.0]], [[1.0], [0.0], [0.2]]])
        >>> NeuronCircuit(torch.tensor([[0, 3, 17]]), torch.tensor([[1.5]]), edges, kept).plot()
        View('Circuit of 1 neurons', 3 nodes, 3 edges; .show() opens it in a browser, .write_html(path) saves it)
        """
        from hooked_lm.viz.graphs import layered_graph

        if n_edges < 1:
            raise ValueError(f"n_edges must be at least 1, got {n_edges}")
        table = self.to_dataframe()
        table = table[table["target"] != OTHERS].head(n_edges)
        used = {*table["source"], *table["target"]}
        levels = {INPUT: -1.0} | dict(zip(self.names, self.neurons[:, 0].double().tolist(), strict=True))
        levels[LOGITS] = float(self.neurons[:, 0].max()) + 1
        drawn = [
            (source, target, f"{source} → {target}")
            for source, target in zip(table["source"], table["target"], strict=True)
        ]
        name = str(self.about.get("metric", "the metric"))
        return layered_graph(
            {node: level for node, level in levels.items() if node in used},
            drawn,
            torch.tensor(table["effect"].to_numpy(), dtype=torch.float32),
            title or f"Circuit of {len(self.neurons)} neurons",
            f"effect on {name}",
            f"{self._in_words()}. An edge is what flows through the stream and attention alone.",
            (f"without it {name} rises", f"without it {name} falls"),
            blue=-1,
        )

    def _in_words(self) -> str:
        random = self.random_faithfulness
        by_chance = (
            f", as many random ones {float(random.min()):.2f} to {float(random.max()):.2f}" if len(random) else ""
        )
        where = f" on {self.about[JUDGED]}" if JUDGED in self.about else ""
        return f"the neurons recover {self.faithfulness:.2f} of the metric{where}{by_chance}"

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `load` restores it exactly."""
        tensors = {name: getattr(self, name) for name in ("neurons", "effects", "edges")} | {"kept": self.kept.values}
        header = {"kept": self.kept.axes[KEPT], "tokens": list(self.tokens), "about": self.about}
        stored.write(path, FORMAT, tensors, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "NeuronCircuit":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        kept = Scores(tensors.pop("kept"), {KEPT: header["kept"]})
        return cls(**tensors, kept=kept, tokens=header["tokens"], about=header["about"])

    def __repr__(self) -> str:
        agreement = self.about.get("agreement", {}).get("spearman")
        exact = "" if agreement is None else f"; effects against exact ones: Spearman {agreement:.2f}"
        n_edges = int((self.edges[:, : len(self.neurons)].mean(-1) != 0).sum())
        return f"NeuronCircuit({len(self.neurons)} neurons, {n_edges} edges between them; {self._in_words()}{exact})"


@keeps_torch_state
@reads_chats
def neuron_circuit(
    model: Decoder,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    n_neurons: int,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    backward: str | BackwardRules = "relp",
    check: Check = None,
    held_out: HeldOut = None,
    n_random: int = 5,
    seed: int = 0,
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> NeuronCircuit:
    """Find the neurons at positions that matter most for a behaviour, and what flows between them.

    The neurons with the largest mean effects are kept: the gradient of the clean run, times the difference to the corrupted run
    (Arora et al. 2026, arXiv:2601.22594, who use RelP). All pairs are in one pass with a graph.

    Args:
        corrupted, clean: prompts of as many tokens each, whose positions mean the same; or `Pairs`.
        n_neurons: how many neurons at positions to keep; each costs a backward pass.
        metric, answers: as for `attribute`; one metric, with a number for each prompt.
        backward: what backward passes use in place of derivatives, as for `attribute`.
        check: how many effects of neurons to measure exactly, as for `attribute`.
        held_out: the pairs that the search does not see, as for `discover`; what the neurons recover is measured on these.
        n_random: how many draws of as many random neurons are kept beside, as a control.
        seed: seed of the random neurons, of the held-out pairs, and of the neurons that are measured.
        max_memory, progress: as for `attribute`.

    Returns a NeuronCircuit. Raises TypeError for another model, ValueError for a model without neurons or with experts, for a
    metric with one number for all prompts, for numbers out of range, and as `attribute`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> found = neuron_circuit(
    ...     model,
    ...     corrupted,
    ...     clean,
    ...     answers=(" Mary", " John"),
    ...     n_neurons=20,
    ...     check=False,
    ... )
    >>> found.edges.shape, bool(found.faithfulness > found.random_faithfulness.max())
    (torch.Size([21, 22, 1]), True)
    """
    model = decoder(model, "neurons at positions are those of")
    rules, sites = BackwardRules.of(backward), neuron_sites(model)
    if isinstance(n_neurons, bool) or not isinstance(n_neurons, int) or n_neurons < 1:
        raise ValueError(f"n_neurons must be a whole number from 1 on, got {n_neurons!r}")
    if n_random < 0:
        raise ValueError(f"n_random must not be negative, got {n_random}")
    every = MeasuredPairs.of(model, corrupted, clean, metric, answers)
    if every.metric is None:
        raise TypeError(NO_METRIC)
    if not is_per_prompt(model, every.metric, every.clean, max_memory):
        raise ValueError("the metric has one number for all prompts: edges need one for each")
    known = identities(model, every.clean)
    seen = searched(known, held_out, seed)
    unseen = [place for place in range(len(known)) if place not in seen]
    pairs, judged = (every.some(rows) if unseen else every for rows in (seen, unseen))
    nodes = attribute(
        model,
        pairs.corrupted,
        pairs.clean,
        metric=pairs.metric,
        sites="post",
        neurons="each",
        direction="noise",
        backward=rules,
        check=check,
        seed=seed,
        max_memory=max_memory,
        progress=progress,
        control=None,
    )
    chosen = _largest(nodes, n_neurons)
    flows = Flows(model, pairs, sites, rules)
    edges = flows.edges(chosen, progress)
    kept = PartialRuns(model, judged, sites).measured(chosen, n_random, seed)
    about = provenance(model, n_neurons=n_neurons, seed=seed, metric=metric_name(every.metric) or "metric")
    about |= {"backward": rules.settings, SEEN: [known[row] for row in seen], JUDGED: UNSEEN if unseen else SAME}
    if nodes.exact is not None and len(nodes.agreement):  # a table, which needs pandas
        about["agreement"] = nodes.agreement.iloc[0].astype(float).to_dict()
    tokens = (
        [] if model.tokenizer is None else [model.to_single_str_token(int(each)) for each in ids_of(pairs.clean)[0]]
    )
    return NeuronCircuit(chosen, flows.effects_of(chosen), edges, kept, tokens, about)


def neuron_sites(model: Decoder) -> dict[int, tuple[str, Activated]]:
    """The site of the neurons of each layer that has some, with their MLP."""
    found: dict[int, tuple[str, Activated]] = {}
    for layer, block in enumerate(model.blocks):
        mlp = block._modules.get("mlp")
        if isinstance(mlp, Activated):
            found[layer] = f"blocks.{layer}.mlp.hook_post", mlp
        elif mlp is not None:
            raise ValueError(f"'blocks.{layer}.mlp' is a {type(mlp).__name__}: neurons of experts are no nodes")
    if not found:
        raise ValueError("no layer of this model has neurons")
    return found


def _largest(nodes: Attribution, n: int) -> Int[Tensor, "node 3"]:
    """The layer, position and index of the neurons with the largest mean effects, in the order of layers."""
    sizes = nodes.effects().estimates.mean.abs().nan_to_num(nan=-1.0)
    n_there = int((sizes > 0).sum())
    if n > n_there:
        raise ValueError(f"n_neurons={n}, and {n_there} neurons at positions have an effect")
    places = torch.stack(torch.unravel_index(sizes.flatten().topk(n).indices, sizes.shape), -1)
    layers = torch.tensor(nodes.axes["layer"])[places[:, 0]]
    found = torch.stack([layers, places[:, 1], places[:, 2]], -1)
    return found[sorted(range(n), key=lambda row: found[row].tolist())]
