"""The notebooks of `demos/` run from top to bottom."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "demos").glob("*.ipynb"))
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
LONGEST = 300  # seconds of one cell; whole notebooks take a minute at most on one core


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=LONGEST, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs), "it shows no figure"


@every_notebook
def test_a_notebook_is_stored_valid_without_outputs_and_with_ids(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@every_notebook
def test_a_notebook_begins_with_a_title_and_says_what_to_change_for_another_model(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    assert re.search(r"\b(change|replace)\b", "\n".join(cell.source for cell in cells[:3]), re.IGNORECASE)


@every_notebook
def test_the_links_of_a_notebook_lead_to_other_notebooks(path: Path) -> None:
    texts = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", "\n".join(texts))
    assert [target for target in targets if not (path.parent / target).exists()] == []
