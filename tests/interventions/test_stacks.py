"""Stacks of hook objects, drawn at random, are their application one after the other by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hooked_lm.hooks import wrap
from hooked_lm.interventions.base import Detector, HookObject
from hooked_lm.interventions.controllers import AddDirection, Clamp, ProjectOut, Scale, SetValue, ZeroAblate
from hooked_lm.interventions.gradients import ClipGradient, ScaleGradient
from hooked_lm.interventions.patch import MeanAblate, Patch, ResampleAblate
from tests.close import GRADIENT, assert_apart, assert_close

BATCH, POS, D = 3, 4, 5
SITES = ("0", "1", "2", "3")
Step = tuple[str, HookObject, Callable[[np.ndarray], np.ndarray]]  # a site, an object there, and the same by hand


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


VECTOR, OTHER, SOURCE = numbers(D, seed=1), numbers(D, seed=2), numbers(BATCH, POS, D, seed=3)
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh()).double().requires_grad_(False)
MODEL, INPUT = wrap(NET), numbers(BATCH, POS, D)


class Watch(Detector):
    """Keeps what it is shown, and writes into it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: list[Tensor] = []

    def see(self, value: Any, hook: Any) -> None:
        self.seen.append(value.clone())


class Meddler(Detector):
    """Writes into all that it is shown, which must change nothing."""

    def see(self, value: Any, hook: Any) -> None:
        value.data.fill_(9)


def without(value: np.ndarray, vector: Tensor) -> np.ndarray:
    v = vector.numpy()
    return value - (value @ v)[..., None] * v / (v @ v)


# An object that changes a part, and what it makes of a whole value [batch, pos, D].
WHOLE: dict[str, tuple[Callable[..., HookObject], Callable[[np.ndarray], np.ndarray]]] = {
    "zero": (ZeroAblate, np.zeros_like),
    "set": (lambda site, **where: SetValue(site, value=-0.7, **where), lambda v: np.full_like(v, -0.7)),
    "scale": (lambda site, **where: Scale(site, factor=-1.5, **where), lambda v: -1.5 * v),
    "clamp": (lambda site, **where: Clamp(site, min=-0.3, max=0.4, **where), lambda v: v.clip(-0.3, 0.4)),
    "add": (
        lambda site, **where: AddDirection(site, vector=VECTOR, coefficient=2, **where),
        lambda v: v + 2 * VECTOR.numpy(),
    ),
    "patch": (
        lambda site, **where: Patch(site, source=SOURCE, **where),
        lambda v: SOURCE.numpy().copy(),
    ),
    "mean": (MeanAblate, lambda v: np.broadcast_to(v.mean(0), v.shape)),
    "mean of all": (
        lambda site, **where: MeanAblate(site, over="batch pos", **where),
        lambda v: np.broadcast_to(v.mean((0, 1)), v.shape),
    ),
    "project": (lambda site, **where: ProjectOut(site, vectors=OTHER, **where), lambda v: without(v, OTHER)),
}


def some(n: int) -> st.SearchStrategy[Any]:
    """An index of an axis of length n: none, a number, or several of them."""
    return st.none() | st.integers(-n, n - 1) | st.lists(st.integers(-n, n - 1), min_size=1, max_size=n)


def mask_of(n: int, index: Any) -> np.ndarray:
    mask = np.zeros(n, dtype=bool)
    mask[slice(None) if index is None else index] = True
    return mask


DRAWN = st.fixed_dictionaries(
    {
        "site": st.sampled_from(SITES),
        "kind": st.sampled_from(sorted(WHOLE)),
        "rows": some(BATCH),
        "positions": some(POS),
        "features": some(D),
        "is_enabled": st.sampled_from([True, True, True, False]),
    }
)


def step(site: str, kind: str, rows: Any, positions: Any, features: Any, is_enabled: bool) -> Step:
    make, whole = WHOLE[kind]
    features = None if kind == "project" else features  # it takes all of them
    hook = make(site, rows=rows, positions=positions, features=features)
    hook.is_enabled = is_enabled
    part = mask_of(BATCH, rows)[:, None, None] & mask_of(POS, positions)[:, None] & mask_of(D, features)
    return site, hook, lambda value: np.where(part, whole(value), value) if is_enabled else value


