"""Every flat field, set in every way that there is: the model has it, or it is refused by name."""

import copy
import pickle
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer, HookedTransformerConfig
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock
from hooked_lm.components.blocks.parallel import ParallelBlock
from hooked_lm.components.embeddings.rotary_scaling import Llama3Scaling, YarnScaling
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.models.config.flat import HookedEncoderConfig, HookedEncoderDecoderConfig
from hooked_lm.models.config.row import table
from tests.close import assert_close, is_close

SIZES: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 4, "n_ctx": 8, "d_vocab": 11, "act_fn": "gelu"}
ROTARY = {"positional_embedding_type": "rotary"}
LOCAL = {"use_local_attn": True, "window_size": 3}
NTK, YARN = {**ROTARY, "use_NTK_by_parts_rope": True}, {**ROTARY, "use_yarn_rope": True}
MIXTURE = {"num_experts": 4, "experts_per_token": 2}
TABLE = {**table(HookedEncoderConfig).rows, **table(HookedEncoderDecoderConfig).rows}
DERIVED = {name for name, row in TABLE.items() if row.follows}
FREE = {name for name, row in TABLE.items() if row.is_fact} | {"tree"}


def attn(model: Any) -> Any:
    return model.blocks[0].attn


def norm_kind(model: Any) -> str | None:
    norm = model.blocks[0].ln1
    if not isinstance(norm, (LayerNorm, RMSNorm)):
        return None
    return ("LN" if isinstance(norm, LayerNorm) else "RMS") + ("" if norm.cfg.weight else "Pre")


def positions(model: Any) -> str:
    if attn(model).cfg.rotary is not None:
        return "rotary"
    if isinstance(attn(model).cfg.position_bias, Alibi):
        return "alibi"
    if not hasattr(model, "pos_embed"):
        return "none"
    return "shortformer" if model.tree.shortformer else "standard"


def scaling(field: str) -> Callable[[Any], Any]:
    return lambda model: getattr(attn(model).cfg.rotary.scaling, field)


