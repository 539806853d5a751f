"""Rollouts equal separate generations, share one prompt, and have the labels of a conversation; cut conversations continue."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.hooks.token_labels import PADDING, TEMPLATE
from hooked_lm.interventions import AddDirection, Scale
from hooked_lm.models.generation.sampling import sample_logits
from hooked_lm.models.text.chat import Chat
from tests.close import assert_apart, assert_close, assert_near
from tests.models.text.chat_templates import QWEN3, byte_level, turns
from tests.models.toys import ids, toy, words

WIDE: dict[str, Any] = {"dtype": torch.float64}
SITE = "blocks.1.hook_resid_post"
THOUGHT = "<think>\nWell, it is.\n</think>\n\n"
ASK = turns("Hello user", "Hi.", "What is 2 + 3?", THOUGHT + "five", system="Be kind.")


def seeds_of(seed: int, n: int) -> list[int]:
    """The seed of each row."""
    return torch.randint(1 << 62, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def model() -> HookedTransformer:
    tokenizer = byte_level()
    tokenizer.chat_template = QWEN3
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "d_mlp": 32, "n_ctx": 256}
    cfg = HookedTransformerConfig(**sizes, d_vocab=len(tokenizer), act_fn="gelu", seed=1, dtype=torch.float64)
    return HookedTransformer(cfg, tokenizer=tokenizer)


def whole(**options: Any) -> Chat:
    return model().chat(ASK, **options)


def writes(text: str) -> Callable[..., Tensor]:
    """A hook at the logits that makes the model write a text."""
    forced = model().to_tokens(text, prepend_bos=False)[0]

    def force(logits: Tensor, hook: Any) -> Tensor:
        logits[:, -1, forced[hook.step]] = 1e6
        return logits

    return force


# ---- the same as one by one ------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1, 6), batch_size=st.none() | st.integers(1, 4), seed=st.integers(0, 99), new=st.integers(1, 6),
    sampling=st.sampled_from([{}, {"temperature": 0.7, "top_k": 9}, {"top_p": 0.8}, {"freq_penalty": 0.5}]),
)  # fmt: skip
def test_each_row_is_a_generation_with_its_own_seed(
    n: int, batch_size: int | None, seed: int, new: int, sampling: dict[str, Any]
) -> None:
    made, prompt = toy("rotary", **WIDE), ids(1, 6)
    how = {"eos_token_id": [3, 4, 5, 6, 7, 8, 9, 10], **sampling}
    found = made.rollouts(prompt, n, new, seed=seed, batch_size=batch_size, progress=False, **how)
    for row, real, ended, of_row in zip(
        found.tokens, found.attention_mask.bool(), found.has_ended, seeds_of(seed, n), strict=True
    ):
        alone = made.generate(prompt, new, seed=[of_row], verbose=False, **how)[0, 6:]
        assert torch.equal(row[real], alone)
        assert bool(real[: len(alone)].all())
        assert (row[~real] == 3).all()
        assert bool(ended) == (alone[-1].item() in how["eos_token_id"])
    assert found.tokens.shape[1] == int(found.attention_mask.sum(1).max())


def test_rows_draw_the_same_numbers_whatever_is_asked_besides() -> None:
    made, prompt = toy("rotary", **WIDE), ids(1, 6)
    run: dict[str, Any] = {"seed": 5, "stop_at_eos": False, "progress": False}
    few, many = made.rollouts(prompt, 3, 4, **run), made.rollouts(prompt, 7, 8, batch_size=2, **run)
    assert torch.equal(many.tokens[:3, :4], few.tokens)
    assert len({tuple(row) for row in many.tokens.tolist()}) == 7
    assert not torch.equal(made.rollouts(prompt, 3, 4, **{**run, "seed": 6}).tokens, few.tokens)
    torch.manual_seed(1)
    first = made.rollouts(prompt, 3, 4, **{**run, "seed": None}).tokens
    assert not torch.equal(made.rollouts(prompt, 3, 4, **{**run, "seed": None}).tokens, first)
    torch.manual_seed(1)
    assert torch.equal(made.rollouts(prompt, 3, 4, **{**run, "seed": None}).tokens, first)
    generator = torch.Generator().manual_seed(5)
    assert torch.equal(made.rollouts(prompt, 3, 4, **{**run, "seed": generator}).tokens, few.tokens)


def test_draws_by_row_have_the_probabilities_of_the_model() -> None:
    n, logits = 4096, torch.tensor([1.0, float("-inf"), 0.0, 2.0, float("-inf")])
    drawn = sample_logits(
        logits.expand(n, -1), generator=[torch.Generator().manual_seed(seed) for seed in seeds_of(0, n)]
    )
    shares = drawn.bincount(minlength=5) / n
    assert shares[1] == shares[4] == 0
    assert_near(shares, logits.softmax(-1), 0.05, because="three deviations of 4,096 draws are 0.023")


def test_the_prompt_is_read_once_for_all_rows() -> None:
    made, seen = toy("rotary", words()), []
    prefix, run = made.prefix("w4 w5"), {"seed": 0, "stop_at_eos": False}

    def note(value: Tensor, hook: Any) -> None:
        seen.append(tuple(value.shape[:2]))

    expected = made.generate(["w4 w5 w6"] * 5, 3, seed=seeds_of(0, 5), stop_at_eos=False, verbose=False)
    for prompt, read in (("w4 w5 w6", [(1, 4)]), (prefix + " w6", [(1, 1)]), (made.prefix(prefix + " w6"), [])):
        seen.clear()
        with made.hooks([(SITE, note)]):
            found = made.rollouts(prompt, 5, 3, **run)
        assert seen == [*read, (5, 1), (5, 1)]
        assert [f"w4 w5 w6{text}" for text in found.texts] == expected
    assert len({*expected}) > 1


@pytest.mark.parametrize("positions", ["generated", "last_prompt", -1, "prompt", 6, None])
def test_hooks_act_as_in_a_generation(positions: Any) -> None:
    made, prompt = toy("rotary", **WIDE), ids(1, 6)
    hook = AddDirection(SITE, vector=8 * torch.arange(32.0).double(), positions=positions)
    run: dict[str, Any] = {"stop_at_eos": False}
    plain = made.rollouts(prompt, 4, 5, seed=2, **run).tokens
    with made.hooks([hook]):
        found = made.rollouts(prompt, 4, 5, seed=2, **run).tokens
        alone = made.generate(prompt.expand(4, -1), 5, seed=seeds_of(2, 4), verbose=False, **run)[:, 6:]
    assert torch.equal(found, alone)
    assert not torch.equal(found, plain)


# ---- conversations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [lambda asked: asked, lambda asked: model().prefix(asked)])
def test_thoughts_and_content_of_what_is_written(ask: Any) -> None:
    asked, text = model().chat(ASK[:-1], add_generation_prompt=True), THOUGHT + "five 🙂<|im_end|>"
    n = model().to_tokens(text, prepend_bos=False).shape[1]
    end = model().to_single_token("<|im_end|>")
    with model().hooks([("unembed.hook_out", writes(text))]):
        found = model().rollouts(ask(asked), 2, n + 5, seed=0, eos_token_id=end, top_k=1)
    assert found.of("thinking") == ("Well, it is.",) * 2
    assert found.of("content") == ("five 🙂",) * 2
    assert found.has_ended.all()
    for chat in found.chats:
        assert chat.messages[0][:-1] == asked.messages[0]
        said = {"role": "assistant", "content": "five 🙂", "reasoning_content": "Well, it is."}
        assert chat.messages[0][-1] == said
        assert chat.texts[0] == asked.texts[0] + text
        assert chat.of({"turn": 4, "part": "content"}).strip() == "five 🙂"
        again = model().chat([*ASK[:-1], said])
        assert chat.n_common(again) == chat.shape[1] == again.shape[1] - 1  # the template ends a turn with a line break
        for part in ("thinking", "content"):
            assert chat.of({"turn": 4, "part": part}).strip() == again.of({"turn": 4, "part": part})
    assert all(label in chat.labels[0] for label in found.labels[0] if label != PADDING)


def test_a_conversation_that_is_cut_has_what_is_before() -> None:
    chat = whole()
    for stop in range(1, chat.shape[1] + 1):
        cut, rest = chat[0, :stop], chat[0, stop:] if stop < chat.shape[1] else None
        assert torch.equal(cut.tokens, chat.tokens[:, :stop])
        assert cut.labels[0] == chat.labels[0][:stop]
        assert chat.texts[0].startswith(cut.texts[0])
        turn = max(label.turn for label in cut.labels[0])
        assert len(cut.messages[0]) == turn + 1
        assert cut.messages[0][:turn] == chat.messages[0][: max(turn, 0)]
        for label in {*cut.labels[0]} - {TEMPLATE}:
            assert chat.of(label._asdict()).startswith(cut.of(label._asdict()))
        if rest is not None:
            assert rest.n_before == stop
            assert cut.labels[0] + rest.labels[0] == chat.labels[0]
            assert all(rest.of({"turn": t}) == chat.of({"turn": t}) for t in range(turn + 1, 5))


def thought_cut(n: int = 3) -> Chat:
    """The conversation up to the n-th token of its last thought."""
    chat = whole()
    return chat[0, : chat.positions("last_thinking")[n]]


def test_a_thought_is_continued_where_it_is_cut() -> None:
    cut = thought_cut()
    assert cut.options["continue_final_message"]
    partial = cut.messages[0][-1]
    assert partial["role"] == "assistant"
    assert (THOUGHT + "five").startswith(partial["content"])
    rest = " so.\n</think>\n\nsix<|im_end|>"
    n = model().to_tokens(rest, prepend_bos=False).shape[1]
    with model().hooks([("unembed.hook_out", writes(rest))]):
        found = model().rollouts(cut, 2, n, seed=0, eos_token_id=model().to_single_token("<|im_end|>"))
        reply = cut.reply(model(), n, do_sample=False, verbose=False)
    assert found.of("thinking") == ("so.", "so.")
    assert found.of("content") == ("six", "six")
    thought = cut.of("last_thinking").strip()
    for message in (found.chats[1].messages[0][-1], reply.messages[0][-1]):
        assert message == {"role": "assistant", "content": "six", "reasoning_content": f"{thought} so."}
    assert {label.turn for label in found.labels[0]} == {4}


@pytest.mark.parametrize("named", ["thinking", "assistant", {"turn": 4}], ids=str)
def test_hooks_within_a_thought_that_is_continued(named: Any) -> None:
    """Of all tokens of the thought: those of the prompt, which are read once, and those that are written."""
    cut = thought_cut()
    rest = " so.\n</think>\n\nsix"
    n = model().to_tokens(rest, prepend_bos=False).shape[1]
    vector = torch.arange(16.0).double()
    written: dict[str, dict[int, Tensor]] = {}

    def run(name: str, positions: Any) -> None:
        def read(value: Tensor, hook: Any) -> None:
            for position, row in zip(hook.positions.flatten().tolist(), value[-1], strict=True):
                written.setdefault(name, {})[position] = row.clone()

        hook = AddDirection("resid_post", 0, vector=vector, positions=positions)
        hooks = [hook, ("blocks.1.hook_resid_post", read), ("unembed.hook_out", writes(rest))]
        with model().hooks(hooks):
            chat = model().rollouts(cut, 2, n, seed=0, stop_at_eos=False).chats[1]
        numbers[name] = chat.positions(named)

    numbers: dict[str, list[int]] = {}
    run("named", named)
    run("numbers", [i for i in numbers["named"] if i < cut.shape[1] + n - 1])  # the last token is not read
    assert_close(written["named"], written["numbers"])
    run("prompt alone", cut.positions(named))
    assert_close(written["named"][cut.shape[1] - 1], written["prompt alone"][cut.shape[1] - 1])
    after = [i for i in numbers["named"] if cut.shape[1] <= i < cut.shape[1] + n - 1]
    assert len(after) > 2
    for position in after:
        assert_apart(written["named"][position], written["prompt alone"][position])


# ---- after a prefix of a conversation --------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [20, -12, -3])
@pytest.mark.parametrize(
    "named", ["assistant", "thinking", "content", {"turn": 4}, {"turn": 4, "part": "content"}], ids=str
)
def test_what_follows_of_a_conversation_has_its_labels(stop: int, named: Any) -> None:
    chat = whole()
    before, after = chat[0, :stop], chat[0, stop:]
    hook = AddDirection("resid_post", 0, vector=torch.arange(16.0).double(), positions=named)
    with model().hooks([hook]):
        expected, of_whole = model().run_with_cache(chat)
        prompt = model().prefix(before) + after
        found, cache = model().run_with_cache(prompt)
        in_chunks, pieces = model().run_with_cache(prompt, chunk=3)
    n = after.shape[1]
    assert_close(found, expected[:, -n:])
    assert_close(in_chunks, found)
    assert_apart(found, model()(chat)[:, -n:])
    assert prompt.labels == [list(after.labels[0])]
    for some in (cache, pieces):
        selected = some.select("*resid_post", part="content")
        assert selected["resid_post", 1].shape[1] == len(after.positions("content"))
        assert_close(selected["resid_post", 1], of_whole["resid_post", 1][:, -n:][:, after.positions("content")])


def test_a_hook_by_meaning_that_only_acts_after_the_prefix_is_taken_and_others_refused() -> None:
    chat = whole()
    first = chat.positions("last_thinking")[0]
    prompt = model().prefix(chat[0, :first]) + chat[0, first:]
    vector = torch.arange(16.0).double()

    def push(positions: Any) -> AddDirection:
        return AddDirection("resid_post", 0, vector=vector, positions=positions)

    for named in ("thinking", {"turn": -1}, ("last_thinking", -1)):
        found = model().run_with_hooks(prompt, fwd_hooks=[push(named)])
        assert_close(found, model().run_with_hooks(chat, fwd_hooks=[push(named)])[:, first:])
    for named in ("assistant", "user", ("assistant", -1), "content"):
        with pytest.raises(ValueError, match="follow the prefix, and this hook changes others"):
            model().run_with_hooks(prompt, fwd_hooks=[push(named)])
    for named in ("last_user", ("user", -1), {"turn": -1}):
        with model().hooks([push(named)]), pytest.raises(ValueError, match="counts from the end of the prompt"):
            model().prefix(chat[0, :first])
    with pytest.raises(ValueError, match="the prompt of this run has no roles"):
        model().run_with_hooks(model().prefix("Hello user") + " five", fwd_hooks=[push("thinking")])


def test_text_after_a_conversation_is_the_assistants() -> None:
    asked = model().chat(ASK[:-1], add_generation_prompt=True)
    prompt = model().prefix(asked).then(["<think>\nWell", "five and"])
    assert prompt.labels is not None
    assert {label.part for label in prompt.labels[0]} == {"marker", "thinking", "padding"} - {"padding"}
    roles = {label.role for row in prompt.labels for label in row}
    assert roles <= {"assistant", "padding"}
    longer = model().prefix(prompt) + " it"
    assert [row[-1].part for row in longer.labels] == ["thinking", "content"]
    hook = AddDirection("resid_post", 0, vector=torch.arange(16.0).double(), positions="thinking")
    texts = [
        model().generate(some, 4, do_sample=False, verbose=False, return_type="tokens")[0, -4:].tolist()
        for some in (prompt, model().prefix(prompt))
    ]
    assert texts[0] == texts[1]
    with model().hooks([hook]):
        model().generate(prompt, 4, do_sample=False, verbose=False)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "error", "said"),
    [
        (lambda: model().rollouts(["a", "b"], 2), ValueError, "rollouts continue one prompt, got 2"),
        (lambda: model().rollouts("a", 0), ValueError, "at least 1, got 0"),
        (lambda: model().rollouts("a", 2, batch_size=0), ValueError, "at least 1, got 2 and 0"),
        (lambda: model().rollouts("a", 2, temperatur=2.0), TypeError, "did you mean 'temperature'"),
        (lambda: model().rollouts("a", 2, return_cache=True), TypeError, "no argument 'return_cache'"),
        (lambda: model().rollouts("a", 2, 500), ValueError, "do not fit the model's n_ctx"),
        (lambda: model().rollouts("a", 2, top_k=0), ValueError, "top_k must be at least 1"),
        (lambda: model().rollouts(model().prefix("a"), 2, prepend_bos=True), ValueError, "prepend_bos is settled"),
        (lambda: model().rollouts("a", 2, 2).of("thinking"), ValueError, "has no roles"),
        (lambda: model().rollouts("a", 2, 2).chats, ValueError, "has no roles"),
        (lambda: model().rollouts(thought_cut(), 2, 2).of("user"), ValueError, "a part is one of content"),
        (lambda: model().generate(["a", "b"], 2, seed=[1]), ValueError, "seed has 1 numbers for 2 rows"),
        (lambda: whole()[0, ::2], ValueError, "no adjacent tokens"),
        (lambda: whole()[0, 5:5], ValueError, "no adjacent tokens"),
        (lambda: model().chat([ASK, ASK])[:, :5], ValueError, "columns are cut of one conversation, got 2"),
        (lambda: model().prefix(whole()[0, :9]) + whole()[0, 8:], ValueError, "cannot follow a prefix of 9 tokens"),
        (lambda: model().prefix(whole()[0, :9]) + whole(), ValueError, r"give what comes after these, chat\[:, 9:\]"),
        (lambda: model().prefix(model().chat(turns("One"))[0, :5]) + whole()[0, 5:], ValueError,
         "the prefix is not the beginning of this conversation"),
    ],
)  # fmt: skip
def test_refusals(run: Callable[[], Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        run()


def test_hooks_at_some_rows_are_refused() -> None:
    with model().hooks([Scale(SITE, factor=2.0, rows=[0])]), pytest.raises(ValueError, match="acts on some rows"):
        model().rollouts("Hello", 2, 2)
