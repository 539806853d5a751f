"""What clients of the known interface rely on about hooks: their kinds, order, levels, state, and nesting."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer
from tests.close import assert_apart, assert_close, assert_near
from tests.models.toys import ids, toy

TOKENS = ids(batch=2, n_pos=6)
SITE = "blocks.1.hook_resid_pre"


@pytest.fixture
def model() -> HookedTransformer:
    return toy()


# ---- every kind of function ------------------------------------------------------------------------------------------


def plain(value: Tensor, hook: Any) -> Tensor:
    return 2 * value


def with_settings(value: Tensor, hook: Any, factor: float, also: float = 0.0) -> Tensor:
    return factor * value + also


class Holder(nn.Module):
    """A method, an object that is called, and a module whose `forward` is the hook."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0))

    def method(self, value: Tensor, hook: Any) -> Tensor:
        return self.factor.detach() * value

    def forward(self, value: Tensor, hook: Any) -> Tensor:
        return self.factor * value


KINDS: dict[str, Callable[..., Any]] = {
    "function": plain,
    "keyword partial": functools.partial(with_settings, factor=2.0),
    "positional lambda": lambda value, hook: 2 * value,
    "lambda with a default": lambda value, hook, factor=2: factor * value,
    "lambda with another name": lambda act, _point: 2 * act,
    "keywords alone": lambda value, *, hook: 2 * value,
    "any keywords": lambda value, **rest: 2 * value,
    "method": Holder().method,
    "module": Holder(),
    "in place": lambda value, hook: value.mul_(2),
    "in place, without an answer": lambda value, hook: value.mul_(2).size() and None,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_function_is_a_hook(model: HookedTransformer, kind: str) -> None:
    expected = model(2 * model(TOKENS, stop_at_layer=1), start_at_layer=1, tokens=TOKENS)
    assert_close(model.run_with_hooks(TOKENS, fwd_hooks=[(SITE, KINDS[kind])]), expected)
    model.add_hook(SITE, KINDS[kind])
    assert_close(model(TOKENS), expected)
    model.reset_hooks()
    assert_apart(model(TOKENS), expected)


def test_a_module_as_a_hook_is_trained_through(model: HookedTransformer) -> None:
    holder = Holder()
    model.run_with_hooks(TOKENS, return_type="loss", fwd_hooks=[(SITE, holder)]).backward()
    step = 1e-2
    losses = []
    for sign in (1, -1):
        moved = functools.partial(with_settings, factor=2.0 + sign * step)
        losses.append(model.run_with_hooks(TOKENS, return_type="loss", fwd_hooks=[(SITE, moved)]))
    assert holder.factor.grad is not None
    assert_near(
        holder.factor.grad,
        (losses[0] - losses[1]) / (2 * step),
        0.02,
        because="a difference quotient in float32, not a slope",
    )


@pytest.mark.parametrize(
    ("site", "n"),
    [
        (SITE, 1), ("resid_pre1", 1), (lambda name: name.endswith("hook_z"), 3), ("blocks.*.hook_resid_pre", 3),
        ([SITE, "blocks.0.attn.hook_z"], 2), (("resid_pre", 1), 1), ("blocks.1.hook_in", 1),
    ],
)  # fmt: skip
def test_sites_of_hooks(model: HookedTransformer, site: Any, n: int) -> None:
    seen: list[str] = []

    def note(value: Tensor, hook: Any) -> None:
        seen.append(hook.name)

    model.run_with_hooks(TOKENS, fwd_hooks=[(site, note)])
    assert len(seen) == len(set(seen)) == n
    model.add_hook(site, note)
    model(TOKENS)
    assert len(seen) == 2 * n


# ---- order, levels, permanence ---------------------------------------------------------------------------------------


def test_order_and_prepend(model: HookedTransformer) -> None:
    order: list[str] = []

    def named(name: str) -> Callable[..., None]:
        return lambda value, hook: order.append(name)

    model.add_hook(SITE, named("first"))
    model.add_hook(SITE, named("before it"), prepend=True)
    model.hook_dict[SITE].add_perma_hook(named("permanent"))
    with model.hooks(fwd_hooks=[(SITE, named("scoped"))]):
        model.add_hook(SITE, named("level"), level=model.context_level)
        model(TOKENS)
    assert order == ["before it", "first", "permanent", "scoped", "level"]
    order.clear()
    model(TOKENS)
    assert order == ["before it", "first", "permanent"]
    model.reset_hooks()
    order.clear()
    model(TOKENS)
    assert order == ["permanent"]
    model.reset_hooks(including_permanent=True)
    model(TOKENS)
    assert order == ["permanent"]


def test_levels(model: HookedTransformer) -> None:
    def there() -> list[int | None]:
        return [handle.context_level for handle in model.hook_dict[SITE].fwd_hooks]

    model.add_hook(SITE, plain)
    assert model.context_level == 0
    with model.hooks(fwd_hooks=[(SITE, plain)]):
        assert model.context_level == 1
        model.add_hook(SITE, plain, level=1)
        with model.hooks(fwd_hooks=[(SITE, plain)]):
            assert model.context_level == 2
            model.add_hook(SITE, plain, level=2)
            assert sorted(map(str, there())) == sorted(map(str, [None, 1, 1, 2, 2]))
            model.reset_hooks(level=1)
            assert sorted(map(str, there())) == sorted(map(str, [None, 2, 2]))
        assert there() == [None]
    assert there() == [None]
    assert model.context_level == 0


def test_directions_and_permanence_of_a_reset(model: HookedTransformer) -> None:
    point = model.hook_dict[SITE]
    model.add_hook(SITE, plain, dir="fwd")
    model.add_hook(SITE, plain, dir="bwd")
    model.add_perma_hook(SITE, plain, dir="bwd")
    model.reset_hooks(direction="fwd")
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (0, 2)
    model.reset_hooks()
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (0, 1)
    point.remove_hooks("both", including_permanent=True)
    assert not point.has_hooks()


def test_handles_can_be_taken_away(model: HookedTransformer) -> None:
    expected = model(TOKENS)
    point = model.hook_dict[SITE]
    point.add_hook(plain)
    (handle,) = point.fwd_hooks
    assert (handle.user_hook, handle.is_permanent, handle.context_level) == (plain, False, None)
    handle.hook.remove()
    assert_close(model(TOKENS), expected)
    assert not point.has_hooks()


def test_one_function_under_other_names(model: HookedTransformer) -> None:
    seen: list[str] = []
    model.hook_dict[SITE].add_hook(lambda value, hook: seen.append(hook.name), alias_names=["one", "two"])
    model(TOKENS)
    assert seen == ["one", "two"]


# ---- hooks within hooks ----------------------------------------------------------------------------------------------


def test_a_hook_may_run_the_model(model: HookedTransformer) -> None:
    """The inner run uses the hooks of its context and the enclosing ones; the outer run is not affected."""
    inner: list[Tensor] = []
    expected = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_z", plain)])
    alone = model(TOKENS)

    def run(value: Tensor, hook: Any) -> None:
        if not inner:
            inner.append(torch.empty(0))  # the inner run comes past here too
            inner[0] = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_z", plain)])

    outer = model.run_with_hooks(TOKENS, fwd_hooks=[(SITE, run)])
    assert_close(inner[0], expected)
    assert_close(outer, alone)
    assert not any(point.has_hooks() for point in model.hook_points())


def test_a_hook_may_add_hooks(model: HookedTransformer) -> None:
    """Behind it they act in the same run; at a level they go when its context ends."""
    expected = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.2.hook_resid_pre", plain)])
    alone = model(TOKENS)

    def add(value: Tensor, hook: Any) -> None:
        model.add_hook("blocks.2.hook_resid_pre", plain, level=model.context_level)

    assert_close(model.run_with_hooks(TOKENS, fwd_hooks=[(SITE, add)]), expected)
    assert_close(model(TOKENS), alone)


def test_state_in_ctx(model: HookedTransformer) -> None:
    """From one site to another, and until it is cleared."""

    def keep(value: Tensor, hook: Any) -> None:
        hook.ctx["seen"] = hook.ctx.get("seen", 0) + 1
        hook.ctx["value"] = value

    def use(value: Tensor, hook: Any) -> Tensor:
        return model.hook_dict[SITE].ctx["value"]

    hooks = [(SITE, keep), ("blocks.1.hook_resid_post", use)]
    skipping = model(model(TOKENS, stop_at_layer=1), start_at_layer=2, tokens=TOKENS)
    with model.hooks(fwd_hooks=hooks):
        assert_close(model(TOKENS), skipping)
        model(TOKENS)
    assert model.hook_dict[SITE].ctx["seen"] == 2
    model.run_with_hooks(TOKENS, fwd_hooks=hooks, clear_contexts=True)
    assert model.hook_dict[SITE].ctx == {}
    model.hook_dict[SITE].ctx["left"] = 1
    model.reset_hooks(clear_contexts=False)
    assert model.hook_dict[SITE].ctx == {"left": 1}
    model.reset_hooks()
    assert model.hook_dict[SITE].ctx == {}


def test_gradient_hooks_that_answer(model: HookedTransformer) -> None:
    """As a tensor or as a tuple of one, as other libraries have it."""
    model.requires_grad_(True)
    grads = []
    for answer in (lambda grad, hook: 0 * grad, lambda grad, hook: (0 * grad,), lambda grad, hook: None):
        model.zero_grad()
        model.run_with_hooks(TOKENS, return_type="loss", bwd_hooks=[("blocks.0.hook_resid_pre", answer)]).backward()
        grads.append(model.embed.W_E.grad)
    assert grads[0] is not None
    assert not grads[0].any()
    assert not grads[1].any()
    assert grads[2].any()


# ---- the flags of a config -------------------------------------------------------------------------------------------

FLAGS = {
    "use_attn_result": ["blocks.0.attn.hook_result"],
    "use_attn_in": ["blocks.0.hook_attn_in"],
    "use_hook_mlp_in": ["blocks.0.hook_mlp_in"],
    "use_split_qkv_input": [f"blocks.0.hook_{part}_input" for part in "qkv"],
    "use_hook_tokens": ["hook_tokens"],
}


@pytest.mark.parametrize("how", ["when it is built", "as an attribute", "by its setter"])
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_are_read_when_they_are_used(how: str, flag: str) -> None:
    model = toy("standard", **({flag: True} if how == "when it is built" else {}))
    if how == "as an attribute":
        setattr(model.cfg, flag, True)
    elif how == "by its setter" and flag != "use_hook_tokens":
        getattr(model, f"set_{flag}")(True)
    elif how == "by its setter":
        return
    _, cache = model.run_with_cache(TOKENS)
    assert all(name in cache.keys() for name in FLAGS[flag])  # noqa: SIM118 - the names themselves
    setattr(model.cfg, flag, False)
    _, cache = model.run_with_cache(TOKENS)
    assert not any(name in cache.keys() for name in FLAGS[flag])  # noqa: SIM118


@pytest.mark.parametrize("how", ["when it is built", "as an attribute", "by its setter"])
def test_grouped_heads_are_taken_apart_by_the_same_flag(how: str) -> None:
    flag = "ungroup_grouped_query_attention"
    model = toy("rotary", **({flag: True} if how == "when it is built" else {}))
    if how == "as an attribute":
        model.cfg.ungroup_grouped_query_attention = True
    elif how == "by its setter":
        model.set_ungroup_grouped_query_attention(True)
    logits, cache = model.run_with_cache(TOKENS)
    assert cache["k", 1].shape == cache["v", 1].shape == (2, 6, 4, 8)
    model.cfg.ungroup_grouped_query_attention = False
    together, cache = model.run_with_cache(TOKENS)
    assert cache["k", 1].shape == (2, 6, 2, 8)
    assert_close(logits, together)


def test_a_config_takes_names_of_its_users(model: HookedTransformer) -> None:
    model.cfg.run_name = "mine"  # type: ignore[attr-defined]
    assert model.cfg.to_dict()["run_name"] == "mine"
    model.to("cpu")
    model.process_weights_()
    assert model.cfg.run_name == "mine"  # type: ignore[attr-defined]
