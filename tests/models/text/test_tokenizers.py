"""Which tokenizer a model gets by name, and whether text for it begins with BOS."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer, HookedTransformerConfig, pretrained
from hooked_lm.families import family, supported
from tests.close import assert_close
from tests.families import CASES, reference
from tests.models.toys import D_VOCAB, words

SIZES: dict[str, Any] = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "act_fn": "relu"}
WITHOUT_BOS = {
    *("bloom", "gpt_neox", "mpt", "phi", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "recurrent_gemma"),
    *(
        "lara_mini",
        "ernie4_5",
        "ernie4_5_moe",
        "sarvam_moe",
        "exaone4",
        "glm",
        "glm4",
        "glm4_moe",
        "granite",
        "granitemoe",
    ),
    *("seed_oss", "smollm3", "starcoder2", "glm4_moe_lite", "minimax_m2", "granitemoehybrid"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"),
    *(
        "qwen3_vl_text",
        "qwen3_vl_moe_text",
        "qwen3_omni_moe_text",
        "glm4v_text",
        "glm4v_moe_text",
        "glm_ocr_text",
        "granite4_vision_text",
    ),
    *(
        "dots3_note_text",
        "glm_moe_dsa",
        "granite_docling_text",
        "emu3_text_model",
        "molmo2_text",
        "ernie4_5_vl_moe_text",
        "hunyuan_vl_text",
        "paddleocr_vl_text",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    words().save_pretrained(tmp_path / "words")
    return tmp_path / "words"


@pytest.mark.parametrize("model", [HookedTransformer, HookedEncoder, HookedEncoderDecoder])
def test_the_tokenizer_that_a_config_names(model: Any, folder: Path) -> None:
    """And its vocabulary, where the config does not say another."""
    built = model({**SIZES, "tokenizer_name": str(folder)})
    assert (built.cfg.d_vocab, built.cfg.d_vocab_out) == (D_VOCAB, D_VOCAB)
    assert built.tokenizer.convert_tokens_to_ids("w7") == 7
    assert model({**SIZES, "tokenizer_name": str(folder), "d_vocab": 64}).cfg.d_vocab == 64
    other = words()
    assert model({**SIZES, "tokenizer_name": str(folder)}, tokenizer=other).tokenizer is other


def test_text_of_such_a_model(folder: Path) -> None:
    model = HookedTransformer(HookedTransformerConfig(**SIZES, tokenizer_name=str(folder)))
    assert model.to_tokens("w7 w8").tolist() == [[0, 7, 8]]
    assert model("w7 w8").shape == (1, 3, D_VOCAB)
    model = HookedTransformer(HookedTransformerConfig(**SIZES, tokenizer_name=str(folder), d_vocab_out=3))
    assert model("w7 w8").shape == (1, 3, 3)


def test_a_tokenizer_that_is_nowhere(tmp_path: Path) -> None:
    for name in (str(tmp_path / "nowhere"), str(tmp_path)):  # no directory, and one without a tokenizer
        with pytest.raises(ValueError, match=r"d_vocab is missing.*tokenizer"):
            HookedTransformer({**SIZES, "tokenizer_name": name})
        with pytest.warns(UserWarning, match="has no tokenizer"):
            model = HookedTransformer({**SIZES, "tokenizer_name": name, "d_vocab": 9})
        assert model(torch.tensor([[1, 2]])).shape == (1, 2, 9)


def test_models_that_name_the_bundled_one() -> None:
    cfg = HookedTransformer.from_pretrained("demo").cfg
    assert HookedTransformer(cfg).to_tokens("The").shape[1] == 2


def test_configs_that_are_not_complete() -> None:
    """An empty vocabulary is one; without an activation there are no MLPs."""
    assert HookedTransformer({**SIZES, "d_vocab": 0}).W_E.shape == (0, 8)
    assert HookedTransformerConfig(**SIZES).d_vocab == -1
    without = HookedTransformerConfig(**{**SIZES, "act_fn": None, "d_vocab": 5})
    with pytest.raises(ValueError, match="act_fn"):
        HookedTransformer(without)
    without.attn_only = True
    assert HookedTransformer(without)(torch.tensor([[1, 2]])).shape == (1, 2, 5)
    without.attn_only, without.act_fn = False, "gelu"
    assert HookedTransformer(without).W_in.shape == (1, 8, 32)


# ---- BOS -------------------------------------------------------------------------------------------------------------


def test_families_whose_text_begins_without_bos() -> None:
    assert {name for name in supported() if not getattr(family(name), "PREPENDS_BOS", True)} == WITHOUT_BOS


@pytest.mark.parametrize(
    "case", [next(c for c in CASES if str(c).startswith(n)) for n in ("gpt2", "gpt_neox", "llama")], ids=str
)
def test_bos_of_a_loaded_model(case: Any, tmp_path: Path) -> None:
    model = reference(case)
    model.save_pretrained(tmp_path / "model")
    words().save_pretrained(tmp_path / "model")
    begins = not str(case).startswith("gpt_neox")
    loaded = pretrained.from_pretrained(tmp_path / "model")
    assert loaded.cfg.default_prepend_bos is begins
    assert loaded.to_tokens("w7").tolist() == ([[0, 7]] if begins else [[7]])
    assert loaded.to_tokens("w7", prepend_bos=not begins).tolist() == ([[7]] if begins else [[0, 7]])
    assert pretrained.from_pretrained(tmp_path / "model", default_prepend_bos=True).to_tokens("w7").tolist() == [[0, 7]]


def test_more_positions_than_the_checkpoint(tmp_path: Path) -> None:
    llama = reference(next(c for c in CASES if str(c) == "llama-grouped"))
    llama.save_pretrained(tmp_path / "llama")
    trained = llama.config.max_position_embeddings
    with pytest.warns(UserWarning, match=f"n_ctx={trained + 5}: the checkpoint has n_ctx {trained}"):
        longer = pretrained.from_pretrained(tmp_path / "llama", n_ctx=trained + 5)
    assert longer(torch.ones(1, trained + 5).long()).isfinite().all()
    assert pretrained.from_pretrained(tmp_path / "llama", n_ctx=trained - 1).cfg.n_ctx == trained - 1
    with pytest.raises(ValueError, match="embeddings for"):
        pretrained.from_pretrained("demo", n_ctx=100_000)


def test_the_padding_side_of_the_tokenizer_counts_once_somebody_sets_it() -> None:
    """As in `model.tokenizer.padding_side = "left"`; the side that a checkpoint's tokenizer comes with does not."""
    model, texts = HookedTransformer.from_pretrained("demo"), ["Mary", "Mary and John left"]
    alone, right = model("Mary")[0, -1], model.to_tokens(texts)
    model.tokenizer.padding_side = "left"
    assert model.padding_side == "left"
    assert torch.equal(model.to_tokens(texts), model.to_tokens(texts, padding_side="left"))
    for given in (texts, model.to_tokens(texts)):
        assert_close(model(given)[0, -1], alone)
    assert torch.equal(model.to_tokens(texts, padding_side="right"), right)
    model.tokenizer.padding_side = "right"
    assert torch.equal(model.to_tokens(texts), right)
    other = copy.deepcopy(model.tokenizer)
    other.padding_side = "left"
    model.set_tokenizer(other)
    assert model.padding_side == "right"
    model.set_tokenizer(other, default_padding_side="left")
    assert model.padding_side == "left"
    assert copy.deepcopy(model).padding_side == "left"
