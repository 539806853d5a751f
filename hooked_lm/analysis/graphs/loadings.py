"""Head loadings: how much of an edge of an attribution graph flows through which head, from which position."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.graphs.frozen import FIRST, FrozenModel, Jacobian
from hooked_lm.analysis.graphs.graph import FEATURE, TARGET, TOKEN, AttributionGraph
from hooked_lm.analysis.graphs.interventions import feature_rows, sources_of, targets_of
from hooked_lm.analysis.graphs.sources import Sources
from hooked_lm.components.attention.gated import OutputGate
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.prompts import position_labels
from hooked_lm.hooks.head_labels import head_label
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders
from hooked_lm.models.decoder import Decoder
from hooked_lm.results import Label
from hooked_lm.results.scores import Scores, provenance

__all__ = ["head_loadings"]

DIRECT = "direct"
TOLERANCE = 1e-3  # of the largest loading, in single precision
Written = Mapping[str, tuple[int, Float[Tensor, " width"]]]  # site -> the position and the vector


@keeps_torch_state
def head_loadings(
    model: Decoder,
    graph: AttributionGraph,
    source: str | int,
    target: str | int,
    transcoders: LayerTranscoders | None = None,
) -> Scores:
    """How much of an edge flows through which head at which position.

    An edge is a sum over paths through heads with constant patterns. A path belongs to its last head, which writes at the
    position of the target: the loading of a head and a position is what it moves from there to the target of all that came from
    the source. What reaches the target through no head is "direct". All loadings sum to the edge.

    Args:
        graph: a graph of this model with these transcoders, whole or pruned.
        source: a feature or token, by name or number.
        target: a feature or target.

    Returns Scores with the axes head, "direct" and labels such as "L1H7", and position. Raises ValueError for other nodes,
    another model or other transcoders, and if the loadings do not sum to the edge.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis.graphs import attribution_graph
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> prompt = "When Mary and John left, John gave a drink to"
    >>> graph = attribution_graph(
    ...     model, prompt, answers=(" Mary", " John"), max_nodes=30, check=0
    ... )
    >>> found = head_loadings(model, graph, " Mary@2", graph.targets[0])
    >>> edge = graph.adjacency[graph.node(graph.targets[0]), graph.node(" Mary@2")]
    >>> bool((found.values.sum() - edge).abs() < 1e-3)
    True
    """
    model = decoder(model, "head loadings need")
    tokens, ends = graph.token_ids[None].to(model.device), (graph.node(source), graph.node(target))
    names = [graph.names[end] for end in ends]
    for name, end, kinds in zip(names, ends, ((FEATURE, TOKEN), (FEATURE, TARGET)), strict=True):
        if graph.kinds[end] not in kinds:
            raise ValueError(f"{name!r} is of kind {graph.kinds[end]!r}: head loadings need {' or '.join(kinds)} there")
    sources = sources_of(model, tokens, graph, transcoders)
    written = _written(sources, graph, ends[0])
    layers = [layer for layer, block in enumerate(model.blocks) if has_part(block, "attn")]
    direct, gradients = _read(model, graph, sources, ends[1], written, layers)
    loadings = {DIRECT: direct} | _moved(model, sources, written, gradients)
    values = torch.stack([*loadings.values()]).float().cpu()
    edge = float(graph.adjacency[ends[1], ends[0]])
    allowed = max(TOLERANCE, 8 * sources.eps)
    if not abs(float(values.sum()) - edge) <= allowed * max(abs(edge), float(values.abs().max())):
        raise ValueError(
            f"the loadings of the edge from {names[0]!r} to {names[1]!r} sum to {float(values.sum()):.4g}, and the edge is "
            f"{edge:.4g}: the graph is of another model, or of other transcoders"
        )
    about = provenance(model, of="loading of an edge", source=names[0], target=names[1], edge=edge)
    axes: dict[str, Sequence[Label]] = {"head": list(loadings), "position": position_labels(model, tokens)}
    return Scores(values[..., None], axes, about=about)


def _written(sources: Sources, graph: AttributionGraph, node: int) -> Written:
    """What a feature or token writes, where."""
    if graph.kinds[node] == TOKEN:
        position = node - graph.slice_of(TOKEN).start
        return {FIRST: (position, sources.frozen.values[FIRST][0, position].detach())}
    return sources.written(int(feature_rows(sources, graph)[node]))


def _read(
    model: Decoder, graph: AttributionGraph, sources: Sources, node: int, written: Written, layers: list[int]
) -> tuple[Float[Tensor, " pos"], dict[int, Float[Tensor, "pos head d_head"]]]:
    """What reaches a node through no head, by the position of the source; and the gradients of the node at the mixed values of
    each layer, through no further head."""
    frozen, tokens = sources.frozen, sources.frozen.tokens
    cut = {f"blocks.{layer}.attn.hook_z": None for layer in layers}
    targets = targets_of(graph)
    sites = [site for site in targets.sites if site not in (FIRST, "ln_final")]
    jacobian = Jacobian(FrozenModel(model, tokens, {**frozen.links, **cut}, [*frozen.reads, *sites]))
    if graph.kinds[node] == TARGET:
        of = targets.gradients_of([node - graph.slice_of(TARGET).start], jacobian)
    else:
        of = sources.gradients_of(feature_rows(sources, graph)[[node]], jacobian)
    gradients = jacobian.gradients(of)
    direct = torch.zeros(tokens.shape[1])
    for site, (position, vector) in written.items():
        if site in gradients:
            direct[position] += float(gradients[site][0, position].float() @ vector.float())
    found = {
        layer: gradients[f"blocks.{layer}.attn.hook_z"][0]
        for layer in layers
        if f"blocks.{layer}.attn.hook_z" in gradients
    }
    return direct, {layer: value.detach() for layer, value in found.items()}


@torch.no_grad()
def _moved(
    model: Decoder, sources: Sources, written: Written, gradients: Mapping[int, Float[Tensor, "pos head d_head"]]
) -> dict[str, Float[Tensor, " pos"]]:
    """What each head moves from each position, of all that came from a source, to what has these gradients."""
    frozen = sources.frozen
    values = {layer: f"blocks.{layer}.attn.hook_v" for layer in gradients}
    live = FrozenModel(model, frozen.tokens, frozen.links, [*frozen.reads, *values.values()])
    given = {FIRST: live.values[FIRST], **live.given}
    size = sum(vector.float().norm() for _, vector in written.values())
    times = (
        float(max(given[site].float().norm() for site in written) / size) if size else 1.0
    )  # so that rounding is small
    changed = {site: value.clone() for site, value in given.items()}
    for site, (position, vector) in written.items():
        changed[site][0, position] += times * vector.to(changed[site])
    after = live.run(changed[FIRST], changed)
    found: dict[str, Tensor] = {}
    for layer, site in values.items():
        attn = model.blocks[layer].attn
        moved = (after[site] - live.values[site])[0].float() / times  # [pos, kv_head, d_head]
        moved = moved.repeat_interleave(attn.cfg.n_heads // moved.shape[1], 1)
        gradient = gradients[layer].float()
        if isinstance(attn, OutputGate):
            gradient = gradient * attn.opened(live.constants[f"blocks.{layer}.attn.hook_gate"])[0].float()
        pattern = live.constants[f"blocks.{layer}.attn.hook_pattern"][0].float()
        each = torch.einsum("hqk,khd,qhd->hk", pattern, moved, gradient).cpu()
        found |= {head_label(layer, head): row for head, row in enumerate(each)}
    return found
