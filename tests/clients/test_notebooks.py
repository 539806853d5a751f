"""The runner of notebooks that were written for TransformerLens."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from notebook_checkpoints import named
from notebook_outputs import differences
from notebooks import replaced, slower

CELLS = (
    "%pip install transformer_lens\nimport torch\nfrom transformer_lens import HookedTransformer",
    "if torch.cuda.is_available():\n    !nvidia-smi\nmodel = HookedTransformer.from_pretrained('gpt2-small')",
    "assert model.cfg.n_layers == 12 and len(model.to_str_tokens('When Mary and John', prepend_bos=False)) == 4",
    "raise ValueError('on purpose')",
    "_, cache = model.run_with_cache('When Mary and John')\nassert 'blocks.11.attn.hook_z' in cache",
    "toy = HookedTransformer.from_pretrained('attn-only-2l', checkpoint_index=3)\nprint(toy.cfg.checkpoint_value)",
    "print(torch.rand(1), model('When Mary', return_type='loss'))",
)
ORIGINAL = Path(sys.prefix) / "transformer-lens-3.9.0"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the runner says of these cells, run with this package and with TransformerLens."""
    folder = tmp_path_factory.mktemp("notebooks")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "theirs.ipynb")
    command = [sys.executable, str(Path(__file__).with_name("notebooks.py")), str(folder), "--against", str(ORIGINAL)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert found.returncode == 1, found.stderr
    assert [path.name for path in folder.iterdir()] == ["theirs.ipynb"]
    return found.stdout.splitlines()


@pytest.mark.slow
def test_a_notebook_runs_on_checkpoints_of_random_weights(report: list[str]):
    assert report[:3] == [
        "theirs: 6 of 7 cells ran, 2 of them changed by rules",
        "  installs or runs in a shell: cells 1, 2",
        "  cell 4: ValueError: on purpose",
    ]


@pytest.mark.slow
def test_the_same_notebook_runs_with_the_original(report: list[str]):
    assert report[3:] == ["  with TransformerLens, cell 4: ValueError: on purpose"]


def test_rules_replace_lines_and_say_so():
    source = "!nvidia-smi\n  ipython.magic('autoreload 2')\nnum_epochs = 4000\nepochs = 30\nx != y"
    changed, names = replaced(source)
    assert changed == "pass\n  pass\nnum_epochs = 100\nepochs = 30\nx != y"
    assert names == ["installs or runs in a shell", "changes the editor", "trains at most 100 steps"]


def test_names_of_checkpoints_are_found_in_all_their_spellings():
    found = named(["gpt2-small", "solu-2l", "a text of several words", "unknown"])
    assert found == {
        *("gpt2", "openai-community/gpt2"),
        *("NeelNanda/SoLU_2L512W_C4_Code", "NeelNanda/gpt-neox-tokenizer-digits"),
    }


def printed(*texts: str) -> list[nbformat.NotebookNode]:
    stream = [nbformat.v4.new_output("stream", name="stdout", text=text) for text in texts]
    return [nbformat.v4.new_code_cell(outputs=[output]) for output in stream]


def test_outputs_may_differ_in_the_last_digit_that_is_printed():
    ours = printed("loss 0.312", "loss 0.312", "shape [2, 3]", "one")
    theirs = printed("loss 0.313", "loss 0.343", "shape [2, 4]", "two")
    found = differences(ours, theirs)
    assert list(found) == [2, 3, 4]
    assert found[2] == "the number 0.312, not 0.343"


def timed(*seconds: int) -> list[nbformat.NotebookNode]:
    event = "2026-01-01T00:00:{:02d}.000000Z"
    times = [{"iopub.execute_input": event.format(0), "shell.execute_reply": event.format(end)} for end in seconds]
    return [nbformat.v4.new_code_cell(metadata={"execution": time}) for time in times]


def test_cells_that_took_much_longer_are_slower():
    assert slower(timed(1, 3, 20, 40), timed(0, 1, 30, 20)) == {2: "3.0 s, not 1.0 s", 4: "40.0 s, not 20.0 s"}
    assert not slower([nbformat.v4.new_code_cell()], timed(0))
