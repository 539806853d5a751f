from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hooked_lm import HookedTransformer, progress
from hooked_lm.models.generation.sampling import sample_logits
from tests.close import MODEL, assert_close, assert_near
from tests.core import CORE_KINDS, thinned
from tests.models.toys import D_VOCAB, KINDS, N_CTX, N_LAYERS, ids, padded, toy, words

QUIET: dict[str, Any] = {"verbose": False, "stop_at_eos": False}
GREEDY: dict[str, Any] = {**QUIET, "do_sample": False}


def by_hand(model: HookedTransformer, row: Tensor, n: int) -> Tensor:
    """The likeliest continuation of one row, by full forward passes."""
    for _ in range(n):
        row = torch.cat([row, model(row)[0, -1].argmax(keepdim=True)])
    return row


# ---- greedy, in every way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", thinned(KINDS, keep=CORE_KINDS))
@pytest.mark.parametrize("side", ["left", "right"])
def test_unequal_prompts_continue_as_each_would_alone(kind: str, side: str) -> None:
    model = toy(kind)
    rows = [ids(1, n, seed=n)[0] for n in (7, 1, 4)]
    tokens, mask = padded(rows, side)
    expected = [by_hand(model, row, 6) for row in rows]
    for cached in (True, False):
        out = model.generate(tokens, 6, attention_mask=mask, use_past_kv_cache=cached, **GREEDY)
        assert out.shape == (3, 13)
        for row, alone in zip(out, expected, strict=True):
            assert row[-len(alone) :].tolist() == alone.tolist()


def test_a_prompt_may_have_padding_anywhere() -> None:
    model, tokens = toy("rotary"), ids(2, 6)
    mask = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 0]])
    out = model.generate(tokens, 4, attention_mask=mask, **GREEDY)
    assert out.shape == (2, 7)  # columns that are padding everywhere are gone
    for row, given_, real in zip(out, tokens, mask.bool(), strict=True):
        assert row.tolist() == by_hand(model, given_[real], 4).tolist()


@pytest.mark.parametrize("cached", [True, False])
def test_text_and_ids_and_embeddings_continue_alike(cached: bool) -> None:
    model = toy("standard", words())
    texts = ["w5 w9 w7", "w30", "w11 w12 w13 w14 w15"]
    options = {**GREEDY, "use_past_kv_cache": cached}
    expected = [by_hand(model, model.to_tokens(text)[0], 5)[1:] for text in texts]
    strings = [" ".join(f"w{int(i)}" for i in row if i > 2) for row in expected]
    assert [
        " ".join(s for s in out.split() if s.startswith("w")) for out in model.generate(texts, 5, **options)
    ] == strings
    for side in ("left", "right"):
        tokens = model.to_tokens(texts, padding_side=side)
        out = model.generate(tokens, 5, padding_side=side, **options)
        assert [row[-len(e) :].tolist() for row, e in zip(out, expected, strict=True)] == [e.tolist() for e in expected]
    for text, row in zip(texts, expected, strict=True):
        embeds = model.embed(model.to_tokens(text))
        new = model.generate(embeds, 5, return_type="tokens", **options)
        assert new[0].tolist() == row[-5:].tolist()
        out = model.generate(embeds, 5, **options)
        assert torch.equal(out, torch.cat([embeds, model.embed(new)], 1))


def test_embeddings_with_padding() -> None:
    model, rows = toy("shortformer"), [ids(1, n, seed=n)[0] for n in (6, 2)]
    tokens, mask = padded(rows, "right")
    for cached in (True, False):
        new = model.generate(
            model.embed(tokens), 4, attention_mask=mask, return_type="tokens", use_past_kv_cache=cached, **GREEDY
        )
        assert new.tolist() == [by_hand(model, row, 4)[-4:].tolist() for row in rows]


def test_a_leading_token_that_looks_like_padding_is_kept_when_the_mask_says_so() -> None:
    model = toy("standard", words(), default_padding_side="left")
    tokens = torch.tensor([[0, 0, 5, 6]])
    mask = torch.ones_like(tokens)
    expected = tokens
    for _ in range(4):
        new = model(expected, attention_mask=torch.ones_like(expected))[:, -1].argmax(-1, keepdim=True)
        expected = torch.cat([expected, new], 1)
    for cached in (True, False):
        out = model.generate(tokens, 4, attention_mask=mask, use_past_kv_cache=cached, **GREEDY)
        assert out.tolist() == expected.tolist()


