"""Caches: what they keep, that it never changes, and what can be done with one."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.hooks import Cache, HookedRootModule, HookPoint, wrap
from tests.close import GRADIENT, assert_close, assert_equal
from tests.hooks.nets import BARE, BATCH, SITES, D, assert_no_hook_left, net, some_input


def snapshot(cache: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in cache.items()}


def recorded_plainly() -> dict[str, Tensor]:
    kept: dict[str, Tensor] = {}
    net().run_with_hooks(some_input(), fwd_hooks=[(BARE, lambda v, hook: kept.update({hook.name: v.detach()}))])
    return kept


def test_everything_but_on_demand_in_order_of_computation() -> None:
    out, cache = net().run_with_cache(some_input())
    assert torch.equal(out, net()(some_input()))
    assert list(cache) == BARE
    for name, value in recorded_plainly().items():
        assert torch.equal(cache[name], value)
        assert not cache[name].requires_grad


# ---- filters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names_filter", "kept"),
    [
        ("hook_left", ["hook_left"]),
        ("blocks.*.hook_p*", [site for site in SITES if "hook_p" in site]),
        ("*square", ["blocks.0.hook_square", "blocks.1.hook_square"]),
        (["hook_out", "hook_in", "*.1.hook_pre"], ["hook_in", "blocks.1.hook_pre", "hook_out"]),
        (("hook_out", "hook_in"), ["hook_in", "hook_out"]),
        (lambda name: name.endswith("t"), ["blocks.0.hook_post", "blocks.1.hook_post", "hook_left"]),
    ],
)
def test_filters(names_filter: Any, kept: list[str]) -> None:
    model = net()
    if callable(names_filter):
        kept = [site for site in SITES if names_filter(site)]
    assert list(model.run_with_cache(some_input(), names_filter=names_filter)[1]) == kept
    assert model.blocks[0].squares_computed == int(any("0.hook_square" in name for name in kept))


@pytest.mark.parametrize("names_filter", ["hook_lef", "blocks.*.hook_z", ["hook_in", "nothing"], ["hook_in", "*q"]])
def test_an_unknown_name_raises_before_anything_runs(names_filter: Any) -> None:
    model = net()
    with pytest.raises(KeyError, match="did you mean"):
        model.run_with_cache(some_input(), names_filter=names_filter)
    assert model.runs == 0


@pytest.mark.parametrize("names_filter", [lambda name: False, []])
def test_a_filter_that_keeps_nothing_warns(names_filter: Any) -> None:
    with pytest.warns(UserWarning, match="selects none of 10 hook points"):
        _, cache = net().run_with_cache(some_input(), names_filter=names_filter)
    assert len(cache) == 0


# ---- values never change -----------------------------------------------------------------------------------


def spoil(value: Tensor, hook: HookPoint) -> Tensor:
    return value.fill_(float("nan"))


def test_a_later_hook_that_edits_in_place_changes_no_recorded_value() -> None:
    """The spoiler is in an outer scope, in an inner one, or added by hand, at each site in turn."""
    model, expected = net(), recorded_plainly()
    for site in SITES:
        upstream = BARE[: BARE.index(site)] if site in BARE else []
        with model.hooks([(site, spoil)]):
            _, outer = model.run_with_cache(some_input())
        handle = model.hook_dict[site].add_hook(spoil)
        _, by_hand = model.run_with_cache(some_input())
        handle.remove()
        cache, recorders, _ = model.get_caching_hooks()
        with model.hooks(recorders), model.hooks([(site, spoil)]):
            model(some_input())
        with model.hooks([*recorders, (site, spoil)]):  # the recorder of the site itself comes first
            model(some_input())
        for values in (outer, by_hand, cache):
            for name in upstream:
                assert torch.equal(values[name], expected[name]), (site, name)
        if site in BARE:
            assert torch.equal(cache[site], expected[site])
            assert outer[site].isnan().all()


def test_two_points_on_one_tensor() -> None:
    model = net()
    _, cache = model.run_with_cache(some_input(), names_filter=["hook_left", "hook_right"])
    assert cache["hook_left"].data_ptr() == cache["hook_right"].data_ptr()
    with model.hooks([("hook_right", spoil)]):
        _, cache = model.run_with_cache(some_input(), names_filter=["hook_left", "hook_right"])
    assert torch.equal(cache["hook_left"], recorded_plainly()["hook_left"])
    assert cache["hook_right"].isnan().all()


def test_recorders_added_by_hand() -> None:
    model = net()
    everything, some = model.cache_all(None), model.cache_some(None, "hook_left")
    given: dict[str, Tensor] = {}
    assert model.cache_all(given) is given
    assert model.is_caching
    model.run_with_hooks(some_input(), fwd_hooks=[("hook_right", spoil)])
    expected = recorded_plainly()
    assert list(everything) == list(given) == BARE
    assert list(some) == ["hook_left"]
    for cache in (everything, some, given):
        assert torch.equal(cache["hook_left"], expected["hook_left"])
    before = snapshot(everything)
    model.reset_hooks()
    assert not model.is_caching
    model.run_with_hooks(2 * some_input(), fwd_hooks=[("*", spoil)])
    assert list(everything) == list(before)
    for name in before:
        assert_equal(everything[name], before[name])


def test_a_cached_value_that_starts_another_run_is_not_edited_by_its_hooks() -> None:
    model = net()
    _, cache = model.run_with_cache(some_input())
    before = snapshot(cache)
    model.run_with_hooks(cache["hook_left"], fwd_hooks=[("*", spoil)])
    model(cache["hook_left"], loss=True).backward()
    assert all(torch.equal(cache[name], before[name]) for name in cache)


def test_gradients_never_change_either() -> None:
    """Autograd gives the gradient at the first point to the input's .grad, and adds the next one into it."""
    model, x = net(), some_input().requires_grad_()
    _, cache = model.run_with_cache(x, loss=True, incl_bwd=True)
    before = snapshot(cache)
    model.run_with_hooks(x, loss=True, bwd_hooks=[("*", spoil)]).backward()
    model(x, loss=True).backward()
    assert all(torch.equal(cache[name], before[name]) for name in cache)


