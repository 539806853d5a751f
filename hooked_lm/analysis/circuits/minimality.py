"""Minimality of a circuit: what each of its edges or nodes contributes."""

import torch
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.circuit import Circuit
from hooked_lm.analysis.circuits.held_out import JUDGED, MeasuredPairs
from hooked_lm.analysis.circuits.run import Runner
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.models.decoder import Decoder
from hooked_lm.renamed import renamed
from hooked_lm.results.scores import Scores, provenance


@renamed(ablation=("replace_with", {"resample": "corrupted"}))
@keeps_torch_state
def minimality(
    model: Decoder,
    circuit: Circuit,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    of: str = "edges",
    replace_with: str = "corrupted",
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> Scores:
    """The contribution of each edge or node: the metric of the circuit minus that of the circuit without it.

    Args:
        of: "edges" (`writer -> reader`), or "nodes": all edges from a writer, which makes its inputs irrelevant too.

    Returns Scores with the axis edge or node, in units of the metric. In a minimal circuit no contribution is 0 (Wang et al.
    2022, arXiv:2211.00593). The prompts of the circuit's search are left out, as in `evaluate`. Raises ValueError for an empty
    circuit, a circuit of another model, and an unknown `of`.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> circuit = Circuit.of(
    ...     Graph.of(model), [("input", "m0"), ("m0", "logits"), ("input", "logits")]
    ... )
    >>> minimality(
    ...     model, circuit, "Mary and John left, Mary", "Mary and John left, John"
    ... ).axes
    {'edge': ('input -> m0', 'input -> logits', 'm0 -> logits')}
    """
    if of not in ("edges", "nodes"):
        raise ValueError(f"of must be 'edges' or 'nodes', got {of!r}")
    circuit.check(Graph.of(model))
    pairs, judged_on = MeasuredPairs.of(model, corrupted, clean, metric, answers).judging([circuit], max_memory)
    runner = Runner(model, pairs.corrupted, pairs.clean, pairs.metric, replace_with, max_memory)
    if not circuit.n_edges:
        raise ValueError("the circuit is empty: there is nothing to leave out")
    without = _without_edges(circuit) if of == "edges" else _without_nodes(circuit)
    found = runner.values(torch.stack([circuit.edges, *without.values()]), progress)
    about = provenance(
        model, of=f"{runner.metric_name} lost without it", replace_with=replace_with, metric=runner.metric_name
    )
    about |= {JUDGED: judged_on} if judged_on else {}
    return Scores(found[0] - found[1:], {of.removesuffix("s"): list(without)}, about=about)


def _without_edges(circuit: Circuit) -> dict[str, Bool[Tensor, "writer reader"]]:
    found = {}
    for place, (writer, reader) in zip(
        circuit.edges.nonzero().tolist(), circuit.graph.named(circuit.edges), strict=True
    ):
        found[f"{writer} -> {reader}"] = circuit.edges.clone()
        found[f"{writer} -> {reader}"][tuple(place)] = False
    return found


def _without_nodes(circuit: Circuit) -> dict[str, Bool[Tensor, "writer reader"]]:
    found = {}
    for i, node in enumerate(circuit.graph.writers):
        if bool(circuit.edges[i].any()):
            found[node.name] = circuit.edges.clone()
            found[node.name][i] = False
    return found
