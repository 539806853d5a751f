"""`python tests/clients/notebooks.py FOLDER`: runs notebooks that were written for TransformerLens, and counts their cells.

FOLDER may also be one notebook. Each runs in a kernel whose `transformer_lens` is this package, in its own directory.
The names of checkpoints in the notebooks lead to narrow models of random weights (`notebook_checkpoints.py`) in a cache of
the hub of their own, so nothing is downloaded. The files are not changed: rules (`RULES`, `STAND_INS`) replace what needs a
network, an editor or hours, and the report names the cells that each rule changed. A cell that raises an error does not end
the notebook: the report names the cell, and its error. The exit status is 1 if a cell of any notebook failed.

With `--against DIRECTORY`, where TransformerLens itself is installed, each notebook runs a second time with it, with the same
random numbers, and the report also names the cells that print other text or draw other numbers there, and those that are
slower here.
"""

import argparse
import ast
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from notebook_checkpoints import checkpoints_of
from notebook_outputs import differences

# ---- what is replaced ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """Lines of cells that are replaced: what the rule is called in reports, and the pattern and its replacement."""

    name: str
    pattern: str
    replacement: str


EPOCHS = 100
RULES = (
    Rule("installs or runs in a shell", r"^(\s*)(!|%(pip|conda|sx|system)\b|%%bash).*", r"\1pass"),
    Rule("changes the editor", r"^(\s*)(%|ip(ython)?\.(magic|run_line_magic|extension_manager)).*", r"\1pass"),
    Rule("shows progress as text", r"\btqdm\.notebook\b", "tqdm.std"),
    Rule("chooses where figures are drawn", r"(renderers\.default = ).*", r'\1"json"'),
    Rule(f"trains at most {EPOCHS} steps", r"^(\s*(?:num_|n_)?(?:epochs|steps) = )(?!\d{1,2}\b)\d+", rf"\g<1>{EPOCHS}"),
)
# Packages without which a notebook can be followed: what they do is replaced where they are not installed.
STAND_INS = ("gradio", "neel_plotly", "pysvelte", "circuitsvis", "torchtyping")
PRELUDE = Path(__file__).with_name("notebook_prelude.py")


def replaced(source: str) -> tuple[str, list[str]]:
    """The cell by the rules, and the names of those that changed it."""
    names = []
    for rule in RULES:
        source, count = re.subn(rule.pattern, rule.replacement, source, flags=re.MULTILINE)
        names += [rule.name] * bool(count)
    missing = [name for name in STAND_INS if importlib.util.find_spec(name) is None]
    used = [name for name in missing if re.search(rf"^\s*(import|from) {name}\b", source, re.MULTILINE)]
    return source, names + [f"stand-in for {name}" for name in used]


# ---- notebooks -------------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """A notebook that ran: its code cells with outputs, the errors by cell, and the cells that each rule changed."""

    name: str
    cells: list[nbformat.NotebookNode]
    errors: dict[int, str] = field(default_factory=dict)
    rules: dict[str, list[int]] = field(default_factory=dict)

    def __str__(self) -> str:
        changed = {number for numbers in self.rules.values() for number in numbers}
        count = f"{len(self.cells) - len(self.errors)} of {len(self.cells)} cells ran"
        lines = [
            f"{self.name}: {count}, {len(changed)} of them changed by rules" if changed else f"{self.name}: {count}"
        ]
        lines += [f"  {rule}: cells {', '.join(map(str, numbers))}" for rule, numbers in self.rules.items()]
        return "\n".join([*lines, *(f"  cell {number}: {error}" for number, error in self.errors.items())])


def run(path: Path, seconds: int, original: Path | None = None) -> Ran:
    """Runs a notebook in its own directory, with the package in `original` instead of this one if it is given."""
    notebook = nbformat.read(path, as_version=4)
    ran = Ran(path.stem, [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()])
    for number, cell in enumerate(ran.cells, 1):
        cell.source, rules = replaced(cell.source)
        cell.outputs = []
        for rule in rules:
            ran.rules.setdefault(rule, []).append(number)
    prelude = f"{PRELUDE.read_text()}\nprepare({str(original or '')!r}, {STAND_INS!r})"
    notebook.cells = [nbformat.v4.new_code_cell(prelude), *ran.cells]
    options = {"timeout": seconds, "allow_errors": True, "interrupt_on_timeout": True, "kernel_name": "python3"}
    with tempfile.TemporaryDirectory() as place:
        NotebookClient(notebook, resources={"metadata": {"path": place}}, **options).execute()
    for number, cell in enumerate(notebook.cells):
        for error in (output for output in cell.outputs if output.output_type == "error"):
            ran.errors[number] = f"{error.ename}: {error.evalue.strip().partition(chr(10))[0][:300]}"
    return ran


def seconds_of(cell: nbformat.NotebookNode) -> float:
    """The time that a cell ran."""
    times = cell.metadata.get("execution", {})
    started, ended = (times.get(event) for event in ("iopub.execute_input", "shell.execute_reply"))
    return (datetime.fromisoformat(ended) - datetime.fromisoformat(started)).total_seconds() if started and ended else 0


def slower(ours: list[nbformat.NotebookNode], theirs: list[nbformat.NotebookNode]) -> dict[int, str]:
    """Number of cell -> the times of both, of the cells that took more than a second longer, and half as long again."""
    times = [(seconds_of(one), seconds_of(other)) for one, other in zip(ours, theirs, strict=True)]
    return {
        number: f"{mine:.1f} s, not {other:.1f} s"
        for number, (mine, other) in enumerate(times, 1)
        if mine > max(other + 1, 1.5 * other)
    }


def texts_of(paths: list[Path]) -> Iterator[str]:
    """The strings in the code of notebooks, also with the space that precedes a word inside a text."""
    for path in paths:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type != "code":
                continue
            try:
                tree = ast.parse(replaced(cell.source)[0])
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield from (node.value, f" {node.value.strip()}")


def main(arguments: list[str]) -> int:
    """Runs the notebooks of a folder; 1 if a cell failed, or differs from what TransformerLens itself gives."""
    parser = argparse.ArgumentParser(prog="python tests/clients/notebooks.py", description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder of .ipynb files, or one of them")
    parser.add_argument("--seconds", type=int, default=600, help="the longest time of a cell")
    parser.add_argument(
        "--against", type=Path, metavar="DIRECTORY", help="also run with the transformer_lens of this directory"
    )
    given = parser.parse_args(arguments)
    paths = sorted(given.folder.glob("*.ipynb")) if given.folder.is_dir() else [given.folder]
    if not paths or not paths[0].is_file():
        parser.error(f"there are no notebooks in {given.folder}")
    failed = False
    with tempfile.TemporaryDirectory() as home:
        checkpoints_of(list(texts_of(paths)), Path(home))
        os.environ |= {"HF_HUB_CACHE": home, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        for path in paths:
            ours = run(path, given.seconds)
            print(ours, flush=True)
            failed |= bool(ours.errors)
            if given.against:
                theirs = run(path, given.seconds, given.against.resolve())
                lines = [f"  with TransformerLens, cell {number}: {error}" for number, error in theirs.errors.items()]
                found = differences(ours.cells, theirs.cells)
                failed |= bool(found)
                lines += [f"  differs, cell {number}: {what}" for number, what in found.items()]
                lines += [
                    f"  slower, cell {number}: {what}" for number, what in slower(ours.cells, theirs.cells).items()
                ]
                print("\n".join(lines or ["  the same with TransformerLens"]), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
