"""The memory of a run before the run, against what was allocated; and where values of a cache are copied from during the run."""

import copy
from typing import Any

import pytest
import torch

from hooked_lm import HookedEncoderDecoder, HookedTransformer, analysis, patching
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.demo.verbalizer import PATH as VERBALIZER
from hooked_lm.hooks import recorder as recorder_module
from hooked_lm.interventions import Statistics
from hooked_lm.models.twins import twin_of
from tests.benchmarks.interventions import peak_bytes
from tests.close import assert_near
from tests.families import CASES
from tests.families._models import hooked
from tests.models.toys import ids, toy
from tests.rounding import undisturbed

TEXT = "The capital of France is"
ANSWERS = {"answers": ([1, 2], [3, 4])}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "forward": ("forward", {}),
    "a site": ("cache", {"names_filter": "*.hook_z", "return_type": None}),
    "all sites": ("cache", {}),
    "chunks": ("cache", {"chunk": 16, "names_filter": ("resid_post", 1)}),
    "generation": ("generate", {"max_new_tokens": 4, "stop_at_eos": False}),
    "heads": ("sweep", {"by": "head", **ANSWERS}),
    "positions": ("sweep", {"positions": [-1, 20, 3], "max_memory": "20MB", **ANSWERS}),
    "gradients": ("attribution", {"by": "head", "check": False, **ANSWERS}),
    "checked": ("attribution", {"by": "neuron", "check": 3, **ANSWERS}),
}
SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 64,
    "n_heads": 4,
    "d_head": 16,
    "d_vocab": 200,
    "n_ctx": 64,
    "seed": 0,
}
GROUPED: dict[str, Any] = {"n_key_value_heads": 2, "gated_mlp": True, "act_fn": "silu", "d_mlp": 176}
GROUPED |= {"positional_embedding_type": "rotary", "rotary_dim": 16, "normalization_type": "RMS"}
SHAPES = {"gpt2-like": {"act_fn": "gelu_new"}, "grouped": GROUPED}


def carried_out(model: HookedTransformer, what: str, prompts: tuple[Any, ...], options: dict[str, Any]) -> Any:
    runs: dict[str, Any] = {
        "forward": model,
        "cache": model.run_with_cache,
        "generate": lambda *prompts, **options: model.generate(*prompts, verbose=False, **options),
        "sweep": lambda *prompts, **options: patching.sweep(model, *prompts, progress=False, **options),
        "attribution": lambda *prompts, **options: analysis.attribute(model, *prompts, progress=False, **options),
    }
    return runs[what](*prompts, **options)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.filterwarnings("ignore:the answer is better on the corrupted", "ignore:.*agreement")
def test_an_estimate_is_the_memory_that_a_run_allocates(shape: str, run: str) -> None:
    model = HookedTransformer({**SIZES, **SHAPES[shape]}).eval()
    what, options = RUNS[run]
    corrupted = torch.randint(200, (2, 40), generator=torch.Generator().manual_seed(0))
    clean = corrupted.clone()
    clean[:, 20] = 7
    prompts = (corrupted, clean) if what in ("sweep", "attribution") else (corrupted,)
    found: list[Any] = []
    with torch.set_grad_enabled(what == "attribution"), undisturbed():
        estimate = model.estimate(*prompts, what=what, **options)
        used = peak_bytes(lambda: found.append(carried_out(model, what, prompts, options)))
    assert_near(
        torch.tensor(estimate.bytes / used), torch.tensor(1.0), 0.02, because="kernels that allocate on their own"
    )
    if what == "sweep":
        bases = 3 * corrupted.numel() * model.cfg.n_layers  # the base run, the clean values, the clean metric
        one_token = estimate.layer_rows - bases - found[0].cost["layer_rows"]
        assert one_token in (0, model.cfg.n_layers)


def test_parts_and_layer_rows() -> None:
    model = HookedTransformer({**SIZES, **SHAPES["grouped"]}).eval()
    with torch.no_grad():
        found = model.estimate((2, 40), what="generate", max_new_tokens=5, stop_at_eos=False)
        explicit = model.estimate((2, 40), what="cache", names_filter="*.hook_resid_pre").bytes_by_part
        patterns = model.estimate((2, 40), what="cache", names_filter="*.hook_pattern", return_type=None)
    assert found.layer_rows == 2 * (40 + 4) * 2
    assert found.bytes_by_part["keys and values"] == 2 * 2 * 2 * 45 * 2 * 16 * 4
    assert found.bytes_by_part["weights"] == sum(weight.nbytes for weight in model.parameters())
    assert explicit["recorded"] == 2 * 2 * 40 * 64 * 4
    assert patterns.bytes_by_part["recorded"] == 2 * 2 * 4 * 40 * 40 * 4
    assert "gradients" in model.estimate((2, 40), (2, 40), what="attribution", check=False, **ANSWERS).bytes_by_part
    table = found.to_dataframe()
    assert list(table.columns) == ["device", "part", "bytes", "tensors", "largest"]
    assert table.bytes.sum() == sum(found.bytes_by_part.values()) == found.bytes + found.bytes_by_part["weights"]
    assert found.fits
    assert "keys and values" in str(found)
    assert "\n" not in repr(found)
    assert len(repr(found)) < 160
    assert "<td" in found._repr_html_()


