"""Attribution graphs of every family of decoders: exact, or refused by the name of a part."""

import re
from functools import partial

import pytest

from hooked_lm.analysis.graphs import attribution_graph
from hooked_lm.components.blocks.wiring import has_part
from tests.analysis.graphs.models import transcoders
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked, prompt

REASONS = (
    r"'blocks\.\d+(\.\w+)?' (is a \w+|has [^:]+)",  # a part, or a block, by its name
    r"neurons of experts are no nodes",
    r"no layer of this model has neurons",
    r"the activation function of 'blocks\.\d+\.mlp' is",
    r"the edges into '[^']+' and its bias miss its value",  # clipped values
)
PLAIN = {
    "gpt2",
    "llama",
    "gemma",
    "gemma2",
    "gemma3_text",
    "qwen2",
    "qwen3",
    "mistral",
    "gpt_neox",
    "phi3",
    "olmo2",
    "cohere",
}
WITHOUT_MLP = {"falcon_mamba", "mamba", "mamba2", "rwkv", "zamba", "zamba2"}
EXPERTS = {"mixtral", "gpt_oss", "qwen3_moe", "deepseek_v3"}


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["neuron", "feature"])
@pytest.mark.parametrize("case", DECODER_CASES, ids=str)
def test_sums_are_exact_or_the_part_is_named(case: Case, unit: str) -> None:
    model = hooked(case)
    has_mlp = any(has_part(block, "mlp") for block in model.blocks)
    assert has_mlp != (case.family in WITHOUT_MLP)
    if unit == "feature" and not has_mlp:
        return  # transcoders have nothing to replace
    tokens = prompt(case, 1, min(case.n_prompt, 12))
    exact = case.family in PLAIN or (case.family in EXPERTS and unit == "feature")
    found = None if unit == "neuron" else transcoders(model)
    make = partial(attribution_graph, model, tokens, found, max_nodes=40, check=0, control=None, progress=False)
    if exact and "clipped" not in str(case):
        graph = make()
    else:
        try:
            graph = make()
        except ValueError as refused:
            graph, reason = None, str(refused)
    if graph is None:
        assert re.search("|".join(REASONS), reason), reason
        return
    assert graph.completeness["sums"] < 1e-5
    assert graph.completeness["differences"] < 1e-4
    assert graph.adjacency.any()
