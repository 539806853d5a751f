"""Text and ids: round trips, BOS, padding, masks, and a tokenizer that stays as it was."""

import copy
import json
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hooked_lm import HookedTransformer
from hooked_lm.models.text.bos import prepends_bos, special_prefix
from hooked_lm.models.text.tokens import Tokens, checked_texts

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CORPUS = ["the cat sat on the mat", "when Mary and John went to the store", "a dog"] * 5
SIDES = ("left", "right")
GPT2_LIKE = "one special token, as GPT-2"


def tiny(
    template: str | None = None, pad: str | None = PAD, eos: str = EOS, metaspace: bool = False, bos: str | None = BOS
) -> PreTrainedTokenizerFast:
    """A byte-level BPE, or a SentencePiece-like one, that puts around a text what `template` says."""
    tokenizer = Tokenizer(models.BPE(unk_token=EOS) if metaspace else models.BPE())
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = ["▁", *map(chr, range(33, 127))]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=[BOS, EOS, PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if template is not None:
        special = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad)


MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "nothing added": tiny,
    GPT2_LIKE: lambda: tiny(pad=BOS, eos=BOS),
    "BOS added": lambda: tiny(f"{BOS} $A"),
    "BOS added, pad is eos": lambda: tiny(f"{BOS} $A", pad=EOS),
    "BOS and EOS added": lambda: tiny(f"{BOS} $A {EOS}"),
    "no pad token": lambda: tiny(pad=None),
    "no pad token, one special": lambda: tiny(pad=None, eos=BOS),
    "SentencePiece-like": lambda: tiny(metaspace=True),
    "SentencePiece-like, BOS added": lambda: tiny(f"{BOS} $A", metaspace=True, pad=None),
}
KINDS = pytest.mark.parametrize("kind", MAKERS)


@cache
def text_of(kind: str) -> Tokens:
    tokenizer = MAKERS[kind]()
    return Tokens(tokenizer, True, "right", n_ctx=64, d_vocab=len(tokenizer))


def state(tokenizer: PreTrainedTokenizerFast) -> tuple[Any, ...]:
    """Everything that a call could leave changed."""
    sides = (tokenizer.padding_side, tokenizer.truncation_side)
    attributes = {k: repr(v) for k, v in vars(tokenizer).items() if k != "_tokenizer"}
    return tokenizer.backend_tokenizer.to_str(), sides, json.dumps(attributes, sort_keys=True)


def unpadded(tokens: Tensor, mask: Tensor) -> list[list[int]]:
    return [row[keep.bool()].tolist() for row, keep in zip(tokens, mask, strict=True)]


words = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="<>"), min_size=1, max_size=6)
texts = st.lists(words, min_size=1, max_size=5).map(" ".join)
any_text = st.text(min_size=1, max_size=20).filter(lambda text: not any(s in text for s in (BOS, EOS, PAD)))


