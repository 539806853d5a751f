"""The package works without pandas and plotly, and what needs them says how to install them."""

import subprocess
import sys

import pytest

from hooked_lm.extras import lazy_import, require_extra

WITHOUT_THEM = """
import pkgutil, sys
from importlib import import_module

sys.modules["pandas"] = sys.modules["plotly"] = None  # as if they were not installed

import torch
import hooked_lm
from hooked_lm import HookedTransformer, viz
from hooked_lm.results import Scores

for module in pkgutil.walk_packages(hooked_lm.__path__, "hooked_lm."):
    if "shim" not in module.name and not module.name.startswith(("hooked_lm.cli", "hooked_lm.__main__")):
        import_module(module.name)

assert torch.is_tensor(HookedTransformer.from_pretrained("demo")("Hello"))
scores = Scores(torch.rand(2, 3), {"layer": [0, 1]})
assert repr(scores).startswith("Scores(layer 2")
for needing in (scores.to_dataframe, scores.plot, lambda: viz.heatmap(torch.eye(2))):
    try:
        needing()
    except ImportError as error:
        print(error)
"""


@pytest.mark.slow
def test_without_pandas_and_plotly():
    run = subprocess.run([sys.executable, "-c", WITHOUT_THEM], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    pandas, *plotly = run.stdout.splitlines()
    assert pandas == "this needs the package pandas: pip install 'hooked-lm[viz]'"
    assert plotly == ["this needs the package plotly: pip install 'hooked-lm[viz]'"] * 2


WITHOUT_CORPUS = """
import json, sys

sys.modules["datasets"] = sys.modules["pyarrow"] = None  # as if they were not installed

from pathlib import Path
from typer.testing import CliRunner
from hooked_lm.cli import app
from typer.main import get_command

def call(*arguments):
    return CliRunner().invoke(app, [*arguments, "--json"])

pair = ["--clean", "Mary and John left, John", "--corrupted", "Mary and John left, Mary", "--answers", " Mary, John"]
how = ("tired", "late", "ill", "cold")
sides = {"positive": zip(("Mary", "Anna", "Amy", "Kate"), how), "negative": zip(("John", "Paul", "Tom", "Dan"), how)}
Path("texts.jsonl").write_text('{"text": "Mary left"}')
commands = {
    "attention": ["demo", "Mary left"],
    "cache": ["demo", "Mary left", "--site", "resid_post1", "--output", "cache.safetensors"],
    "circuit": ["demo", *pair, "--method", "eap"],
    "demo": ["--n-pairs", "1", "--output", "d.html"],
    "doctor": [],
    "generate": ["demo", "Mary left", "--max-new-tokens", "1"],
    "graph": ["demo", "Mary left", "--max-nodes", "10", "--check", "0"],
    "leaderboard": ["planted", "--tasks", "induction", "--methods", "eap"],
    "lens": ["demo", "Mary left"],
    "models": [],
    "patch": ["demo", *pair],
    "sites": ["demo"],
    "steer": ["demo", *(f"--{side}={name} was {how}, so" for side, names in sides.items() for name, how in names)],
    "verify": ["demo"],
}
for name, arguments in commands.items():
    done = call(name, *arguments)
    assert done.exit_code == 0, (name, done.output)
print(*sorted({*get_command(app).commands} - {*commands}))
for arguments in (
    ["harvest", "demo", "texts.jsonl", "out", "--site", "resid_post1"],
    ["patch", "demo", "--pairs", "texts.jsonl", "--output", "out"],
):
    done = call(*arguments)
    print(done.exit_code, json.loads(done.stdout)["error"]["message"])
"""


@pytest.mark.slow
def test_commands_need_no_datasets_but_for_files_of_documents_and_of_pairs(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_CORPUS], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr
    others, *refused = run.stdout.splitlines()
    assert others == "harvest mcp"  # mcp serves the others
    assert len(refused) == 2
    assert all(line.startswith("1 ") and "pip install 'hooked-lm[corpus]'" in line for line in refused)


def test_a_module_that_fails_by_itself_says_why(tmp_path, monkeypatch):
    (tmp_path / "needs_another.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        require_extra("needs_another", "viz")


def test_a_module_is_imported_when_it_is_used():
    module = lazy_import("no_such_package", "viz")
    assert not hasattr(module, "__wrapped__")
    with pytest.raises(ImportError, match=r"no_such_package: pip install 'hooked-lm\[viz\]'"):
        _ = module.name


LAZILY = """
import sys
import hooked_lm
names = [name for name in hooked_lm.__all__ if name[0].islower()]
assert not {"torch", "hooked_lm.pretrained", "hooked_lm.viz"} & {*sys.modules}
for name in names:
    getattr(hooked_lm, name)
print(*names)
"""


@pytest.mark.slow
def test_modules_are_there_when_they_are_used():
    """After `import hooked_lm`, which loads none of them."""
    run = subprocess.run([sys.executable, "-c", LAZILY], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    modules = "analysis harvest hooks hub interventions parallel patching planted pretrained results studies utils viz"
    assert {*modules.split(), "at", "load", "wrap"} == {*run.stdout.split()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["from_pretrained('demo').quantize('int8')", "from_pretrained_no_processing('demo').to_hf()"]
)
def test_packages_that_a_call_imports_log_nothing(call: str) -> None:
    """torchao logs kernels that it has none of for this machine; the level of its logger is as before."""
    code = f"import logging, hooked_lm\nhooked_lm.HookedTransformer.{call}\nprint(logging.getLogger('torchao').level)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
