"""Positions by meaning are the same positions as numbers: in hooks, batches, generation, experiments and files."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, analysis, at, load, patching
from hooked_lm.hooks.token_labels import check_named
from hooked_lm.interventions import AddDirection, Hooks, MeanAblate, Record, ZeroAblate
from hooked_lm.models.text.chat import Chat
from tests.close import assert_apart, assert_close, is_close
from tests.models.text.chat_templates import QWEN3, TEMPLATES, byte_level, turns

ASK = turns("Hello user", "<think>\nWell\n</think>\n\nHi.", "What is 2 + 3?", system="Be kind.")
LONGER = turns("One", "Two, three", "And what is 3 + 4?")
NAMED: list[Any] = [
    "system", "user", "last_user", "first_user", "assistant", "template", "content", ("user", -1), ("user", 0), {"turn": -1},
    {"turn": [1, 3], "part": "content"}, {"role": "assistant"},
]  # fmt: skip


@cache
def model() -> HookedTransformer:
    tokenizer = byte_level()
    tokenizer.chat_template = QWEN3
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "d_mlp": 32, "n_ctx": 256}
    cfg = HookedTransformerConfig(**sizes, d_vocab=len(tokenizer), act_fn="gelu", seed=1)
    return HookedTransformer(cfg, tokenizer=tokenizer).double()


def chat(*messages: Any) -> Chat:
    """The conversations with the beginning of an answer, as a batch."""
    return model().chat([*messages], add_generation_prompt=True)


HOOKS: list[Callable[[Any], Any]] = [
    lambda positions: ZeroAblate("resid_pre", 0, positions=positions),
    lambda positions: at("z", 1, heads=1, positions=positions).scale(3.0),
    lambda positions: MeanAblate("mlp_out", 1, positions=positions, over="pos"),
    lambda positions: at("pattern", 0, positions=positions).zero(),
]


@pytest.mark.parametrize("given", NAMED, ids=str)
def test_a_name_is_the_same_positions_as_numbers(given: Any):
    one = chat(ASK)
    numbers = one.positions(given)
    assert 0 < len(numbers) < one.shape[1]
    plain = model()(one)
    for hook in HOOKS:
        named = model().run_with_hooks(one, fwd_hooks=[hook(given)])
        assert_close(named, model().run_with_hooks(one.tokens, fwd_hooks=[hook(numbers)]))
        assert_apart(named, plain)
    by_name, by_number = (Record("blocks.0.hook_resid_post", positions=some) for some in (given, numbers))
    with model().hooks([by_name, by_number]):
        model()(one)
    assert_close(by_name.stacked("blocks.0.hook_resid_post"), by_number.stacked("blocks.0.hook_resid_post"))


@pytest.mark.parametrize("given", ["user", "assistant", ("user", -1), {"turn": -1}, "last_user"], ids=str)
def test_each_row_of_a_batch_has_its_own_positions(given: Any):
    both, rows = chat(ASK, LONGER), [chat(ASK), chat(LONGER)]
    assert both.positions(given, 0) != both.positions(given, 1)
    for hook in HOOKS[:2]:
        together = model().run_with_hooks(both, fwd_hooks=[hook(given)])
        for i, row in enumerate(rows):
            alone = model().run_with_hooks(row, fwd_hooks=[hook(given)])
            assert_close(together[i, -row.shape[1] :], alone[0])


# ---- in generation --------------------------------------------------------------------------------------------------


def writes(text: str) -> Callable[..., Tensor]:
    """A hook at the logits that makes a model write a text."""
    ids = model().to_tokens(text, prepend_bos=False)[0]

    def force(logits: Tensor, hook: Any) -> Tensor:
        logits[:, -1, ids[hook.step]] = 1e6
        return logits

    return force


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
def test_a_hook_acts_within_thoughts_as_they_are_written(use_past_kv_cache: bool):
    text = "<think>Well, it</think>five"
    ids = model().to_tokens(text, prepend_bos=False)[0]
    first, last = (model().to_single_token(marker) for marker in ("<think>", "</think>"))
    written: dict[int, Tensor] = {}

    def read(value: Tensor, hook: Any) -> None:
        for position, row in zip(hook.positions.flatten().tolist(), value[0], strict=True):
            written[position] = row.clone()

    def run(*hooks: Any) -> dict[int, Tensor]:
        written.clear()
        hooks = (*hooks, ("blocks.0.hook_resid_post", read), ("unembed.hook_out", writes(text)))
        with model().hooks(list(hooks)):
            out = model().generate(
                one, len(ids), do_sample=False, verbose=False, use_past_kv_cache=use_past_kv_cache, return_type="tokens"
            )
        assert out[0, one.shape[1] :].tolist() == ids.tolist()
        return dict(written)

    one, push = chat(ASK[:2]), torch.ones(16, dtype=torch.double)
    plain, seen = run(), Record("blocks.0.hook_resid_pre", positions="thinking")
    pushed = run(AddDirection("resid_post", 0, vector=push, positions="thinking"), seen)
    changed = [position for position in plain if not is_close(plain[position], pushed[position])]
    inside = [i for i, token in enumerate(ids.tolist()) if first not in (token, *ids[i + 1 :].tolist())]
    inside = [one.shape[1] + i for i in inside if last in ids[i + 1 :].tolist()]
    assert changed == inside
    assert len(changed) > 2
    everywhere = run(AddDirection("resid_post", 0, vector=push, positions="assistant"))
    new = [position for position in plain if not is_close(plain[position], everywhere[position])]
    assert new == list(range(one.shape[1], one.shape[1] + len(ids) - 1))  # the last token is not read


@pytest.mark.parametrize("given", ["assistant", "user", "template", ("user", -1), {"turn": -1}, "last_user"], ids=str)
def test_generation_with_and_without_a_cache_and_by_rows(given: Any):
    both, rows = chat(ASK, LONGER), [chat(ASK), chat(LONGER)]
    settings: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": False, "return_type": "tokens"}
    with model().hooks([AddDirection("resid_post", 1, vector=torch.arange(16.0).double(), positions=given)]):
        cached, whole = (
            model().generate(both, 6, use_past_kv_cache=some, **settings)[:, -6:] for some in (True, False)
        )
        alone = [model().generate(row, 6, **settings)[0, -6:].tolist() for row in rows]
    assert cached.tolist() == whole.tolist() == alone


def test_what_the_assistant_writes_is_what_is_generated_where_it_has_said_nothing():
    settings: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": False, "return_type": "tokens"}
    texts = []
    for given in ("assistant", "generated", "template"):
        with model().hooks([AddDirection("resid_post", 1, vector=torch.arange(16.0).double(), positions=given)]):
            texts.append(model().generate(chat(LONGER[:1]), 8, **settings)[0, -8:].tolist())
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("template", "text", "key", "expected"),
    [
        ("qwen3", "<think>Well</think>five<|im_end|>", "reasoning_content", [("thinking", "Well"), ("content", "five")]),
        ("harmony", "<|channel|>analysis<|message|>Well<|end|><|start|>assistant<|channel|>final<|message|>five</s>", "thinking",
         [("thinking", "Well"), ("content", "five")]),
        ("deepseek_r1", "Well</think>five</s>", "reasoning_content", [("content", "five")]),
        ("chatml", "five</s>", None, [("content", "five")]),
    ],
)  # fmt: skip
def test_a_reply_is_a_turn_with_its_thoughts_apart(template: str, text: str, key: str | None, expected: Any):
    asked = model().chat(ASK[-1:], chat_template=TEMPLATES[template])
    n = model().to_tokens(text, prepend_bos=False).shape[1]
    forced = [("unembed.hook_out", writes(text))]
    reply = asked.reply(model(), max_new_tokens=n, hooks=forced, do_sample=False, verbose=False)
    thought = {} if key is None else {key: "Well"}
    assert reply.messages[0] == (*asked.messages[0], {"role": "assistant", "content": "five", **thought})
    assert [(part, reply.of({"turn": 1, "part": part})) for part, _ in expected] == expected
    assert bool(reply.changed[0]) == (template == "deepseek_r1")
    with pytest.raises(ValueError, match="the answer of conversation 0 has no text: 1 tokens, all of them markers"):
        asked.reply(model(), max_new_tokens=1, hooks=[("unembed.hook_out", writes("<|im_end|>"))], verbose=False)


# ---- in experiments -------------------------------------------------------------------------------------------------

OTHER = [*ASK[:-1], {"role": "user", "content": "What is 3 + 2?"}]
ANSWERS = (5, 6)
EXPERIMENTS: dict[str, Callable[[Chat, Chat, Any], Any]] = {
    "sweep": lambda a, b, p: patching.sweep(model(), b, a, answers=ANSWERS, positions=p).mean,
    "ablate": lambda a, b, p: patching.ablate(model(), a, answers=ANSWERS, positions=p).mean,
    "attribute": lambda a, b, p: analysis.attribute(model(), b, a, answers=ANSWERS, positions=p).mean,
    "run_each": lambda a, b, p: patching.run_each(model(), a, [ZeroAblate("z", 0, positions=p)], answers=ANSWERS).mean,
    "logit_lens": lambda a, b, p: analysis.logit_lens(model(), a, positions=p).logits,
}


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("given", ["last_user", ("user", -1), {"turn": 1}], ids=str)
def test_experiments_take_names(name: str, given: Any):
    clean, corrupted = chat(ASK), chat(OTHER)
    numbers = clean.positions(given)
    found = EXPERIMENTS[name](clean, corrupted, given)
    assert_close(found, EXPERIMENTS[name](clean, corrupted, numbers))


def test_conversations_are_prompts_of_analyses():
    one, both = chat(ASK), chat(ASK, OTHER)
    assert_close(analysis.head_scores(model(), one).values, analysis.head_scores(model(), one.tokens).values)
    scores = analysis.direct_logit_attribution(model(), one, *ANSWERS)
    assert_close(scores.values, analysis.direct_logit_attribution(model(), one.tokens, *ANSWERS).values)
    with pytest.raises(
        ValueError, match=r"positions='user' are .* in conversation 0 of prompts and .* in conversation 1 of"
    ):
        analysis.logit_lens(model(), chat(ASK, [*LONGER, *LONGER[1:]])[[0, 1]], positions="user")
    assert_close(model()(both)[:1], model()(one))


def generated(positions: Any) -> None:
    with model().hooks([HOOKS[0](positions)]):
        model().generate(chat(LONGER[:1]), 2, verbose=False)


@pytest.mark.parametrize(
    ("run", "error", "said"),
    [
        (lambda: model().run_with_hooks("Hi", fwd_hooks=[HOOKS[0]("user")]), ValueError, "the prompt of this run has no roles"),
        (lambda: model().run_with_hooks(chat(ASK), fwd_hooks=[HOOKS[0]("tool")]), ValueError,
         "positions='tool' selects no token: this conversation has 0 system, 1 user, 2 assistant, 3 user, with the parts"),
        (lambda: model().run_with_hooks(chat(ASK), fwd_hooks=[HOOKS[0](("user", 90))]), IndexError, "turn 1 has"),
        (lambda: HOOKS[0]("asistant"), ValueError, "positions must be numbers or one of all, prompt"),
        (lambda: check_named(("user", True)), ValueError, "expected (name, index), such as ('assistant', -1)"),
        (lambda: HOOKS[0]({"turns": 1}), ValueError, "a dict has some of the keys turn, role, part"),
        (lambda: HOOKS[0]({}), ValueError, "a dict has some of the keys turn, role, part"),
        (lambda: HOOKS[0]({"turn": "last"}), ValueError, "a turn is the index of a message, got 'last'"),
        (lambda: HOOKS[0]({"part": "thougt"}), ValueError, "parts are content, thinking, call, image, marker"),
        (lambda: generated({"role": "asistant"}), ValueError, "positions={'role': 'asistant'} selects no token"),
        (lambda: generated("tool"), ValueError, "positions='tool' selects no token"),
        (lambda: generated(("assistant", -1)), ValueError, "positions=('assistant', -1) selects no token"),
        (lambda: generated({"turn": -9}), ValueError, "positions={'turn': -9} selects no token"),
        (lambda: patching.sweep(model(), "Hi", "Ho", answers=ANSWERS, positions="user"), ValueError,
         "positions='user': no prompt has roles; give model.chat(messages), or numbers"),
        (lambda: patching.sweep(model(), chat(ASK), chat(LONGER), answers=(5, 6), positions="user"), ValueError,
         "the same positions in all"),
        (lambda: patching.ablate(model(), chat(ASK, LONGER), answers=ANSWERS), ValueError,
         "all prompts must have the same number of tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_by_name(run: Callable[[], Any], error: type[Exception], said: str):
    with pytest.raises(error, match=re.escape(said)):
        run()


@pytest.mark.parametrize("given", NAMED, ids=str)
def test_names_are_saved_with_hooks(given: Any, tmp_path: Any):
    hook = ZeroAblate("resid_pre", 0, positions=given)
    Hooks([hook]).save(tmp_path / "hooks")
    [loaded] = load(tmp_path / "hooks")
    assert loaded.positions == hook.positions
    assert type(loaded.positions) is type(hook.positions)
    assert_close(*(model().run_with_hooks(chat(ASK), fwd_hooks=[each]) for each in (hook, loaded)))
