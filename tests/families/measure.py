"""Writes docs/parity.json: how far the logits of each family are from those of transformers, over its rows of the table.

python -m tests.families.measure [model_type ... | all]     (without names: the families whose rows have changed in number)
"""

import json
import sys
from pathlib import Path

import torch

from hooked_lm.families import CLASSES, supported
from tests.families import CASES, VISION_CASES
from tests.families._case import Case
from tests.families._models import outputs
from tests.families._vision import vision_outputs

FILE = Path(__file__).parents[2] / "docs" / "parity.json"


def families() -> list[str]:
    """The model types of all classes; towers without a row of their own are tested in the models that they are parts of."""
    return [name for name in supported(*CLASSES.values()) if name in supported() or cases(name)]


def cases(name: str) -> list[Case]:
    """The rows of a family."""
    return [case for case in (*CASES, *VISION_CASES) if case.family == name]


@torch.no_grad()
def difference(case: Case) -> float:
    """The largest difference of the fp32 outputs of a row: logits, or what a tower says of images."""
    ours, theirs = outputs(case) if case.family in supported() else vision_outputs(case)
    return (ours - theirs).abs().max().item()


def measured(name: str) -> dict[str, float]:
    """The entry of a family in the file."""
    differences = [difference(case) for case in cases(name)]
    return {"configs": len(differences), "largest": float(f"{max(differences):.1e}")}


def main(names: list[str]) -> None:
    """Measures the named families, and keeps the entries of the other supported ones."""
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    if names == ["all"]:
        names = families()
    new = [name for name in families() if before.get(name, {}).get("configs") != len(cases(name))]
    found = {name: before[name] for name in families() if name in before}
    found |= {name: measured(name) for name in names or new}
    FILE.write_text(json.dumps(dict(sorted(found.items())), indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
