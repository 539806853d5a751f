"""Controllers against computations by hand: values and gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer
from hooked_lm.hooks import wrap
from hooked_lm.interventions.base import HookObject
from hooked_lm.interventions.controllers import AddDirection, Clamp, Noise, ProjectOut, Scale, SetValue, ZeroAblate
from hooked_lm.interventions.input_tokens import InputTokens
from hooked_lm.interventions.part_editor import LocalController
from hooked_lm.interventions.patch import (
    FreezeAttention,
    FreezeNorm,
    MeanAblate,
    Patch,
    PatchHead,
    PatchMLP,
    PatchResidual,
    ResampleAblate,
)
from tests.close import GRADIENT, assert_apart, assert_close, assert_near
from tests.interventions.tables import (
    BATCH,
    DECODER,
    KINDS,
    MANY,
    OTHERS,
    POS,
    STREAM,
    TOKENS,
    ByHand,
    D,
    numbers,
    of_family,
)
from tests.models.toys import ids, toy
from tests.unchecked import unchecked


@torch.no_grad()
def assert_does(model: Any, inputs: tuple[Any, ...], clean: Any, hook: HookObject, site: str, by_hand: ByHand) -> None:
    """The value of a site is what a computation by hand makes of it, the run goes on with that, and nothing else changes."""
    expected = by_hand(clean[site].clone()).expand(clean[site].shape)
    with model.hooks([hook]):
        changed, cache = model.run_with_cache(*inputs)
    assert_close(cache[site], expected)
    reference = model.run_with_hooks(*inputs, fwd_hooks=[(site, lambda value, hook: expected.clone())])
    assert_close(changed, reference)
    last = list(clean)[-1]
    assert_apart(cache[last], clean[last], msg="the control: the change matters")
    names = list(clean)
    assert all(torch.equal(cache[name], clean[name]) for name in names[: names.index(site)])


@torch.no_grad()
def assert_gone(model: Any, inputs: tuple[Any, ...], plain: Tensor, hook: HookObject) -> None:
    """Nothing is left behind, and an object that is switched off does nothing."""
    assert torch.equal(model(*inputs), plain)
    assert not any(point.is_listening for point in model.hook_points())
    with hook.disabled():
        assert_close(model.run_with_hooks(*inputs, fwd_hooks=[hook]), plain)


@pytest.mark.every_parameter
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_each_is_what_it_says(kind: str):
    make, inputs, site = KINDS[kind]
    model = make()
    plain, (_, clean) = model(*inputs), model.run_with_cache(*inputs)
    cases = list(STREAM.values())
    if kind not in ("decoder", "module"):  # one of each class
        cases = list({type(make(site)): (make, by_hand) for make, by_hand in cases}.values())
    for hook, by_hand in cases:
        assert_does(model, inputs, clean, hook(site), site, by_hand)
    assert_gone(model, inputs, plain, cases[0][0](site))


@torch.no_grad()
def test_heads_patterns_and_default_sites():
    model, inputs = toy("rotary"), (ids(BATCH, POS),)
    plain, (_, clean) = model(*inputs), model.run_with_cache(*inputs)
    for hook, site, by_hand in DECODER.values():
        assert_does(model, inputs, clean, hook(), site, by_hand)
        assert_gone(model, inputs, plain, hook())


@torch.no_grad()
def test_patching_the_stream_everywhere_gives_the_other_run():
    model, tokens = toy("rotary"), ids(BATCH, POS)
    expected, cache = model.run_with_cache(*OTHERS)
    for hook in (
        Patch("resid_post", 0, source=cache),
        Patch.from_run(model, OTHERS[0], "resid_post", 0),
        PatchResidual.from_run(model, OTHERS[0], layer=1),
        PatchResidual.from_run(model, OTHERS[0]),
    ):
        assert_close(model.run_with_hooks(tokens, fwd_hooks=[hook]), expected)
    assert_apart(model(tokens), expected)
    model = of_family("t5")
    sources, target = (TOKENS, TOKENS.flip(0)), TOKENS + 1
    hook = Patch.from_run(model, sources[1], "encoder_final_ln.hook_normalized", other_inputs=[target])
    assert_close(model.run_with_hooks(sources[0], target, fwd_hooks=[hook]), model(sources[1], target))


@torch.no_grad()
def test_a_whole_run_held_still():
    """All patterns and norms of another run: what is left is linear in the embeddings, if there is no MLP."""
    model, tokens = toy("attn_only", normalization_type="LN"), ids(1, POS)
    hooks = [FreezeAttention.from_run(model, tokens), FreezeNorm.from_run(model, tokens)]
    rest = numbers(2, 1, POS, D)

    def run(embed: Tensor, hooks: list[HookObject]) -> Tensor:
        return model.run_with_hooks(tokens, fwd_hooks=[*hooks, ("hook_embed", lambda value, hook: embed)])

    both, one, other, none = (run(x, hooks) for x in (rest.sum(0), *rest, 0 * rest[0]))
    assert_close(both - other, one - none)
    both, one, other, none = (run(x, []) for x in (rest.sum(0), *rest, 0 * rest[0]))
    assert_apart(both - other, one - none)
    plain = model(tokens)
    assert_close(model.run_with_hooks(tokens, fwd_hooks=hooks), plain)


@torch.no_grad()
def test_resampling_exchanges_whole_rows():
    model = toy("standard")
    tokens = ids(5, POS)
    _, clean = model.run_with_cache(tokens)
    with model.hooks([ResampleAblate(site, layer, seed=3) for layer in (0, 1) for site in ("z", "mlp_out")]):
        _, cache = model.run_with_cache(tokens)
    donors = [int((cache["z", 0][row] - clean["z", 0]).abs().amax((1, 2, 3)).argmin()) for row in range(5)]
    assert sorted(donors) == list(range(5))
    assert all(donor != row for row, donor in enumerate(donors))
    assert torch.equal(cache["z", 0], clean["z", 0][donors])
    _, seen = model.run_with_cache(tokens, names_filter="blocks.0.hook_mlp_out")
    with model.hooks([ResampleAblate("z", 0, seed=3)]):
        _, after_z = model.run_with_cache(tokens)
    assert torch.equal(cache["mlp_out", 0], after_z["mlp_out", 0][donors])  # the same rows at every site
    assert not torch.equal(seen["blocks.0.hook_mlp_out"], cache["mlp_out", 0])

    before = torch.random.get_rng_state()
    with model.hooks([ResampleAblate("resid_post", 1, source=MANY, seed=1, rows=[0, 4])]):
        _, cache = model.run_with_cache(tokens)
    assert torch.equal(before, torch.random.get_rng_state())
    changed = cache["resid_post", 1]
    assert torch.equal(changed[1:4], clean["resid_post", 1][1:4])
    assert all(any(torch.equal(changed[row], one) for one in MANY) for row in (0, 4))
    with pytest.raises(ValueError, match=r"'blocks.1.attn.hook_z' shows a single row: give a source"):
        model.run_with_hooks(tokens[:1], fwd_hooks=[ResampleAblate("z", 1)])


@torch.no_grad()
def test_noise_is_the_same_in_every_run_and_as_large_as_said():
    model, tokens = toy("standard", d_model=64), ids(BATCH, 20)
    before = torch.random.get_rng_state()

    def noise(**settings: Any) -> Tensor:
        _, clean = model.run_with_cache(tokens)
        with model.hooks([Noise("hook_embed", **settings)]):
            _, cache = model.run_with_cache(tokens)
        return cache["hook_embed"] - clean["hook_embed"]

    first = noise(std=0.5)
    assert_near(first.std(), 0.5, 0.05, because="a deviation of some thousand draws")
    assert first.mean().abs() < 0.02
    assert torch.equal(first, noise(std=0.5))
    others = [noise(std=0.5, seed=1), first.roll(1, 0), first.roll(1, 1)]  # another seed, row, position
    assert all(abs(float((first * other).mean())) < 0.02 for other in others)
    some = noise(std=0.5, positions=[3, -1], rows=1)
    assert_close(some[1, [3, 19]], first[1, [3, 19]])  # a place's noise is its own, whatever else is changed
    some[1, [3, 19]] = 0
    assert not some.any()
    embed = model.run_with_cache(tokens)[1]["hook_embed"]
    ratio = noise(multiple=3).std(-1) / embed.std(-1)
    assert_near(ratio.mean(), 3.0, 0.05, because="a deviation of some thousand draws")
    assert torch.equal(before, torch.random.get_rng_state())
    _, clean = model.run_with_cache(tokens)
    with (
        model.hooks([Noise("hook_resid_post", layer, std=0.0) for layer in ()]),
        model.hooks([Noise("blocks.*.hook_mlp_out", std=1.0)]),
    ):
        _, cache = model.run_with_cache(tokens, names_filter="blocks.0.hook_mlp_out")
    sites = cache["blocks.0.hook_mlp_out"] - clean["mlp_out", 0]
    assert abs(float((sites * first).mean())) < 0.02  # another site


# ---- gradients -------------------------------------------------------------------------------------------------------


class Written(LocalController):
    """The mistake: a value that is written past autograd."""

    def change(self, value: Tensor, hook: Any) -> Tensor:
        value.data.mul_(0.5)
        return value


def small() -> Any:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())


GRADIENTS: dict[str, Callable[[], HookObject]] = {
    "zero": lambda: ZeroAblate("0", positions=1),
    "set": lambda: SetValue("0", value=1.5, features=[0, 3]),
    "scale": lambda: Scale("0", factor=-3, rows=0),
    "clamp": lambda: Clamp("0", min=-0.2, max=0.1),
    "add": lambda: AddDirection("0", vector=numbers(4).double(), schedule=[1, 2], unit=True),
    "project": lambda: ProjectOut("0", vectors=numbers(2, 4).double(), positions=[0, -1]),
    "patch": lambda: Patch("0", source=numbers(2, 3, 4).double(), positions=-1, features=2),
    "mean": lambda: MeanAblate("0", over="batch pos", positions=[0, 2]),
    "resample": lambda: ResampleAblate("0"),
    "noise": lambda: Noise("0", std=0.3, positions=2),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_is_that_of_the_changed_run(name: str):
    """By finite differences."""
    net, x, hook = small(), numbers(2, 3, 3).double().requires_grad_(), GRADIENTS[name]()
    assert torch.autograd.gradcheck(lambda x: net.run_with_hooks(x, fwd_hooks=[hook]), x)


def test_finite_differences_see_a_value_that_is_written_past_autograd():
    net, x = small(), numbers(2, 3, 3).double().requires_grad_()
    with pytest.raises(RuntimeError):
        torch.autograd.gradcheck(lambda x: net.run_with_hooks(x, fwd_hooks=[Written("0")]), x)


@pytest.mark.parametrize(
    ("hook", "gradient"),
    [
        (Scale("1", factor=0.0), 0.0),
        (ZeroAblate("1"), 0.0),
        (SetValue("1", value=7), 0.0),
        (Scale("1", factor=-2), -2.0),
        (AddDirection("1", vector=torch.ones(4, dtype=torch.float64), coefficient=9), 1.0),
        (Clamp("1", min=5), 0.0),
        (FreezeNorm(hook_point="1"), 0.0),
        (Patch("1", source=torch.ones(4, dtype=torch.float64)), 0.0),
    ],
)
def test_gradients_that_are_known(hook: HookObject, gradient: float):
    net, x = small(), numbers(2, 3, 3).double().requires_grad_()
    net.run_with_hooks(x, fwd_hooks=[hook]).sum().backward()
    found, x.grad = x.grad, None
    net(x).sum().backward()
    assert_close(torch.zeros_like(x) if found is None else found, gradient * x.grad, depth=GRADIENT)
    assert x.grad.abs().min() > 1e-3


def test_a_gradient_reaches_the_direction():
    net, vector = small(), numbers(4).double().requires_grad_()
    net.run_with_hooks(
        numbers(2, 3, 3).double(), fwd_hooks=[AddDirection("1", vector=vector, coefficient=2)]
    ).sum().backward()
    assert_close(vector.grad, 2 * 6 * net.module[2].weight.sum(0), depth=GRADIENT)


@torch.no_grad()
def test_the_layer_comes_first_where_the_site_is_known():
    model, text = HookedTransformer.from_pretrained("demo"), "The capital of Italy is"
    _, cache = model.run_with_cache(text)
    for kind, site in ((PatchResidual, "resid_post"), (PatchHead, "z"), (PatchMLP, "mlp_out")):
        hook = kind(3, positions=-1, source=cache)
        assert repr(hook).startswith(f"{kind.__name__}(3, hook_point='{site}', positions=-1, source=")
        assert repr(hook) == repr(kind(layer=3, positions=-1, source=cache)), "the keywords are as they were"
        assert torch.equal(hook.source, cache[site, 3])
        assert_close(hook.source, kind.from_run(model, text, 3, positions=-1).source)
        told = f"first argument of {kind.__name__} is a layer, got 'z': give a site as hook_point"
        with unchecked(), pytest.raises(TypeError, match=told):  # users run without the checks of annotations
            kind("z", source=cache)
    assert repr(FreezeNorm(3, positions=-1)) == "FreezeNorm(hook_point='*.3.*.hook_scale', positions=-1)"
    with pytest.raises(
        TypeError, match=r"takes layer by position and all else by name, got -1 .*\(hook_point, when, positions"
    ):
        PatchResidual(3, -1)
    with pytest.raises(TypeError, match="from_run of PatchResidual takes layer by position"):
        PatchResidual.from_run(model, text, 3, -1, cache)


@torch.no_grad()
def test_from_run_takes_texts_and_refuses_unknown_arguments():
    model, texts = HookedTransformer.from_pretrained("demo"), ("The capital of Italy is", "The capital of France is")
    hook = Patch.from_run(model, texts, "resid_post", 3, positions=-1)
    assert torch.equal(
        hook.source, model.run_with_cache(list(texts), names_filter=("resid_post", 3))[1]["resid_post", 3]
    )
    with pytest.raises(TypeError, match=r"from_run has no argument 'position'; did you mean 'positions'"):
        Patch.from_run(model, texts, "resid_post", 3, position=-1)
    with pytest.raises(TypeError, match=r"of has no argument 'most_call'; did you mean 'most_calls'"):
        InputTokens.of(model, most_call=1)
