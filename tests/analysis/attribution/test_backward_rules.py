"""Rules of backward passes against the same derivatives written out: hooks that detach, a softmax put in PyTorch's place, and
formulas of toys."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis import attribute, attribute_edges, circuits, saliency
from hooked_lm.analysis.attribution.backward_rules import (
    GIM,
    NAMED,
    PLAIN,
    RELP,
    Attached,
    BackwardRules,
    shared_product,
)
from hooked_lm.analysis.attribution.gradients import gradients
from tests.close import GRADIENT, assert_apart, assert_close
from tests.core import thinned
from tests.families import DECODER_CASES, ENCODER_CASES
from tests.families._models import hooked
from tests.unchecked import unchecked

DENSE = ["gpt2", "llama", "gemma2", "gptj", "qwen3", "olmo2", "bloom", "granite", "bitnet", "cohere"]
MIXED = ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "bamba"]
SITES = ["hook_embed", "blocks.0.hook_attn_out", "blocks.0.hook_mlp_out"]


def model_of(family: str) -> HookedTransformer:
    case = next(case for case in DECODER_CASES if case.family == family)
    return copy.deepcopy(hooked(case)).double()


def tokens_of(model: HookedTransformer, n_pos: int = 6) -> Tensor:
    return torch.randint(model.cfg.d_vocab, (2, n_pos), generator=torch.Generator().manual_seed(3))


def last_logits(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5].square()


def found(
    model: HookedTransformer, rules: BackwardRules, sites: list[str] | None = None, **more: Any
) -> dict[str, Tensor]:
    """The gradients at sites, by name."""
    sites = [site for site in SITES if site in model.hook_dict] if sites is None else sites
    with unchecked():
        return dict(gradients(model, tokens_of(model), sites, last_logits, rules=rules, **more).gradients)


def written_out(model: HookedTransformer, hooks: list[tuple[str, Callable[..., Any]]]) -> dict[str, Tensor]:
    """The same gradients by PyTorch's backward pass of a run with hooks."""
    live: dict[str, Tensor] = {}

    def keep(value: Tensor, hook: Any) -> None:
        live[hook.name] = value

    keep.records = True  # type: ignore[attr-defined]
    sites = [site for site in SITES if site in model.hook_dict]
    with unchecked(), model.hooks(fwd_hooks=[*hooks, *((site, keep) for site in sites)]):
        scores = last_logits(model(tokens_of(model)))
    return dict(zip(sites, torch.autograd.grad(scores.sum(), [live[site] for site in sites]), strict=True))


# ---- the forward pass ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", thinned(DENSE, ["gpt2", "gemma2"]))
@pytest.mark.parametrize("name", ["relp", "gim"])
def test_forward_values_are_the_same_bits(family: str, name: str):
    model = model_of(family)
    sites = [
        f"blocks.{layer}.{site}" for layer in range(2) for site in ("hook_resid_post", "attn.hook_z", "hook_mlp_out")
    ]
    plain, ruled = (
        gradients(model, tokens_of(model), sites, last_logits, rules=rules) for rules in (PLAIN, NAMED[name])
    )
    assert torch.equal(plain.scores, ruled.scores)
    for site in sites:
        assert torch.equal(plain.values[site], ruled.values[site]), site
        if "0" in site:
            assert_apart(plain.gradients[site], ruled.gradients[site], msg=site)


# ---- each rule against its definition --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", thinned([*DENSE, *MIXED], ["gpt2", "llama", "gemma2", "mixtral"]))
def test_frozen_norms_are_those_whose_divisors_are_detached(family: str):
    model = model_of(family)
    detached = [
        (site, lambda scale, hook: scale.detach()) for site in model.all_points() if site.endswith("hook_scale")
    ]
    expected = written_out(model, detached)
    ruled = found(model, BackwardRules(freeze_norms=True))
    assert_close(ruled, expected, depth=GRADIENT)
    in_steps = [(site, lambda scale, hook: None) for site, _ in detached]
    assert_close(found(model, BackwardRules(freeze_norms=True), hooks=in_steps), expected, depth=GRADIENT)
    assert_apart(ruled["hook_embed"], found(model, PLAIN)["hook_embed"])


