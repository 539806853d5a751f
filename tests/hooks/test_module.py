"""HookedRootModule: names, ways to give hooks, replaced modules, hooks added by hand through the root."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.hooks import HookedRootModule, HookPoint, is_listening
from tests.hooks.nets import SITES, Block, Net, assert_no_hook_left, net, some_input


def double(value: Tensor, hook: HookPoint) -> Tensor:
    return 2 * value


def test_setup_names_the_points_and_may_be_called_again() -> None:
    model = net()
    points = dict(model.all_points())
    assert list(points) == SITES
    assert [point.name for point in model.hook_points()] == SITES
    assert "" not in model.mod_dict
    assert model.mod_dict["blocks.1.linear"] is model.blocks[1].linear
    model.hook_in.add_hook(double)
    model.setup()
    model.setup()
    assert model.all_points() == points
    assert torch.equal(model(some_input()), net()(2 * some_input()))


class WithSite:
    """A hook object with a site, as steering tools write them."""

    def __init__(self, hook_point: Any, **attributes: Any) -> None:
        self.hook_point, self.seen = hook_point, []
        self.__dict__.update(attributes)

    def __call__(self, value: Tensor, hook: HookPoint) -> None:
        self.seen.append(hook.name)


class WithShorthand(Net):
    def site_name(self, site: Any) -> str:
        return f"blocks.{site[1]}.hook_{site[0]}" if isinstance(site, tuple) else str(site)


def test_objects_with_their_own_site_and_layer() -> None:
    model = WithShorthand()
    hooks = [WithSite("hook_in"), WithSite("*.hook_pre", layer=None), WithSite("post", layer=1)]
    hooks.append(WithSite("hook_out", records=["a list that has nothing to do with caches"]))
    model.run_with_hooks(some_input(), fwd_hooks=hooks)
    assert [hook.seen for hook in hooks] == [
        ["hook_in"],
        ["blocks.0.hook_pre", "blocks.1.hook_pre"],
        ["blocks.1.hook_post"],
        ["hook_out"],
    ]
    assert model.run_with_cache(some_input(), names_filter=("pre", 0))[1].keys() == {"blocks.0.hook_pre"}


@pytest.mark.parametrize("entry", ["hook_in", ("hook_in",), ("hook_in", double, 1), double, None])
def test_what_is_no_hook_is_refused(entry: Any) -> None:
    model = net()
    with pytest.raises(TypeError, match="a hook is a pair"):
        model.run_with_hooks(some_input(), fwd_hooks=[entry])
    assert model.runs == 0


@pytest.mark.parametrize("direction", ["fwd_hooks", "bwd_hooks"])
def test_an_unknown_site_raises_before_anything_runs(direction: str) -> None:
    model = net()
    pairs = [("hook_in", double), ("hook_ot", double)]
    with pytest.raises(KeyError, match="no hook point 'hook_ot'; did you mean 'hook_out'"):
        model.run_with_hooks(some_input(), **{direction: pairs})
    with pytest.raises(KeyError, match="hook_out"):
        model.add_hook("hook_ot", double)
    assert model.runs == 0
    assert_no_hook_left(model)


def test_hooks_added_through_the_root() -> None:
    model = net()
    model.add_hook("*.hook_pre", double)
    model.add_hook(["hook_in"], double, dir="bwd", prepend=True)
    model.add_perma_hook("hook_out", double)
    listed = model.list_hooks()
    assert list(listed) == ["hook_in", "blocks.0.hook_pre", "blocks.1.hook_pre", "hook_out"]
    assert listed["hook_in"][0].dir == "bwd"
    model.remove_all_hook_fns("fwd")
    assert list(model.list_hooks()) == ["hook_in", "hook_out"]
    model.remove_all_hook_fns("bwd")
    model.reset_hooks()
    assert list(model.list_hooks()) == ["hook_out"]
    model.reset_hooks(including_permanent=True)
    assert_no_hook_left(model)


def test_hooks_are_listed_by_site_direction_and_permanence() -> None:
    model = Net()
    forward, backward, permanent = (lambda value, hook: None for _ in range(3))
    model.add_hook("hook_in", forward)
    model.add_hook("hook_out", backward, "bwd")
    model.add_perma_hook("hook_out", permanent)

    def listed(**by: Any) -> dict[str, list[Any]]:
        return {name: [hook.user_hook for hook in hooks] for name, hooks in model.list_hooks(**by).items()}

    assert listed() == {"hook_in": [forward], "hook_out": [backward, permanent]}
    assert listed(name_filter="hook_out") == {"hook_out": [backward, permanent]}
    assert listed(dir="fwd") == {"hook_in": [forward], "hook_out": [permanent]}
    assert listed(including_permanent=False) == {"hook_in": [forward], "hook_out": [backward]}
    with pytest.raises(ValueError, match="sideways"):
        model.list_hooks(dir="sideways")


def test_an_unknown_direction_is_refused_with_hooks_and_without() -> None:
    model = net()
    for _ in range(2):
        model.hook_in.ctx["kept"] = 1
        with pytest.raises(ValueError, match="foo"):
            model.reset_hooks(direction="foo")
        assert model.hook_in.ctx == {"kept": 1}, "half of a reset"
        model.hook_in.add_hook(double)


def test_reset_clears_contexts_unless_told() -> None:
    model = net()
    model.hook_in.ctx["x"] = 1
    model.reset_hooks(clear_contexts=False)
    assert model.hook_in.ctx == {"x": 1}
    model.reset_hooks()
    assert model.hook_in.ctx == {}


def test_a_subclass_may_refuse_hooks() -> None:
    class Strict(Net):
        def check_hooks_to_add(self, hook_point: HookPoint, hook_point_name: str, *rest: Any) -> None:
            if hook_point_name == "hook_in":
                raise ValueError("not here")

    model = Strict()
    with pytest.raises(ValueError, match="not here"):
        model.add_hook("hook_*", double)
    with pytest.raises(ValueError, match="not here"):
        model.run_with_hooks(some_input(), fwd_hooks=[("hook_*", double)])
    assert_no_hook_left(model)


class Foreign(HookedRootModule):
    """A foreign module with points that replaces a hook point."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_latent = HookPoint("batch", "pos", "d_model")
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_latent(x + 1)


