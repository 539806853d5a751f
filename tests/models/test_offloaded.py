"""Models whose blocks' weights rest in main memory compute, bit for bit, what they compute with weights on their device.

Without a GPU the device is a label (`tests/devices.py`): an operation on tensors of it and on the CPU raises.
"""

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoderDecoder, analysis, patching
from hooked_lm.models.placement import DevicePlan, place
from hooked_lm.models.weights.fold import process_weights
from hooked_lm.models.weights.offloaded import Offloaded
from hooked_lm.weights.mapped import in_file
from tests.close import GRADIENT, assert_close, assert_equal
from tests.devices import LABELS, Placed, labelled_devices, values
from tests.families import CASES
from tests.families._models import hooked
from tests.models.toys import ids, toy

DEVICES = [LABELS[0], *(["cuda:0"] if torch.cuda.is_available() else [])]
pytestmark = pytest.mark.parametrize("device", DEVICES)
# weights that are indexed, looped over, absorbed and shared between layers
FAMILIES = ("gemma4_text-everything", "jamba", "t5", "deberta-v2", "gemma3n_text", "deepseek_v4", "mixtral", "albert",
            "pegasus_x-staggered")  # fmt: skip


def both(model: Any, device: str, which: slice = slice(None)) -> tuple[Any, Any]:
    """Copies of a model on a device, and with the weights of some blocks of each stack offloaded."""
    main, stacks = torch.device(device), model.stacks
    names = [f"{stack.blocks}.{i}" for stack in stacks for i in range(len(stack.blocks_of(model)))[which]]
    resident, offloaded = copy.deepcopy(model), copy.deepcopy(model)
    place(resident, DevicePlan({"": main}))
    place(offloaded, DevicePlan({"": main}, dict.fromkeys(names, "cpu")))
    return resident, offloaded


def same(found: Tensor, expected: Tensor) -> None:
    assert found.device == expected.device
    assert not isinstance(found, Offloaded)
    assert_equal(values(found), values(expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["rotary", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("shortformer", "solu"))]
)
def test_runs_caches_and_generation(kind: str, device: str):
    tokens = ids()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    with labelled_devices():
        one, two = both(toy(kind), device, slice(1, None))
        logits, cache = one.run_with_cache(tokens, attention_mask=mask)
        found, its_cache = two.run_with_cache(tokens, attention_mask=mask)
        same(found, logits)
        assert list(its_cache) == list(cache)
        for name in cache:
            same(its_cache[name], cache[name])
        same(two(tokens, return_type="loss"), one(tokens, return_type="loss"))
        same(two(two(tokens, stop_at_layer=2), start_at_layer=2), one(tokens))
        options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False, "verbose": False}
        assert torch.equal(values(two.generate(tokens, **options)), values(one.generate(tokens, **options)))
        assert two.device == torch.device(device)
        assert two.device_map is None
        assert two.offloaded == {"blocks.1": "cpu", "blocks.2": "cpu"}
        assert not two.blocks[1]._forward_pre_hooks
        for name, weight in two.named_parameters():
            rests = name.startswith(("blocks.1.", "blocks.2."))
            assert (isinstance(weight, Offloaded), weight.device.type == "cpu") == (rests, rests), name


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_every_site_of_other_blocks(family: str, device: str):
    model = hooked(next(case for case in CASES if str(case).startswith(family)))
    tokens = torch.randint(3, 20, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = (tokens, tokens[:, :4]) if isinstance(model, HookedEncoderDecoder) else (tokens,)
    with labelled_devices():
        one, two = both(model, device)
        sites = [name for name in one.hook_dict if "experts" not in name]
        logits, cache = one.run_with_cache(*inputs, names_filter=sites)
        found, its_cache = two.run_with_cache(*inputs, names_filter=sites)
        same(found, logits)
        assert list(its_cache) == list(cache)
        for name in cache:
            same(its_cache[name], cache[name])


@pytest.mark.slow
def test_hooks_edit_read_weights_and_raise(device: str):
    tokens = ids()

    def edit(model: Any) -> Any:
        def hook(z: Tensor, hook: Any) -> Tensor:
            return z + (z[..., 0, :] @ model.blocks[2].attn.W_O[1])[..., None, :8]  # the weight of another block, too

        return model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", hook)])

    def fail(z: Tensor, hook: Any) -> None:
        raise KeyboardInterrupt

    with labelled_devices():
        one, two = both(toy(), device)
        expected, weights = edit(one), dict(two.named_parameters())
        same(edit(two), expected)
        with pytest.raises(KeyboardInterrupt):
            two.run_with_hooks(tokens, fwd_hooks=[("blocks.1.attn.hook_z", fail)])
        assert all(weight is weights[name] for name, weight in two.named_parameters())
        assert all(weights[name].device.type == "cpu" for name in weights if name.startswith("blocks."))
        same(edit(two), expected)


@pytest.mark.slow
def test_gradients_of_weights_and_activations(device: str):
    tokens = ids()
    with labelled_devices():
        one, two = both(toy("rotary").requires_grad_(True), device)
        _, cache = one.run_with_cache(tokens, return_type="loss", incl_bwd=True)
        _, its_cache = two.run_with_cache(tokens, return_type="loss", incl_bwd=True)
        assert list(its_cache) == list(cache)
        for name in cache:
            same(its_cache[name], cache[name])
        for (name, weight), its in zip(one.named_parameters(), two.parameters(), strict=True):
            assert its.grad.device == its.device, name
            assert torch.equal(values(its.grad), values(weight.grad)), name
        loss = two(tokens, return_type="loss")
        weight = two.blocks[1].mlp.W_in
        (found,) = torch.autograd.grad(loss, [weight])
        assert_close(found, weight.grad, GRADIENT)  # without hooks by another kernel


@pytest.mark.slow
def test_the_backward_pass_copies_weights_again(device: str):
    def copies(shape: tuple[int, ...]) -> int:
        gc.collect()
        tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.device == torch.device(device)]
        return sum(tuple(x.shape) in (shape, shape[::-1]) for x in tensors)

    tokens = ids()
    with labelled_devices():
        one, two = both(toy(d_mlp=77).requires_grad_(True), device)
        del one
        assert copies((32, 77)) == 0
        loss = two(tokens, return_type="loss")
        assert copies((32, 77)) == 0  # the graph of `loss` holds the weights at rest
        with torch.no_grad():
            two.blocks[1].mlp.W_in[0] = 0
        with pytest.raises(RuntimeError, match=r"offloaded weight of shape \(.*was changed in place after the forward"):
            loss.backward()


