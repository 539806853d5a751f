"""Objects on every class of model: default sites, resampling, noise and gradients; rows of a batch as they are alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.hooks import wrap
from hooked_lm.interventions.base import HookObject
from hooked_lm.interventions.controllers import (
    AddDirection,
    AddValue,
    Clamp,
    Noise,
    ProjectOut,
    Scale,
    SetValue,
    SwapDirections,
    ZeroAblate,
)
from hooked_lm.interventions.detectors import NanGradientGuard
from hooked_lm.interventions.gradient_report import GradientReport
from hooked_lm.interventions.gradients import ClipGradient, RecordGradient, ScaleGradient
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
from tests.close import GRADIENT, LAYER, assert_apart, assert_close, assert_near
from tests.interventions.tables import KINDS, POS, VECTOR, D, numbers
from tests.models.toys import ids, padded, toy

# A site before the one of KINDS, on every way to it.
EARLY = {"decoder": "blocks.1.hook_resid_pre", "encoder": "blocks.0.hook_resid_pre"}
EARLY |= {"encoder-decoder": "decoder.0.hook_resid_pre", "module": "0"}


def other(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.flip(0, 1) for x in inputs)


def of_others(kind: str) -> list[Callable[..., Any]]:
    """What takes its values from another run, with the sites of that class of model."""
    if kind == "module":
        return [
            lambda of, run, of_kind=of_kind: of_kind.from_run(of, run[0], hook_point="2", other_inputs=run[1:])
            for of_kind in (PatchHead, FreezeNorm)
        ]
    kinds = (PatchResidual, PatchHead, PatchMLP, FreezeAttention, FreezeNorm)
    return [lambda of, run, of_kind=of_kind: of_kind.from_run(of, run[0], other_inputs=run[1:]) for of_kind in kinds]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_another_run_stand_at_all_default_sites(kind: str):
    make, inputs, _ = KINDS[kind]
    model = make()
    plain, given = model(*inputs), other(inputs)
    for from_run in of_others(kind):
        hook = from_run(model, given)
        sites = model.names(hook.hook_point)
        _, theirs = model.run_with_cache(*given, names_filter=sites)
        with model.hooks([hook]):
            found, cache = model.run_with_cache(*inputs, names_filter=sites)
        assert all(torch.equal(cache[site], theirs[site]) for site in sites)

        def by_hand(value: Tensor, hook: Any, theirs: Any = theirs) -> Tensor:
            return theirs[hook.name].clone()

        assert torch.equal(found, model.run_with_hooks(*inputs, fwd_hooks=[(sites, by_hand)]))
        assert_apart(found, plain, msg=f"the control: {hook} matters")
    assert torch.equal(model(*inputs), plain)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_two_rows_change_places_and_noise_stays_where_it_is_asked_for(kind: str):
    make, inputs, site = KINDS[kind]
    model, two = make(), tuple(x[:2] for x in inputs)
    _, clean = model.run_with_cache(*two)
    with model.hooks([ResampleAblate(site)]):
        found, cache = model.run_with_cache(*two)
    assert torch.equal(cache[site], clean[site].flip(0))
    swapped = (site, lambda value, hook: value.flip(0))
    assert_close(found, model.run_with_hooks(*two, fwd_hooks=[swapped]))

    _, clean = model.run_with_cache(*inputs)
    noise = []
    for seed in (0, 0, 1):
        with model.hooks([Noise(site, std=0.5, seed=seed, positions=[1, -1], rows=[0, 2])]):
            noise.append(model.run_with_cache(*inputs)[1][site] - clean[site])
    assert torch.equal(noise[0], noise[1])
    there = noise[0][[0, 2]][:, [1, POS - 1]]
    assert_near(there.std(), 0.5, 0.2, because="a deviation of few draws")
    assert abs(float((there * noise[2][[0, 2]][:, [1, POS - 1]]).mean())) < 0.1  # another seed
    noise[0][torch.tensor([0, 2])[:, None], [1, POS - 1]] = 0
    assert not noise[0].any()
    assert torch.equal(model.run_with_cache(*inputs)[1][site], clean[site])
    assert not any(point.is_listening for point in model.hook_points())


@torch.no_grad()
def test_the_norms_of_one_layer_are_held():
    make, inputs, _ = KINDS["encoder-decoder"]
    model = make()
    hook = FreezeNorm.from_run(model, other(inputs)[0], layer=1, other_inputs=other(inputs)[1:])
    assert sorted(hook.source) == sorted(
        name for name in model.all_points() if ".1.ln" in name and "hook_scale" in name
    )


# ---- gradients -------------------------------------------------------------------------------------------------------


def by_autograd(
    model: Any, inputs: tuple[Tensor, ...], early: str, site: str
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The gradient at a site, and what carries a gradient from there to the early site; no hook on a gradient has a part."""
    kept: dict[str, Tensor] = {}

    def begin(value: Tensor, hook: Any) -> Tensor:
        kept[hook.name] = value.detach().requires_grad_()
        return kept[hook.name]

    def keep(value: Tensor, hook: Any) -> Tensor:
        kept[hook.name] = value
        return value

    loss = model.run_with_hooks(*inputs, fwd_hooks=[(early, begin), (site, keep)]).square().sum()
    [gradient] = torch.autograd.grad(loss, kept[site], retain_graph=True)
    return gradient, lambda g: torch.autograd.grad(kept[site], kept[early], g, retain_graph=True)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_recorded_scaled_clipped_and_guarded(kind: str):
    make, inputs, site = KINDS[kind]
    model, early = make(), EARLY[kind]
    gradient, back = by_autograd(model, inputs, early, site)

    def run(*hooks: Any) -> tuple[Tensor, Tensor]:
        here, before = RecordGradient(site), RecordGradient(early)
        with model.hooks([before, *hooks, here]):
            model(*inputs).square().sum().backward()
        model.zero_grad()
        return here.stacked()[0], before.stacked()[0]

    def halved(g: Tensor) -> Tensor:
        g = g.clone()
        g[1, [0, 2], 3:5] *= 0.5
        return g

    limit = float(gradient.flatten(1).norm(dim=1).median())
    lengths = gradient.flatten(1).norm(dim=1)[:, None, None]
    cases: list[tuple[HookObject | None, Tensor]] = [
        (None, gradient),
        (ScaleGradient(site, factor=0.5, rows=1, positions=[0, 2], features=[3, 4]), halved(gradient)),
        (ClipGradient(site, max_norm=limit), gradient * (limit / lengths).clamp(max=1)),
        (ClipGradient(site, max_value=limit / 20), gradient.clip(-limit / 20, limit / 20)),
        (NanGradientGuard(site), gradient),
    ]
    for hook, expected in cases:
        found, carried = run(*([] if hook is None else [hook]))
        assert_close(found, expected)
        assert_close(carried, back(expected))
    assert all((expected - gradient).abs().max() > 1e-3 for _, expected in cases[1:4]), "the control: they matter"
    assert not any(point.is_listening for point in model.hook_points())

    report = GradientReport([early, site])
    with model.hooks([report]):
        model(*inputs).square().sum().backward()
    model.zero_grad()
    table = report.to_dataframe().set_index("site")
    assert_close(table["rms"][site], gradient.square().mean().sqrt().item(), depth=GRADIENT)
    assert_close(table["rms"][early], back(gradient).square().mean().sqrt().item(), depth=GRADIENT)
    with pytest.raises(ValueError, match=f"the gradient at '{site}' is NaN at"), model.hooks([NanGradientGuard(site)]):
        (model(*inputs) * torch.nan).sum().backward()
    model.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_their_hooks_do_nothing(kind: str):
    make, inputs, site = KINDS[kind]
    model, record = make(), RecordGradient(site)
    hooks = [ScaleGradient(site, factor=3), ClipGradient(site, max_norm=1e-9), GradientReport(site), record]
    assert torch.equal(model.run_with_hooks(*inputs, fwd_hooks=hooks), model(*inputs))
    assert record.values == {}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_long_gradients_of_any_precision_are_clipped(dtype: torch.dtype):
    """Their squares, and their sum, are beyond what half precision holds."""
    net, x = wrap(nn.Sequential(nn.Identity())), torch.zeros(2, 10_000, dtype=dtype, requires_grad=True)
    large = 1e37 if dtype == torch.float32 else 1000.0
    with net.hooks([ClipGradient("0", max_norm=1.0)]):
        y = net(x)
    y.backward(torch.stack([torch.full((10_000,), large), torch.zeros(10_000)]).to(dtype))
    expected = torch.stack([torch.full((10_000,), 0.01), torch.zeros(10_000)])
    assert_close(x.grad, expected, depth=LAYER, dtype=dtype)


