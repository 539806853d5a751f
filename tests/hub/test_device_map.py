"""Loading onto several devices: plans, requests that are refused, and the way of each tensor."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hooked_lm import HookedTransformer, pretrained
from hooked_lm.hub.device_map import Placement
from hooked_lm.models.placement import DevicePlan
from hooked_lm.models.weights.offloaded import Offloaded
from tests.close import assert_close, assert_equal
from tests.devices import LABELS, PAIRS, labelled_devices, values

TOKENS = torch.tensor([[5, 17, 3, 99]])


def load(**options: Any) -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo", **options)


def comparison(processed: bool) -> Callable[[Tensor, Tensor], None]:
    """Of weights: they are moved, or folded, which rounds by their strides."""
    return assert_close if processed else assert_equal


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
@pytest.mark.parametrize("processed", [True, False])
def test_each_tensor_goes_straight_to_its_device(processed: bool, pair: tuple[str, str]):
    first, second = map(torch.device, pair)
    load = HookedTransformer.from_pretrained if processed else HookedTransformer.from_pretrained_no_processing
    one = load("demo", device="cpu")
    with labelled_devices() as moves:
        two = load("demo", device_map={"": first, "blocks.1": second, "blocks.3": second})
        assert not moves
        for name, weight in two.named_parameters():
            assert weight.device == (second if name.startswith(("blocks.1.", "blocks.3.")) else first), name
        assert_close(values(two(TOKENS)), one(TOKENS))
        assert two.cfg.device == str(first)
        assert set(moves) == {(first, second), (second, first)}
        state, compare = one.state_dict(), comparison(processed)
        for name, weight in two.state_dict().items():
            if "IGNORE" not in name:
                compare(values(weight), state[name])


@pytest.mark.parametrize("processed", [True, False])
@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"dtype": torch.float64}], ids=str)
def test_blocks_on_disk(processed: bool, options: dict[str, Any]):
    load = HookedTransformer.from_pretrained if processed else HookedTransformer.from_pretrained_no_processing
    one = load("demo", device="cpu", **options)
    for device_map in ("disk", {"": "cpu", "blocks.1": "disk"}):
        two = load("demo", device_map=device_map, **options)
        assert_close(two(TOKENS), one(TOKENS))
        assert set(two.offloaded or ()) == ({"blocks.1"} if device_map != "disk" else {f"blocks.{i}" for i in range(4)})
        assert two.device_map is None
        for weight, other in zip(two.parameters(), one.parameters(), strict=True):
            comparison(processed)(values(weight), other)
        with pytest.raises(ValueError, match="spread over cpu, disk"):
            two.to("cuda")
        if not processed and "dtype" not in options:
            exported = two.to_hf().state_dict()
            assert all(torch.equal(weight, exported[name]) for name, weight in one.to_hf().state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("main", [LABELS[0], *(["cuda:0"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("processed", [True, False])
def test_blocks_offloaded_from_a_device(processed: bool, main: str):
    load = HookedTransformer.from_pretrained if processed else HookedTransformer.from_pretrained_no_processing
    with labelled_devices() as moves:
        one = load("demo", device_map={"": main})
        two = load("demo", device_map={"": main, "blocks.1": "cpu", "blocks.2": "disk"})
        assert two.offloaded == {"blocks.1": "cpu", "blocks.2": "disk"}
        offloaded = [name for name, weight in two.named_parameters() if isinstance(weight, Offloaded)]
        assert {name[:9] for name in offloaded} == {"blocks.1.", "blocks.2."}
        assert_close(values(two(TOKENS)), values(one(TOKENS)))
        assert not moves  # no value leaves the device


ROOT = Path(__file__).parents[2]
LOAD_AND_RUN = """
import sys, torch
from hooked_lm import HookedTransformer
from hooked_lm.pretrained import from_pretrained_no_processing

def anonymous():
    return sum(int(line.split()[1]) * 1024 for line in open("/proc/self/smaps_rollup") if line.startswith("Anonymous:"))

path, dtype = sys.argv[1], getattr(torch, sys.argv[2])
from_pretrained_no_processing(path, device="cpu", dtype="auto")(torch.tensor([[5, 17]]))
before = anonymous()
model = from_pretrained_no_processing(path, device_map="disk", dtype=dtype)
with torch.no_grad():
    model(torch.tensor([[5, 17]]))
print(anonymous() - before, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads the memory that Linux reports")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # mapped weights, and a temporary file
def test_the_memory_of_blocks_on_disk(dtype: str, tmp_path: Path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 4, "num_key_value_heads": 4}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, vocab_size=64, **sizes)).save_pretrained(tmp_path)
    ran = subprocess.run(
        [sys.executable, "-c", LOAD_AND_RUN, tmp_path, dtype], capture_output=True, text=True, check=True, cwd=ROOT
    )
    grown, size = map(int, ran.stdout.split())
    assert size > (60 if dtype == "bfloat16" else 120) * MIB
    assert grown < 0.1 * size


MIB = 2**20


