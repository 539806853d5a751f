"""The size of a cache before the run, and where its values are copied from during the run."""

from typing import Any

import pytest
import torch

from hooked_lm import HookedEncoderDecoder, HookedTransformer
from hooked_lm.hooks import recorder as recorder_module
from tests.families import CASES
from tests.families._models import hooked
from tests.models.toys import ids, toy


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "jamba", "bert", "t5", "deepseek_v3"])
def test_an_estimate_is_exact(family: str):
    case = next(case for case in CASES if case.family == family)
    model, tokens = hooked(case), torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = (tokens, tokens[:, :4]) if isinstance(model, HookedEncoderDecoder) else (tokens,)
    estimate = model.estimate_cache(*(tuple(each.shape) for each in inputs))
    _, cache = model.run_with_cache(*inputs)
    assert list(estimate.cache) == list(cache)
    assert estimate.nbytes == cache.nbytes > 0
    for by in ("site", "dtype", "device"):
        assert estimate.memory_report(by) == cache.memory_report(by)
    assert not any(type(value) is not torch.Tensor for value in model.run_with_cache(*inputs)[1].values())


def test_experts_are_known_together():
    case = next(case for case in CASES if case.family == "mixtral")
    model, tokens = hooked(case), torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"names_filter": "blocks.*.mlp.experts.*.hook_post"}
    estimate, (_, cache) = model.estimate_cache(tokens, **options), model.run_with_cache(tokens, **options)
    assert sum(estimate.memory_report().values()) == sum(cache.memory_report().values()) > 0


@pytest.mark.slow
def test_filters_text_and_options():
    model = HookedTransformer.from_pretrained("demo")
    text = "The capital of France is"
    for options in (
        {},
        {"names_filter": "blocks.*.attn.hook_z"},
        {"pos_slice": -1},
        {"names_filter": ("resid_post", 1), "stop_at_layer": 2},
    ):
        assert model.estimate_cache(text, **options).nbytes == model.run_with_cache(text, **options)[1].nbytes
    assert "MiB  in all, 4 tensors of float32" in str(model.estimate_cache((2, 8), names_filter="blocks.*.attn.hook_z"))
    with pytest.raises(ValueError, match="by must be one of 'site', 'name', 'device', 'dtype', got 'layer'"):
        model.estimate_cache((2, 8)).memory_report("layer")


def test_copies_from_a_gpu_are_awaited_once(monkeypatch: pytest.MonkeyPatch):
    """The order of events, with `meta` as the device of the cache and the CPU as the GPU."""
    waited = []
    monkeypatch.setattr(recorder_module, "_is_on_gpu", lambda value: value.device.type == "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    model = toy()
    _, cache = model.run_with_cache(ids(), device="meta")
    assert waited == ["cpu"]
    assert {value.device.type for value in cache.values()} == {"meta"}
    model.run_with_cache(ids())
    model.run_with_cache(ids(), device="cpu")
    kept = model.add_caching_hooks(
        "blocks.*.attn.hook_z", device="meta"
    )  # nothing waits after these runs, so each copy is complete
    model(ids())
    assert kept["blocks.0.attn.hook_z"].device.type == "meta"
    assert waited == ["cpu"]


def test_a_shape_that_is_none() -> None:
    model = HookedTransformer.from_pretrained("demo")
    for shape in ((-1, 4), (0, 4)):
        with pytest.raises(ValueError, match=r"numbers of at least 1, got \(.*, 4\)"):
            model.estimate_cache(shape)
