"""Each command on the bundled model and on small checkpoints made here: output, JSON, exit codes, examples of the help."""

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from typer.main import get_command
from typer.testing import CliRunner, Result

import hooked_lm
from hooked_lm import (
    ActivationCache,
    HookedTransformer,
    HookedTransformerConfig,
    HookedVisionEncoder,
    families,
    hub,
)
from hooked_lm.analysis import Leaderboard, TunedLens, fit_jacobian_lens, logit_lens
from hooked_lm.cli import EXAMPLES, app
from hooked_lm.cli.doctor import EXTRAS
from hooked_lm.cli.output import as_text, console
from hooked_lm.demo.experiment import prompt_pairs
from hooked_lm.families import model_classes
from hooked_lm.families.well_known import WELL_KNOWN
from hooked_lm.harvest import ActivationStore
from hooked_lm.hub.unsupported import NOT_BUILT, REASONS, missing
from hooked_lm.interventions import Hooks, Scale, SteeringVectors, steering_vectors
from hooked_lm.models.decoder import Decoder
from hooked_lm.reports.circuit import DEFAULT_METRIC
from hooked_lm.studies import PairTable
from tests.close import assert_close
from tests.models.vision.test_toy import TOWER

ROOT = Path(__file__).parents[2]
STORE = "When Mary and John went to the store, {} gave a drink to"
LONG = "Mary " * 200
PAIR = ("--clean", STORE.format("John"), "--corrupted", STORE.format("Mary"), "--answers", " Mary, John")
COLUMNS = ("clean", "corrupted", "answer", "wrong_answer")
FAST = {
    "models",
    "sites",
    "generate",
    "cache",
    "lens",
    "attention",
    "patch",
}  # those whose example takes no time


def call(*arguments: object, **env: str) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200", **env})


def from_json(*arguments: object) -> dict:
    """What a command prints with --json; nothing else is on stdout."""
    shown = call(*arguments, "--json")
    assert shown.exit_code == 0, shown.output
    return json.loads(shown.stdout)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- what holds of every command -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_each_command_has_an_example_and_the_options_of_all() -> None:
    assert {*EXAMPLES, "mcp"} == {command.name or command.callback.__name__ for command in app.registered_commands}
    for name, example in EXAMPLES.items():
        shown = call(name, "--help")
        assert shown.exit_code == 0
        for line in ("Example:", "--json", "--debug", *example.splitlines()):
            assert line in shown.output


def test_lines_of_examples_fit_a_terminal() -> None:
    """So that they can be copied from the help."""
    for example in EXAMPLES.values():
        assert all(len(line) <= 78 for line in example.splitlines())


REPR = re.compile(r"\b[A-Z]\w*\(.*\)|<.* at 0x|object at")


def strings(found: object) -> Iterator[str]:
    """All strings in the JSON, but the texts of messages."""
    if isinstance(found, dict):
        yield from (each for part in found.values() for each in strings(part))
    elif isinstance(found, list):
        yield from (each for part in found for each in strings(part))
    elif isinstance(found, str):
        yield found


def test_what_has_no_form_in_json_is_refused() -> None:
    kept = {"a": [1, 2.5, None, True, Path("x")], "b": torch.tensor([[1.0, float("nan")], [2.0, 3.0]]), "c": {}}
    assert json.loads(as_text(kept)) == {"a": [1, 2.5, None, True, "x"], "b": [[1.0, None], [2.0, 3.0]], "c": {}}
    assert '"a": [1, 2.5, null, true, "x"]' in as_text(kept), "short lists are on a line"
    for unknown in (object(), torch.float32, HookedTransformerConfig, {1, 2}):
        with pytest.raises(AssertionError, match="JSON has no form for"):
            as_text({"a": [unknown]})


def test_a_result_that_has_no_form_in_json_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WELL_KNOWN, "gpt2", object())
    shown = call("models", "gpt2", "--json")
    assert shown.exit_code == 1
    assert "JSON has no form for a object" in json.loads(shown.stdout)["error"]["message"]


def test_messages_name_options() -> None:
    plan = ("harvest", "demo", "1000", "out", "--site", "resid_post1", "--plan", "sizes")
    shown = call(*plan)
    assert (shown.exit_code, shown.stderr) == (
        2,
        "error: of 1000 documents nothing else is known: give --tokens-per-document\n",
    )
    assert json.loads(call(*plan, "--json").stdout)["error"]["message"].endswith("give --tokens-per-document")
    assert call(*plan, "--workers", 0, "--tokens-per-document", 0).stderr.startswith(
        "error: --tokens-per-document must"
    )


def test_two_equal_answers_are_refused_at_once() -> None:
    for command in (["patch", "demo"], ["circuit", "demo"]):
        shown = call(*command, *PAIR[:4], "--answers", " Mary, Mary")
        assert shown.exit_code == 2
        assert "are the same, give two different tokens; got --answers=[' Mary']" in shown.stderr
    shown = call("lens", "demo", "Mary", "--answers", " Mary, Mary")
    assert (
        "the right and the wrong answers are the same, give two different tokens; got --answers=' Mary'" in shown.stderr
    )


@pytest.mark.filterwarnings("default")
def test_a_hub_that_cannot_be_reached_is_one_line_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hooked_lm.hub_files.unreachable", lambda: "huggingface.co:443: no route")
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it tries again"))
    shown = call("harvest", "demo", "nobody/nothing-10k", tmp_path / "out", "--site", "z1", "--max-documents", 10_000)
    assert shown.exit_code == 2
    assert shown.stderr == (
        "error: the data set 'nobody/nothing-10k' is not in the cache of the hub, which cannot be reached: "
        "huggingface.co:443: no route\n"
    )