def test_plans_of_accelerate():
    """The demo model has four equal blocks of 0.76 MiB and 2.5 MiB besides."""
    meta = HookedTransformer({**load().cfg.to_dict(), "device": "meta", "init_weights": False})
    block = sum(p.numel() * p.element_size() for p in meta.blocks[0].parameters())
    rest = sum(p.numel() * p.element_size() for p in meta.parameters()) - 4 * block

    def plan(strategy: str, **memory: int) -> DevicePlan:
        given = {int(name[1:]) if name.startswith("d") else name: n for name, n in memory.items()}
        return Placement(strategy, given).plan(meta)

    def devices(strategy: str, **memory: int) -> list[str]:
        return [str(device) for device in plan(strategy, **memory).devices.values()]

    first, second = "cuda:0", "cuda:1"
    room = block // 2
    assert devices("sequential", d0=rest + 9 * block) == [first] * 5
    filled = devices("sequential", d0=rest + 3 * block + room, d1=9 * block)
    assert filled in ([first] * 3 + [second] * 2, [first] * 4 + [second])  # room for the largest block may be kept free
    spilled = plan("sequential", d0=rest + block + room, d1=2 * block + room, cpu=9 * block)
    assert set(map(str, spilled.devices.values())) <= {
        first,
        second,
    }  # GPUs compute with the weights that rest in memory
    assert set(spilled.offloaded.values()) == {"cpu"}
    on_disk = plan("auto", d0=rest + 2 * block + room)
    assert set(map(str, on_disk.devices.values())) == {first}
    assert set(on_disk.offloaded) == {"blocks.1", "blocks.2", "blocks.3"}
    assert set(on_disk.offloaded.values()) == {"disk"}
    balanced = devices("auto", d0=rest + 9 * block, d1=rest + 9 * block)
    assert set(balanced) == {first, second}
    assert balanced == sorted(balanced)
    with pytest.raises(ValueError, match="do not fit"):
        devices("auto", d0=rest // 2)


def test_without_gpus_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = load(device_map="auto")
    assert (model.device, model.device_map) == (torch.device("cpu"), None)
    assert not model.blocks[0]._forward_pre_hooks


def test_accelerate_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"hooked-lm\[accelerate\]"):
        load(device_map="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_devices": 99}, "n_devices=99, and there are"),
        ({"n_devices": 2, "device_map": "auto"}, "not both"),
        ({"device_map": "auto", "device": "cpu"}, "leave out device='cpu'"),
        ({"device_map": "auto", "move_to_device": False}, "leave out move_to_device"),
        ({"device_map": "cpu", "device": "cpu"}, "not both"),
        ({"device_map": "cpu", "max_memory": {0: 1}}, "max_memory is for"),
        ({"device_map": {"": 0, "blocks.1": 1}, "max_memory": {0: 1}}, "max_memory is for"),
        ({"device_map": {"embed": "cpu", "blocks.0": "meta"}}, r"'blocks.1' has no device"),
        ({"device_map": {"": "cpu", "blocks.9": "meta"}}, r"no module 'blocks.9'.*nearest"),
        ({"device_map": {"": "cpu", "model.layers.0": "meta"}}, "no module 'model.layers.0'"),
        ({"device_map": {"": "cpu", "blocks.0.attn": "meta"}}, "a block is on one device"),
        ({"device_map": {"": "cpu", "unembed": "meta"}}, "everything but the blocks"),
        ({"device_map": {"": "cpu", "unembed": "disk"}}, "everything but the blocks"),
        ({"device_map": "disk", "device": "cpu"}, "leave out device='cpu'"),
        ({"device_map": {"": "cpu", "blcks.1": "cpu"}}, r"no module 'blcks.1'.*'blocks.1'"),
        ({"device_map": {"": "cpu", "blocks.9": "cpu"}}, "no module 'blocks.9'"),
        ({"device_map": {"blocks.0": "cpu"}}, "'blocks.1' has no device"),
        ({"device_map": "foo"}, r"device_map='foo' is neither 'auto'.*nor a device such as 'cpu'"),
        ({"device_map": {"": "cpu", "embed": "foo"}}, r"device_map\['embed'\]='foo' is neither 'disk' nor a device"),
        ({"device_map": 99}, r"device_map=99, and torch finds"),
        ({"device_map": "cuda:99"}, r"device_map='cuda:99', and torch finds"),
        ({"device_map": {"": "meta"}}, "weights have no values there"),
        ({"device_map": {}}, "an empty dict"),
        ({"n_devices": 0}, "n_devices must be at least 1, got 0"),
    ],
)
def test_requests_that_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_what_is_no_device_map():
    in_use = inspect.unwrap(pretrained.from_pretrained)  # without the annotations' checks, as users call it
    for wrong in ([], True, 1.5):
        with pytest.raises(TypeError, match="device_map must be one of 'auto'"):
            in_use("demo", device_map=wrong)


def test_layers_that_share_weights_stay_together():
    from tests.families import CASES
    from tests.families._models import hooked

    albert = hooked(next(case for case in CASES if case.family == "albert"))
    with pytest.raises(ValueError, match="shares its weights with"):
        Placement({"": "cpu", f"blocks.{albert.cfg.n_layers - 1}": "meta"}).plan(albert)