@KINDS
class TestEveryTokenizer:
    @given(text=texts, prepend_bos=st.booleans())
    def test_text_survives_the_round_trip(self, kind: str, text: str, prepend_bos: bool) -> None:
        tokens = text_of(kind).to_tokens(text, prepend_bos=prepend_bos, truncate=False)
        tokens = tokens[:, 1:] if prepend_bos else tokens
        assert text_of(kind).to_string(tokens) == [text]

    @given(batch=st.lists(texts, min_size=1, max_size=5), prepend_bos=st.booleans(), side=st.sampled_from(SIDES))
    def test_a_row_of_a_batch_is_the_row_alone(self, kind: str, batch: list[str], prepend_bos: bool, side: str) -> None:
        tokens, mask = text_of(kind).encode(batch, prepend_bos, side)
        alone = [text_of(kind).to_tokens(text, prepend_bos, truncate=False)[0].tolist() for text in batch]
        assert unpadded(tokens, mask) == alone
        edge = mask[:, -1] if side == "left" else mask[:, 0]
        assert edge.all()
        assert (tokens[mask == 0] == text_of(kind).pad_id).all()

    @given(batch=st.lists(texts, min_size=1, max_size=5), side=st.sampled_from(SIDES), prepend_bos=st.booleans())
    def test_the_mask_read_off_ids_is_the_true_one(
        self, kind: str, batch: list[str], side: str, prepend_bos: bool
    ) -> None:
        text = text_of(kind)
        tokens, mask = text.encode(batch, prepend_bos, side)
        assert torch.equal(text.attention_mask(tokens, prepend_bos, side), mask)

    @given(text=texts, spelled=st.booleans(), side=st.sampled_from(SIDES))
    def test_bos_comes_exactly_once(self, kind: str, text: str, spelled: bool, side: str) -> None:
        helper = text_of(kind)
        bos = helper.tokenizer.bos_token_id
        batch = [BOS + text if spelled else text, "a"]
        tokens, mask = helper.encode(batch, prepend_bos=True, padding_side=side)
        for row in unpadded(tokens, mask):
            assert row[0] == bos
            assert row.count(bos) == 1

    def test_without_bos_only_what_the_text_spells_out_is_there(self, kind: str) -> None:
        helper = text_of(kind)
        bos = helper.tokenizer.bos_token_id
        assert bos not in helper.to_tokens("the cat", prepend_bos=False)[0].tolist()
        assert helper.to_tokens(BOS + "the cat", prepend_bos=False)[0].tolist().count(bos) == 1

    def test_eos_stands_only_where_the_text_has_it(self, kind: str) -> None:
        helper = text_of(kind)
        plain = helper.to_tokens("the cat", prepend_bos=False)[0].tolist()
        assert helper.tokenizer.eos_token_id not in plain
        spelled = helper.to_tokens("the cat" + EOS, prepend_bos=False)[0].tolist()
        assert spelled == [*plain, helper.tokenizer.convert_tokens_to_ids(EOS)]

    def test_default_prepend_bos_is_what_none_means(self, kind: str) -> None:
        helper = text_of(kind)
        for default in (True, False):
            other = Tokens(helper.tokenizer, default, "right", n_ctx=64, d_vocab=helper.d_vocab)
            assert other.to_tokens("a dog").tolist() == helper.to_tokens("a dog", prepend_bos=default).tolist()

    @pytest.mark.parametrize("switched", ["as made", "padding", "padding and truncation"])
    def test_the_tokenizer_is_left_as_it_was(self, kind: str, switched: str) -> None:
        tokenizer = MAKERS[kind]()
        helper = Tokens(tokenizer, True, "left", n_ctx=64, d_vocab=len(tokenizer))
        expected = helper.encode(["the cat sat on the mat", "a"])
        if switched != "as made":
            tokenizer.backend_tokenizer.enable_padding(length=40, direction="left")
        if "truncation" in switched:
            tokenizer.backend_tokenizer.enable_truncation(max_length=3)
        before = state(tokenizer)
        tokens, mask = helper.encode(["the cat sat on the mat", "a"])
        helper.to_str_tokens("the cat", padding_side="right")
        helper.attention_mask(tokens)
        helper.to_single_token("a")
        assert state(tokenizer) == before
        assert tokens.equal(expected[0])
        assert mask.equal(expected[1])


def test_any_unicode_survives_a_byte_level_round_trip() -> None:
    @given(any_text)
    def check(text: str) -> None:
        tokens = text_of("nothing added").to_tokens(text, prepend_bos=False, truncate=False)
        assert text_of("nothing added").to_string(tokens[0]) == text

    check()


@pytest.mark.parametrize(
    ("kind", "expected"), [(kind, "BOS" in kind and "added" in kind) for kind in MAKERS], ids=list(MAKERS)
)
def test_prepends_bos(kind: str, expected: bool) -> None:
    assert prepends_bos(MAKERS[kind]()) is expected