def test_a_narrow_help_cuts_no_name_off() -> None:
    program, env = [sys.executable, "-m", "hooked_lm"], {"COLUMNS": "50", "PATH": "", "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([*program, "patch", "--help"], env=env, capture_output=True, text=True, check=True).stdout
    for option in get_command(app).commands["patch"].params:
        assert option.param_type_name == "argument" or option.opts[0] in shown
    for line in EXAMPLES["patch"].splitlines():
        assert line in shown


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in sorted(EXAMPLES)]
)
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    *before, example = EXAMPLES[name].replace("\\\n", "").splitlines()
    for line in before:
        subprocess.run(line, shell=True, check=True)
    program, *arguments = shlex.split(example)
    assert program == "hooked-lm"
    shown = call(*arguments)
    assert shown.exit_code == 0, shown.output
    assert "warning" not in shown.output
    found = from_json(*[each for each in arguments if each != "--json"])
    assert found.get("ok", True)
    assert not [text for text in strings(found) if REPR.search(text)]
    written = {path.name for path in tmp_path.iterdir()}
    ignored = (ROOT / ".gitignore").read_text().split()
    assert all(name.startswith("hooked_lm_") for name in written)
    assert "hooked_lm_*" in ignored


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sites", "demo", "--match", "nothing*"], "no hook point 'nothing*'"),
        (["sites", ""], "the name of the model is empty"),
        (["sites", "./nowhere"], "./nowhere"),
        (["cache", "demo", "Mary", "--sites", "hook_nothing"], "no hook point 'hook_nothing'"),
        (["cache", "demo", "Mary", "--sites", "*", "--out", "no/such/file"], "there is no folder"),
        (["generate", "demo", ""], "the prompt has no tokens"),
        (["generate", "demo", "Mary", "--steer", "nowhere.safetensors"], "nowhere.safetensors"),
        (["generate", "demo", "Mary", "--max-new-tokens", "-3"], "--max-new-tokens must be 0 or more, got -3"),
        (["generate", "demo", "Mary", "--greedy", "--top-k", "3"], "--top-k would change nothing"),
        (["generate", "demo", "Mary", "--layer", "1"], "give these with --steer"),
        (["cache", "demo", "Mary", "--site", "resid_post9"], "exists for layers 0 to 3"),
        (["cache", "demo", "Mary", "--site", "z", "--out", "/proc/x"], "cannot write /proc/x: no file can be created"),
        (["lens", "demo", "Mary", "--site", "blocks.1.hook_resid_mid"], "give its short name, 'resid_mid'"),
        (["lens", "demo", ""], "the prompt has no tokens"),
        (["lens", "demo", "Mary", "--positions", "2-1"], "the range '2-1' is empty"),
        (["patch", "demo", *PAIR, "--site", "z1"], "give its short name, 'z' and --layers"),
        (["leaderboard", "gpt2"], "the tasks of 'gpt2' are not known: give --pairs"),
        (["leaderboard", "demo", "--methods", "eapp"], "there is no method 'eapp'; did you mean 'eap'"),
        (["leaderboard", "planted", "--pairs", "no.jsonl"], "--tasks and planted have their own pairs"),
        (["circuit", "demo", *PAIR[:2]], "give --clean, --corrupted and --answers for a pair of prompts, or --pairs"),
        (["circuit", "demo", *PAIR, "--n-edges", "0"], "--n-edges must be from 1 to 1,519"),
        (["circuit", "demo", *PAIR, "--n-edges", "99999"], "got 99,999"),
        (["sites", "dmeo"], "did you mean 'demo'?"),
        (["lens", "demo", "Mary", "--positions", "9"], "position 9 is out of range"),
        (["lens", "demo", "Mary", "--html", "/"], "it is a folder"),
        (["attention", "demo", "Mary", "--layers", "9"], "no attention in a layer 9"),
        (["attention", "demo", "Mary", "--positions", "9"], "index 9 is out of range"),
        (["patch", "demo"], "give --clean, --corrupted and --answers"),
        (["patch", "demo", *PAIR, "--pairs", "x.jsonl"], "one or the other"),
        (["patch", "demo", *PAIR, "--clean", "Mary"], "got 2, 1 and 1"),
        (["patch", "demo", *PAIR, "--output", "x"], "are of a study of --pairs"),
        (["patch", "demo", "--pairs", "x.jsonl"], "--pairs needs --output"),
        (["patch", "demo", *PAIR, "--site", "nothing"], "nothing"),
        (["patch", "demo", *PAIR, "--option", "nothing"], "option must be name=value, got 'nothing'"),
        (["circuit", "demo", *PAIR[:4], "--answers", "Mary John"], "with a comma between"),
        (["circuit", "demo", *PAIR, "--save", "no/such/file"], "there is no folder"),
        (["harvest", "demo", "nowhere.jsonl", "out", "--site", "resid_post1"], "no file of"),
        (["verify", "nowhere/at/all/x"], "nowhere/at/all/x"),
        (["verify", ""], "the name of the model is empty"),
        (["lens", "demo", "Mary", "--nothing"], "No such option: --nothing (see "),
        (["lens", "demo"], "Missing argument 'PROMPT' (see "),
        (["lens", "demo", "Mary", "--k", "many"], "Invalid value for '--k'"),
        (["lenz", "demo"], "Did you mean 'lens'? (see "),
        (["--nothing"], "No such option: --nothing (see "),
        (["lens", "demo", LONG], "the prompt has 202 tokens, more than the model's n_ctx of 128"),
        (["patch", "demo", "--clean", LONG, "--corrupted", LONG, *PAIR[4:]], "more than the model's n_ctx of 128"),
        (["circuit", "demo", *PAIR, "--nulls", "2", "--by", "kl"], "--nulls must be 0 or a number of circuits"),
        (["circuit", "demo", *PAIR, "--held-out", "1.5"], "--held-out is a share from 0 to below 1"),
        (["circuit", "demo", *PAIR, "--check", "9"], "check is for the methods that estimate effects"),
        (["harvest", "demo", "corpus.jsonl", "", "--site", "z"], "a folder whose path is empty"),
    ],
)
def test_bad_input_is_one_message(tmp_path: Path, arguments: list[str], message: str) -> None:
    shown = call(*arguments)
    assert shown.exit_code == 2, shown.output
    assert shown.stderr.startswith("error: ")
    assert message in shown.stderr
    assert "Traceback" not in shown.output
    assert not list(tmp_path.iterdir())
    error = json.loads(call(*arguments, "--json").stdout)
    assert error["ok"] is False
    assert message in error["error"]["message"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyError("no [such] thing"), 2, "error: no [such] thing\n"),
        (ImportError("this needs the package ray"), 1, "failed: this needs the package ray\n"),
        (FloatingPointError("blocks.0 has NaN"), 1, "failed: blocks.0 has NaN\n"),
        (RuntimeError("a worker died"), 1, "failed: a worker died\n"),
        (AssertionError("3 rows"), 1, "failed: AssertionError: 3 rows (--debug shows where)\n"),
        (MemoryError(), 1, "failed: MemoryError:  (--debug shows where)\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_of_the_library_is_one_message(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, line: str
) -> None:
    def fails(*classes: str) -> list[str]:
        raise error

    monkeypatch.setattr(families, "supported", fails)
    shown = call("models")
    assert (shown.exit_code, shown.output) == (code, line)
    shown = call("models", "--debug")
    assert shown.exit_code == code
    assert "Traceback" in shown.output
    shown = call("models", "--json")
    assert (shown.exit_code, json.loads(shown.stdout)["error"]["type"]) == (code, type(error).__name__)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full, on Linux")
