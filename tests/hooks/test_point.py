"""HookPoint: what a hook is called with, what it may return, the order, gradients, copies, PyTorch's own hooks."""

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.hooks import HookedRootModule, HookPoint, is_listening
from hooked_lm.hooks.point import hook_if_listening
from tests.close import GRADIENT, assert_close
from tests.hooks.nets import BARE, DIMS, SITES, assert_no_hook_left, net, some_input


def doubled(value: Tensor, hook: HookPoint) -> Tensor:
    return 2 * value


def named_point() -> HookPoint:
    point = HookPoint("batch", "d_model")
    point.name = "layer.3.out"
    return point


# ---- what a hook does to the value -----------------------------------------------------------------------------


def test_none_replacement_and_edits_in_place() -> None:
    def in_place(value: Tensor, hook: HookPoint) -> None:
        value[0] = 7

    def in_place_returned(value: Tensor, hook: HookPoint) -> Tensor:
        return value.add_(1)

    for functions, expected in [
        ([lambda value, hook: None], [1.0, 1.0]),
        ([doubled], [2.0, 2.0]),
        ([in_place], [7.0, 1.0]),
        ([in_place_returned], [2.0, 2.0]),
        ([in_place, doubled, in_place_returned], [15.0, 3.0]),
    ]:
        point = named_point()
        for function in functions:
            point.add_hook(function)
        assert point(torch.ones(2)).tolist() == expected


def test_registration_order_prepend_permanent() -> None:
    point, seen = named_point(), []

    def add(name: str, **options: Any) -> None:
        point.add_hook(lambda value, hook: seen.append(name), **options)

    add("a")
    add("b", is_permanent=True)
    add("c", prepend=True)
    add("d", prepend=True)
    point(torch.ones(1))
    assert seen == ["d", "c", "a", "b"]
    seen.clear()
    point.remove_hooks()
    point(torch.ones(1))
    assert seen == ["b"]
    point.remove_hooks(including_permanent=True)
    assert not point.has_hooks()


def test_a_scoped_hook_runs_in_registration_order_among_those_added_by_hand() -> None:
    model, seen = net(), []
    model.hook_in.add_hook(lambda value, hook: seen.append("hand before"))
    with model.hooks([("hook_in", lambda value, hook: seen.append("scope"))]):
        model.hook_in.add_hook(lambda value, hook: seen.append("hand after"))
        model.hook_in.add_hook(lambda value, hook: seen.append("first"), prepend=True)
        model(some_input())
    assert seen == ["first", "hand before", "scope", "hand after"]


class Doubler:
    def __call__(self, value: Tensor, site: HookPoint) -> Tensor:
        assert isinstance(site, HookPoint)
        return 2 * value

    def method(self, value: Tensor, hook: HookPoint) -> Tensor:
        return self(value, hook)

    @staticmethod
    def static(value: Tensor, x: HookPoint, /) -> Tensor:
        return Doubler()(value, x)


def by_keyword(value: Tensor, *, hook: HookPoint) -> Tensor:
    return Doubler()(value, hook)


def with_more(value: Tensor, point: HookPoint, factor: int = 2, **kwargs: Any) -> Tensor:
    assert isinstance(point, HookPoint)
    assert not kwargs
    return factor * value


def hook_last(value: Tensor, factor: int = 2, hook: HookPoint | None = None) -> Tensor:
    assert isinstance(hook, HookPoint)
    return factor * value


class Module(nn.Module):
    def forward(self, value: Tensor, point: HookPoint) -> Tensor:
        return Doubler()(value, point)