def by_hand(stack: list[Step]) -> dict[str, np.ndarray]:
    """Layer by layer with NumPy: the value at each site after all that is there."""
    values, x = {}, INPUT.numpy()
    for site, layer in zip(SITES, NET, strict=True):
        x = np.tanh(x) if isinstance(layer, nn.Tanh) else x @ layer.weight.numpy().T + layer.bias.numpy()
        for at, _, change in stack:
            x = change(x) if at == site else x
        values[site] = x
    return values


@given(st.lists(DRAWN, max_size=8))
@settings(max_examples=60)
def test_a_stack_is_its_objects_one_after_the_other(drawn: list[dict[str, Any]]):
    stack = [step(**one) for one in drawn]
    watchers = [Watch(site) for site in SITES]
    early = [Watch(site) for site in SITES]
    with MODEL.hooks([*early, *[hook for _, hook, _ in stack], *watchers]):
        found = MODEL(INPUT)
    expected = by_hand(stack)
    for watcher in watchers:
        assert_close(watcher.seen[0].numpy(), expected[str(watcher.hook_point)])
    assert_close(found.numpy(), expected[SITES[-1]])
    assert all(len(watcher.seen) == 1 for watcher in (*early, *watchers))
    assert torch.equal(MODEL(INPUT), NET(INPUT))


@given(st.lists(DRAWN, max_size=6))
@settings(max_examples=30)
def test_how_a_stack_is_given_does_not_matter(drawn: list[dict[str, Any]]):
    """In one list, in nested blocks, registered, or written down and read again."""
    objects = [step(**one)[1] for one in drawn]
    expected = MODEL.run_with_hooks(INPUT, fwd_hooks=objects)

    def nested(rest: list[HookObject]) -> Tensor:
        if not rest:
            return MODEL(INPUT)
        with MODEL.hooks(rest[:1]):
            return nested(rest[1:])

    assert torch.equal(nested(objects), expected)
    numbers = [MODEL.register(hook) for hook in objects]
    try:
        assert torch.equal(MODEL(INPUT), expected)
    finally:
        for number in numbers:
            MODEL.unregister(number)
    again = [HookObject.from_dict(hook.to_dict()) for hook in objects]
    for before, after in zip(objects, again, strict=True):
        after.is_enabled = before.is_enabled
    assert torch.equal(MODEL.run_with_hooks(INPUT, fwd_hooks=again), expected)
    assert torch.equal(MODEL(INPUT), NET(INPUT))


# ---- gradients -------------------------------------------------------------------------------------------------------

Back = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]  # of a gradient, the part and the old value


