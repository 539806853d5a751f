"""Attribution graphs: sums that are exact, edges that are derivatives and differences, nodes chosen by influence."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.attribution.backward_rules import BackwardRules
from hooked_lm.analysis.attribution.gradients import Tape
from hooked_lm.analysis.graphs import AttributionGraph, Target, attribution_graph, head_loadings, qk_attribution
from hooked_lm.analysis.graphs.completeness import check_sums, error_of_differences, error_of_sums
from hooked_lm.analysis.graphs.features import FeatureSources
from hooked_lm.analysis.graphs.neurons import NeuronSources
from hooked_lm.analysis.graphs.targets import TargetReads
from tests.analysis.graphs.models import MODELS, PLAIN, SIZES, TOKENS, run, tiny, transcoders
from tests.close import GRADIENT, assert_apart, assert_close, assert_equal

quick = partial(attribution_graph, check=0, control=None, progress=False)
FROZEN = BackwardRules(freeze_norms=True, q_scale=0.0, k_scale=0.0)


@cache
def both(kind: str, of: str = "skip") -> tuple[HookedTransformer, Any, AttributionGraph]:
    """A model, its transcoders (None for neurons), and the graph with targets 4 and 9."""
    model = tiny(kind)
    found = None if of == "neurons" else transcoders(model, of)
    return model, found, quick(model, TOKENS, found, targets=[4, 9], max_nodes=None if found else 10_000)


CASES = [(kind, of) for kind in MODELS for of in ("skip", "neurons")] + [("plain", "across"), ("gated", "topk")]


# ---- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "of"), CASES)
def test_edges_and_biases_sum_to_what_the_model_computes(kind: str, of: str) -> None:
    """Pre-activations of features, activations of neurons, logits minus their mean: as another run of the model has them."""
    model, found, graph = both(kind, of)
    cache = run(model)
    sums = graph.adjacency.sum(1) + graph.biases + graph.others
    for node, (layer, position, index) in enumerate(graph.features.tolist()):
        if of == "neurons":
            expected = cache[f"blocks.{layer}.mlp.hook_post"][0, position, index]
        else:
            weight, bias = found.encoder(layer)
            expected = cache[f"blocks.{layer}.hook_mlp_in"][0, position] @ weight[:, index] + bias[index]
        assert_close(sums[node], expected.detach(), depth=GRADIENT, scale=graph.totals.abs().max())
    logits = model.unembed(model.ln_final(cache["resid_post", -1]))[0, -1].detach()
    assert_close(sums[-2:], (logits - logits.mean())[[4, 9]], depth=GRADIENT, scale=logits.abs().max())
    assert graph.completeness["sums"] < 1e-5
    assert graph.completeness["differences"] < 1e-4
    assert float(graph.biases.abs().max()) > 0.1, "without biases there is nothing to compute by itself"


def test_sums_of_neurons_and_of_features_across_layers() -> None:
    """The rows of the test above that stand for the others."""
    for case in (("gated", "neurons"), ("plain", "across")):
        test_edges_and_biases_sum_to_what_the_model_computes(*case)


def test_neurons_that_are_left_out_are_in_the_error_nodes() -> None:
    test_a_small_graph_is_a_part_of_the_whole("neurons")


def test_a_wrong_bias_or_edge_is_noticed() -> None:
    _, _, graph = both("plain")
    ends = [*range(len(graph.features)), graph.n_nodes - 2, graph.n_nodes - 1]
    edges, biases, others, totals = (getattr(graph, name)[ends] for name in ("adjacency", "biases", "others", "totals"))
    check = partial(check_sums, names=[graph.names[node] for node in ends], eps=torch.finfo(torch.float32).eps)
    check(error_of_sums(edges, biases, others, totals))
    with pytest.raises(ValueError, match="miss its value"):
        check(error_of_sums(edges, 1.05 * biases, others, totals))
    with pytest.raises(ValueError, match="miss its value"):
        check(torch.tensor([0.05, *[0.0] * (len(ends) - 1)]), eps=torch.finfo(torch.bfloat16).eps)
    with pytest.raises(ValueError, match="miss its value"):
        check(error_of_sums(edges * (1 - (edges == edges.max()).float()), biases, others, totals))


def test_sums_of_a_model_that_clips_values_are_refused() -> None:
    """The error names the node: no graph comes of sums that are wrong."""
    model = tiny()
    model.blocks[1].attn._projected = lambda x, W, b, own=model.blocks[1].attn: (
        type(own)._projected(own, x, W, b).clamp(-0.3, 0.3)
    )
    with pytest.raises(ValueError, match="some part of the model is not linear"):
        quick(model, TOKENS, transcoders(model))


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_edges_are_gradients_of_the_rules(kind: str) -> None:
    """The same edges into logits by `BackwardRules` on the model itself, with MLPs cut off where they write.

    Of features that write to several layers, and of errors: what MLPs write minus what the transcoders reconstruct.
    """
    model = tiny(kind)
    own = transcoders(model, "across")
    graph = quick(model, TOKENS, own, targets=[4])
    sites, reads = ([f"blocks.{layer}.hook_mlp_{end}" for layer in range(3)] for end in ("out", "in"))
    cuts = [(site, lambda value, hook: value.detach().requires_grad_()) for site in sites]

    def metric(logits: Tensor) -> Tensor:
        cap = model.cfg.output_logits_soft_cap
        plain = logits[:, -1] if not cap > 0 else cap * (logits[:, -1] / cap).atanh()
        return plain[:, 4] - plain.mean(-1)

    tape = Tape(model, TOKENS, ["blocks.0.hook_resid_pre", *sites, *reads], metric, cuts, FROZEN)
    gradients = tape.gradients(check=False)
    tokens = (gradients["blocks.0.hook_resid_pre"] * tape.values["blocks.0.hook_resid_pre"])[0].sum(-1)
    assert_close(graph.adjacency[-1, graph.slice_of("token")], tokens, depth=GRADIENT)
    for node, (layer, position, index) in enumerate(graph.features.tolist()):
        each = [own.decoder(layer, place)[index] @ gradients[sites[place]][0, position] for place in range(layer, 3)]
        edge = graph.activations[node] * sum(each).detach()
        assert_close(graph.adjacency[-1, node], edge, depth=GRADIENT, scale=tokens.abs().max())
    made = own([tape.values[site][0] for site in reads])
    missed = [tape.values[site][0] - out.detach() for site, out in zip(sites, made, strict=True)]
    errors = torch.cat([(gradients[site][0] * value).sum(-1) for site, value in zip(sites, missed, strict=True)])
    assert_close(graph.adjacency[-1, graph.slice_of("error")], errors, depth=GRADIENT, scale=tokens.abs().max())


def test_a_changed_edge_differs_from_the_finite_difference() -> None:
    model, found, graph = both("gated")
    sources = FeatureSources(model, TOKENS, found, 0)
    from hooked_lm.analysis.graphs.interventions import targets_of

    rows = torch.arange(len(graph.features))
    ends = [*rows.tolist(), graph.n_nodes - 2, graph.n_nodes - 1]
    edges = graph.adjacency[ends].clone()
    node = int(edges[-1, : len(rows)].abs().argmax())
    assert error_of_differences(sources, targets_of(graph), rows, [node], edges) < 1e-4
    edges[-1, node] *= 1.1
    layer, position, index = graph.features[node].tolist()
    with pytest.raises(ValueError, match=f"out of feature {index} of layer {layer} at position {position} differ"):
        error_of_differences(sources, targets_of(graph), rows, [node], edges)


def test_only_earlier_nodes_have_edges() -> None:
    _, _, graph = both("plain", "across")
    layers = torch.cat([graph.features[:, 0], graph.errors[:, 0]])
    positions = torch.cat([graph.features[:, 1], graph.errors[:, 1]])
    n, m = len(graph.features), len(layers)
    rows, columns = graph.adjacency[:n, :m].nonzero(as_tuple=True)
    assert (layers[rows] > layers[columns]).all()
    assert (positions[rows] >= positions[columns]).all()
    assert not graph.adjacency[n : graph.slice_of("target").start].any()
    assert (layers[rows] - layers[columns] == 2).any(), "an edge over two layers"


# ---- which nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["skip", "neurons"])
def test_a_small_graph_is_a_part_of_the_whole(of: str) -> None:
    """Its edges are those of the whole graph; what is left out is in `others`, of neurons in the error nodes."""
    model, found, whole = both("plain", of)
    small = quick(model, TOKENS, found, targets=[4, 9], max_nodes=15, round_size=4)
    places = {tuple(place): node for node, place in enumerate(whole.features.tolist())}
    own = [places[tuple(place)] for place in small.features.tolist()]
    tokens, targets = whole.slice_of("token"), whole.slice_of("target")
    same = [*own, *range(tokens.start, targets.stop)]
    inner = [*range(15), *range(small.slice_of("token").start, small.n_nodes)]
    assert len(own) == 15
    assert_close(small.adjacency[inner][:, inner], whole.adjacency[same][:, same], depth=GRADIENT)
    assert_close(small.totals[inner], whole.totals[same])
    rest = small.others[inner] if of == "skip" else small.adjacency[inner][:, small.slice_of("error")].sum(1)
    gone = [node for node in range(len(whole.features)) if node not in own]
    assert_close(rest, whole.adjacency[same][:, gone].sum(1), depth=GRADIENT, scale=whole.totals.abs().max())


def test_rounds_find_features_of_more_influence_than_chance() -> None:
    model, found, whole = both("gated")
    small = quick(model, TOKENS, found, targets=[4, 9], max_nodes=30, round_size=10)
    places = {tuple(place): node for node, place in enumerate(whole.features.tolist())}
    influences = whole.influence[: len(whole.features)]
    own = influences[[places[tuple(place)] for place in small.features.tolist()]]
    assert own.sum() > 0.7 * influences.topk(30).values.sum() > 1.5 * 30 * influences.mean()


@pytest.mark.parametrize("of", ["skip", "neurons"])
def test_memory_changes_nothing(of: str) -> None:
    model, found, _ = both("plain", of)
    one, other = (
        quick(model, TOKENS, found, max_nodes=20, round_size=5, max_memory=size) for size in ("auto", "200KB")
    )
    assert torch.equal(one.features, other.features)
    assert_close(one.adjacency, other.adjacency, depth=GRADIENT)
    with pytest.raises(ValueError, match=r"too small: the values of the prompt and the edges into 20 nodes take"):
        quick(model, TOKENS, found, max_nodes=20, max_memory=1000)


def test_candidates_are_the_neurons_of_largest_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory some neurons are left in the error nodes from the start; sums stay exact."""
    from hooked_lm.analysis.graphs import trace as module

    model, _, _ = both("plain", "neurons")
    monkeypatch.setattr(module, "CANDIDATES", 2)
    small = quick(model, TOKENS, targets=[4, 9], max_nodes=20)
    assert len(small.features) == 20
    assert small.completeness["sums"] < 1e-5
    assert not small.others.any()
    shared = {*map(tuple, small.features.tolist())} & {
        *map(tuple, quick(model, TOKENS, targets=[4, 9], max_nodes=40).features.tolist())
    }
    assert len(shared) > 10