def test_a_generated_pad_token_is_a_token() -> None:
    model = toy("standard", words(), default_padding_side="left")
    with torch.no_grad():
        model.unembed.b_U[0] = 1e3  # says nothing but <s>
    cached, uncached = (
        model.generate(
            ids(2, 3), 5, use_past_kv_cache=c, return_cache=True, names_filter="ln_final.hook_normalized", **GREEDY
        )
        for c in (True, False)
    )
    assert (cached[0][:, 3:] == 0).all()
    assert_close(cached[1]["ln_final.hook_normalized"], uncached[1]["ln_final.hook_normalized"])


# ---- what comes back -----------------------------------------------------------------------------------------------


def test_return_types() -> None:
    model = toy("standard", words())
    assert isinstance(model.generate("w3 w4", 2, **GREEDY), str)
    assert model.generate("w3 w4", 2, **GREEDY).startswith("w3 w4")
    assert isinstance(model.generate(["w3 w4"], 2, **GREEDY), list)
    tokens = model.generate("w3 w4", 2, return_type="tokens", **GREEDY)
    assert tokens[0, :3].tolist() == [0, 3, 4]
    assert tokens.shape == (1, 5)
    assert model.generate(ids(1, 4), 2, return_type="str", **GREEDY).count(" ") >= 3
    assert len(model.generate(ids(2, 4), 2, return_type="str", **GREEDY)) == 2
    embeds = model.generate("w3 w4", 2, return_type="embeds", **GREEDY)
    assert torch.equal(embeds, model.embed(tokens))
    assert model.generate(ids(1, 4)[0], 2, **GREEDY).shape == (1, 6)
    assert torch.equal(model.generate(ids(2, 4), 0, **GREEDY), ids(2, 4))
    assert isinstance(model.generate(max_new_tokens=1, **GREEDY), str)  # the empty prompt is a BOS


def test_the_defaults_draw_ten_tokens_and_show_a_bar_after_two_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy("standard", words())
    with torch.no_grad():
        model.unembed.b_U[0] = -1e3  # never stops
    assert model.generate(ids(1, 4)).shape == (1, 14)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "DELAY", 0.0)
    model.generate(ids(1, 4))
    assert "10/10" in capsys.readouterr().err
    model.generate(ids(1, 4), verbose=False)
    assert capsys.readouterr().err == ""


# ---- stopping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [True, False])
def test_rows_stop_at_eos_and_are_filled(cached: bool) -> None:
    model, prompts = toy(), ids(4, 5)
    free = model.generate(prompts, 12, **GREEDY)[:, 5:]
    eos = int(free[0, 2])
    never = next(token for token in range(D_VOCAB) if token not in free)
    for stop in (eos, [eos, never]):
        out = model.generate(prompts, 12, do_sample=False, eos_token_id=stop, verbose=False, use_past_kv_cache=cached)[
            :, 5:
        ]
        ends = [row.tolist().index(eos) if eos in row else 11 for row in free]
        assert out.shape[1] == max(ends) + 1
        for row, alone, end in zip(out, free, ends, strict=True):
            assert row[: end + 1].tolist() == alone[: end + 1].tolist()
            assert (row[end + 1 :] == eos).all()


def test_the_first_of_several_eos_fills() -> None:
    model, prompts = toy(), ids(4, 5)
    free = model.generate(prompts, 8, **GREEDY)[:, 5:]
    out = model.generate(prompts, 8, do_sample=False, eos_token_id=[7, int(free[0, 0])], verbose=False)[:, 5:]
    assert out[0, 1:].unique().tolist() in ([7], [])


def test_the_tokenizers_eos_stops() -> None:
    model = toy("standard", words())
    with torch.no_grad():
        model.unembed.b_U[0] = 1e3
    assert model.generate("w3 w4", 9, verbose=False, return_type="tokens").tolist() == [[0, 3, 4, 0]]
    assert model.generate("w3 w4", 9, verbose=False) == "w3 w4"


# ---- drawing -------------------------------------------------------------------------------------------------------