@pytest.mark.parametrize("arguments", [["models", "--json"], ["models", "--nothing", "--json"]])
def test_a_full_disk_is_a_message(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "hooked_lm", *arguments]
        shown = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    assert shown.returncode == 2
    assert shown.stderr.startswith("error: ")
    assert len(shown.stderr.splitlines()) == 1


@pytest.mark.parametrize("work", ["harvest", "studies"])
def test_an_interrupt_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    def interrupted(*given: object, **options: object) -> None:
        raise KeyboardInterrupt

    name = {"harvest": "harvest", "studies": "study_pairs"}[work]
    monkeypatch.setattr(f"hooked_lm.{work}.{name}", interrupted)
    harvest = ["harvest", "demo", "corpus.jsonl", tmp_path, "--site", "resid_post1"]
    shown = call(*(harvest if work == "harvest" else ["patch", "demo", "--pairs", "x.jsonl", "--output", tmp_path]))
    assert (shown.exit_code, shown.output) == (130, "interrupted: complete shards are kept, the same command resumes\n")


@pytest.mark.filterwarnings("default")
def test_a_warning_is_a_line_and_in_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def warns(*classes: str) -> dict[str, list[str]]:
        import warnings

        warnings.warn("the answers lack their spaces", stacklevel=1)
        return {}

    monkeypatch.setattr(families, "model_classes", warns)
    shown = call("models")
    assert shown.stderr == "warning: the answers lack their spaces\n"
    assert from_json("models")["warnings"] == ["the answers lack their spaces"]


def test_a_narrow_terminal_without_colour_cuts_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 40)  # COLUMNS is read once, when the module is imported
    shown = call("sites", "demo", "--match", "*hook_pattern", NO_COLOR="1", TERM="dumb")
    assert shown.exit_code == 0
    assert "\x1b" not in shown.output
    cells = [line.split("│")[0].strip() for line in shown.output.splitlines() if "│" in line]
    assert "".join(cells) == "blocks.{0-3}.attn.hook_pattern"
    assert all(len(line) <= 40 for line in shown.output.splitlines() if "│" in line)


@pytest.mark.slow
def test_a_terminal_of_ascii_shows_question_marks() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "hooked_lm", "lens", "demo", "The capital", "--k", "1"],
        env={"PYTHONIOENCODING": "ascii", "PATH": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.isascii()
    assert b"layer" in shown.stdout


# ---- single commands -------------------------------------------------------------------------------------------------


def test_sites(model: HookedTransformer) -> None:
    found = from_json("sites", "demo")["sites"]
    assert [each["site"] for each in found] == list(model.all_points())
    axes = {each["site"]: each["axes"] for each in found}
    assert axes["blocks.1.attn.hook_pattern"] == ["batch", "head", "query_pos", "key_pos"]
    shapes = {each["site"]: each["shape"] for each in found}
    _, cache = model.run_with_cache("Mary left", names_filter=lambda name: True)
    for name, value in cache.items():
        sizes = {"batch": 1, "pos": 3, "query_pos": 3, "key_pos": 3}
        assert [sizes.get(size, size) for size in shapes[name]] == list(value.shape), name
    assert {each["site"] for each in found if each["on_demand"]} >= {"blocks.0.attn.hook_result"}
    shown = call("sites", "demo").output
    assert re.search(r"blocks\.\{0-3\}\.attn\.hook_result +│ batch pos head=8 d_model=128 +│ on demand", shown)
    assert f"{len(found)} sites" in shown


def test_cache(tmp_path: Path, model: HookedTransformer) -> None:
    path = tmp_path / "a.safetensors"
    found = from_json("cache", "demo", "Mary and John", "--sites", "*hook_z", "--sites", "hook_embed", "--out", path)
    kept = ActivationCache.load(path, model)
    _, expected = model.run_with_cache("Mary and John", names_filter=["*hook_z", "hook_embed"])
    assert [each["site"] for each in found["sites"]] == list(kept) == list(expected)
    for name, value in expected.items():
        assert_close(kept[name], value)


@pytest.mark.slow
def test_sites_are_named_alike_in_all_commands(tmp_path: Path) -> None:
    """A short name is the site in all layers, and both spellings of the option work."""
    out = ("--out", tmp_path / "a.safetensors")
    full = [f"blocks.{layer}.hook_resid_post" for layer in range(4)]
    for option, name in (("--site", "resid_post"), ("--sites", "*.hook_resid_post"), ("--site", "hook_resid_post")):
        found = from_json("cache", "demo", "Mary", option, name, *out)["sites"]
        assert [each["site"] for each in found] == full
    for name in ("resid_post", "hook_resid_post", "*.hook_resid_post"):
        assert [each["site"] for each in from_json("sites", "demo", "--match", name)["sites"]] == full
    [only] = from_json("sites", "demo", "--match", "z1")["sites"]
    assert only["site"] == "blocks.1.attn.hook_z"
    for name in ("resid_post", "*hook_resid_post", "blocks.*.hook_resid_post"):
        assert call("lens", "demo", "Mary", "--sites", name, "--k", 1).exit_code == 0


def test_a_model_without_a_tokenizer_takes_ids(tmp_path: Path) -> None:
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 16, "d_vocab": 20, "act_fn": "gelu"}
    HookedTransformer(HookedTransformerConfig(**sizes, seed=0)).save(tmp_path / "model")
    found = from_json("lens", tmp_path / "model", "3,1,4", "--k", 1)
    assert found["tokens"] == ["3", "1", "4"]
    for command, *options in (["attention", "--out", "a.html"], ["cache", "--site", "z", "--out", "a.safetensors"]):
        assert call(command, tmp_path / "model", "3 1 4", *options).exit_code == 0
    text = call("generate", tmp_path / "model", "3,1,4", "--greedy", "--max-new-tokens", 2).output
    assert re.fullmatch(r"3,1,4,\d+,\d+\n", text)
    assert "give the prompt as token ids" in call("lens", tmp_path / "model", "Mary").stderr
    assert "those of this model are 0 to 19" in call("lens", tmp_path / "model", "3,20").stderr
    assert "this model has no tokenizer" in call("patch", tmp_path / "model", *PAIR).stderr