def test_effects_over_all_paths_are_those_of_the_graph() -> None:
    """Of all neurons: a backward pass through them, and the sums over paths of the matrix."""
    from hooked_lm.analysis.graphs.agreement import predicted_changes

    model, _, graph = both("gated", "neurons")
    sources = NeuronSources(model, TOKENS, 0)
    assert torch.equal(sources.features, graph.features)
    n = len(graph.features)
    changes = torch.zeros(n, graph.n_nodes)
    changes[:, :n] = -torch.eye(n)
    predicted = predicted_changes(graph.adjacency, graph.totals, changes, n, 2)
    from hooked_lm.analysis.graphs.interventions import targets_of

    [first, _] = targets_of(graph).targets
    effects = sources.total_effects(TargetReads([first]))
    assert_close(predicted[:, 0].abs(), effects, depth=GRADIENT, scale=graph.totals.abs().max())


def test_constant_positions_have_no_nodes() -> None:
    model, found, whole = both("plain")
    graph = quick(model, TOKENS, found, targets=[4, 9], constant_positions=2)
    assert graph.features[:, 1].min() == 2
    assert whole.features[:, 1].min() == 0
    first = [node for node, name in enumerate(graph.names) if name.endswith(("E@0", "E@1"))]
    assert len(first) == 6
    assert not graph.adjacency[:, first].any()
    assert graph.completeness["sums"] < 1e-5
    assert_apart(graph.biases[-2:], whole.biases[-2:])