# Field -> what else it needs, values, and what the built model says of it.
OF_DECODERS: dict[str, tuple[dict[str, Any], tuple[Any, ...], Callable[[Any], Any]]] = {
    "n_layers": ({}, (1, 3), lambda m: len(m.blocks)),
    "d_model": ({}, (8, 32), lambda m: m.W_E.shape[1]),
    "n_ctx": ({}, (5, 12), lambda m: m.W_pos.shape[0]),
    "d_head": ({}, (2, 8), lambda m: m.W_Q.shape[-1]),
    "n_heads": ({}, (1, 2), lambda m: m.W_Q.shape[1]),
    "d_mlp": ({}, (3, 128), lambda m: m.W_in.shape[-1]),
    "act_fn": ({}, ("relu", "silu", "solu_ln"), lambda m: m.blocks[0].mlp.cfg.act_fn + "_ln" * hasattr(m.blocks[0].mlp, "ln")),
    "d_vocab": ({}, (0, 13), lambda m: m.W_E.shape[0]),
    "eps": ({}, (0.5, 1e-3), lambda m: m.blocks[1].ln2.cfg.eps),
    "use_attn_scale": ({}, (False,), lambda m: attn(m).cfg.scale != 1.0),
    "attn_scale": ({}, (3.0, 7), lambda m: 1 / attn(m).cfg.scale),
    "use_local_attn": ({"window_size": 3}, (True,), lambda m: attn(m).cfg.window is not None),
    "window_size": ({"use_local_attn": True}, (2, 5), lambda m: attn(m).cfg.window),
    "attn_types": (LOCAL, (["local", "global"],), lambda m: ["local" if b.attn.cfg.window else "global" for b in m.blocks]),
    "normalization_type": ({}, (None, "LNPre", "RMS", "RMSPre"), norm_kind),
    "final_rms": ({}, (True,), lambda m: isinstance(m.ln_final, RMSNorm)),
    "use_normalization_before_and_after": ({}, (True,), lambda m: isinstance(m.blocks[0].ln1_post, LayerNorm)),
    "post_embedding_ln": ({}, (True,), lambda m: isinstance(m.embed.ln, LayerNorm)),
    "attention_dir": ({}, ("bidirectional",), lambda m: "causal" if attn(m).cfg.causal else "bidirectional"),
    "attn_only": ({}, (True,), lambda m: isinstance(m.blocks[0], AttentionOnlyBlock)),
    "parallel_attn_mlp": ({}, (True,), lambda m: isinstance(m.blocks[0], ParallelBlock)),
    "gated_mlp": ({}, (True,), lambda m: isinstance(m.blocks[0].mlp, GatedMLP)),
    "scale_attn_by_inverse_layer_idx": ({}, (True,), lambda m: m.blocks[1].attn.cfg.scale == attn(m).cfg.scale / 2),
    "attn_scores_soft_cap": ({}, (2.0, 30), lambda m: attn(m).cfg.soft_cap),
    "output_logits_soft_cap": ({}, (2.0, 30), lambda m: m.unembed.cfg.soft_cap),
    "use_qk_norm": ({}, (True,), lambda m: attn(m).cfg.qk_norm is not None),
    "use_attention_sinks": ({}, (True,), lambda m: attn(m).cfg.sinks),
    "clip_qkv": ({}, (2.0, 3), lambda m: attn(m).cfg.clip),
    "num_experts": ({"experts_per_token": 1}, (3,), lambda m: m.blocks[0].mlp.cfg.n_experts),
    "experts_per_token": ({"num_experts": 4}, (1, 3), lambda m: m.blocks[0].mlp.cfg.top_k),
    "norm_topk_prob": (MIXTURE, (True,), lambda m: m.blocks[0].mlp.cfg.router.renormalize),
    "positional_embedding_type": ({}, ("rotary", "alibi", "shortformer", "none"), positions),
    "rotary_dim": (ROTARY, (2,), lambda m: attn(m).cfg.rotary.dim),
    "rotary_base": (ROTARY, (50.0, 500), lambda m: attn(m).cfg.rotary.theta),
    "rotary_base_local": (ROTARY | LOCAL, (50.0, 500), lambda m: attn(m).cfg.rotary.theta),
    "rotary_scaling_factor": (ROTARY, (2.0, 4), scaling("factor")),
    "rotary_adjacent_pairs": (ROTARY, (True,), lambda m: attn(m).cfg.rotary.adjacent_pairs),
    "use_NTK_by_parts_rope": (ROTARY, (True,), lambda m: isinstance(attn(m).cfg.rotary.scaling, Llama3Scaling)),
    "NTK_by_parts_low_freq_factor": (NTK, (2.0,), scaling("low_freq_factor")),
    "NTK_by_parts_high_freq_factor": (NTK, (5.0,), scaling("high_freq_factor")),
    "NTK_by_parts_factor": (NTK, (2.0,), scaling("factor")),
    "NTK_original_ctx_len": (NTK, (6,), scaling("trained_n_ctx")),
    "use_yarn_rope": (ROTARY, (True,), lambda m: isinstance(attn(m).cfg.rotary.scaling, YarnScaling)),
    "yarn_factor": (YARN, (2.0,), scaling("factor")),
    "yarn_attention_factor": (YARN, (0.5,), scaling("attention_factor")),
    "yarn_beta_fast": (YARN, (16.0,), scaling("beta_fast")),
    "yarn_beta_slow": (YARN, (2.0,), scaling("beta_slow")),
    "yarn_original_max_position_embeddings": (YARN, (6,), scaling("trained_n_ctx")),
    "yarn_truncate": (YARN, (False,), scaling("truncate")),
    "yarn_global_attn_only": (YARN | LOCAL | {"attn_types": ["local", "global"]}, (True,),
                              lambda m: attn(m).cfg.rotary.scaling is None),
    "n_key_value_heads": ({}, (1, 2), lambda m: attn(m).W_K.shape[0]),
    "d_vocab_out": ({}, (3, 29), lambda m: m.W_U.shape[1]),
    "tie_word_embeddings": ({}, (True,), lambda m: m.unembed.cfg.tied),
}  # fmt: skip
REFUSED = {
    "relative_attention_num_buckets": 16,  # encoder-decoders have these
    "relative_attention_max_distance": 64,
}
CASES = [(name, value) for name, (_, values, _) in OF_DECODERS.items() for value in values]


def constructed(before: dict[str, Any], changes: dict[str, Any]) -> Any:
    return HookedTransformerConfig(**{**before, **changes})


def replaced(before: dict[str, Any], changes: dict[str, Any]) -> Any:
    return replace(HookedTransformerConfig(**before), **changes)


def assigned(before: dict[str, Any], changes: dict[str, Any]) -> Any:
    cfg = HookedTransformerConfig(**before)
    for name, value in changes.items():
        setattr(cfg, name, value)
    return cfg


