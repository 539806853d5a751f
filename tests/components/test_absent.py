"""What a part does not have is no attribute of it, so that `hasattr` tells the structure of a model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hooked_lm import HookedTransformer
from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.cross import PostNormCrossBlock, PreNormCrossBlock
from hooked_lm.components.blocks.mixer import MixerBlock, MixerMLPBlock
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock
from hooked_lm.components.blocks.parallel import ParallelBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed
from hooked_lm.components.heads import MLMHead, Pooler, TokenClassifier
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of
from hooked_lm.components.ssm.mamba import Mamba
from tests.close import assert_close
from tests.models.toys import ids, toy

NORM = LayerNorm.Config(8)
ATTN, MIXER, MLPS = Attention.Config(8, 2, 4), Mamba.Config(8, 16, 4, 2, 4), MLP.Config(8, 16)
CROSS = CrossAttention.Config(8, 2, 4)
BLOCKS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "attention only": (AttentionOnlyBlock.Config(attn=ATTN, ln1=NORM), ("ln1_post", "ln2", "ln2_post", "mlp")),
    "pre-norm": (PreNormBlock.Config(attn=ATTN, mlp=MLPS, ln1=NORM, ln2=NORM), ("ln1_post", "ln2_post")),
    "parallel": (ParallelBlock.Config(attn=ATTN, mlp=MLPS, ln1=NORM, ln2=NORM), ("ln1_post", "ln2_post")),
    "post-norm": (PostNormBlock.Config(attn=ATTN, mlp=MLPS, ln1=NORM, ln2=NORM), ("ln1_post", "ln2_post")),
    "mixer": (MixerBlock.Config(mixer=MIXER, ln1=NORM), ("ln1_post", "attn", "ln2", "mlp")),
    "mixer and MLP": (MixerMLPBlock.Config(mixer=MIXER, mlp=MLPS, ln1=NORM, ln2=NORM), ("ln1_post", "ln2_post")),
    "cross": (PreNormCrossBlock.Config(attn=ATTN, cross_attn=CROSS, mlp=MLPS, ln1=NORM), ("ln1_post", "ln2_post")),
    "post-norm cross": (PostNormCrossBlock.Config(attn=ATTN, cross_attn=CROSS, mlp=MLPS), ("ln1_post", "ln2_post")),
}


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_has_the_norms_of_its_config(kind: str) -> None:
    cfg, absent = BLOCKS[kind]
    block = cfg.build(0)
    assert [name for name in absent if hasattr(block, name)] == []
    if hasattr(cfg, "ln1_post"):
        assert isinstance(replace(cfg, ln1_post=NORM).build(0).ln1_post, LayerNorm)


def test_the_absent_norm_in_front_of_a_sublayer_is_an_identity() -> None:
    block = PreNormBlock.Config(attn=ATTN, mlp=MLPS).build(0)
    assert isinstance(block.ln1, nn.Identity)
    assert isinstance(block.ln2, nn.Identity)
    assert not hasattr(block.ln1, "hook_scale")


@pytest.mark.parametrize(
    ("part", "absent"),
    [
        (ATTN.build(), ["v_norm", "z_norm"]),
        (Embed.Config(5, 8).build(), ["ln"]),
        (EncoderEmbed.Config(Embed.Config(5, 8)).build(), ["ln"]),
        (MLPS.build(), ["ln", "hook_mid", "W_gate"]),
        (MLMHead.Config(8, 8).build(), ["ln"]),
        (Pooler.Config(8).build(), ["ln"]),
        (TokenClassifier.Config(8, 3).build(), ["transform"]),
        (LayerNorm.Config(8, weight=False, bias=False).build(), ["w", "b"]),
        (RMSNorm.Config(8, weight=False).build(), ["w", "b"]),
    ],
)
def test_a_part_has_what_its_config_says(part: nn.Module, absent: list[str]) -> None:
    assert [name for name in absent if hasattr(part, name)] == []


def test_norms_of_queries_and_keys_are_none_or_norms() -> None:
    assert ATTN.build().q_norm is None
    assert CROSS.build().k_norm is None
    assert isinstance(replace(ATTN, qk_norm=RMSNorm.Config(4)).build().q_norm, RMSNorm)


def test_a_model_without_norms_has_no_final_one() -> None:
    model = HookedTransformer(
        {"n_layers": 1, "d_model": 8, "n_ctx": 4, "d_head": 4, "n_heads": 2, "d_vocab": 5, "attn_only": True}
        | {"normalization_type": None, "device": "cpu"}
    )
    assert not hasattr(model, "ln_final")
    assert "ln_final" not in model.mod_dict
    resid = model(torch.tensor([[1, 4, 2]]), stop_at_layer=1)
    assert torch.equal(norm_of(model, "ln_final")(resid), resid)


def test_folding_leaves_norms_without_weights_and_loading_brings_them_back() -> None:
    model, other = toy("standard"), toy("standard")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(ids(batch=1, n_pos=4))
    model.process_weights_()
    assert not any(hasattr(norm, leaf) for norm in (model.blocks[0].ln1, model.ln_final) for leaf in "wb")
    assert model.blocks[0].ln1.gain() is None
    model.load_and_process_state_dict(weights, fold_ln=False, center_writing_weights=False, center_unembed=False)
    assert torch.equal(model.ln_final.w, other.ln_final.w)
    assert_close(model(ids(batch=1, n_pos=4)), logits)
