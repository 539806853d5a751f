"""The identities hold on every kind of model, and each of them can fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from hooked_lm import HookedTransformer
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock
from hooked_lm.components.blocks.parallel import ParallelBlock, SharedNormBlock
from hooked_lm.components.blocks.post_norm import NormedResidualBlock, PostNormBlock
from hooked_lm.models.verification.verify import Check, Verification, check_inputs
from tests.close import MODEL, assert_close
from tests.models.structures import SEEDS, Kinds, random_model, random_tokens, random_tree

FLAT = {"n_layers": 2, "d_model": 16, "n_heads": 4, "n_ctx": 12, "d_vocab": 11, "seed": 0}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"act_fn": "gelu"},
    "attention only": {"attn_only": True},
    "attention only without norms": {"attn_only": True, "normalization_type": None},
    "parallel": {"act_fn": "relu", "parallel_attn_mlp": True},
    "gated grouped rotary RMS": {
        "act_fn": "silu",
        "gated_mlp": True,
        "n_key_value_heads": 2,
        "positional_embedding_type": "rotary",
        "normalization_type": "RMS",
        "final_rms": True,
    },
    "post-norms and soft caps": {
        "act_fn": "relu",
        "use_normalization_before_and_after": True,
        "attn_scores_soft_cap": 2.0,
        "output_logits_soft_cap": 1.5,
    },
    "shortformer": {"act_fn": "relu", "positional_embedding_type": "shortformer"},
    "SoLU": {"act_fn": "solu_ln"},
    "local": {"act_fn": "relu", "use_local_attn": True, "window_size": 3},
    "query and key norms": {"act_fn": "relu", "use_qk_norm": True},
    "folded norms": {"act_fn": "relu", "normalization_type": "LNPre"},
}


def make(kind: str) -> HookedTransformer:
    """A model whose weights, biases and norms are all random and of order one."""
    model = HookedTransformer(FLAT | KINDS[kind])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.every_parameter
@pytest.mark.parametrize("kind", KINDS)
def test_identities_hold(kind: str):
    report = make(kind).verify()
    assert report.ok, str(report)
    assert len(report.checks) > 9
    assert all(torch.tensor(check.errors).isfinite().all() for check in report.checks)


@pytest.mark.slow
@settings(max_examples=60)
@given(SEEDS)
def test_identities_hold_in_any_structure(structure: int):
    kinds = Kinds(
        blocks=(AttentionOnlyBlock, PreNormBlock, ParallelBlock, SharedNormBlock, PostNormBlock, NormedResidualBlock)
    )
    report = random_model(random_tree(structure, kinds)).verify()
    assert report.ok, str(report)


@pytest.mark.slow
@settings(max_examples=60)
@given(SEEDS)
def test_a_cache_changes_nothing_in_any_structure(structure: int):
    """The fused kernels, and the same in steps."""
    kinds = Kinds(
        blocks=(AttentionOnlyBlock, PreNormBlock, ParallelBlock, SharedNormBlock, PostNormBlock, NormedResidualBlock)
    )
    model, tokens = random_model(random_tree(structure, kinds), dtype=torch.float64), random_tokens()
    logits, _ = model.run_with_cache(tokens, names_filter="*")
    assert_close(logits, model(tokens), depth=4 * MODEL)  # of 60 models some magnify the rounding of their first layers


@pytest.mark.parametrize("kind", ["plain", "gated grouped rotary RMS", "post-norms and soft caps", "attention only"])
def test_identities_hold_after_folding(kind: str):
    model = make(kind)
    model.process_weights_()
    assert model.cfg.processed
    assert model.verify().ok, str(model.verify())


def test_identities_hold_in_low_precision():
    model = make("plain").to(torch.bfloat16)
    report = model.verify()
    assert report.ok, str(report)
    assert report["attn: ln1.normalized * w + b -> q"].largest > 1e-5


def test_tokens_of_the_callers_choice():
    model = make("plain")
    tokens = torch.randint(11, (3, 5))
    assert model.verify(tokens).ok
    with pytest.raises(ValueError, match="n_ctx"):
        model.verify(torch.ones(1, 13, dtype=torch.long))


class Shifted(nn.Module):
    """A module whose output is a little off."""

    def __init__(self, right: Any) -> None:
        super().__init__()
        self.right = right

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.right(*args, **kwargs) + 0.01


def shifts(path: str, name: str) -> Callable[[HookedTransformer], None]:
    """Replace a point by one that answers something else than it shows."""

    def damage(model: HookedTransformer) -> None:
        owner = model.get_submodule(path)
        setattr(owner, name, Shifted(getattr(owner, name)))

    return damage


class ShowsTwice(nn.Module):
    def __init__(self, point: Any) -> None:
        super().__init__()
        self.point = point

    def forward(self, x: Any) -> Any:
        return self.point(self.point(x))


def fires_twice(model: HookedTransformer) -> None:
    point = model.blocks[1].attn.hook_z
    model.blocks[1].attn.output = lambda z, right=model.blocks[1].attn.output: right(point(z))


def never_fires(model: HookedTransformer) -> None:
    block = model.blocks[1]
    block.apply_mlp = lambda normalized: block.mlp(normalized)


def wrong_side_of_the_post_norm(model: HookedTransformer) -> None:
    """What is shown as attn_out is taken before the norm that follows (a mistake seen elsewhere)."""
    block = model.blocks[0]
    post, block.ln1_post = block.ln1_post, nn.Identity()
    block.hook_attn_out = nn.Sequential(block.hook_attn_out, post)


def copies_are_not_normalised(model: HookedTransformer) -> None:
    """The copies of the stream, one for each head, go past the norm."""
    model.blocks[0].ln1.unhooked = lambda x: x


DAMAGES = [
    ("plain", shifts("blocks.0", "hook_attn_out"), "resid_pre + attn_out == resid_mid"),
    ("plain", shifts("blocks.1", "hook_mlp_out"), "resid_mid + mlp_out == resid_post"),
    ("plain", shifts("blocks.0", "hook_resid_post"), "resid_post == next resid_pre"),
    ("parallel", shifts("blocks.0", "hook_mlp_out"), "resid_pre + attn_out + mlp_out == resid_post"),
    ("attention only", shifts("blocks.0", "hook_attn_out"), "resid_pre + attn_out == resid_post"),
    ("plain", copies_are_not_normalised, "output == output with sites on demand"),
    ("plain", shifts("blocks.0.attn", "hook_pattern"), "attn: pattern @ v == z"),
    ("plain", shifts("blocks.0.attn", "hook_z"), "attn: z @ W_O == result"),
    ("plain", shifts("blocks.0.attn", "hook_result"), "attn(ln1(resid_pre)) == attn_out"),
    ("plain", shifts("blocks.0.ln1", "hook_normalized"), "attn: ln1.normalized * w + b -> q"),
    ("plain", shifts("blocks.0.ln2", "hook_normalized"), "mlp: ln2.normalized * w + b -> pre"),
    ("plain", shifts("blocks.0.ln1", "hook_scale"), "ln1: normalized * scale == stream - mean"),
    ("plain", shifts("blocks.1.mlp", "hook_post"), "mlp(ln2(resid_mid)) == mlp_out"),
    ("gated grouped rotary RMS", shifts("blocks.1.mlp", "hook_pre_linear"), "mlp: act(pre) * pre_linear == post"),
    ("plain", shifts("ln_final", "hook_normalized"), "unembed(ln_final(resid_post)) == logits"),
    ("plain", fires_twice, "sites that do not fire once"),
    ("plain", never_fires, "sites that do not fire once"),
    ("plain", never_fires, "resid_mid + mlp_out == resid_post"),
    (
        "post-norms and soft caps",
        wrong_side_of_the_post_norm,
        "resid_pre + attn_out == resid_mid",
    ),
]


@pytest.mark.every_parameter
@pytest.mark.parametrize(("kind", "damage", "name"), DAMAGES)
def test_a_broken_model_is_noticed(kind: str, damage: Callable[[HookedTransformer], None], name: str):
    model = make(kind)
    damage(model)
    report = model.verify()
    assert not report.ok
    assert name in report.failed, str(report)


def test_the_table():
    report = Verification((Check("one", (0.0, 2e-6), 1e-5), Check("two", (1.0, float("nan"), 0.0), 1e-5)))
    assert not report.ok
    assert report.failed == ["two"]
    assert report["one"].largest == 2e-6
    assert str(report).splitlines()[1].endswith("FAILED: more than 1e-05 in layers 0, 1")


def test_a_foreign_mlp_is_checked_as_far_as_it_goes():
    model = make("plain")
    model.blocks[0].mlp = nn.Identity()
    model.setup()
    report = model.verify()
    assert report.ok, str(report)


def test_a_text_is_refused() -> None:
    with pytest.raises(TypeError, match=r"tensors of token ids or pixels, got str: model.to_tokens\(text\)"):
        check_inputs(("a text",))