@pytest.mark.parametrize(
    ("template", "bos", "prefix"),
    [
        (None, BOS, []),
        (f"$A {EOS}", BOS, []),
        (f"$A {EOS}", None, []),
        (f"{BOS} $A", BOS, [0]),
        (f"{BOS} $A", None, [0]),
        (f"{BOS} $A {EOS}", BOS, [0]),
        (f"{BOS} $A {EOS}", None, [0]),
        (f"{EOS} $A {EOS}", EOS, [1]),
        (f"{EOS} {BOS} $A", BOS, [1, 0]),
    ],
)
def test_special_prefix(template: str | None, bos: str | None, prefix: list[int]) -> None:
    assert special_prefix(tiny(template, bos=bos)) == prefix


def test_a_vocabulary_without_letters_or_an_unknown_token() -> None:
    digits = Tokenizer(models.WordLevel({BOS: 0, EOS: 1, "7": 2}))
    digits.add_special_tokens([BOS, EOS])
    digits.post_processor = processors.TemplateProcessing(f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=digits, bos_token=BOS, eos_token=EOS)
    assert Tokens(tokenizer, True, "right", n_ctx=8, d_vocab=3).to_tokens("7").tolist() == [[0, 2]]


def test_a_tokenizer_without_bos_begins_with_eos() -> None:
    tokenizer = tiny(bos=None)
    helper = Tokens(tokenizer, True, "right", n_ctx=8, d_vocab=len(tokenizer))
    assert helper.to_str_tokens("a", prepend_bos=True) == [EOS, "a"], "it is meant"
    assert helper.to_str_tokens("a", prepend_bos=False) == ["a"]
    told = rf"no BOS token, so texts begin with its EOS token '{EOS}', .* prepend_bos=False leaves it out"
    with pytest.warns(UserWarning, match=told):
        assert helper.to_str_tokens("a") == [EOS, "a"]
    assert helper.to_tokens("a").shape == (1, 2), "said once: a second warning would be an error"
    assert Tokens(tokenizer, False, "right", n_ctx=8, d_vocab=len(tokenizer)).to_str_tokens("a") == ["a"]


def test_a_prefix_of_two_tokens_is_one_bos() -> None:
    tokenizer = tiny(f"{EOS} {BOS} $A", pad=EOS)
    helper = Tokens(tokenizer, True, "left", n_ctx=16, d_vocab=len(tokenizer))
    [a] = helper.to_tokens("a", prepend_bos=False)[0].tolist()
    assert helper.to_tokens(["a", EOS + BOS + "a"]).tolist() == [[1, 0, a]] * 2
    tokens, mask = helper.encode(["a", "a dog sat"])
    assert helper.attention_mask(tokens).equal(mask)


class TestWithoutSpecialTokens:
    @staticmethod
    def helper() -> Tokens:
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")))
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return Tokens(tokenizer, True, "right", n_ctx=8, d_vocab=2)

    def test_the_default_prepends_nothing(self) -> None:
        assert self.helper().to_tokens("b a").tolist() == [[1, 0]]

    def test_asking_for_bos_is_refused(self) -> None:
        with pytest.raises(ValueError, match="neither a BOS nor an EOS token"):
            self.helper().to_tokens("b a", prepend_bos=True)

    def test_rows_are_padded_with_zero_and_the_mask_knows(self) -> None:
        tokens, mask = self.helper().encode(["b b b", "a b"], padding_side="left")
        assert tokens.tolist() == [[1, 1, 1], [0, 0, 1]]
        assert mask.tolist() == [[1, 1, 1], [0, 1, 1]]


def test_a_pad_token_that_the_model_cannot_embed_is_not_used() -> None:
    tokenizer = tiny()
    d_vocab = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    assert tokenizer.pad_token_id == d_vocab
    helper = Tokens(tokenizer, True, "right", n_ctx=16, d_vocab=d_vocab)
    assert helper.encode(["a dog", "a"])[0][1, -1] == tokenizer.eos_token_id


