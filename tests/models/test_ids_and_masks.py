"""Token ids as users have them: negative, padded beside a key/value cache, of models that were never fully built."""

from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer, HookedTransformerConfig, utils
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.stack_context import EncoderDecoderCache
from hooked_lm.models.loss import lm_accuracy, lm_cross_entropy_loss
from tests.close import assert_close
from tests.models.test_encoder_decoder import tokenizer  # noqa: F401 (a fixture)
from tests.models.toys import D_VOCAB, N_LAYERS, ids, toy, words

SMALL = {"n_layers": 1, "d_model": 16, "n_heads": 2, "n_ctx": 16, "d_vocab": D_VOCAB, "act_fn": "relu", "seed": 0}


# ---- negative ids ----------------------------------------------------------------------------------------------------


def test_negative_ids_count_from_the_end() -> None:
    model, tokens = toy(), ids(2, 6)
    negative = torch.where(torch.arange(6) % 2 == 0, tokens - D_VOCAB, tokens)
    for return_type in ("logits", "loss"):
        assert torch.equal(model(negative, return_type), model(tokens, return_type))
    assert torch.equal(model(negative, "loss", loss_per_token=True), model(tokens, "loss", loss_per_token=True))
    assert torch.equal(model(negative[0]), model(tokens[:1]))
    logits = model(tokens)
    assert torch.equal(model.loss_fn(logits, negative), model.loss_fn(logits, tokens))
    assert torch.equal(lm_cross_entropy_loss(logits, negative), lm_cross_entropy_loss(logits, tokens))
    likeliest = logits.argmax(-1).roll(1, 1)  # so that every next token is right
    assert lm_accuracy(logits, likeliest - D_VOCAB) == lm_accuracy(logits, likeliest) == 1.0
    options: dict[str, Any] = {"stop_at_eos": False, "verbose": False, "do_sample": False, "freq_penalty": 0.5}
    assert torch.equal(model.generate(negative, 4, **options), model.generate(tokens, 4, **options))
    assert torch.equal(model.tokens_to_residual_directions(negative), model.tokens_to_residual_directions(tokens))


def test_so_they_do_in_encoders_and_encoder_decoders() -> None:
    tokens = torch.tensor([[5, 3, 49]])
    encoder, pair = HookedEncoder(SMALL), HookedEncoderDecoder({**SMALL, "decoder_start_token_id": 0})
    assert torch.equal(encoder(tokens - D_VOCAB), encoder(tokens))
    assert torch.equal(pair(tokens - D_VOCAB, tokens - D_VOCAB, "loss"), pair(tokens, tokens, "loss"))


@pytest.mark.parametrize("wrong", [D_VOCAB, -D_VOCAB - 1])
def test_other_ids_are_refused_by_name(wrong: int) -> None:
    tokens = torch.tensor([[5, wrong, 49]])
    message = rf"token id {wrong} at \[0, 1\] .* 0 to 49, or -50 to -1 from the end"
    for model in (toy(), HookedEncoder(SMALL), HookedEncoderDecoder({**SMALL, "decoder_start_token_id": 0})):
        with pytest.raises(ValueError, match=message):
            model(tokens)
    with pytest.raises(ValueError, match=message):
        toy().generate(tokens, 1, stop_at_eos=False, verbose=False)
    with pytest.raises(ValueError, match="-1 is negative: ids start at 0"):
        toy("standard", words()).to_single_str_token(-1)


# ---- padding and a cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "rotary", "alibi", "windowed"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_parts_one_after_the_other_equal_the_whole(kind: str, side: str) -> None:
    model = toy(kind, words(), default_padding_side=side)
    parts = [["w5 w6", "w7 w8 w9 w10"], ["w11 w12 w13", "w14"], ["w15", "w16 w17"]]
    whole = model.to_tokens([" ".join(texts) for texts in zip(*parts, strict=True)])
    expected = [
        model(row[row != 0][None], prepend_bos=False)[0, -1] for row in whole
    ]  # <s> is BOS and padding: see below
    cache, first = KeyValueCache(N_LAYERS), True
    for texts in parts:
        tokens = model.to_tokens(texts, prepend_bos=False)
        logits = model(tokens, past_kv_cache=cache, prepend_bos=False if first else None)
        first = False
    last = -1 if side == "left" else (tokens != 0).sum(1) - 1
    for row, logit in enumerate(logits[torch.arange(2), last]):
        assert_close(logit, expected[row])


