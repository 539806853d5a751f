"""The core on a GPU gives what it gives on the CPU, waits for no value, and runs as CUDA graphs: `make test-gpu`.

All other tests run on the CPU. `TEST_DEVICE=cpu python -m pytest tests/gpu` runs these there, too, to see that they work.
"""

import copy
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer, patching, wrap
from hooked_lm.analysis import attribute, attribute_edges, metrics
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.demo.experiment import prompt_pairs
from hooked_lm.harvest import harvest
from hooked_lm.interventions import Record
from hooked_lm.interventions.dictionaries import SAE, Features
from hooked_lm.models.weights.quantized_weight import QuantizedWeight
from tests.close import GRADIENT, MODEL, assert_apart, assert_close, assert_equal
from tests.core import CORE
from tests.families import CASES, Case
from tests.families._models import hooked
from tests.unchecked import unchecked

DEVICE = torch.device(os.environ["TEST_DEVICE"])
FIRST = {case.family: case for case in reversed(CASES)}
MIXTURES = ("mixtral", "deepseek_v3")  # the host reads how many tokens each expert has
DENSE = [name for name in CORE if name not in MIXTURES]
DECODERS = [name for name in CORE if name not in ("bert", "t5")]


@lru_cache(maxsize=1)
def pair(family: str) -> tuple[Case, Any, Any]:
    """The first line of a family, its model on the CPU, and a copy on the device."""
    case = FIRST[family]
    return case, *(copy.deepcopy(hooked(case)).to(device) for device in ("cpu", DEVICE))


def inputs(model: Any, n_pos: int, batch: int = 3) -> tuple[Tensor, ...]:
    """Token ids on the CPU, of both sides for an encoder-decoder."""
    generator = torch.Generator().manual_seed(1)
    return tuple(
        torch.randint(3, model.cfg.d_vocab, (batch, n_pos), generator=generator)
        for _ in range(2 if isinstance(model, HookedEncoderDecoder) else 1)
    )


def moved(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.to(DEVICE) for x in tensors)


