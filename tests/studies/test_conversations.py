"""Pairs and studies of conversations: messages in records, positions by meaning, and tables that say whose each token is."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer, HookedTransformerConfig, Pairs, patching
from hooked_lm.analysis import metrics
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import as_prompts
from hooked_lm.results import Scores
from hooked_lm.studies import PairTable, study_pairs
from tests.close import assert_apart, assert_close
from tests.models.text.chat_templates import CHATML, byte_level, turns
from tests.rounding import undisturbed

pytestmark = pytest.mark.filterwarnings("ignore::hooked_lm.engine.study.SwapWarning")  # of a model without training

EARLIER = ("Hello", "Hello you. And more.")  # the assistant says more in some pairs
OPTIONS: dict[str, Any] = {"sites": ["resid_pre", "mlp_out"], "positions": "last_user"}
RIGHT, WRONG = 70, 80  # ids


@cache
def model() -> HookedTransformer:
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "d_mlp": 32, "n_ctx": 256}
    cfg = HookedTransformerConfig(**sizes, d_vocab=len(tokenizer), act_fn="gelu", seed=1)
    return HookedTransformer(cfg, tokenizer=tokenizer)


def conversation(number: int, asked: str) -> list[dict[str, Any]]:
    return turns("Say something", EARLIER[number % 2], f"What is {'bcde'[number]} + {asked}?")


def record(number: int) -> dict[str, Any]:
    """The pairs 1 and 3 have a longer answer, so that other positions are the last user's."""
    right, wrong = (RIGHT, WRONG) if number != 2 else (WRONG, RIGHT)
    sides = {"clean": conversation(number, "4"), "corrupted": conversation(number, "7")}
    return {**sides, "answer": right, "wrong_answer": wrong}


RECORDS = [record(number) for number in range(4)]


def chat(messages: Any) -> Chat:
    return model().chat(messages, add_generation_prompt=True)


def run(directory: Path, pairs: object = RECORDS, **changes: Any) -> PairTable:
    given = {"experiment": "sweep", "options": OPTIONS, "pairs_per_shard": 2, "threads": 1, **changes}
    return study_pairs(model(), pairs, directory=directory, progress=False, **given)


# ---- studies -----------------------------------------------------------------------------------------------------------


def test_each_pair_has_the_positions_of_its_own_turns(tmp_path: Path) -> None:
    frame = run(tmp_path).to_dataframe()
    assert [*frame.columns] == [
        "pair", "site", "layer", "position", "from_end", "turn", "role", "part", "value", "corrupted", "clean",
    ]  # fmt: skip
    for number, each in enumerate(RECORDS):
        clean, corrupted = chat(each["clean"]), chat(each["corrupted"])
        where = clean.positions("last_user")
        metric = metrics.logit_difference(each["answer"], each["wrong_answer"])
        plain = {**OPTIONS, "positions": where}
        alone = patching.sweep(model(), corrupted.tokens, clean.tokens, metric=metric, progress=False, **plain)
        rows = frame[frame["pair"] == number]
        assert rows["position"].tolist() == where * 4
        assert_close(torch.tensor(rows["value"].to_numpy()), alone.values.flatten())
        assert {*rows["turn"]} == {2}
        assert {*rows["role"]} == {"user"}
        assert {*rows["part"]} == {"content"}
    assert frame[frame["pair"] == 0]["position"].tolist() != frame[frame["pair"] == 1]["position"].tolist()


def test_means_by_turn_of_pairs_of_different_lengths(tmp_path: Path) -> None:
    table = run(tmp_path, options={**OPTIONS, "positions": "each"}, metric=["logit_difference", "logit"])
    assert table.alignment == "turn"
    found = table.scores("turn")
    assert found.axes["turn"] == ("template", "0 user", "1 assistant", "2 user")
    frame = table.to_dataframe()
    frame = frame[(frame["turn"] == 1) & (frame["layer"] == 1) & (frame["site"] == "mlp_out")]
    for number, each in frame[frame["metric"] == "logit"].groupby("pair"):
        value = found.select(turn="1 assistant", layer=1, site="mlp_out", metric="logit").values[number]
        assert_close(value, torch.tensor(each["value"].to_numpy()).mean())
    assert_close(found.corrupted, table.scores("part").corrupted)
    assert table.scores("role").axes["role"] == ("template", "user", "assistant")
    with pytest.raises(ValueError, match="do not have the same cells"):
        table.scores()
    with pytest.raises(ValueError, match="align must be 'start', 'end', 'turn', 'role', 'part' or None, got 'turns'"):
        table.scores("turns")


