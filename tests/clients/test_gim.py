"""gim-explain: attributions with another gradient of the softmax, which it puts in the place of PyTorch's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.clients import gim_run
from tests.clients.gim_run import MODELS, WAYS, everything, explained, made
from tests.close import GRADIENT, assert_apart, assert_close


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """The same calls on TransformerLens itself."""
    original, out = Path(sys.prefix) / "transformer-lens-3.9.0", tmp_path_factory.mktemp("theirs") / "found.safetensors"
    subprocess.run([sys.executable, gim_run.__file__, str(original), str(out)], check=True, capture_output=True)
    found: dict[str, Tensor] = load_file(out)
    return found


def test_as_with_the_original(theirs: dict[str, Tensor]) -> None:
    found = everything()
    assert len(found) == len(theirs) == 16
    for name, value in found.items():
        assert_close(value, theirs[name], depth=GRADIENT, msg=name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_whatever_kernels_the_config_allows(name: str, way: str) -> None:
    """A model of hooked_lm's own default runs in steps while the softmax is replaced, and only then."""
    model, own = made(name, fused_attention="auto"), F.softmax
    assert_close(explained(model, way), explained(made(name), way), depth=GRADIENT)
    assert F.softmax is own
    assert model.blocks[0].attn.settings.fused


def test_it_is_another_gradient() -> None:
    model = made("gpt2", fused_attention="auto")
    import gim

    plain = {**WAYS["softmax alone"], "softmax_temperature": None}
    prompt = {"target_token_id": 17, "baseline_token_id": 3}
    assert_apart(explained(model, "softmax alone"), gim.explain(model, gim_run.PROMPT, **prompt, **plain))
