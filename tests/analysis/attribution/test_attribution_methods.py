"""Integrated gradients and AtP*: completeness, saturated heads, paths that cancel; each with what plain gradients say there."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.atp import one_key_exchanged
from hooked_lm.analysis.attribution.gradients import gradients
from hooked_lm.analysis.attribution.integrated import nodes
from hooked_lm.analysis.attribution.nodes import attribute
from hooked_lm.engine.prompts import site_of_layer
from tests.close import GRADIENT, assert_apart, assert_close
from tests.families import DECODER_CASES
from tests.families._models import hooked, prompt
from tests.models.toys import ids, toy

QUIET: dict[str, Any] = {"check": False, "progress": False}


def score(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - 2 * logits[:, 2, 5].tanh()


def mild(kind: str) -> tuple[HookedTransformer, Tensor, Tensor]:
    """A smooth model whose weights are small enough for an integral of a few steps."""
    smooth = {} if kind == "attn_only" else {"act_fn": "gelu"}
    return toy(kind, initializer_range=0.1, **smooth), ids(2, 6, seed=0), ids(2, 6, seed=1)


# ---- integrated gradients --------------------------------------------------------------------------------------------


def shortfall(kind: str, method: str, steps: int, **options: Any) -> float:
    """How far the effects at the streams before the layers are from adding up to the whole difference, as a share of it."""
    model, corrupted, clean = mild(kind)
    own = {"metric": score, "method": method, "steps": steps, "positions": None, **QUIET, **options}
    found = attribute(model, corrupted, clean, **own)
    whole = found.clean - found.corrupted
    layers = 1 if method == "ig-inputs" else None  # elsewhere the straight way of the inputs is not one of the streams
    return float((found.effects().values[:layers] - whole).abs().max() / whole.abs().max())


@pytest.mark.parametrize("kind", ["standard", "rotary", "parallel", "post_norm", "attn_only"])
@pytest.mark.parametrize("method", ["ig-inputs", "ig-activations"])
def test_effects_at_a_full_cut_add_up_to_the_whole_difference(method: str, kind: str) -> None:
    assert shortfall(kind, method, 24) < 2e-3


@pytest.mark.slow
def test_a_single_gradient_does_not_add_up() -> None:
    for method in ("ig-inputs", "ig-activations"):
        few, more, many = (shortfall("standard", method, steps) for steps in (1, 3, 12))
        assert few > 0.01
        assert few > more > many
    assert shortfall("standard", "gradient", 1) > 0.1


@pytest.mark.slow
def test_steps_in_one_pass_or_one_by_one_are_the_same() -> None:
    model, corrupted, clean = mild("rotary")
    for method in ("ig-inputs", "ig-activations"):
        own = {"metric": score, "sites": ["z"], "method": method, "steps": 3, **QUIET}
        at_once = attribute(model, corrupted, clean, **own)
        one_by_one = attribute(model, corrupted, clean, max_memory=220_000, **own)
        assert dict(one_by_one.cost)["backwards"] >= 3 * dict(at_once.cost)["backwards"]
        assert_close(one_by_one.values, at_once.values)


def test_inputs_of_any_source_move() -> None:
    model, corrupted, clean = mild("standard")
    own = {"metric": score, "method": "ig-inputs", "positions": None, "layers": [0], "steps": 24, **QUIET}
    _, cache = model.run_with_cache(clean, names_filter=["hook_embed", "blocks.0.hook_resid_pre"])
    given = attribute(model, corrupted, replace_with=cache, **own)
    assert_close(given.values, attribute(model, corrupted, clean, **own).values)
    with pytest.raises(KeyError, match="hook_embed"):
        attribute(
            model, corrupted, replace_with={name: value for name, value in cache.items() if name != "hook_embed"}, **own
        )
    # where embeddings go to zero, the metric goes to that of a run without them
    found = attribute(model, corrupted, replace_with="zero", **own | {"sites": "mlp_out"})
    assert bool(found.values.isfinite().all())
    assert not torch.equal(
        found.values,
        attribute(model, corrupted, replace_with="zero", **own | {"sites": "mlp_out", "method": "gradient"}).values,
    )


def test_nodes_integrate_polynomials() -> None:
    for steps in (1, 2, 5):
        at, weights = nodes(steps)
        for power in range(2 * steps):
            assert_close((weights * at**power).sum(), 1 / (power + 1))
        assert abs(float((weights * at ** (2 * steps)).sum()) - 1 / (2 * steps + 1)) > 1e-6


# ---- queries and keys of a saturated head ----------------------------------------------------------------------------


def empty(**fields: Any) -> HookedTransformer:
    """A model whose weights are zero, but for embedding and unembedding, which are the same as nothing."""
    sizes = {
        "d_model": 8,
        "n_heads": 1,
        "d_head": 8,
        "d_vocab": 8,
        "n_ctx": 4,
        "normalization_type": None,
        "device": "cpu",
    }
    model = HookedTransformer(HookedTransformerConfig(**{**sizes, **fields}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.embed.W_E.copy_(torch.eye(8))
        model.unembed.W_U.copy_(torch.eye(8))
    return model


A, B, ASKS_A, ASKS_B, YES, NO = 0, 1, 2, 3, 4, 5


def saturated() -> HookedTransformer:
    """One head, whose last token looks at nothing but A, or nothing but B; A says no and B says yes."""
    model = empty(n_layers=1, attn_only=True)
    attn = model.blocks[0].attn
    with torch.no_grad():
        attn.W_Q[0, ASKS_A, A] = attn.W_Q[0, ASKS_B, B] = 40 * 8**0.5
        attn.W_K[0].copy_(torch.eye(8))
        attn.W_V[0, A, NO] = attn.W_V[0, B, YES] = 1.0
        attn.W_O[0].copy_(torch.eye(8))
    return model


@pytest.mark.parametrize("site", ["q", "k"])
def test_a_saturated_head_is_seen_by_its_pattern_only(site: str) -> None:
    corrupted = {"q": [[A, B, ASKS_A]], "k": [[A, B, ASKS_A]]}[site]
    clean = {"q": [[A, B, ASKS_B]], "k": [[B, A, ASKS_A]]}[site]
    own = {"metric": metrics.logit_difference(YES, NO), "sites": site, "heads": "each", "progress": False}
    model = saturated()
    plain = attribute(model, torch.tensor(corrupted), torch.tensor(clean), check=True, **own)
    mended = attribute(model, torch.tensor(corrupted), torch.tensor(clean), check=True, method="atp*", **own)
    exact = (plain.exact - plain.corrupted).abs().max()
    assert exact > 0.5  # a whole turn of the query; a key that is lost leaves three alike
    assert_close(plain.effects().values, 0.0, scale=exact)
    assert_close(mended.values, mended.exact)  # all behind the pattern is linear


# ---- queries and keys anywhere ---------------------------------------------------------------------------------------

KINDS = ["rotary", "parallel", "windowed", "shortformer", "sinks", "alibi"]
CASES = [
    "gemma2-grouped",
    "gptj-half-rotary",
    "gpt_oss-yarn",
    "gemma4_text-borrowing-biased-linear",
    "deepseek_v2-greedy",
]


def by_pattern(model: Any, corrupted: Tensor, clean: Tensor, site: str, pos: int, head: int) -> Tensor:
    """The effect on all patterns of one query or key, exchanged alone, times the gradients at the patterns."""
    layer = int(site.split(".")[1])
    held = [f"blocks.{i}.attn.hook_z" for i in range(model.cfg.n_layers)]
    patterns = [f"blocks.{i}.attn.hook_pattern" for i in range(layer, model.cfg.n_layers)]
    with torch.no_grad():
        _, new = model.run_with_cache(clean, names_filter=[site])
        _, old = model.run_with_cache(corrupted, names_filter=[*held, *patterns])
    changed: dict[str, Tensor] = {}

    def exchange(value: Tensor, hook: Any) -> Tensor:
        value[:, pos, head] = new[site][:, pos, head]
        return value

    def keep(value: Tensor, hook: Any) -> None:
        changed[hook.name] = value

    hooks = [(site, exchange), *((name, keep) for name in patterns)]
    with torch.no_grad():
        model.run_with_hooks(
            corrupted, fwd_hooks=[*hooks, *((name, lambda value, hook: old[hook.name]) for name in held)]
        )
    slopes = gradients(model, corrupted, patterns, score).gradients
    return sum((slopes[name] * (changed[name] - old[name])).sum((1, 2, 3)) for name in patterns)


def assert_queries_and_keys_go_by_their_patterns(model: Any, corrupted: Tensor, clean: Tensor) -> None:
    from hooked_lm.analysis.attribution.atp import (
        PatternFix,
    )  # what is tested is inside it, before gradients are dropped
    from hooked_lm.analysis.attribution.gradient_runs import GradientRun, RowSums, seen
    from hooked_lm.engine.plan import SweepPlan

    drawn, largest = torch.Generator().manual_seed(0), 0.0
    for kind in ("q", "k"):
        plan = SweepPlan(model, corrupted, [kind], heads="each")
        values, _ = seen(model, clean, plan.sites)
        sums = {site: RowSums.of(plan, site) for site in plan.sites}
        run = GradientRun(model, corrupted, score, plan.sites, values.__getitem__, sums)
        with torch.no_grad():
            fix = PatternFix(run)
        slopes = gradients(model, corrupted, fix.patterns, score).gradients
        for site in plan.sites:
            found = fix.effects(site, slopes)
            pos, head = (int(torch.randint(n, (), generator=drawn)) for n in found.shape[1:])
            expected = by_pattern(model, corrupted, clean, site, pos, head)
            # in every dtype a softmax is computed in single precision
            assert_close(found[:, pos, head], expected, depth=GRADIENT, dtype=torch.float32)
            largest = max(largest, float(expected.abs().max()))
    assert largest > 1e-3


@pytest.mark.every_parameter
@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_keys_go_by_their_patterns(kind: str) -> None:
    assert_queries_and_keys_go_by_their_patterns(toy(kind), ids(2, 7, seed=0), ids(2, 7, seed=1))


@pytest.mark.parametrize("case", [case for case in DECODER_CASES if str(case) in CASES], ids=str)
def test_queries_and_keys_of_families_go_by_their_patterns(case: Any) -> None:
    tokens = prompt(case, batch=2, length=7)
    assert_queries_and_keys_go_by_their_patterns(copy.deepcopy(hooked(case)).double(), tokens, tokens.flip(0))


@pytest.mark.parametrize("size", [1.0, 30.0])
def test_one_key_exchanged_is_a_softmax_with_one_score_exchanged(size: float) -> None:
    old, new = size * torch.randn(2, 3, 2, 4, 5).double()
    mask = torch.ones(4, 5).tril(1).log().double()  # minus infinity where nothing is seen
    old, new, slopes = old + mask, new + mask, torch.randn(3, 2, 4, 5).double()
    found = one_key_exchanged(old, new, old.softmax(-1), slopes)
    for key in range(5):
        changed = old.clone()
        changed[..., key] = new[..., key]
        expected = ((changed.softmax(-1) - old.softmax(-1)) * slopes).sum(-1)
        assert_close(found[..., key], expected)
    assert found.abs().max() > 0.1


# ---- paths that cancel -----------------------------------------------------------------------------------------------


def cancelling() -> HookedTransformer:
    """Of what token A writes less B, layer 1 adds relu(x) to the answer, and layer 2 takes x away: equal while x > 0."""
    model = empty(n_layers=3, d_mlp=2, act_fn="relu")
    with torch.no_grad():
        for layer, sign in ((1, 1.0), (2, -1.0)):
            mlp = model.blocks[layer].mlp
            mlp.W_in[A, 0], mlp.W_in[B, 0] = 1.0, -1.0
            mlp.W_out[0, YES] = sign
        last = model.blocks[2].mlp
        last.W_in[A, 1], last.W_in[B, 1], last.W_out[1, YES] = -1.0, 1.0, 1.0  # relu(x) - relu(-x) == x
    return model


def test_paths_that_cancel_in_the_gradient_alone() -> None:
    model, own = cancelling(), {"metric": metrics.logit(YES), "layers": [1], "progress": False, "check": True}
    plain, mended = (
        attribute(model, torch.tensor([[A]]), torch.tensor([[B]]), method=m, **own) for m in ("gradient", "atp*")
    )
    exact = float(plain.exact - plain.corrupted)
    assert_close(exact, 1.0)
    assert_close(float(plain.effects().values), 0.0)
    # 2 without either of the two layers, 0 without the first; a site of the stream has a gradient in all three cases
    assert_close(float(mended.effects().values), 4 / 3)


def test_without_cancellation_dropping_changes_no_effect_on_the_stream() -> None:
    """After the last layer nothing is dropped on the way to the logits, so the mean over layers is the effect itself."""
    model, corrupted, clean = mild("standard")
    own = {"metric": score, "sites": "resid_post", "layers": [-1], **QUIET}
    plain = attribute(model, corrupted, clean, **own)
    assert_close(attribute(model, corrupted, clean, method="atp*", **own).values, plain.values)


def test_what_flows_through_one_layer_keeps_its_size() -> None:
    """The mean over dropped layers would be half of it: of the two other layers it needs one."""
    model = empty(n_layers=3, d_mlp=2, act_fn="relu")
    with torch.no_grad():
        mlp = model.blocks[1].mlp
        mlp.W_in[A, 0], mlp.W_out[0, YES] = 1.0, 1.0
    own = {"metric": metrics.logit(YES), "sites": "attn_out", "layers": [0], "progress": False, "check": False}
    new = {"blocks.0.hook_attn_out": torch.eye(model.cfg.d_model)[A].view(1, 1, -1)}
    found = attribute(model, torch.tensor([[A]]), replace_with=new, method="atp*", **own)
    assert_close(float(found.effects().values), 1.0)


def test_dropping_keeps_the_sign_of_the_gradient_and_the_sizes_of_its_parts() -> None:
    model, corrupted, clean = mild("standard")
    own = {"metric": score, "sites": ["mlp_out", "v"], "heads": None, **QUIET}
    plain = attribute(model, corrupted, clean, **own).effects().values
    found = attribute(model, corrupted, clean, method="atp*", **own).effects().values
    n_layers, sizes = model.cfg.n_layers, torch.zeros_like(plain)
    for layer in range(n_layers):
        outs = [f"blocks.{layer}.hook_{name}" for name in ("attn_out", "mlp_out")]
        with torch.no_grad():
            _, held = model.run_with_cache(corrupted, names_filter=outs)
        frozen = [(site, lambda value, hook, held=held: held[hook.name]) for site in outs]  # constants have no gradient
        sites = [site for name in ("mlp_out", "v") for i in range(n_layers) if (site := site_of_layer(model, name, i))]
        apart = gradients(model, corrupted, [site for site in sites if site not in outs], score, frozen, check=False)
        with torch.no_grad():
            _, new = model.run_with_cache(clean, names_filter=sites)
        for i, name in enumerate(("mlp_out", "v")):
            for at in range(n_layers):
                site = site_of_layer(model, name, at)
                if site in apart.gradients:
                    effect = apart.gradients[site] * (new[site] - apart.values[site])
                    sizes[i, at] += effect.flatten(2).sum(-1).abs().T
    mean = sizes / (n_layers - 1)
    assert len((mean > plain.abs()).unique()) == 2, "both cases occur"
    expected = plain.sign() * torch.maximum(plain.abs(), mean)
    assert_close(found, expected)
    assert_apart(found, plain)
