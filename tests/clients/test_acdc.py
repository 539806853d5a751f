"""What the published code of automatic circuit discovery relies on, beside the original; CircuitKIT carries that code itself."""

import copy
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from tests.clients import acdc_run
from tests.clients.acdc_run import CLEAN, MODELS, everything, made
from tests.close import GRADIENT, assert_apart, assert_close

Said = dict[str, Any]


@pytest.fixture(scope="module")
def ours() -> tuple[dict[str, Tensor], Said]:
    return everything()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Said]:
    """The same calls of the same program on TransformerLens itself."""
    original, out = Path(sys.prefix) / "transformer-lens-3.9.0", tmp_path_factory.mktemp("run") / "theirs.safetensors"
    subprocess.run([sys.executable, acdc_run.__file__, str(original), str(out)], check=True, capture_output=True)
    with safe_open(out, "pt") as file:
        names = file.keys()
        return {key: file.get_tensor(key) for key in names}, json.loads(file.metadata()["said"])


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_the_original(name: str, ours: Any, theirs: Any) -> None:
    """Losses with each edge cut, corrupted and zeroed values at all sites, gradients at split inputs, hooks of levels."""
    found, expected = (
        {key: value for key, value in side[0].items() if key.startswith(name)} for side in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    for key, value in found.items():
        other = expected[key]
        masked = other.isinf() | (other <= torch.finfo(other.dtype).min / 2) if "scores" in key else other.isinf()
        assert_close(
            value.masked_fill(masked, 0),
            other.masked_fill(masked, 0),
            depth=GRADIENT,
            msg=lambda text, key=key: key + text,
        )
    losses = found[f"{name}: losses"]
    assert losses.max() > 0.1
    assert 0 < len(ours[1][f"{name}: open"]) < len(losses)
    assert_apart(found[f"{name}: cut"], found[f"{name}: copy"])


def test_names_order_and_choices_are_those_of_the_original(ours: Any, theirs: Any) -> None:
    """The order of a cache of everything, the edges that are left, and who listens where, first to last."""
    assert ours[1] == theirs[1]
    assert ours[1]["gpt2: hooks"]["blocks.1.hook_q_input"] == ["receiver"]


def test_a_handle_leads_to_the_functions_of_its_point() -> None:
    model = made("gpt2")

    def sender_hook(value: Tensor, hook: Any, to: list[Tensor]) -> None:
        to.append(value)

    kept: list[Tensor] = []
    model.add_hook("blocks.0.attn.hook_result", partial(sender_hook, to=kept))
    model.add_hook("blocks.0.attn.hook_result", lambda value, hook: None, prepend=True)
    handles = model.hook_dict["blocks.0.attn.hook_result"].fwd_hooks
    names = [function.__name__ for function in handles[0].hook.hooks_dict_ref().values()]
    assert ["sender_hook" in name for name in names] == [False, True], "in the order in which they run"
    model(CLEAN)
    assert kept[0].shape == (3, 7, 4, 16)
    handles[1].hook.remove()
    assert [handle.hook.id for handle in model.hook_dict["blocks.0.attn.hook_result"].fwd_hooks] == [handles[0].hook.id]


def test_a_copy_has_its_own_hooks_and_weights() -> None:
    model = made("attn_only")
    before = model(CLEAN)
    model.add_hook("blocks.0.attn.hook_z", lambda value, hook: 0 * value)
    other = copy.deepcopy(model)
    assert torch.equal(other(CLEAN), model(CLEAN))
    assert not torch.equal(model(CLEAN), before)
    other.reset_hooks()
    assert torch.equal(other(CLEAN), before)
    with torch.no_grad():
        other.W_E.zero_()
    assert not torch.equal(model.W_E, other.W_E)
    assert model.hook_dict["blocks.0.attn.hook_z"].fwd_hooks
