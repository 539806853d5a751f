"""The notebooks of `demos/` run from top to bottom, what their texts state is true, and what they use of the library exists.

The statements are in the metadata of the text's cell (`docs/notebooks.py`). Bounds are wide enough for the rounding of other
processors.
"""

import ast
import builtins
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from tests.demo.notebook_names import Names

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "docs"))

from notebooks import NOTEBOOKS, ROW, facts, output_to_html, picture, run, store  # noqa: E402

LONGEST = 90  # seconds of one core for a whole notebook
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs_and_its_facts_hold(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert run(notebook) < LONGEST
    store(path, notebook)  # for the documentation
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs), "it shows no figure"
    assert output_to_html(picture(notebook)), "no picture for the gallery"


@pytest.mark.slow
def test_a_wrong_fact_is_found_and_says_what_is_true() -> None:
    code = nbformat.v4.new_code_cell("answers = [3, 4]")
    for fact, found in (("sum(answers) == 7", None), ("2 * answers[0] > sum(answers)", r"sum\(answers\)', \[6, 7\]")):
        notebook = nbformat.v4.new_notebook(cells=[code, nbformat.v4.new_markdown_cell("", metadata={"facts": [fact]})])
        if found is None:
            assert run(notebook) > 0
        else:
            with pytest.raises(CellExecutionError, match=found):
                run(notebook)


@every_notebook
def test_a_notebook_states_facts_about_what_is_above_them(path: Path) -> None:
    assigned, n_facts = set(dir(builtins)), 0
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            assert not facts(cell), "facts belong to the text that states them"
            nodes = list(ast.walk(ast.parse(cell.source)))
            assigned |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            assigned |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
            assigned |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        for fact in facts(cell):
            nodes = list(ast.walk(ast.parse(fact, mode="eval")))
            inside = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            used = {node.id for node in nodes if isinstance(node, ast.Name)}
            assert used <= assigned | inside, fact
            n_facts += 1
    assert n_facts >= 3


@every_notebook
def test_what_a_notebook_uses_of_the_library_exists(path: Path) -> None:
    names = Names()
    for cell in nbformat.read(path, as_version=4).cells:
        for code in [cell.source] if cell.cell_type == "code" else facts(cell):
            names.visit(ast.parse(code))
    assert names.problems == []
    assert names.n_checked > 0


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("from hooked_lm import patchign", "No module named 'hooked_lm.patchign'"),
        ("viz.heat_map([[1.0]])", "hooked_lm.viz.heat_map"),
        ("viz.heatmap([[1.0]], labels=['a'])", "heatmap: got an unexpected keyword argument 'labels'"),
        ("HookedTransformer.from_pretraned('demo')", "HookedTransformer.from_pretraned"),
        ("with model.hoks([]):\n    pass", "HookedTransformer().hoks"),
        ("model.run_with_cache('a').mean", None),
        ("patching.sweep(model, 'a', 'b', metric=len).effects().mean_over()", "SweepResult().mean_over"),
        ("patching.sweep(model)", "sweep: missing a required argument: 'corrupted'"),
        ("def f(viz):\n    viz.anything()", None),
    ],
)
def test_names_that_do_not_exist_are_found(line: str, problem: str | None) -> None:
    before = (
        "from hooked_lm import HookedTransformer, patching, viz\nmodel = HookedTransformer.from_pretrained('demo')\n"
    )
    names = Names()
    names.visit(ast.parse(before + line))
    assert names.problems == ([] if problem is None else [problem])


def test_the_readme_and_the_documentation_list_every_notebook() -> None:
    rows = ROW.findall((ROOT / "README.md").read_text())
    assert rows == ROW.findall((ROOT / "docs" / "notebooks.md").read_text())
    assert sorted(name for name, _ in rows) == [path.stem for path in NOTEBOOKS]
    tour = (ROOT / "demos" / "main_tour.ipynb").read_text()
    assert [name for name, _ in rows if name != "main_tour" and f"({name}.ipynb)" not in tour] == []


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
