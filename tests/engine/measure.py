"""Prints the error of the engine against one forward pass per cell: a row for each family, a column for each kind of site.

python -m tests.engine.measure [model_type ...]     (without names: all)
"""

import re
import sys

from tests.engine.exactness import MIXED, compared
from tests.families import DECODER_CASES

# A column and the sites in it, without their layer; the first that matches.
COLUMNS = {
    "stream": r"hook_resid_.*|hook_(attn|mlp|mixer)_in",
    "added": r"hook_(attn|mlp|mixer)_out",
    "inputs": r"hook_[qkv]_input",
    "norms": r"(ln\w*|norm)\.hook_\w+",
    "queries, keys, values": r"attn\.(hook_(rot_)?[qkv]\w*|[qkv]\w*_norm\.\w+|\w*(latent|compressed|kv|q)\w*(\.\w+)?)",
    "scores, patterns": r"attn\.hook_(attn_scores|pattern)",
    "z, results": r"attn\.(hook_z|hook_result|z_norm\.\w+)",
    "states": r"mixer\..*",
    "MLP, experts": r"(mlp|per_layer\w*|moe|shared\w*)\..*",
    "logits": r"(ln_final|unembed)\..*",
    "several": MIXED,
    "others": r".*",
}


def column(kind: str) -> str:
    """The column of a kind of site."""
    return next(name for name, pattern in COLUMNS.items() if re.fullmatch(pattern, kind))


def measured(family: str) -> dict[str, float]:
    """The largest relative difference of each column, over all configs of a family."""
    found: dict[str, float] = {}
    for seed, case in enumerate(case for case in DECODER_CASES if case.family == family):
        for kind, of in compared(case, seed).items():
            found[column(kind)] = max(found.get(column(kind), 0.0), of.difference)
    return found


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(names: list[str]) -> None:
    """A Markdown table of the named families, or of all; the last row is the maximum of each column."""
    rows = {name: measured(name) for name in names or dict.fromkeys(case.family for case in DECODER_CASES)}
    columns = [name for name in COLUMNS if any(name in row for row in rows.values())]
    rows["largest"] = {name: max(row.get(name, 0.0) for row in rows.values()) for name in columns}
    print(line(["family", *columns]))
    print(line(["---"] * (1 + len(columns))))
    for name, row in rows.items():
        print(line([name, *(f"{row[column]:.1e}" if column in row else "" for column in columns)]))


if __name__ == "__main__":
    main(sys.argv[1:])