class TestTruncation:
    TEXT = "the cat sat on the mat when Mary and John went to the store a dog"

    @pytest.mark.parametrize("prepend_bos", [True, False])
    @pytest.mark.parametrize("side", SIDES)
    def test_it_cuts_to_n_ctx_and_keeps_bos(self, side: str, prepend_bos: bool) -> None:
        tokenizer = tiny()
        tokenizer.truncation_side = side
        helper = Tokens(tokenizer, prepend_bos, "right", n_ctx=6, d_vocab=len(tokenizer))
        full = helper.to_tokens(self.TEXT, prepend_bos=False, truncate=False)[0].tolist()
        bos = [tokenizer.bos_token_id] if prepend_bos else []
        kept = 6 - len(bos)
        assert helper.to_tokens(self.TEXT)[0].tolist() == bos + (full[-kept:] if side == "left" else full[:kept])
        assert len(helper.to_str_tokens(self.TEXT)) == 6

    def test_short_rows_are_padded_to_the_cut_one(self) -> None:
        tokenizer = tiny()
        helper = Tokens(tokenizer, True, "right", n_ctx=6, d_vocab=len(tokenizer))
        assert helper.to_tokens([self.TEXT, "a"]).shape == (2, 6)

    def test_truncate_false_and_encode_cut_nothing(self) -> None:
        tokenizer = tiny()
        helper = Tokens(tokenizer, True, "right", n_ctx=6, d_vocab=len(tokenizer))
        assert helper.to_tokens(self.TEXT, truncate=False).shape[1] > 6
        assert helper.encode(self.TEXT)[0].shape[1] > 6


class TestMaskOfBareIds:
    """Pad, BOS and EOS are token 0 unless a test says otherwise."""

    @staticmethod
    def mask(rows: list[list[int]], side: str, prepend_bos: bool = True, kind: str = GPT2_LIKE) -> list[list[int]]:
        return text_of(kind).attention_mask(torch.tensor(rows), prepend_bos, side).tolist()

    def test_on_the_left_the_last_of_the_run_is_bos(self) -> None:
        assert self.mask([[0, 0, 0, 9], [0, 8, 7, 9]], "left") == [[0, 0, 1, 1], [1, 1, 1, 1]]

    def test_a_row_taken_out_of_a_left_padded_batch_stays_padded(self) -> None:
        assert self.mask([[0, 0, 0, 9]], "left") == [[0, 0, 1, 1]]

    def test_without_bos_the_run_is_padding(self) -> None:
        assert self.mask([[0, 0, 0, 9], [5, 8, 7, 9]], "left", prepend_bos=False) == [[0, 0, 0, 1], [1, 1, 1, 1]]

    def test_what_all_rows_share_is_text(self) -> None:
        assert self.mask([[0, 9, 9]], "left", prepend_bos=False) == [[1, 1, 1]]
        assert self.mask([[0, 9, 9, 0]], "right") == [[1, 1, 1, 1]]
        assert self.mask([[0, 9, 0, 0], [0, 9, 9, 0]], "right") == [[1, 1, 1, 0], [1, 1, 1, 1]]

    def test_a_row_of_pads_alone_keeps_a_token(self) -> None:
        assert self.mask([[0, 0, 0], [0, 9, 9]], "right") == [[1, 0, 0], [1, 1, 1]]
        assert self.mask([[0, 0, 0], [0, 9, 9]], "left") == [[0, 0, 1], [1, 1, 1]]
        assert self.mask([[2, 2, 2]], "left", kind="nothing added") == [[0, 0, 1]]

    def test_the_other_side_and_the_middle_are_text(self) -> None:
        assert self.mask([[9, 0, 9, 0], [9, 9, 9, 9]], "left") == [[1, 1, 1, 1], [1, 1, 1, 1]]

    def test_a_pad_token_of_its_own_is_padding_even_in_a_single_row(self) -> None:
        assert self.mask([[2, 2, 0, 9]], "left", kind="nothing added") == [[0, 0, 1, 1]]
        assert self.mask([[0, 9, 2, 2]], "right", kind="nothing added") == [[1, 1, 0, 0]]

    def test_pad_is_eos_and_bos_another(self) -> None:
        assert self.mask([[1, 1, 0, 9]], "left", kind="BOS added, pad is eos") == [[0, 0, 1, 1]]

    def test_without_a_tokenizer_all_is_text(self) -> None:
        tokens = torch.tensor([[0, 0, 3]])
        assert Tokens(None, True, "left", n_ctx=8, d_vocab=9).attention_mask(tokens).tolist() == [[1, 1, 1]]

    def test_nothing_stays_nothing(self) -> None:
        assert text_of(GPT2_LIKE).attention_mask(torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3)


