"""The stream of every family is the sum of its terms, times what multiplies the stream after them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm.analysis import direct_logit_attribution, source_attribution
from hooked_lm.components.blocks.wiring import has_part, wiring_of
from hooked_lm.models.caches.residual import stream
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.weights.terms import Term, _elementwise, terms_at, times
from tests.close import assert_apart, assert_close
from tests.core import marks
from tests.families import DECODER_CASES, ENCODER_CASES
from tests.families._case import Case
from tests.families._models import hooked, prompt

SCALED = ("gemma4_text", "doge", "zaya")  # families that multiply the stream
ADDED = ("longcat_flash",)  # and one that adds to the output of an MLP before its site
FIRST = {case.family: case for case in reversed([*DECODER_CASES, *ENCODER_CASES])}
OTHER = [case for case in DECODER_CASES if case.family in SCALED + ADDED and case not in FIRST.values()]
OF_SCALED = [case for case in DECODER_CASES if case.family in SCALED]
WITH_ONES = "gemma4_text-borrowing-biased-linear"  # whose factors are all 1


def params(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=str(case), marks=marks(case.family)) for case in cases]


def places(model: Any) -> list[tuple[int | None, bool]]:
    """Before the second layer, before the last MLP, and after all layers."""
    last = model.cfg.n_layers - 1
    return [(1, False), *([(last, True)] if has_part(model.blocks[last], "mlp") else []), (None, False)]


@torch.no_grad()
@pytest.mark.parametrize("case", params([*FIRST.values(), *OTHER]))
def test_the_stream_is_the_sum_of_its_terms(case: Case) -> None:
    """Or it is refused: where a norm is in the stream, or there are several."""
    model = hooked(case)
    _, cache = model.run_with_cache(prompt(case))
    for layer, mlp_input in places(model):
        n = model.cfg.n_layers if layer is None else layer
        before = [wiring_of(block) for block in model.blocks[:n]]
        if any(wiring.chain(wiring.last) is None for wiring in before):
            for refused in (cache.decompose_resid, cache.get_full_resid_decomposition):
                with pytest.raises(ValueError, match=r"normalise the stream itself|residual streams"):
                    refused(layer)
            continue
        whole = stream(model, cache, n, mlp_input)
        some = {"layer": layer, "mlp_input": mlp_input}
        assert_close(cache.decompose_resid(**some).sum(0), whole)
        assert_close(cache.get_full_resid_decomposition(**some, expand_neurons=False).sum(0), whole)
        if any("experts" in getattr(block, "mlp", block)._modules for block in model.blocks[:n]):
            continue  # whose neurons see some tokens each
        found, labels = cache.get_full_resid_decomposition(**some, return_labels=True)
        assert_close(found.sum(0), whole)
        assert len(labels) == len(found) == len({*labels})


@torch.no_grad()
@pytest.mark.parametrize("case", params([case for case in OF_SCALED if str(case) != WITH_ONES]))
def test_without_the_factors_it_is_not(case: Case) -> None:
    model = hooked(case)
    _, cache = model.run_with_cache(prompt(case))
    whole, labels = cache.decompose_resid(return_labels=True)
    biases = sum(part for part, label in zip(whole, labels, strict=True) if label.endswith("stream_bias"))
    written = cache["hook_embed"] + sum(
        cache[f"blocks.{i}.{step.writes}"] for i, block in enumerate(model.blocks) for step in block.wiring().sublayers
    )
    assert_apart(written + biases, cache["resid_post", -1])


@torch.no_grad()
@pytest.mark.parametrize("case", params(OF_SCALED))
def test_a_factor_is_what_a_change_is_multiplied_by(case: Case) -> None:
    """A vector that is added to the output of a sublayer, past all later sublayers, arrives times its factor."""
    model = hooked(case)
    _, cache = model.run_with_cache(prompt(case))
    change = torch.randn(model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    sites = [f"blocks.{i}.{step.writes}" for i, block in enumerate(model.blocks) for step in block.wiring().sublayers]
    for term in terms_at(model, model.cfg.n_layers).terms:

        def edit(value: Tensor, hook: Any, term: Term = term) -> Tensor:
            return cache[hook.name] + (change if hook.name == term.site else 0.0)

        with model.hooks([(sites, edit)]):
            _, changed = model.run_with_cache(prompt(case))
        arrived = changed["resid_post", -1] - cache["resid_post", -1]
        assert_close(arrived, times(change, term.factor).expand_as(arrived), scale=cache["resid_post", -1])


@torch.no_grad()
@pytest.mark.parametrize("case", params([case for case in OF_SCALED if case.family != "zaya"]))
@pytest.mark.parametrize("by", ["layer", "head", "neuron"])
def test_direct_contributions_add_up_to_the_logit(case: Case, by: str) -> None:
    model = hooked(case)
    if by == "neuron" and any("experts" in block.mlp._modules for block in model.blocks):
        return
    tokens = prompt(case)
    _, cache = model.run_with_cache(tokens)
    answers = tokens[:, 0]
    found = direct_logit_attribution(model, tokens, answers, by=by)
    logits = uncapped(model, cache)[:, -1].gather(1, answers[:, None])[:, 0]
    assert_close(found.values.sum(0), logits)
    if by == "head":
        sources = source_attribution(model, tokens, answers)
        heads = dict(zip(found.axes["component"], found.values, strict=True))
        for layer, of_layer in enumerate(sources.values):
            for head, of_head in enumerate(of_layer):
                if f"L{layer}H{head}" in heads:
                    assert_close(of_head.sum(0), heads[f"L{layer}H{head}"], scale=found.values)


def uncapped(model: Decoder, cache: Any) -> Tensor:
    """The logits before a soft cap."""
    normalized = cache["ln_final.hook_normalized"]
    gain = model.ln_final.gain() if hasattr(model.ln_final, "gain") else None
    logits = (normalized if gain is None else normalized * gain) @ model.W_U * model.unembed.cfg.scale
    return logits if model.unembed.b_U is None else logits + model.unembed.b_U


@torch.no_grad()
@pytest.mark.parametrize("case", params([case for case in OF_SCALED if case.family in ("doge", "zaya")]))
def test_accumulated_biases_are_those_of_the_terms(case: Case) -> None:
    """No norm divides them, so that they are the same in every run: that of the cache."""
    model = hooked(case)
    _, cache = model.run_with_cache(prompt(case))
    parts, labels = cache.get_full_resid_decomposition(expand_neurons=False, return_labels=True)
    constants = sum(part for part, label in zip(parts, labels, strict=True) if label.endswith("bias"))
    found = model.accumulated_bias(model.cfg.n_layers, include_mlp_biases=False)
    assert_close(found.expand_as(constants), constants)
    assert bool(found.any()) == (case.family == "zaya" or "biased" in case.name)


def test_the_map_of_each_number_is_elementwise() -> None:
    """What a weighed sum does to the stream: a weight and a constant for each number."""
    model = hooked(next(case for case in OF_SCALED if case.family == "zaya"))
    x = torch.randn(2, 3, model.cfg.d_model, generator=torch.Generator().manual_seed(0))
    for block in model.blocks:
        for step in block.wiring().sums:
            assert step.weighed is not None
            weight, constant = _elementwise(model, block, *step.weighed)
            assert_close(weight * x + constant, getattr(block, step.weighed[0])(step.weighed[1], x))