def test_a_module_that_works_in_place_does_not_spoil_a_wrapped_nets_cache() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Sigmoid())
    _, cache = wrap(inner).run_with_cache(some_input())
    assert (cache["0"] < 0).any()
    assert torch.equal(cache["1"], cache["0"].relu())


# ---- options -----------------------------------------------------------------------------------------------


class Odd(HookedRootModule):
    """The position axis has a different index at each site, or does not exist."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_pattern = HookPoint("batch", "head", "query_pos", "key_pos")
        self.hook_z = HookPoint("batch", "pos", "head", "d_head")
        self.hook_scalar = HookPoint("batch", "d_model")
        self.hook_table = HookPoint("pos", "d_model")
        self.setup()

    def forward(self) -> None:
        self.hook_pattern(torch.arange(24.0).view(1, 2, 3, 4))
        self.hook_z(torch.arange(24.0).view(1, 3, 2, 4))
        self.hook_scalar(torch.arange(4.0).view(1, 4))
        self.hook_table(torch.arange(12.0).view(3, 4))


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("pos_slice", "index"),
    [(1, [1]), (-1, [2]), ((0, 2), [0, 1]), (slice(1, None), [1, 2]), ([2, 0], [2, 0]), (None, [0, 1, 2])],
)
def test_pos_slice_reads_the_dims_and_ints_keep_the_axis(pos_slice: Any, index: list[int]) -> None:
    _, whole = Odd().run_with_cache()
    _, cache = Odd().run_with_cache(pos_slice=pos_slice)
    assert torch.equal(cache["hook_pattern"], whole["hook_pattern"][:, :, index])
    assert torch.equal(cache["hook_z"], whole["hook_z"][:, index])
    assert torch.equal(cache["hook_scalar"], whole["hook_scalar"])
    assert torch.equal(cache["hook_table"], whole["hook_table"][index])
    assert cache.nbytes == sum(value.numel() * 4 for value in cache.values())  # nothing kept behind a view


def test_remove_batch_dim() -> None:
    _, cache = Odd().run_with_cache(remove_batch_dim=True)
    assert not cache.has_batch_dim
    assert [value.ndim for value in cache.values()] == [3, 3, 1, 2]
    model = net()
    one_row, whole = some_input()[:1], model.run_with_cache(some_input()[:1])[1]
    _, cache = model.run_with_cache(one_row, loss=True, incl_bwd=True, remove_batch_dim=True)
    assert all(value.shape == (3, D) for value in cache.values())
    assert torch.equal(cache["hook_left"], whole["hook_left"][0])
    with pytest.raises(ValueError, match=r"batch dimension of 'hook_in', of shape \(2, 3, 4\)"):
        model.run_with_cache(some_input(), remove_batch_dim=True)
    assert_no_hook_left(model)


def test_device_and_plain_dict() -> None:
    model = net()
    out, cache = model.run_with_cache(some_input(), device="meta", return_cache_object=False)
    assert type(cache) is dict
    assert {value.device.type for value in cache.values()} == {"meta"}
    assert out.device.type == "cpu"


@pytest.mark.parametrize("frozen", [True, False])
def test_incl_bwd(frozen: bool) -> None:
    model = net().requires_grad_(not frozen)
    _, cache = model.run_with_cache(some_input(), loss=True, incl_bwd=True, names_filter=["hook_in", "hook_out"])
    assert list(cache) == ["hook_in", "hook_out", "hook_out_grad", "hook_in_grad"]
    x = some_input().requires_grad_()
    net()(x, loss=True).backward()
    assert_close(cache["hook_in_grad"], x.grad, depth=GRADIENT)
    assert_close(cache["hook_out_grad"], 2 * cache["hook_out"], depth=GRADIENT)
    assert (model.blocks[0].linear.weight.grad is None) == frozen
    assert_no_hook_left(model)


def test_incl_bwd_needs_a_scalar_and_gradients() -> None:
    model = net()
    with pytest.raises(ValueError, match=r"scalar output to differentiate, got \(2, 3, 4\)"):
        model.run_with_cache(some_input(), incl_bwd=True)
    with torch.no_grad(), pytest.raises(ValueError, match="no_grad"):
        model.run_with_cache(some_input(), loss=True, incl_bwd=True)
    assert_no_hook_left(model)


def test_what_is_no_tensor_cannot_be_cached() -> None:
    class Pair(HookedRootModule):
        def __init__(self) -> None:
            super().__init__()
            self.hook_pair = HookPoint()
            self.setup()

        def forward(self, x: Tensor) -> Any:
            return self.hook_pair((x, x))

    with pytest.raises(TypeError, match="the value at 'hook_pair' is a tuple"):
        Pair().run_with_cache(torch.ones(1))


# ---- the Cache itself --------------------------------------------------------------------------------------


def test_a_missing_key_says_what_is_there_and_which_filter_keeps_it() -> None:
    _, cache = net().run_with_cache(some_input(), names_filter=["hook_left", "hook_out"])
    with pytest.raises(KeyError) as raised:
        cache["hook_right"]
    message = str(raised.value)
    for part in ["'hook_right'", "2 tensors", "'hook_left'", "'hook_out'", "names_filter='hook_right'"]:
        assert part in message
    with pytest.raises(KeyError, match="0 tensors; run_with_cache"):
        Cache({})["x"]
    assert "hook_right" not in cache
    assert ("hook_left", 3) not in cache
    assert [] not in cache
    assert cache.get("hook_right") is None


def test_mapping_select_stack() -> None:
    _, cache = net().run_with_cache(some_input())
    assert dict(cache.items()).keys() == set(BARE)
    assert list(cache.select("blocks.1.*")) == ["blocks.1.hook_pre", "blocks.1.hook_post"]
    assert list(cache.select(lambda name: "left" in name)) == ["hook_left"]
    assert cache.select("hook_in")["hook_in"] is cache["hook_in"]
    with pytest.warns(UserWarning, match=r"'zzz\*' selects none of \d+ tensors; did you mean '"):
        assert len(cache.select("zzz*")) == 0
    assert torch.equal(cache.stack("*.hook_pre"), torch.stack([cache["blocks.0.hook_pre"], cache["blocks.1.hook_pre"]]))
    with pytest.raises(KeyError, match="no_such"):
        cache.stack("no_such*")
    assert "8 tensors" in repr(cache)


def test_batch_rows_and_moving() -> None:
    _, cache = net().run_with_cache(some_input())
    assert cache.apply_slice_to_batch_dim((0, 1))["hook_in"].shape == (1, 3, D)
    one = cache.apply_slice_to_batch_dim(1)
    assert torch.equal(one["hook_in"], some_input()[1])
    assert not one.has_batch_dim
    with pytest.raises(ValueError, match="no batch dimension"):
        one.apply_slice_to_batch_dim(0)
    with pytest.raises(ValueError, match="batch dimension of 'hook_in'"):
        cache.remove_batch_dim()
    assert cache.has_batch_dim
    assert cache["hook_in"].shape[0] == BATCH
    row = cache.apply_slice_to_batch_dim([1]).remove_batch_dim().remove_batch_dim()
    assert torch.equal(row["hook_in"], some_input()[1])
    mixed = Cache({"a": torch.ones(2), "ids": torch.ones(2, dtype=torch.long)})
    assert mixed.to("cpu", torch.float64) is mixed
    assert (mixed["a"].dtype, mixed["ids"].dtype) == (torch.float64, torch.long)


def test_memory_report_and_bytes() -> None:
    _, cache = net().run_with_cache(some_input())
    size = 4 * some_input().numel()
    assert cache.memory_report() == {
        "blocks.*.hook_pre": 2 * size,
        "blocks.*.hook_post": 2 * size,
        "hook_in": size,
        "hook_left": size,
        "hook_right": size,
        "hook_out": size,
    }
    assert cache.nbytes == 7 * size  # left and right are one tensor


def test_save_and_load(tmp_path: Path) -> None:
    _, cache = net().run_with_cache(some_input()[:1], remove_batch_dim=True)
    cache.save(tmp_path / "cache.safetensors")
    loaded = Cache.load(tmp_path / "cache.safetensors")
    assert list(loaded) == list(cache)
    assert not loaded.has_batch_dim
    assert all(torch.equal(loaded[name], cache[name]) for name in cache)

    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"other\.safetensors is not a cache"):
        Cache.load(tmp_path / "other.safetensors")


def test_toggle_autodiff() -> None:
    try:
        Cache({}).toggle_autodiff(False)
        assert not torch.is_grad_enabled()
    finally:
        Cache({}).toggle_autodiff(True)
    assert torch.is_grad_enabled()


def test_a_bare_cache_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net().run_with_cache(some_input())