@pytest.mark.parametrize(
    "function",
    [
        doubled,
        by_keyword,
        with_more,
        hook_last,
        Doubler(),
        Doubler().method,
        Doubler.static,
        Module(),
        lambda value, anything: Doubler()(value, anything),
        lambda value, **kwargs: Doubler()(value, kwargs["hook"]),
        lambda *args: Doubler()(*args),
        lambda value, *rest: Doubler()(value, *rest),
        functools.partial(with_more, factor=2),
        functools.partial(lambda n, value, hook: n * value, 2),
        functools.partial(functools.partial(hook_last, factor=2)),
    ],
)
def test_the_point_is_the_second_argument_whatever_its_name(function: Any) -> None:
    point = named_point()
    point.add_hook(function)
    assert point(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "function",
    ["text", None, 3, lambda: None, lambda value: value, lambda value, hook, more: value, nn.Linear(2, 2)],
)
def test_what_cannot_be_called_as_a_hook_is_refused_at_once(function: Any) -> None:
    point = named_point()
    with pytest.raises(TypeError, match="hook"):
        point.add_hook(function)
    assert not point._hooks


def test_an_error_of_the_hook_itself_is_not_touched() -> None:
    point = named_point()
    point.add_hook(lambda value, hook: hook.no_such_attribute)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        point(torch.ones(2))


# ---- what does not fit -----------------------------------------------------------------------------------------

MISFITS: list[tuple[Any, type[Exception], str]] = [
    (lambda v, hook: v[0], ValueError, r"\(3, 4\) torch.float32 on cpu"),
    (lambda v, hook: v[:, :1], ValueError, r"\(2, 1, 4\)"),
    (lambda v, hook: v.double(), ValueError, "torch.float64"),
    (lambda v, hook: v.to("meta"), ValueError, "on meta"),
    (lambda v, hook: v.tolist(), TypeError, "a list"),
    (lambda v, hook: (v, v), TypeError, "a tuple"),
    (lambda v, hook: 0.0, TypeError, "a float"),
    (lambda v, hook: v.transpose_(0, 1), ValueError, r"\(3, 2, 4\)"),
    (lambda v, hook: (v.squeeze_(), v.unsqueeze_(0), None)[-1], ValueError, r"\(1, 2, 3, 4\)"),
]


