"""Runs the leaderboards of docs/leaderboard.md, and writes the page and the boards beside it, `leaderboard_*.safetensors`.

`make docs` runs it (minutes); a test checks that the page shows these boards.
"""

import sys
import textwrap
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from hooked_lm import planted  # noqa: E402
from hooked_lm.analysis import Leaderboard, leaderboard  # noqa: E402
from hooked_lm.demo.tasks import tasks  # noqa: E402

PAGE = HERE / "leaderboard.md"
N_PAIRS = 24  # of a task of the bundled model
WIDTH = 126
KINDS = ("demo", "planted")
MEASURED = (
    "sparse-closing",
)  # planted models whose truth is what exact patching found: not in means of areas for the truth
COLUMNS = {  # of the table: their heads, and how many digits
    "cpr": ("CPR", 3),
    "cmd": ("CMD", 3),
    "spearman": ("rank correlation", 2),
    "sign": ("right signs", 2),
    "slope": ("slope", 2),
    "auroc": ("AUROC", 2),
    "average_precision": ("average precision", 2),
    "cmd_untrained": ("CMD, untrained", 2),
    "auroc_untrained": ("AUROC, untrained", 2),
    "passes": ("passes", 0),
}
HEAD = """# Leaderboard

Many methods rank the edges of a model for a task, and none is best everywhere. This page compares those of the library: by
the circuits of the edges that they rank first, by exact patching of every edge, and by circuits that are known. `make docs`
runs it; a method that is added to the library has a row in the next run.

```python
from hooked_lm.analysis import leaderboard
from hooked_lm.demo.tasks import tasks

some = tasks(names=["agreement", "capitals"], n=8)
methods = ["exact", "eap", "random"]
board = leaderboard(some, methods, untrained=False, progress=False)
board.to_dataframe()[["method", "cpr", "cmd", "spearman", "passes"]]
```
<!-- fact: board.methods == ["exact", "eap", "random"] -->
<!-- fact: board.to_dataframe()["method"].iloc[-1] == "random" -->

The curves are the faithfulness of circuits of the best edges, from a thousandth to all of them:

```python
figure = board.plot()
```

```python
figure = board.plot_cost()
```

`board.write_html(path)` writes a page with all of it and a section for each task, `board.to_dataframe(per_task=True)` has its
numbers, and [`hooked-lm leaderboard`](command-line.md#leaderboard) does the same from a shell.

## What is measured

Each task has pairs of prompts, of which one half is searched. Circuits of .1, .2, .5, 1, 2, 5, 10, 20, 50 and 100 % of the
edges run on the other half. Other edges carry their values from the corrupted prompts.

- **CMD** and **CPR** are those of MIB's circuit track (arXiv:2504.13151), each of its own curve of faithfulness over the share
  of edges. For CMD edges come by the size of their scores, and the number is the area between the curve and 1: less is better,
  0 is the model. For CPR the edges without which the metric falls most come first, and the number is the area under the curve:
  more is better, and more than 1 is possible, as edges that lower the metric come last. Random edges and methods whose scores
  have no sign have one order for both. On the same scores both are the numbers of MIB's code to 1e-6. Figures show the curve
  of CMD.
- **Rank correlation**, **right signs** and **slope** compare the scores with exact patching of each edge alone. The slope is
  1 if sizes are right.
- **AUROC** and **average precision** compare them with the edges of a [planted](api/hooked_lm.planted.md) circuit.
- **Untrained** columns are a control: the method ranks the edges of the model's untrained twin, and circuits of that ranking
  run in the model. What such a ranking finds needs no training to be found: it knows which edges carry what differs between
  the prompts.
- **Passes** are forward and backward passes of the model over all pairs of a task.

MIB takes the best edges, and drops those on no path from input to logits. So the smallest circuits are mostly empty, and
random edges are a weak floor. Equal scores are in the order of the graph, and a method whose scores are all equal is named in
a warning: it ranks nothing. `selection="paths"` takes edges until so many are on paths, as
[`circuits.evaluate`](attribution.md#circuits) does. Intervals are over tasks.
"""
DEMO = """
## The bundled model

{n_tasks} tasks: {tasks}. {n_pairs} pairs each, a half of them searched; no two have the same clean prompt. {n_edges:,} edges.

{table}

```python
from hooked_lm.analysis import Leaderboard

of_demo = Leaderboard.load("leaderboard_demo.safetensors")  # a file beside this page
figure = of_demo.plot()
```

```python
figure = of_demo.plot_cost()
```

{twin}

{failures}
"""
PLANTED = """
## Planted circuits

{n_tasks} small [models whose circuits are known](api/hooked_lm.planted.md): {tasks}.

{table}

```python
of_planted = Leaderboard.load("leaderboard_planted.safetensors")
figure = of_planted.plot()
```

Some of these models have few prompts, so that held-out clean prompts were also searched, beside other corrupted ones: of 24,
21 of `and-gate` and `or-gate`, 13 of `brackets`, 9 of `xor-gate`, 3 of `facts` and 1 of `distractor`. The truth of
`sparse-closing` was measured by exact patching, which favours "exact": the means of AUROC and average precision leave it out.
RelP is the plain gradient on all of these models: they have neither norms nor gated MLPs, and for ReLU its ratio of output to
input is the derivative.

An AUROC of about .7 takes no training. Edges from the input and edges into the logits are large in any network, and here they
are 71 % of the true edges and 41 % of all: to rank them before the others, with no score at all, has a mean AUROC of .66. The
untrained column is the floor to compare with, not .5.

The AUROC of each model says where a method fails:

{by_task}

Two kinds of circuits divide the methods. Saturated attention has no gradient: where a head attends to one token alone, the
plain gradient is blind to its queries and keys, and means over runs in between are not. And edges that stand in for each
other (`or-gate`, `redundancy`, `backup`) have no effect alone: exact patching of single edges misses them, and so does a
gradient at the clean prompt, while gradients in between see what each would do without the other. So exact effects of single
edges are the reference for estimates of these effects, and no ceiling for circuits.

{failures}
"""
TAIL = """
## A method of your own

A method is a function of a model and pairs. It returns measured effects, a circuit with scores, or a tensor [writer, reader]:

```python
from hooked_lm import planted
from hooked_lm.analysis import attribute_edges


def both_ways(model, pairs):
    one, other = (
        attribute_edges(model, pairs, direction=way, check=False).effects().mean
        for way in ("noise", "denoise")
    )
    return (one - other) / 2


example = planted.load("induction")
board = leaderboard(example, {"both ways": both_ways}, untrained=False)
print(board.to_text())
```
<!-- fact: board.methods == ["both ways"] -->

## Other ablations

`replace_with=` says what edges outside a circuit carry: "corrupted" (resample ablation), "mean" (over the corrupted prompts at
each position), "constant" (over these prompts and all positions), "zero", or "optimal": constants that are learnt, so that
circuits are least wrong
([`circuits.optimal_constants`][hooked_lm.analysis.circuits.optimal_constants]; arXiv:2409.09951). They are learnt from the
pairs that are searched, and from few pairs they learn the answers themselves. MIB has means like these two,
"mean-positional" and "mean", but takes them over clean texts, so the numbers are others.

## Circuits as MIB has them

[`circuits.to_mib`][hooked_lm.analysis.circuits.to_mib] writes a circuit with its scores as the JSON of MIB's circuit track,
which the code of EAP-IG reads, and [`circuits.from_mib`][hooked_lm.analysis.circuits.from_mib] reads one. In these files edges
that the answer needs have positive scores, so effects of ablation change their sign.

## Where next

- [Attribution and circuits](attribution.md): the methods.
- [Command line](command-line.md#leaderboard): the leaderboard without a program.
"""


