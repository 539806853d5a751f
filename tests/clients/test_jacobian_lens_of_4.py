"""The Jacobian lens of TransformerLens 4.3 on a tiny GPT-2: the same matrices, the same readings, and files of both packages.

It runs in a separate process (`jacobian_lens_of_4.py`), in which that package is `transformer_lens`.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import JacobianLens, fit_jacobian_lens, lens_decomposition, logit_lens
from tests.close import GRADIENT, assert_apart, assert_close

PROGRAM = Path(__file__).parent / "jacobian_lens_of_4.py"
FOLDER = Path(sys.prefix) / "transformer-lens-4.3.0"
OFFLINE = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
PROMPTS = torch.randint(60, (3, 12), generator=torch.Generator().manual_seed(0))
LAYER = 1


def original() -> Any:
    """A tiny GPT-2 whose blocks matter."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=4, n_positions=16, vocab_size=60)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    original().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> HookedTransformer:
    return HookedTransformer.from_pretrained_no_processing(str(folder))


@pytest.fixture(scope="module")
def lens(model: HookedTransformer) -> JacobianLens:
    return fit_jacobian_lens(model, PROMPTS, skip=2, sinks=None, outliers="keep", held_out=0)


@pytest.fixture(scope="module")
def vectors(model: HookedTransformer) -> Tensor:
    x = model.run_with_cache(PROMPTS[:1])[1]["resid_post", LAYER][0, 4:8]
    return x - x.mean(-1, keepdim=True)


@pytest.fixture(scope="module")
def found(folder: Path, model: HookedTransformer, lens: JacobianLens, vectors: Tensor) -> dict[str, Tensor]:
    lens.to_published(folder / "ours.pt", torch.float32)
    directions = lens.vectors(model, torch.arange(60), [LAYER])[0]
    torch.save({"prompts": PROMPTS, "directions": directions, "vectors": vectors}, folder / "given.pt")
    command = [sys.executable, "-W", "ignore", str(PROGRAM), str(FOLDER), str(folder)]
    done = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt")


def read(model: HookedTransformer, lens: JacobianLens) -> Tensor:
    """The logits of all tokens by a lens, [layer, position, token]."""
    logits = logit_lens(model, PROMPTS[:1], lens=lens, answers=[list(range(60))]).answers.select(metric="logit")
    return logits.values[..., 0].movedim(0, -1)


def test_the_matrices_are_equal(folder: Path, model: HookedTransformer, lens: JacobianLens, found: dict[str, Tensor]):
    theirs = JacobianLens.from_published(folder / "theirs.pt", model)
    assert_close(theirs.J, lens.J, depth=GRADIENT)
    assert theirs.about["prompts"] == lens.about["prompts"] == 3
    assert_apart(lens.J[0], torch.eye(16))
    assert torch.equal(found["loaded"], lens.J[:2])  # ours, as they read it


def test_the_readings_are_equal(model: HookedTransformer, lens: JacobianLens, found: dict[str, Tensor]):
    expected = read(model, lens)
    assert_close(found["theirs"], expected, depth=GRADIENT)
    assert_close(found["ours"], expected, depth=GRADIENT)
    plain = logit_lens(model, PROMPTS[:1], answers=[list(range(60))]).answers.select(metric="logit").values[..., 0]
    assert_apart(plain.movedim(0, -1), expected)


def test_sparse_sums_are_equal(model: HookedTransformer, lens: JacobianLens, vectors: Tensor, found: dict[str, Tensor]):
    ours = lens_decomposition(model, vectors, lens, LAYER, k=5, n_random=1)
    assert torch.equal(ours.tokens, found["support"])
    units = torch.nn.functional.normalize(lens.vectors(model, torch.arange(60), [LAYER])[0], dim=-1)
    assert_close((ours.coefficients[..., None] * units[ours.tokens]).sum(1), found["reconstruction"], depth=GRADIENT)