def from_dict(before: dict[str, Any], changes: dict[str, Any]) -> Any:
    return HookedTransformerConfig.from_dict({**HookedTransformerConfig(**before).to_dict(), **changes})


def of_a_model(before: dict[str, Any], changes: dict[str, Any]) -> Any:
    return replace(HookedTransformer(before).cfg, **changes)


def of_a_tree(before: dict[str, Any], changes: dict[str, Any]) -> Any:
    return replace(HookedTransformerConfig.from_tree(HookedTransformerConfig(**before).tree), **changes)


WAYS = [constructed, replaced, assigned, from_dict, of_a_model, of_a_tree]


def test_every_field_is_asked_for() -> None:
    assert {f.name for f in fields(HookedTransformerConfig)} == OF_DECODERS.keys() | REFUSED.keys() | FREE - {
        *("pad_token_id", "forced_bos_token_id", "suppress_tokens"),  # of encoder-decoders
    }


@pytest.mark.parametrize(("name", "value"), CASES)
def test_a_field_takes_effect(name: str, value: Any) -> None:
    needs, _, ask = OF_DECODERS[name]
    for way in WAYS:
        model = HookedTransformer(way(SIZES, {**needs, name: value}))
        assert ask(model) == value or is_close(ask(model), value), way.__name__
        assert getattr(model.cfg, name) == value
    if model.cfg.d_vocab > 0:
        model(torch.tensor([[1, 2, 3]]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_several_fields_take_effect_together(data: st.DataObject) -> None:
    """In one step and one after the other, with what follows from them as if the model had been made so."""
    chosen = data.draw(st.lists(st.sampled_from(CASES), max_size=4, unique_by=lambda case: case[0]))
    changes: dict[str, Any] = {}
    for name, value in chosen:
        changes |= {**OF_DECODERS[name][0], name: value}
    try:
        expected = HookedTransformerConfig(**{**SIZES, **changes})
        expected.check_tree()
    except ValueError:
        for way in WAYS[1:]:
            with pytest.raises(ValueError):  # noqa: PT011 -- which of them is named first depends on the way
                way(SIZES, changes).check_tree()
        return
    for way in WAYS[1:]:
        cfg = way(SIZES, changes)
        cfg.check_tree()
        assert cfg.tree == expected.tree
        assert {n: getattr(cfg, n) for n in DERIVED if n in vars(cfg)} == {
            n: getattr(expected, n) for n in DERIVED if n in vars(expected)
        }


@pytest.mark.parametrize("name", [name for name, (needs, _, _) in OF_DECODERS.items() if needs] + [*REFUSED])
def test_a_field_without_effect_is_refused_by_name(name: str) -> None:
    value = OF_DECODERS[name][1][0] if name in OF_DECODERS else REFUSED[name]
    for way in WAYS[:3]:
        with pytest.raises(ValueError, match=f"{name}|{'|'.join(OF_DECODERS.get(name, ({},))[0])}"):
            HookedTransformer(way(SIZES, {name: value}))


def test_what_was_switched_off_may_be_set() -> None:
    """As in dictionaries that say everything."""
    cfg = replace(HookedTransformerConfig(**SIZES), act_fn="relu", attn_only=True)
    assert isinstance(HookedTransformer(cfg).blocks[0], AttentionOnlyBlock)
    assert (
        HookedTransformerConfig(**SIZES, use_local_attn=False, window_size=4).tree
        == HookedTransformerConfig(**SIZES).tree
    )


# ---- what follows ----------------------------------------------------------------------------------------------------


def test_what_is_derived_follows() -> None:
    cfg = HookedTransformerConfig(**SIZES, positional_embedding_type="rotary")
    for tree in ({}, {"tree": None}):
        wide = replace(cfg, d_head=32, **tree)
        assert (wide.attn_scale, wide.rotary_dim, wide.n_heads) == (32**0.5, 32, 4)
        assert_close(attn(HookedTransformer(wide)).cfg.scale, 32**-0.5)
        deep = replace(cfg, d_model=64, d_vocab=7, n_layers=5, **tree)
        assert (deep.d_mlp, deep.d_vocab_out, deep.d_head) == (256, 7, 16)
        assert_close(deep.initializer_range, 0.1)
        assert deep.n_params == 5 * (4 * 64 * 64 + 2 * 64 * 256)
    cfg.init_mode = "xavier_normal"
    assert cfg.initializer_range == 1.0


def test_what_was_set_stays() -> None:
    """Also where it was what would follow anyway, and where it is set to what it was."""
    cfg = HookedTransformerConfig(**SIZES, d_mlp=64, attn_scale=2.0, initializer_range=0.2, n_params=3)
    wide = replace(cfg, d_model=32, d_head=4)
    assert (wide.d_mlp, wide.attn_scale, wide.initializer_range, wide.n_params) == (64, 2.0, 0.2, 3)
    derived = HookedTransformerConfig(**SIZES)
    assert derived.d_mlp == 64
    assert replace(derived, d_model=32, d_mlp=64).d_mlp == 64
    assert replace(derived, d_model=32, d_mlp=derived.d_mlp).tree.blocks[0].mlp.d_mlp == 64
    assert replace(replace(derived, d_mlp=64), d_model=32).d_mlp == 64
    derived.d_mlp = 64
    derived.d_model = 32
    assert derived.d_mlp == 64
    derived.d_mlp = None
    assert derived.d_mlp == 128


def test_copies_remember_and_belong_to_no_model() -> None:
    model = HookedTransformer(HookedTransformerConfig(**SIZES, d_mlp=64))
    for cfg in (copy.copy(model.cfg), copy.deepcopy(model.cfg), pickle.loads(pickle.dumps(model.cfg))):
        cfg.d_model = 32
        assert cfg.d_mlp == 64
        assert_close(cfg.initializer_range, 0.8 / 32**0.5)
        assert HookedTransformer(cfg).W_E.shape[1] == 32
    assert model.cfg.d_model == 16


def test_the_config_of_a_model_is_what_it_was_built_from() -> None:
    for model in (demo := HookedTransformer.from_pretrained("demo"), copy.deepcopy(demo), HookedTransformer(SIZES)):
        before = copy.copy(model.cfg)
        for name in OF_DECODERS.keys() - {"output_logits_soft_cap", "n_ctx"}:
            with pytest.raises(ValueError, match=f"cfg.{name} cannot"):
                setattr(model.cfg, name, OF_DECODERS[name][1][0])
        for n_ctx in (0, -1, 2.5):  # a number of tokens is a limit of its inputs
            with pytest.raises(ValueError, match=r"cfg\.n_ctx cannot"):
                model.cfg.n_ctx = n_ctx
        model.cfg.d_model = model.cfg.d_model  # what it is anyway
        assert model.cfg == before
        model.cfg.output_logits_soft_cap = 2.0  # read at every run
        assert model(torch.tensor([[1, 2, 3]])).abs().max() <= 2.0
        assert model.cfg.tree.unembed.soft_cap == 2.0
        model.cfg.use_attn_result, model.cfg.default_prepend_bos, model.cfg.run_name = True, False, "mine"


def test_steps_in_any_order() -> None:
    cfg = HookedTransformerConfig(**SIZES)
    cfg.use_local_attn = True
    with pytest.raises(ValueError, match="window_size"):
        HookedTransformer(cfg)
    cfg.window_size = 3
    cfg.attn_types = ["local", "local"]
    cfg.attn_types[1] = "global"  # in place
    assert [b.attn.cfg.window for b in HookedTransformer(cfg).blocks] == [3, None]
    cfg.n_layers = -1
    with pytest.raises(ValueError, match=r"n_layers.*-1"):
        HookedTransformer(cfg)


# ---- loaded models ---------------------------------------------------------------------------------------------------


def test_a_loaded_tree_keeps_what_has_no_flat_name() -> None:
    loaded = HookedTransformer.from_pretrained_no_processing("demo").cfg
    assert not loaded.tree.unembed.bias  # flat names would build one with a bias
    small = replace(loaded, n_layers=1, d_model=32, n_heads=2, d_head=8)
    model = HookedTransformer(small)
    assert (len(model.blocks), model.W_E.shape[1], model.W_Q.shape[-1]) == (1, 32, 8)
    assert model.unembed.cfg.bias is False
    assert_close(attn(model).cfg.scale, 8**-0.5)
    deeper = replace(loaded, n_layers=loaded.n_layers + 2)
    assert len(HookedTransformer(deeper).blocks) == loaded.n_layers + 2
    with pytest.raises(ValueError, match=r"rotary_base.*no effect"):
        replace(loaded, rotary_base=50.0)


def test_what_a_tree_cannot_carry_over_is_refused_by_name() -> None:
    cfg = HookedTransformerConfig(**SIZES, positional_embedding_type="rotary")
    uneven = replace(cfg.tree.blocks[1], attn=replace(cfg.tree.blocks[1].attn, n_heads=2))
    tree = replace(cfg.tree, blocks=(cfg.tree.blocks[0], uneven))
    mixed = HookedTransformerConfig.from_tree(tree)
    with pytest.raises(ValueError, match=r"n_heads=8.*blocks\.1\.attn\.n_heads"):
        replace(mixed, n_heads=8)
    with pytest.raises(ValueError, match=r"n_layers=3.*differ from each other"):
        replace(mixed, n_layers=3)
    mixed.n_heads = 8
    with pytest.raises(ValueError, match="n_heads=8"):
        HookedTransformer(mixed)
    assert [b.attn.n_heads for b in replace(mixed, n_heads=4, eps=0.1).tree.blocks] == [4, 2]
    with pytest.raises(TypeError, match="tree"):
        HookedTransformerConfig(**SIZES, tree={"n_ctx": 3})


# ---- encoders, encoder-decoders --------------------------------------------------------------------------------------

OF_ENCODERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "n_layers": (3, lambda m: len(m.blocks)),
    "d_model": (32, lambda m: m.embed.W_E.shape[1]),
    "n_ctx": (5, lambda m: m.embed.pos_embed.W_pos.shape[0]),
    "d_head": (2, lambda m: attn(m).W_Q.shape[-1]),
    "n_heads": (2, lambda m: attn(m).W_Q.shape[0]),
    "d_mlp": (3, lambda m: m.blocks[0].mlp.W_in.shape[-1]),
    "act_fn": ("relu", lambda m: m.blocks[0].mlp.cfg.act_fn),
    "d_vocab": (13, lambda m: m.embed.W_E.shape[0]),
    "eps": (0.5, lambda m: m.blocks[0].ln1.cfg.eps),
    "use_attn_scale": (False, lambda m: attn(m).cfg.scale != 1.0),
    "attn_scale": (3.0, lambda m: 1 / attn(m).cfg.scale),
    "tie_word_embeddings": (False, lambda m: m.unembed.cfg.tied),
    "n_token_types": (0, lambda m: 0 if m.embed.token_type_embed is None else 2),
}
OF_BOTH: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "n_layers": (3, lambda m: len(m.encoder)),
    "n_decoder_layers": (1, lambda m: len(m.decoder)),
    "d_model": (32, lambda m: m.embed.W_E.shape[1]),
    "n_ctx": (5, lambda m: m.tree.n_ctx),
    "d_head": (2, lambda m: m.decoder[0].cross_attn.W_Q.shape[-1]),
    "n_heads": (2, lambda m: m.encoder[0].attn.W_Q.shape[0]),
    "d_mlp": (3, lambda m: m.decoder[0].mlp.W_in.shape[-1]),
    "act_fn": ("gelu_new", lambda m: m.encoder[0].mlp.cfg.act_fn),
    "d_vocab": (13, lambda m: m.embed.W_E.shape[0]),
    "eps": (0.5, lambda m: m.encoder[0].ln1.cfg.eps),
    "use_attn_scale": (False, lambda m: m.encoder[0].attn.cfg.scale != 1.0),
    "attn_scale": (3.0, lambda m: 1 / m.encoder[0].attn.cfg.scale),
    "gated_mlp": (True, lambda m: isinstance(m.encoder[0].mlp, GatedMLP)),
    "relative_attention_num_buckets": (16, lambda m: m.tree.encoder.rel_pos_bias.n_buckets),
    "relative_attention_max_distance": (64, lambda m: m.tree.decoder.rel_pos_bias.max_distance),
    "tie_word_embeddings": (False, lambda m: m.unembed.cfg.tied),
}
OTHERS = [
    *((HookedEncoder, HookedEncoderConfig, name, *case) for name, case in OF_ENCODERS.items()),
    *((HookedEncoderDecoder, HookedEncoderDecoderConfig, name, *case) for name, case in OF_BOTH.items()),
]


