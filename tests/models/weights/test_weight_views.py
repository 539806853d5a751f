"""Weights stacked by layer, and what is read off them, against the same computed block by block."""

from dataclasses import replace

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.models.config.flat import HookedTransformerConfig
from tests.close import assert_close
from tests.models.structures import D_HEAD, D_MODEL, D_VOCAB, N_CTX, random_model, random_tokens

LAYERS, HEADS, KV_HEADS, D_MLP = 3, 4, 2, 5


def flat_model(**changes: object) -> HookedTransformer:
    sizes = {"n_layers": LAYERS, "d_model": D_MODEL, "d_head": D_HEAD, "n_heads": HEADS, "n_ctx": N_CTX}
    sizes |= {"d_vocab": D_VOCAB, "d_mlp": D_MLP, "act_fn": "gelu", "device": "cpu"}
    return random_model(HookedTransformerConfig(**{**sizes, **changes}).tree)


@pytest.fixture(scope="module")
def grouped() -> HookedTransformer:
    return flat_model(n_key_value_heads=KV_HEADS)


@pytest.fixture(scope="module")
def without_biases() -> HookedTransformer:
    tree = flat_model().cfg.tree
    blocks = tuple(
        replace(
            block,
            attn=replace(block.attn, qkv_bias=False, out_bias=False),
            mlp=replace(block.mlp, bias=False),
        )
        for block in tree.blocks
    )
    return random_model(replace(tree, blocks=blocks, unembed=replace(tree.unembed, bias=False)))


SHAPES = {
    "W_E": (D_VOCAB, D_MODEL),
    "W_pos": (N_CTX, D_MODEL),
    "W_E_pos": (D_VOCAB + N_CTX, D_MODEL),
    "W_U": (D_MODEL, D_VOCAB),
    "b_U": (D_VOCAB,),
    "W_Q": (LAYERS, HEADS, D_MODEL, D_HEAD),
    "W_K": (LAYERS, HEADS, D_MODEL, D_HEAD),
    "W_V": (LAYERS, HEADS, D_MODEL, D_HEAD),
    "W_O": (LAYERS, HEADS, D_HEAD, D_MODEL),
    "b_Q": (LAYERS, HEADS, D_HEAD),
    "b_K": (LAYERS, HEADS, D_HEAD),
    "b_V": (LAYERS, HEADS, D_HEAD),
    "b_O": (LAYERS, D_MODEL),
    "W_in": (LAYERS, D_MODEL, D_MLP),
    "b_in": (LAYERS, D_MLP),
    "W_out": (LAYERS, D_MLP, D_MODEL),
    "b_out": (LAYERS, D_MODEL),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(grouped: HookedTransformer, without_biases: HookedTransformer, name: str) -> None:
    for model in (grouped, without_biases):
        assert getattr(model, name).shape == SHAPES[name]


@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("b_")])
def test_absent_biases_read_as_zeros(without_biases: HookedTransformer, name: str) -> None:
    assert not getattr(without_biases, name).any()