def test_a_seed_repeats_and_leaves_the_process_alone() -> None:
    model, prompts = toy(), ids(2, 4)
    before = torch.random.get_rng_state()
    first, again, other = (model.generate(prompts, 8, seed=seed, **QUIET) for seed in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(model.generate(prompts, 8, seed=generator, **QUIET), first)
    assert not torch.equal(model.generate(prompts, 8, seed=generator, **QUIET), first)
    torch.manual_seed(0)
    drawn = model.generate(prompts, 8, **QUIET)
    torch.manual_seed(0)
    assert torch.equal(model.generate(prompts, 8, **QUIET), drawn)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}])
def test_narrow_distributions_are_greedy(options: dict[str, Any]) -> None:
    model, prompts = toy(), ids(2, 4)
    assert torch.equal(model.generate(prompts, 6, **options, **QUIET), model.generate(prompts, 6, **GREEDY))


def test_a_penalty_makes_every_token_new() -> None:
    model = toy()
    tokens, mask = padded([ids(1, 6)[0], ids(1, 3, seed=2)[0]], "left", filler=9)
    out = model.generate(tokens, 15, attention_mask=mask, freq_penalty=1e4, **GREEDY)
    assert all(len(set(row[-15:].tolist())) == 15 for row in out)
    assert all(
        not set(row[6:].tolist()) & set(row[:6][real].tolist()) for row, real in zip(out, mask.bool(), strict=True)
    )
    blank = toy()
    with torch.no_grad():
        blank.unembed.W_U.zero_()
        blank.unembed.b_U[9] = 1.0
    out = blank.generate(tokens, 1, attention_mask=mask, freq_penalty=1e4, **GREEDY)
    assert out[1, -1] == 9  # padding does not count as said


@given(st.integers(0, 2**16), st.integers(1, 12), st.floats(0.05, 1.0), st.floats(0.3, 3.0))
def test_draws_come_from_the_distribution_that_the_options_describe(
    seed: int, top_k: int, top_p: float, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, 10, generator=generator)
    probs = (logits[0] / temperature).softmax(0)
    order = probs.argsort(descending=True)[:top_k].tolist()
    inside, mass, kept = sum(probs[i] for i in order), 0.0, []
    for token in order:
        if mass < top_p * (1 - 1e-5):
            kept.append(token)
        mass += float(probs[token] / inside)
    drawn = sample_logits(logits.expand(300, -1), top_k, top_p, temperature, generator=generator)
    assert set(drawn.tolist()) <= {*kept, *order[: len(kept) + 1]}
    assert order[0] in drawn


DRAWS = "frequencies of 20,000 draws, each with a deviation of 0.0035"


def test_draws_have_the_right_frequencies() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, -1)
    drawn = sample_logits(logits, generator=torch.Generator().manual_seed(0)).bincount() / 20_000
    assert_near(drawn, [0.5, 0.3, 0.2], 0.05, because=DRAWS)
    hot = sample_logits(logits, temperature=2.0, generator=torch.Generator().manual_seed(0)).bincount() / 20_000
    expected = torch.tensor([0.5, 0.3, 0.2]).sqrt()
    assert_near(hot, expected / expected.sum(), 0.05, because=DRAWS)
    tokens = torch.tensor([[0, 0, 1]]).expand(20_000, -1)
    penalised = sample_logits(logits, freq_penalty=0.5, tokens=tokens, generator=torch.Generator().manual_seed(0))
    expected = (logits[0] - 0.5 * torch.tensor([2.0, 1.0, 0.0])).softmax(0)
    assert_near(penalised.bincount() / 20_000, expected, 0.05, because=DRAWS)


def test_a_repeated_token_is_less_likely_above_and_below_zero() -> None:
    logits, tokens = torch.tensor([[4.0, 3.0, -1.0, -2.0]]), torch.tensor([[0, 0, 2]])
    found = [
        sample_logits(logits, temperature=0.0, tokens=tokens, repetition_penalty=p).item() for p in (1.0, 1.3, 1.4)
    ]
    assert found == [0, 0, 1]  # 4 / 1.3 is more than 3, 4 / 1.4 is less
    below = logits - 5  # the likeliest is -1
    assert sample_logits(below, temperature=0.0, tokens=tokens, repetition_penalty=1.9).item() == 0
    assert sample_logits(below, temperature=0.0, tokens=tokens, repetition_penalty=2.1).item() == 1
    padding = torch.tensor([[False, False, True]])
    assert sample_logits(logits, temperature=0.0, tokens=tokens, real=padding, repetition_penalty=9.0).item() == 0
    with pytest.raises(ValueError, match="needs the previous tokens"):
        sample_logits(logits, repetition_penalty=2.0)


