"""Checks that loading and export share: which rows belong to which tensor, and what does not match."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor

from hooked_lm.weights.parameters import Slot
from hooked_lm.weights.rows import Row, placeholders


@dataclass
class Problem:
    """A mismatch. The search for a similar name takes long, so it is done when the message is needed."""

    text: str
    name: str = ""  # the name that was not found
    among: Collection[str] = ()  # the known names

    def __str__(self) -> str:
        near = get_close_matches(self.name, self.among, n=1, cutoff=0.8)
        return self.text + (f" (did you mean {near[0]!r}?)" if near else "")


def name_problems(targets: Mapping[str, Slot], rows: Sequence[Row]) -> list[Problem]:
    """Parameters with no row or with two, rows for no parameter, rows with placeholders left."""
    problems, filled = [], set[str]()
    for row in rows:
        if open_names := placeholders(row.source) | placeholders(row.target):
            problems.append(Problem(f"{row} still has {', '.join(sorted(open_names))}: call expand(rows, ...) first"))
        elif row.target not in targets:
            problems.append(Problem(f"{row}: the model has no {row.target!r}", row.target, targets))
        elif row.target in filled:
            problems.append(Problem(f"two rows fill {row.target!r}"))
        filled.add(row.target)
    empty = [name for name in targets if name not in filled]
    return problems + [Problem(f"no row for {name!r} of the model", name, filled) for name in empty]


def group_by_name(pairs: Iterable[tuple[str, Row]]) -> dict[str, list[Row]]:
    """The rows of each tensor of a checkpoint."""
    groups: dict[str, list[Row]] = {}
    for name, row in pairs:
        groups.setdefault(name, []).append(row)
    return groups


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit: NaN equals itself, 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().view(bits), b.detach().view(bits))


def refuse(problems: Sequence[Problem]) -> None:
    """Raises a ValueError if there are problems: one line for each of the first twenty, and the number of the others."""
    if problems:
        more = f"\n- and {len(problems) - 20} more" if len(problems) > 20 else ""
        listing = "\n- ".join(str(problem) for problem in problems[:20])
        raise ValueError(f"the checkpoint and the model do not match; nothing was changed:\n- {listing}{more}")