def test_a_model_without_texts_is_refused(tmp_path: Path) -> None:
    HookedVisionEncoder({**TOWER, "seed": 0}).save(tmp_path / "model")
    shown = call("cache", tmp_path / "model", "1,2", "--site", "z", "--out", "a.safetensors")
    assert (shown.exit_code, "a HookedVisionEncoder does not read" in shown.stderr) == (2, True)
    (tmp_path / "corpus.jsonl").write_text('{"text": "Mary"}\n')
    shown = call("harvest", tmp_path / "model", tmp_path / "corpus.jsonl", tmp_path / "out", "--site", "z")
    assert (shown.exit_code, "a harvest reads texts" in shown.stderr) == (2, True)


def test_nan_is_not_shown_as_a_token(tmp_path: Path) -> None:
    sizes = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 16, "d_vocab": 20, "act_fn": "gelu"}
    model = HookedTransformer(HookedTransformerConfig(**sizes, seed=0))
    with torch.no_grad():
        model.blocks[0].mlp.b_out[0] = float("nan")
    model.save(tmp_path / "model")
    assert re.search(r"0 │ -\s+│ -", call("lens", tmp_path / "model", "3,1,4", "--k", 2).output)


@pytest.mark.slow
def test_harvest_says_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "Mary and John went"}\n' * 4)
    given = ("harvest", "demo", tmp_path / "corpus.jsonl", tmp_path / "out", "--site", "resid_post1")
    given += ("--documents-per-shard", 2)
    assert "resumed" not in call(*given, "--shard", "0/2").output
    time.sleep(0.2)
    shown = call(*given)
    assert "resumed: 1 of 2 shards were there already" in shown.output
    found = from_json(*given)
    assert found["shards"] == {"written": 0, "kept": 2, "missing": 0}
    store = ActivationStore(found["path"])
    facts = (found["complete"], found["sites"], found["tokens"], found["dtype"])
    assert facts == (True, store.sites, len(store), "float32")
    assert not [text for text in strings(found) if REPR.search(text)]