def run(kind: str) -> Leaderboard:
    """The leaderboard of the bundled model, or of planted ones."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* cells run as whole forward passes")
        warnings.filterwarnings("ignore", ".* held-out clean prompts of task")  # of planted models with few prompts
        if kind == "demo":
            return leaderboard(tasks(n=N_PAIRS))
        return leaderboard([planted.load(name) for name in planted.names()])


def file_of(kind: str) -> Path:
    return HERE / f"leaderboard_{kind}.safetensors"


def table(board: Leaderboard) -> str:
    """The methods, the best first."""
    found = board.to_dataframe()
    known = [place for place, task in enumerate(board.tasks) if task.name not in MEASURED]
    for name in ("auroc", "average_precision"):
        for column, untrained in ((name, False), (f"{name}_untrained", True)):
            if column in found:
                means = board.column(name, untrained)[known].nanmean(0).tolist()
                found[column] = found["method"].map(dict(zip(board.methods, means, strict=True)))
    names = [name for name in COLUMNS if name in found]
    lines = ["| method | " + " | ".join(COLUMNS[name][0] for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in found.to_dict("records"):
        cells = [number(row[name], COLUMNS[name][1]) for name in names]
        for name in ("cpr", "cmd"):
            low, high = (number(row[f"{name}_{end}"], 3) for end in ("low", "high"))
            cells[names.index(name)] += f" ({low} to {high})"
        lines.append(f"| {row['method']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float, digits: int) -> str:
    """A number with as many digits, without a zero before the point."""
    if value != value:
        return ""
    text = f"{value:,.{digits}f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def by_task(board: Leaderboard) -> str:
    """The AUROC of each method on each model."""
    found = board.column("auroc")
    lines = ["| model | " + " | ".join(board.methods) + " |", "|---" * (len(board.methods) + 1) + "|"]
    for task, row in zip(board.tasks, found.tolist(), strict=True):
        lines.append(f"| {task.name} | " + " | ".join(number(value, 2) for value in row) + " |")
    return "\n".join(lines)


def failures(board: Leaderboard) -> str:
    """Where each method is worse than exact patching, in words, by task."""
    found = board.failures()
    if not len(found):
        return "The CMD of no method is above that of exact patching on any task, by an interval that excludes 0."
    lines = []
    for method in (name for name in board.methods if name in set(found["method"])):
        rows = found[found["method"] == method]
        each = [f"{row['task']} ({number(row['worse'], 3)})" for row in rows.to_dict("records")]
        lines.append(f"- **{method}**: {', '.join(each)}")
    head = "The CMD of these is above that of exact patching on the same prompts, by this much; intervals at once exclude 0:"
    return head + "\n\n" + "\n".join(lines)


def of_twin(board: Leaderboard) -> str:
    """What rankings of the untrained twin find, in words."""
    trained, twin = (board.column("cmd", untrained) for untrained in (False, True))
    random = float(trained[:, board.methods.index("random")].mean())
    best = torch.nan_to_num(twin, nan=torch.inf).mean(0).min()
    return (
        f"Circuits of the untrained twin's rankings have a CMD of {number(float(best), 2)} at best, those of random edges "
        f"{number(random, 2)}. So much of what a curve shows is which edges carry a difference of the prompts at all, and "
        "to know that takes no training. What a method knows of the model is what it finds beyond its twin."
    )


def page(boards: dict[str, Leaderboard]) -> str:
    """The content of docs/leaderboard.md."""
    facts = {}
    for kind, board in boards.items():
        names = ", ".join(f"`{task.name}`" for task in board.tasks)
        facts[kind] = {"n_tasks": len(board.tasks), "tasks": names, "table": table(board), "failures": failures(board)}
    n_edges = boards["demo"].tasks[0].n_edges[0][-1]
    demo = DEMO.format(**facts["demo"], n_pairs=N_PAIRS, n_edges=n_edges, twin=of_twin(boards["demo"]))
    of_planted = PLANTED.format(**facts["planted"], by_task=by_task(boards["planted"]))
    return HEAD + folded(demo) + folded(of_planted) + TAIL


def folded(text: str) -> str:
    """A text with its long lines folded, but for those of tables."""
    lines = [
        [line] if line.startswith("|") else textwrap.wrap(line, WIDTH, break_on_hyphens=False) or [""]
        for line in text.splitlines()
    ]
    return "\n".join(line for some in lines for line in some) + "\n"


def main() -> None:
    boards = {}
    for kind in KINDS:
        boards[kind] = run(kind)
        boards[kind].save(file_of(kind))
    PAGE.write_text(page(boards), encoding="utf-8")


if __name__ == "__main__":
    main()
