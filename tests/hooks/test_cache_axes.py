"""Rows and positions are taken along the axes that a site names, not along those that most sites have."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoderDecoder
from hooked_lm.hooks import Cache, HookedRootModule, HookPoint, wrap
from tests.models.test_mixtures import built, random_tokens

EXPERT = "blocks.1.mlp.experts.*"


class Tables(HookedRootModule):
    """Beside values of rows, one that all rows share, as long as there are rows, and points without names."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_rows = HookPoint("batch", "pos", "d_model")
        self.hook_table = HookPoint("bucket", "d_model")
        self.bare = HookPoint()
        self.setup()

    def forward(self, rows: Tensor) -> Tensor:
        self.hook_table(torch.arange(6.0).view(len(rows), -1))
        return self.bare(self.hook_rows(rows)).sum()


ROWS = torch.arange(24.0).view(2, 3, 4)


def test_a_value_without_a_batch_axis_keeps_its_first() -> None:
    _, cache = Tables().run_with_cache(ROWS[:1].requires_grad_(), incl_bwd=True)
    whole = cache["hook_table"].clone()
    assert cache.remove_batch_dim() is cache
    assert torch.equal(cache["hook_table"], whole)
    assert cache["hook_rows"].shape == cache["hook_rows_grad"].shape == (3, 4)
    _, recorded = Tables().run_with_cache(ROWS[:1], remove_batch_dim=True)
    assert {name: value.shape for name, value in recorded.items()} == {
        name: value.shape for name, value in cache.items() if not name.endswith("_grad")
    }


@pytest.mark.parametrize("rows", [0, -1, [1], (0, 1), slice(1, None)])
def test_rows_of_what_has_none_are_refused_by_name(rows: Any, tmp_path: Path) -> None:
    _, cache = Tables().run_with_cache(ROWS)
    cache.save(tmp_path / "cache.safetensors")
    for one in (cache, Cache.load(tmp_path / "cache.safetensors"), cache.select("*")):
        with pytest.raises(ValueError, match=r"'hook_table' \[bucket, d_model\] has no batch axis.*cache.select"):
            one.apply_slice_to_batch_dim(rows)
        some = one.select(lambda name: "table" not in name).apply_slice_to_batch_dim(rows)
        assert torch.equal(some["bare"], ROWS[slice(*rows) if isinstance(rows, tuple) else rows])


def test_positions_of_points_without_names() -> None:
    _, cache = Tables().run_with_cache(ROWS, pos_slice=-1)
    assert torch.equal(cache["bare"], ROWS[:, -1:])
    assert cache["hook_table"].shape == (2, 3)
    net = wrap(torch.nn.Sequential(torch.nn.Linear(4, 2)))
    assert net.run_with_cache(ROWS, pos_slice=(0, 2))[1]["0"].shape == (2, 2, 2)
    with pytest.raises(
        ValueError, match=r"pos_slice: the position axis of '.*', of shape \(3, .*HookPoint\('batch', 'pos'\)"
    ):
        net.run_with_cache(ROWS[0], pos_slice=-1)


def test_tokens_of_an_expert_are_no_rows() -> None:
    model = built("gated")
    _, cache = model.run_with_cache(random_tokens(1), names_filter=[EXPERT, "hook_embed"])
    whole = {name: value.clone() for name, value in cache.items()}
    cache.remove_batch_dim()
    for name, value in cache.items():
        assert torch.equal(value, whole[name] if "experts" in name else whole[name][0]), name
    _, two = model.run_with_cache(random_tokens(2), names_filter=[EXPERT, "hook_embed"])
    with pytest.raises(ValueError, match=r"experts\.0\.\w+' \[routed, \w+\] has no batch axis"):
        two.apply_slice_to_batch_dim(0)
    assert two.select("hook_embed").apply_slice_to_batch_dim(1)["hook_embed"].shape == two["hook_embed"].shape[1:]


def test_an_encoder_decoders_cache_knows_the_axes_too() -> None:
    cfg = {"n_layers": 1, "d_model": 16, "n_heads": 2, "n_ctx": 16, "d_vocab": 12, "act_fn": "relu", "seed": 0}
    model = HookedEncoderDecoder({**cfg, "decoder_start_token_id": 0})
    _, cache = model.run_with_cache(torch.tensor([[3, 4], [5, 6]]))
    assert cache.dims_of("decoder.0.attn.hook_z") == ("batch", "pos", "head", "d_head")
    assert cache.dims_of("no.such") == ()
    assert all(value.shape[0] == 1 for value in cache.apply_slice_to_batch_dim([1]).values())


# ---- caches without names of axes ------------------------------------------------------------------------------------


def unnamed(n: int) -> Cache:
    """A batch of `n` rows, and a value that all rows share."""
    rows = torch.arange(float(n * 4)).view(n, 4)
    return Cache({"rows": rows, "double": 2 * rows, "shared": torch.ones(1, 4)})


@pytest.mark.parametrize("rows", [(1, 3), [2], -1, slice(1, None)])
def test_a_row_that_the_whole_batch_shares_is_in_every_slice(rows: Any) -> None:
    whole = unnamed(3)
    some = whole.apply_slice_to_batch_dim(rows)
    chosen = slice(*rows) if isinstance(rows, tuple) else rows
    assert torch.equal(some["rows"], whole["rows"][chosen])
    assert torch.equal(some["shared"], whole["shared"][0] if rows == -1 else whole["shared"])
    named = Cache(whole.cache_dict, dims=dict.fromkeys(whole, ("batch", "d_model"))).apply_slice_to_batch_dim(rows)
    assert all(torch.equal(named[name], some[name]) for name in whole)


def test_a_value_of_another_length_has_no_rows() -> None:
    cache = Cache({"a": torch.ones(1, 4), "b": torch.ones(1, 5), "bias": torch.ones(5, 5), "loss": torch.ones(())})
    with pytest.raises(ValueError, match=r"'bias' \[5, 5\] has no batch axis.*cache.select"):
        cache.apply_slice_to_batch_dim([0])
    shapes = {name: tuple(value.shape) for name, value in cache.remove_batch_dim().items()}
    assert shapes == {"a": (4,), "b": (5,), "bias": (5, 5), "loss": ()}
    with pytest.raises(AssertionError, match=r"'rows', of shape \(2, 4\): it has batch size 2, not one row"):
        unnamed(2).remove_batch_dim()


def test_an_unknown_batch_size_is_refused() -> None:
    cache = Cache({"a": torch.ones(3, 4), "b": torch.ones(2, 4)})
    for use in (cache.remove_batch_dim, lambda: cache.apply_slice_to_batch_dim(0)):
        with pytest.raises(ValueError, match=r"batch size is unknown.*\(3 of 'a', 2 of 'b'\).*cache.select"):
            use()
    assert Cache({}).remove_batch_dim().has_batch_dim is False
