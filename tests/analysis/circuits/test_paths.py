"""Which inputs a writer depends on, in every family whose stream is a sum: what `feeds` lists is all that there is."""

import copy
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.graph import INPUT, LOGITS, Graph
from hooked_lm.analysis.circuits import Circuit, Runner
from hooked_lm.analysis.circuits.paths import feeds
from tests.close import assert_close
from tests.core import thinned
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked
from tests.unchecked import unchecked

# norms over all heads, a choice of keys and of heads, a difference of heads, experts that another layer adds, two inputs
SHARING = ("bitnet", "olmoe", "deepseek_v32", "jetmoe", "diffllama", "longcat_flash", "zamba", "zamba2")
FIRST = [next(cases) for _, cases in groupby(DECODER_CASES, key=lambda case: case.family)]
KEPT = [case for case in FIRST if case.family == "llama"]
APART = 1e-9  # of values near one, in double precision

Values = Mapping[str, Tensor]
Hook = Callable[[Tensor, Any], Tensor]


def model_of(case: Case) -> HookedTransformer:
    return copy.deepcopy(hooked(case)).double()


def prompts(model: HookedTransformer, seed: int = 3) -> Tensor:
    return torch.randint(model.cfg.d_vocab, (2, 6), generator=torch.Generator().manual_seed(seed))


def written(model: HookedTransformer, graph: Graph, tokens: Tensor, hooks: Mapping[str, Hook]) -> Values:
    """What every writer writes, in a run with these hooks at the sites of readers."""
    kept: dict[str, Tensor] = {}
    keep = [(node.site, lambda value, hook: kept.update({hook.name: value.clone()})) for node in graph.writers]
    with unchecked(), torch.no_grad():
        model.run_with_hooks(tokens, fwd_hooks=[*hooks.items(), *dict(keep).items()])
    return {node.name: node.of(kept[node.site]) for node in graph.writers}


def changed(one: Values, other: Values) -> set[str]:
    return {name for name in one if name != INPUT and (one[name] - other[name]).abs().max() > APART}


@pytest.mark.parametrize("case", thinned(FIRST, keep=KEPT), ids=str)
def test_a_writer_depends_on_nothing_else(case: Case) -> None:
    """Each reader is moved alone, while all others keep their inputs; and the tokens are, while all readers do."""
    model = model_of(case)
    try:
        graph = Graph.of(model)
    except ValueError:  # its stream is no sum
        return
    tokens, table = prompts(model), feeds(graph)
    sites = dict.fromkeys(node.site for node in graph.readers if node.name != LOGITS)
    inputs: dict[str, Tensor] = {}
    written(
        model, graph, tokens, {site: lambda value, hook: inputs.update({hook.name: value.clone()}) for site in sites}
    )
    frozen: dict[str, Hook] = {site: lambda value, hook: inputs[hook.name] for site in sites}
    before = written(model, graph, tokens, frozen)
    generator = torch.Generator().manual_seed(1)
    for i, reader in enumerate(graph.readers[:-1]):
        moved = inputs[reader.site].clone()
        part = moved if reader.head is None else moved[:, :, reader.head]
        part += 3 * torch.randn(part.shape, generator=generator, dtype=part.dtype)
        found = changed(
            before, written(model, graph, tokens, {**frozen, reader.site: lambda value, hook, to=moved: to})
        )
        assert found <= {graph.writers[j].name for j in table[i].nonzero()[:, 0].tolist()}, reader.name
    found = changed(before, written(model, graph, prompts(model, 4), frozen))
    assert found <= {node.name for node in graph.writers if node.is_input or INPUT in node.fed_by}


@pytest.mark.every_parameter
@pytest.mark.parametrize("family", SHARING)
def test_pruned_edges_were_of_no_effect(family: str) -> None:
    model = model_of(next(case for case in FIRST if case.family == family))
    runner = Runner(model, prompts(model), prompts(model, 4), metrics.logit_difference(3, 5))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.rand(runner.graph.is_edge.shape, generator=generator) < share for share in (0.08, 0.15, 0.3) * 4]
    circuits = [Circuit(runner.graph, edges & runner.graph.is_edge) for edges in drawn]
    pruned = [circuit.pruned() for circuit in circuits]
    found, expected = (runner.values(torch.stack([one.edges for one in some])) for some in (pruned, circuits))
    assert_close(found, expected)
    assert any(0 < one.n_edges < other.n_edges for one, other in zip(pruned, circuits, strict=True))
    assert any(node.fed_by for node in runner.graph.writers)
