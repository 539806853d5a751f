"""The metadata of a site applies to its replacements: points without dims, and points in other modules."""

import copy
import gc
import pickle
import weakref

import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer
from hooked_lm.hooks import HookedRootModule, HookPoint

SITE = "inner.hook"


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hook = HookPoint("batch", "pos", "d_model", on_demand=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.hook(x)


class Outer(HookedRootModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class StandIn(nn.Module):
    """A replacement of a point by tools: a module that contains points without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_features = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.hook_features(x)


def put(model: Outer, module: nn.Module) -> None:
    model.inner.hook = module
    model.setup()


def test_a_point_that_takes_the_place_of_another_has_its_dims() -> None:
    model = Outer()
    put(model, HookPoint())
    point = model.hook_dict[SITE]
    assert point.dims == ("batch", "pos", "d_model")
    assert not point.on_demand  # whoever puts a point there says when it is computed
    x = torch.randn(1, 5, 3)
    assert torch.equal(model.run_with_cache(x, pos_slice=2)[1][SITE], x[:, 2:3])


def test_a_point_that_comes_back_after_another_module_is_as_the_first_was() -> None:
    model = Outer()
    put(model, StandIn())
    put(model, StandIn())
    put(model, HookPoint())
    point = model.hook_dict[SITE]
    assert point.dims == ("batch", "pos", "d_model")
    assert point.on_demand
    model.setup()
    assert point.on_demand


def test_dims_of_its_own_are_kept() -> None:
    model = Outer()
    put(model, HookPoint("batch", "d_other"))
    assert model.hook_dict[SITE].dims == ("batch", "d_other")


def test_the_points_of_a_module_in_the_place_of_a_site_see_its_rows_and_positions() -> None:
    model = Outer()
    stand_in = StandIn()
    put(model, stand_in)
    assert SITE not in model.hook_dict
    assert stand_in.hook_features.dims == ("batch", "pos")
    x = torch.randn(2, 5, 3)
    _, cache = model.run_with_cache(x, pos_slice=(1, 3))
    assert torch.equal(cache[f"{SITE}.hook_features"], x[:, 1:3])


def test_a_site_without_positions_says_nothing_of_what_is_inside() -> None:
    model = Outer()
    put(model, HookPoint("batch", "head", "query_pos", "key_pos"))
    stand_in = StandIn()
    put(model, stand_in)
    assert stand_in.hook_features.dims == ()


def test_the_same_name_in_another_module_is_another_site() -> None:
    model = Outer()
    other = Inner()
    other.hook = HookPoint()
    model.inner = other
    model.setup()
    assert model.hook_dict[SITE].dims == ()


def test_nothing_that_was_replaced_is_kept() -> None:
    model = Outer()
    gone = weakref.ref(model.inner)
    model.inner = Inner()
    model.setup()
    gc.collect()
    assert gone() is None


def test_copies_know_their_own_sites() -> None:
    for model in (copy.deepcopy(Outer()), pickle.loads(pickle.dumps(Outer()))):
        put(model, StandIn())
        put(model, HookPoint())
        assert model.hook_dict[SITE].dims == ("batch", "pos", "d_model")


def test_a_model_is_as_it_was_after_its_points_were_replaced() -> None:
    """Caches, slices by position and a whole check of the model, after a tool took its modules away again."""
    model = HookedTransformer.from_pretrained("demo")
    tokens = model.to_tokens("The capital of France is Paris")
    _, before = model.run_with_cache(tokens, pos_slice=-1)
    for block, name in ((model.blocks[1], "hook_resid_pre"), (model.blocks[2].attn, "hook_z"),
                        (model.blocks[2].attn, "hook_result")):  # fmt: skip
        for module in (StandIn(), HookPoint()):
            setattr(block, name, module)
            model.setup()
    _, after = model.run_with_cache(tokens, pos_slice=-1)
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model.verify().ok
