"""Configs and state dicts as other libraries write them: fields, names, and meanings that differ. No other library is needed."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer, HookedTransformerConfig
from hooked_lm.compat.state_dicts import for_transformer_lens
from hooked_lm.components.embeddings.rotary_scaling import LinearScaling, YarnScaling
from tests.close import assert_close, assert_near
from tests.models.toys import ids, toy

TOKENS = ids(batch=2, n_pos=6)
SIZES: dict[str, Any] = {"n_layers": 2, "d_model": 32, "n_heads": 4, "n_ctx": 24, "d_vocab": 50, "act_fn": "gelu"}
ROTARY = {**SIZES, "positional_embedding_type": "rotary"}


def filled(model: Any, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model.requires_grad_(False)


def tables(n_layers: int) -> dict[str, Tensor]:
    return {
        f"blocks.{layer}.attn.{name}": torch.ones(3)
        for layer in range(n_layers)
        for name in ("mask", "IGNORE", "rotary_sin", "rotary_cos", "alibi")
    }


LOADERS = ["load_state_dict", "load_and_process_state_dict"]


def load(model: Any, weights: dict[str, Tensor], how: str) -> Any:
    exact = {"fold_ln": False, "center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
    getattr(model, how)(weights, **(exact if how == "load_and_process_state_dict" else {}))
    return model


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", LOADERS)
@pytest.mark.parametrize("kind", ["standard", "rotary", "alibi", "shortformer", "solu", "attn_only"])
def test_tables_and_grouped_names(kind: str, how: str) -> None:
    model, other = toy(kind), toy(kind, seed=5)
    weights = {re.sub(r"\.([Wb]_[KV])$", r"._\1", name) if kind == "rotary" else name: value
               for name, value in model.state_dict().items()}  # fmt: skip
    if kind == "alibi":  # kept there, and never read
        weights["pos_embed.W_pos"] = torch.ones(24, 32)
    load(other, weights | tables(3), how)
    assert torch.equal(other(TOKENS), model(TOKENS))


@pytest.mark.parametrize(
    ("norm", "more"),
    [
        ("RMS", {**ROTARY, "use_normalization_before_and_after": True, "n_key_value_heads": 2}),
        ("RMS", {**ROTARY, "use_normalization_before_and_after": True, "attn_only": True, "act_fn": None}),
        ("LN", {**SIZES, "use_normalization_before_and_after": True}),
        ("LN", {**SIZES, "post_embedding_ln": True}),
    ],
)
def test_norms_that_are_never_folded_keep_their_weights(norm: str, more: dict[str, Any]) -> None:
    """Those after a layer (Gemma 2 and 3) and after the embedding (Bloom): in the config of a folded model, too."""
    model = filled(HookedTransformer({**more, "normalization_type": norm}))
    logits = model(TOKENS)
    model.process_weights_(center_writing_weights=False, center_unembed=False)
    twin = HookedTransformer({**more, "normalization_type": f"{norm}Pre"})
    twin.load_state_dict(model.state_dict())
    assert_close(twin(TOKENS), logits)
    kept = {name for name, _ in twin.named_parameters() if name.rpartition(".")[0].endswith(("_post", "embed.ln"))}
    assert kept
    assert not any(name.endswith(("ln1.w", "ln2.w", "ln_final.w")) for name, _ in twin.named_parameters())
    for name in kept:
        with pytest.raises((ValueError, RuntimeError), match=name):
            twin.load_state_dict({key: value for key, value in model.state_dict().items() if key != name})


@pytest.mark.parametrize("how", LOADERS)
def test_a_position_embedding_that_would_be_read_is_not_passed_over(how: str) -> None:
    model = toy("rotary")
    with pytest.raises((ValueError, RuntimeError), match="W_pos"):
        load(model, {**model.state_dict(), "pos_embed.W_pos": torch.ones(24, 32)}, how)


@pytest.mark.parametrize("how", LOADERS)
def test_a_bias_behind_the_product_of_a_gated_mlp(how: str) -> None:
    """Elsewhere `(act(x W_gate) * (x W_in) + b_in) W_out + b_out`, and there is no `b_gate`."""
    fields = {**SIZES, "gated_mlp": True, "act_fn": "silu", "normalization_type": "LNPre"}
    source = filled(HookedTransformer(fields))
    weights = {name: value.clone() for name, value in source.state_dict().items() if not name.endswith("b_gate")}

    def theirs(block: int, x: Tensor) -> Tensor:
        W = {name: weights[f"blocks.{block}.mlp.{name}"] for name in ("W_gate", "W_in", "b_in", "W_out", "b_out")}
        return (F.silu(x @ W["W_gate"]) * (x @ W["W_in"]) + W["b_in"]) @ W["W_out"] + W["b_out"]

    model = load(HookedTransformer(fields), weights, how)
    _, cache = model.run_with_cache(TOKENS)
    for layer in range(2):
        expected = theirs(layer, cache["normalized", layer, "ln2"])
        assert_close(cache["mlp_out", layer], expected)
    again = load(HookedTransformer(fields), source.state_dict(), how)
    assert_close(again(TOKENS), source(TOKENS))  # ours mean what they say


@pytest.mark.parametrize("how", LOADERS)
def test_experts_as_linear_layers(how: str) -> None:
    fields = {**SIZES, "gated_mlp": True, "act_fn": "silu", "num_experts": 4, "experts_per_token": 2}
    model = filled(HookedTransformer(fields))
    weights = {}
    for name, value in model.state_dict().items():
        if ".experts." in name:
            weights[name + ".weight"] = value.T.contiguous()
        elif name.endswith("W_router"):
            weights[name.replace("W_router", "W_gate.weight")] = value.T.contiguous()
        else:
            weights[name] = value
    assert torch.equal(load(HookedTransformer(fields), weights, how)(TOKENS), model(TOKENS))


@pytest.mark.parametrize("how", LOADERS)
def test_a_trained_activation(how: str) -> None:
    fields = {**SIZES, "act_fn": "xielu"}
    model = filled(HookedTransformer(fields))
    weights = {name.replace("mlp.act.", "mlp.act_fn."): value.squeeze() if "alpha" in name else value
               for name, value in model.state_dict().items()}  # fmt: skip
    assert any("act_fn" in name for name in weights)
    assert torch.equal(load(HookedTransformer(fields), weights, how)(TOKENS), model(TOKENS))


def test_an_encoder_and_an_encoder_decoder() -> None:
    encoder = filled(HookedEncoder({**SIZES}))
    other = HookedEncoder({**SIZES})
    other.load_state_dict({**encoder.state_dict(), **tables(2)})
    assert torch.equal(other(TOKENS), encoder(TOKENS))

    fields = {**SIZES, "positional_embedding_type": "relative_positional_bias", "normalization_type": "RMS",
              "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}  # fmt: skip
    t5 = filled(HookedEncoderDecoder(HookedTransformerConfig.from_dict(fields)))
    assert t5.cfg.tree.encoder.rel_pos_bias.n_buckets == 8
    weights = {re.sub(r"^(\w+)_rel_pos_bias.W_rel", r"\1.0.attn.rel_pos_bias.weight", name): value
               for name, value in t5.state_dict().items()}  # fmt: skip
    weights |= {f"{side}.{layer}.attn.b_Q": torch.zeros(4, 8) for side in ("encoder", "decoder") for layer in range(2)}
    again = HookedEncoderDecoder(HookedTransformerConfig.from_dict(fields))
    again.load_state_dict(weights)
    assert_close(again(TOKENS, TOKENS[:, :3]), t5(TOKENS, TOKENS[:, :3]))
    weights["encoder.0.attn.b_Q"] = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="b_Q"):
        again.load_state_dict(weights)


def test_relative_positions_make_no_decoder() -> None:
    fields = {**SIZES, "positional_embedding_type": "relative_positional_bias", "relative_attention_num_buckets": 8}
    with pytest.raises(ValueError, match="HookedEncoderDecoder"):
        HookedTransformer(HookedTransformerConfig(**fields))


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_norms_of_neurons_have_weights_where_others_have_them() -> None:
    fields = {**SIZES, "act_fn": "solu_ln"}
    assert "blocks.0.mlp.ln.w" in HookedTransformer(fields).state_dict()
    assert "blocks.0.mlp.ln.w" not in HookedTransformer({**fields, "normalization_type": "LNPre"}).state_dict()


@pytest.mark.parametrize("local", [False, True])
def test_positions_divided_by_a_factor(local: bool) -> None:
    """In layers that see everything; local ones are as they were."""
    extra = {"use_local_attn": True, "window_size": 4, "attn_types": ["global", "local"]} if local else {}
    cfg = HookedTransformerConfig(**ROTARY, **extra, rotary_scaling_factor=8)
    first, second = (block.attn.rotary for block in cfg.tree.blocks)
    assert first.scaling == LinearScaling(8.0)
    assert second.scaling == (None if local else LinearScaling(8.0))
    assert HookedTransformerConfig.from_tree(cfg.tree).rotary_scaling_factor == 8.0
    slow, plain = (HookedTransformer({**ROTARY, "seed": 1, "rotary_scaling_factor": factor}) for factor in (2.0, 1.0))
    _, there = slow.run_with_cache(torch.tensor([[7] * 9]))
    _, here = plain.run_with_cache(torch.tensor([[7] * 9]))
    assert_close(there["rot_q", 0][:, ::2], here["rot_q", 0][:, :5])


def test_the_fields_of_yarn() -> None:
    yarn = {"use_yarn_rope": True, "yarn_factor": 4, "yarn_truncate": False, "yarn_attention_factor": 1}
    local = {"use_local_attn": True, "window_size": 4, "attn_types": ["global", "local"]}
    cfg = HookedTransformerConfig(**ROTARY, **yarn, **local, yarn_global_attn_only=True)
    first, second = (block.attn.rotary for block in cfg.tree.blocks)
    assert isinstance(first.scaling, YarnScaling)
    assert (first.scaling.truncate, first.scaling.attention_factor, second.scaling) == (False, 1.0, None)
    again = HookedTransformerConfig.from_tree(cfg.tree)
    assert (again.yarn_truncate, again.yarn_global_attn_only, again.yarn_factor) == (False, True, 4.0)
    everywhere = HookedTransformerConfig(**ROTARY, **yarn, **local)
    assert everywhere.tree.blocks[1].attn.rotary.scaling == first.scaling


@pytest.mark.parametrize("init_mode", ["gpt2", "xavier_normal", "kaiming_uniform", "muP"])
def test_the_range_of_new_weights_depends_on_the_mode(init_mode: str) -> None:
    """A deviation of 0.8 / sqrt(d_model), or else a gain of 1."""
    cfg = HookedTransformerConfig(**SIZES, init_mode=init_mode, seed=0)
    assert cfg.initializer_range == (0.8 / 32**0.5 if init_mode == "gpt2" else 1.0)
    W_in = HookedTransformer(cfg).blocks[0].mlp.W_in
    deviations = {"gpt2": 0.8 / 32**0.5, "xavier_normal": (2 / 160) ** 0.5, "kaiming_uniform": (2 / 32) ** 0.5,
                  "muP": 1 / 32**0.5}  # fmt: skip
    assert_near(W_in.std(), deviations[init_mode], 0.05, because="a deviation of 4,096 draws")


def test_whole_numbers_are_numbers() -> None:
    cfg = HookedTransformerConfig(**ROTARY, rotary_base=10000, attn_scores_soft_cap=50, attn_scale=4)
    assert (cfg.rotary_base, cfg.attn_scores_soft_cap, cfg.attn_scale) == (10000.0, 50.0, 4.0)
    assert HookedTransformer(cfg)(TOKENS).shape == (2, 6, 50)


# ---- given to others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["standard", "rotary", "alibi", "solu", "sinks", "attn_only", "post_norm", "inverse_scale"]
)
@pytest.mark.parametrize("processed", [False, True])
def test_what_is_given_away_comes_back(kind: str, processed: bool) -> None:
    model = toy(kind)
    for name, value in model.named_parameters():
        if name.endswith((".b_gate", ".mlp.b_in")):  # gated MLPs have none there
            value.data.zero_()
    if processed:
        model.process_weights_()
    fields, weights = for_transformer_lens(model)
    again = HookedTransformer(HookedTransformerConfig.from_dict(fields))
    again.load_and_process_state_dict(weights, fold_ln=False, center_writing_weights=False, center_unembed=False,
                                      fold_value_biases=False)  # fmt: skip
    assert_close(again(TOKENS), model(TOKENS))
    assert {"blocks.0.attn.b_Q", "unembed.b_U"} <= {name.replace("._", ".") for name in weights}
    assert ("blocks.0.attn._W_K" in weights) == (kind in ("rotary", "post_norm"))
    weights["embed.W_E"].zero_()
    assert model.W_E.any()


def test_what_has_no_flat_name_is_refused() -> None:
    model = toy()
    for_transformer_lens(model)
    model.blocks[1].mlp.act_fn = torch.sin
    with pytest.raises(ValueError, match="other logits"):
        for_transformer_lens(model)
    gated = toy({"act_fn": "silu", "gated_mlp": True})
    with pytest.raises(ValueError, match="b_gate"):
        for_transformer_lens(gated)


def test_what_the_config_cannot_hold_is_reported() -> None:
    """Not strictly, what a model lacks is named, and the rest is as in the state dict."""
    fields = {**SIZES, "act_fn": "silu"}
    gated, plain = (HookedTransformer(HookedTransformerConfig(**fields, gated_mlp=value)) for value in (True, False))
    given = {
        name: torch.randn(value.shape) for name, value in gated.state_dict().items() if not name.endswith("b_gate")
    }
    found = plain.load_state_dict(given, strict=False)
    assert found.unexpected_keys == [f"blocks.{layer}.mlp.W_gate" for layer in range(plain.cfg.n_layers)]
    assert not found.missing_keys
    assert all(torch.equal(value, given[name]) for name, value in plain.named_parameters())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*mlp\.W_gate"):
        plain.load_state_dict(given)
