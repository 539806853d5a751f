import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.components.mlp import MLP, GatedMLP
from tests.close import assert_close
from tests.models.toys import BOTH_WAYS, D_VOCAB, KINDS, ids, toy, words

SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 32,
    "n_ctx": 16,
    "d_vocab": D_VOCAB,
    "act_fn": "relu",
    "device": "cpu",
}


def test_sizes_that_follow_from_others() -> None:
    cfg = HookedTransformerConfig(**SIZES, n_heads=4)
    assert (cfg.d_head, cfg.d_mlp, cfg.d_vocab_out, cfg.attn_scale) == (8, 128, D_VOCAB, 8**0.5)
    assert HookedTransformerConfig(**SIZES, d_head=16).n_heads == 2
    assert cfg.n_params == 2 * (4 * 32 * 32 + 2 * 32 * 128)
    assert_close(cfg.initializer_range, 0.8 / 32**0.5)
    assert HookedTransformerConfig(**{**SIZES, "dtype": "bfloat16"}, n_heads=4).dtype == torch.bfloat16
    assert HookedTransformerConfig(**SIZES, n_heads=4, positional_embedding_type="rotary").rotary_dim == 8


@pytest.mark.every_parameter
@pytest.mark.parametrize("kind", [*KINDS, "both_ways"])
def test_the_flat_names_of_a_tree_are_those_that_made_it(kind: str) -> None:
    cfg = toy(BOTH_WAYS if kind == "both_ways" else kind).cfg
    again = HookedTransformerConfig.from_tree(cfg.tree)
    exempt = {"seed", "initializer_range", "n_params", "scale_attn_by_inverse_layer_idx", "use_attn_scale"}
    exempt |= {"final_rms"} if cfg.normalization_type == "RMS" else set()  # then it goes without saying
    names = set(vars(cfg)) - exempt
    assert {name: getattr(again, name) for name in names} == {name: getattr(cfg, name) for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_dicts_copies_and_pickles(kind: str) -> None:
    cfg = toy(kind).cfg
    for again in (
        HookedTransformerConfig.from_dict(cfg.to_dict()),
        copy.deepcopy(cfg),
        pickle.loads(pickle.dumps(cfg)),
    ):
        assert again == cfg
    flat = {name: value for name, value in cfg.to_dict().items() if name != "tree"}
    assert HookedTransformerConfig.unwrap(flat) == cfg
    assert HookedTransformerConfig.unwrap(cfg) is cfg


def test_the_vocabulary_of_a_tokenizer() -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "d_vocab"}
    model = HookedTransformer(HookedTransformerConfig(**sizes, n_heads=4), tokenizer=words())
    assert (model.cfg.d_vocab, model.cfg.d_vocab_out) == (D_VOCAB, D_VOCAB)
    assert model(ids(1, 4)).shape[-1] == D_VOCAB
    with pytest.raises(ValueError, match="d_vocab"):
        HookedTransformer(HookedTransformerConfig(**sizes, n_heads=4))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({}, ValueError, "n_heads or d_head"),
        ({"n_heads": 4, "normalization_type": "BN"}, ValueError, "'BN'.*'LN'"),
        ({"n_heads": 4, "use_local_attn": True}, ValueError, "window_size"),
        ({"n_heads": 4, "positional_embedding_type": "spiral"}, ValueError, "'spiral'.*'alibi'"),
        ({"n_heads": 4, "num_experts": 4}, ValueError, "experts_per_token"),
    ],
)
def test_what_cannot_be_built(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        HookedTransformerConfig(**{**SIZES, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"act_fn": "tanhh"}, "'tanhh'.*gelu"),
        ({"n_key_value_heads": 3}, "4 heads.*3"),
        ({"init_mode": "zeros"}, "'zeros'.*muP"),
    ],
)
def test_what_a_model_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HookedTransformer(HookedTransformerConfig(**{**SIZES, "n_heads": 4, **fields}))


def test_names_of_other_libraries() -> None:
    besides = {"load_in_4bit": False, "train_seq_length": 7, "yarn_truncate": True, "uses_rms_norm": True}
    cfg = HookedTransformerConfig.from_dict({**SIZES, "n_heads": 4, **besides})
    assert cfg == HookedTransformerConfig.from_dict({**SIZES, "n_heads": 4})
    with pytest.raises(ValueError, match=r"load_in_4bit is always False.*got True"):
        HookedTransformerConfig.from_dict({**SIZES, "n_heads": 4, "load_in_4bit": True})
    with pytest.raises(ValueError, match=r"use_logn_attn=True.*must be False"):
        HookedTransformerConfig.from_dict({**SIZES, "n_heads": 4, "use_logn_attn": True})