@pytest.mark.parametrize("name", [name for name in SHAPES if name not in ("W_E_pos",)])
def test_each_layer_is_its_blocks_own(grouped: HookedTransformer, name: str) -> None:
    homes = {"W_E": grouped.embed, "W_pos": grouped.pos_embed, "W_U": grouped.unembed, "b_U": grouped.unembed}
    if name in homes:
        assert torch.equal(getattr(grouped, name), getattr(homes[name], name))
        return
    for layer, block in enumerate(grouped.blocks):
        own = getattr(block.mlp if name[2:] in ("in", "out") else block.attn, name)
        if name[2:] in ("K", "V"):
            own = torch.stack([own[head // (HEADS // KV_HEADS)] for head in range(HEADS)])
        assert torch.equal(getattr(grouped, name)[layer], own)


def test_gates() -> None:
    gated = flat_model(gated_mlp=True)
    assert torch.equal(gated.W_gate[1], gated.blocks[1].mlp.W_gate)
    assert flat_model().W_gate is None


@pytest.mark.parametrize("name", ["W_in", "W_out", "b_in", "b_out"])
def test_attention_only_models_have_no_mlp_weights(name: str) -> None:
    with pytest.raises(ValueError, match=rf"no MLPs in blocks \[0, 1, 2\], so {name}"):
        getattr(flat_model(attn_only=True, act_fn=None), name)


def test_an_edit_of_a_block_shows(grouped: HookedTransformer) -> None:
    model = flat_model(n_key_value_heads=KV_HEADS)
    with torch.no_grad():
        model.blocks[1].attn.W_K[1] = 7.0
    assert (model.W_K[1, 2:] == 7.0).all()
    assert not (model.W_K[1, :2] == 7.0).any()


def test_circuits_of_each_head(grouped: HookedTransformer) -> None:
    for layer in range(LAYERS):
        for head in range(HEADS):
            assert_close(grouped.QK[layer, head].AB, grouped.W_Q[layer, head] @ grouped.W_K[layer, head].T)
            assert_close(grouped.OV[layer, head].AB, grouped.W_V[layer, head] @ grouped.W_O[layer, head])


def test_head_labels(grouped: HookedTransformer) -> None:
    labels = grouped.all_head_labels()
    assert labels[:5] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"]
    assert len(labels) == LAYERS * HEADS


def test_n_params_total(grouped: HookedTransformer) -> None:
    assert grouped.n_params_total == sum(weight.numel() for weight in grouped.parameters())


# ---- accumulated biases --------------------------------------------------------------------------------


def silent(model: HookedTransformer) -> HookedTransformer:
    """The same model with nothing but output biases: its stream is what has accumulated of them."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith(("b_O", "b_out")):
                weight.zero_()
    return model


@pytest.mark.parametrize("layer", range(LAYERS + 1))
def test_accumulated_biases_are_the_stream_of_a_silent_model(layer: int) -> None:
    model = silent(flat_model())
    _, cache = model.run_with_cache(random_tokens())
    stream = cache["resid_post", layer - 1] if layer else cache["resid_pre", 0]
    assert_close(model.accumulated_bias(layer).expand_as(stream), stream)
    if layer < LAYERS:
        middle = cache["resid_mid", layer]
        assert_close(model.accumulated_bias(layer, mlp_input=True).expand_as(middle), middle)


def test_accumulated_biases_of_attention_alone() -> None:
    model = flat_model()
    assert_close(model.accumulated_bias(2, include_mlp_biases=False), model.b_O[:2].sum(0))
    attention_only = silent(flat_model(attn_only=True, act_fn=None))
    _, cache = attention_only.run_with_cache(random_tokens())
    assert_close(attention_only.accumulated_bias(LAYERS), cache["resid_post", -1][0, 0])
    assert_close(attention_only.accumulated_bias(0, mlp_input=True), cache["resid_post", 0][0, 0])


def test_accumulated_biases_out_of_range(grouped: HookedTransformer) -> None:
    for layer, mlp_input in ((LAYERS + 1, False), (LAYERS, True)):
        with pytest.raises(IndexError, match="out of range"):
            grouped.accumulated_bias(layer, mlp_input)


# ---- composition ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["Q", "K", "V"])
def test_composition_scores_against_dense_products(grouped: HookedTransformer, mode: str) -> None:
    scores = grouped.all_composition_scores(mode)
    assert scores.shape == (LAYERS, HEADS, LAYERS, HEADS)
    for i, a in ((0, 1), (1, 3), (2, 0)):
        for j, b in ((0, 1), (1, 2), (2, 3)):
            writes = grouped.W_V[i, a] @ grouped.W_O[i, a]
            attends = grouped.W_Q[j, b] @ grouped.W_K[j, b].T
            reads = {"Q": attends, "K": attends.T, "V": grouped.W_V[j, b] @ grouped.W_O[j, b]}[mode]
            expected = (writes @ reads).norm() / (writes.norm() * reads.norm()) if i < j else torch.zeros(())
            assert_close(scores[i, a, j, b], expected)


def test_composition_of_nothing_else(grouped: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="'Q', 'K' or 'V'"):
        grouped.all_composition_scores("O")


def test_a_weight_that_there_is_not_is_no_attribute() -> None:
    model = HookedTransformer({"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 9, "attn_only": True})
    assert hasattr(model, "W_Q")
    assert not hasattr(model, "W_in")
    assert getattr(model, "b_out", None) is None
    with pytest.raises(AttributeError, match=r"no MLPs in blocks \[0\], so W_in cannot be stacked"):
        _ = model.W_in
    with pytest.raises(AttributeError, match="no attribute 'W_inn'"):
        _ = model.W_inn


def test_without_biases_their_sum_is_zero_behind_norms_too() -> None:
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 9, "act_fn": "gelu"}
    model = HookedTransformer({**sizes, "use_normalization_before_and_after": True, "normalization_type": "RMS"})
    with pytest.raises(ValueError, match="block 0 normalises its output"):
        model.accumulated_bias(2)
    for block in model.blocks:
        block.attn.b_O = block.mlp.b_out = None
    assert torch.equal(model.accumulated_bias(2), torch.zeros(8))