def test_a_point_may_be_replaced_by_any_module() -> None:
    model = net()
    model.blocks[0].hook_square = nn.Tanh()
    assert is_listening(model.blocks[0].hook_square)
    model(some_input())
    assert model.blocks[0].squares_computed == 1

    foreign = model.hook_in = Foreign()
    model.setup()
    assert "hook_in" not in model.hook_dict
    assert "blocks.0.hook_square" not in model.hook_dict
    assert foreign.hook_latent.name == "hook_in.hook_latent"
    out, cache = model.run_with_cache(some_input(), names_filter="hook_in.*")
    assert torch.equal(cache["hook_in.hook_latent"], some_input() + 1)
    assert torch.equal(out, net()(some_input() + 1))
    _, alone = foreign.run_with_cache(some_input())
    assert torch.equal(next(iter(alone.values())), some_input() + 1)

    model.hook_in = HookPoint("batch", "pos", "d_model")
    model.setup()
    assert model.hook_in.name == "hook_in"
    assert torch.equal(model(some_input()), net()(some_input()))


def test_a_block_may_be_replaced_and_its_points_are_found() -> None:
    model = net()
    model.blocks.append(Block())
    with pytest.raises(KeyError):
        model.points("blocks.2.hook_pre")
    model.setup()
    assert model.points("blocks.2.hook_pre") == [model.blocks[2].hook_pre]
    assert len(model.run_with_cache(some_input(), names_filter="blocks.*.hook_pre")[1]) == 3
