"""Toys that TransformerLens 3.9 saved, as the repositories of its own models are laid out, say the same here as there.

The original runs in a process of its own (`flat_originals.py`); files stand between.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_lens
from safetensors.torch import load_file
from torch import Tensor

from tests.close import assert_apart, assert_close, is_close

ORIGINAL = Path(sys.prefix) / "transformer-lens-3.9.0"
TOKENS = torch.randint(30, (3, 12), generator=torch.Generator().manual_seed(3))
SIZES = {"n_layers": 2, "d_model": 16, "n_ctx": 20, "n_heads": 4, "d_head": 4, "d_vocab": 30, "d_mlp": 64}
LOAD = transformer_lens.HookedTransformer.from_pretrained_no_processing


def case(repository: str, format: str = "public", fields: Any = None, **config: Any) -> dict[str, Any]:
    """A toy: what to build in flat names, and what its config says."""
    said = {**SIZES, "act_fn": "gelu", "attn_only": False, "normalization": "LN", "shortformer_pos": False, "seed": 1}
    return {
        "repository": repository,
        "format": format,
        "fields": {**SIZES, "act_fn": "gelu", "device": "cpu", **(fields or {})},
        "config": {**said, "n_devices": 8, "lr_hidden": 0.002, **config},
    }


CASES = {
    "gelu": case("NeelNanda/GELU_2L512W_C4_Code"),
    "attention_only": case("NeelNanda/Attn_Only_2L512W_C4_Code", fields={"attn_only": True}, attn_only=True),
    "shortformer": case(
        "NeelNanda/Attn-Only-2L512W-Shortformer-6B-big-lr",
        fields={"attn_only": True, "positional_embedding_type": "shortformer"},
        attn_only=True,
        shortformer_pos=True,
    ),
    "solu": case("NeelNanda/SoLU_2L512W_C4_Code", fields={"act_fn": "solu_ln"}, act_fn="solu_ln"),
    "early_solu": case("NeelNanda/SoLU_2L_v10_old", "early", fields={"act_fn": "solu_ln"}, act_fn="solu_ln"),
    "final_rms": case("ArthurConmy/redwood_attn_2l", fields={"final_rms": True}, final_rms=True),
    "mingpt": case("Baidicoot/Othello-GPT-Transformer-Lens", "mingpt", architecture="mingpt"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tasks = tmp_path_factory.mktemp("flat")
    (tasks / "cases.json").write_text(json.dumps(CASES))
    script = Path(__file__).with_name("flat_originals.py")
    done = subprocess.run([sys.executable, script, ORIGINAL, tasks], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tasks


@pytest.fixture(scope="module")
def theirs(saved: Path) -> dict[str, Tensor]:
    return load_file(saved / "logits.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_theirs(saved: Path, theirs: dict[str, Tensor], name: str) -> None:
    model = LOAD(saved / name, device="cpu")
    assert "hooked_lm" in type(model).__module__
    assert_close(model(TOKENS), theirs[f"{name}.as_is"])
    other = LOAD(saved / name, device="cpu", checkpoint_index=0)(TOKENS)
    assert_apart(other, theirs[f"{name}.as_is"])


@pytest.mark.parametrize("name", CASES)
def test_the_folded_models_predict_the_same(saved: Path, theirs: dict[str, Tensor], name: str) -> None:
    """Theirs predicts something else where the last norm is an RMS norm: it centers the stream that this one reads."""
    model = transformer_lens.HookedTransformer.from_pretrained(str(saved / name), device="cpu")
    assert "fold_ln" in model.cfg.processed
    folded = theirs[f"{name}.folded"].log_softmax(-1)
    expected = theirs[f"{name}.as_is"].log_softmax(-1)
    assert_close(model(TOKENS).log_softmax(-1), expected)
    assert is_close(folded, expected) == (name != "final_rms")


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["repository"].startswith("NeelNanda/")])
def test_checkpoints_are_theirs(saved: Path, theirs: dict[str, Tensor], name: str) -> None:
    model = LOAD(saved / name, device="cpu", checkpoint_value=200)
    assert_close(model(TOKENS), theirs[f"{name}.step"])
    assert (model.cfg.checkpoint_index, model.cfg.checkpoint_label_type) == (1, "step")


def test_the_short_names_are_theirs(saved: Path) -> None:
    aliases = json.loads((saved / "aliases.json").read_text())
    assert len(aliases) == 28
    assert {name: set(transformer_lens.loading.MODEL_ALIASES.get(name, ())) for name in aliases} == {
        name: set(short) - {name} for name, short in aliases.items()
    }
