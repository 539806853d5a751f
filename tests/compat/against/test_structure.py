"""What a model has and lacks, by name: `hasattr` and `is None` answer as in the original."""

import copy
from typing import Any

import originals
import pytest
from torch import nn

PARTS = ("ln1", "ln1_post", "ln2", "ln2_post", "ln3", "attn", "cross_attn", "mlp", "ln_final", "unembed")
NORMS = ("w", "b", "hook_scale", "hook_normalized")


def structure(model: Any) -> dict[str, bool]:
    """Which parts each of its blocks has, and which weights and points their norms."""
    found = {"ln_final": hasattr(model, "ln_final")}
    blocks = {name: m for name, m in model.named_modules() if name.endswith(".0") and hasattr(m, "attn")}
    for path, block in blocks.items():
        for name in PARTS:
            found[f"{path}.{name}"] = hasattr(block, name)
            if name.startswith("ln") and hasattr(block, name):
                found |= {f"{path}.{name}.{leaf}": hasattr(getattr(block, name), leaf) for leaf in NORMS}
                found[f"{path}.{name} is an identity"] = type(getattr(block, name)) is nn.Identity
        for name in ("q_norm", "k_norm"):
            found[f"{path}.attn.{name} is None"] = getattr(block.attn, name) is None
    return found


@pytest.mark.parametrize("name", originals.NAMES)
def test_a_model_has_what_it_has_there(name: str) -> None:
    pair = originals.pair(name)
    assert structure(pair.ours) == structure(pair.theirs)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_folded_model_too(name: str) -> None:
    ours = copy.deepcopy(originals.pair(name).ours)
    ours.process_weights_()
    assert structure(ours) == structure(originals.original(name, fold_ln=True))
