"""Tokens that are part of a character are shown as bytes, each token differently."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hooked_lm import HookedTransformer
from hooked_lm.models.text.byte_tokens import ALPHABET, as_text
from hooked_lm.models.text.tokens import Tokens


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo", device="cpu")


def test_every_token_has_a_label_of_its_own(model: HookedTransformer) -> None:
    labels = [model.to_single_str_token(token) for token in range(model.cfg.d_vocab)]
    assert not any("\ufffd" in label for label in labels)
    assert len(set(labels)) == len(labels)


def test_bytes_of_a_character(model: HookedTransformer) -> None:
    text = " naïve \N{SNOWMAN}"
    ids = model.to_tokens(text, prepend_bos=False)[0]
    strings = model.to_str_tokens(text, prepend_bos=False)
    assert strings[-3:] == ["<0xE2>", "<0x98>", "<0x83>"]
    assert model.to_string(ids) == text, "whole texts are decoded as before"


def test_characters_around_bytes_stay_and_a_real_replacement_character_too() -> None:
    alphabet = {byte: character for character, byte in ALPHABET.items()}
    assert len(alphabet) == 256
    pieces = ["".join(alphabet[byte] for byte in data) for data in (b" \xe2\x82", "a\ufffd".encode(), b"\x80b")]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    helper = Tokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer), False, "right", n_ctx=4, d_vocab=3)
    assert helper.to_str_tokens([0, 1, 2]) == [" <0xE2><0x82>", "a\ufffd", "<0x80>b"]


def test_byte_fallback_of_sentencepiece() -> None:
    tokenizer = Tokenizer(models.BPE({"<0xE2>": 0, "a": 1, "▁\ufffd": 2}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    helper = Tokens(PreTrainedTokenizerFast(tokenizer_object=tokenizer), False, "right", n_ctx=4, d_vocab=3)
    assert helper.to_str_tokens([0, 1, 2]) == ["<0xE2>", "a", "▁\ufffd"]


def test_vocabularies_of_bytes() -> None:
    class OfBytes:
        def convert_ids_to_tokens(self, token: int) -> bytes:
            return b"\xf0\x9f"

    assert as_text(OfBytes(), 0, "\ufffd") == "<0xF0><0x9F>"
