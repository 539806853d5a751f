"""Loading onto several devices: plans, requests that are refused, and the way of each tensor."""

from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.hub.device_map import Placement
from tests.close import assert_close
from tests.devices import PAIRS, labelled_devices, values

TOKENS = torch.tensor([[5, 17, 3, 99]])


def load(**options: Any) -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo", **options)


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
        state = one.state_dict()
        assert all(
            torch.equal(values(weight), state[name])
            for name, weight in two.state_dict().items()
            if "IGNORE" not in name
        )


MIB = 2**20


def test_plans_of_accelerate():
    """The demo model has four equal blocks of 0.76 MiB and 2.5 MiB besides."""
    meta = HookedTransformer({**load().cfg.to_dict(), "device": "meta", "init_weights": False})
    block = sum(p.numel() * p.element_size() for p in meta.blocks[0].parameters())
    rest = sum(p.numel() * p.element_size() for p in meta.parameters()) - 4 * block

    def devices(strategy: str, **memory: int) -> list[str]:
        given = {int(name[1:]) if name.startswith("d") else name: n for name, n in memory.items()}
        return [str(device) for device in Placement(strategy, given).plan(meta).values()]

    first, second = "cuda:0", "cuda:1"
    room = block // 2
    assert devices("sequential", d0=rest + 9 * block) == [first] * 5
    filled = devices("sequential", d0=rest + 3 * block + room, d1=9 * block)
    assert filled in ([first] * 3 + [second] * 2, [first] * 4 + [second])  # room for the largest block may be kept free
    assert devices("sequential", d0=rest + block + room, d1=2 * block + room, cpu=9 * block)[1:].count("cpu") >= 1
    balanced = devices("auto", d0=rest + 9 * block, d1=rest + 9 * block)
    assert set(balanced) == {first, second}
    assert balanced == sorted(balanced)
    with pytest.raises(ValueError, match="do not fit"):
        devices("auto", d0=rest + block)


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
        ({"device_map": {"": "cpu", "blocks.3": "disk"}}, "dtype='auto'"),
        ({"device_map": {"": "disk"}}, "'disk' is not supported"),
    ],
)
def test_requests_that_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        load(**options)


def test_layers_that_share_weights_stay_together():
    from tests.families import CASES
    from tests.families._models import hooked

    albert = hooked(next(case for case in CASES if case.family == "albert"))
    with pytest.raises(ValueError, match="shares its weights with"):
        Placement({"": "cpu", f"blocks.{albert.cfg.n_layers - 1}": "meta"}).plan(albert)