def weighed(logits: Tensor) -> Tensor:
    """One number to differentiate."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.device)
    return (logits * weights).sum() / logits[..., 0].numel()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host waits for the device."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", CORE)
def test_logits_sites_and_gradients(family: str) -> None:
    case, host, device = pair(family)
    given = inputs(host, case.n_prompt)
    expected, cache = host.run_with_cache(*given, names_filter="*")
    found, its_cache = device.run_with_cache(*moved(given), names_filter="*")
    assert found.device.type == DEVICE.type
    assert_close(found.detach().cpu(), expected.detach())
    assert list(its_cache) == list(cache)
    for site, value in cache.items():
        assert its_cache[site].device.type == DEVICE.type
        assert_close(its_cache[site].detach().cpu(), value.detach(), msg=site)
    for model, logits in ((host, expected), (device, found)):
        model.zero_grad()
        weighed(logits).backward()
    gradients = {name: weight.grad for name, weight in host.named_parameters() if weight.grad is not None}
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    for name, weight in device.named_parameters():
        if name in gradients:
            assert_close(weight.grad.cpu(), gradients[name], GRADIENT, scale=largest / 100, msg=name)
    host.zero_grad()


@torch.no_grad()
@pytest.mark.parametrize("family", DECODERS)
def test_padded_rows_and_greedy_tokens(family: str) -> None:
    case, host, device = pair(family)
    (tokens,) = inputs(host, min(case.n_prompt, 12))
    mask = torch.ones_like(tokens)
    mask[0, :4], mask[2, :1] = 0, 0
    expected = host(tokens, attention_mask=mask)
    for given in (mask, mask.to(DEVICE)):
        found = device(tokens.to(DEVICE), attention_mask=given)
        assert_close(found.cpu()[mask.bool()], expected[mask.bool()])
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "stop_at_eos": False, "verbose": False}
    new = device.generate(tokens.to(DEVICE), **options)
    assert new.device.type == DEVICE.type
    assert_equal(new.cpu(), host.generate(tokens, **options))


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    for family in ("gpt2", "llama", "gemma2"):
        case, host, device = pair(family)
        given = inputs(host, case.n_prompt)
        found = copy.deepcopy(device).to(dtype)(*moved(given))
        assert found.dtype == dtype
        assert_close(found.cpu().float(), host(*given), depth=4 * MODEL, dtype=dtype)


# ---- nobody waits ----------------------------------------------------------------------------------------------------


@torch.no_grad()
@unchecked()
@pytest.mark.parametrize("family", DENSE)
def test_the_host_waits_for_no_value(family: str) -> None:
    """In a plain run, one that is hooked and cached everywhere with padding, and steps with a cache of keys and values.

    But for what hooks make of the states of a recurrence, which is read.
    """
    case, _, model = pair(family)
    given = moved(inputs(model, case.n_prompt))
    mask = torch.ones_like(given[0])

    def runs() -> None:
        model(*given)
        with model.hooks([(name, doubled) for name in model.all_points() if not name.endswith(".mixer.hook_state")]):
            model.run_with_cache(*given, attention_mask=mask, names_filter=lambda name: True)
        if not isinstance(model, (HookedEncoder, HookedEncoderDecoder)):
            cache = KeyValueCache(model.cfg.n_layers)
            model(given[0][:, :-1], past_kv_cache=cache)
            model(given[0][:, -1:], past_kv_cache=cache)

    runs()  # constants of these lengths are copied once
    with no_waiting():
        runs()


def doubled(x: Tensor, hook: Any) -> Tensor:
    return x * 2 if x.is_floating_point() else x


@pytest.mark.skipif(DEVICE.type != "cuda", reason="on a GPU alone one waits")
def test_waiting_is_an_error() -> None:
    model, tokens = pair("gpt2")[2], torch.ones(1, 4, dtype=torch.long, device=DEVICE)
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"), model.hooks([("hook_embed", reading)]):
        model(tokens)


def reading(x: Tensor, hook: Any) -> Tensor:
    return x * x.sum().item()


# ---- graphs ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_graphs_with_taps_and_edits(family: str) -> None:
    model = pair(family)[2]
    edit = torch.zeros(model.cfg.d_model, device=DEVICE)
    site, taps = "blocks.1.hook_resid_pre", ["z0", "pattern1", "blocks.1.hook_resid_pre"]
    run = model.compiled(taps, {site: edit}, backend="auto" if DEVICE.type == "cuda" else "traced")
    (tokens,) = moved(inputs(model, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing runs eagerly
        before = run(tokens)
        for size in (1.0, 2.0):
            edit.normal_(std=size)
            with model.hooks([(site, lambda value, hook: value + edit)]):
                logits, cache = model.run_with_cache(tokens, names_filter=taps)
            assert_close(run(tokens), logits)
            for name, value in cache.items():
                assert_close(run.taps[name], value, msg=name)
        assert_apart(run(tokens), before)
        past = KeyValueCache(model.cfg.n_layers)
        logits = run.prefill(tokens, 6)
        with model.hooks([(site, lambda value, hook: value + edit)]):
            assert_close(logits, model(tokens, past_kv_cache=past)[:, -1])
        for _ in range(6):
            new = logits.argmax(-1)
            logits = run.step(new)
            with model.hooks([(site, lambda value, hook: value + edit)]):
                assert_close(logits, model(new[:, None], past_kv_cache=past)[:, -1])


@torch.no_grad()
@pytest.mark.skipif(DEVICE.type != "cuda", reason="a CUDA graph")
def test_the_replay_of_a_graph_waits_for_nothing() -> None:
    model = pair("llama")[2]
    run, (tokens,) = model.compiled("resid_post1"), moved(inputs(model, 8))
    run(tokens)
    with no_waiting():
        run(tokens)


# ---- experiments -----------------------------------------------------------------------------------------------------


def demos() -> tuple[HookedTransformer, HookedTransformer]:
    return tuple(HookedTransformer.from_pretrained("demo", device=device) for device in ("cpu", DEVICE))


def test_sweeps_and_attribution() -> None:
    host, device = demos()
    pairs = prompt_pairs(4)
    clean, corrupted = [pair.clean for pair in pairs], [pair.corrupted for pair in pairs]
    results = []
    for model in (host, device):
        answers, wrong = (
            [model.to_single_token(getattr(p, name)) for p in pairs] for name in ("answer", "wrong_answer")
        )
        metric = metrics.logit_difference(torch.tensor(answers), torch.tensor(wrong))
        results.append(
            {
                "stream": patching.sweep(model, corrupted, clean, metric=metric).values,
                "heads": patching.sweep(model, corrupted, clean, metric=metric, sites="z", heads="each").values,
                "nodes": attribute(model, corrupted, clean, metric=metric, sites="z", heads="each").values,
                "edges": attribute_edges(model, corrupted, clean, metric=metric, check=False).values.nan_to_num(),
            }
        )
    for name, expected in results[0].items():
        assert_close(results[1][name].cpu(), expected, GRADIENT, scale=10.0, msg=name)


@torch.no_grad()
def test_a_seed_draws_the_same_weights() -> None:
    host, device = demos()
    twin, expected = device.untrained(3), host.untrained(3)
    assert twin.device.type == DEVICE.type
    for name, weight in twin.named_parameters():
        assert_equal(weight.cpu(), expected.get_parameter(name))


@torch.no_grad()
@pytest.mark.parametrize("config", ["int8", "int4"])
def test_quantised_weights(config: str) -> None:
    """The logits of the dequantised weights in the same dtype: on a GPU "int4" has another kernel than on a CPU."""
    model = demos()[1].to(torch.bfloat16)
    tokens = model.to_tokens("When Mary and John went to the store, John gave a drink to")
    plain = model(tokens)
    assert model.quantize(config).names
    found, dequantised = model(tokens), copy.deepcopy(model)
    for module in dequantised.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, QuantizedWeight):
                module._parameters[name] = nn.Parameter(weight.plain().clone(), requires_grad=False)
    assert_close(found, dequantised(tokens), depth=4 * MODEL, dtype=torch.bfloat16)
    assert not torch.equal(found, plain)


def test_a_dictionary_from_the_cpu_is_refused() -> None:
    watch = Features("blocks.1.hook_mlp_out", sae=SAE.Config(d_in=128, d_sae=64).build())
    model = demos()[1]
    with pytest.raises(ValueError, match="the dictionary is on") if DEVICE.type != "cpu" else nullcontext():
        model.run_with_hooks("The capital of France is", fwd_hooks=[watch])
    watch.sae.to(model.device)
    assert model.run_with_hooks("The capital of France is", fwd_hooks=[watch]).isfinite().all()


def test_a_mask_of_ones_is_no_padding() -> None:
    _, device = demos()
    device.cfg.default_padding_side = "left"
    pair = prompt_pairs(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no cell runs as a whole forward pass
        found = patching.sweep(device, pair.corrupted, pair.clean, metric=one_logit)
    device.cfg.default_padding_side = "right"
    assert_close(found.values, patching.sweep(device, pair.corrupted, pair.clean, metric=one_logit).values, scale=10.0)


def test_memory_of_the_device_bounds_a_pass() -> None:
    """A sweep in small passes equals one in few: "auto" reads how much of the device's memory is free."""
    _, device = demos()
    clean, corrupted = prompt_pairs(1)[0].clean, prompt_pairs(1)[0].corrupted
    whole, small = (
        patching.sweep(device, corrupted, clean, metric=one_logit, max_memory=size).values for size in ("auto", "2MB")
    )
    assert_close(small, whole, scale=10.0)