def test_a_config_names_one_device() -> None:
    sizes = {"n_layers": 1, "d_model": 8, "n_ctx": 4, "d_vocab": 9, "act_fn": "relu"}
    config = HookedTransformerConfig(**sizes, d_head=4, n_devices=1)
    for attempt in (
        lambda: HookedTransformerConfig(**sizes, d_head=4, n_devices=2),
        lambda: setattr(config, "n_devices", 2),
    ):
        with pytest.raises(ValueError, match=r"n_devices is always 1; .* `model.device_map`; got 2"):
            attempt()
    assert config.n_devices == 1


def test_an_unknown_name() -> None:
    with pytest.raises(TypeError, match="n_layer'"):
        HookedTransformerConfig.from_dict({**SIZES, "n_heads": 4, "n_layer": 2})


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_layers": -1},
        {"n_ctx": 0},
        {"attention_dir": "sideways"},
        {"default_padding_side": "top"},
        {"dtype": "float33"},
        {"rotary_dim": 3, "positional_embedding_type": "rotary"},
        {"rotary_dim": 6, "positional_embedding_type": "rotary"},
        {"attn_types": ["local"]},  # too few
        {"attn_types": ["near", "far"]},
    ],
)
def test_values_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 5, "act_fn": "relu"}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        HookedTransformerConfig(**{**sizes, **wrong})


def test_experts_by_flat_names() -> None:
    fields = {"num_experts": 4, "experts_per_token": 2, "norm_topk_prob": True, "gated_mlp": True}
    cfg = HookedTransformerConfig(**SIZES, n_heads=4, **fields)
    again = HookedTransformerConfig.from_tree(cfg.tree)
    assert {name: getattr(again, name) for name in fields} == fields
    _, cache = HookedTransformer(cfg).run_with_cache(torch.tensor([[1, 2, 3]]))
    assert cache["blocks.0.mlp.hook_expert_indices"].shape == (1, 3, 2)
    assert_close(cache["blocks.1.mlp.hook_expert_weights"].sum(-1), torch.ones(1, 3))


EXPERTS: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2}


def test_experts_by_flat_names_are_gated() -> None:
    plain = HookedTransformerConfig(**SIZES, n_heads=4)
    by_assignment = replace(plain)
    for name, value in EXPERTS.items():
        setattr(by_assignment, name, value)
    made = [
        HookedTransformerConfig(**SIZES, n_heads=4, **EXPERTS),
        HookedTransformerConfig(**SIZES, n_heads=4, **EXPERTS, gated_mlp=True),
        replace(plain, **EXPERTS),
        replace(HookedTransformerConfig.from_tree(plain.tree), **EXPERTS),
        HookedTransformerConfig.from_dict(plain.to_dict() | EXPERTS),
        by_assignment,
    ]
    for cfg in made:
        assert cfg.gated_mlp
        assert type(cfg.tree.blocks[0].mlp.expert) is GatedMLP.Config
        without = replace(cfg, num_experts=None, experts_per_token=None)
        assert without.gated_mlp is (cfg is made[1])
    assert not HookedTransformerConfig(**SIZES, n_heads=4, **EXPERTS, attn_only=True).gated_mlp


def test_plain_experts_need_a_tree() -> None:
    message = "gated_mlp=False with num_experts=4: the experts of flat names are gated.*leave gated_mlp out"
    gated = HookedTransformerConfig(**SIZES, n_heads=4, **EXPERTS)
    of_tree = HookedTransformerConfig.from_tree(gated.tree)
    for refused in (
        lambda: HookedTransformerConfig(**SIZES, n_heads=4, **EXPERTS, gated_mlp=False),
        lambda: replace(gated, gated_mlp=False),
        lambda: replace(of_tree, gated_mlp=False),
    ):
        with pytest.raises(ValueError, match=message):
            refused()
    block = gated.tree.blocks[0]
    expert = MLP.Config(block.mlp.expert.d_model, block.mlp.expert.d_mlp, "gelu", bias=False)
    blocks = (replace(block, mlp=replace(block.mlp, expert=expert)),) * gated.n_layers
    plain = HookedTransformerConfig.from_tree(replace(gated.tree, blocks=blocks))
    for kept in (plain, replace(plain, n_ctx=5), replace(plain, gated_mlp=False)):
        assert not kept.gated_mlp
        assert type(kept.tree.blocks[0].mlp.expert) is MLP.Config
    with pytest.raises(ValueError, match=message):
        replace(plain, tree=None)
