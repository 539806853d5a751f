"""The commands, on the bundled model and on small checkpoints made here."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner, Result

import hooked_lm
from hooked_lm import HookedTransformer, HookedTransformerConfig, families, hub
from hooked_lm.cli import app
from hooked_lm.demo import corpus, experiment


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


# ---- demo ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> experiment.Result:
    return experiment.run(HookedTransformer.from_pretrained("demo"), experiment.prompt_pairs(2))


def test_demo_writes_the_report(tmp_path: Path):
    path = tmp_path / "report.html"
    shown = call("demo", "--output", path, "--prompts", 2)
    assert shown.exit_code == 0, shown.output
    assert f"report: {path}" in shown.output
    assert len(re.findall(r"│ \d\.\d\s+│\s+[+-]\d\.\d{3} │", shown.output)) == 10
    page = path.read_text(encoding="utf-8")
    assert page.count('id="figure-') == 5
    assert "Which heads carry it" in page


def test_the_experiment_finds_something_true(result: experiment.Result):
    """What must hold of any model that solves the task: the giver decides, and the last token has to be told."""
    assert result.clean_difference > 1
    assert result.corrupted_difference < -1
    [giver] = result.changed
    assert result.tokens[giver] == result.pairs[0].wrong
    assert result.corrupted_tokens[giver] == result.pairs[0].answer
    n_pos, (n_layers, n_heads) = len(result.tokens), result.heads.shape
    assert result.resid.shape == result.attn.shape == result.mlp.shape == (n_layers, n_pos)
    # before the first layer everything stands at the one token that differs
    only_there = torch.zeros(n_pos)
    only_there[giver] = 1
    torch.testing.assert_close(result.resid[0], only_there, rtol=0, atol=1e-3)
    # and what precedes it cannot be told apart in any layer
    for effects in (result.resid, result.attn, result.mlp):
        torch.testing.assert_close(effects[:, :giver], torch.zeros(n_layers, giver), rtol=0, atol=1e-3)
    torch.testing.assert_close(result.patterns.sum(-1), torch.ones(n_layers, n_heads, n_pos))
    assert result.heads.max() > 0.05


def test_heads_are_ranked_by_the_size_of_their_effect(result: experiment.Result):
    ranking = result.ranking(5)
    effects = ranking["restored"].to_list()
    assert [abs(effect) for effect in effects] == sorted(map(abs, effects), reverse=True)
    layer, head = map(int, ranking["head"][0].split("."))
    assert effects[0] == result.heads[layer, head].item()
    assert abs(effects[0]) == result.heads.abs().max().item()


def test_pairs_differ_in_the_giver_alone():
    pairs = experiment.prompt_pairs(20)
    assert len(set(pairs)) == 20
    for pair in pairs:
        clean, corrupted = pair.clean.split(" "), pair.corrupted.split(" ")
        changed = [(a, b) for a, b in zip(clean, corrupted, strict=True) if a != b]
        assert changed == [(pair.wrong[1:], pair.answer[1:])]
        assert corpus.is_held_out("indirect_object", *sorted((pair.wrong[1:], pair.answer[1:])))


def test_a_model_that_cannot_tell_is_refused():
    class Letters:
        """As many tokens as words; all names are one token."""

        def to_tokens(self, prompt: str) -> torch.Tensor:
            return torch.arange(len(prompt.split()))[None]

    model = HookedTransformer(HookedTransformerConfig(1, 8, 32, n_heads=2, d_vocab=32, act_fn="relu", seed=0))
    model.to_single_token = lambda name: 3 if name in corpus.FEMALE_NAMES else 4
    model.to_tokens = Letters().to_tokens
    with pytest.raises(ValueError, match="answers clean and corrupted prompts alike"):
        experiment.run(model, experiment.prompt_pairs(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "{tmp}/nowhere/report.html"], "there is no folder"),
        (["--output", "{tmp}"], "it is a folder"),
        (["--output", "{tmp}/report.html", "--prompts", "0"], "must be from 1 to"),
        (["--output", "{tmp}/report.html", "--prompts", "100000"], "must be from 1 to"),
    ],
)
def test_bad_input_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], message: str
):
    monkeypatch.setattr(hub, "from_pretrained", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    shown = call("demo", *(argument.format(tmp=tmp_path) for argument in arguments))
    assert shown.exit_code == 2
    assert shown.output.startswith("error: ")
    assert message in shown.output
    assert "Traceback" not in shown.output
    assert not list(tmp_path.iterdir())


def test_the_report_opens_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: experiment.Result):
    monkeypatch.setattr(experiment, "run", lambda model, pairs: result)
    opened = []
    monkeypatch.setattr("typer.launch", opened.append)
    assert call("demo", "--output", tmp_path / "a.html").exit_code == 0
    assert opened == []
    assert call("demo", "--output", tmp_path / "a.html", "--open").exit_code == 0
    assert opened == [(tmp_path / "a.html").as_uri()]


# ---- verify and the rest ---------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 50}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path)
    return tmp_path


def test_verify_a_checkpoint(checkpoint: Path):
    shown = call("verify", checkpoint)
    assert shown.exit_code == 0, shown.output
    assert "logits as in transformers" in shown.output
    assert "FAILED" not in shown.output


def test_verify_finds_a_mismatch(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    load = hub.from_pretrained_no_processing

    def badly(*args: object, **kwargs: object) -> HookedTransformer:
        model = load(*args, **kwargs)
        with torch.no_grad():
            model.blocks[0].mlp.b_out[0] += 10
        return model

    monkeypatch.setattr("hooked_lm.hub.compare.from_pretrained_no_processing", badly)
    shown = call("verify", checkpoint)
    assert shown.exit_code == 1
    assert re.search(r"logits as in transformers.*FAILED", shown.output)


def test_verify_nothing(tmp_path: Path):
    shown = call("verify", tmp_path / "nowhere")
    assert shown.exit_code == 2
    assert shown.output.startswith("error: ")
    assert "Traceback" not in shown.output


def test_models():
    shown = call("models")
    assert shown.exit_code == 0
    head, *rows = re.findall(r"(\w[\w-]*)\W+(\w+)\W*$", shown.output, re.MULTILINE)
    assert head == ("model_type", "class")
    assert [model_type for model_type, _ in rows] == hub.supported()
    assert dict(rows)["gpt2"] == "HookedTransformer"


def test_version():
    shown = call("--version")
    assert (shown.exit_code, shown.output.strip()) == (0, f"hooked-lm {hooked_lm.__version__}")


def test_an_error_of_the_library_is_one_message(monkeypatch: pytest.MonkeyPatch):
    def unknown() -> list[str]:
        raise KeyError("no [such] thing")

    monkeypatch.setattr(families, "supported", unknown)
    shown = call("models")
    assert (shown.exit_code, shown.output) == (2, "error: no [such] thing\n")


def test_help_does_not_wait_for_torch():
    assert_light("--help", ("demo", "verify", "models"))


def test_the_list_of_models_does_not_wait_for_torch():
    assert_light("models", ("gpt2", "llama", "HookedTransformer"))


def assert_light(argument: str, expected: tuple[str, ...]) -> None:
    script = (
        "import sys\n"
        "from hooked_lm.cli import app\n"
        f"app([{argument!r}], standalone_mode=False)\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'plotly', 'pandas')))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    for word in expected:
        assert word in shown.stdout