def test_a_result_of_pairs_with_the_same_turns_knows_them(tmp_path: Path) -> None:
    table = run(tmp_path, pairs=RECORDS[::2])
    assert table.alignment is None
    found = table.scores()
    assert_close(found.mean_by("turn").values, table.scores("turn").values)
    texts = [{"clean": "a b c", "corrupted": "a b d", "answer": RIGHT, "wrong_answer": WRONG}]
    plain = run(tmp_path, pairs=texts, options={"sites": "resid_pre"})
    assert "turns" not in plain.scores().about
    with pytest.raises(ValueError, match="these pairs have none: give messages as prompts"):
        plain.scores("role")


def test_records_chats_pairs_and_files_are_one_study(tmp_path: Path) -> None:
    """Tables fill keys that a message lacks with None."""
    thoughtful = [{**m, "reasoning_content": "Well"} if m["role"] == "assistant" else m for m in RECORDS[1]["clean"]]
    records = [RECORDS[0], {**RECORDS[1], "clean": thoughtful}]
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, records)))
    first = run(tmp_path, pairs=records, options={"positions": None})
    whole = {side: [each[side] for each in records] for side in ("clean", "corrupted")}
    answers = {"answers": [RIGHT, RIGHT], "wrong_answers": [WRONG, WRONG]}
    as_chats = [{**each, **{side: chat(each[side]) for side in ("clean", "corrupted")}} for each in records]
    with_options = [{**each, "clean": {"messages": each["clean"]}} for each in records]
    for same in (str(file), Pairs(**whole, **answers), as_chats, with_options):
        assert run(tmp_path, pairs=same, options={"positions": None}).path == first.path


def test_an_interrupted_study_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    parts = [run(tmp_path / "parts", shard=(i, 2)) for i in (1, 0)]
    assert parts[0].missing == [0]
    assert parts[1].gather().read_bytes() == whole.gather().read_bytes()


@pytest.mark.slow
def test_workers_compute_the_same(tmp_path: Path) -> None:
    with undisturbed():  # as workers are
        one = run(tmp_path / "one").gather().read_bytes()
    assert one == run(tmp_path / "two", n_workers=2).gather().read_bytes()


@pytest.mark.parametrize(
    ("experiment", "options"),
    [
        ("attribute", {"sites": "resid_pre", "positions": {"turn": -1}}),
        ("ablate", {"components": "positions", "positions": ("user", -1), "layers": [1]}),
    ],
)
def test_other_experiments_take_positions_by_meaning(tmp_path: Path, experiment: str, options: Any) -> None:
    table = run(tmp_path, experiment=experiment, options=options)
    frame = table.to_dataframe()
    for number, each in enumerate(RECORDS):
        expected = chat(each["clean"]).positions(options["positions"])
        assert sorted({*frame[frame["pair"] == number]["position"]}) == expected
    assert_apart(frame["value"].to_numpy(), frame["corrupted"].to_numpy())


def size(of: HookedTransformer, corrupted: Chat, clean: Chat, *, metric: Any) -> Scores:
    """An experiment of a user, which gets conversations."""
    assert clean.labels == corrupted.labels
    assert len({*clean.labels}) == 1
    return Scores(clean.mask("user").sum(1).float(), {})


def test_a_function_gets_conversations_with_the_same_turns(tmp_path: Path) -> None:
    found = run(tmp_path, experiment=size, options={}).scores()
    assert found.values.tolist() == [len(chat(each["clean"]).positions("user")) for each in RECORDS]


BAD: list[tuple[Any, Any, str]] = [
    (RECORDS, "tool", r"4 of 4 pairs cannot run:\npair 0: positions='tool' selects no token: this conversation has 0 user"),
    ([{**RECORDS[0], "clean": turns("Say something else", "Hello", "What is b + 4?")}], "last_user",
     "pair 0: clean and corrupted prompts must have the same shape"),
    ([{**RECORDS[0], "corrupted": turns("Say something", "Hello a", "is b + 7?")}], "last_user",
     "pair 0: clean and corrupted prompts must have the same shape|pair 0: positions='last_user' are"),
    ([{"clean": "a b c", "corrupted": "a b d", "answer": RIGHT, "wrong_answer": WRONG}], "user",
     "pair 0: positions='user' needs messages, and its prompts have no roles"),
    ([{"clean": "a b c", "corrupted": "a b d", "answer": RIGHT, "wrong_answer": WRONG}, RECORDS[0]], None,
     "pair 1: its prompts are messages, unlike those of pair 0"),
    ([RECORDS[0], {**RECORDS[1], "clean": turns("a", "")}], None, r"pair 1: message 1 \(assistant\) is empty"),
    ([{**RECORDS[0], "clean": model().to_tokens("Hi")}], None, "pair 0: one of its prompts are messages, the other|same shape"),
]  # fmt: skip


