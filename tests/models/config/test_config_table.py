"""The table of flat names: every row, of every kind of model, drawn with random other fields."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.models.config.flat import HookedEncoderConfig, HookedEncoderDecoderConfig, HookedTransformerConfig
from hooked_lm.models.config.flat_config import completed, same, values_of
from hooked_lm.models.config.flat_vision import HookedDualEncoderConfig, HookedVisionConfig
from hooked_lm.models.config.row import ABSENT, EVERY_KIND, VISION, found, table

CLASSES: tuple[Any, ...] = (
    HookedTransformerConfig,
    HookedEncoderConfig,
    HookedEncoderDecoderConfig,
    HookedVisionConfig,
)
CONFIGS = {cls.kind: cls for cls in CLASSES}  # those that flat names build
FROM_TREES = {cls.kind: cls for cls in (HookedDualEncoderConfig,)}
ROWS = [(kind, name) for kind, cls in CONFIGS.items() for name in table(cls).rows]
OF_TREE = [(kind, name) for kind, name in ROWS if not table(CONFIGS[kind]).rows[name].is_fact]
SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 4,
    "n_ctx": 8,
    "d_vocab": 11,
    "act_fn": "gelu",
    "device": "cpu",
}
OF_TEXT = ("n_ctx", "d_vocab")
OF_IMAGES = {**{name: size for name, size in SIZES.items() if name not in OF_TEXT}, "image_size": 8, "patch_size": 4}


def sizes(kind: str) -> dict[str, Any]:
    """What a config of this kind needs."""
    return OF_IMAGES if kind == VISION else SIZES


# Fields that are not numbers or booleans, and what may be drawn for them.
VALUES: dict[str, list[Any]] = {
    "n_layers": [1, 2, 3],
    "d_model": [8, 16, 32],
    "n_heads": [-1, 1, 2, 4],
    "d_head": [-1, 2, 4, 8],
    "act_fn": ["relu", "silu", "gelu_new"],
    "attn_types": [None, ["local", "global", "local"], ["global", "local", "local"], ["global"] * 3],
    "normalization_type": [None, "LN", "LNPre", "RMS", "RMSPre"],
    "attention_dir": ["causal", "bidirectional"],
    "positional_embedding_type": ["standard", "rotary", "shortformer", "alibi", "none", "relative_positional_bias"],
    "rotary_dim": [None, 2, 4],
    "n_key_value_heads": [None, 1, 2],
    "num_experts": [None, 3, 4],
    "experts_per_token": [None, 1, 2],
    "image_size": [None, 8, 12],
    "patch_size": [2, 4],
}


def values(cls: Any, name: str) -> list[Any]:
    """What may be drawn for a field: its default, and others of its type."""
    types = str(next(f.type for f in fields(cls) if f.name == name))
    if name in VALUES:
        return VALUES[name]
    if "bool" in types:
        return [False, True]
    drawn: list[Any] = [3.0, 0.5] if "float" in types else [2, 6]
    return [*drawn, table(cls).defaults[name]] if name in table(cls).defaults else drawn


def draw_fields(data: st.DataObject, kind: str, at_least: tuple[str, ...] = ()) -> dict[str, Any]:
    """Some fields of the tree with values; each value alone is possible, together they may not be."""
    names = [name for of, name in OF_TREE if of == kind]
    chosen = data.draw(st.lists(st.sampled_from(names), max_size=5, unique=True))
    return {n: data.draw(st.sampled_from(values(CONFIGS[kind], n))) for n in dict.fromkeys((*chosen, *at_least))}


def is_shown(cfg: Any, name: str) -> bool:
    """Whether a field says what the tree says, by the paths of its row, or is switched off by another that was set."""
    row = table(type(cfg)).rows[name]
    reading = row.value(cfg.tree) if cfg.kind in row.kinds else ABSENT
    reading = table(type(cfg)).defaults.get(name) if reading is ABSENT else reading
    spelling = row.spelling if row.spelling and cfg.kind in row.kinds else lambda value, cfg: value
    is_derived = row.follows is not None and row.value(cfg.tree) is ABSENT
    is_off = any(switch in cfg._given for switch in row.unless)
    return is_derived or is_off or same(spelling(getattr(cfg, name), cfg), spelling(reading, cfg))


def disagreements(cfg: Any) -> list[str]:
    return [name for name, row in table(type(cfg)).rows.items() if not row.is_fact and not is_shown(cfg, name)]


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_table_is_the_dataclass(kind: str) -> None:
    """So type checkers know what the table says, and nothing is a field without a row."""
    cls = {**CONFIGS, **FROM_TREES}[kind]
    assert {f.name for f in fields(cls)} - {"tree"} == table(cls).rows.keys()
    for name, row in table(cls).rows.items():
        assert row.doc, name
        assert row.is_fact or row.paths, name
        assert {*row.sources, *row.unless} <= table(cls).rows.keys(), name
        assert {*row.kinds} <= {*EVERY_KIND}, name
        default = table(cls).defaults.get(name)
        assert row.follows is None or default in (None, -1), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_paths_lead_to_values(kind: str) -> None:
    """Every path of every kind leads somewhere in a tree that has all parts."""
    rotary = {"positional_embedding_type": "rotary"}
    mixture = {"num_experts": 3, "experts_per_token": 1}
    many: dict[str, list[dict[str, Any]]] = {
        "decoder": [{}, rotary | mixture, rotary | {"use_yarn_rope": True}, rotary | {"use_NTK_by_parts_rope": True},
                    rotary | {"rotary_scaling_factor": 2.0}],
        "encoder": [{}],
        "encoder-decoder": [{}],
        VISION: [{"n_classes": 3}],
    }  # fmt: skip
    trees = [CONFIGS[kind](**{**sizes(kind), **changes}).tree for changes in many[kind]]
    only_loaded = {"rotary", "window"} if kind != "decoder" else set()
    for name, row in table(CONFIGS[kind]).rows.items():
        if kind in row.kinds and row.paths and not any(part in path for path in row.paths for part in only_loaded):
            assert any(found(tree, path) for tree in trees for path in row.paths), name


# ---- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), OF_TREE)
@settings(max_examples=3, deadline=None)
@given(st.data())
def test_a_field_is_in_the_tree_or_refused(kind: str, name: str, data: st.DataObject) -> None:
    """However it is set, whatever else is set: it reads as it was set, the tree shows it, and no other field disagrees."""
    changes = draw_fields(data, kind, (name,))
    made = CONFIGS[kind](**sizes(kind))
    ways = [
        lambda: CONFIGS[kind](**{**sizes(kind), **changes}),
        lambda: replace(made, **changes),
        lambda: replace(CONFIGS[kind].from_tree(made.tree), **changes),
    ]
    for way in ways:
        try:
            cfg = way()
        except (ValueError, ZeroDivisionError) as error:
            words = str(error)
            assert any(word in words for word in (*changes, "flat names build", "expert", "local", "positional")), words
            continue
        if cfg.tree is None:
            with pytest.raises(ValueError, match=r"encoder-decoders|d_vocab is missing|image_size is missing"):
                cfg.check_tree()
            continue
        assert disagreements(cfg) == []
        value, row = changes[name], table(type(cfg)).rows[name]
        if value not in (None, -1) and not any(switch in changes for switch in row.unless):
            spelling = row.spelling if row.spelling and kind in row.kinds else lambda value, cfg: value
            assert same(spelling(getattr(cfg, name), cfg), spelling(value, cfg))


@pytest.mark.parametrize(("kind", "name", "value"), [(k, n, v) for k, n in OF_TREE for v in values(CONFIGS[k], n)[:2]])
def test_assignment_is_construction(kind: str, name: str, value: Any) -> None:
    cfg = CONFIGS[kind](**sizes(kind))
    try:
        expected = CONFIGS[kind](**{**sizes(kind), name: value})
        expected.check_tree()
    except (ValueError, ZeroDivisionError):
        setattr(cfg, name, value)
        assert cfg.tree is None
        with pytest.raises((ValueError, ZeroDivisionError)):
            cfg.check_tree()
        return
    setattr(cfg, name, value)
    assert cfg == expected
    assert disagreements(cfg) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_from_tree_to_flat_to_tree_is_the_identity(kind: str, data: st.DataObject) -> None:
    cls, changes = CONFIGS[kind], draw_fields(data, kind)
    try:
        tree = cls(**{**sizes(kind), **changes}).tree
    except (ValueError, ZeroDivisionError):
        tree = None
    assume(tree is not None)
    assert cls.from_tree(tree).tree == tree
    flat = {name: value for name, value in values_of(cls, tree).items() if name in table(cls).of_tree}
    again = cls(**flat).tree
    assert nearly_equal(again, tree)
    assert disagreements(cls(**flat)) == []


def nearly_equal(a: Any, b: Any) -> bool:
    """Trees that differ by no more than the rounding of a reciprocal, and the two ways to say that every head has a key."""
    if isinstance(a, Attention.Config) and isinstance(b, Attention.Config):
        a, b = (replace(attn, n_key_value_heads=attn.n_kv) for attn in (a, b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(nearly_equal, a, b))
    if is_dataclass(a) and type(a) is type(b):
        return all(nearly_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    return same(a, b)


def test_what_follows_is_computed_in_one_step() -> None:
    """No row follows from a row further down, so one pass over the table computes all."""
    for cls in CONFIGS.values():
        values = completed(cls, sizes(cls.kind))
        assert completed(cls, values) == values


# ---- where a list, a limit or a failure could leave them apart --------------------------------------------------------


def test_a_list_that_was_changed_in_place() -> None:
    """Also one that was read from a tree, and in a copy."""
    local = {"use_local_attn": True, "window_size": 3, "attn_types": ["local", "local"]}
    loaded = HookedTransformerConfig.from_tree(HookedTransformerConfig(**SIZES, **local).tree)
    loaded.attn_types[1] = "global"
    for cfg in (replace(loaded), loaded):
        cfg.check_tree()
        assert cfg.attn_types == ["local", "global"]
        assert [block.attn.window for block in cfg.tree.blocks] == [3, None]


def test_the_size_of_a_tree_whose_layers_differ() -> None:
    cfg = HookedTransformerConfig(**SIZES)
    wide = replace(cfg.tree.blocks[1], mlp=replace(cfg.tree.blocks[1].mlp, d_mlp=100))
    uneven = HookedTransformerConfig.from_tree(replace(cfg.tree, blocks=(cfg.tree.blocks[0], wide)))
    assert uneven.n_params == cfg.n_params + 2 * 16 * (100 - 64)
    assert uneven.d_mlp == 64


def test_what_no_part_computes_is_refused_at_once() -> None:
    cfg = HookedTransformerConfig(**SIZES)
    with pytest.raises(ValueError, match=r"default_padding_side.*'top'"):
        cfg.default_padding_side = "top"
    with pytest.raises(ValueError, match=r"use_qk_norm=True would have no effect.*encoders do not have it"):
        HookedEncoderConfig(**SIZES, use_qk_norm=True)
