"""Interventions on the features of a graph: exact in the model, where everything responds, beside what the graph predicts."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.graphs.agreement import GraphInterventions, predicted_changes
from hooked_lm.analysis.graphs.features import FeatureSources
from hooked_lm.analysis.graphs.frozen import FINAL
from hooked_lm.analysis.graphs.graph import FEATURE, AttributionGraph
from hooked_lm.analysis.graphs.neurons import NeuronSources
from hooked_lm.analysis.graphs.sources import Sources
from hooked_lm.analysis.graphs.targets import Target, TargetReads
from hooked_lm.components.blocks.wiring import wiring_of
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.edit import Edit
from hooked_lm.engine.experiment import Experiment
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.prompts import Prompts, rows_of
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.scores import provenance

Nodes = str | int | Sequence[str | int | Sequence[str | int]]
DRAWS = 4  # of the placebo, whose correlation with a prediction differs much from draw to draw


@keeps_torch_state
def intervene(
    model: Decoder,
    graph: AttributionGraph,
    transcoders: LayerTranscoders | None = None,
    *,
    nodes: Nodes | None = None,
    times: float = 0.0,
    source: Prompts | None = None,
    n: int = 20,
    seed: int = 0,
    max_memory: int | str = "auto",
) -> GraphInterventions:
    """Change what features of a graph write, and compare the exact change of the targets with what the graph predicts.

    Each intervention adds to the outputs of MLPs what the features would write with other activations, less what they write. The
    rest of the model responds: attention, norms and later MLPs. The graph predicts the sum over its paths. A placebo adds random
    directions of the same norms at the same places; there are four draws of it.

    Args:
        graph: a graph of this model with these transcoders, whole or pruned.
        nodes: each a feature, a supernode, or a list of features that are changed together, by names or numbers; or one feature
            or supernode. None: `n` features, drawn with the `seed`.
        times: what activations are multiplied by: 0 ablates, 2 doubles, -1 inverts.
        source: instead, a prompt with as many tokens, from which activations are taken (patching).
        max_memory: as for `attribution_graph`.

    Returns GraphInterventions. Raises ValueError for nodes that are no features of the graph, for one that is listed twice in a
    group, for another model or other transcoders, and for a source of another length.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis.graphs import attribution_graph
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> prompt = "When Mary and John left, John gave a drink to"
    >>> graph = attribution_graph(
    ...     model, prompt, answers=(" Mary", " John"), max_nodes=30, check=0
    ... )
    >>> found = intervene(model, graph, n=10)
    >>> (
    ...     found.measured.shape,
    ...     found.correlation["correlation"] > found.placebo_correlation["correlation"],
    ... )
    (torch.Size([10, 1]), True)
    """
    model = decoder(model, "the interventions on a graph need")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    if source is not None and times != 0.0:
        raise TypeError("times and source are both given: activations are multiplied, or taken from another prompt")
    tokens, targets = graph.token_ids[None].to(model.device), targets_of(graph)
    sources = sources_of(model, tokens, graph, transcoders)
    rows = feature_rows(sources, graph)
    groups, names = _groups(graph, nodes, n, seed)
    factors = torch.full((len(graph.features),), times)
    if source is not None:
        factors = _factors(model, graph, transcoders, source, tokens)
    changes = torch.zeros(len(groups), graph.n_nodes)
    for place, group in enumerate(groups):
        changes[place, group] = factors[group] - 1
    edits = [
        [edit for node in group for edit in sources.edits(int(rows[node]), float(factors[node] - 1))]
        for group in groups
    ]
    generator = torch.Generator().manual_seed(seed)
    placebos = [
        [edit for node in group for edit in _placebo(sources, int(rows[node]), float(factors[node] - 1), generator)]
        for _ in range(DRAWS)
        for group in groups
    ]
    measured = measured_changes(model, tokens, targets, [*edits, *placebos], max_memory)
    n_features, n_targets = len(graph.features), len(graph.targets)
    how = {"times": times} if source is None else {"source": str(source)}
    return GraphInterventions(
        names,
        list(graph.targets),
        predicted_changes(graph.adjacency, graph.totals, changes, n_features, n_targets),
        measured[: len(groups)],
        measured[len(groups) :].unflatten(0, (DRAWS, len(groups))) if groups else measured.expand(DRAWS, 0, n_targets),
        provenance(model, seed=seed, **how),
    )


def measured_changes(
    model: Decoder,
    tokens: Int[Tensor, "1 pos"],
    targets: TargetReads,
    cells: Sequence[Sequence[Edit]],
    max_memory: int | str,
) -> Float[Tensor, "cell target"]:
    """The exact change of each target in runs with these edits."""
    last = len(model.blocks) - 1
    stream = f"blocks.{last}.{wiring_of(model.blocks[last]).last}"
    sites = list(dict.fromkeys([stream, *(site for site in targets.sites if site != FINAL)]))
    experiment = Experiment(model, tokens, [_unused_metric], max_memory=max_memory)
    base, found = experiment.capture(cells, sites)

    def read(values: dict[str, Tensor]) -> Float[Tensor, " target"]:
        every = {**base, **values}
        with torch.no_grad():
            every[FINAL] = model.stack.normalized(model, every[stream]).to(model.embed.W_E.dtype)
        return targets.reads(every)

    before = read({})
    return torch.stack([read(values) - before for values in found]) if found else torch.zeros(0, len(before))


def _unused_metric(logits: Tensor) -> Tensor:
    """The metric of a run whose logits are not used."""
    return logits[:, -1, 0]


def _placebo(sources: Sources, row: int, times: float, generator: torch.Generator) -> list[Edit]:
    """Edits that add random directions of the norms of what a feature writes."""
    directions = []
    for _, vector in sources.written(row).values():
        drawn = torch.randn(vector.shape, generator=generator)
        directions.append((drawn / drawn.norm()).to(vector) * vector.norm())
    return sources.edits(row, times, directions)


def one_prompt(model: Decoder, prompt: Prompts, name: str) -> Int[Tensor, "1 pos"]:
    """The ids of one prompt. Raises ValueError for several, TypeError for images."""
    tokens = rows_of(model, prompt, name)
    if not isinstance(tokens, Tensor):
        raise TypeError(f"an attribution graph is of text, and the {name} has images")
    if len(tokens) != 1:
        raise ValueError(f"an attribution graph is of one prompt, got {len(tokens)}: call it for each")
    return tokens.to(model.device)


# ---- the graph and its model -----------------------------------------------------------------------------------------


def sources_of(
    model: Decoder, tokens: Int[Tensor, "1 pos"], graph: AttributionGraph, transcoders: LayerTranscoders | None
) -> Sources:
    """The nodes of the model on the prompt of a graph, with its features. Raises ValueError for other transcoders."""
    constant = int(graph.about.get("constant_positions", 0))
    if (graph.unit == "neuron") != (transcoders is None):
        wanted = "no transcoders" if graph.unit == "neuron" else "the transcoders whose features it has"
        raise ValueError(f"this is a graph of {graph.unit}s: give {wanted}")
    if transcoders is not None:
        return FeatureSources(model, tokens, transcoders, constant)
    sources = NeuronSources(model, tokens, constant)
    sources.keep(graph.features)
    return sources


def feature_rows(sources: Sources, graph: AttributionGraph) -> Int[Tensor, " feature"]:
    """The row, in `sources`, of each feature of a graph. Raises ValueError for a feature that is not active there, and for
    activations of another model."""
    places = {tuple(place): row for row, place in enumerate(sources.features.tolist())}
    features = [tuple(place) for place in graph.features.tolist()]
    if missing := [place for place in features if place not in places]:
        raise ValueError(
            f"feature {missing[0][2]} of layer {missing[0][0]} is not active: is the graph one of this model?"
        )
    rows = torch.tensor([places[place] for place in features], dtype=torch.long)
    size = max(float(graph.activations.abs().max()), 1e-6) if len(rows) else 1.0
    if len(rows) and float((sources.activations[rows] - graph.activations).abs().max()) > 1e-2 * size:
        raise ValueError(
            "the activations are not those of the graph: it is one of another model, or of other transcoders"
        )
    return rows


def targets_of(graph: AttributionGraph) -> TargetReads:
    """The targets of a graph, as it keeps them. Raises ValueError for a graph without their directions."""
    if graph.directions is None:
        raise ValueError("the graph does not say what its targets read: make it with attribution_graph")
    each = zip(graph.targets, graph.directions, graph.reads, strict=True)
    return TargetReads([Target(name, direction, site or None, position) for name, direction, (site, position) in each])


def drawn(graph: AttributionGraph, n: int, seed: int) -> list[str]:
    """The names of n features of a graph, or of all if there are fewer, drawn at random; in their order."""
    order = torch.randperm(len(graph.features), generator=torch.Generator().manual_seed(seed))
    return [graph.names[place] for place in order[:n].sort().values.tolist()]


def _groups(graph: AttributionGraph, nodes: Nodes | None, n: int, seed: int) -> tuple[list[list[int]], list[str]]:
    """The features that each intervention changes, and its name."""
    nodes = drawn(graph, n, seed) if nodes is None else nodes
    found, names = [], []
    for node in [nodes] if isinstance(nodes, (str, int)) else nodes:
        if isinstance(node, str) and node in graph.supernodes:
            group, name = list(graph.supernodes[node]), node
        elif isinstance(node, (str, int)):
            group = [graph.node(node)]
            name = graph.names[group[0]]
        else:
            group = [graph.node(each) for each in node]
            name = " + ".join(graph.names[each] for each in group)
        if wrong := [each for each in group if graph.kinds[each] != FEATURE]:
            raise ValueError(f"{graph.names[wrong[0]]!r} is no feature: interventions change what features write")
        if twice := [each for each in group if group.count(each) > 1]:
            raise ValueError(
                f"{graph.names[twice[0]]!r} is listed twice in {name!r}: a group changes each feature once"
            )
        found.append(group)
        names.append(name)
    return found, names


def _factors(
    model: Decoder,
    graph: AttributionGraph,
    transcoders: LayerTranscoders | None,
    source: Prompts,
    tokens: Int[Tensor, "1 pos"],
) -> Float[Tensor, " feature"]:
    """The activations of the features on another prompt, relative to those of the graph."""
    other = one_prompt(model, source, "source")
    if other.shape != tokens.shape:
        raise ValueError(f"source must be one prompt of {tokens.shape[1]} tokens, got {list(other.shape)}")
    of_other = sources_of(model, other, graph, transcoders)
    known = dict(zip(map(tuple, of_other.features.tolist()), of_other.activations.tolist(), strict=True))
    values = torch.tensor([known.get(tuple(place), 0.0) for place in graph.features.tolist()])
    return values / graph.activations
