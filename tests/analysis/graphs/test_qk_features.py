"""Features as sources of attention scores, and the heads through which edges of a graph flow."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.graphs import attribution_graph, head_loadings, qk_attribution
from hooked_lm.analysis.graphs.graph import AttributionGraph
from tests.analysis.graphs.models import MODELS, TOKENS, tiny, transcoders
from tests.close import GRADIENT, assert_apart, assert_close


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("of", ["skip", "across", "topk"])
def test_terms_with_features_sum_to_the_scores(kind: str, of: str):
    model = tiny(kind)
    found = qk_attribution(model, TOKENS, ["L2H1", "L2H3"], transcoders=transcoders(model, of), k=3, control=None)
    assert found.scores is not None
    assert_close(found.values.sum((1, 2)), found.scores, GRADIENT, scale=float(found.values.abs().max()) * 10)
    assert {"0_mlp_bias", "1_mlp_error", "other features"} < set(found.axes["key_source"])
    assert "0_mlp_out" not in found.axes["key_source"]
    assert ("0_mlp_skip" in found.axes["key_source"]) == (of == "skip")
    assert sum(label.startswith("L") and "F" in label for label in found.axes["key_source"]) == 3


def test_a_feature_that_is_taken_out_changes_the_scores_by_its_terms():
    """Where the head reads it, with the scale of the norm held fixed, in the model itself."""
    model = tiny()
    features = transcoders(model, "across")
    found = qk_attribution(model, TOKENS, "L2H3", transcoders=features, k=5, control=None)
    label = next(label for label in found.axes["key_source"] if label[:3] == "L0F")
    _, cache = model.run_with_cache(TOKENS, names_filter=["blocks.*"])
    index = int(label[3:])
    values = features.encode(0, cache["blocks.0.hook_mlp_in"])[..., index]
    directions = [features.decoder(0, target) for target in (0, 1)]
    written = values[..., None] * sum(each[index] for each in directions if each is not None)

    def take_out(value: Tensor, hook: Any) -> Tensor:
        value[:, :, 3] -= written
        return value

    kept = cache["scale", 2, "ln1"]
    freeze = lambda value, hook: kept[:, :, None].expand_as(value) if value.ndim == 4 else kept  # noqa: E731
    with model.hooks(fwd_hooks=[("blocks.2.hook_k_input", take_out), ("blocks.2.ln1.hook_scale", freeze)]):
        _, changed = model.run_with_cache(TOKENS, names_filter="blocks.2.attn.hook_attn_scores")
    difference = (changed["attn_scores", 2] - cache["attn_scores", 2])[0, 3, -1]
    terms = found.select(key_source=label).mean.sum(0)
    assert_close(difference, -terms, GRADIENT, scale=float(found.values.abs().max()) * 10)
    assert_apart(difference, torch.zeros_like(difference))


def test_more_features_are_sources_of_their_own():
    """Together they are the same; one that was among the others has its term."""
    model = tiny()
    features = transcoders(model, "skip")
    few, many = (qk_attribution(model, TOKENS, "L2H3", transcoders=features, k=k, control=None) for k in (1, 1000))
    assert "other features" in few.axes["key_source"]
    assert "other features" not in many.axes["key_source"]

    def of_features(found: Any) -> Tensor:
        places = [i for i, label in enumerate(found.axes["key_source"]) if "F" in label or label == "other features"]
        return found.values[:, places].sum((0, 1))

    assert_close(of_features(few), of_features(many), GRADIENT, scale=float(many.values.abs().max()) * 10)


def test_features_are_of_one_prompt_and_of_mlps():
    model = tiny()
    with pytest.raises(ValueError, match="features are sources of one prompt"):
        qk_attribution(model, TOKENS.repeat(2, 1), "L2H3", transcoders=transcoders(model))
    with pytest.raises(ValueError, match="at least k=1"):
        qk_attribution(model, TOKENS, "L2H3", transcoders=transcoders(model), k=0)


# ---- head loadings ---------------------------------------------------------------------------------------------------


def graph_of(kind: str, of: str | None) -> tuple[HookedTransformer, Any, AttributionGraph]:
    model = tiny(kind)
    features = None if of is None else transcoders(model, of)
    graph = attribution_graph(model, TOKENS, features, targets=[3, 4], max_nodes=60, check=0, control=None)
    return model, features, graph


@pytest.mark.parametrize(
    ("kind", "of"), [("plain", "skip"), ("gated", "across"), ("capped", "skip"), ("parallel", None)]
)
def test_loadings_sum_to_the_edge(kind: str, of: str | None):
    """Of features and tokens to features and targets; heads of later layers, and of earlier ones, have none."""
    model, features, graph = graph_of(kind, of)
    edges = [
        (source, target) for target, source in graph.adjacency.nonzero().tolist() if graph.kinds[source] != "error"
    ]
    strongest = sorted(edges, key=lambda edge: -abs(float(graph.adjacency[edge[1], edge[0]])))
    kinds = {}
    for source, target in strongest:
        kinds.setdefault((graph.kinds[source], graph.kinds[target]), (source, target))
    assert set(kinds) >= {("feature", "target"), ("token", "target"), ("token", "feature")}
    for source, target in kinds.values():
        found = head_loadings(model, graph, source, target, features)
        edge = float(graph.adjacency[target, source])
        assert_close(found.values.sum(), edge, GRADIENT, scale=float(found.values.abs().max()) * 5)
        assert found.about["edge"] == edge


def test_the_edge_of_an_induction_head_flows_through_it(demo_graph: tuple[HookedTransformer, AttributionGraph]):
    """Without the head's attention to the position, the edge lacks its loading: patterns are constants that hooks replace."""
    model, graph = demo_graph
    source, target = " John@4", graph.targets[0]
    found = head_loadings(model, graph, source, target)
    best = found.top(1)
    head, position = best["head"][0], list(found.axes["position"]).index(best["position"][0])
    layer, index = int(head[1]), int(head[3])

    def blind(pattern: Tensor, hook: Any) -> Tensor:
        pattern[:, index, -1, position] = 0.0
        return pattern

    with model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.hook_pattern", blind)]):
        without = attribution_graph(
            model, graph.about["prompt"], answers=(" Mary", " John"), max_nodes=1, check=0, control=None
        )
    changed = without.adjacency[without.node(target), without.node(source)]
    assert abs(float(changed) - float(found.about["edge"])) > 0.3 * abs(float(best["value"][0]))


@pytest.fixture(scope="module")
def demo_graph() -> tuple[HookedTransformer, AttributionGraph]:
    model = HookedTransformer.from_pretrained("demo")
    prompt = "When Mary and John left, John gave a drink to"
    return model, attribution_graph(model, prompt, answers=(" Mary", " John"), max_nodes=20, check=0, control=None)


def test_what_is_refused(demo_graph: tuple[HookedTransformer, AttributionGraph]):
    model, graph = demo_graph
    error = next(name for name, kind in zip(graph.names, graph.kinds, strict=True) if kind == "error")
    with pytest.raises(ValueError, match="is of kind 'error': head loadings need feature or token there"):
        head_loadings(model, graph, error, graph.targets[0])
    with pytest.raises(ValueError, match="is of kind 'token': head loadings need feature or target there"):
        head_loadings(model, graph, " Mary@2", " Mary@2")
