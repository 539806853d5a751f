"""Attribution against exact patching, finite differences and models that are linear; grids, parts, checks and errors."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.attribution.methods import METHODS
from hooked_lm.analysis.attribution.nodes import attribute, attribute_nodes
from hooked_lm.demo import experiment
from hooked_lm.engine.prompts import site_of_layer
from tests.close import GRADIENT, assert_apart, assert_close
from tests.engine.small import built
from tests.families import DECODER_CASES
from tests.families._models import hooked, prompt
from tests.models.toys import ids, toy

FAMILIES = ["gpt2-tied", "llama-grouped", "gemma2-grouped", "gptj-half-rotary", "gpt_neox-parallel", "mixtral-grouped"]
QUIET: dict[str, Any] = {"check": False, "progress": False}


def score(logits: Tensor) -> Tensor:
    """A metric of one number a prompt, which reads several positions."""
    return logits[:, -1, 3] - 2 * logits[:, 2, 5].tanh()


def both(n_pos: int = 6, batch: int = 2) -> tuple[Tensor, Tensor]:
    return ids(batch, n_pos, seed=0), ids(batch, n_pos, seed=1)


@pytest.fixture(scope="module")
def demo() -> tuple[HookedTransformer, list[str], list[str], Any]:
    model = HookedTransformer.from_pretrained("demo")
    pairs = experiment.prompt_pairs(4)
    right, wrong = (
        torch.tensor([model.to_single_token(t) for t in some])
        for some in zip(*[(p.answer, p.wrong_answer) for p in pairs], strict=True)
    )
    return model, [p.corrupted for p in pairs], [p.clean for p in pairs], metrics.logit_difference(right, wrong)


# ---- the grid --------------------------------------------------------------------------------------------------------

GRIDS: list[dict[str, Any]] = [
    {},
    {"sites": ["resid_pre", "mlp_out"], "layers": [2, 0], "positions": [-1, 1]},
    {"sites": "z", "heads": "each", "layers": None},
    {"sites": ["z", "k"], "heads": [3, 0, 1], "positions": None},
    {"sites": "post", "neurons": [5, 0], "positions": [4]},
    {"sites": "pattern", "heads": "each", "direction": "noise"},
    {"sites": ["attn_out"], "layers": None, "positions": None},
]


@pytest.mark.parametrize("arguments", GRIDS, ids=str)
def test_grid_and_baselines_are_those_of_a_sweep(arguments: dict[str, Any]) -> None:
    model, (corrupted, clean) = toy("rotary"), both()  # 4 heads, 2 key/value heads
    some = {"one": score, "all": lambda logits: score(logits).mean()}
    found = attribute(model, corrupted, clean, metric=some, **QUIET, **arguments)
    exact = patching.sweep(model, corrupted, clean, metric=some, progress=False, **arguments)
    assert isinstance(found, Attribution)
    assert found.axes == exact.axes
    assert found.base == exact.base
    assert torch.equal(found.values.isnan(), exact.values.isnan())
    assert_close(found.corrupted, exact.corrupted)
    assert_close(found.clean, exact.clean)
    assert found.effects().values.abs().nan_to_num().max() > 1e-3


def test_cells_with_several_layers_or_positions_are_sums_of_others() -> None:
    model, (corrupted, clean) = toy("rotary"), both()
    own = {"metric": score, "sites": "z", **QUIET}
    each = attribute(model, corrupted, clean, heads="each", **own).effects().values
    for options, axes in (({"positions": None, "heads": "each"}, 1), ({"layers": None, "heads": "each"}, 0), ({}, 2)):
        assert_close(attribute(model, corrupted, clean, **options, **own).effects().values, each.sum(axes))


# ---- finite differences ----------------------------------------------------------------------------------------------


def finite_difference(
    model: HookedTransformer, tokens: Tensor, site: str, new: Tensor, index: tuple[Any, ...], eps: float = 1e-4
) -> Tensor:
    """The central difference of the metric on the way to new values at one place of a site."""

    def at(share: float) -> Tensor:
        def hook(value: Tensor, hook: Any) -> Tensor:
            value[index] += share * (new[index] - value[index])
            return value

        with torch.no_grad():
            return score(model.run_with_hooks(tokens, fwd_hooks=[(site, hook)]))

    return (at(eps) - at(-eps)) / (2 * eps)


def assert_gradients_are_finite_differences(model: HookedTransformer, corrupted: Tensor, clean: Tensor) -> int:
    """At one place of each site of each layer, drawn at random; returns how many had an effect."""
    groups: dict[str, dict[str, str]] = {"resid_pre attn_out mlp_out mixer_out": {}, "q k v z pattern": {"heads": "each"},
                                         "post": {"neurons": "each"}}  # fmt: skip
    drawn, n_effects = torch.Generator().manual_seed(3), 0
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)
    for sites, options in groups.items():
        names = [n for n in sites.split() if any(site_of_layer(model, n, layer) for layer in range(model.cfg.n_layers))]
        if not names:
            continue
        own = {"metric": score, "sites": names, **options, **QUIET}
        each = attribute(model, corrupted, clean, **own).effects().values
        for found, (name, layer) in zip(
            each.flatten(0, int(len(names) > 1)), product(names, range(model.cfg.n_layers)), strict=True
        ):
            site = site_of_layer(model, name, layer)
            if site is None:
                assert bool(found.isnan().all())
                continue
            n_pos, *n_features = [int(n) for n in found.shape[:-1]]
            pos, feature = (int(torch.randint(n, (), generator=drawn)) for n in (n_pos, *(n_features or [1])))
            if n_features and bool(found[pos, feature].isnan().any()):  # keys have fewer heads
                feature = 0
            index = (slice(None), pos, feature) if n_features else (slice(None), pos)
            there = (slice(None), feature, pos) if name == "pattern" else index
            expected = finite_difference(model, corrupted, site, cache[site], there)
            assert_close(found[index[1:]], expected.float(), depth=GRADIENT, scale=found.nan_to_num())
            n_effects += int(bool((expected.abs() > 1e-3).any()))
    return n_effects


@pytest.mark.parametrize("case", [case for case in DECODER_CASES if str(case) in FAMILIES], ids=str)
def test_gradients_are_finite_differences(case: Any) -> None:
    model = copy.deepcopy(hooked(case)).double()
    corrupted = prompt(case, batch=2, length=6)
    assert assert_gradients_are_finite_differences(model, corrupted, corrupted.flip(0)) > 4


def test_gradients_are_finite_differences_in_a_model_with_states() -> None:
    model, (corrupted, clean) = built("hybrid").double(), both()
    assert assert_gradients_are_finite_differences(model, corrupted % model.cfg.d_vocab, clean % model.cfg.d_vocab) > 2


# ---- exactness and agreement -----------------------------------------------------------------------------------------


def test_exact_where_the_metric_is_linear() -> None:
    model, (corrupted, clean) = toy("attn_only"), both()  # without norms the last heads add up in the logits
    metric = metrics.logit_difference(3, 5)
    found = attribute(model, corrupted, clean, metric=metric, sites="z", heads="each", check=True, progress=False)
    last = found.select(layer=model.cfg.n_layers - 1)
    assert_close(last.values, last.exact)
    assert last.effects().values.abs().max() > 0.1
    first = found.select(layer=0)
    assert_apart(first.values, first.exact, msg="else all of this model would be linear")


BOUNDS = {"resid_pre": 0.6, "attn_out": 0.7, "mlp_out": 0.6, "z": 0.9, "q": 0.85, "k": 0.8, "v": 0.95, "pattern": 0.9}


@pytest.mark.slow
def test_ranks_agree_with_exact_patching_on_the_bundled_model(demo: Any) -> None:
    model, corrupted, clean, metric = demo
    for site, bound in BOUNDS.items():
        options = {} if site.endswith(("pre", "out")) else {"heads": "each", "positions": None}
        found = attribute(model, corrupted, clean, metric=metric, sites=site, progress=False, **options)
        row = found.agreement.iloc[0]
        assert row["spearman"] >= bound, site
        assert row["pearson"] >= 0.8, site
        assert row["cells"] == found.mean.numel(), site
        assert "agrees with exact patching" in repr(found)
        # shuffled, nothing is left of it
        order = torch.randperm(found.mean.numel(), generator=torch.Generator().manual_seed(0))
        shuffled = found.values.flatten(0, -2)[order].view_as(found.values)
        wrong = Attribution(shuffled, found.axes, found.corrupted, found.clean, exact=found.exact).agreement.iloc[0]
        assert wrong["spearman"] < 0.5, site


def test_all_nodes_in_the_same_passes(demo: Any) -> None:
    model, corrupted, clean, metric = demo
    nodes = attribute_nodes(model, corrupted, clean, metric=metric, **QUIET)
    assert list(nodes) == ["resid_pre", "attn_out", "mlp_out", "z", "post"]
    for site, options in {"mlp_out": {}, "z": {"heads": "each"}, "post": {"neurons": "each"}}.items():
        alone = attribute(model, corrupted, clean, metric=metric, sites=site, **options, **QUIET)
        assert nodes[site].axes == alone.axes
        assert_close(nodes[site].values, alone.values)
        assert dict(nodes[site].cost)["forwards"] == 2  # the run that is changed, and the source
        assert dict(nodes[site].cost)["backwards"] == 1


# ---- parts, metrics, sources -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_prompts_in_parts_are_prompts_at_once(method: str, demo: Any) -> None:
    model, corrupted, clean, metric = demo
    own = {"metric": metric, "sites": ["k", "attn_out"], "layers": [3], "method": method, "steps": 2, **QUIET}
    whole = attribute(model, corrupted, clean, **own)
    parts = attribute(model, corrupted, clean, max_memory=1_500_000, **own)
    assert dict(parts.cost)["backwards"] > dict(whole.cost)["backwards"]
    assert_close(parts.values, whole.values)
    assert_close(parts.corrupted, whole.corrupted)
    assert_close(parts.clean, whole.clean)
    joint = attribute(model, corrupted, clean, max_memory=1_500_000, **own | {"metric": lambda x: metric(x).mean()})
    assert joint.n_prompts == 1
    assert_close(joint.mean, whole.mean)


def test_prompts_do_not_see_each_other(demo: Any) -> None:
    model, corrupted, clean, _ = demo
    metric = metrics.logit(7)
    whole = attribute(model, corrupted, clean, metric=metric, **QUIET)
    alone = attribute(model, corrupted[1], clean[1], metric=metric, **QUIET)
    assert_close(whole.values[..., 1], alone.values[..., 0])
    low, high = whole.estimates.interval()
    assert bool((low <= whole.mean + 1e-5).all() and (whole.mean <= high + 1e-5).all())


def test_several_metrics_are_those_by_themselves() -> None:
    model, (corrupted, clean) = toy(), both()
    several = attribute(model, corrupted, clean, metric={"a": score, "b": metrics.logit(4)}, **QUIET)
    assert list(several.axes) == ["metric", "layer", "position"]
    for name, metric in {"a": score, "b": metrics.logit(4)}.items():
        assert_close(
            several.select(metric=name).values, attribute(model, corrupted, clean, metric=metric, **QUIET).values
        )


def test_values_come_from_any_source() -> None:
    model, (corrupted, clean) = toy(), both()
    own = {"metric": score, "sites": "mlp_out", **QUIET}
    _, cache = model.run_with_cache(clean)
    expected = attribute(model, corrupted, clean, **own)
    given = attribute(model, corrupted, replace_with=cache, **own)
    assert_close(given.values, expected.values)
    assert given.clean is None
    mean = {name: value.mean(0, keepdim=True) for name, value in cache.items()}
    pairs = [("mean", mean), ("zero", {name: torch.zeros_like(value) for name, value in cache.items()})]
    for word, same in pairs:
        by_word = attribute(model, corrupted, clean, replace_with=word, **own)
        assert_close(by_word.values, attribute(model, corrupted, replace_with=same, **own).values)
        assert_apart(by_word.values, expected.values)
    tensor = torch.randn(model.cfg.d_model)
    exact = attribute(model, corrupted, replace_with=tensor, **own | {"check": True})
    assert exact.agreement["spearman"].item() > 0.3
    # nothing changes where nothing differs
    same = attribute(model, corrupted, corrupted, **own)
    assert torch.equal(same.values, same.corrupted.expand_as(same.values))


def test_scores_that_are_masked_stay_masked(demo: Any) -> None:
    model, corrupted, clean, metric = demo
    own = {"metric": metric, "sites": "attn_scores", "heads": "each", "positions": None, "progress": False}
    found = attribute(model, corrupted, clean, **own)
    assert not bool(found.values.isnan().any())
    assert found.agreement["pearson"].item() > 0.7
    assert not bool(attribute(model, corrupted, replace_with="zero", check=False, **own).values.isnan().any())


# ---- exact patching beside -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_exact_patching_beside_is_that_of_a_sweep(demo: Any) -> None:
    model, corrupted, clean, metric = demo
    own: dict[str, Any] = {
        "metric": {"own": metric, "other": metrics.logit(3)},
        "sites": ["attn_out", "mlp_out"],
        "progress": False,
    }
    exact = patching.sweep(model, corrupted, clean, **own).values
    found = attribute(model, corrupted, clean, check=True, **own)
    assert_close(found.exact, exact)
    some, again, others = (attribute(model, corrupted, clean, check=7, seed=seed, **own).exact for seed in (1, 1, 2))
    is_there = ~some.isnan()
    assert is_there[0, ..., 0].sum() == 7
    assert_close(some[is_there], exact[is_there])
    assert torch.equal(is_there, ~again.isnan())
    assert not torch.equal(is_there, ~others.isnan())
    assert attribute(model, corrupted, clean, check=False, **own).exact is None
    assert len(attribute(model, corrupted, clean, **own).agreement) == 4  # metric x site, as it is cheap


def test_many_cells_are_checked_at_random(demo: Any) -> None:
    model, corrupted, clean, metric = demo
    found = attribute(
        model, corrupted, clean, metric=metric, sites="post", neurons="each", layers=[1], check=50, progress=False
    )
    assert found.agreement["cells"].item() == 50
    assert found.mean.numel() > 5000
    assert found.agreement["spearman"].item() > 0.5


def test_saved_and_loaded(demo: Any, tmp_path: Any) -> None:
    model, corrupted, clean, metric = demo
    found = attribute(model, corrupted, clean, metric=metric, seed=5, progress=False)
    found.save(tmp_path / "found.safetensors")
    loaded = Attribution.load(tmp_path / "found.safetensors")
    assert torch.equal(loaded.values, found.values)
    assert torch.equal(loaded.exact, found.exact)
    assert loaded.method == "gradient"
    assert loaded.about["seed"] == 5
    assert repr(loaded) == repr(found)


# ---- nothing is left behind, and errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_model_is_as_before_also_after_an_error(method: str) -> None:
    model, (corrupted, clean) = toy("rotary"), both()
    model.train()
    for i, weight in enumerate(model.parameters()):
        weight.requires_grad_(i % 2 == 0)
    flags = [weight.requires_grad for weight in model.parameters()]
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = torch.get_rng_state()

    def fails(logits: Tensor) -> Tensor:
        raise RuntimeError("broken")

    attribute(model, corrupted, clean, metric=score, sites=["q", "k", "mlp_out"], method=method, steps=2, **QUIET)
    with pytest.raises(RuntimeError, match="broken"):
        attribute(model, corrupted, clean, metric=fails, method=method, **QUIET)
    assert model.training
    assert [weight.requires_grad for weight in model.parameters()] == flags
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not model.list_hooks()
    assert torch.equal(torch.get_rng_state(), state)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no gradient": ({"metric": metrics.rank(3)}, ValueError, "rank has no gradient"),
    "a plain number": ({"metric": lambda logits: float(logits.detach().sum())}, ValueError, "no gradient"),
    "not a number a prompt": ({"metric": lambda logits: logits[:, -1]}, ValueError, "one number"),
    "unknown method": ({"method": "magic"}, ValueError, r"'magic'; the methods are gradient, ig-inputs"),
    "no steps": ({"method": "ig-inputs", "steps": 0}, ValueError, "steps must be a whole number from 1 on, got 0"),
    "not aligned": ({"clean": ids(2, 5)}, ValueError, "must have the same shape"),
    "no source": ({"clean": None}, ValueError, "give clean="),
    "unknown replacement": ({"replace_with": "there"}, ValueError, "replace_with must be"),
    "direction": ({"direction": "up"}, ValueError, "direction must be"),
    "no site": ({"sites": "magic"}, KeyError, "magic"),
    "no sites": ({"sites": []}, ValueError, "sites is empty: name at least one"),
    "no heads": ({"heads": "each"}, ValueError, "has no heads"),
    "out of range": ({"positions": [9]}, IndexError, "position 9"),
    "check": ({"check": 0}, ValueError, "check must be"),
    "little memory": ({"max_memory": 10}, ValueError, "too little"),
    "does not fit": ({"replace_with": torch.zeros(5)}, ValueError, "does not broadcast"),
    "NaN": ({"metric": lambda logits: logits[:, -1, 3] * float("nan")}, ValueError, "NaN"),
    "NaN gradient": ({"metric": lambda x: (x[:, -1, 3] - x[:, -1, 3].detach()).sqrt()}, ValueError, r"gradient at 'blocks\.\d\."),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name: str) -> None:
    arguments, error, words = BAD[name]
    corrupted, clean = both()
    with pytest.raises(error, match=words):
        attribute(toy(), **{"corrupted": corrupted, "clean": clean, "metric": score, **QUIET, **arguments})


def test_there_are_no_gradients_in_inference_mode() -> None:
    with torch.inference_mode(), pytest.raises(RuntimeError, match="leave it"):
        attribute(toy(), *both(), metric=score, **QUIET)
    with torch.no_grad():  # there they can be had
        attribute(toy(), *both(), metric=score, **QUIET)


def test_sites_without_a_gradient_are_named() -> None:
    model, (corrupted, clean) = toy(), both()

    def cut(value: Tensor, hook: Any) -> Tensor:
        return value.detach()

    with (
        model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out", cut)]),
        pytest.raises(ValueError, match=r"blocks\.1\.hook_mlp_out"),
    ):
        attribute(model, corrupted, clean, metric=score, sites="mlp_out", **QUIET)
