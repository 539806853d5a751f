"""The attribution graphs of circuit-tracer and of this library: the same edges, scores and pruned graphs."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.graphs import AttributionGraph, Target, attribution_graph
from hooked_lm.analysis.graphs.influence import pruned
from hooked_lm.interventions.dictionaries import CrossLayerTranscoder, LayerTranscoders, Transcoder, TranscoderSet
from tests.clients.circuit_tracer_run import MODELS, PROMPT, SIZES, cases, replacement
from tests.close import GRADIENT, assert_close, assert_near

logging.getLogger("circuit_tracer").setLevel(logging.ERROR)  # it warns of graphs that have no name
PRUNED = [(0.8, 0.98), (0.5, 0.9), (0.95, 0.7)]


def without_positions(model: Any) -> Any:
    """Its token nodes leave out the embeddings of positions, which here are part of them."""
    if hasattr(model, "pos_embed"):
        with torch.no_grad():
            model.pos_embed.W_pos.zero_()
    return model


def plain(model: Any, name: str) -> HookedTransformer:
    """A model without the replaced modules, with the same weights."""
    own = HookedTransformer(dict(MODELS[name], tokenizer_name=None))
    weights = {
        key.replace(".old_mlp", "").replace(".old_unembed", ""): value for key, value in model.state_dict().items()
    }
    own.load_state_dict({key: weights[key] for key in own.state_dict()})
    return own


def ours(theirs: Any) -> LayerTranscoders:
    """Its transcoders, in the classes of this library."""
    n_layers = SIZES["n_layers"]
    across = not hasattr(theirs, "transcoders")
    read, written = theirs.feature_input_hook, theirs.feature_output_hook
    cfg = Transcoder.Config(
        SIZES["d_model"], theirs.d_transcoder, subtract_b_dec=False, skip_connection=bool(theirs.skip_connection)
    )
    sites = [(f"blocks.{layer}.{read}", f"blocks.{layer}.{written}") for layer in range(n_layers)]
    each = tuple(replace(cfg, hook_point=one, hook_point_out=other) for one, other in sites)
    of: type[LayerTranscoders] = CrossLayerTranscoder if across else TranscoderSet
    made = of.Config(each, across=across).build()
    assert isinstance(made, of)
    with torch.no_grad():
        for layer, sae in enumerate(made.parts):
            own = theirs if across else theirs.transcoders[layer]
            sae.W_enc.copy_((own.W_enc[layer] if across else own.W_enc).T)
            sae.W_dec.copy_(own.W_dec[layer].flatten(1) if across else own.W_dec)
            sae.b_enc.copy_(own.b_enc[layer] if across else own.b_enc)
            sae.b_dec.copy_(own.b_dec[layer] if across else own.b_dec)
            if sae.W_skip is not None:
                sae.W_skip.copy_(own.W_skip.T)
    return made


def assert_same(graph: AttributionGraph, other: Any) -> None:
    """The nodes, edges, probabilities and both scores."""
    from circuit_tracer.graph import compute_graph_scores, prune_graph

    assert torch.equal(graph.features, other.active_features[other.selected_features])
    assert_close(graph.activations, other.activation_values[other.selected_features], depth=GRADIENT)
    assert_close(graph.probabilities, other.logit_probabilities, depth=GRADIENT)
    assert_close(graph.adjacency, other.adjacency_matrix, depth=GRADIENT)
    scores = compute_graph_scores(other)
    assert_near(torch.tensor([*graph.scores.values()]), torch.tensor(scores), 1e-4, "sums of quotients")
    for nodes, edges in PRUNED:
        kept, links = masks(graph, nodes, edges)
        theirs = prune_graph(other, nodes, edges)
        assert torch.equal(kept, theirs.node_mask)
        assert torch.equal(links, theirs.edge_mask)
        assert graph.pruned(nodes, edges).n_nodes == int(kept.sum())


def masks(graph: AttributionGraph, nodes: float, edges: float) -> tuple[Tensor, Tensor]:
    n_ends = len(graph.tokens) + len(graph.targets)
    return pruned(graph.adjacency, graph.weights, len(graph.features), n_ends, nodes, edges)


@pytest.mark.parametrize("case", cases(), ids="/".join)
def test_equal_graphs(case: tuple[str, str, str]) -> None:
    """All kinds of transcoders and places, on three kinds of models, with their targets: salient, few features, custom."""
    from circuit_tracer import attribute
    from circuit_tracer.attribution.targets import CustomTarget

    name, _, _ = case
    model = without_positions(replacement(*case))
    own, transcoders = plain(model, name), ours(model.transcoders)
    direction = torch.linspace(-1, 1, SIZES["d_model"])
    options: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "salient": ({}, {}),
        "few": ({"max_feature_nodes": 20, "max_n_logits": 3, "update_interval": 1},
                {"max_nodes": 20, "n_logits": 3, "round_size": 16}),
        "tokens": ({"attribution_targets": torch.tensor([4, 9])}, {"targets": [4, 9]}),
        "custom": ({"attribution_targets": [CustomTarget("direction", 0.5, direction)]},
                   {"targets": Target("direction", direction, weight=0.5)}),
    }  # fmt: skip
    for theirs, these in options.values():
        graph = attribution_graph(own, PROMPT, transcoders, constant_positions=1, progress=False, **these)
        other = attribute(PROMPT, model, batch_size=16, **theirs)
        assert_same(graph, other)
        assert graph.completeness["sums"] < 1e-5


def test_positions_are_part_of_tokens() -> None:
    """The embeddings of positions change the edges from tokens alone: those are the sums that its graphs lack."""
    from circuit_tracer import attribute

    model = replacement("gpt2", "plain", "stream")
    graph = attribution_graph(
        plain(model, "gpt2"), PROMPT, ours(model.transcoders), constant_positions=1, progress=False
    )
    other = attribute(PROMPT, model, batch_size=16)
    tokens = graph.slice_of("token")
    rest = torch.ones(graph.n_nodes, dtype=torch.bool)
    rest[tokens] = False
    assert_close(graph.adjacency[:, rest], other.adjacency_matrix[:, rest], depth=GRADIENT)
    assert (graph.adjacency[:, tokens] - other.adjacency_matrix[:, tokens]).abs().max() > 0.1
    assert graph.completeness["sums"] < 1e-5