class TestIdsToText:
    helper = staticmethod(lambda: text_of("nothing added"))

    @pytest.mark.parametrize("wrap", [list, tuple, torch.tensor, np.array])
    def test_to_string_of_one_row_and_of_a_batch(self, wrap: Callable[[Any], Any]) -> None:
        row = self.helper().to_tokens("the cat")[0].tolist()
        assert self.helper().to_string(wrap(row)) == BOS + "the cat"
        assert self.helper().to_string(wrap([row, row])) == [BOS + "the cat"] * 2

    def test_to_string_of_one_id_and_of_rows_that_differ(self) -> None:
        the, cat = self.helper().to_tokens("the cat", prepend_bos=False)[0]
        for one in (int(the), the, np.int64(the), the.numpy()):
            assert self.helper().to_string(one) == "the"
        assert self.helper().to_string([the, cat]) == "the cat"
        assert self.helper().to_string([torch.stack([the, cat]), the[None]]) == ["the cat", "the"]
        assert self.helper().to_string([]) == ""
        assert self.helper().to_string(torch.zeros(0, 4, dtype=torch.long)) == []

    def test_to_str_tokens(self) -> None:
        helper = self.helper()
        assert helper.to_str_tokens("the cat") == [BOS, "the", " cat"]
        assert helper.to_str_tokens(["the cat", "the"], prepend_bos=False) == [["the", " cat"], ["the"]]
        assert helper.to_str_tokens(["the"], prepend_bos=False) == [["the"]]
        row = helper.to_tokens("the cat", prepend_bos=False)
        for ids in (row, row[0], row.numpy(), row[0].tolist(), tuple(row[0])):
            assert helper.to_str_tokens(ids) == ["the", " cat"]
        assert helper.to_str_tokens(row[0, 0]) == ["the"]
        assert helper.to_str_tokens(row.repeat(2, 1)) == [["the", " cat"]] * 2
        assert helper.to_str_tokens(row.tolist()) == [["the", " cat"]]

    @given(text=texts)
    def test_str_tokens_spell_the_text(self, text: str) -> None:
        assert "".join(self.helper().to_str_tokens(text, prepend_bos=False)) == text

    def test_single_tokens(self) -> None:
        token = self.helper().to_single_token(" cat")
        assert self.helper().to_tokens("the cat")[0, -1] == token
        assert self.helper().to_single_str_token(token) == " cat"
        assert self.helper().single_token_ids([" cat", token]).tolist() == [token, token]
        with pytest.raises(ValueError, match=r"'the cat' is not a single token: .* 2 tokens \['the', ' cat'\]"):
            self.helper().to_single_token("the cat")
        with pytest.raises(ValueError, match="zero tokens"):
            self.helper().to_single_token("")
        with pytest.raises(ValueError, match=r"token id 5000 is out of range: d_vocab is 29\d, so ids are 0 to 29"):
            self.helper().to_single_str_token(5000)

    def test_answers(self) -> None:
        helper = self.helper()
        token, bare = helper.to_single_token(" the"), helper.to_single_token("the")
        assert helper.answer_ids([" the", token]).tolist() == [token, token]
        assert helper.answer_ids(torch.tensor([[token, bare]])).tolist() == [[token, bare]]
        with pytest.raises(
            ValueError, match=rf"wrong_answers: 'the' has no leading space.* give ' the', or the id {bare} "
        ):
            helper.answer_ids([" cat", "the"], "wrong_answers")
        with pytest.raises(ValueError, match=r"'  the' is not a single token: .*; ' the' is one"):
            helper.answer_ids("  the")
        for wrong in (None, [None], [" the", [1]]):
            with pytest.raises(TypeError, match="answers must be strings, ids, or a tensor of ids"):
                helper.answer_ids(wrong)

    def test_get_token_position(self) -> None:
        helper = self.helper()
        assert helper.get_token_position(" the", "sat on the cat the mat") < helper.get_token_position(
            " the", "sat on the cat the mat", mode="last"
        )
        assert helper.get_token_position("the", "the cat") == 1
        assert helper.get_token_position("the", "the cat", prepend_bos=False) == 0
        ids = torch.tensor([[5, 6, 5, 7]])
        for tokens in (ids, ids[0], ids.float(), ids.numpy(), [5, 6, 5, 7]):
            assert helper.get_token_position(5, tokens) == 0
            assert helper.get_token_position(torch.tensor(5), tokens, "last") == 2
        with pytest.raises(ValueError, match=r"token 9 \(id 9\) is not among the 4 tokens"):
            helper.get_token_position(9, ids)
        with pytest.raises(ValueError, match="must be integers"):
            helper.get_token_position(5, ids + 0.5)
        with pytest.raises(ValueError, match="'first' or 'last', got 'middle'"):
            helper.get_token_position(5, ids, mode="middle")
        with pytest.raises(ValueError, match="one row of ids, got 2"):
            helper.get_token_position(5, ids.repeat(2, 1))


