"""Predicates and loops over `hook_dict` see the sites of a bare run, unless flags enable more."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.hooks import HookedRootModule, HookPoint
from tests.hooks.nets import BARE, SITES, Block, Net, assert_no_hook_left, net, some_input

SQUARES = ["blocks.0.hook_square", "blocks.1.hook_square"]


def nothing(value: Any, hook: Any) -> None:
    """A hook that does nothing."""


def everything(name: str) -> bool:
    return True


def is_square(name: str) -> bool:
    return name.endswith("square")


# ---- predicates ----------------------------------------------------------------------------------------------------


def test_a_predicate_that_holds_for_everything_is_the_bare_cache() -> None:
    model = net()
    assert list(model.run_with_cache(some_input(), names_filter=everything)[1]) == BARE
    assert list(model.run_with_cache(some_input())[1]) == BARE
    assert [block.squares_computed for block in model.blocks] == [0, 0]


@pytest.mark.parametrize("verb", ["add_hook", "hooks", "run_with_hooks", "add_caching_hooks", "in a list"])
def test_a_hook_for_every_name_computes_nothing_more(verb: str) -> None:
    model, seen = net(), []
    note = lambda value, hook: seen.append(hook.name)  # noqa: E731
    if verb == "add_hook":
        model.add_hook(everything, note)
        model(some_input())
    elif verb == "add_caching_hooks":
        cache = model.add_caching_hooks(everything)
        model(some_input())
        seen = list(cache)
    else:
        site = [everything] if verb == "in a list" else everything
        model.run_with_hooks(some_input(), fwd_hooks=[(site, note)])
    assert seen == BARE


def test_a_predicate_that_nothing_else_answers_is_asked_about_the_others() -> None:
    model = net()
    assert list(model.run_with_cache(some_input(), names_filter=is_square)[1]) == SQUARES
    assert model.names(lambda name: name.startswith("blocks.0.")) == ["blocks.0.hook_pre", "blocks.0.hook_post"]
    assert model.names([is_square, "hook_in"]) == ["hook_in", *SQUARES]


@pytest.mark.parametrize("site", ["*", SITES, "blocks.*.hook_*"])
def test_names_lists_and_globs_mean_what_they_say(site: Any) -> None:
    assert set(SQUARES) < set(net().names(site))


def test_a_list_of_hooks_shows_what_is_there_to_a_predicate() -> None:
    model = net()
    model.add_hook(SQUARES[0], nothing)
    model.add_hook("hook_in", nothing)
    assert list(model.list_hooks(everything)) == ["hook_in", SQUARES[0]] == list(model.list_hooks())
    assert list(model.list_hooks(is_square)) == SQUARES[:1]
    assert model.list_hooks(lambda name: False) == {}


class Switched(Net):
    """A net whose second square is switched on."""

    def in_bare_cache(self, point: HookPoint) -> bool:
        return super().in_bare_cache(point) or point.name == SQUARES[1]


def test_what_is_switched_on_is_as_any_other() -> None:
    torch.manual_seed(1)
    model = Switched()
    on = [site for site in SITES if site != SQUARES[0]]
    assert list(model.hook_dict) == on == model.names(everything)
    assert list(model.run_with_cache(some_input())[1]) == on
    assert model.names(is_square) == SQUARES[1:]


# ---- hook_dict -----------------------------------------------------------------------------------------------------


def test_a_loop_over_hook_dict_switches_nothing_on() -> None:
    model = net()
    for name, point in model.hook_dict.items():
        assert point.name == name
        point.add_hook(nothing)
    model(some_input())
    assert [block.squares_computed for block in model.blocks] == [0, 0]
    assert list(model.list_hooks()) == BARE
    model.reset_hooks()
    assert_no_hook_left(model)


def test_hook_dict_lists_a_bare_run_and_knows_the_rest() -> None:
    model = net()
    points = model.hook_dict
    assert list(points) == list(points.keys()) == [point.name for point in points.values()] == BARE
    assert len(points) == len(BARE)
    assert dict(points) == {**points} == {name: model.all_points()[name] for name in BARE}
    assert list(model.all_points()) == SITES == list(model.names())
    for name in SQUARES:
        assert name in points
        assert points[name] is points.get(name) is model.all_points()[name]
    assert "hook_im" not in points
    assert points.get("hook_im") is None
    with pytest.raises(KeyError, match="did you mean 'hook_in'"):
        points["hook_im"]


# ---- classes that bring their own ------------------------------------------------------------------------------------


class AsProperty(HookedRootModule):
    """A class with `hook_dict` as a property."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.block = Block()

    @property
    def hook_dict(self) -> dict[str, HookPoint]:  # type: ignore[override]
        points = {"early": self.block.hook_pre, "late": self.block.hook_post}
        for name, point in points.items():
            point.name = name
        return points

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class AsAttribute(HookedRootModule):
    """A class that fills its `hook_dict` by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.hook_dict = {}
        self.hook_dict["early"], self.hook_dict["late"] = self.block.hook_pre, self.block.hook_post
        for name, point in self.hook_dict.items():
            point.name = name

    forward = AsProperty.forward


@pytest.mark.parametrize("kind", [AsProperty, AsAttribute])
def test_the_verbs_work_on_a_hook_dict_of_ones_own(kind: Any) -> None:
    model = kind()
    x = some_input()
    assert model.names() == ["early", "late"]
    _, cache = model.run_with_cache(x)
    assert list(cache) == ["early", "late"]
    assert list(model.run_with_cache(x, names_filter=lambda name: "l" in name)[1]) == ["early", "late"]
    out = model.run_with_hooks(x, fwd_hooks=[("late", lambda value, hook: 0 * value)])
    assert torch.equal(out, x)
    model.add_hook("early", nothing)
    hook_id = model.register(("late", nothing))
    assert list(model.registered()) == [hook_id]
    assert list(model.list_hooks()) == ["early", "late"]
    assert model.context_level == 0
    model.unregister(hook_id)
    model.reset_hooks()
    assert_no_hook_left(model)


def test_setup_of_a_class_whose_hook_dict_is_a_property() -> None:
    class Later(AsProperty):
        def __init__(self) -> None:
            super().__init__()
            self.setup()

    model = Later()
    assert model.names() == ["early", "late"]
    assert model.mod_dict["block.linear"] is model.block.linear


# ---- names, handles, levels --------------------------------------------------------------------------------------------


def test_every_module_knows_its_name() -> None:
    model = net()
    assert "" not in model.mod_dict
    for name, module in model.mod_dict.items():
        assert module.name == name
    moved = model.blocks[0]
    model.blocks = nn.ModuleList([model.blocks[1], moved])
    model.setup()
    assert moved.linear.name == "blocks.1.linear"
    assert repr(moved.linear) == "Linear(in_features=4, out_features=4, bias=True)"


def test_a_name_that_is_a_modules_own_stays() -> None:
    class Named(nn.Module):
        name = "of the class"

    class Computed(nn.Module):
        @property
        def name(self) -> str:
            return "computed"

    class WithPart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.name = nn.Linear(1, 1)

    class Root(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = Named(), Computed(), WithPart(), nn.Linear(1, 1)
            self.d.name = "given"  # type: ignore[assignment]
            self.setup()
            self.setup()

    model = Root()
    assert (model.a.name, model.b.name, model.d.name) == ("of the class", "computed", "given")
    assert isinstance(model.c.name, nn.Linear)
    assert model.c.name.name == "c.name"


def test_a_handle_is_like_one_of_pytorch() -> None:
    model = net()
    model.add_hook("hook_in", nothing)
    with model.hooks([("hook_in", nothing)]):
        first, second = (handle.hook for handle in model.hook_dict["hook_in"].fwd_hooks)
        assert first.id != second.id
        assert {first.id, second.id} == set(first.hooks_dict_ref())
    assert second.id not in second.hooks_dict_ref()
    assert first.id in first.hooks_dict_ref()
    first.remove()
    assert first.id not in first.hooks_dict_ref()


def test_the_level_can_be_set() -> None:
    model = net()
    model.context_level += 1
    model.add_hook("hook_in", nothing, level=model.context_level)
    with model.hooks():
        assert model.context_level == 2
    assert model.hook_in.has_hooks(level=1)
    model.reset_hooks(level=model.context_level)
    model.context_level -= 1
    assert model.context_level == 0
    assert_no_hook_left(model)


def test_a_point_says_its_name_and_how_many_hooks_it_has() -> None:
    model = net()
    assert repr(model.hook_in) == "HookPoint('hook_in', batch pos d_model)"
    model.hook_in.add_hook(nothing)
    with model.hooks(bwd_hooks=[("hook_in", nothing)]):
        assert repr(model.hook_in) == "HookPoint('hook_in', batch pos d_model, 1 fwd, 1 bwd hooks)"
    assert repr(model.hook_in) == "HookPoint('hook_in', batch pos d_model, 1 fwd hook)"
    assert repr(HookPoint()) == "HookPoint()"
    assert "(0-1): 2 x Block(" in repr(model)
    assert "(hook_in): HookPoint(batch pos d_model, 1 fwd hook)" in repr(model)