# ---- hooks and caches ----------------------------------------------------------------------------------------------


def test_hooks_see_the_prompt_and_then_single_tokens() -> None:
    model, seen = toy(), []
    sites = ["blocks.1.hook_resid_pre", "unembed.hook_out"]
    with model.hooks([(sites, lambda value, hook: seen.append((hook.name, value.shape[1])))]):
        model.generate(ids(2, 5), 3, **GREEDY)
    assert seen == [(site, n) for n in (5, 1, 1) for site in sites]
    seen.clear()
    with model.hooks([(sites[:1], lambda value, hook: seen.append(value.shape[1]))]):
        model.generate(ids(2, 5), 3, use_past_kv_cache=False, **GREEDY)
    assert seen == [5, 6, 7]


def test_an_edit_steers_and_a_failing_hook_leaves_nothing_behind() -> None:
    model = toy()
    plain = model.generate(ids(2, 5), 6, **GREEDY)

    def steer(value: Tensor, hook: Any) -> Tensor:
        return value + 3 * model.W_U[:, 17] / model.W_U[:, 17].norm() * value.norm()

    def fail(value: Tensor, hook: Any) -> None:
        if value.shape[1] == 1:
            raise RuntimeError("in the second step")

    with model.hooks([("blocks.2.hook_resid_post", steer)]):
        assert (model.generate(ids(2, 5), 6, **GREEDY)[:, 5:] == 17).all()
    with pytest.raises(RuntimeError, match="second"), model.hooks([("blocks.0.hook_resid_pre", fail)]):
        model.generate(ids(2, 5), 6, **GREEDY)
    assert torch.equal(model.generate(ids(2, 5), 6, **GREEDY), plain)


def test_a_hook_may_differentiate_and_nothing_else_does() -> None:
    model, found = toy().requires_grad_(True), []

    def gradient(value: Tensor, hook: Any) -> None:
        assert not torch.is_grad_enabled()
        with torch.enable_grad():
            leaf = value.detach().requires_grad_()
            found.append(torch.autograd.grad((leaf**2).sum(), leaf)[0] - 2 * value)

    with model.hooks([("blocks.0.hook_resid_pre", gradient)]):
        out = model.generate(model.embed(ids(1, 3)), 2, **GREEDY)
    assert len(found) == 2
    assert all(not delta.any() for delta in found)
    assert not out.requires_grad


@pytest.mark.parametrize("kind", thinned(KINDS, keep=CORE_KINDS))
@pytest.mark.parametrize("cached", [True, False])
def test_the_cache_holds_every_token_of_the_result(kind: str, cached: bool) -> None:
    model = toy(kind)
    tokens, mask = padded([ids(1, 6)[0], ids(1, 3, seed=2)[0]], "left")
    out, cache = model.generate(
        tokens,
        4,
        attention_mask=mask,
        return_cache=True,
        use_past_kv_cache=cached,
        names_filter=lambda n: True,
        **GREEDY,
    )
    real = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], 1)
    _, expected = model.run_with_cache(out, attention_mask=real, names_filter=lambda name: True)
    layers = 2 if kind == "solu" else 1  # a softmax makes values small, and a norm divides by their size
    assert_close(cache, expected, layers * MODEL)


def test_the_cache_is_filtered_and_of_the_usual_kind() -> None:
    model = toy()
    out, cache = model.generate(ids(2, 5), 3, return_cache=True, names_filter=("z", -1), **GREEDY)
    assert list(cache) == ["blocks.2.attn.hook_z"]
    assert cache["z", -1].shape[:2] == out.shape
    assert cache.model is model
    _, cache = model.generate(ids(2, 5), 0, return_cache=True, names_filter="*.hook_z", **GREEDY)
    assert cache["z", 0].shape[1] == 5
    assert len(cache) == N_LAYERS


