"""The notebooks of `demos/` as pages: they are stored without outputs, run once for each state of the package, and rendered.

What the texts of a notebook state is in the metadata of their cells, as expressions over the variables of the cells above:
`"facts": ["scores[2, 3] > 0.9"]`. Readers do not see them. An expression that is not true is an error.

What they show is drawn for the gallery from the cell whose metadata say `"picture": true`.
"""

import ast
import hashlib
import json
import os
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from snippets import Shown, figure_to_html, text_to_html

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "demos").glob("*.ipynb"))
STORE = ROOT / "build" / "notebooks"
KERNEL = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
FIGURE = "application/vnd.plotly.v1+json"
ROW = re.compile(r"^\| \[(\w+)\]\((?:\.\./)?demos/\1\.ipynb\) \| (.+) \|$", flags=re.M)
TABLE = re.compile(r"^\| notebook \|.*\n(?:\|.*\n)+", flags=re.M)


def facts(cell: nbformat.NotebookNode) -> list[str]:
    """What a text states about the cells above it."""
    return cell.metadata.get("facts", [])


def checking(fact: str) -> nbformat.NotebookNode:
    """A cell that raises an error if the fact is false: with the values of its terms, if it is a comparison."""
    tree = ast.parse(fact, mode="eval").body
    terms = [tree.left, *tree.comparators] if isinstance(tree, ast.Compare) else []
    return nbformat.v4.new_code_cell(f"assert {fact}, ({fact!r}, [{', '.join(map(ast.unparse, terms))}])")


def run(notebook: nbformat.NotebookNode) -> float:
    """Runs the cells of a notebook in an empty folder, which puts their outputs into it, and checks its facts.

    Returns the seconds of one core.
    """
    cells = [(cell, *map(checking, facts(cell))) for cell in notebook.cells]
    clock = nbformat.v4.new_code_cell("import time\nprint(time.process_time())")
    checked = nbformat.v4.new_notebook(cells=[*(cell for group in cells for cell in group), clock])
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(checked, timeout=300, resources={"metadata": {"path": folder}}).execute(env=KERNEL)
    return float(clock.outputs[0].text)


@cache
def of_package() -> bytes:
    """A digest of the package and of the versions of other packages, on which the outputs depend."""
    package = (path for path in (ROOT / "hooked_lm").rglob("*") if path.is_file() and path.suffix != ".pyc")
    read = (path.read_bytes() for path in (ROOT / "constraints.txt", *sorted(package)))
    return hashlib.sha256(b"".join(hashlib.sha256(data).digest() for data in read)).digest()


def made_of(path: Path) -> str:
    """A digest of the notebook and of what its outputs depend on."""
    return hashlib.sha256(of_package() + path.read_bytes()).hexdigest()


def store(path: Path, notebook: nbformat.NotebookNode) -> None:
    """Keeps a notebook that ran."""
    notebook.metadata.made_of = made_of(path)
    STORE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=STORE) as folder:
        nbformat.write(notebook, Path(folder) / path.name)
        os.replace(Path(folder) / path.name, STORE / path.name)


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, from build/notebooks/ unless it or the package has changed since it ran."""
    if (STORE / path.name).exists():
        stored = nbformat.read(STORE / path.name, as_version=4)
        if stored.metadata.made_of == made_of(path):
            return stored
    notebook = nbformat.read(path, as_version=4)
    run(notebook)
    store(path, notebook)
    return notebook


@cache
def all_executed() -> dict[str, nbformat.NotebookNode]:
    """Every notebook by its name, with its outputs; two run at a time."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip((path.stem for path in NOTEBOOKS), pool.map(executed, NOTEBOOKS), strict=True))


def output_to_html(output: nbformat.NotebookNode) -> str:
    """An output as HTML: a figure of plotly, HTML or text; nothing for progress bars and warnings."""
    if output.output_type == "stream":
        return text_to_html(output.text) if output.name == "stdout" else ""
    if FIGURE in output.data:
        return figure_to_html(json.dumps(output.data[FIGURE]))
    return output.data.get("text/html") or text_to_html(output.data["text/plain"])


def picture(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The output of a notebook that is its picture in the gallery."""
    [cell] = [cell for cell in notebook.cells if cell.metadata.get("picture")]
    return next(output for output in cell.outputs if output.output_type != "stream")


def to_page(name: str, notebook: nbformat.NotebookNode) -> tuple[str, list[str]]:
    """A notebook as Markdown, and what each of its blocks of code shows, as HTML."""

    def written(cell: nbformat.NotebookNode) -> str:
        if cell.cell_type == "code":
            return f"```python\n{cell.source}\n```"
        return re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", cell.source).replace("](../docs/", "](../")

    first, *others = map(written, notebook.cells)
    text = "\n\n".join([first, f"[Download this notebook]({name}.ipynb)", *others]) + "\n"
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return text, [Shown(value="".join(map(output_to_html, cell.outputs))).to_html() for cell in cells]


def gallery(notebooks: dict[str, nbformat.NotebookNode]) -> str:
    """A grid of cards, one for each row of the table of docs/notebooks.md: a notebook's picture, its title, what one learns."""
    cards = []
    for name, about in ROW.findall((ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")):
        image, title = f"images/notebooks/{name}", notebooks[name].cells[0].source.partition("\n")[0].removeprefix("# ")
        pictures = f"![]({image}.png#only-light)![]({image}-dark.png#only-dark)"
        cards.append(f"-   [{pictures} **{title}**](demos/{name}.md)\n\n    {about}\n")
    return '<div class="grid cards gallery" markdown>\n\n' + "\n".join(cards) + "\n</div>\n"
