"""Reports of tasks that are conversations: whose each token is, on the page and as data."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hooked_lm import patching
from hooked_lm.cli import app
from hooked_lm.reports import circuit, sweep
from hooked_lm.reports.circuit import Task
from tests.models.text.chat_templates import CHATML
from tests.studies.test_conversations import conversation, model

pytestmark = [
    pytest.mark.filterwarnings("ignore::hooked_lm.engine.study.SwapWarning"),
    pytest.mark.filterwarnings("ignore::hooked_lm.reports.circuit.TaskWarning"),  # of a model without training
]
SIDES = {side: [conversation(0, asked)] for side, asked in (("clean", "4"), ("corrupted", "7"))}


def task(**changes: Any) -> Task:
    return Task(**{**SIDES, "answers": ["user"], "wrong_answers": ["kind"], **changes})


def of_chats() -> Task:
    return task(**{side: model().chat(each, add_generation_prompt=True) for side, each in SIDES.items()})


def test_a_circuit_of_conversations_has_a_page(tmp_path: Path) -> None:
    """The answers follow a line break, so that they have no space."""
    found = circuit.find(model(), task(), method="eap", check=False, n_edges=5)
    page = found.report(tmp_path / "page.html").read_text()
    assert '<span class="turn user">2 user</span>' in page
    assert "“user” after “What is b + 4?”" in page
    assert "user: Say something / assistant: Hello / user: What is b + 4?" in page
    same = circuit.find(model(), of_chats(), method="eap", check=False, n_edges=5)
    assert torch.equal(same.circuit.edges, found.circuit.edges)
    with pytest.raises(ValueError, match="a task has the same number of clean prompts"):
        task(answers=["user", "kind"])


def test_a_sweep_of_conversations_has_a_page(tmp_path: Path) -> None:
    chats = of_chats()
    found = patching.sweep(model(), chats, progress=False)
    tokens = chats.clean.str_tokens[0], chats.corrupted.str_tokens[0]
    page = sweep.write_report(found, chats, tokens, tmp_path / "page.html", normalized=False).read_text()
    assert page.count('<span class="turn user">2 user</span>') == 2
    assert '"hovertext":"2 user"' in page  # of the band in the figure
    plain = task(clean=["a b c"], corrupted=["a b d"], answers=[" user"], wrong_answers=[" kind"])
    words = [list(map(str, model().to_str_tokens(text))) for text in ("a b c", "a b d")]
    found = patching.sweep(model(), plain, progress=False)
    page = sweep.write_report(found, plain, (words[0], words[1]), tmp_path / "plain.html", normalized=False).read_text()
    assert '<span class="turn' not in page


@pytest.mark.slow
def test_the_command_reads_conversations(tmp_path: Path) -> None:
    for side, each in SIDES.items():
        (tmp_path / f"{side}.json").write_text(json.dumps({"messages": each[0], "chat_template": CHATML}))
    files = [f"--{side}=@{tmp_path / side}.json" for side in SIDES]
    given = [
        "--answers= Mary, John",
        "--layers=0",
        "--positions=last_user",
        "--raw",
        f"--html={tmp_path / 'page.html'}",
    ]
    found = CliRunner().invoke(app, ["patch", "demo", *files, *given, "--json"])
    assert found.exit_code == 0, found.output
    data = json.loads(found.stdout)
    users = [turn for turn in data["turns"] if turn["role"] == "user"]
    assert [turn["turn"] for turn in users] == [0, 2]
    assert data["axes"]["position"] == list(range(users[1]["start"], users[1]["stop"]))
    assert '<span class="turn user">2 user</span>' in (tmp_path / "page.html").read_text()
    pairs = [{side: {"messages": each[0], "chat_template": CHATML} for side, each in SIDES.items()}] * 2
    pairs = [{**each, "answer": " Mary", "wrong_answer": " John"} for each in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    study = [f"--pairs={tmp_path / 'pairs.jsonl'}", f"--output={tmp_path}", '--positions=["user", -1]', "--layers=0"]
    found = CliRunner().invoke(app, ["patch", "demo", *study, "--raw", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["axes"]["position"] == [turn["stop"] - 1 for turn in users]