class TestBadInput:
    @pytest.mark.parametrize("input", [3, None, b"text", {"a": 1}, ["a", 3], [["a"]]])
    def test_what_is_no_text_is_a_type_error(self, input: Any) -> None:
        with pytest.raises(TypeError):
            text_of("nothing added").to_tokens(input)
        with pytest.raises(TypeError, match=r"text must be a string or a list of strings, got \w+"):
            checked_texts(input)  # the same without the checks of annotations, which only tests switch on

    def test_no_prompts(self) -> None:
        with pytest.raises(ValueError, match="empty list of prompts"):
            text_of("nothing added").to_tokens([])

    def test_an_empty_prompt_is_bos_or_an_error(self) -> None:
        assert text_of("nothing added").to_tokens("", prepend_bos=True).tolist() == [[0]]
        with pytest.raises(ValueError, match="prompt 1, '', becomes zero tokens"):
            text_of("nothing added").to_tokens(["a", ""], prepend_bos=False)

    def test_an_unknown_padding_side(self) -> None:
        with pytest.raises(ValueError, match="must be 'left' or 'right', got 'both'"):
            text_of("nothing added").to_tokens("a", padding_side="both")

    @pytest.mark.parametrize("ids", [torch.zeros(1, 1, 1, dtype=torch.long), torch.zeros(2), np.zeros(2)])
    def test_ids_of_another_rank_or_type(self, ids: Any) -> None:
        with pytest.raises(ValueError, match="token ids must be integers"):
            text_of("nothing added").to_string(ids)

    def test_ids_that_are_no_ids(self) -> None:
        with pytest.raises(TypeError, match="a token id is an integer, got float"):
            text_of("nothing added").to_string([1.5])
        with pytest.raises(ValueError, match="token id -100 is negative"):
            text_of("nothing added").to_string([4, -100])

    def test_text_without_a_tokenizer(self) -> None:
        helper = Tokens(None, True, "right", n_ctx=8, d_vocab=10)
        calls: list[Callable[[], Any]] = [
            lambda: helper.to_tokens("a"),
            lambda: helper.encode("a"),
            lambda: helper.to_string([1]),
            lambda: helper.to_str_tokens([1]),
            lambda: helper.to_single_token("a"),
            lambda: helper.to_single_str_token(1),
            lambda: helper.get_token_position("a", torch.tensor([1])),
        ]
        for call in calls:
            with pytest.raises(ValueError, match=r"has none: give one with .*tokenizer=\.\.\."):
                call()


