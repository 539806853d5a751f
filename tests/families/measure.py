"""Write docs/parity.json: how far the logits of each family are from those of transformers, over its lines of the table.

python -m tests.families.measure [model_type ...]     (without names: all)
"""

import json
import sys
from pathlib import Path

import torch

from hooked_lm.families import supported
from tests.families import CASES
from tests.families._case import Case
from tests.families._models import outputs

FILE = Path(__file__).parents[2] / "docs" / "parity.json"


@torch.no_grad()
def difference(case: Case) -> float:
    """The largest difference of the fp32 logits of a case."""
    ours, theirs = outputs(case)
    return (ours - theirs).abs().max().item()


def measured(name: str) -> dict[str, float]:
    """What the file says of a family."""
    differences = [difference(case) for case in CASES if case.family == name]
    return {"configs": len(differences), "largest": float(f"{max(differences):.1e}")}


def main(names: list[str]) -> None:
    """Measure the families that are named, or all; what the file says of others is kept while they are supported."""
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    found = {name: measured(name) for name in names or supported()}
    kept = {name: before[name] for name in supported() if name in before}
    FILE.write_text(json.dumps(dict(sorted({**kept, **found}.items())), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
