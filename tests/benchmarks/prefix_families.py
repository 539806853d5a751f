"""The largest difference that a prefix, chunks and single rows of patterns make, in every family of decoders.

python -m tests.benchmarks prefix-families [model_type ...]

The models are those of `tests/families/`, in float32. A difference is in units of the largest logit, or of a pattern's 1; of all
lines of a family that with the largest is shown. Angles that depend on the length of a prompt are refused in parts.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked, padded, prompt

REFUSED = "rotary angles"
NO_ROWS = ("no layer", "softmax", "attention")


class Differences(NamedTuple):
    """Of one family, or of one of its lines; None where a run in parts is refused, or there are no patterns."""

    family: str
    prefix: float | None
    chunks: float | None
    rows: float | None


def apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference, in units of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


def unless(refused: tuple[str, ...], run: Callable[[], float]) -> float | None:
    """The number, or None if it is refused in these words."""
    try:
        return run()
    except ValueError as error:
        if not any(word in str(error) for word in refused):
            raise
        return None


def after_a_prefix(model: HookedTransformer, case: Case) -> float:
    """Two continuations of different lengths against the whole prompts; the prefix is read in chunks."""
    rows, n = prompt(case, batch=2), case.n_prompt // 2
    rows[1, :n] = rows[0, :n]
    tokens, mask = padded([rows[0, n:], rows[1, n : n + 3]], "left")
    whole, found = model(rows), model(model.prefix(rows[:1, :n], chunk=3).then(tokens, mask))
    return max(apart(found[0], whole[0, n:]), apart(found[1, -3:], whole[1, n : n + 3]))


def of_rows(model: HookedTransformer, tokens: Tensor) -> float:
    """Two rows of all patterns against those of a cache."""
    found = model.attention_rows(tokens, query_positions=[-1, 2])
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith("attn.hook_pattern"))
    return max(
        float((rows - cache[f"blocks.{layer}.attn.hook_pattern"][:, :, [-1, 2]]).abs().max())
        for layer, rows in found.items()
    )


def differences(case: Case) -> Differences:
    """Of one line of the table."""
    model, tokens = hooked(case), prompt(case)
    return Differences(
        case.family,
        unless((REFUSED,), lambda: after_a_prefix(model, case)),
        unless((REFUSED,), lambda: apart(model(tokens, chunk=5), model(tokens))),
        unless(NO_ROWS, lambda: of_rows(model, tokens)),
    )


def of_families(names: list[str]) -> Iterator[Differences]:
    """Of each family the largest; of all if none are named."""
    families = dict.fromkeys(case.family for case in DECODER_CASES)
    for family in names or families:
        lines = [differences(case) for case in DECODER_CASES if case.family == family]
        columns = zip(*(line[1:] for line in lines), strict=True)
        yield Differences(family, *(max((x for x in column if x is not None), default=None) for column in columns))


@torch.no_grad()
def show_prefix_families(names: list[str]) -> None:
    """Prints a line for each family, as it is measured, and the largest of all."""
    most: list[float] = [0.0, 0.0, 0.0]
    print("Largest differences from whole runs, float32")
    print("".join(f"{name:>12}" if i else f"{name:24}" for i, name in enumerate(Differences._fields)))
    for family, *numbers in of_families(names):
        _print(family, numbers)
        most = [max(one, other or 0.0) for one, other in zip(most, numbers, strict=True)]
    _print("all", most)


def _print(family: str, numbers: Sequence[float | None]) -> None:
    print(f"{family:24}" + "".join(f"{'' if n is None else f'{n:.1e}':>12}" for n in numbers), flush=True)