def set_in_every_way(kind: Any, name: str, value: Any) -> list[Callable[[], Any]]:
    def by_assignment() -> Any:
        cfg = kind(**SIZES)
        setattr(cfg, name, value)
        return cfg

    return [
        lambda: kind(**{**SIZES, name: value}),
        lambda: replace(kind(**SIZES), **{name: value}),
        lambda: replace(kind(**SIZES), **{name: value}, tree=None),
        lambda: replace(kind.from_tree(kind(**SIZES).tree), **{name: value}),
        lambda: kind.from_dict({**kind(**SIZES).to_dict(), name: value}),
        by_assignment,
    ]


@pytest.mark.parametrize(("model", "kind", "name", "value", "ask"), OTHERS)
def test_fields_of_encoders_and_encoder_decoders(model: Any, kind: Any, name: str, value: Any, ask: Any) -> None:
    for made in set_in_every_way(kind, name, value):
        built = model(made())
        assert ask(built) == value or is_close(ask(built), value)
        if name == "n_ctx":  # which may be set: what a run reads is never more than the model has
            built.cfg.n_ctx = 2 * value
            assert built.cfg.longest_input == value
            continue
        with pytest.raises(ValueError, match=f"cfg.{name} cannot"):
            setattr(built.cfg, name, SIZES.get(name, "other"))