# ---- targets ---------------------------------------------------------------------------------------------------------


def test_targets_are_the_most_likely_tokens() -> None:
    model, found, _ = both("capped")
    probabilities = model(TOKENS)[0, -1].softmax(-1)
    graph = quick(model, TOKENS, found, n_logits=30, probability=0.5, max_nodes=1)
    assert_close(graph.probabilities, probabilities[graph.target_ids].detach())
    assert graph.probabilities.sum() >= 0.5 > graph.probabilities[:-1].sum()
    assert len(quick(model, TOKENS, found, n_logits=2, max_nodes=1).targets) == 2
    earlier = quick(model, TOKENS, found, positions=3, max_nodes=1)
    assert earlier.target_ids[0] == model(TOKENS)[0, 3].argmax()


def test_targets_that_count_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="the targets, 'x', have probabilities of 0"):
        TargetReads([Target("x", torch.ones(16), weight=0.0)])


def test_a_difference_is_the_difference_of_edges() -> None:
    model, found, graph = both("gated")
    difference = quick(model, TOKENS, found, answers=(4, 9))
    assert_close(difference.adjacency[-1, :-1], graph.adjacency[-2, :-2] - graph.adjacency[-1, :-2], depth=GRADIENT)
    assert difference.target_ids.tolist() == [-1]


