"""Changes of flat names on configs of loaded models that flat names alone do not describe."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.models.config.flat import HookedEncoderConfig
from hooked_lm.models.encoder import Encoder
from tests.families import CASES
from tests.families._models import hooked

UNLIKE_BERT = ("electra-masked-narrow", "mpnet-masked", "modernbert-masked", "esm-masked-rotary", "deberta-v2-masked")
UNLIKE_T5 = ("bart-plain", "mbart-plain", "marian-plain", "blenderbot-plain")
EDITS: dict[str, Any] = {"n_ctx": 12, "act_fn": "silu", "d_vocab": 50, "eps": 0.5}
EDITS_OF_ENCODERS = {"n_layers": 1, "d_mlp": 24, "use_attn_scale": False}


def loaded(name: str) -> Any:
    return hooked(next(case for case in CASES if str(case) == name))


def built(model: Any, **changes: Any) -> Any:
    cfg = replace(model.cfg, **changes, tokenizer_name=None, device="cpu", init_weights=True)
    return type(model)(cfg)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *((name, *edit) for name in UNLIKE_BERT + UNLIKE_T5 for edit in EDITS.items()),
        *((name, *edit) for name in UNLIKE_BERT for edit in EDITS_OF_ENCODERS.items()),
    ],
)
def test_a_change_takes_effect(name: str, field: str, value: Any) -> None:
    model = loaded(name)
    edited = built(model, **{field: value})
    assert getattr(edited.cfg, field) == value != getattr(model.cfg, field)
    assert [type(block) for block in edited.blocks] == [type(block) for block in model.blocks][: len(edited.blocks)]
    assert edited(torch.tensor([[5, 3, 7]])).isfinite().all()


@pytest.mark.parametrize("name", UNLIKE_BERT + UNLIKE_T5)
def test_every_norm_has_the_new_constant(name: str) -> None:
    model = loaded(name)
    before = {place: m.cfg.eps for place, m in model.named_modules() if hasattr(getattr(m, "cfg", None), "eps")}
    after = {
        place: m.cfg.eps
        for place, m in built(model, eps=0.5).named_modules()
        if hasattr(getattr(m, "cfg", None), "eps")
    }
    assert before.keys() == after.keys()
    assert {place for place in after if after[place] != 0.5} == {
        place for place in before if before[place] != model.cfg.eps
    }


def test_the_windows_of_an_encoder() -> None:
    model = loaded("modernbert-masked")
    edited = built(model, window_size=3, attn_types=["local", "global", "local"])
    assert [block.attn.cfg.window for block in edited.blocks] == [3, None, 3]


@pytest.mark.parametrize(
    ("name", "field", "value", "reason"),
    [
        ("esm-masked-rotary", "n_heads", 8, "do not describe rotary.rotary.dim, which would keep 8"),
        ("olmo2-grouped", "d_head", 16, "do not describe blocks.0.attn.k_norm.d_model, which would keep 8"),
        ("olmo2-grouped", "n_key_value_heads", 1, "k_norm has weights for 2 heads, but there are 1"),
        ("stablelm-parallel-normed", "n_key_value_heads", 1, "k_norm has weights for 2 heads, but there are 1"),
        ("phi3-longrope", "d_head", 16, "short_factor of LongRope has 4 numbers, but 16 rotary features are 8 pairs"),
        (
            "gptj-all-rotary-tied",
            "d_vocab_out",
            20,
            "of 20 tokens cannot be tied to an embedding of 61: make d_vocab_out",
        ),
        ("gpt2-tied", "d_vocab_out", 20, "of 20 tokens cannot be tied to an embedding of 61: make d_vocab_out"),
        ("marian-plain", "d_mlp", 24, "has 40 at decoder.blocks.0.mlp.d_mlp, where flat names describe"),
        ("modernbert-masked", "rotary_base", 8.0, "at blocks.1.attn.rotary.theta, where flat names describe"),
        ("bert-tokens", "normalization_type", "RMS", "flat names build encoders like BERT"),
        ("albert-masked-group-of-two", "n_layers", 3, "shares says which weights 4 layers share, but there are 3"),
    ],
)
def test_a_change_without_a_meaning_is_refused(name: str, field: str, value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{field}={value!r}.*{reason}"):
        replace(loaded(name).cfg, **{field: value})


def test_a_width_that_equals_another_after_a_change_does_not_follow_it() -> None:
    """The new width of a head is the old width of the stream."""
    model = loaded("persimmon-linear-gelu")
    edited = built(model, d_model=2 * model.cfg.d_model)
    assert edited.blocks[0].attn.cfg.qk_norm.d_model == edited.cfg.d_head == model.cfg.d_model
    assert edited(torch.tensor([[5, 3, 7]])).isfinite().all()


def test_a_norm_of_another_width_than_the_heads_is_refused() -> None:
    tree = loaded("persimmon-linear-gelu").cfg.tree
    attn = replace(tree.blocks[0].attn, qk_norm=RMSNorm.Config(7))
    with pytest.raises(ValueError, match="qk_norm normalises vectors of width 7, but d_head is"):
        replace(tree, blocks=(replace(tree.blocks[0], attn=attn),))


def test_heads_of_a_model_without_groups_stay_without_groups() -> None:
    """Also if its config says the number of key and value heads."""
    model = loaded("llama-biased-tied")
    assert model.blocks[0].attn.cfg.n_key_value_heads == 4
    assert built(model, n_heads=8).blocks[0].attn.cfg.n_kv == 8


def test_flat_names_build_a_bert_with_local_attention() -> None:
    cfg = HookedEncoderConfig(
        n_layers=2, d_model=16, n_heads=2, n_ctx=8, d_vocab=11, act_fn="gelu", use_local_attn=True, window_size=2
    )
    model = Encoder(cfg)
    _, cache = model.run_with_cache(torch.tensor([[5, 3, 7, 2, 9]]))
    assert cache["pattern", 0][0, 0, 0, 3:].sum() == 0