@pytest.mark.parametrize(("model", "kind", "known"), [(HookedEncoder, HookedEncoderConfig, OF_ENCODERS),
                                                      (HookedEncoderDecoder, HookedEncoderDecoderConfig, OF_BOTH)])  # fmt: skip
def test_what_their_flat_names_cannot_build_is_refused(model: Any, kind: Any, known: dict[str, Any]) -> None:
    for name in {f.name for f in fields(kind)} - known.keys() - FREE:
        value = OF_DECODERS[name][1][0] if name in OF_DECODERS else REFUSED[name]
        if value == getattr(kind(**SIZES), name):
            value = {"attention_dir": "causal"}[name]
        for made in set_in_every_way(kind, name, value):
            with pytest.raises(ValueError, match=f"{name}|experts_per_token|like BERT"):
                model(made())


def test_an_encoder_from_the_flat_names_of_a_decoder() -> None:
    cfg = HookedTransformerConfig(**SIZES)
    cfg.d_model = 32
    assert HookedEncoder(cfg).blocks[0].mlp.W_in.shape == (32, 128)
    with pytest.raises(ValueError, match="use_qk_norm"):
        HookedEncoder(replace(cfg, use_qk_norm=True))


@pytest.mark.parametrize("kind", [Attention, MoE, PreNormBlock])
def test_configs_of_components_stay_frozen(kind: Any) -> None:
    assert kind.Config.__dataclass_params__.frozen


