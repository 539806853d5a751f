"""From prompts to a circuit: the indirect-object task on the bundled model.

    python demos/circuit.py [report.html]

Every method attributes nodes and edges and is compared with exact patching. Then the edges that the task needs are found,
evaluated and drawn. It takes about a minute.
"""

import sys
import time
import warnings

import pandas as pd

from hooked_lm import HookedTransformer
from hooked_lm.analysis import attribute, attribute_edges
from hooked_lm.demo import experiment
from hooked_lm.reports import circuit

NODES = ("gradient", "ig-inputs", "ig-activations", "atp*")
EDGES = ("eap", "eap-ig-inputs", "eap-ig-activations")


def main(report: str = "hooked_lm_circuit.html") -> None:
    """Runs everything, prints the results, writes the report."""
    model = HookedTransformer.from_pretrained("demo")
    pairs = experiment.prompt_pairs(8)
    task = circuit.Task(
        *([getattr(pair, name) for pair in pairs] for name in ("clean", "corrupted", "answer", "wrong_answer"))
    )
    print(f"{task.clean[0]!r} -> {task.answers[0]!r}, and {len(pairs) - 1} more pairs like this one\n")
    print(agreement(model, task).to_string(index=False, float_format=lambda number: f"{number:.2f}"))

    study = circuit.find(model, task)
    print("\n" + "\n".join(f"{name}: {value}" for name, value in study.facts.items()))
    print(study.evaluation.to_dataframe().to_string(index=False, float_format=lambda number: f"{number:.2f}"))
    print(f"\nreport: {circuit.write_report(study, report).resolve()}")


def agreement(model: HookedTransformer, task: circuit.Task) -> pd.DataFrame:
    """Each method's agreement with exact patching, and its time in seconds without the exact patching."""
    prompts = {"corrupted": list(task.corrupted), "clean": list(task.clean), "metric": task.metric(model)}
    heads = {"sites": ["z", "q", "k"], "positions": None, "heads": "each", "progress": False}
    rows = []
    for methods, run, options in ((NODES, attribute, heads), (EDGES, attribute_edges, {})):
        for method in methods:
            started = time.perf_counter()
            run(model, method=method, check=False, **prompts, **options)
            seconds = time.perf_counter() - started
            found = run(model, method=method, check=True, **prompts, **options)
            table = found.agreement.to_dict("records")
            rows += [{"of": row.get("site", "edges"), "method": method, **row, "seconds": seconds} for row in table]
    return pd.DataFrame(rows).drop(columns="site")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:])
