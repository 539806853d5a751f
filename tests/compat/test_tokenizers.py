"""Under the name `transformer_lens` a decoder's tokenizer pads and prepends BOS as TransformerLens 3.9.0 makes it do: as a copy.

The ids are those of TransformerLens 3.9.0 with these tokenizers: `make clients` compares them (`against/test_text.py`).
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from hooked_lm import HookedEncoder, HookedTransformer, HookedTransformerConfig, HookedVisionLanguage, compat
from hooked_lm.models.config import defaults
from tests.close import assert_close
from tests.compat.toy_tokenizers import KINDS, toy_tokenizer

SIZES: dict[str, Any] = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 16, "d_vocab": 8, "act_fn": "relu"}
BOTH = ["a b", "a"]


@pytest.fixture
def as_transformer_lens() -> Iterator[None]:
    compat.install()
    import transformer_lens  # noqa: F401

    yield
    compat.uninstall()


# kind -> BOS, EOS and padding of the copy, the ids of "a b", and whether they begin with a token of the tokenizer
THERE: dict[str, tuple[str, str, str, list[int], bool]] = {
    "one token for all": ("</s>", "</s>", "</s>", [2, 4, 5], True),
    "bos": ("<s>", "</s>", "</s>", [1, 4, 5], True),
    "bos and pad": ("<s>", "</s>", "<pad>", [1, 4, 5], True),
    "prepends": ("<s>", "</s>", "</s>", [1, 4, 5], True),
    "prepends and appends": ("<s>", "</s>", "</s>", [1, 4, 5], True),
    "appends, with bos": ("<s>", "</s>", "</s>", [1, 4, 5], True),
    "appends": ("</s>", "</s>", "</s>", [4, 5, 2], True),
    "eos": ("</s>", "</s>", "</s>", [4, 5], False),
    "eos and pad": ("</s>", "</s>", "<pad>", [4, 5], False),
    "a colon": ("<s:b>", "</s>", "</s>", [4, 5], False),
    "left": ("<s>", "</s>", "</s>", [1, 4, 5], True),
}


@pytest.mark.parametrize("kind", THERE)
def test_it_pads_and_prepends(kind: str, as_transformer_lens: None) -> None:
    given = toy_tokenizer(kind)
    before = (given.bos_token, given.eos_token, given.pad_token, given(BOTH)["input_ids"])
    model = HookedTransformer(SIZES, tokenizer=given)
    bos, eos, pad, ids, prepends = THERE[kind]
    made = model.tokenizer
    assert (made.bos_token, made.eos_token, made.pad_token) == (bos, eos, pad)
    assert made("a b")["input_ids"] == ids
    assert model.cfg.tokenizer_prepends_bos is prepends
    padded = made(BOTH, padding=True, return_tensors="pt")["input_ids"]
    if prepends and kind != "appends":  # there one token of text is lost of each
        assert torch.equal(padded, model.to_tokens(BOTH))
    assert made is not given
    assert type(made) is type(given)
    assert before == (given.bos_token, given.eos_token, given.pad_token, given(BOTH)["input_ids"])


@pytest.mark.filterwarnings("ignore:the tokenizer has no BOS token")
@pytest.mark.parametrize("kind", KINDS)
def test_text_becomes_the_same_ids_and_logits_under_both_names(kind: str) -> None:
    """With either name, whatever the tokenizer: only calls of the tokenizer itself differ."""
    plain = HookedTransformer({**SIZES, "seed": 0}, tokenizer=toy_tokenizer(kind), default_padding_side="right")
    assert plain.tokenizer.pad_token == toy_tokenizer(kind).pad_token
    compat.install()
    import transformer_lens  # noqa: F401

    model = HookedTransformer({**SIZES, "seed": 0}, tokenizer=toy_tokenizer(kind), default_padding_side="right")
    compat.uninstall()
    for bos in (None, True, False) if kind != "nothing" else (None, False):
        for side in (None, "left", "right"):
            assert torch.equal(model.to_tokens(BOTH, bos, side), plain.to_tokens(BOTH, bos, side))
            assert model.to_str_tokens(BOTH, bos) == plain.to_str_tokens(BOTH, bos)
            assert_close(
                model(BOTH, prepend_bos=bos, padding_side=side), plain(BOTH, prepend_bos=bos, padding_side=side)
            )


def test_what_a_tokenizer_lacks_is_not_invented(as_transformer_lens: None) -> None:
    """There, `"<|endoftext|>"` is set as a token that the vocabulary lacks; its id is that of unknown words, and text is lost."""
    made = HookedTransformer(SIZES, tokenizer=toy_tokenizer("nothing")).tokenizer
    assert (made.bos_token, made.eos_token, made.pad_token) == (None, None, None)
    assert made("a b")["input_ids"] == [4, 5]


def test_texts_are_padded_where_the_tokenizer_says(as_transformer_lens: None) -> None:
    """Unless a side is given, to the model or to the tokenizer."""
    model = HookedTransformer(SIZES, tokenizer=toy_tokenizer("left"))
    assert model.padding_side == "left"
    assert model.to_tokens(BOTH).tolist() == [[1, 4, 5], [2, 1, 4]]
    assert_close(model(BOTH)[1, -1], model("a")[0, -1])
    model.tokenizer.padding_side = "right"
    assert model.to_tokens(BOTH).tolist() == [[1, 4, 5], [1, 4, 2]]
    for kind, side in (("left", "right"), ("bos", "left")):
        other = HookedTransformer(SIZES, tokenizer=toy_tokenizer(kind), default_padding_side=side)
        assert (other.padding_side, other.tokenizer.padding_side) == (side, side)
        other.set_tokenizer(toy_tokenizer(kind))
        assert other.padding_side == side
    assert (
        HookedTransformer({**SIZES, "default_padding_side": "left"}, tokenizer=toy_tokenizer("bos")).padding_side
        == "left"
    )


def test_under_its_own_name_the_tokenizer_is_the_checkpoints() -> None:
    given = toy_tokenizer("left")
    model = HookedTransformer(SIZES, tokenizer=given)
    assert model.tokenizer is given
    assert given.pad_token is None
    assert given("a b")["input_ids"] == [4, 5]
    assert model.padding_side == HookedTransformerConfig(**SIZES, d_head=4).default_padding_side == "right"


@pytest.mark.parametrize("architecture", ["Olmo2ForCausalLM", None])
def test_three_architectures_keep_their_beginning(architecture: str | None, as_transformer_lens: None) -> None:
    cfg = {**SIZES, "original_architecture": architecture}
    made = HookedTransformer(cfg, tokenizer=toy_tokenizer("bos")).tokenizer
    assert made("a b")["input_ids"] == ([1, 4, 5] if architecture is None else [4, 5])
    assert made.pad_token == "</s>"


def test_encoders_and_models_of_images_keep_theirs(as_transformer_lens: None) -> None:
    given = toy_tokenizer("bos and pad")
    assert HookedEncoder({**SIZES, "act_fn": "gelu"}, tokenizer=given).tokenizer is given
    tower = {"n_layers": 1, "d_model": 16, "n_heads": 2, "image_size": 8, "patch_size": 4, "act_fn": "gelu"}
    assert HookedVisionLanguage({**SIZES, "vision": tower, "image_token": 6}, tokenizer=given).tokenizer is given


@pytest.mark.parametrize("how", ["save", "save_pretrained"])
def test_the_files_of_a_checkpoint_keep_its_tokenizer(how: str, as_transformer_lens: None, tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained_no_processing("demo")
    own = model.tokenizer("Mary")["input_ids"][1:]
    getattr(model, how)(tmp_path / "model")
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("Mary")["input_ids"] == own
    again = HookedTransformer.from_pretrained(tmp_path / "model")
    assert again.tokenizer("Mary")["input_ids"] == [again.tokenizer.bos_token_id, *own]
    model.tokenizer.add_tokens(["<new>"])  # what is added to the copy is kept
    getattr(model, how)(tmp_path / "more")
    assert "<new>" in AutoTokenizer.from_pretrained(tmp_path / "more").get_vocab()
    model.tokenizer = toy_tokenizer("bos")
    getattr(model, how)(tmp_path / "other")
    assert AutoTokenizer.from_pretrained(tmp_path / "other").bos_token == "<s>"


def test_copies_of_a_model(as_transformer_lens: None) -> None:
    model = copy.deepcopy(HookedTransformer(SIZES, tokenizer=toy_tokenizer("left")))
    assert model.tokenizer("a")["input_ids"] == [1, 4]
    assert model.padding_side == "left"


def test_the_name_is_given_back(as_transformer_lens: None) -> None:
    assert defaults.padding_side is None
    compat.uninstall()
    assert defaults.padding_side == "right"
    given = toy_tokenizer("bos")
    assert HookedTransformer(SIZES, tokenizer=given).tokenizer is given