class TestCheckIds:
    helper = Tokens(None, True, "right", n_ctx=8, d_vocab=10)

    @pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (0, 4)])
    def test_ids_in_range_pass(self, shape: tuple[int, ...]) -> None:
        self.helper.check_ids(torch.full(shape, 9))
        self.helper.check_ids(torch.full(shape, 0, dtype=torch.int32))
        self.helper.check_ids(torch.full(shape, -10))

    @pytest.mark.parametrize("bad", [10, -11, 2**40, -(2**40)])
    def test_the_id_its_place_and_d_vocab_are_named(self, bad: int) -> None:
        tokens = torch.zeros(2, 3, dtype=torch.long)
        tokens[1, 2] = bad
        with pytest.raises(ValueError, match=rf"token id {bad} at \[1, 2\] of the tokens \[2, 3\].*d_vocab is 10"):
            self.helper.check_ids(tokens)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
    def test_other_numbers_are_no_ids(self, dtype: torch.dtype) -> None:
        with pytest.raises(TypeError, match="token ids must be integers"):
            self.helper.check_ids(torch.zeros(2, dtype=dtype))


class WordByWord:
    """A tokenizer without a fast backend: the least that `Tokens` asks of one."""

    bos_token_id, eos_token_id, pad_token_id = 0, 0, None
    vocab = ("<s>", "a", "cat", "sat")

    def __call__(self, texts: list[str], add_special_tokens: bool, verbose: bool) -> dict[str, list[list[int]]]:
        start = [0] * add_special_tokens
        return {"input_ids": [start + [self.vocab.index(word) for word in text.split()] for text in texts]}

    def decode(self, ids: list[int], **options: bool) -> str:
        return " ".join(self.vocab[token] for token in ids)


def test_a_tokenizer_without_a_fast_backend() -> None:
    helper = Tokens(WordByWord(), True, "left", n_ctx=8, d_vocab=4)
    assert prepends_bos(WordByWord())
    assert helper.to_tokens(["a cat sat", "a"]).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert helper.to_tokens("a", prepend_bos=False).tolist() == [[1]]
    assert helper.to_str_tokens("a cat") == ["<s>", "a", "cat"]


def test_tokens_go_to_the_device_asked_for() -> None:
    tokens, mask = text_of("nothing added").encode("a", device="meta")
    assert tokens.device.type == mask.device.type == "meta"


@pytest.mark.slow
def test_two_threads_with_opposite_sides_never_mix() -> None:
    """While another thread pads and truncates with the same tokenizer, as calls of transformers do."""
    tokenizer = MAKERS[GPT2_LIKE]()
    before = copy.deepcopy(state(tokenizer))
    batch = ["the cat sat on the mat", "a dog", "when Mary"]
    wrong: list[str] = []
    stop = threading.Event()

    def watched(work: Callable[[], bool], times: int) -> Callable[[], None]:
        def run() -> None:
            try:
                results = [work() for _ in range(times)]
                wrong.extend("a result of another call" for right in results if not right)
            except Exception as error:
                wrong.append(repr(error))

        return run

    def padder(side: str, prepend_bos: bool) -> Callable[[], None]:
        helper = Tokens(tokenizer, prepend_bos, side, n_ctx=64, d_vocab=len(tokenizer))
        expected = helper.encode(batch)
        return watched(lambda: all(map(torch.equal, helper.encode(batch), expected)), times=500)

    def stranger() -> None:
        sides = 0
        while not stop.is_set():
            sides += 1
            tokenizer(batch, padding=True, padding_side=SIDES[sides % 2], truncation=True, max_length=2 + sides % 3)

    workers = [threading.Thread(target=padder("left", True)), threading.Thread(target=padder("right", False))]
    other = threading.Thread(target=stranger)
    for thread in (other, *workers):
        thread.start()
    for thread in workers:
        thread.join()
    stop.set()
    other.join()
    assert wrong == []

    tokenizer.backend_tokenizer.no_padding()  # as another library may leave it
    tokenizer.backend_tokenizer.no_truncation()
    assert state(tokenizer) == before


def test_whether_bos_is_prepended_is_yes_or_no() -> None:
    tokenizer = HookedTransformer.from_pretrained("demo").tokenizer
    text = Tokens(tokenizer, default_prepend_bos=True, default_padding_side="right", n_ctx=16, d_vocab=2000)
    text.default_prepend_bos = "no"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="prepend_bos must be True, False or None"):
        text.to_tokens("a")