def test_what_must_be_a_run() -> None:
    model = toy()
    with pytest.raises(ValueError, match=r"what='sweeps' is no run of a .*; did you mean 'sweep'"):
        model.estimate((2, 3), what="sweeps")
    with pytest.raises(ValueError, match="'forward', 'cache', 'generate', 'sweep', 'attribution', or a function"):
        model.estimate((2, 3), what="x")
    with pytest.raises(TypeError, match="name_filter"):
        model.estimate((2, 3), what="cache", name_filter="z")
    own = model.estimate((2, 3), what=lambda model, ids: model(ids))
    assert own.bytes == model.estimate((2, 3)).bytes > 0


@torch.no_grad()
def test_a_prompt_after_a_prefix_takes_what_is_new() -> None:
    model = toy()
    prefix = model.prefix(ids()[:1])
    prompt = prefix + torch.tensor([[1, 2], [3, 4]])
    with undisturbed():
        used = peak_bytes(lambda: model(prompt))
    assert_near(torch.tensor(model.estimate(prompt).bytes / used), torch.tensor(1.0), 0.02, because="small kernels")
    assert model.estimate(prompt).layer_rows == 4 * model.cfg.n_layers
    assert type(model(prompt)) is torch.Tensor  # the prefix is as it was


def test_nothing_is_left_of_a_dry_run() -> None:
    """Neither in the model nor in a key/value cache, nor of random numbers; and exceptions end it."""
    model = toy()
    cache = KeyValueCache(model.cfg.n_layers)
    model(ids(), past_kv_cache=cache)
    before, state = copy.deepcopy(cache), torch.get_rng_state()
    expected = model(ids())
    model.estimate(ids(), past_kv_cache=cache)
    model.estimate(ids(), what="generate", max_new_tokens=3, do_sample=True, stop_at_eos=False)
    with pytest.raises(ZeroDivisionError):
        _failing(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert cache.length == before.length
    for entry, old in zip(cache.entries, before.entries, strict=True):
        assert type(entry.past_keys) is torch.Tensor
        assert torch.equal(entry.past_keys, old.past_keys)
    assert type(model(ids())) is torch.Tensor
    assert torch.equal(model(ids()), expected)


def _failing(model: Any) -> None:
    def fail(value: torch.Tensor, hook: object) -> None:
        raise ZeroDivisionError

    with model.hooks([("blocks.0.hook_resid_post", fail)]):
        model.estimate(ids())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "jamba", "bert", "t5", "deepseek_v3"])
def test_an_estimate_is_exact(family: str):
    case = next(case for case in CASES if case.family == family)
    model, tokens = hooked(case), torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = (tokens, tokens[:, :4]) if isinstance(model, HookedEncoderDecoder) else (tokens,)
    estimate = model.estimate(*(tuple(each.shape) for each in inputs), what="cache").cache
    _, cache = model.run_with_cache(*inputs)
    assert list(estimate) == list(cache)
    assert estimate.nbytes == cache.nbytes > 0
    for by in ("site", "dtype", "device"):
        assert estimate.memory_report(by) == cache.memory_report(by)
    assert not any(type(value) is not torch.Tensor for value in model.run_with_cache(*inputs)[1].values())


def test_experts_are_known_together():
    case = next(case for case in CASES if case.family == "mixtral")
    model, tokens = hooked(case), torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"names_filter": "blocks.*.mlp.experts.*.hook_post"}
    estimate, (_, cache) = (
        model.estimate(tokens, what="cache", **options).cache,
        model.run_with_cache(tokens, **options),
    )
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
        assert (
            model.estimate(text, what="cache", **options).cache.nbytes
            == model.run_with_cache(text, **options)[1].nbytes
        )
    with pytest.raises(ValueError, match="by must be one of 'site', 'name', 'device', 'dtype', got 'layer'"):
        model.estimate((2, 8), what="cache").cache.memory_report("layer")


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
            model.estimate(shape)


def test_an_estimate_leaves_no_twin_without_values() -> None:
    model = HookedTransformer({**SIZES, **SHAPES["gpt2-like"]}).eval()
    model.estimate((2, 8), (2, 8), what="attribution", by="neuron", check=3, **ANSWERS)
    kept, made = twin_of(model).state_dict(), model.untrained(0).state_dict()
    assert kept.keys() == made.keys()
    for name, weight in kept.items():
        assert torch.equal(weight, made[name])


def test_an_estimate_leaves_what_is_kept_for_other_runs_alone() -> None:
    """The weights of an adapter, which are computed once in its scope, and what detectors have seen."""
    model = HookedTransformer.from_pretrained_no_processing("demo")
    statistics = Statistics("blocks.1.hook_resid_post")
    with torch.no_grad(), model.with_adapter(VERBALIZER):
        expected = model(TEXT)
    with torch.no_grad(), model.with_adapter(VERBALIZER), model.hooks([statistics]):
        estimate = model.estimate(TEXT)
        assert torch.equal(model(TEXT), expected)
        before = statistics.to_dataframe()
        again = model.estimate(TEXT)
        assert before.equals(statistics.to_dataframe())
    assert again.bytes < estimate.bytes  # the weights of the adapter are there