def test_harvest_reads_conversations(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Mary went home."}, {"role": "assistant", "content": "John did."}]
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    template = {"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"}
    (tmp_path / "template.json").write_text(json.dumps(template))
    given = ("harvest", "demo", tmp_path / "corpus.jsonl", tmp_path / "out", "--site", "resid_post1")
    options = ("--positions", "role=assistant,part=content", "--template-options", tmp_path / "template.json")
    store = ActivationStore(from_json(*given, *options, "--chunk", 4)["path"])
    assert {label.role for label in store["labels"][:]} == {"assistant"}
    assert (store.plan.rows["positions"], store.plan.rows["chunk"]) == ({"role": "assistant", "part": "content"}, 4)
    (tmp_path / "template.json").write_text("[]")
    for path, message in (("template.json", "must hold a JSON object"), ("no.json", "there is no such file")):
        assert message in call(*given, "--template-options", tmp_path / path).stderr
    assert "has no chat template" in call(*given, "--positions", "assistant").stderr


def test_generate_streams_the_text_of_the_library(model: HookedTransformer) -> None:
    options = ("--max-new-tokens", 8, "--seed", 3)
    expected = model.generate("Mary went to", max_new_tokens=8, seed=3, verbose=False)
    assert call("generate", "demo", "Mary went to", *options).output == expected + "\n"
    assert from_json("generate", "demo", "Mary went to", *options)["text"] == expected


def test_models_by_the_names_that_people_use(tmp_path: Path) -> None:
    found = [kind["model_type"] for kind in json.loads(call("models", "Llama 3.1", "--json").stdout)["models"]]
    assert found == ["llama"]
    assert "TinyLlama" in call("models", "llama").output
    assert all(kind in model_classes() for kind in WELL_KNOWN)
    assert {"qwen3", "qwen3_vl"} <= {
        kind["model_type"] for kind in json.loads(call("models", "qwen3", "--json").stdout)["models"]
    }
    nothing = call("models", "nonsense")
    assert (nothing.exit_code, "no model that loads has 'nonsense' in its name" in nothing.output) == (2, True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "qwen3_vl"}, {"loads": True, "model_type": "qwen3_vl", "classes": ["HookedVisionLanguage"]}),
        ({"model_type": "whisper"}, {"loads": False, "model_type": "whisper", "reason": "its input is sound"}),
        ({"model_type": "nonsense"}, {"loads": False}),
        (
            {"model_type": "qwen3", "quantization_config": {"quant_method": "gptq", "bits": 4}},
            {"loads": True, "dequantized_from": "gptq with 4 bits"},
        ),
        ({"model_type": "qwen3", "quantization_config": {"quant_method": "hqq"}}, {"loads": False}),
    ],
)
def test_whether_a_checkpoint_loads(tmp_path: Path, config: dict[str, Any], expected: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    answer = json.loads(call("models", tmp_path, "--json").stdout)
    assert expected.items() <= answer.items()
    assert ("reason" in answer) == (not answer["loads"])
    said = call("models", tmp_path).output.replace("\n", " ")
    assert ("loads as" if answer["loads"] else "does not load") in said
    assert answer.get("dequantized_from", "") in said
    HookedTransformer.from_pretrained("demo").save(tmp_path / "saved")
    assert json.loads(call("models", tmp_path / "saved", "--json").stdout)["classes"] == ["HookedTransformer"]
    assert json.loads(call("models", "demo-shapes", "--json").stdout)["classes"] == ["HookedVisionLanguage"]
    missing = call("models", tmp_path / "nowhere")
    assert (missing.exit_code, "no such folder" in missing.output) == (2, True)


def test_generate_steers(tmp_path: Path, model: HookedTransformer) -> None:
    women, men = ["Mary was ill, so", "Anna slept late because"], ["Tom was ill, so", "Paul slept late because"]
    steering_vectors(model, women, men, layers=[1, 2]).save(tmp_path / "v.safetensors")
    arguments = ("generate", "demo", "Lucy went home because", "--greedy", "--max-new-tokens", 1)
    for options in (("--coefficient", -1.2), ("--dose", -0.8)):
        steered = call(*arguments, "--steer", tmp_path / "v.safetensors", *options, "--layer", 1)
        assert steered.output == "Lucy went home because he\n"
    chosen = call(*arguments, "--steer", tmp_path / "v.safetensors", "--coefficient", -1)
    assert "steered at layer" in chosen.stderr
    assert "held-out pairs best" in chosen.stderr
    assert call(*arguments).output == "Lucy went home because she\n"


def test_lens(tmp_path: Path) -> None:
    page = tmp_path / "lens.html"
    found = from_json("lens", "demo", "The capital of France is", "--k", 1, "--html", page)
    assert [row["layer"] for row in found["rows"]] == [0, 1, 2, 3]
    assert {row["position"] for row in found["rows"]} == {5}
    assert found["rows"][-1]["token"] == " Paris"
    assert "Plotly" in page.read_text(encoding="utf-8")
    shown = call("lens", "demo", "The capital of France is", "--k", 1).output
    layers = re.findall(r"(?m)^ +(\d) │ (\S+) \d\.\d\d", shown)
    assert [layer for layer, _ in layers] == ["3", "2", "1", "0"]
    assert layers[0][1] == "·Paris"


def test_a_fitted_lens_reads(model: HookedTransformer, tmp_path: Path) -> None:
    texts = ["The capital of Spain is Madrid.", "Mary went home."]
    fitted = fit_jacobian_lens(model, texts, held_out=0)
    fitted.save(tmp_path / "lens.safetensors")
    for ending in ("pt", "safetensors"):
        fitted.to_published(tmp_path / f"published.{ending}", torch.float32)
    TunedLens.identity(model).save(tmp_path / "tuned.safetensors")
    expected = logit_lens(model, "The capital of France is", lens=fitted, positions=[-1], k=2).logits.flatten()
    for name, kind in (
        ("lens.safetensors", "Jacobian lens"),
        ("published.pt", "Jacobian lens"),
        ("published.safetensors", "Jacobian lens"),
        ("tuned.safetensors", "tuned lens"),
    ):
        found = from_json("lens", "demo", "The capital of France is", "--k", 2, "--lens", tmp_path / name)
        assert found["lens"] == kind
        logits = torch.tensor([row["logit"] for row in found["rows"]])
        if kind == "Jacobian lens":
            assert_close(logits, expected, scale=20.0)
    hooks = tmp_path / "hooks.safetensors"
    Hooks([Scale("z", 1, factor=0.5)]).save(hooks)
    assert "which is no TunedLens and no JacobianLens" in call("lens", "demo", "Mary", "--lens", hooks).stderr
    assert "there is no such file" in call("lens", "demo", "Mary", "--lens", tmp_path / "none").stderr


def test_two_answers_are_compared(model: HookedTransformer) -> None:
    prompt, answers = STORE.format("John"), ("--answers", " Mary, John")
    rows = from_json("lens", "demo", prompt, *answers)["answers"]
    logits = model(prompt)[0, -1]
    mary, john = map(model.to_single_token, (" Mary", " John"))
    last = rows[-1]
    assert (last["layer"], last["position"], last["token"]) == (3, 14, " to")
    assert_close(last["logit_difference"], logits[mary] - logits[john], scale=20.0)
    for name, token in (("probability", mary), ("wrong_probability", john)):
        assert_close(last[name], logits.softmax(-1)[token], scale=20.0)
    assert re.search(
        rf"3 │ ·to \(14\) │ +\{last['logit_difference']:+.2f} ",
        call("lens", "demo", prompt, *answers).output,
    )
    assert from_json("lens", "demo", prompt)["answers"] is None


def test_steer_writes_what_generate_reads(tmp_path: Path) -> None:
    texts = {
        "--positive": ["Mary was ill, so", "Anna slept late because"],
        "--negative": ["Tom was ill, so", "Paul slept late because"],
    }
    given = [word for option, some in texts.items() for text in some for word in (option, text)]
    found = from_json("steer", "demo", *given, "--layers", "1,2", "--out", tmp_path / "v.safetensors")
    vectors = SteeringVectors.load(found["file"])
    assert (found["best_layer"], found["n_pairs"], vectors.layers) == (vectors.best_layer(), 2, [1, 2])
    assert [row["accuracy"] for row in found["layers"]] == vectors.to_dataframe()["accuracy"].tolist()
    expected = steering_vectors(HookedTransformer.from_pretrained("demo"), *texts.values(), layers=[1, 2])
    assert_close(vectors.directions[1], expected.directions[1])
    said = call(
        "generate",
        "demo",
        "Lucy went home because",
        "--greedy",
        "--max-new-tokens",
        1,
        "--steer",
        found["file"],
        "--dose",
        -0.8,
        "--layer",
        1,
    )
    assert said.output == "Lucy went home because he\n"


def test_attention(tmp_path: Path, model: HookedTransformer) -> None:
    labels = ("--heads", "L0H1,L2H0")
    assert from_json("attention", "demo", "Mary and John", *labels, "--out", tmp_path / "a.html")["n_heads"] == 2
    assert "there is no head L9H9" in call("attention", "demo", "Mary", "--heads", "L9H9").stderr
    found = from_json("attention", "demo", "Mary and John", "--layers", "-1", "--out", tmp_path / "a.html")
    assert (found["layers"], found["n_heads"]) == ([model.cfg.n_layers - 1], model.cfg.n_heads)
    assert "John" in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_patch_a_pair(tmp_path: Path, model: HookedTransformer) -> None:
    found = from_json("patch", "demo", *PAIR, "--site", "resid_pre", "--html", tmp_path / "a.html")
    assert found["logit_difference"]["clean"] > 1
    assert found["logit_difference"]["corrupted"] < -1
    tokens = model.to_str_tokens(STORE.format("John"))
    assert (found["shown"], found["of"]) == (len(found["largest"]), model.cfg.n_layers * len(tokens))
    assert found["axes"] == {"layer": [0, 1, 2, 3], "position": list(range(len(tokens)))}
    corrupted = model.to_str_tokens(STORE.format("Mary"))
    assert found["tokens"] == corrupted
    values = {name: torch.tensor(numbers) for name, numbers in found["values"].items()}
    assert values.keys() == {"effect", "restored", "value"}, "one pair has no interval"
    assert {each.shape for each in values.values()} == {(4, len(tokens))}
    clean, start = found["logit_difference"]["clean"], found["logit_difference"]["corrupted"]
    assert_close(values["value"] - start, values["effect"], scale=10.0)
    assert_close(values["restored"] * (clean - start), values["effect"], scale=10.0)
    sizes = [abs(cell["effect"]) for cell in found["largest"]]
    assert sizes == sorted(sizes, reverse=True)
    assert_close(sizes[0], values["effect"].abs().max())
    for cell in found["largest"]:
        assert cell["token"] == corrupted[cell["position"]]
        assert_close(cell["value"], values["value"][cell["layer"], cell["position"]])
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    for part in ("Plotly", "corrupted</b>", "·John", "The largest effect is that of layer", "One cell at a time"):
        assert part in page


def test_patch_shows_shares_or_nats(tmp_path: Path) -> None:
    few = ("--layers", "1-2", "--positions", "10-12", "--html", tmp_path / "a.html")
    assert "restored: 0 is the corrupted run" in call("patch", "demo", *PAIR, *few).output
    assert "0 is the corrupted run and 1 the clean one" in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert call("patch", "demo", *PAIR, *few, "--raw").exit_code == 0
    assert "in nats" in (tmp_path / "a.html").read_text(encoding="utf-8")
    raw = from_json("patch", "demo", *PAIR, *few, "--raw")
    assert "restored" not in call("patch", "demo", *PAIR, *few, "--raw").output.split("largest effect")[0]
    assert "restored" not in json.dumps([raw["largest"], raw["values"]])
    found = from_json("patch", "demo", *PAIR, *few, "--option", "direction=noise")
    assert found["axes"]["layer"] == [1, 2]
    assert 0 < min(cell["kept"] for cell in found["largest"]) < 0.1
    assert_close(max(cell["effect"] for cell in found["largest"]), max(map(max, found["values"]["effect"])))


def test_patch_heads_by_their_labels() -> None:
    options = ("--site", "z", "--positions", "together", "--heads", "L0H0,L2H1")
    found = from_json("patch", "demo", *PAIR, *options)
    assert found["axes"] == {"head": ["L0H0", "L2H1"]}
    assert {cell["head"] for cell in found["largest"]} == {"L0H0", "L2H1"}


@pytest.mark.slow
def test_a_study_has_the_form_of_a_sweep_and_its_path(tmp_path: Path) -> None:
    rows = [{name: getattr(pair, name) for name in COLUMNS} for pair in prompt_pairs(2)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    study = ("patch", "demo", "--pairs", "pairs.jsonl", "--output", "out", "--site", "z", "--heads", "each")
    study += ("--positions", "together", "--metric", "logit_difference", "--metric", "logit")
    found = from_json(*study)
    facts = ("model", "experiment", "complete", "pairs", "rows")
    assert [found[name] for name in facts] == ["demo", "sweep", True, 2, 128]
    assert found["shards"] == {"written": 1, "kept": 0, "missing": 0}
    table = PairTable(found["path"]).scores()
    assert (found["shown"], found["of"], list(found["axes"])) == (20, 64, ["metric", "layer", "head"])
    for name, expected in (("effect", table.effects()), ("restored", table.restored())):
        assert_close(torch.tensor(found["values"][name]), expected.mean)
    low, _ = table.effects().interval(simultaneous=True)
    assert_close(torch.tensor(found["values"]["low"]), low)
    first = found["largest"][0]
    assert_close(first["low"], table.effects().top(1)["low"][0])
    assert "20 of 64; --json has all" in call(*study).output
    raw = from_json(*study, "--raw")
    assert raw["values"].keys() == {"effect", "low", "high", "value"}
    assert "restored" not in call(*study, "--raw").output


@pytest.mark.filterwarnings("default")
def test_answers_that_the_model_does_not_give_are_a_warning() -> None:
    shown = call("patch", "demo", *PAIR[:4], "--answers", " John, Mary")
    assert shown.exit_code == 0
    assert re.search(r"warning: .*clean", shown.stderr)


def test_answers_without_their_space_are_refused() -> None:
    shown = call("patch", "demo", *PAIR[:4], "--answers", "Mary,John")
    assert shown.exit_code == 2
    assert "' Mary'" in shown.stderr


def test_the_metric_of_circuits_is_that_of_the_library() -> None:
    [by] = [option for option in get_command(app).commands["circuit"].params if option.name == "by"]
    assert by.default == DEFAULT_METRIC


@pytest.mark.slow
def test_leaderboard(tmp_path: Path) -> None:
    some = ["leaderboard", "planted", "--tasks", "previous-token,redundancy", "--methods", "exact,eap-ig-inputs,random"]
    found = from_json(*some, "--html", tmp_path / "page.html", "--save", tmp_path / "board")
    assert [row["method"] for row in found["methods"]][-1] == "random"
    assert found["tasks"] == ["previous-token", "redundancy"]
    assert {row["task"] for row in found["per_task"]} == {*found["tasks"]}
    assert "Where each method fails" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(Leaderboard.load(tmp_path / "board").tasks) == 2
    assert "cmd: the area between faithfulness and 1" in call(*some, "--no-untrained").output
    alone = (
        "leaderboard",
        "demo",
        "--tasks",
        "agreement",
        "--n-pairs",
        2,
        "--no-untrained",
        "--methods",
        "eap,random",
    )
    assert "one held-out pair has no interval (agreement): where methods fail is not known" in call(*alone).output


@pytest.mark.slow
def test_circuit(tmp_path: Path) -> None:
    output = ("--output", tmp_path / "c.html", "--save", tmp_path / "c.safetensors")
    found = from_json("circuit", "demo", *PAIR, "--method", "eap", "--n-edges", 20, *output)
    assert found["n_edges"] == 20
    assert found["ahead"]["clean"] > 1
    assert (found["method"], found["metric"], found["replace_with"]) == ("eap", "logit difference", "corrupted")
    assert {"spearman", "cells"} <= found["agreement"].keys()
    shown = call("circuit", "demo", *PAIR, "--method", "eap", "--n-edges", 20, *output).output
    for name in ("nodes", "edges"):
        part = found[name]
        assert "negative if" in part["meaning"]
        assert part["meaning"] in shown
        assert (part["shown"], len(part["values"]["effect"])) == (min(12, part["of"]), part["of"])
        assert part["largest"][0]["effect"] < 0
    assert found["edges"]["of"] == len(found["edges"]["axes"]["edge"]) == 20
    by_kl = from_json("circuit", "demo", *PAIR, "--method", "eap", "--n-edges", 20, "--by", "kl", *output)
    assert "positive if" in by_kl["nodes"]["meaning"]
    assert by_kl["nodes"]["largest"][0]["effect"] > 0
    assert {path.name for path in tmp_path.iterdir()} == {"c.html", "c.safetensors"}


@pytest.mark.slow
def test_circuit_with_held_out_pairs_and_nulls(tmp_path: Path) -> None:
    given = [
        (option, getattr(pair, name))
        for pair in prompt_pairs(4)
        for option, name in (("--clean", "clean"), ("--corrupted", "corrupted"))
    ]
    answers = [("--answers", f"{pair.answer},{pair.wrong_answer}") for pair in prompt_pairs(4)]
    pairs = [word for option in (*given, *answers) for word in option]
    output = ("--method", "eap", "--n-edges", 75, "--output", tmp_path / "c.html")
    found = from_json("circuit", "demo", *pairs, *output, "--held-out", 0.5, "--nulls", 2)
    assert found["judged_on"] == "prompts that the search did not see"
    assert [row["circuit"] for row in found["nulls"]] == ["null 0", "null 1"]
    assert found["evaluation"][0]["faithfulness"] != found["in_search"][0]["faithfulness"]
    page = (tmp_path / "c.html").read_text(encoding="utf-8")
    assert "faithfulness in the search" in page
    assert "faithfulness of null circuits" in page
    same = from_json("circuit", "demo", *pairs, *output, "--held-out", 0)
    assert (same["judged_on"], same["in_search"], same["nulls"]) == ("same prompts as the search", None, None)
    assert "faithfulness in the search" not in (tmp_path / "c.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_circuit_of_the_pairs_of_a_file(tmp_path: Path) -> None:
    names = {"clean": "prompt", "corrupted": "corrupted", "answer": "answer", "wrong_answer": "wrong_answer"}
    rows = [{column: getattr(pair, name) for name, column in names.items()} for pair in prompt_pairs(4)]
    file, page = tmp_path / "pairs.jsonl", tmp_path / "c.html"

    def write(rows: list[dict[str, object]]) -> None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    write(rows)
    options = ("--pairs", file, "--method", "eap", "--n-edges", 20, "--output", page)
    found = from_json("circuit", "demo", *options, "--column", "clean=prompt", "--max-pairs", 3)
    assert found["n_pairs"] == 3
    assert 0 < found["n_edges"] <= 20
    assert found["evaluation"][0]["low"] < found["evaluation"][0]["high"]
    text = page.read_text(encoding="utf-8")
    assert f"<code>hooked-lm circuit demo --pairs {file} --method eap" in text
    assert all(row["prompt"] in text for row in rows[:3])
    assert rows[3]["prompt"] not in text
    assert '<script type="text/plain" id="plotly">' in text, "faithfulness, as bars"
    typed = [(f"--{name}", row[names[name]]) for row in rows[:3] for name in ("clean", "corrupted")]
    typed += [("--answers", f"{row['answer']},{row['wrong_answer']}") for row in rows[:3]]
    same = from_json("circuit", "demo", *(word for option in typed for word in option), *options[2:])
    assert same["edges"] == found["edges"]

    for changed, extra, said in (
        (rows, ["--clean", "x"], "--pairs replaces --clean, --corrupted and --answers"),
        (rows, [], "give --column clean=NAME"),
        (
            [{**row, "answer": [1, 2]} for row in rows[:1]],
            ["--column", "clean=prompt", "--column", "corrupted=no"],
            "'no'",
        ),
        (
            [{key: row[key] for key in row if key != "wrong_answer"} for row in rows],
            ["--column", "clean=prompt"],
            "wrong_answer",
        ),
        (
            [*rows, {**rows[0], "prompt": "Then " + rows[0]["prompt"], "corrupted": "Then " + rows[0]["corrupted"]}],
            ["--column", "clean=prompt"],
            "must have as many tokens each; there are 4 of 15 tokens, 1 of 17 tokens",
        ),
        (
            [{**row, "prompt": [1, 2], "corrupted": [1, 3]} for row in rows],
            ["--column", "clean=prompt"],
            "must be texts",
        ),
    ):
        write(changed)
        shown = call("circuit", "demo", *options, *extra)
        assert shown.exit_code == 2
        assert said in " ".join(shown.output.split()), shown.output


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = from_json("doctor")
    assert found["versions"]["torch"] == torch.__version__
    assert found["missing_extras"] == []
    monkeypatch.setitem(EXTRAS, "viz", ("plotly", "not-installed"))
    assert "pip install 'hooked-lm[viz]'" in call("doctor").output
    monkeypatch.setattr(HookedTransformer, "generate", lambda *args, **options: "nothing")
    shown = call("doctor")
    assert (shown.exit_code, "answers 'nothing', which is wrong" in shown.output) == (1, True)


def test_the_extras_of_the_doctor_are_those_of_the_project() -> None:
    listed = (
        (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("[project.scripts]")[0]
    )
    extras = {
        name: re.findall(r'"([\w-]+)[\[>"]', line) for name, line in re.findall(r"^(\w+) = \[(.*)\]", listed, re.M)
    }
    extras = {
        name: tuple(part for part in parts if part not in ("hooked-lm", "torch")) for name, parts in extras.items()
    }
    assert {name: parts for name, parts in extras.items() if name != "all"} == EXTRAS


def test_a_checkpoint_whose_config_cannot_be_read_is_answered_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_reach(*_: object) -> None:
        raise ValueError("the hub cannot be reached")

    monkeypatch.setattr(import_module("hooked_lm.hub.load"), "described", out_of_reach)
    found = json.loads(call("models", "meta-llama/Llama-3.1-8B-Instruct", "--json").stdout)
    assert (found["ok"], found["config_read"], [row["model_type"] for row in found["models"]]) == (
        True,
        False,
        ["llama"],
    )
    assert found["reason"] == "the hub cannot be reached"
    assert call("models", "meta-llama/nonsense", "--json").exit_code == 2


def test_patterns_of_chosen_heads_are_data(tmp_path: Path) -> None:
    prompt = "Mary and John"
    shown = call("attention", "demo", prompt, "--heads", "L1H7,L0H2", "--out", tmp_path / "a.html", "--json")
    patterns = json.loads(shown.stdout)["patterns"]
    _, cache = HookedTransformer.from_pretrained("demo").run_with_cache(prompt)
    assert [*patterns] == ["L1H7", "L0H2"]
    assert_close(torch.tensor(patterns["L1H7"]), cache["pattern", 1][0, 7])
    rows = from_json(
        "attention", "demo", prompt, "--heads", "L1H7", "--positions=-1,1", "--out", tmp_path / "rows.html"
    )
    assert rows["positions"] == [3, 1]
    assert_close(torch.tensor(rows["patterns"]["L1H7"]), cache["pattern", 1][0, 7, [-1, 1]])


# ---- verify and models -----------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 50}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path)
    return tmp_path


def test_verify_a_checkpoint(checkpoint: Path) -> None:
    shown = call("verify", checkpoint)
    assert shown.exit_code == 0, shown.output
    assert "logits as in transformers" in shown.output
    assert "FAILED" not in shown.output


def test_verify_finds_a_mismatch(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def badly(*args: object, **kwargs: object) -> Decoder:
        model = hub.load(*args, **kwargs)
        with torch.no_grad():
            model.blocks[0].mlp.b_out[0] += 10
        return model

    monkeypatch.setattr("hooked_lm.hub.compare.load", badly)
    shown = call("verify", checkpoint)
    assert shown.exit_code == 1
    assert re.search(r"logits as in transformers.*FAILED", shown.output)
    shown = call("verify", checkpoint, "--json")
    assert (shown.exit_code, json.loads(shown.stdout)["ok"]) == (1, False)


def test_models() -> None:
    shown = call("models")
    assert shown.exit_code == 0
    head, *rows = re.findall(r"^\W*(\w[\w-]*)\W+(class|Hooked\w+)", shown.output, re.MULTILINE)
    assert head == ("model_type", "class")
    assert [model_type for model_type, _ in rows] == sorted(hub.supported(*families.CLASSES.values()))
    assert dict(rows)["gpt2"] == "HookedTransformer"
    assert dict(rows)["llava"] == "HookedVisionLanguage"
    assert dict(rows)["vit"] == "HookedVisionEncoder"
    [gpt2] = [row for row in from_json("models")["models"] if row["model_type"] == "gpt2"]
    assert gpt2 == {"model_type": "gpt2", "classes": ["HookedTransformer"], "models": "GPT-2 small to XL, DistilGPT-2"}


@pytest.mark.slow
def test_missing_models() -> None:
    """With each its reason; no reason names a model that there is, or that transformers has not."""
    shown = call("models", "--missing")
    assert shown.exit_code == 0
    found = missing()
    assert {line.split("│")[0].strip() for line in shown.output.splitlines() if "│" in line} - {""} == set(found)
    named = [
        model_type for table in (REASONS, NOT_BUILT) for model_types in table.values() for model_type in model_types
    ]
    assert len(named) == len(set(named))
    assert set(named) & set(hub.supported()) == set(), "they load now: take them out of hooked_lm/hub/unsupported.py"
    assert set(named) <= set(found), "no such type in transformers"
    assert found["xlnet"].startswith("its text model in transformers is not causal")
    assert found["beam"] == "not yet: a residual stream that is scaled at every sum"


# ---- the program -----------------------------------------------------------------------------------------------------


def test_version() -> None:
    shown = call("--version")
    assert (shown.exit_code, shown.output.strip()) == (0, f"hooked-lm {hooked_lm.__version__}")


def test_the_package_is_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "hooked_lm", "--version"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert shown.stdout.startswith("hooked-lm ")


def test_without_typer_the_command_says_what_to_install() -> None:
    script = "import sys; sys.modules['typer'] = None; from hooked_lm.__main__ import main; main()"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert shown.returncode == 1
    assert shown.stderr == "failed: this needs the package typer: pip install 'hooked-lm[cli]'\n"


def test_help_models_and_completion_do_not_wait_for_torch() -> None:
    script = (
        "import sys\n"
        "from hooked_lm.cli import app\n"
        "from hooked_lm.cli.options import models_to_complete\n"
        "app(['--help'], standalone_mode=False)\n"
        "app(['models'], standalone_mode=False)\n"
        "print(models_to_complete('gpt2-'))\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'plotly', 'pandas')))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    for word in ("demo", "verify", "models", "gpt2", "llama", "HookedTransformer", "'gpt2-medium'"):
        assert word in shown.stdout


def test_names_of_models_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models--org--own-model").mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for words, expected in {
        "lens de": ["demo"],
        "sites org/": ["org/own-model"],
        "verify gpt2-x": ["gpt2-xl", "gpt2-xs"],
        "lens ./": [],  # a path, which the shell completes
    }.items():
        line = {"COMP_WORDS": f"hooked-lm {words}", "COMP_CWORD": "2", "_HOOKED_LM_COMPLETE": "complete_bash"}
        shown = CliRunner().invoke(app, [], env=line, prog_name="hooked-lm")
        assert (shown.exit_code, shown.output.split()) == (0, expected)


# ---- conversations ---------------------------------------------------------------------------------------------------

TURNS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_conversation_in_a_file_is_a_prompt(tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    messages = [{"role": "user", "content": " The capital of France is"}]
    file.write_text(json.dumps({"messages": messages, "chat_template": TURNS}))
    done = json.loads(call("generate", "demo", f"@{file}", "--greedy", "--max-new-tokens", 3, "--json").stdout)
    model = HookedTransformer.from_pretrained("demo")
    chat = model.chat(messages, add_generation_prompt=True, chat_template=TURNS)
    assert done["text"] == chat.reply(model, 3, do_sample=False, verbose=False).of({"turn": 1})
    shown = json.loads(call("lens", "demo", f"@{file}", "--json").stdout)
    assert shown["tokens"] == list(chat.str_tokens[0])
    file.write_text(json.dumps({"message": messages}))
    assert "a mapping with 'messages'" in call("lens", "demo", f"@{file}").stderr
    assert "there is no such file" in call("lens", "demo", "@missing.json").stderr