def test_layers_of_a_tree_may_stretch_positions_differently():
    """Flat names that exclude each other in a config built from them; a tree has a value for each layer."""
    flat = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 16, "d_vocab": 11, "act_fn": "gelu"}
    flat |= {"positional_embedding_type": "rotary", "rotary_dim": 4, "attn_only": True}
    yarn = HookedTransformerConfig(**flat, use_yarn_rope=True).tree
    linear = HookedTransformerConfig(**flat, rotary_scaling_factor=2.0).tree
    mixed = replace(yarn, blocks=(yarn.blocks[0], linear.blocks[1]))
    assert HookedTransformer(HookedTransformerConfig.from_tree(mixed)).tree == mixed
    with pytest.raises(ValueError, match="exclude each other"):
        HookedTransformerConfig(**flat, use_yarn_rope=True, rotary_scaling_factor=2.0)


def test_misspelt_names_are_refused() -> None:
    model = HookedTransformer(SIZES)
    with pytest.raises(AttributeError, match=r"no field 'use_attn_results'.* did you mean 'use_attn_result'"):
        model.cfg.use_attn_results = True  # type: ignore[attr-defined]
    assert "use_attn_results" not in model.cfg.to_dict()
    with pytest.raises(TypeError, match="no argument 'n_layer'; did you mean 'n_layers'"):
        HookedTransformerConfig(n_layer=2)  # type: ignore[call-arg]


def test_heads_fill_the_width_if_one_of_their_sizes_is_derived() -> None:
    with pytest.raises(
        ValueError, match=r"d_model=18 is no multiple of n_heads=4: give d_head as well \(4 leaves 2 of 18"
    ):
        HookedTransformerConfig(**{**SIZES, "d_model": 18})
    sizes = {name: size for name, size in SIZES.items() if name != "n_heads"}
    with pytest.raises(ValueError, match="no multiple of d_head=5: give n_heads as well"):
        HookedTransformerConfig(**sizes, d_head=5)
    with pytest.raises(ValueError, match="no multiple of n_heads=3: give d_head as well"):
        replace(HookedTransformer.from_pretrained("demo").cfg, n_heads=3)
    assert HookedTransformerConfig(**{**SIZES, "d_model": 18}, d_head=5).d_head == 5
