"""gim-explain: attributions with another gradient of the softmax, which it puts in the place of PyTorch's."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from hooked_lm.analysis.attribution.backward_rules import GIM, BackwardRules
from hooked_lm.analysis.attribution.gradients import gradients
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_rules_of_backward_passes_are_the_same(name: str, way: str) -> None:
    """`backward="gim"` gives the attributions of this package, in steps and with fused kernels."""
    rules = GIM if way == "as it is" else BackwardRules(softmax_temperature=3.0)
    for fused in ("auto", "never"):
        model = made(name, fused_attention=fused)
        run = gradients(model, gim_run.PROMPT, ["hook_embed"], lambda logits: logits[:, -1, 17], rules=rules)
        difference = run.values["hook_embed"] - model.embed(torch.tensor([[3]])).detach()
        attributed = (run.gradients["hook_embed"] * difference).sum(-1)[0]
        assert_close(attributed, explained(model, way), depth=GRADIENT)


def test_it_is_another_gradient() -> None:
    model = made("gpt2", fused_attention="auto")
    import gim

    plain = {**WAYS["softmax alone"], "softmax_temperature": None}
    prompt = {"target_token_id": 17, "baseline_token_id": 3}
    assert_apart(explained(model, "softmax alone"), gim.explain(model, gim_run.PROMPT, **prompt, **plain))
