"""Streaming statistics against the whole of the data at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer
from hooked_lm.hooks import wrap
from hooked_lm.interventions import Hooks
from hooked_lm.interventions.statistics import Statistics, summary_of
from hooked_lm.interventions.store import Store
from tests.close import LAYER, assert_close, assert_near
from tests.interventions.held import held_bytes
from tests.interventions.test_detectors import KINDS, one

SPARE = {"do_sample": False, "verbose": False, "stop_at_eos": False}


@pytest.fixture(scope="module")
def demo() -> Any:
    return HookedTransformer.from_pretrained("demo")


def identity() -> Any:
    return wrap(nn.Sequential(nn.Identity()))


def shown(detector: Any, *batches: Tensor) -> Any:
    for batch in batches:
        identity().run_with_hooks(batch, fwd_hooks=[detector])
    return detector


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_batches_are_those_of_all_data(kind: str) -> None:
    model, batches, site = one(kind)
    found, values = Statistics(site, covariance=True, edges=[-1.0, 0.0, 0.5]), []
    for batch in batches:
        plain, cache = model.run_with_cache(*batch, names_filter=site)
        assert model.run_with_hooks(*batch, fwd_hooks=[found]).equal(plain)
        values.append(cache[site].flatten(0, 1).double())
    data, seen = torch.cat(values), found[site]
    assert seen.count == len(data)
    assert_close(seen.mean, data.mean(0))
    assert_close(seen.variance, data.var(0, correction=0))
    assert seen.covariance is not None
    assert_close(seen.covariance, torch.cov(data.T, correction=0))
    assert seen.minimum.equal(data.amin(0))
    assert seen.maximum.equal(data.amax(0))
    assert seen.histogram is not None
    assert seen.below is not None
    assert seen.above is not None
    for i in range(data.shape[1]):
        assert seen.histogram[i].tolist() == np.histogram(data[:, i], [-1.0, 0.0, 0.5])[0].tolist()
    assert seen.below.equal((data < -1).sum(0))
    assert seen.above.equal((data > 0.5).sum(0))


@pytest.mark.parametrize("covariance", [False, True])
def test_variance_of_one_around_a_million(covariance: bool) -> None:
    data = (1e6 + torch.randn(200, 64, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).float()
    seen = shown(Statistics("0", covariance=covariance), *data)["0"]
    exact = data.double().flatten(0, 1)
    expected = exact.var(0, correction=0)
    assert_near(seen.variance, expected, 1e-9 if covariance else 1e-6, because="squares of a million are subtracted")
    assert_close(seen.mean, exact.mean(0))
    if seen.covariance is not None:
        # how far the means of batches are apart is known as well as they are: to one rounding of a million
        assert_close(seen.covariance, torch.cov(exact.T, correction=0), LAYER, scale=exact.mean(0))
    flat = data.flatten(0, 1)  # what the sum of squares would say in the dtype of the data: nothing
    naive = (flat.square().mean(0) - flat.mean(0).square()).double()
    assert (naive - 1).abs().min() > 0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_every_dtype_and_an_outlier(dtype: torch.dtype) -> None:
    data = 3 * torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    data[0, 1] = 1e4  # such as a BOS leaves
    data = data.to(dtype)
    seen, exact = shown(Statistics("0"), *data.split(77))["0"], data.double()
    computed = torch.float64 if dtype in (torch.float64, torch.int64) else torch.float32
    variance = exact.var(0, correction=0)  # of the outlier's entry 20000 times that of others: each by its own measure
    assert_close((seen.mean - exact.mean(0)) / variance.sqrt(), torch.zeros(4), LAYER, scale=1.0, dtype=computed)
    assert_close(seen.variance / variance, torch.ones(4), LAYER, dtype=computed)
    assert seen.minimum.equal(exact.amin(0)) and seen.maximum.equal(exact.amax(0))  # noqa: PT018


@pytest.mark.parametrize("n_axes", [0, 1, 2, 3])
def test_axes_that_are_features(n_axes: int) -> None:
    data = torch.randn(4, 3, 2, 5)
    seen = shown(Statistics("0", n_axes=n_axes), data[:1], data[1:])["0"]
    flat = data.double().flatten(0, 3 - n_axes) if n_axes < 4 else data
    assert seen.count == len(flat)
    assert seen.mean.shape == data.shape[4 - n_axes :]
    assert_close(seen.std, flat.std(0, correction=0), LAYER, dtype=data.dtype)


def test_edges_belong_to_bins_as_in_numpy() -> None:
    data = torch.tensor([[-0.5], [0.0], [1.0], [2.0], [2.5], [float("nan")]])
    seen = shown(Statistics("0", edges=(0, 1, 2)), data)["0"]
    assert (seen.histogram.tolist(), seen.below.tolist(), seen.above.tolist()) == ([[1, 2]], [1], [1])


def test_the_order_and_size_of_batches_change_nothing() -> None:
    data = torch.randn(31, 3) * torch.tensor([1.0, 1e3, 1e-3]) + 100
    one_by_one, at_once, reverse = (Statistics("0") for _ in range(3))
    shown(one_by_one, *data.split(1)), shown(at_once, data), shown(reverse, *data.split(7)[::-1])
    variance = at_once["0"].variance  # of three sizes: each by its own measure
    for other in (one_by_one, reverse):
        assert_close(other["0"].variance / variance, torch.ones(3), LAYER, dtype=data.dtype)
    left, right = shown(Statistics("0"), data[:9]), shown(Statistics("0"), data[9:])
    left.merge(right)
    assert left["0"].count == 31
    assert_close(left["0"].variance / variance, torch.ones(3), LAYER, dtype=data.dtype)
    assert left["0"].minimum.equal(at_once["0"].minimum)
    with pytest.raises(ValueError, match="n_axes is 1 here and 2 there"):
        left.merge(Statistics("0", n_axes=2))


def test_memory_is_what_is_declared() -> None:
    found = shown(Statistics("0", covariance=True, edges=[0.0, 1.0]), torch.randn(5, 8))
    declared = found.n_bytes
    edges = 2 * 8
    assert declared == 8 * (3 * 8 + 8 * 8 + 8 * 3) + edges
    shown(found, torch.randn(100, 8), torch.randn(1, 8))
    assert held_bytes(found) == declared == found.n_bytes
    found.kept = torch.randn(100, 8)[0]  # what a view would keep alive is seen
    assert held_bytes(found) == declared + 4 * 100 * 8


def test_the_decoder_of_an_encoder_decoder() -> None:
    model, batches, site = one("encoder-decoder")
    found = Statistics(site, tokens="hook_decoder_tokens")
    for batch in batches:
        model.run_with_hooks(*batch, fwd_hooks=[found])
    assert found[site].count == sum(batch[-1].numel() for batch in batches)


def test_padding_is_left_out(demo: Any) -> None:
    tokens = torch.tensor([[3, 9, 8, 7], [3, 6, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    found, unmasked = Statistics("resid_post", 1), Statistics("resid_post", 1)
    found.batch(tokens, mask)
    with demo.hooks([found, unmasked]):
        demo(tokens, attention_mask=mask)
    site = "blocks.1.hook_resid_post"
    real = torch.cat([demo.run_with_cache(row[None])[1][site][0] for row in (tokens[0], tokens[1, :2])])
    assert (found[site].count, unmasked[site].count) == (6, 8)
    assert_close(found[site].mean, real.double().mean(0), dtype=torch.float32)
    wrapped = Statistics("0")
    wrapped.batch(tokens, mask)
    with pytest.raises(ValueError, match=r"is \[1, 4, 8\], and the token ids are \[2, 4\]: run from the tokens on"):
        shown(wrapped, torch.ones(1, 4, 8))
    pattern = Statistics("pattern", 1)
    pattern.batch(tokens, mask)
    with pytest.raises(ValueError, match="a mask of tokens does not apply to"):
        demo.run_with_hooks(tokens, fwd_hooks=[pattern])


@pytest.mark.parametrize("cached", [True, False])
def test_generation_counts_each_token_once(demo: Any, cached: bool) -> None:
    found, site = Statistics("resid_post", 1), "blocks.1.hook_resid_post"
    prompt, mask = torch.tensor([[9, 3, 7], [3, 5, 4]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    with demo.hooks([found]):
        tokens = demo.generate(prompt, 4, attention_mask=mask, use_past_kv_cache=cached, **SPARE)
    rows = [tokens[:1, 1:-1], tokens[1:, :-1]]
    data = torch.cat([demo.run_with_cache(row)[1][site][0] for row in rows]).double()
    assert found[site].count == len(data) == 11
    assert_close(found[site].variance, data.var(0, correction=0), dtype=torch.float32)


def test_results_and_files(demo: Any, tmp_path: Path) -> None:
    found = Statistics(["blocks.0.hook_resid_post", "blocks.1.hook_resid_post"], store=tmp_path / "store")
    demo.run_with_hooks(torch.full((1, 4), 9), fwd_hooks=[found])
    scores = found.scores()
    assert list(scores.axes) == ["site", "statistic", "feature"]
    last = scores.select(site="blocks.1.hook_resid_post", statistic="std").mean
    assert_close(last, found["blocks.1.hook_resid_post"].std.float())
    found.write()
    found.save(tmp_path / "file")
    (run,) = Store(tmp_path / "store")
    stored = {batch.site: summary_of(batch.load()) for batch in run}
    loaded = Statistics.load(tmp_path / "file")
    for read in (stored, loaded):
        for site in found.sites:
            assert read[site].count == 4
            assert read[site].variance.equal(found[site].variance)
    with pytest.raises(KeyError, match=r"there are no values of 'x'; there are values of blocks.0"):
        found["x"]


def test_loaded_statistics_go_on(tmp_path: Path) -> None:
    net, x = (
        wrap(torch.nn.Sequential(torch.nn.Identity())),
        torch.randn(20, 3, generator=torch.Generator().manual_seed(0)),
    )
    whole = Statistics("0", covariance=True, edges=[-1, 0, 2])
    part = Statistics("0", covariance=True, edges=[-1, 0, 2])
    for found, rows in ((whole, x[:12]), (whole, x[12:]), (part, x[:12])):
        net.run_with_hooks(rows, fwd_hooks=[found])
    part.save(tmp_path / "file")
    loaded = Statistics.load(tmp_path / "file")
    net.run_with_hooks(x[12:], fwd_hooks=[loaded])
    for name, value in whole["0"].tensors().items():
        assert torch.equal(loaded["0"].tensors()[name], value), name
    assert loaded.settings()["edges"] == (-1.0, 0.0, 2.0)
    Hooks(part).save(tmp_path / "hooks")
    with pytest.raises(ValueError, match=r"holds type interventions, not Statistics; hooked_lm.load"):
        Statistics.load(tmp_path / "hooks")


def test_bad_settings_of_statistics() -> None:
    with pytest.raises(ValueError, match="edges must be at least two increasing numbers"):
        Statistics("0", edges=[1.0, 1.0])
    with pytest.raises(ValueError, match="n_axes must be at least 0"):
        Statistics("0", n_axes=-1)
    with pytest.raises(ValueError, match=r"'0' is \[3\], which does not have the last n_axes=2 axes"):
        shown(Statistics("0", n_axes=2), torch.ones(3))
    with pytest.raises(ValueError, match=r"has features \[4\], and those before had \[3\]"):
        shown(Statistics("0"), torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="scores need sites with the same features"):
        Statistics("0").scores()