@pytest.mark.slow
def test_sweeps_and_attribution(device: str):
    corrupted, clean = ids(1, 5, seed=0), ids(1, 5, seed=1)

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 5] - logits[:, -1, 7]

    with labelled_devices():
        one, two = both(toy(), device)
        for site, heads in {"z": "each"}.items():
            options: dict[str, Any] = {"metric": metric, "sites": site, "heads": heads, "progress": False}
            expected, found = (patching.sweep(model, corrupted, clean, **options) for model in (one, two))
            same(found.values, expected.values)
            assert found.cost["forwards"] == 1  # none but the base run
            expected, found = (analysis.attribute(model, corrupted, clean, **options) for model in (one, two))
            same(found.values, expected.values)
        edges = [analysis.attribute_edges(model, corrupted, clean, metric=metric) for model in (one, two)]
        same(edges[1].values, edges[0].values)


@pytest.mark.slow
def test_weights_are_read_between_runs(device: str):
    tokens = ids()
    with labelled_devices():
        one, two = both(toy(), device)
        for view in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_O", "W_in", "W_out", "b_out"):
            same(getattr(two, view), getattr(one, view))
        x = two(tokens, stop_at_layer=1)
        same(x @ two.blocks[1].attn.W_Q[0], x @ one.blocks[1].attn.W_Q[0])
        same(two.accumulated_bias(3), one.accumulated_bias(3))
        caches = [model.run_with_cache(tokens)[1] for model in (one, two)]
        for method in ("decompose_resid", "stack_head_results", "stack_neuron_results", "get_full_resid_decomposition"):
            expected, found = (getattr(cache, method)(apply_ln=True, layer=3) for cache in caches)
            same(*(x[0] if isinstance(x, tuple) else x for x in (found, expected)))
        assert two.verify()


@pytest.mark.slow
def test_weights_are_changed_between_runs(device: str):
    tokens = ids()
    with labelled_devices():
        one, two = both(toy(), device)
        for model in (one, two):
            with torch.no_grad():
                model.blocks[1].mlp.W_in[:, 3] = 0.5
                model.blocks[1].attn.W_O[0] *= 2
                model.blocks[2].mlp.W_out.copy_(model.blocks[1].mlp.W_out + model.W_U.sum())
            process_weights(model)
        expected = one(tokens)
        same(two(tokens), expected)
        assert all(isinstance(weight, Offloaded) for weight in two.blocks.parameters())
        two.load_state_dict(one.state_dict())
        same(two(tokens), expected)
        assert {type(weight) for weight in two.double().blocks.parameters()} == {Offloaded}
        assert {weight.dtype for weight in two.parameters()} == {torch.float64}


def test_copies_and_files_hold_plain_or_offloaded_weights(device: str):
    tokens = ids()
    with labelled_devices():
        _, two = both(toy(), device)
        same(copy.deepcopy(two)(tokens), two(tokens))
        state = {name: weight for name, weight in two.state_dict().items() if name.startswith("blocks.")}
        torch.save(state, file := io.BytesIO())
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for name, weight in state.items():
            assert type(loaded[name]) is Tensor
            assert torch.equal(loaded[name], weight)
        with pytest.raises(
            ValueError, match="spread over cpu, lazy:0.*load it again" if device in LABELS else "spread"
        ):
            two.to("cpu")


@pytest.mark.slow
def test_transforms_runs_without_values_and_graphs(device: str):
    one, two = both(toy(), "meta")
    assert (
        two.estimate((2, 5), what="cache").cache.memory_report()
        == one.estimate((2, 5), what="cache").cache.memory_report()
    )
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with labelled_devices():
        one, two = both(toy(), device)
        with pytest.warns(UserWarning, match="eagerly because of offloaded weights"), torch.no_grad():
            same(two.compiled()(ids().to(device)), one(ids()))
        for transform in (torch.func.grad, torch.func.vmap):
            results = [
                transform(lambda x, m=m: (x @ m.blocks[1].attn.W_Q[0]).square().sum())(x.to(device)) for m in (one, two)
            ]
            same(results[1], results[0])


def test_weights_in_a_file(device: str):
    weight = torch.randn(6, 4, 5).transpose(1, 2)
    mapped = in_file(weight)
    assert torch.equal(mapped, weight)
    assert mapped.stride() == weight.stride()
    with labelled_devices():
        x = torch.randn(3, 5).to(device)
        same(x @ Offloaded.of(mapped, torch.device(device))[0], x @ weight[0].to(device))
        assert not isinstance(mapped, (Offloaded, Placed))