@pytest.mark.parametrize(("pairs", "positions", "says"), BAD)
def test_pairs_that_cannot_run_are_named(tmp_path: Path, pairs: Any, positions: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        run(tmp_path, pairs=pairs, options={"positions": positions})
    assert [*tmp_path.iterdir()] == []


# ---- pairs ---------------------------------------------------------------------------------------------------------


def test_pairs_of_messages_are_those_of_chats() -> None:
    whole = {side: [each[side] for each in RECORDS[::2]] for side in ("clean", "corrupted")}
    of_messages = Pairs(**whole, answers=RIGHT, wrong_answers=WRONG)
    of_chats = Pairs(**{side: chat(each) for side, each in whole.items()}, answers=RIGHT, wrong_answers=WRONG)
    assert len(of_messages) == len(of_chats) == len([*of_messages]) == 2
    assert "clean 'user: Say something / assistant: Hello / user: What is" in repr(of_messages)
    expected = patching.sweep(model(), of_chats, positions="last_user")
    found = patching.sweep(model(), of_messages, positions="last_user")
    assert torch.equal(found.values, expected.values)
    assert found.axes == expected.axes
    assert_close(patching.sweep(model(), of_messages[1], positions="last_user").values, expected.values[..., 1:])
    named = patching.sweep(model(), whole["corrupted"], whole["clean"], answers=(RIGHT, WRONG), positions="last_user")
    assert torch.equal(named.values, expected.values)
    one = Pairs(clean=whole["clean"][0], corrupted=whole["corrupted"][0])
    assert len(one) == 1


def test_pairs_of_messages_are_saved(tmp_path: Path) -> None:
    pairs = Pairs(clean=[RECORDS[0]["clean"]], corrupted=[RECORDS[0]["corrupted"]], answers=RIGHT)
    pairs.save(tmp_path / "pairs")
    assert Pairs.load(tmp_path / "pairs").clean == pairs.clean
    with pytest.raises(TypeError, match="pairs of a Chat are not saved: give Pairs the messages"):
        Pairs(clean=chat(RECORDS[0]["clean"]), corrupted=chat(RECORDS[0]["corrupted"])).save(tmp_path / "chats")


def test_prompts_end_where_the_assistant_answers() -> None:
    messages = RECORDS[0]["clean"]
    assert as_prompts(model(), [messages]).tokens.equal(chat(messages).tokens)
    started = {"messages": [*messages, {"role": "assistant", "content": "It is"}], "continue_final_message": True}
    assert as_prompts(model(), [started]).texts[0].endswith("It is")
    with pytest.raises(
        ValueError, match="conversation 1 has 'messages': it must have 'messages', and the options of the first"
    ):
        as_prompts(model(), [started, {"messages": messages}])


def test_answers_after_the_generation_prompt_have_no_space(tmp_path: Path) -> None:
    """As the template ends with a line break. Elsewhere a word without a space is refused."""
    words = [word for word in ("user", "kind", "fi") if is_one_token(word) and is_one_token(f" {word}")]
    assert len(words) >= 2, "of the tokenizer of these tests"
    first, second = words[:2]
    ids = [model().to_single_token(word) for word in (first, second)]
    prompts = {"clean": RECORDS[0]["clean"], "corrupted": RECORDS[0]["corrupted"]}
    found = patching.sweep(model(), Pairs(**prompts, answers=first, wrong_answers=second), positions=None)
    given = patching.sweep(
        model(), chat(prompts["corrupted"]), chat(prompts["clean"]), answers=(first, second), positions=None
    )
    expected = patching.sweep(
        model(), chat(prompts["corrupted"]), chat(prompts["clean"]), answers=tuple(ids), positions=None
    )
    assert torch.equal(found.values, expected.values)
    assert torch.equal(given.values, expected.values)
    table = run(tmp_path, pairs=[{**prompts, "answer": first, "wrong_answer": second}], options={"positions": None})
    assert_close(table.scores().values, expected.values)
    with pytest.raises(ValueError, match="has no leading space"):
        patching.sweep(model(), "a b c", "a b d", answers=(first, second), positions=None)
    open_ended = {
        side: {"messages": each, "chat_template": "{% for m in messages %}{{ m.content }}:{% endfor %}"}
        for side, each in prompts.items()
    }
    with pytest.raises(ValueError, match="has no leading space"):
        patching.sweep(model(), Pairs(**open_ended, answers=first, wrong_answers=second), positions=None)


def is_one_token(word: str) -> bool:
    return len(model().to_tokens(word, prepend_bos=False)[0]) == 1