# ---- streaming -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 4, 25])
def test_pieces_make_the_whole(size: int) -> None:
    model = toy("standard", words())
    whole = model.generate(ids(2, 5), 8, seed=3, **QUIET)
    pieces = list(model.generate_stream(ids(2, 5), 8, size, seed=3, **QUIET))
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert [p.shape[1] for p in pieces][1:-1] == [size] * (len(pieces) - 2)
    assert pieces[0].shape[1] == 5 + min(size, 8)
    for text in ("w3 w4 w5", ["w3 w4 w5", "w6"]):
        pieces = list(model.generate_stream(text, 8, size, seed=3, **QUIET))
        joined = "".join(pieces) if isinstance(text, str) else ["".join(row) for row in zip(*pieces, strict=True)]
        assert joined == model.generate(text, 8, seed=3, **QUIET)


def test_a_stream_is_lazy_checks_at_once_and_leaves_gradients_on() -> None:
    model, calls = toy(), []
    with pytest.raises(ValueError, match="max_tokens_per_yield"):
        model.generate_stream(ids(1, 5), 3, 0, **QUIET)
    with pytest.raises(ValueError, match="n_ctx"):
        model.generate_stream(ids(1, 5), N_CTX, **QUIET)
    with pytest.raises(TypeError, match="no return_cache"):
        model.generate_stream(ids(1, 5), 3, return_cache=True, **QUIET)
    with model.hooks([("hook_embed", lambda value, hook: calls.append(1))]):
        stream = model.generate_stream(ids(1, 5), 4, 1, **QUIET)
        assert not calls
        next(stream)
        assert len(calls) == 1
        assert torch.is_grad_enabled()
    next(stream)
    assert len(calls) == 1  # the scope of the hooks is over


def test_half_a_character_waits_for_the_other_half() -> None:
    class Bytes:
        eos_token_id, bos_token_id, pad_token_id, padding_side = 0, 0, 0, "right"

        def __call__(self, texts: list[str], **options: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [list(text.encode()) for text in texts]}

        def decode(self, tokens: Tensor, **options: Any) -> str:
            return bytes(tokens.tolist()).decode(errors="replace")

    model = toy("standard", d_vocab=256)
    model.tokenizer = Bytes()
    wanted = iter("a\u00e9\u20ac".encode())

    def say(value: Tensor, hook: Any) -> Tensor:
        return torch.nn.functional.one_hot(torch.full(value.shape[:2], next(wanted)), 256).to(value)

    mask = torch.ones(1, 1, dtype=torch.long)
    with model.hooks([("unembed.hook_out", say)]):
        stream = model.generate_stream(
            torch.tensor([[65]]), 6, 1, return_type="str", attention_mask=mask, do_sample=False, **QUIET
        )
        assert list(stream) == ["Aa", "", "\u00e9", "", "", "\u20ac"]


# ---- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 20}, r"prompt of 5 tokens and max_new_tokens=20 .* n_ctx of 24; .* 0 to 19"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"top_k": 0}, "top_k .* 0"),
        ({"top_p": 0.0}, "top_p .* 0.0"),
        ({"top_p": 1.5}, "top_p .* 1.5"),
        ({"temperature": -1.0}, "temperature .* -1.0"),
        ({"return_type": "text"}, "return_type .* 'text'"),
        ({"return_type": "str"}, "tokenizer"),
        ({"stop_at_eos": True}, "eos_token_id"),
        ({"stop_at_eos": True, "eos_token_id": 10**6}, f"1000000 .* 0 to {D_VOCAB - 1}"),
        ({"stop_at_eos": True, "eos_token_id": [3, -1]}, f"-1 .* 0 to {D_VOCAB - 1}"),
        ({"return_type": "str"}, "text needs a tokenizer, and this model has none"),
        ({"attention_mask": torch.ones(2, 4, dtype=torch.long)}, r"\(2, 4\).*\(2, 5\)"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])}, "row 1 .* padding"),
        ({"input": "text"}, "tokenizer"),
        ({"input": torch.zeros(1, 0, dtype=torch.long)}, "empty"),
        ({"input": torch.zeros(0, 5, dtype=torch.long)}, "empty"),
        ({"input": torch.zeros(1, 5, 7)}, "32"),
        ({"input": torch.full((1, 5), D_VOCAB)}, "50"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options: dict[str, Any], message: str) -> None:
    model, calls = toy(), []
    with model.hooks([("hook_embed", lambda value, hook: calls.append(1))]), pytest.raises(ValueError, match=message):
        model.generate(**{"input": ids(2, 5), "max_new_tokens": 2, **GREEDY, **options})
    assert not calls