def outside(gradient: np.ndarray, part: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.where(part, 0, gradient)


def of_mean(axes: Any) -> Back:
    """A mean has its gradient from every place that it was put to, and hands it on to all that it is of."""

    def back(gradient: np.ndarray, part: np.ndarray, value: np.ndarray) -> np.ndarray:
        inside = np.where(part, gradient, 0).sum(axes, keepdims=True)
        return np.where(part, 0, gradient) + inside / np.prod([value.shape[axis] for axis in np.atleast_1d(axes)])

    return back


# What each of WHOLE makes of the gradient that comes back to it.
BACK: dict[str, Back] = {
    "zero": outside,
    "set": outside,
    "patch": outside,
    "scale": lambda g, part, v: np.where(part, -1.5 * g, g),
    "clamp": lambda g, part, v: np.where(part & ((v < -0.3) | (v > 0.4)), 0, g),
    "add": lambda g, part, v: g,
    "mean": of_mean(0),
    "mean of all": of_mean((0, 1)),
    "project": lambda g, part, v: np.where(part, without(g, OTHER), g),
}


def clipped(gradient: np.ndarray, part: np.ndarray) -> np.ndarray:
    """By the length of the part, row by row."""
    lengths = np.sqrt((np.where(part, gradient, 0) ** 2).sum((1, 2), keepdims=True))
    return np.where(part & (lengths > 0.2), gradient * 0.2 / np.maximum(lengths, 1e-300), gradient)


# An object on gradients, and what it makes of one.
ON_GRADIENTS: dict[str, tuple[Callable[..., HookObject], Callable[[np.ndarray, np.ndarray], np.ndarray]]] = {
    "scale gradient": (
        lambda site, **where: ScaleGradient(site, factor=-2, **where),
        lambda g, part: np.where(part, -2 * g, g),
    ),
    "clip by value": (
        lambda site, **where: ClipGradient(site, max_value=0.05, **where),
        lambda g, part: np.where(part, g.clip(-0.05, 0.05), g),
    ),
    "clip by length": (lambda site, **where: ClipGradient(site, max_norm=0.2, **where), clipped),
}
WITH_GRADIENTS = st.fixed_dictionaries(
    {
        "site": st.sampled_from(SITES),
        "kind": st.sampled_from([*sorted(WHOLE), *sorted(ON_GRADIENTS), *sorted(ON_GRADIENTS)]),
        "rows": some(BATCH),
        "positions": some(POS),
        "features": some(D),
        "is_enabled": st.sampled_from([True, True, True, False]),
        "when": st.sampled_from(["post", "post", "pre"]),
    }
)


@dataclass
class Placed:
    """A drawn object, with what it needs to be done by hand."""

    site: str
    kind: str
    hook: HookObject
    part: np.ndarray

    @classmethod
    def of(
        cls, site: str, kind: str, rows: Any, positions: Any, features: Any, is_enabled: bool, when: str
    ) -> "Placed":
        features = None if kind == "project" else features
        make = (WHOLE | ON_GRADIENTS)[kind][0]  # type: ignore[operator]
        hook = make(site, rows=rows, positions=positions, features=features, when=when)
        hook.is_enabled = is_enabled
        part = mask_of(BATCH, rows)[:, None, None] & mask_of(POS, positions)[:, None] & mask_of(D, features)
        return cls(site if when == "post" else f"{site}.input", kind, hook, part)

    @property
    def is_on_gradients(self) -> bool:
        return self.kind in ON_GRADIENTS


def gradient_by_hand(stack: list[Placed], upstream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The output, and the gradient at the input: forward with NumPy, noting every step, and backward through the steps.

    At a site the values are changed first; then those on gradients see that of what is left, one after the other.
    """
    x, steps = INPUT.numpy(), []

    def pass_site(x: np.ndarray, site: str) -> np.ndarray:
        there = [one for one in stack if one.site == site and one.hook.is_enabled]
        for one in [one for one in there if not one.is_on_gradients]:
            steps.append(lambda g, one=one, old=x: BACK[one.kind](g, one.part, old))
            x = np.where(one.part, WHOLE[one.kind][1](x), x)
        on_gradients = [one for one in there if one.is_on_gradients][::-1]  # steps are gone through from the end
        steps.extend(lambda g, one=one: ON_GRADIENTS[one.kind][1](g, one.part) for one in on_gradients)
        return x

    for site, layer in zip(SITES, NET, strict=True):
        x = pass_site(x, f"{site}.input")
        if isinstance(layer, nn.Tanh):
            x = np.tanh(x)
            steps.append(lambda g, y=x: g * (1 - y**2))
        else:
            x = x @ layer.weight.numpy().T + layer.bias.numpy()
            steps.append(lambda g, layer=layer: g @ layer.weight.numpy())
        x = pass_site(x, site)
    for back in reversed(steps):
        upstream = back(upstream)
    return x, upstream


@pytest.mark.slow
@given(st.lists(WITH_GRADIENTS, max_size=8))
@settings(max_examples=80)
def test_a_stack_with_gradients_is_its_objects_one_after_the_other(drawn: list[dict[str, Any]]):
    stack, x, upstream = (
        [Placed.of(**one) for one in drawn],
        INPUT.clone().requires_grad_(),
        numbers(*INPUT.shape, seed=9),
    )
    meddlers = [Meddler(site) for site in SITES]
    with MODEL.hooks([*[one.hook for one in stack], *meddlers], bwd_hooks=meddlers):
        found = MODEL(x)
    expected, gradient = gradient_by_hand(stack, upstream.numpy())
    assert_close(found.detach().numpy(), expected)
    if found.requires_grad:
        found.backward(upstream)
    assert_close(torch.zeros_like(x).numpy() if x.grad is None else x.grad.numpy(), gradient, depth=GRADIENT)


def test_the_gradient_of_the_plain_net_is_another():
    """The control: each kind on gradients shows."""
    upstream = numbers(*INPUT.shape, seed=9).numpy()
    _, plain = gradient_by_hand([], upstream)
    for kind in ON_GRADIENTS:
        one = Placed.of("1", kind, None, [0, 2], None, True, "post")
        assert np.abs(gradient_by_hand([one], upstream)[1] - plain).max() > 1e-3


def test_the_order_of_a_stack_matters():
    """The control: two that do not commute."""
    objects = [Scale("2", factor=2), AddDirection("2", vector=VECTOR), ResampleAblate("2")]
    one, other = (MODEL.run_with_hooks(INPUT, fwd_hooks=stack) for stack in (objects, objects[::-1]))
    assert_apart(one, other)
