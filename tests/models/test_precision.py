"""bfloat16 and float16 from end to end: every way to use a model gives what it gives in float32, to their rounding."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis import attribute
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.harvest import harvest
from hooked_lm.models.loss import lm_cross_entropy_loss
from tests.close import GRADIENT, MODEL, assert_apart, assert_close
from tests.models.toys import ids, toy

SITE = "blocks.1.hook_resid_post"
Pair = tuple[HookedTransformer, HookedTransformer]


@pytest.fixture(scope="module", params=["rotary", "windowed"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=str)
def pair(kind: str, request: pytest.FixtureRequest) -> Pair:
    """A model in half precision, and the same rounded weights in float32."""
    low = toy(kind, initializer_range=0.1).to(request.param)
    return low, deepcopy(low).float()


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 3] - logits[:, -1, 7]).float()


def near(low: Tensor, full: Tensor, dtype: torch.dtype, depth: float = MODEL) -> None:
    """Close, to the rounding of a dtype, and not all alike."""
    assert_close(low, full, depth, dtype=dtype)
    assert full.std() > 0


@torch.no_grad()
def test_every_site_has_the_dtype_of_the_model(pair: Pair) -> None:
    low, full = pair
    dtype = low.cfg.dtype
    logits, cache = low.run_with_cache(ids())
    expected, exact = full.run_with_cache(ids())
    assert logits.dtype == dtype
    wider = {name for name, value in cache.items() if value.is_floating_point() and value.dtype != dtype}
    assert wider == {name for name in cache if name.endswith("hook_scale")}, (
        "norms are computed in float32, nothing else"
    )
    near(logits, expected, dtype)
    near(cache[SITE], exact[SITE], dtype)


@torch.no_grad()
def test_edits_and_cached_steps(pair: Pair) -> None:
    low, full = pair
    dtype, hooks = low.cfg.dtype, [(SITE, lambda value, hook: value * 1.5)]
    edited = low.run_with_hooks(ids(), fwd_hooks=hooks)
    near(edited, full.run_with_hooks(ids(), fwd_hooks=hooks), dtype)
    assert_apart(edited.float(), full(ids()), times=0.01)
    cache = KeyValueCache(low.cfg.n_layers)
    low(ids()[:, :6], past_kv_cache=cache)
    assert cache[0].past_keys is not None
    assert cache[0].past_keys.dtype == dtype
    near(low(ids()[:, 6:], past_kv_cache=cache), full(ids())[:, 6:], dtype)


@torch.no_grad()
def test_generation_follows_the_logits_of_the_model(pair: Pair) -> None:
    low, full = pair
    out = low.generate(ids(), 4, do_sample=False, stop_at_eos=False, verbose=False)
    logits = full(out)[:, 9:-1]
    chosen = logits.gather(2, out[:, 10:, None])[..., 0]
    assert_close(chosen, logits.amax(-1), dtype=low.cfg.dtype)


def test_a_loss_is_computed_in_fp32() -> None:
    logits = (4 * torch.randn(2, 5, 50)).bfloat16()
    assert torch.equal(lm_cross_entropy_loss(logits, ids(2, 5)), lm_cross_entropy_loss(logits.float(), ids(2, 5)))


@torch.no_grad()
def test_sweeps(pair: Pair) -> None:
    found, exact = (patching.sweep(m, ids(1), ids(1, seed=2), metric=metric, progress=False).values for m in pair)
    near(found, exact, pair[0].cfg.dtype)


def test_attribution(pair: Pair) -> None:
    found, exact = (attribute(m, ids(1), ids(1, seed=2), metric=metric, check=False).values for m in pair)
    near(found, exact, pair[0].cfg.dtype, GRADIENT)


def test_harvests(pair: Pair, tmp_path: Path) -> None:
    low, full = pair
    store = harvest(low, ids(4), SITE, tmp_path / "store", dtype=low.cfg.dtype, progress=False)
    _, cache = full.run_with_cache(ids(4), names_filter=SITE)
    near(store[SITE][:], cache[SITE].flatten(0, 1), low.cfg.dtype)