# ---- batches ---------------------------------------------------------------------------------------------------------

SITE = "blocks.1.hook_resid_post"
BY_ROW: list[HookObject] = [
    ZeroAblate(SITE, features=range(9)),
    SetValue(SITE, value=VECTOR, positions=[0, 2]),
    AddValue(SITE, value=VECTOR, positions=slice(3)),
    Scale(SITE, factor=-2, positions=1),
    Clamp(SITE, min=-5, max=9),
    AddDirection(SITE, vector=VECTOR, schedule=[1, 3, 2, 5]),
    ProjectOut(SITE, vectors=numbers(2, D)),
    SwapDirections(SITE, vectors=numbers(2, D)),
    Patch(SITE, source=numbers(4, D), positions=[3, 1]),
    PatchResidual(layer=1, source=VECTOR),
    PatchHead(layer=1, source=numbers(4, 8), heads=[0, 2]),
    PatchMLP(layer=1, source=numbers(2, D), positions=[0, 1]),
    FreezeAttention(layer=1, source=torch.full((1, 1, 1, 1), 0.25), rest=(None, range(4))),
    FreezeNorm(layer=1, source=torch.full((1, 1, 1), 0.5)),
    MeanAblate(SITE, over="pos", source=numbers(1, 4, D)),
    ResampleAblate(SITE, source=numbers(1, 4, D), positions=range(4)),
]


