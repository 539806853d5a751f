"""The steps of attention by hand give what the sites of a forward pass have."""

import pytest
import torch

from hooked_lm import HookedTransformerConfig
from hooked_lm.compat.parts import AbstractAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.public_steps import STEPS
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.hooks import HookPoint
from tests.close import assert_apart, assert_close
from tests.models.toys import ids, toy


@pytest.mark.parametrize("kind", ["standard", "rotary", "windowed", "capped"])
def test_steps_by_hand_are_a_forward_pass(kind: str) -> None:
    model = toy("standard", attn_scores_soft_cap=2.0) if kind == "capped" else toy(kind)
    _, cache = model.run_with_cache(ids(2, 7))
    for layer, block in enumerate(model.blocks):
        attn = block.attn
        x = block.ln1(cache["resid_pre", layer])
        q, k, v = attn.calculate_qkv_matrices(x, x, x)
        for name, found in (("q", q), ("k", k), ("v", v)):
            assert_close(found, cache[name, layer])
        if attn.q_norm is not None:
            q, k = attn.q_norm(q), attn.k_norm(k)
        if attn.cfg.rotary is not None:
            q, k = attn.apply_rotary(q), attn.apply_rotary(k)
            assert_close(q, cache["rot_q", layer])
        scores = attn.apply_causal_mask(attn.calculate_attention_scores(q, k))
        assert_close(scores, cache["attn_scores", layer])
        assert_close(attn.calculate_z_scores(v, scores.softmax(-1)), cache["z", layer])


def test_masks_of_padding_and_of_earlier_keys() -> None:
    attn, scores = toy().blocks[0].attn, torch.zeros(1, 1, 3, 5)
    allowed = attn.apply_causal_mask(scores, 2, torch.tensor([[1, 1, 0, 1, 1]])).isfinite()[0, 0].int()
    assert allowed.tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    with pytest.raises(ValueError, match="3 queries after 1 earlier positions need 4 keys, got scores of 5"):
        attn.apply_causal_mask(scores, 1)


@pytest.mark.parametrize("adjacent", [False, True])
def test_rotary_tables_and_pairs(adjacent: bool) -> None:
    """The formula with tables and turned pairs is the rotation, from any position and after padding."""
    sizes = {"d_model": 16, "n_heads": 2, "n_layers": 1, "n_ctx": 12, "d_vocab": 9, "act_fn": "relu"}
    rotary = {"positional_embedding_type": "rotary", "rotary_dim": 8, "rotary_adjacent_pairs": adjacent}
    attn = AbstractAttention(HookedTransformerConfig(**sizes, **rotary))
    x = torch.randn(1, 3, 2, 8)
    sin, cos = (table[4:7, None] for table in attn.calculate_sin_cos_rotary(8, 12))
    assert_close(attn.apply_rotary(x, 4), x * cos + attn.rotate_every_two(x) * sin)
    assert_close(attn.rotary_sin[:12], attn.calculate_sin_cos_rotary(8, 12)[0])
    padded = torch.tensor([[0, 0, 1, 1, 1]])
    assert_close(attn.apply_rotary(x, 2, padded), attn.apply_rotary(x, 0))
    assert_apart(attn.apply_rotary(x, 2), attn.apply_rotary(x, 0))
    other = attn.calculate_sin_cos_rotary(8, 12, base=100.0, dtype=torch.float64)[0]
    assert other.dtype == torch.float64
    assert_apart(other.float(), attn.rotary_sin[:12])


def test_without_a_rotary_embedding() -> None:
    attn = toy().blocks[0].attn
    for call in (lambda: attn.apply_rotary(torch.zeros(1, 2, 4, 8)), lambda: attn.calculate_sin_cos_rotary(8, 4)):
        with pytest.raises(AttributeError, match="no rotary embedding"):
            call()


@pytest.mark.parametrize("name", STEPS)
def test_a_step_cannot_be_replaced(name: str) -> None:
    """A forward pass would not call it."""
    attn = toy().blocks[0].attn
    with pytest.raises(AttributeError, match=f"does not call {name}.*edit hook_"):
        setattr(attn, name, lambda *args: None)
    for base in (Attention, AbstractAttention):
        with pytest.raises(TypeError, match=f"Mine: a forward pass does not call {name}"):
            type("Mine", (base,), {name: lambda self: None})
    attn.hook_z = HookPoint("batch", "pos", "head", "d_head")  # other attributes can be assigned


def test_state_dicts_of_attention_by_itself() -> None:
    """Grouped keys may be named as elsewhere, and rotary tables that are the layer's are accepted."""
    attn = toy("rotary").blocks[0].attn
    state = attn.state_dict()
    theirs = {f"_{name}" if name.endswith(("_K", "_V")) else name: value + 1 for name, value in state.items()}
    theirs["rotary_sin"], theirs["rotary_cos"] = attn.rotary_sin, attn.rotary_cos
    before = attn.W_K.clone()
    attn.load_state_dict({**theirs, "mask": state["mask"], "IGNORE": state["IGNORE"]})
    assert torch.equal(attn.W_K, before + 1)


def test_other_rotary_tables_are_refused() -> None:
    attn = toy("rotary").blocks[0].attn
    assert isinstance(attn.cfg.rotary, Rotary)
    state = {**attn.state_dict(), "rotary_sin": attn.rotary_sin}
    attn.load_state_dict(state)
    with pytest.raises(ValueError, match="rotary_sin"):
        attn.load_state_dict({**state, "rotary_sin": attn.rotary_sin + 0.1})
