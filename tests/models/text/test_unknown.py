"""Text for which a tokenizer has no token."""

import warnings

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hooked_lm import HookedTransformer, HookedVisionLanguage
from tests.models.toys import toy, words


def letters(pre_tokenizer: pre_tokenizers.PreTokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer that leaves out each letter but a and b."""
    of = Tokenizer(models.BPE({"<s>": 0, "a": 1, "b": 2, "▁": 3, "▁a": 4}, [("▁", "a")]))
    of.pre_tokenizer = pre_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=of, bos_token="<s>", eos_token="<s>", pad_token="<s>")


def test_unknown_words_are_named_once():
    model = toy(tokenizer=words())
    with pytest.warns(
        UserWarning, match="no token for 'zebra', 'w99', in 'w3 zebra w4 w99': '<unk>' is read"
    ) as caught:
        model.to_tokens(["w3", "w3 zebra w4 w99"])
    assert len(caught) == 1
    model.to_tokens("w3 unicorn")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        toy(tokenizer=words()).to_tokens("w3 <unk> w4"), "it is written in the text"


@pytest.mark.parametrize("pre_tokenizer", [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
def test_characters_that_are_left_out_are_named(pre_tokenizer: pre_tokenizers.PreTokenizer):
    model = toy(tokenizer=letters(pre_tokenizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.to_tokens("ab a")
    with pytest.warns(UserWarning, match=r"no token for 'c', 'é', in 'ac bé': nothing is read in their place"):
        model.to_tokens("ac bé")


def test_tokenizers_with_bytes_have_a_token_for_everything():
    model = HookedTransformer.from_pretrained("demo")
    assert model.to_string(model.to_tokens("héllo 日本 🙂", prepend_bos=False)[0]) == "héllo 日本 🙂"


def test_a_word_that_would_be_read_as_padding_is_refused():
    question = "<image> which shape is the zebra ?"
    for read in (
        lambda: HookedTransformer.from_pretrained("demo-shapes").to_tokens(question),
        lambda: HookedVisionLanguage.from_pretrained("demo-shapes").prepare(question, picture()),
    ):
        with pytest.raises(
            ValueError, match=r"no token for 'zebra', in .* which is padding; use words of its vocabulary"
        ):
            read()


def picture() -> object:
    return pytest.importorskip("PIL.Image").new("RGB", (40, 40))