@pytest.mark.parametrize("site", ["blocks.1.hook_resid_post", "blocks.2.attn.hook_z", "resid_mid"])
def test_any_site_is_a_target(site: str) -> None:
    model, found, _ = both("plain")
    if site == "resid_mid":
        site = "blocks.1.hook_resid_mid"
    if site.endswith("hook_z"):
        with pytest.raises(ValueError, match="a target reads a site"):
            quick(model, TOKENS, found, targets=Target("z", torch.ones(4), site))
        return
    direction = torch.linspace(-1, 1, 16)
    graph = quick(model, TOKENS, found, targets=[Target("read", direction, site, position=3), 4])
    assert graph.targets[0] == "read"
    assert graph.target_ids.tolist() == [-1, 4]
    assert_close(graph.totals[-2], run(model)[site][0, 3] @ direction, scale=graph.totals.abs().max())
    later = torch.tensor([position > 3 for position in range(7)])
    assert not graph.adjacency[-2, graph.slice_of("token")][later].any()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "of one prompt, got 2", {"prompt": TOKENS.expand(2, -1)}),
        (TypeError, "targets and answers are both given", {"targets": [4], "answers": (4, 9)}),
        (ValueError, "n_logits must be at least 1", {"n_logits": 0}),
        (ValueError, "max_nodes must be at least 1", {"max_nodes": 0}),
        (ValueError, "probability must be", {"probability": 0.0}),
        (ValueError, "position 7 is out of range", {"positions": 7}),
        (ValueError, "constant_positions must be from 0 to 6", {"constant_positions": 7}),
        (ValueError, "targets are empty", {"targets": []}),
        (ValueError, "has 5 entries, and 'blocks.0.hook_resid_post' has 16",
         {"targets": Target("x", torch.ones(5), "blocks.0.hook_resid_post")}),
        (ValueError, "is at position 9", {"targets": Target("x", torch.ones(16), position=9)}),
        (ValueError, "control must be", {"control": "twin"}),
        (ValueError, "check must be at least 0", {"check": -3}),
        (ValueError, "right and the wrong answer are the same", {"answers": (4, 4)}),
        (ValueError, "two targets have the name", {"targets": [4, 9, 4]}),
        (ValueError, "the weight of target 'x' must be above 0", {"targets": Target("x", torch.ones(16), weight=0.0)}),
        (ValueError, "'x' depends on no token", {"targets": Target("x", torch.ones(16), "hook_embed")}),
        (ValueError, "'x' depends on no token", {"targets": Target("x", torch.zeros(16))}),
    ],
)  # fmt: skip
def test_wrong_arguments(error: type[Exception], match: str, arguments: dict[str, Any]) -> None:
    model, found, _ = both("plain")
    prompt = arguments.pop("prompt", TOKENS)
    with pytest.raises(error, match=match):
        quick(model, prompt, found, **arguments)


