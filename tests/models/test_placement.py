"""Models whose blocks are on several devices compute what they compute on one.

Without GPUs the devices are labels (`tests/devices.py`): an operation on tensors of two of them raises, so a tensor that a block
reads and that was not moved to it is found.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoderDecoder, analysis, patching
from hooked_lm.components.context import Context
from hooked_lm.models.placement import DeviceMap, DevicePlan, place
from tests.close import assert_close
from tests.core import thinned
from tests.devices import PAIRS, labelled_devices, values
from tests.families import CASES
from tests.families._models import hooked
from tests.models.toys import ids, toy

pytestmark = pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
# of every kind: keys and values of another layer, mixers with a state, mixtures, biases of the model, streams side by side
FAMILIES = ("gemma4_text-everything", "jamba", "t5", "deberta-v2", "gemma3n_text", "deepseek_v4", "mixtral")


def halves(model: Any, pair: tuple[str, str]) -> DeviceMap:
    """The second half of the blocks of each stack on the second device."""
    first, second = map(torch.device, pair)
    layers = {stack.blocks: len(stack.blocks_of(model)) for stack in model.stacks}
    found = {f"{name}.{i}": first if i < n // 2 else second for name, n in layers.items() for i in range(n)}
    return {"": first, **found}


def spread(model: Any, pair: tuple[str, str]) -> Any:
    """A copy of the model, on two devices."""
    two = copy.deepcopy(model)
    place(two, DevicePlan(halves(model, pair)))
    return two


def same(found: Tensor, expected: Tensor) -> None:
    assert_close(values(found), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", thinned(["rotary", "shortformer", "windowed", "alibi", "tied"], keep=["rotary"]))
def test_runs_and_caches(kind: str, pair: tuple[str, str]):
    one, tokens = toy(kind), ids()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    logits, cache = one.run_with_cache(tokens, attention_mask=mask)
    with labelled_devices():
        two = spread(one, pair)
        found, its_cache = two.run_with_cache(tokens, attention_mask=mask)
        same(found, logits)
        assert list(its_cache) == list(cache)
        for name in cache:
            same(its_cache[name], cache[name])
            assert its_cache[name].device == two.device_map.get(".".join(name.split(".")[:2]), two.device)
        assert found.device == two.device == torch.device(pair[0])
        assert two.run_with_cache(tokens, device="cpu")[1]["z", 2].device == torch.device("cpu")
        same(two(tokens, return_type="loss"), one(tokens, return_type="loss"))
        middle = two(tokens, stop_at_layer=2)
        same(two(middle, start_at_layer=2), one(tokens))
        options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False, "verbose": False}
        assert torch.equal(values(two.generate(tokens, **options)), one.generate(tokens, **options))


@pytest.mark.slow
def test_gradients_of_weights_and_activations(pair: tuple[str, str]):
    one, tokens = toy("rotary").requires_grad_(True), ids()
    _, cache = one.run_with_cache(tokens, return_type="loss", incl_bwd=True)
    with labelled_devices():
        two = spread(one, pair)
        two.zero_grad()
        _, its_cache = two.run_with_cache(tokens, return_type="loss", incl_bwd=True)
        for name in cache:
            same(its_cache[name], cache[name])
        for (name, weight), its in zip(one.named_parameters(), two.parameters(), strict=True):
            assert its.grad.device == its.device, name
            same(its.grad, weight.grad)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", thinned(FAMILIES, keep=["mixtral"]))
def test_other_blocks(family: str, pair: tuple[str, str]):
    case = next(case for case in CASES if str(case).startswith(family))
    one = hooked(case)
    tokens = torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = (tokens, tokens[:, :4]) if isinstance(one, HookedEncoderDecoder) else (tokens,)
    logits, cache = one.run_with_cache(*inputs)
    with labelled_devices():
        found, its_cache = spread(one, pair).run_with_cache(*inputs)
        same(found, logits)
        for name in cache:
            same(its_cache[name], cache[name])


def test_a_tensor_that_is_not_moved_is_found(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Context, "of_layers", ("cache", "_shared"))  # rotary angles and masks stay behind
    with labelled_devices(), pytest.raises(RuntimeError, match=f"{pair[0]}, {pair[1]}|same device"):
        spread(toy("rotary"), pair)(ids())


@pytest.mark.slow
def test_sweeps(pair: tuple[str, str]):
    one, corrupted, clean = toy("standard"), ids(1, 5, seed=0), ids(1, 5, seed=1)

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 5] - logits[:, -1, 7]

    with labelled_devices():
        two = spread(one, pair)
        for site, heads in {"resid_pre": None, "z": "each", "k": "each"}.items():
            options: dict[str, Any] = {"metric": metric, "sites": site, "heads": heads, "progress": False}
            expected = patching.sweep(one, corrupted, clean, **options)
            found = patching.sweep(two, corrupted, clean, **options)
            same(found.values, expected.values)
            assert found.cost["forwards"] == expected.cost["forwards"] == 1  # none but the base run
            same(analysis.attribute(two, corrupted, clean, **options).values,
                 analysis.attribute(one, corrupted, clean, **options).values)  # fmt: skip
        with pytest.raises(ValueError, match="several"):
            analysis.attribute_edges(two, corrupted, clean, metric=metric)


@pytest.mark.slow
def test_stacked_values_and_weights_are_on_the_device_of_the_model(pair: tuple[str, str]):
    one, tokens = toy("standard"), ids()
    cache = one.run_with_cache(tokens)[1]
    with labelled_devices():
        two = spread(one, pair)
        its_cache = two.run_with_cache(tokens)[1]
        for method in ("accumulated_resid", "decompose_resid", "stack_head_results", "stack_neuron_results",
                       "get_full_resid_decomposition"):  # fmt: skip
            for apply_ln in (False, True):
                found, expected = (getattr(of, method)(apply_ln=apply_ln, layer=3) for of in (its_cache, cache))
                found, expected = (x[0] if isinstance(x, tuple) else x for x in (found, expected))
                assert found.device == two.device
                same(found, expected)
        same(its_cache.stack_activation("pattern"), cache.stack_activation("pattern"))
        same(two.W_O, one.W_O)
        same(two.accumulated_bias(3), one.accumulated_bias(3))
        assert two.verify()


def test_a_spread_model_stays(pair: tuple[str, str]):
    with labelled_devices():
        two = spread(toy(), pair)
        for move in (two.cpu, lambda: two.to("cpu"), lambda: two.to(device=pair[1]), two.move_model_modules_to_device):
            with pytest.raises(ValueError, match=f"spread over {pair[0]}, {pair[1]}.*load it again"):
                move()
        assert two.to(torch.float64).blocks[2].attn.W_Q.dtype == torch.float64
        assert two.blocks[2].attn.W_Q.device == torch.device(pair[1])
        assert two.cfg.device == pair[0]