@pytest.mark.every_parameter
@pytest.mark.parametrize(("function", "error", "got"), MISFITS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_misfit_names_site_expected_and_got(function: Any, error: Any, got: str, direction: str) -> None:
    model = net()
    hooks = {"fwd_hooks" if direction == "forward" else "bwd_hooks": [("blocks.1.hook_post", function)]}
    with pytest.raises(error) as raised, model.hooks(**hooks):
        model(some_input(), loss=True).backward()
    message = str(raised.value)
    assert f"a {direction} hook at 'blocks.1.hook_post'" in message
    assert "expected" in message
    assert "(2, 3, 4) torch.float32 on cpu" in message
    assert raised.match(got)
    assert_no_hook_left(model)
    model(some_input(), loss=True).backward()


def test_anything_may_pass_a_point() -> None:
    point = HookPoint()
    for thing in [None, 3, "text", (torch.ones(1), 2), {"a": 1}]:
        assert point(thing) is thing
    point.add_hook(lambda value, hook: {"b": 2})
    assert point({"a": 1}) == {"b": 2}
    point.add_hook(lambda value, hook: None, dir="bwd")
    assert point({"a": 1}) == {"b": 2}


# ---- handles, names, state --------------------------------------------------------------------------------------


def test_handles_as_tools_use_them() -> None:
    point = named_point()
    handle = point.add_hook(doubled, level=4)
    assert [h.user_hook for h in point.fwd_hooks] == [doubled]
    assert (handle.hook, handle.is_permanent, handle.context_level) == (handle, False, 4)
    assert "doubled" in repr(handle)
    assert "layer.3.out" in repr(handle)
    assert point.has_hooks(level=4)
    assert not point.has_hooks(level=1)
    assert not point.has_hooks("bwd")
    point.fwd_hooks[0].hook.remove()
    handle.remove()
    assert not point._hooks
    point.add_perma_hook(doubled)
    assert point.has_hooks()
    assert not point.has_hooks(including_permanent=False)


def test_both_directions_and_removing_one() -> None:
    point = named_point()
    point.add_hook(doubled, dir="both")
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (1, 1)
    x = torch.ones(2, requires_grad=True)
    y = point(x)
    y.sum().backward()
    assert y.tolist() == [2.0, 2.0]
    assert x.grad.tolist() == [4.0, 4.0]
    point.remove_hooks("fwd")
    assert (len(point.fwd_hooks), len(point.bwd_hooks)) == (0, 1)
    point.remove_hooks()
    assert not point._hooks


def test_one_handle_removes_both_directions() -> None:
    point = named_point()
    point.add_hook(doubled)
    handle = point.add_hook(lambda value, hook: None, dir="both")
    handle.remove()
    assert [hook.user_hook for hook in point.active_hooks()] == [doubled]


@pytest.mark.parametrize("verb", ["add_hook", "remove_hooks", "has_hooks"])
def test_another_direction_is_refused(verb: str) -> None:
    point = named_point()
    arguments = (doubled, "forward") if verb == "add_hook" else ("forward",)
    with pytest.raises(ValueError, match="'fwd', 'bwd' or 'both', got 'forward'"):
        getattr(point, verb)(*arguments)


def test_alias_names() -> None:
    point, seen = named_point(), []

    def note(value: Tensor, hook: HookPoint) -> Tensor:
        seen.append(hook.name)
        hook.ctx[hook.name] = 1
        return value + 1

    handle = point.add_hook(note, alias_names=["first", "second"])
    assert point(torch.zeros(1)).item() == 2
    assert seen == ["first", "second"]
    assert point.name == "layer.3.out"
    assert point.ctx == {"first": 1, "second": 1}
    handle.remove()
    assert not point._hooks


def test_layer_dims_and_context() -> None:
    point = named_point()
    assert point.layer() == 3
    assert point.dims == ("batch", "d_model")
    assert repr(point) == "HookPoint('layer.3.out', batch d_model)"
    for name in ["hook_embed", None]:
        point.name = name
        with pytest.raises(ValueError, match="is not in a layer"):
            point.layer()
    point.add_hook(lambda value, hook: hook.ctx.update(seen=value.sum()))
    point(torch.ones(3))
    assert point.ctx["seen"] == 3
    point.clear_context()
    assert point.ctx == {}


# ---- edits never reach what must stay --------------------------------------------------------------------------


def test_an_edit_in_place_does_not_reach_the_callers_input() -> None:
    model, x = net(), some_input()
    for site in SITES:
        model.run_with_hooks(x, fwd_hooks=[(site, lambda value, hook: value.zero_())])
    assert torch.equal(x, some_input())


def test_an_edit_in_place_does_not_spoil_what_autograd_saved() -> None:
    """tanh keeps its output for the backward pass; by hand, the edited entries have no gradient upstream."""
    model, seen = net(), {}

    def cut(value: Tensor, hook: HookPoint) -> Tensor:
        value[0] = 0
        return value

    model.run_with_hooks(
        some_input(),
        loss=True,
        fwd_hooks=[("blocks.1.hook_post", cut)],
        bwd_hooks=[("blocks.1.hook_pre", lambda gradient, hook: seen.update(pre=gradient))],
    ).backward()
    assert seen["pre"][0].abs().max() == 0
    assert seen["pre"][1].abs().min() > 0


class WithWeights(HookedRootModule):
    """Its points see a parameter, and a view of one: a hook's edit in place must not edit the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5, 3))
        self.hook_weight, self.hook_rows = HookPoint(), HookPoint()
        self.setup()

    def forward(self) -> Tensor:
        return self.hook_weight(self.weight) + self.hook_rows(self.table[None, :2]).sum((0, 1))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("frozen", [True, False])
def test_an_edit_in_place_changes_the_run_and_not_the_weights(mode: Any, frozen: bool) -> None:
    model = WithWeights()
    model.requires_grad_(not frozen)
    with mode():
        out = model.run_with_hooks(fwd_hooks=[("*", lambda value, hook: value.zero_())])
        assert out.tolist() == [0.0] * 3
        assert model().tolist() == [3.0] * 3
        _, cache = model.run_with_cache()
    with torch.no_grad():
        model.weight.add_(1), model.table.add_(1)
    assert all((value == 1).all() for value in cache.values())


# ---- gradients ---------------------------------------------------------------------------------------------------


def true_gradients(x: Tensor) -> dict[str, Tensor]:
    """The gradient at each site, by autograd on values taken out of a run."""
    model, live = net(), {}
    names = [site for site in BARE if site != "hook_left"]  # seen once: left and right are one tensor here
    with model.hooks([(names, lambda value, hook: live.update({hook.name: value}))]):
        loss = model(x.clone().requires_grad_(), loss=True)
    found = dict(zip(live, torch.autograd.grad(loss, list(live.values())), strict=True))
    return {**found, "hook_left": found["hook_right"]}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_backward_hooks_get_the_bare_gradient_inside_and_after_the_scope(inside: bool, frozen: bool) -> None:
    model, seen = net(), {}
    model.requires_grad_(not frozen)
    note = [(BARE, lambda gradient, hook: seen.update({hook.name: gradient}))]
    with model.hooks(bwd_hooks=note):
        loss = model(some_input(), loss=True)
        if inside:
            loss.backward()
    if not inside:
        assert seen == {}
        assert_no_hook_left(model)
        loss.backward()
    expected = true_gradients(some_input())
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        assert type(seen[name]) is Tensor
        assert_close(seen[name], gradient, depth=GRADIENT)


def test_gradients_equal_finite_differences() -> None:
    model, x, step = net().double(), some_input().double(), 1e-6
    _, cache = model.run_with_cache(x, loss=True, incl_bwd=True)
    for site in BARE:
        for index in [(0, 0, 0), (1, 2, 3)]:
            losses = []
            for sign in (1, -1):

                def push(value: Tensor, hook: HookPoint, index: Any = index, sign: int = sign) -> None:
                    with torch.no_grad():
                        value[index] += sign * step

                losses.append(model.run_with_hooks(x, loss=True, fwd_hooks=[(site, push)]).item())
            difference = (losses[0] - losses[1]) / (2 * step)
            assert_close(cache[site + "_grad"][index].item(), difference, depth=GRADIENT)


def test_a_replaced_gradient_goes_upstream() -> None:
    """By hand: out = 3 * hook(2 * x); d sum(out) / dx = 6, and with the gradient at the hook set to 5, 10."""
    point = named_point()
    for replacement in [lambda g, hook: torch.full_like(g, 5), lambda g, hook: g.fill_(5)]:
        x = torch.ones(2, requires_grad=True)
        handle = point.add_hook(replacement, dir="bwd")
        (3 * point(2 * x)).sum().backward()
        assert x.grad.tolist() == [10.0, 10.0]
        handle.remove()
        x.grad = None
        (3 * point(2 * x)).sum().backward()
        assert x.grad.tolist() == [6.0, 6.0]


def test_an_edit_of_a_gradient_in_place_stays_on_its_branch() -> None:
    """The gradient of a sum is one piece of memory for both of its terms."""
    point = named_point()
    point.add_hook(lambda gradient, hook: gradient.mul_(0), dir="bwd")
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    (point(2 * a) + 2 * b).backward(torch.ones(2))
    assert a.grad.tolist() == [0.0, 0.0]
    assert b.grad.tolist() == [2.0, 2.0]


def test_two_points_on_one_tensor_chain_from_the_later_to_the_earlier() -> None:
    model, seen = net(), []

    def note(factor: int) -> Any:
        def hook(gradient: Tensor, hook: HookPoint) -> Tensor:
            seen.append((hook.name, gradient.clone()))
            return factor * gradient

        return hook

    x = some_input().requires_grad_()
    model(x, loss=True).backward()
    plain, x.grad = x.grad, None
    model.run_with_hooks(x, loss=True, bwd_hooks=[("hook_left", note(2)), ("hook_right", note(5))]).backward()
    (first, right), (second, left) = seen
    assert (first, second) == ("hook_right", "hook_left")
    assert_close(left, 5 * right)
    assert_close(x.grad, 10 * plain, depth=GRADIENT)


def test_several_gradient_hooks_on_one_point_run_in_order() -> None:
    point, seen = named_point(), []
    for i in range(3):
        point.add_hook(lambda g, hook, i=i: (seen.append((i, g.item())), g + 1)[1], dir="bwd")
    x = torch.zeros(1, requires_grad=True)
    point(x).backward()
    assert seen == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert x.grad.item() == 4


def test_a_forward_hook_may_return_another_points_output_and_that_point_hears_the_gradient() -> None:
    model, kept, heard = net(), {}, {}
    hooks = [
        ("blocks.0.hook_post", lambda value, hook: kept.update(post=value)),
        ("blocks.1.hook_post", lambda value, hook: kept["post"]),
    ]
    with model.hooks(hooks, bwd_hooks=[("*.hook_post", lambda g, hook: heard.update({hook.name: g}))]):
        model(some_input(), loss=True).backward()
    assert heard.keys() == {"blocks.0.hook_post", "blocks.1.hook_post"}

    # The stream is in + post0 + post1, with post1 := post0: the second block gives its whole gradient to post0.
    block = model.blocks[0]
    post = torch.tanh(block.linear(some_input())).detach().requires_grad_()
    ((3 * (some_input() + post + post)) ** 2).sum().backward()
    assert_close(2 * heard["blocks.1.hook_post"], post.grad, depth=GRADIENT)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_backward_hooks_do_nothing_where_no_gradient_is_computed(mode: Any) -> None:
    model, x = net(), some_input()
    plain, called = model(x), []
    with mode():
        out = model.run_with_hooks(
            x,
            fwd_hooks=[("hook_in", lambda v, hook: v + 1), ("hook_in", lambda v, hook: v.sub_(1))],
            bwd_hooks=[("*", lambda g, hook: called.append(1))],
        )
    assert_close(out, plain)
    assert not out.requires_grad
    assert called == []


def test_ints_and_complex_numbers_under_gradient_hooks() -> None:
    point, seen = named_point(), []
    point.add_hook(lambda gradient, hook: seen.append(gradient.dtype), dir="bwd")
    assert point(torch.tensor([1, 2])).tolist() == [1, 2]
    point(torch.ones(2, dtype=torch.complex64, requires_grad=True)).abs().sum().backward()
    assert seen == [torch.complex64]


# ---- a module of PyTorch like any other --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "register",
    ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"],
)
def test_a_users_own_hook_works_and_counts_as_listening(register: str) -> None:
    model, called = net(), []
    square = model.blocks[0].hook_square
    handle = getattr(square, register)(lambda module, *rest: called.append(module))
    assert square.is_listening
    assert is_listening(square, model.hook_in)
    model(some_input().requires_grad_(), loss=True).backward()
    assert model.blocks[0].squares_computed == 1
    if "backward" not in register:
        assert called == [square]
    handle.remove()
    assert not is_listening(square, model.hook_in)


def test_a_users_forward_hook_replaces_and_backward_hook_fires() -> None:
    model, grads = net(), []
    model.hook_in.register_forward_hook(lambda module, args, output: output + 1)
    model.hook_left.register_full_backward_hook(lambda module, gin, gout: grads.append(gout[0]))
    out = model(some_input(), loss=True)
    assert_close(out.item(), net()(some_input() + 1, loss=True).item())
    out.backward()
    assert_close(grads[0], true_gradients(some_input() + 1)["hook_left"], depth=GRADIENT)


def test_an_unheard_point_hands_on_the_very_same_object() -> None:
    model, x = net(), some_input()
    with model.hooks([("hook_out", lambda value, hook: None)]):
        assert model.hook_in(x) is x
    assert isinstance(model.hook_in, nn.Identity)


def test_copies_and_pickles_carry_hooks_added_by_hand_and_no_open_scope() -> None:
    model, seen = net(), []
    model.hook_in.add_hook(doubled, alias_names=["one", "two"])
    model.hook_in.ctx["x"] = 1
    with model.hooks([(SITES, lambda value, hook: seen.append(hook))]):
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model(some_input())
        assert len(seen) == len(SITES)
        seen.clear()
        for twin in twins:
            assert torch.equal(twin(some_input()), net()(4 * some_input()))
    assert seen == []
    for twin in twins:
        assert list(twin.all_points()) == SITES
        assert twin.hook_dict["hook_in"] is twin.hook_in is not model.hook_in
        assert twin.hook_in.ctx == {"x": 1}
        twin.hook_in.fwd_hooks[0].remove()
        assert_no_hook_left(twin)
        assert torch.equal(twin.run_with_cache(some_input())[1]["hook_in"], some_input())
    assert model.hook_in.has_hooks()


def test_dims_do_not_change_with_dtype_or_device() -> None:
    model = net().double().to("meta")
    assert model.hook_in.dims == DIMS


# ---- torch.compile -------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")
def test_the_unhooked_net_compiles_into_one_graph(fresh_dynamo: None) -> None:
    model, x = net(), some_input()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(x), model(x))
    explained = torch._dynamo.explain(model)(x)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


class Line(HookedRootModule):
    def __init__(self) -> None:
        super().__init__()
        self.hook_in, self.hook_out = HookPoint(), HookPoint()
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_out(3 * self.hook_in(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_hooks_fire_in_a_compiled_net(fresh_dynamo: None) -> None:
    model, x, seen = Line(), torch.ones(2), []
    compiled = torch.compile(model, backend="eager")
    assert compiled(x).tolist() == [3.0, 3.0]
    for factor in (0.0, 2.0):
        forward = [("hook_in", lambda value, hook, factor=factor: factor * value)]
        with model.hooks(forward, [("hook_out", lambda gradient, hook: seen.append(gradient.tolist()))]):
            out = compiled(x)
        assert out.tolist() == [3 * factor] * 2
        out.sum().backward()
    assert seen == [[1.0, 1.0]] * 2
    cache, forward, _ = model.get_caching_hooks()
    with model.hooks(forward):
        compiled(x)
    assert {name: value.tolist() for name, value in cache.items()} == {"hook_in": [1, 1], "hook_out": [3, 3]}
    assert compiled(x).tolist() == [3.0, 3.0]
    assert_no_hook_left(model)


@pytest.mark.filterwarnings("ignore")
def test_a_net_compiled_for_one_graph_refuses_hooks_rather_than_forget_them(fresh_dynamo: None) -> None:
    model, x = net(), some_input()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    plain = compiled(x)
    with pytest.raises(torch._dynamo.exc.Unsupported), model.hooks([("hook_in", doubled)]):
        compiled(x)
    assert_no_hook_left(model)
    assert_close(compiled(x), plain)


def test_an_edit_in_place_by_a_hook_of_torch_stays_behind_the_point() -> None:
    point, x = HookPoint(), torch.ones(2)
    assert hook_if_listening(point, x) is x
    point.register_forward_hook(lambda module, args, value: value.mul_(3))
    assert hook_if_listening(point, x).tolist() == [3.0, 3.0]
    assert x.tolist() == [1.0, 1.0]


def test_recorders_of_values_are_listeners_and_no_edits() -> None:
    def record(value: Tensor, hook: HookPoint) -> None:
        """Keeps nothing."""

    record.records = True
    point = HookPoint()
    assert (point.is_listening, point.is_edited) == (False, False)
    handle = point.add_hook(record)
    assert (point.is_listening, point.is_edited) == (True, False)
    point.add_hook(record, dir="bwd")
    assert point.is_edited
    handle.remove()
    point.remove_hooks()
    point.add_hook(lambda value, hook: None)
    assert point.is_edited