def one_logit(logits: Tensor) -> Tensor:
    return logits[:, -1, 5]


def test_a_harvest_is_that_of_the_cpu(tmp_path: Path) -> None:
    texts = [pair.clean for pair in prompt_pairs(6)]
    stores = [
        harvest(model, texts, "blocks.1.hook_resid_post", tmp_path / name, batch_size=4)
        for name, model in zip(("host", "device"), demos(), strict=True)
    ]
    host, device = (store["blocks.1.hook_resid_post"][:] for store in stores)
    assert_close(device, host)


@torch.no_grad()
def test_offloaded_blocks_compute_the_same() -> None:
    """Also where blocks rest in a file; their weights never stay on the device."""
    place = {"": str(DEVICE), "blocks.1": "cpu", "blocks.2": "disk"}
    resident = HookedTransformer.from_pretrained_no_processing("demo", device=DEVICE)
    model = HookedTransformer.from_pretrained_no_processing("demo", device_map=place)
    tokens = resident.to_tokens("When Mary and John went to the store, John gave a drink to")
    assert_equal(model(tokens), resident(tokens))
    _, cache = model.run_with_cache(tokens)
    assert {value.device.type for value in cache.values()} == {DEVICE.type}
    assert_equal(model.generate(tokens, max_new_tokens=4, do_sample=False, verbose=False),
                 resident.generate(tokens, max_new_tokens=4, do_sample=False, verbose=False))  # fmt: skip


@torch.no_grad()
def test_copies_to_the_cpu_have_arrived() -> None:
    _, device = demos()
    tokens = torch.randint(3, 50, (8, 16)).to(DEVICE)
    expected = {name: value.cpu() for name, value in device.run_with_cache(tokens)[1].items()}
    site = "blocks.1.hook_resid_post"
    alone = device.run_with_cache(tokens, names_filter=site)[1][site].cpu()
    record = Record(site, device="cpu")
    for _ in range(5):
        _, cache = device.run_with_cache(tokens, device="cpu")
        for name, value in cache.items():
            assert value.device.type == "cpu"
            assert_equal(value, expected[name])
        device.run_with_hooks(tokens, fwd_hooks=[record])
    for value in record.values[site]:
        assert_equal(value, alone)


def test_copies_from_a_gpu_have_arrived() -> None:
    model = wrap(nn.Sequential(nn.Identity()))
    record = Record("0", device="cpu")
    for i in range(20):
        big = torch.full((1 << 22,), float(i), device=DEVICE)
        for _ in range(20):
            big = big * 1.0
        model.run_with_hooks(big, fwd_hooks=[record])
        assert bool((record.values["0"][-1] == i).all())