class TemperedSoftmax(torch.autograd.Function):
    """softmax(x), whose backward pass has the weights of softmax(x / 3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x - x.logsumexp(-1, keepdim=True)).exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        weights = (ctx.saved_tensors[0] / 3.0).softmax(-1)
        return weights * (gradient - (gradient * weights).sum(-1, keepdim=True))


@pytest.mark.parametrize("family", thinned([*DENSE, "gpt_oss", "bamba"], ["gpt2", "llama", "gemma2"]))
def test_softmax_at_a_temperature(family: str, monkeypatch: pytest.MonkeyPatch):
    """In steps, and in the place of the fused kernel, with its masks and grouped heads."""
    model = model_of(family)
    with monkeypatch.context() as patch:
        patch.setattr(F, "softmax", lambda x, dim=-1: TemperedSoftmax.apply(x))
        patch.setattr(Tensor, "softmax", lambda x, dim=-1: TemperedSoftmax.apply(x))  # that of routers
        expected = written_out(model, [])
    ruled = found(model, BackwardRules(softmax_temperature=3.0))
    assert_close(ruled, expected, depth=GRADIENT)
    shown = found(
        model, BackwardRules(softmax_temperature=3.0), hooks=[("blocks.0.attn.hook_pattern", lambda value, hook: None)]
    )
    assert_close(shown, expected, depth=GRADIENT)
    assert_apart(ruled["hook_embed"], found(model, PLAIN)["hook_embed"])


def test_scaled_queries_keys_and_values():
    model, letters = model_of("qwen3"), {"q": 0.25, "k": 0.5, "v": 3.0}
    sites = [f"blocks.1.attn.hook_{letter}" for letter in letters]
    plain = found(model, PLAIN, sites)
    ruled = found(model, BackwardRules(**{f"{letter}_scale": by for letter, by in letters.items()}), sites)
    for site, by in zip(sites, letters.values(), strict=True):
        assert_close(ruled[site], by * plain[site], depth=GRADIENT)


def test_without_queries_and_keys_patterns_are_constants():
    model = model_of("llama")
    patterns = [(f"blocks.{layer}.attn.hook_pattern", lambda value, hook: value.detach()) for layer in range(2)]
    assert_close(found(model, BackwardRules(q_scale=0.0, k_scale=0.0)), written_out(model, patterns), depth=GRADIENT)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_activation_ratios_and_shares_by_their_formulas(family: str):
    """The gradient at the input of an MLP, from that at its output."""
    model = model_of(family)
    mlp, at = model.blocks[1].mlp, "blocks.1.hook_mlp_out"
    names = [f"blocks.1.mlp.{name}" for name in ("hook_in", "hook_pre", "hook_post", *mlp.factors[1:])]
    run = gradients(
        model,
        tokens_of(model),
        [*names, at],
        last_logits,
        rules=BackwardRules(activation_ratios=True, share_products=True),
    )
    value, gradient = run.values, run.gradients
    at_post = gradient[at] @ mlp.W_out.T
    assert_close(gradient[names[2]], at_post, depth=GRADIENT)
    share = 1 / len(mlp.factors)
    at_pre = at_post * share * value[names[2]] / value[names[1]]
    assert_close(gradient[names[1]], at_pre, depth=GRADIENT)
    expected = at_pre @ (mlp.W_in if len(mlp.factors) == 1 else mlp.W_gate).T
    if len(mlp.factors) > 1:
        expected = expected + (at_post * share * mlp.act_fn(value[names[1]])) @ mlp.W_in.T
    assert_close(gradient[names[0]], expected, depth=GRADIENT)


def test_the_head_of_an_encoder_has_a_ratio():
    case = next(case for case in ENCODER_CASES if case.family == "bert")
    model = copy.deepcopy(hooked(case)).double()
    sites = ["mlm_head.hook_pre", "mlm_head.hook_post"]
    with unchecked():
        tokens = torch.tensor([[5, 9, 7, 3]])
        run = gradients(
            model, tokens, sites, lambda logits: logits[:, 1, 3], rules=BackwardRules(activation_ratios=True)
        )
    pre, post = sites
    assert_close(run.gradients[pre], run.gradients[post] * run.values[post] / run.values[pre], depth=GRADIENT)


@given(
    st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.3, 1.5]), min_size=1, max_size=6),
    st.lists(st.sampled_from([-1.0, 0.0, 0.7, 2.0]), min_size=6, max_size=6),
    st.sampled_from([F.relu, F.gelu, F.silu]),
)
@settings(max_examples=60, deadline=None)
def test_shares_sum_to_the_product(gates: list[float], others: list[float], act: Callable[[Tensor], Tensor]):
    """The products of factors with their gradients sum to the value: relevance is conserved, also where a factor is 0."""
    pre = torch.tensor(gates, dtype=torch.float64, requires_grad=True)
    linear = torch.tensor(others[: len(gates)], dtype=torch.float64, requires_grad=True)
    value = act(pre) * linear
    way = shared_product(value, [pre, linear], RELP)
    of_pre, of_linear = torch.autograd.grad(way.sum(), [pre, linear], retain_graph=True)
    assert_close(of_pre * pre + of_linear * linear, value.detach())
    assert_close(of_linear, act(pre.detach()) / 2)
    [slope] = torch.autograd.grad(act(pre).sum(), pre)
    assert_close(of_pre[pre == 0], (slope * linear / 2)[pre == 0].detach())
    shared = torch.autograd.grad(shared_product(value, [pre, linear], BackwardRules(share_products=True)).sum(), pre)[0]
    assert_close(shared, (slope * linear / 2).detach())


# ---- what the methods promise ----------------------------------------------------------------------------------------


def toy(**more: Any) -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "n_ctx": 8, "d_vocab": 11, "act_fn": "silu", "seed": 0}
    model = HookedTransformer(HookedTransformerConfig(**{**sizes, "initializer_range": 0.4, **more})).double()
    for name, weight in model.named_parameters():
        if name.rpartition(".")[2].startswith("b") or name == "unembed.b_U":
            torch.nn.init.zeros_(weight)
    return model


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("norm", ["RMS", "LN", None])
def test_relevance_is_conserved_without_biases(gated: bool, norm: str | None):
    """With constant patterns the products of the inputs with their gradients sum to the logit."""
    model = toy(gated_mlp=gated, normalization_type=norm, positional_embedding_type="rotary", eps=1e-12)
    rules = BackwardRules(**{**RELP.settings, "q_scale": 0.0, "k_scale": 0.0})
    prompt = torch.tensor([[1, 4, 2, 9, 7]])
    run = gradients(model, prompt, ["hook_embed"], lambda logits: logits[:, -1, 3], rules=rules)
    kept = (run.values["hook_embed"] * run.gradients["hook_embed"]).sum((1, 2))
    assert_close(kept, run.scores, depth=GRADIENT)
    lost = gradients(model, prompt, ["hook_embed"], lambda logits: logits[:, -1, 3])
    assert_apart((lost.values["hook_embed"] * lost.gradients["hook_embed"]).sum((1, 2)), lost.scores)


def test_relp_is_the_gradient_of_a_linear_model():
    model = toy(act_fn="linear", normalization_type=None)
    plain, relp = (
        gradients(model, torch.tensor([[1, 4, 2, 9]]), ["hook_embed"], lambda logits: logits[:, -1, 3], rules=rules)
        for rules in (PLAIN, RELP)
    )
    assert_close(relp.gradients, plain.gradients, depth=GRADIENT)


@pytest.mark.parametrize("method", ["relp", "gim"])
def test_a_method_is_the_gradient_with_its_rules(method: str):
    model = model_of("llama")
    corrupted, clean = (tokens_of(model).roll(by, 1) for by in (0, 1))
    given: dict[str, Any] = {"metric": last_logits, "check": False}
    with unchecked():
        nodes = attribute(model, corrupted, clean, sites=["z", "post"], method=method, **given)
        assert torch.equal(
            nodes.values, attribute(model, corrupted, clean, sites=["z", "post"], backward=method, **given).values
        )
        edges = attribute_edges(model, corrupted, clean, method=method, **given)
        same = attribute_edges(model, corrupted, clean, backward=NAMED[method], **given)
    assert torch.equal(edges.values.nan_to_num(), same.values.nan_to_num())
    assert nodes.cost["backwards"] == 1
    assert nodes.about["backward"] == edges.about["backward"] == NAMED[method].settings


@pytest.mark.parametrize("rules", [RELP, GIM])
def test_edges_into_the_logits_sum_to_the_effect_of_the_last_stream(rules: BackwardRules):
    model = model_of("llama")
    corrupted, clean = (tokens_of(model).roll(by, 1) for by in (0, 1))
    with unchecked():
        edges = attribute_edges(model, corrupted, clean, metric=last_logits, backward=rules, check=False)
        common = {"metric": last_logits, "backward": rules, "check": False, "positions": None}
        stream = attribute(model, corrupted, clean, sites="resid_post", layers=[-1], **common)
    total = edges.effects().select(reader="logits").values.sum(0)
    assert_close(total, stream.effects().values.flatten(0, -2).sum(0), depth=GRADIENT)


def test_the_relevance_of_tokens_sums_to_the_logit():
    model = toy(gated_mlp=True, normalization_type="RMS", positional_embedding_type="rotary", eps=1e-12)
    rules = BackwardRules(**{**RELP.settings, "q_scale": 0.0, "k_scale": 0.0})
    found = saliency(model, torch.tensor([[1, 4, 2, 9]]), continuation=torch.tensor([[7]]), of="logit", backward=rules)
    assert_close(found.signed.nansum(-1), found.scores, depth=GRADIENT, dtype=torch.float32)
    assert found.about["backward"] == rules.settings


def test_integrals_and_circuits_take_rules():
    model = HookedTransformer.from_pretrained("demo")
    pairs = (
        ["Mary and John left, Mary", "Tom and Alice left, Tom"],
        ["Mary and John left, John", "Tom and Alice left, Alice"],
    )
    answers = [" Mary", " Tom"], [" John", " Alice"]
    with unchecked():
        found = {
            name: attribute(
                model, *pairs, answers=answers, method="ig-activations", backward=name, steps=2, check=False
            )
            for name in ("plain", "relp")
        }
        circuit = circuits.discover(model, *pairs, answers=answers, method="gim", n_edges=30, check=False)
    assert_apart(found["plain"].effects().mean, found["relp"].effects().mean)
    assert 0 < circuit.n_edges <= 30
    assert circuit.about["method"] == "gim"


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("mixtral", "mlp.*MoE"),
        ("mamba", "mixer.*Mamba"),
        ("afmoe", "attn.*GatedAttention"),
        ("qwen3_next", "mixer"),
        ("gemma4_text", "per_layer"),
    ],
)
def test_parts_without_a_rule_are_named(family: str, part: str):
    with pytest.raises(ValueError, match=f"'blocks.0.*({part}).*choose backward='plain' or 'gim'"):
        found(model_of(family), RELP)


def test_rules_of_attention_need_attention():
    with pytest.raises(
        ValueError, match="k_scale, q_scale, softmax_temperature, v_scale: rules of attention, and this"
    ):
        found(model_of("mamba"), GIM)


def test_an_activation_that_is_not_zero_at_zero_has_no_ratio():
    with pytest.raises(ValueError, match=r"'blocks.0.mlp' is a MLP, which multiplies"):
        gradients(
            toy(act_fn="sigmoid"), torch.tensor([[1, 2]]), ["hook_embed"], lambda logits: logits[:, -1, 3], rules=RELP
        )


def test_wrong_arguments():
    model, prompts = toy(), [torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 4]])]
    with pytest.raises(ValueError, match="backward must be one of 'plain', 'relp', 'gim', or BackwardRules; got 'lrp'"):
        attribute(model, *prompts, metric=last_logits, backward="lrp")
    for method in ("relp", "atp*"):
        with pytest.raises(ValueError, match=f"method '{method[:3]}.*has its own backward pass"):
            attribute(model, *prompts, metric=last_logits, method=method, backward="gim")
    with pytest.raises(ValueError, match="softmax_temperature must be a positive number, got 0"):
        BackwardRules(softmax_temperature=0)
    with pytest.raises(ValueError, match="k_scale must be a number from 0 on, got -1"):
        BackwardRules(k_scale=-1)


def test_large_streams_in_half_precision_keep_their_gradients():
    """The squares of numbers above 255 overflow in float16."""
    x = (300 * torch.randn(3, 8, generator=torch.Generator().manual_seed(0))).half().requires_grad_()
    exact = x.detach().float().requires_grad_()
    for values in (x, exact):
        with Attached(BackwardRules(freeze_norms=True)).scope():
            found = F.layer_norm(values, (8,))
        found[:, 0].float().sum().backward()
    assert x.grad is not None
    assert exact.grad is not None
    assert_close(x.grad, exact.grad, dtype=torch.float16)
    assert exact.grad.abs().max() > 0


@pytest.mark.parametrize("method", ["relp", "gim"])
def test_a_search_by_one_gradient_needs_a_metric(method: str):
    """KL(model || circuit) is least in the full model, where its gradient is 0 by any rules."""
    model = HookedTransformer.from_pretrained("demo")
    with pytest.raises(ValueError, match=f"where '{method}' would take its gradient: give a metric"):
        circuits.discover(model, "Mary and John left, Mary", "Mary and John left, John", method=method, n_edges=10)