def test_with_bos_the_mask_is_that_without_a_cache() -> None:
    model = toy("rotary", words(), default_padding_side="left")
    tokens = model.to_tokens(["w5 w6", "w7 w8 w9 w10"])
    cache = KeyValueCache(N_LAYERS)
    assert_close(model(tokens, past_kv_cache=cache), model(tokens))
    more = torch.tensor([[0, 20], [21, 22]])
    logits = model(more, past_kv_cache=cache)
    for row, text in enumerate(["w5 w6 w20", "w7 w8 w9 w10 w21 w22"]):
        assert_close(logits[row, -1], model(text)[0, -1])
    alone = model(torch.tensor([[23], [0]]), past_kv_cache=cache)[1, -1]  # one token is what was said, never padding
    assert_close(alone, model("w7 w8 w9 w10 w21 w22 <s>")[0, -1])


def test_a_mask_of_ids_is_always_a_tensor() -> None:
    tokens = torch.tensor([[0, 0, 5], [0, 4, 5]])
    assert torch.equal(utils.get_attention_mask(None, tokens, True), torch.ones_like(tokens))
    assert utils.get_attention_mask(words(), tokens, True, "left").tolist() == [[0, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize("mask", [[[0.0, -1e9, 0.0]], [[1, 2, 2]], [[float("nan"), 1.0, 1.0]]])
def test_a_mask_of_other_numbers_is_refused(mask: Any) -> None:
    tokens, mask = torch.tensor([[5, 3, 49]]), torch.tensor(mask)
    with pytest.raises(
        ValueError, match=r"1 for real tokens and 0 for padding, got (-1000000000.0|2|nan); .*mask == 0"
    ):
        toy().generate(tokens, 1, attention_mask=mask, stop_at_eos=False, verbose=False)
    if not mask.is_floating_point():  # of which the tests' annotations speak
        pair = HookedEncoderDecoder({**SMALL, "decoder_start_token_id": 0})
        for model in (toy(), HookedEncoder(SMALL), pair):
            with pytest.raises(ValueError, match="1 for real tokens"):
                model(tokens, attention_mask=mask)
    options: dict[str, Any] = {"stop_at_eos": False, "verbose": False, "do_sample": False}
    ones = torch.tensor([[0.0, 1.0, 1.0]])
    expected = toy().generate(tokens, 2, attention_mask=ones.bool(), **options)
    assert torch.equal(toy().generate(tokens, 2, attention_mask=ones, **options), expected)


def test_booleans_are_no_ids() -> None:
    pair = HookedEncoderDecoder({**SMALL, "decoder_start_token_id": 0})
    for take in (lambda x: toy()._tokens_and_mask(x, None, None, None), lambda x: pair._source_tokens(x, None)):
        with pytest.raises(ValueError, match="token ids must be integers"):
            take(torch.tensor([[True, False]]))


def test_a_cache_of_other_rows_or_layers_is_refused() -> None:
    model, cache = toy(), KeyValueCache(N_LAYERS)
    model(ids(2, 3), attention_mask=torch.tensor([[0, 1, 1], [1, 1, 1]]), past_kv_cache=cache)
    with pytest.raises(ValueError, match="the cache has 2 rows, the new tokens have 3"):
        model(ids(3, 2), past_kv_cache=cache)
    assert cache.length == 3
    pair = HookedEncoderDecoder({**SMALL, "decoder_start_token_id": 0})
    with pytest.raises(ValueError, match="an EncoderDecoderCache for 1 layers, got a EncoderDecoderCache for 3"):
        pair(ids(1, 2), past_kv_cache=EncoderDecoderCache(3))


@pytest.mark.parametrize(
    "option", [{"suppress_tokens": [3, -1]}, {"suppress_tokens": [-1]}, {"forced_bos_token_id": -1}]
)
def test_tokens_to_suppress_or_force_are_in_the_vocabulary(option: dict[str, Any]) -> None:
    pair = HookedEncoderDecoder({**SMALL, "decoder_start_token_id": 0})
    with pytest.raises(ValueError, match=rf"{next(iter(option))} -1 is out of range: d_vocab is 50, so 0 to 49"):
        pair.generate(ids(1, 2), max_new_tokens=1, stop_at_eos=False, verbose=False, **option)


# ---- text ----------------------------------------------------------------------------------------------------------


def test_a_subclass_that_never_calls_init_can_tokenize() -> None:
    class Bare(HookedTransformer):
        def __init__(self) -> None:
            self.cfg = HookedTransformerConfig(**SMALL, device="cpu")
            self.tokenizer = words()

    bare = Bare()
    tokens = bare.to_tokens(["w3 w4", "w5"])
    assert tokens.tolist() == [[0, 3, 4], [0, 5, 0]]
    assert bare.device == tokens.device == torch.device("cpu")
    assert bare.to_string(tokens[0]) == "<s> w3 w4"
    assert bare.to_str_tokens("w3 w4") == ["<s>", "w3", "w4"]
    assert (bare.to_single_token("w7"), bare.to_single_str_token(7)) == (7, "w7")
    assert bare.get_token_position("w4", "w3 w4") == 2
    bare.cfg.device = "meta"
    assert bare.to_tokens("w3").device.type == "meta"


def test_the_loss_of_a_text_target_is_that_of_transformers(tokenizer: Any) -> None:  # noqa: F811
    cfg = T5Config(vocab_size=20, d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=1, num_decoder_layers=1, dropout_rate=0,
                   decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)  # fmt: skip
    torch.manual_seed(0)
    theirs = T5ForConditionalGeneration(cfg).eval()
    ours = HookedEncoderDecoder.from_pretrained("tiny", hf_model=theirs)
    ours.set_tokenizer(tokenizer)
    sources, targets = ["the cat sat", "it ran to him and sat"], ["the mat", "him"]
    for source, target in [*zip(sources, targets, strict=True)]:
        labels = tokenizer(text_target=target, return_tensors="pt").input_ids
        assert labels[0, -1] == tokenizer.eos_token_id
        expected = theirs(**tokenizer(source, return_tensors="pt"), labels=labels)
        assert_close(ours(source, target, "loss"), expected.loss)
        assert_close(ours(source, target)[:, :-1], expected.logits)
    batch = tokenizer(sources, padding=True, return_tensors="pt")
    labels = tokenizer(text_target=targets, padding=True, return_tensors="pt").input_ids
    expected = theirs(
        batch.input_ids, attention_mask=batch.attention_mask, labels=labels.masked_fill(labels == 0, -100)
    ).loss
    assert_close(ours(sources, targets, "loss"), expected)


def test_a_target_that_goes_on_has_no_end(tokenizer: Any) -> None:  # noqa: F811
    pair = HookedEncoderDecoder({**SMALL, "d_vocab": 20, "decoder_start_token_id": 0}, tokenizer=tokenizer)
    assert pair.to_decoder_tokens(["the mat", "him"])[0].tolist() == [[0, 3, 8, 1], [0, 13, 1, 0]]
    assert pair.to_decoder_tokens("the mat", end=False)[0].tolist() == [[0, 3, 8]]
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "verbose": False, "return_type": "tokens"}
    out = pair.generate("the cat", decoder_input="the mat", **options)
    assert torch.equal(out, pair.generate("the cat", decoder_input=torch.tensor([[0, 3, 8]]), **options))
    assert out[0, :3].tolist() == [0, 3, 8]
