"""The report on a circuit: what is found, in figures and on the page, and what is refused."""

from contextlib import nullcontext
from inspect import unwrap
from pathlib import Path

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM
from typer.testing import CliRunner

from hooked_lm import HookedTransformer, HookedVisionLanguage, Pairs
from hooked_lm.analysis import Attribution, circuits
from hooked_lm.analysis.circuits import Circuit, evaluate
from hooked_lm.cli import app
from hooked_lm.demo import experiment
from hooked_lm.demo.shapes import Picture, pixels
from hooked_lm.engine.prompts import rows_of, tokens_of
from hooked_lm.reports import circuit
from tests.close import assert_close

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPTED = "When Mary and John went to the store, Mary gave a drink to"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.mark.slow
def test_a_circuit_that_reads_an_image(tmp_path: Path) -> None:
    model = HookedVisionLanguage.from_pretrained("demo-shapes")
    green = Picture((("circle", "red"), ("square", "green"), ("triangle", "blue"), ("cross", "yellow")), seed=5)
    text = "<image> what colour is the shape in the upper right ?"
    pictures = green, green.with_shape(1, colour="blue")
    prompts = [model.prepare(text, pixels(picture)[None]) for picture in pictures]
    task = circuit.Task(*prompts, ["green"], ["blue"])
    study = circuit.find(model, task, method="eap", by="logit difference", n_edges=26)  # a tenth
    assert study.chosen.faithfulness.item() > 0.9
    assert study.nodes["node"].iloc[0] == "input"
    page = circuit.write_report(study, tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("&lt;image&gt;") == 3, "in the question, and in both prompts"


@pytest.fixture(scope="module")
def task() -> circuit.Task:
    pairs = experiment.prompt_pairs(4)
    return circuit.Task(
        *([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted", "answer", "wrong_answer"))
    )


@pytest.mark.slow
def test_a_twentieth_of_the_edges_does_most_of_a_task(model: HookedTransformer) -> None:
    pairs = experiment.prompt_pairs(8)
    task = circuit.Task(
        *([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted", "answer", "wrong_answer"))
    )
    study = circuit.find(model, task, by="kl")
    assert study.circuit.n_edges <= 0.05 * study.circuit.graph.n_edges
    assert study.facts["judged on"] == "4 of 8, prompts that the search did not see"
    assert study.evaluation.n_prompts == 4
    assert study.chosen.faithfulness.item() >= 0.8, "0.89"
    assert study.chosen.completeness.item() < 0.1
    assert study.nodes["node"].iloc[0] == "input"
    by_answers = circuits.evaluate(
        model,
        study.circuit,
        *(rows_of(model, prompts) for prompts in (task.corrupted, task.clean)),
        metric=task.metric(model),
    )
    assert by_answers.faithfulness.item() < 0.7, "the pages say that faithfulness depends on the measure: 0.57 here"
    effects = study.drawn.to_dataframe()["score"]
    assert effects.nunique() > 0.9 * len(effects), "pruning scores are all 1"


@pytest.mark.slow
def test_estimates_are_checked_and_make_the_circuit(
    model: HookedTransformer, task: circuit.Task, tmp_path: Path
) -> None:
    study = circuit.find(model, task, method="eap", by="logit difference", n_edges=150, replace_with="mean")
    assert isinstance(study.effects, Attribution)
    assert study.agreement is not None
    assert study.agreement["cells"] == study.circuit.graph.n_edges
    assert study.agreement["spearman"] > 0.7
    prompts = tokens_of(model, list(task.corrupted)), tokens_of(model, list(task.clean))
    again = evaluate(model, study.circuit, *prompts, metric=task.metric(model), replace_with="mean")
    assert_close(again.faithfulness.item(), study.chosen.faithfulness.item())
    page = study.report(tmp_path / "report.html", "the line").read_text(encoding="utf-8")
    assert "<code>the line</code>" in page
    assert all(prompt in page for prompt in (*task.clean, *task.corrupted))
    assert "agreement with exact patching" in page
    assert study.facts["faithfulness"].split(" (")[0] in page
    assert (study.nodes["effect"] < 0).any(), "without a node the answer is less far ahead"
    assert study.nodes["low"].le(study.nodes["effect"]).all()
    assert study.nodes["high"].ge(study.nodes["effect"]).all()
    assert "its mean over the corrupted prompts" in page


@pytest.mark.slow
def test_what_a_circuit_recovers_beyond_its_controls(
    model: HookedTransformer, task: circuit.Task, tmp_path: Path
) -> None:
    study = circuit.find(model, task, method="eap", n_edges=75, check=False, held_out=[1, 3], nulls=3)
    assert study.searched is not None
    assert study.nulls is not None
    assert (study.chosen.n_prompts, study.searched.n_prompts, study.nulls.n_prompts) == (2, 2, 2)
    assert study.facts["judged on"] == "2 of 4, prompts that the search did not see"
    assert study.facts["faithfulness in the search"].endswith(", same prompts as the search")
    of_nulls = study.nulls.to_dataframe()["faithfulness"]
    assert len(of_nulls) == 3
    assert study.chosen.faithfulness.item() > of_nulls.mean(), "the circuit is of the task"
    page = circuit.write_report(study, tmp_path / "report.html").read_text(encoding="utf-8")
    for part in (
        "faithfulness in the search",
        "faithfulness of null circuits",
        "only what the circuit recovers beyond",
    ):
        assert part in page
    seen = (0, 2)
    only = [[part[row] for row in seen] for part in (task.corrupted, task.clean)]
    metric = circuit.Task(*only[::-1], *([part[row] for row in seen] for part in (task.answers, task.wrong_answers)))
    again = evaluate(model, study.circuit, *only, metric=metric.metric(model), n_random=0)
    assert_close(again.faithfulness.item(), study.searched.faithfulness.item())


@pytest.mark.slow
def test_a_search_has_no_curve_of_its_own(model: HookedTransformer, task: circuit.Task) -> None:
    study = circuit.find(model, task, method="acdc", threshold=3.0)
    assert study.effects is None
    assert study.evaluation is study.chosen


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"method": "guess"}, "method must be one of"),
        ({"by": "vibes"}, "by must be 'kl' or 'logit difference'"),
        ({"replace_with": "noise"}, "replace_with must be one of 'corrupted', 'mean', 'zero'"),
        ({"method": "acdc"}, "needs threshold"),
    ],
)
def test_what_there_is_not(model: HookedTransformer, task: circuit.Task, options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        circuit.find(model, task, **options)


def test_tasks_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="'wrong_answers': 0"):
        circuit.Task([CLEAN], [CORRUPTED], [" Mary"], [])
    with pytest.raises(ValueError, match="with a comma between, such as ' Mary, John'; got 'Mary'"):
        circuit.answers_of(["Mary"])


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    report, saved = tmp_path / "report.html", tmp_path / "circuit.safetensors"
    given = [
        "--clean",
        CLEAN,
        "--corrupted",
        CORRUPTED,
        "--answers",
        " Mary, John",
        "--method",
        "eap",
        "--n-edges",
        "40",
        "--check",
        "20",
    ]
    found = CliRunner().invoke(app, ["circuit", "demo", *given, "--output", str(report), "--save", str(saved)])
    assert found.exit_code == 0, found.output
    assert "faithfulness" in found.output
    assert "agreement with exact patching" in found.output
    assert Circuit.load(saved).n_edges <= 40
    assert report.exists()


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    given = ["--clean", CLEAN, "--corrupted", CORRUPTED + " a", "--answers", " Mary, John"]
    found = CliRunner().invoke(app, ["circuit", "demo", *given, "--output", str(tmp_path / "report.html")])
    assert found.exit_code == 2
    assert "must have the same shape" in found.stderr
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_whether_the_model_prefers_the_right_answer_is_told(model: HookedTransformer, tmp_path: Path) -> None:
    for right, wrong, lead in ((" Mary", " John", "Why does the model say"), (" John", " Mary", "does not prefer")):
        warned = pytest.warns(circuit.TaskWarning, match="not ahead") if right == " John" else nullcontext()
        with warned:
            study = circuit.find(model, circuit.Task([CLEAN], [CORRUPTED], [right], [wrong]), method="eap", check=10)
        assert (study.ahead["clean"] > 0) == (right == " Mary")
        assert f"{study.ahead['clean']:+.2f} nats on clean prompts" in study.facts["right answer ahead"].replace(
            "\N{MINUS SIGN}", "-"
        )
        assert lead in circuit.write_report(study, tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("corrupted", "answers", "says"),
    [
        (
            CORRUPTED,
            [" John", " Mary"],
            "not ahead on the clean prompts .*behind on 1 of 1.* is not less ahead .*says ' Mary'",
        ),
        (CLEAN, [" Mary", " John"], "not less ahead on the corrupted prompts"),
    ],
)
def test_answers_that_the_model_does_not_give_are_warned_of(
    model: HookedTransformer, corrupted: str, answers: list[str], says: str
) -> None:
    with pytest.warns(circuit.TaskWarning, match=says):
        circuit.check_answers(model, circuit.Task([CLEAN], [corrupted], [answers[0]], [answers[1]]))


def test_logits_that_are_nan_are_refused() -> None:
    model = HookedTransformer.from_pretrained("demo")
    with torch.no_grad():
        model.blocks[0].mlp.W_out[0, 0] = float("nan")
    with pytest.raises(ValueError, match="is NaN on the clean and the corrupted prompts"):
        circuit.check_answers(model, circuit.Task([CLEAN], [CORRUPTED], [" Mary"], [" John"]))


@pytest.mark.filterwarnings("ignore:the right answer is not")  # of random weights
@pytest.mark.filterwarnings("ignore:the .* hardly differ:UserWarning")  # of random weights
def test_a_graph_with_few_edges(task: circuit.Task) -> None:
    """Two shares of them are the same number, and all are measured exactly: layers without attention cost something."""
    tokenizer = HookedTransformer.from_pretrained("demo").tokenizer
    checkpoint = MambaForCausalLM(
        MambaConfig(vocab_size=len(tokenizer), hidden_size=16, state_size=4, num_hidden_layers=2)
    )
    mamba = HookedTransformer.from_pretrained("mamba", hf_model=checkpoint, tokenizer=tokenizer)
    found = circuit.find(mamba, task, method="eap", n_edges=2)
    assert found.agreement is not None
    assert found.agreement["cells"] == found.circuit.graph.n_edges == 6


def test_an_answer_in_another_spelling_is_suggested(model: HookedTransformer) -> None:
    task = circuit.Task([CLEAN], [CORRUPTED], [" Mary"], [" John"])
    logits = model(CLEAN)[:, -1]
    object.__setattr__(task, "answers", ["Mary"])
    assert "give ' Mary'" in circuit._first_choice(model, task, logits)
    with pytest.raises(ValueError, match="give ' Mary'"):
        circuit.check_answers(model, task)


def test_an_empty_circuit_says_so(model: HookedTransformer, task: circuit.Task) -> None:
    assert "nothing is left" in circuit.find(model, task, method="acdc", threshold=1000.0).facts["edges"]


def test_where_the_circuit_goes_is_known_before_it_is_sought(tmp_path: Path) -> None:
    report = str(tmp_path / "report.html")
    options = ["--clean", CLEAN, "--corrupted", CORRUPTED, "--answers", " Mary, John", "--output", report]
    result = CliRunner().invoke(app, ["circuit", "demo", *options, "--save", str(tmp_path / "no" / "circuit")])
    assert result.exit_code == 2
    assert "there is no folder" in result.output
    assert not list(tmp_path.iterdir())


def test_other_pairs_than_a_task_are_refused() -> None:
    pairs = Pairs("Mary and John left, Mary", "Mary and John left, John", " John", " Mary")
    for function in (circuit.find, circuit.check_answers):
        with pytest.raises(TypeError, match=r"a report is of a Task, .* got a Pairs"):
            unwrap(function)(HookedTransformer.from_pretrained("demo"), pairs)  # without the annotations' checks
