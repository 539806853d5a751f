"""What a call leaves behind belongs to that call: not to another thread's, not to another call's, and not to a graph for ever."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.interventions import Record, Statistics, Store, TopExamples, ZeroAblate
from hooked_lm.interventions.dictionaries import (
    SAE,
    Dictionary,
    Features,
    Normalized,
    TopK,
    Transcode,
    Transcoder,
    run_with_features,
)
from tests.close import assert_apart, assert_close
from tests.interventions.dictionaries.test_hook import TWO_SITES, noisy
from tests.interventions.tables import D, numbers
from tests.models.toys import ids, toy

N_THREADS = 4


def at_once(*work: Callable[[], Any]) -> list[Any]:
    """What each function returns, all of them started together.

    A new thread may share out its products among more threads than the first one does, and so round them differently.
    """
    start = Barrier(len(work))

    def run(one: Callable[[], Any]) -> Any:
        start.wait()
        return one()

    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result() for future in [pool.submit(run, one) for one in work]]


class Remembering:
    """A dictionary of somebody else: `encode` keeps the scale that one `decode` uses up; other threads come between."""

    def __init__(self, sae: SAE, met: Callable[[], Any] = lambda: None) -> None:
        self.sae, self.scale, self.met = sae, None, met

    def encode(self, x: Tensor) -> Tensor:
        self.scale = x.norm(dim=-1, keepdim=True)
        return self.sae.encode(x / self.scale)

    def decode(self, features: Tensor) -> Tensor:
        scale, self.scale = self.scale, None
        assert scale is not None
        return self.sae.decode(features) * scale


# ---- norms of vectors ------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("how", ["layer_norm", "constant_norm_rescale"])
def test_features_are_decoded_with_the_norms_of_their_own_vectors(how: str) -> None:
    sae, one, other = Normalized(noisy(SAE.Config(D, 48)), how), numbers(5, D), 40 * numbers(5, D, seed=1) + 3
    expected = sae(one), sae(other)
    first, second = sae.encode(one), sae.encode(other)
    assert torch.equal(sae.decode(first), expected[0])
    assert torch.equal(sae.decode(second), expected[1])
    edited = first.clone()
    with pytest.raises(ValueError, match=r"are not the tensor that encode returned.*decode\(features, of=x\)"):
        sae.decode(edited)
    assert torch.equal(sae.decode(edited, of=one), expected[0])
    first.mul_(2)
    assert torch.equal(sae.decode(first), sae.decode(first.clone(), of=one))


@torch.no_grad()
def test_a_normalized_dictionary_in_threads() -> None:
    sae = Normalized(noisy(SAE.Config(D, 48)), "layer_norm")
    inputs = [10.0**i * numbers(64, D, seed=i) for i in range(N_THREADS)]
    expected = [sae(x) for x in inputs]
    for _ in range(50):
        found = at_once(*[lambda x=x: sae(x) for x in inputs])
        assert_close(found, expected)  # the norms of others are 10 times as large
    assert not any(isinstance(value, (Tensor, tuple)) for value in vars(sae).values())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["ours", "theirs"])
@pytest.mark.parametrize("error", ["keep", "drop"])
def test_hooks_with_a_dictionary_in_threads(kind: str, error: str) -> None:
    """Each thread is held in its edit until the others have encoded."""
    sae = noisy(SAE.Config(D, 48))
    dictionary, meet = Normalized(sae, "layer_norm") if kind == "ours" else Remembering(sae), Barrier(N_THREADS)

    def edit(features: Tensor) -> None:
        meet.wait(60)
        features[..., 3] += 2

    point = HookPoint("batch", "pos", "d_model")
    point.name = "here"
    hook = Dictionary("here", sae=dictionary, edit=edit, error=error)
    values = [10.0**i * numbers(2, 5, D, seed=i) for i in range(N_THREADS)]
    found = at_once(*[lambda x=x: (hook(x, point), hook.features) for x in values])
    meet = Barrier(1)
    for value, (changed, features) in zip(values, found, strict=True):
        assert_close(changed, hook(value, point))  # the norms of others are 10 times as large
        assert_close(features, dictionary.encode(value))


@torch.no_grad()
def test_two_transcoders_that_share_an_object_in_one_run() -> None:
    """Between the two sites of the one, the other encodes."""
    model, tokens, given = toy("rotary"), ids(2, 5), noisy(Transcoder.Config(D, 48))
    shared = [[f"blocks.{i}.hook_resid_pre", f"blocks.{2 - i}.hook_mlp_out"] for i in (0, 1)]
    shared[1][1] = "blocks.2.hook_attn_out"

    def left(*objects: Any) -> Tensor:
        hooks = [Transcode(sites, sae=one, error="drop") for sites, one in zip(shared, objects, strict=True)]
        return model.run_with_hooks(tokens, fwd_hooks=hooks)

    one = Remembering(given)
    assert torch.equal(left(one, one), left(Remembering(given), Remembering(given)))


# ---- graphs ----------------------------------------------------------------------------------------------------------


class Marker:
    """Something to see whether it is alive."""


@pytest.mark.slow
def test_a_dictionary_keeps_no_graph_alive() -> None:
    model, tokens = toy("rotary"), ids(2, 5)
    model.requires_grad_(True)
    for hook in (
        Dictionary("resid_post", 1, noisy(TopK.Config(D, 48, k=4))),
        Transcode(TWO_SITES["decoder"], sae=noisy(Transcoder.Config(D, 48))),
        Features("resid_post", 1, noisy(SAE.Config(D, 48))),
    ):
        early: list[weakref.ref[Any]] = []

        def keep(value: Tensor, hook: Any, early: Any = early) -> Tensor:
            changed, marker = value * 1, Marker()
            early.append(weakref.ref(marker))
            changed.grad_fn.metadata["marker"] = marker  # alive as long as the graph is
            return changed

        logits = model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_pre", keep), hook])
        if not isinstance(hook, Features):
            [gradient] = torch.autograd.grad(logits.sum(), hook.features)
            assert gradient.any()
        values = hook.features.detach().clone()
        assert early[0]() is not None
        del logits
        gc.collect()
        assert early[0]() is None, type(hook).__name__
        assert torch.equal(hook.features, values)
        assert hook.features.grad_fn is None


def test_features_of_a_run_are_in_its_graph() -> None:
    model, tokens = toy("rotary"), ids(2, 5)
    model.requires_grad_(True)
    watch = Features("resid_post", 1, noisy(SAE.Config(D, 48)))
    other = Dictionary("resid_post", 0, noisy(SAE.Config(D, 48)), error="drop")
    number = model.register(other)
    _, features = run_with_features(model, tokens, [watch])
    model.unregister(number)
    assert list(features) == ["blocks.1.hook_resid_post"]
    features["blocks.1.hook_resid_post"].sum().backward()
    assert model.embed.W_E.grad is not None
    assert model.embed.W_E.grad.any()


def test_what_was_seen_is_not_copied() -> None:
    hook = Dictionary("resid_post", 1, noisy(TopK.Config(D, 48, k=4)))
    toy("rotary").run_with_hooks(ids(2, 5), fwd_hooks=[hook])
    for twin in (copy.copy(hook), copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert not twin.by_site
    assert hook.by_site
    hook.forget()
    with pytest.raises(ValueError, match="no run yet in this thread"):
        _ = hook.features


# ---- detectors that threads share ------------------------------------------------------------------------------------


@torch.no_grad()
def test_detectors_add_up_what_threads_show_them() -> None:
    """Each thread with tokens, padding and numbers of its own; between tokens and values all others come by."""
    model, meet, site = toy("rotary"), Barrier(N_THREADS), "blocks.1.hook_resid_post"
    top, seen, record = TopExamples(site, k=2, context=0), Statistics(site), Record(site)
    batches = [ids(2, 4, seed=i) for i in range(N_THREADS)]
    masks = [torch.arange(4)[None].expand(2, 4) < i + 1 for i in range(N_THREADS)]

    def wait(value: Tensor, hook: HookPoint) -> None:
        meet.wait(60)

    def run(i: int) -> None:
        for _ in range(5):
            for one in (top, seen):
                one.batch(batches[i], masks[i])
            hooks = [("blocks.0.hook_resid_pre", wait), top, seen, record]
            model.run_with_hooks(batches[i], attention_mask=masks[i], fwd_hooks=hooks)

    at_once(*[lambda i=i: run(i) for i in range(N_THREADS)])
    values = [
        model.run_with_cache(tokens, attention_mask=mask, names_filter=site)[1][site][mask]
        for tokens, mask in zip(batches, masks, strict=True)
    ]
    data = torch.cat(values).double()
    assert seen[site].count == 5 * len(data) == 5 * sum(int(mask.sum()) for mask in masks)
    assert_close(seen[site].mean.float(), data.mean(0).float())
    assert_close(seen[site].maximum.float(), data.amax(0).float())
    assert len(record.values[site]) == 5 * N_THREADS
    assert record.n_bytes == sum(value.nbytes for value in record.values[site])
    found = top.examples()
    assert_close(found.values[:, 0], data.amax(0).float())
    assert top.inputs.n_texts == 5 * 2 * N_THREADS


@torch.no_grad()
def test_switched_off_in_one_thread_is_on_in_another() -> None:
    model, meet, hook = toy("rotary"), Barrier(2), ZeroAblate("resid_post", 1)
    tokens = ids(1, 4)
    plain, ablated = model(tokens), model.run_with_hooks(tokens, fwd_hooks=[hook])

    def off() -> Tensor:
        with hook.disabled():
            meet.wait(60)
            found = model.run_with_hooks(tokens, fwd_hooks=[hook])
            meet.wait(60)
        return found

    def on() -> Tensor:
        meet.wait(60)
        found = model.run_with_hooks(tokens, fwd_hooks=[hook])
        meet.wait(60)
        return found

    first, second = at_once(off, on)
    assert_close(first, plain)
    assert_close(second, ablated)
    assert_apart(first, second)
    assert hook.is_enabled


@torch.no_grad()
def test_a_store_has_one_run_for_all_threads(tmp_path: Path) -> None:
    record = Record("blocks.0.hook_resid_pre", store=tmp_path)
    model = toy("rotary")
    at_once(*[lambda: model.run_with_hooks(ids(1, 3), fwd_hooks=[record]) for _ in range(N_THREADS)])
    assert len(Store(tmp_path)) == 1
    assert len(record.run) == N_THREADS
