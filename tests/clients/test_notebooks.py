"""The runner of notebooks that were written for TransformerLens."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

CELLS = (
    "%pip install transformer_lens\nimport torch\nfrom transformer_lens import HookedTransformer",
    "if torch.cuda.is_available():\n    !nvidia-smi\nmodel = HookedTransformer.from_pretrained('gpt2-small')",
    "assert model.cfg.n_layers == 12 and len(model.to_str_tokens('When Mary and John', prepend_bos=False)) == 4",
    "raise ValueError('on purpose')",
    "_, cache = model.run_with_cache('When Mary and John')\nassert 'blocks.11.attn.hook_z' in cache",
)


@pytest.mark.slow
def test_a_notebook_runs_on_a_checkpoint_of_random_weights(tmp_path: Path):
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "theirs.ipynb")
    command = [sys.executable, str(Path(__file__).with_name("notebooks.py")), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert found.returncode == 1, found.stderr
    assert found.stdout.splitlines() == ["theirs: 4 of 5 cells ran", "  cell 4: ValueError: on purpose"]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.ipynb"]
