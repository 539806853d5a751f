"""What a model has and lacks, by name: `hasattr` and `is None` answer as in the original."""

import copy
from typing import Any

import originals
import pytest
from torch import nn

NORMED_QUERIES = {
    **originals.TOYS["toy-solu"],
    "act_fn": "silu",
    "normalization_type": "RMS",
    "positional_embedding_type": "rotary",
    "use_qk_norm": True,
}
OF_MODELS = ("pos_embed", "hook_pos_embed", "hook_full_embed", "mlm_head", "nsp_head", "pooler")
PARTS = ("ln1", "ln1_post", "ln2", "ln2_post", "ln3", "attn", "cross_attn", "mlp", "ln_final", "unembed")
NORMS = ("w", "b", "hook_scale", "hook_normalized")


def structure(model: Any) -> dict[str, bool]:
    """Which parts each of its blocks has, and which weights and points their norms."""
    found = {name: hasattr(model, name) for name in ("ln_final", *OF_MODELS)}
    blocks = {name: m for name, m in model.named_modules() if name.endswith(".0") and hasattr(m, "attn")}
    for path, block in blocks.items():
        for name in PARTS:
            found[f"{path}.{name}"] = hasattr(block, name)
            if name.startswith("ln") and hasattr(block, name):
                found |= {f"{path}.{name}.{leaf}": hasattr(getattr(block, name), leaf) for leaf in NORMS}
                found[f"{path}.{name} is an identity"] = type(getattr(block, name)) is nn.Identity
        for name in ("q_norm", "k_norm"):
            norm = getattr(block.attn, name)
            found[f"{path}.attn.{name} is None"] = norm is None
            found |= {f"{path}.attn.{name}.{leaf}": hasattr(norm, leaf) for leaf in NORMS}
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


def test_normed_queries_and_keys() -> None:
    ours = originals.hooked_lm.HookedTransformer(NORMED_QUERIES)
    found = structure(ours)
    assert found == structure(originals.transformer_lens.HookedTransformer(NORMED_QUERIES))
    assert not found["blocks.0.attn.q_norm is None"]


@pytest.mark.parametrize("name", [*originals.DECODERS, *originals.TOYS])
def test_blocks_say_how_they_normalise(name: str) -> None:
    pair = originals.pair(name)
    kinds = [[block.normalization_type for block in model.blocks] for model in pair.both]
    assert kinds[0] == kinds[1]
    ours = copy.deepcopy(pair.ours)
    ours.process_weights_()
    folded = originals.original(name, fold_ln=True) if name in originals.DECODERS and name != "mixtral" else None
    if folded is not None and name != "gemma2":  # whose config is not that of a loader, which would say what is folded
        assert {block.normalization_type for block in ours.blocks} == {f"{kinds[1][0]}Pre"}