def test_an_activation_that_is_not_zero_at_zero_is_no_node() -> None:
    model = tiny()
    model.blocks[1].mlp.act_fn = torch.sigmoid
    with pytest.raises(ValueError, match=r"activation function of 'blocks.1.mlp' is 0.5 at 0"):
        quick(model, TOKENS)


def wrong_transcoders() -> dict[str, Any]:
    right = transcoders(tiny(), "plain")
    of_deeper = HookedTransformer({**SIZES, **PLAIN, "n_layers": 4})
    of_wider = HookedTransformer({**SIZES, **PLAIN, "d_model": 32})
    return {
        "got a Transcoder": right.parts[0],
        "got a list": right.parts,
        "got a str": "demo",
        "of another model.*blocks.3": transcoders(of_deeper, "plain"),
        "has width 16, and theirs is 32": transcoders(of_wider, "plain"),
        "of layer 0 is in training mode.* call transcoders.eval": transcoders(tiny(), "batchtopk").train(),
    }


@pytest.mark.parametrize("match", wrong_transcoders())
def test_wrong_transcoders(match: str) -> None:
    """In a graph and in the scores of a head."""
    model, wrong = tiny(), wrong_transcoders()[match]
    error = TypeError if match.startswith("got") else ValueError
    match += "|violates type hint"
    with pytest.raises(error, match=match):
        quick(model, TOKENS, wrong)
    with pytest.raises(error, match=match):
        qk_attribution(model, TOKENS, "L2H1", transcoders=wrong, control=None)


@pytest.mark.parametrize(("of_model", "of_transcoders"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_transcoders_of_another_precision(of_model: str, of_transcoders: str) -> None:
    """A graph, the heads of its edges and the scores of a head are those of single precision, up to rounding."""
    model = tiny("gated")
    single = quick(model, TOKENS, transcoders(model, "across"), targets=[4])
    scores = qk_attribution(model, TOKENS, "L2H1", transcoders=transcoders(model, "across"), control=None).scores
    own = transcoders(model, "across").to(getattr(torch, of_transcoders))
    model.to(getattr(torch, of_model))
    graph = quick(model, TOKENS, own, targets=[4], max_nodes=30, check=2)
    ends = [graph.slice_of("token"), single.slice_of("token")]
    size = float(single.adjacency[-1].abs().max())
    assert float((graph.adjacency[-1, ends[0]] - single.adjacency[-1, ends[1]]).abs().max()) < 0.1 * size
    tokens = graph.adjacency[-1, ends[0]]
    source = ends[0].start + int(tokens.abs().argmax())
    loadings = head_loadings(model, graph, source, -1, own).values
    assert float((loadings.sum() - tokens[source - ends[0].start]).abs()) < 0.05 * size
    found = qk_attribution(model, TOKENS, "L2H1", transcoders=own, control=None)
    assert float((found.scores - scores).abs().max()) < 0.1 * float(scores.abs().max())


def test_the_demo_with_a_bos_token() -> None:
    """Its first position is constant by default, and the name of a target is its token."""
    model = HookedTransformer.from_pretrained("demo")
    graph = attribution_graph(model, "Mary and John left, John", max_nodes=10, check=0, control=None)
    assert graph.about["constant_positions"] == 1
    assert graph.tokens[0] == model.tokenizer.bos_token
    assert graph.targets[0].startswith("logit '")
    assert graph.features[:, 1].min() >= 1
    assert_equal(graph.token_ids, model.to_tokens("Mary and John left, John")[0])
