"""The graph of every family of decoders: what its writers add is the stream, and its readers are where the stream is read."""

import copy

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.hooks import HookedRootModule
from tests.close import assert_apart, assert_close, is_close
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked
from tests.unchecked import unchecked

BY_FAMILY = {case.family: case for case in reversed(DECODER_CASES)}  # the first of each
NO_SUM = {
    "openai-gpt",
    "minimax",
    "doge",
    "gemma3n_text",
    "hy_v4",
    "hy_v4_vl_text",
    "zaya",
    "deepseek_v4",
}  # norms or weights in the stream; several streams


def parts_and_stream(model: HookedTransformer) -> tuple[Tensor, Tensor]:
    """What all writers and the biases of attention add, and the last stream."""
    graph, last = Graph.of(model), len(model.blocks) - 1
    tokens = torch.randint(model.cfg.d_vocab, (2, 6), generator=torch.Generator().manual_seed(1))
    sites = [*{node.site for node in graph.writers}, f"blocks.{last}.hook_resid_post"]
    with torch.no_grad(), unchecked():
        _, cache = model.run_with_cache(tokens, names_filter=sites)
    parts = [node.of(cache[node.site]) for node in graph.writers]
    for layer in {node.layer for node in graph.writers if node.head is not None}:
        block = model.blocks[layer]
        if block.attn.b_O is not None:
            factor = next(node.factor for node in graph.writers if node.layer == layer and node.head is not None)
            parts.append((block.attn.b_O * block.cfg.residual_scale * factor).detach().expand_as(parts[0]))
    return torch.stack(parts), cache["resid_post", last]


@pytest.mark.parametrize("case", BY_FAMILY.values(), ids=str)
def test_every_family_has_a_graph_or_a_reason(case: Case):
    model = hooked(case)
    if case.family in NO_SUM:
        with pytest.raises(
            ValueError,
            match=r"normalise the stream itself|residual streams|multiplies the numbers of the stream by different weights",
        ):
            Graph.of(model)
        return
    parts, stream = parts_and_stream(model)
    is_sum = is_close(parts.sum(0), stream)
    assert is_sum
    assert_apart(parts[1:].sum(0), stream, msg="every writer counts")
    graph = Graph.of(model)
    places = {name: i for i, name in enumerate(model.all_points())}
    for node in (*graph.writers, *graph.readers):
        assert node.site in places
        assert node.head is None or "head" in model.hook_dict[node.site].dims[2]
    assert len({node.name for node in graph.readers}) == len(graph.readers)
    assert graph.is_edge[:, -1].all(), "the logits hear everybody"
    assert graph.is_edge[0].all(), "everybody hears the input"


@pytest.mark.parametrize("name", ["plain-untied-two-rotaries", "everything"])
def test_a_reader_divides_what_multiplies_the_stream_after_it(name: str):
    """Terms of the last stream, divided by the factor of a reader, are what it reads; and its factor is not that of others."""
    model = hooked(next(case for case in DECODER_CASES if str(case) == f"gemma4_text-{name}"))
    graph, tokens = Graph.of(model), torch.arange(6)[None]
    sites = {node.site for node in (*graph.writers, *graph.readers)}
    with torch.no_grad(), unchecked():
        _, cache = model.run_with_cache(tokens, names_filter=[*sites])
    assert len({node.factor for node in graph.readers}) > 1
    for i, reader in enumerate(graph.readers):
        terms = [node.of(cache[node.site]) for j, node in enumerate(graph.writers) if graph.is_edge[j, i]]
        read = cache[reader.site] if reader.head is None else cache[reader.site][:, :, reader.head]
        assert_close(sum(terms) / reader.factor, read)
    if name == "everything":
        assert graph.parents("p1") == [*graph.parents("m1"), "m1"]
        assert graph.writers[graph.writer("p1")].fed_by == ("input",)
        assert graph.writers[graph.writer("m1")].fed_by == ()


def test_who_comes_behind_whom():
    model = hooked(BY_FAMILY["gpt2"])
    graph = Graph.of(model)
    assert graph.parents("L0H0<q>") == ["input"]
    assert graph.parents("m0") == ["input", *(f"L0H{head}" for head in range(model.cfg.n_heads))]
    assert "L1H0" not in graph.parents("L1H1<v>")
    assert graph.parents("logits") == [node.name for node in graph.writers]
    n = model.cfg.n_heads
    assert graph.n_edges == 3 * n + (1 + n) + 3 * n * (2 + n) + (2 + 2 * n) + (3 + 2 * n)
    assert next(iter(graph.named(graph.is_edge))) == ("input", "L0H0<q>")
    parallel = Graph.of(hooked(BY_FAMILY["gptj"]))
    assert "L0H0" not in parallel.parents("m0"), "both read the same stream"


def test_a_parallel_layer_cannot_hear_itself():
    """Nothing that attention adds reaches the MLP of its layer, as the graph says."""
    model = copy.deepcopy(hooked(BY_FAMILY["gptj"]))
    tokens = torch.arange(6)[None]
    site, change = "blocks.0.hook_mlp_out", ("blocks.0.hook_attn_out", lambda value, hook: value + 1)
    with torch.no_grad():
        _, before = model.run_with_cache(tokens, names_filter=site)
        with model.hooks(fwd_hooks=[change]):
            _, after = model.run_with_cache(tokens, names_filter=site)
    assert torch.equal(before[site], after[site])


def test_errors():
    graph = Graph.of(hooked(BY_FAMILY["gpt2"]))
    with pytest.raises(KeyError, match=r"there is no writer 'L0H99'; did you mean 'L0"):
        graph.edge("L0H99", "logits")
    with pytest.raises(KeyError, match="there is no reader 'logit'; did you mean 'logits'"):
        graph.parents("logit")
    with pytest.raises(ValueError, match="no edge from 'm1' to 'm0'"):
        graph.edge("m1", "m0")
    with pytest.raises(TypeError):
        Graph.of(HookedRootModule())  # type: ignore[arg-type]