@torch.no_grad()
@pytest.mark.parametrize("hook", BY_ROW, ids=lambda hook: type(hook).__name__)
def test_a_row_of_a_batch_is_as_it_is_alone(hook: HookObject):
    """Rows of one length, and padded on the right."""
    model = toy("rotary")
    rows = [ids(1, n, seed=n)[0] for n in (6, 4, 5)]
    tokens, mask = padded(rows, "right")
    together = model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[hook])
    even = model.run_with_hooks(ids(3, 4), fwd_hooks=[hook])
    for i, row in enumerate(rows):
        alone = model.run_with_hooks(row[None], fwd_hooks=[hook])
        assert_close(together[i, : len(row)], alone[0])
        assert_apart(alone, model(row[None]), msg="the control: it matters")
        assert_close(even[i], model.run_with_hooks(ids(3, 4)[i : i + 1], fwd_hooks=[hook])[0])


@torch.no_grad()
def test_the_end_of_a_padded_row_is_said_row_by_row():
    """Outside of generation positions are columns: the last one of a shorter row is padding."""
    model = toy("rotary")
    rows = [ids(1, n, seed=n)[0] for n in (6, 4)]
    tokens, mask = padded(rows, "right")
    hooks = [AddDirection(SITE, vector=VECTOR, rows=i, positions=len(row) - 1) for i, row in enumerate(rows)]
    found = model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=hooks)
    for i, row in enumerate(rows):
        alone = model.run_with_hooks(row[None], fwd_hooks=[AddDirection(SITE, vector=VECTOR, positions="last_prompt")])
        assert_close(found[i, : len(row)], alone[0])


# ---- modules that are called several times ---------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.shared(x)))


@torch.no_grad()
def test_each_call_of_a_module_is_given_its_own_values():
    torch.manual_seed(0)
    net, x, given = wrap(Twice()), numbers(2, 4, 3), numbers(2, 4, 3, seed=1)
    _, cache = net.run_with_cache(given)
    assert list(cache) == ["shared", "shared@1"]
    for hook in (Patch.from_run(net, given, "shared"), Patch("shared", source=cache)):
        with net.hooks([hook]):
            found, seen = net.run_with_cache(x)
        assert torch.equal(found, net(given))
        assert all(torch.equal(seen[name], cache[name]) for name in cache)
    assert not torch.equal(net(x), net(given))
