"""What components add directly sums to the logits, on models of every kind; sources sum to heads."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.reading.direct import direct_logit_attribution, source_attribution
from hooked_lm.components.norms.norm import norm_of
from tests.close import assert_apart, assert_close
from tests.families import DECODER_CASES
from tests.families._models import hooked, prompt

# of models with random weights, which do no task
pytestmark = pytest.mark.filterwarnings(
    "ignore:the logits of the answers and of the wrong .* hardly differ:UserWarning"
)

FIRST = {case.family: case for case in reversed(DECODER_CASES)}
EXPERTS = ("mixtral", "gpt_oss")
SUMS = (
    "gpt2",
    "llama",
    "gemma2",
    "olmo2",
    "gptj",
    "cohere",
    "granite",
    "bloom",
    "deepseek_v2",
    *EXPERTS,
    "mamba",
    "bamba",
)
ANSWERS, WRONG = torch.tensor([3, 4, 5]), torch.tensor([7, 8, 7])
FRANCE = "The capital of France is"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def before_the_cap(model: HookedTransformer, tokens: Tensor, pos: int) -> Tensor:
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter="unembed.hook_out")
    return cache["unembed.hook_out"][:, pos] * model.unembed.cfg.scale


@pytest.mark.parametrize("family", SUMS)
@pytest.mark.parametrize("by", ["layer", "head", "neuron"])
def test_components_sum_to_the_logits(family: str, by: str):
    model, tokens, rows = hooked(FIRST[family]), prompt(FIRST[family], length=7), torch.arange(3)
    if by == "neuron" and family in (*EXPERTS, "deepseek_v2"):
        with pytest.raises(ValueError, match="mixtures of experts"):
            direct_logit_attribution(model, tokens, ANSWERS, WRONG, by=by)
        return
    for pos, layers in ((-1, "each"), (3, [1])):
        logits = before_the_cap(model, tokens, pos)
        found = direct_logit_attribution(model, tokens, ANSWERS, WRONG, by=by, positions=pos, layers=layers)
        difference = logits[rows, ANSWERS] - logits[rows, WRONG]
        assert_close(found.values.sum(0), difference)
        rest = [i for i in range(len(found.values)) if i != found.values.abs().amax(1).argmax()]
        assert_apart(found.values[rest].sum(0), difference)  # a part less, and the sum is wrong
        alone = direct_logit_attribution(model, tokens, 3, by=by, positions=pos, layers=layers)
        assert_close(alone.values.sum(0), logits[:, 3])


def test_a_component_is_what_it_wrote_read_by_the_final_norm(model: HookedTransformer):
    # each number by hand: centred and divided as the final norm did, times its weight, times the difference of columns
    _, cache = model.run_with_cache(FRANCE)
    paris, rome = model.to_single_token(" Paris"), model.to_single_token(" Rome")
    direction = model.W_U[:, paris] - model.W_U[:, rome]
    gain = getattr(norm_of(model, "ln_final"), "w", None)

    @torch.no_grad()
    def read(written: Tensor) -> float:
        normalized = (written - written.mean()) / cache["ln_final.hook_scale"][0, -1]
        return float((normalized * (1 if gain is None else gain)) @ direction)

    heads = direct_logit_attribution(model, FRANCE, " Paris", " Rome", by="head")
    neurons = direct_logit_attribution(model, FRANCE, " Paris", " Rome", by="neuron", layers=[2])
    for layer, head in ((0, 0), (3, 7)):
        written = cache["z", layer][0, -1, head] @ model.W_O[layer, head]
        assert_close(heads.select(component=f"L{layer}H{head}").mean.item(), read(written))
    for neuron in (0, 100):
        written = cache["post", 2][0, -1, neuron] * model.blocks[2].mlp.W_out[neuron]
        assert_close(neurons.select(component=f"L2N{neuron}").mean.item(), read(written))
    mlp = read(cache["mlp_out", 1][0, -1])
    assert_close(heads.select(component="1_mlp_out").mean.item(), mlp)


def test_with_a_soft_cap_it_is_the_logit_before_it():
    case = FIRST["gemma2"]
    model, tokens = hooked(case), prompt(case, length=7)
    found = direct_logit_attribution(model, tokens, ANSWERS, WRONG)
    with torch.no_grad():
        logits = model(tokens)[:, -1]
    rows = torch.arange(3)
    assert "before the soft cap" in found.about["of"]
    assert_apart(found.values.sum(0), logits[rows, ANSWERS] - logits[rows, WRONG], times=10)
    assert "cap" not in direct_logit_attribution(hooked(FIRST["gpt2"]), tokens, 3).about["of"]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "olmo2", "gptj", "deepseek_v2", "gpt_oss"])
def test_sources_sum_to_heads(family: str):
    model, tokens = hooked(FIRST[family]), prompt(FIRST[family], length=7)
    heads = direct_logit_attribution(model, tokens, ANSWERS, WRONG, by="head", positions=4)
    sources = source_attribution(model, tokens, ANSWERS, WRONG, positions=4)
    for layer in range(model.cfg.n_layers):
        for head in range(model.cfg.n_heads):
            part = sources.select(layer=layer, head=head).values
            assert_close(part.sum(0), heads.select(component=f"L{layer}H{head}").values)
            assert part[5:].abs().max() == 0.0  # nothing comes from later positions
            assert part.abs().max() > 0


def test_heads_that_are_not_a_sum_over_positions_are_refused():
    case = FIRST["bitnet"]  # it normalises the mixed values
    with pytest.raises(ValueError, match="not a sum over positions"):
        source_attribution(hooked(case), prompt(case, length=5), 3)
    with pytest.raises(ValueError, match="have no attention"):
        source_attribution(hooked(FIRST["mamba"]), prompt(FIRST["mamba"], length=5), 3)


def test_a_stream_that_is_no_sum_is_refused():
    case = FIRST["openai-gpt"]
    with pytest.raises(ValueError, match="normalise the stream itself"):
        direct_logit_attribution(hooked(case), prompt(case, length=5), 3)


def test_it_says_where_the_answer_comes_from(model: HookedTransformer):
    found = direct_logit_attribution(model, FRANCE, " Paris", " Rome")
    table = found.top(3)
    assert list(table.columns[:2]) == ["component", "value"]
    assert found.about["of"] == "logit difference"
    assert found.values.sum() > 1
    sources = source_attribution(model, FRANCE, " Paris", " Rome").values.sum((0, 1))[:, 0]
    assert sources.argmax() in (4, 5)  # " France", or the last position, where it was brought before


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"by": "expert"}, ValueError, "by must be"),
        ({"positions": 6}, IndexError, "position 6 is out of range"),
        ({"by": "head", "layers": [9]}, IndexError, "layer 9 is out of range"),
        ({"answers": [1, 2, 3]}, ValueError, "given for 3 prompts, and there are 1"),
        ({"wrong_answers": 10**6}, ValueError, "out of range"),
        ({"prompts": []}, ValueError, "no prompts"),
    ],
)
def test_what_is_wrong_is_said(model: HookedTransformer, options: dict[str, Any], error: type, said: str):
    with pytest.raises(error, match=said):
        direct_logit_attribution(model, **{"prompts": FRANCE, "answers": " Paris", **options})
