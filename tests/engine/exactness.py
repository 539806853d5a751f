"""The largest error of the engine against a loop of forward passes, at every site of a case of `tests/families`, and the largest
effect of the same edits on the logits."""

import copy
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.engine.experiment import norm_and_copies
from hooked_lm.engine.site_info import site_infos
from hooked_lm.patching import Edit, Experiment
from tests.engine.naive import naive
from tests.families import Case
from tests.families._models import hooked
from tests.unchecked import unchecked

MIXED = "several sites"
Cell = list[Edit]


@dataclass
class Found:
    """The largest difference from the loop and the largest effect of an edit at one kind of site, relative to the logits."""

    difference: float = 0.0
    effect: float = 0.0

    def add(self, difference: float, effect: float) -> None:
        self.difference, self.effect = max(self.difference, difference), max(self.effect, effect)


class Spy:
    """A metric that reads all logits and keeps them."""

    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        self.seen = logits.clone()
        return logits.mean((1, 2))


def some(case: Case) -> list[Callable[[Tensor], Tensor]]:
    """Metrics that read only some of the logits: of the last position, of one in the middle, of a few tokens."""
    middle = case.n_prompt // 2
    return [
        lambda logits: logits[:, -1, 3] - logits[:, -1, 5],
        lambda logits: logits[:, middle, 4],
        lambda logits: logits[:, -1].log_softmax(-1)[:, 7],
        lambda logits: logits[:, 1:, [2, 6]].mean((1, 2)),
    ]


def kind_of(site: str) -> str:
    """A site's name without its layer."""
    return re.sub(r"^blocks\.\d+\.", "", site)


def prompts(case: Case, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Two batches of random tokens."""
    generator = torch.Generator().manual_seed(3)
    shape = (2, batch, case.n_prompt)
    first, second = torch.randint(3, hooked(case).cfg.d_vocab, shape, generator=generator)
    return first, second


def cells(model: HookedTransformer, cache: dict[str, Tensor], n_pos: int, seed: int, thorough: bool) -> Iterator[Cell]:
    """Edits of each site: at one position, at all positions, in one head or neuron; and edits of several sites."""
    pick = random.Random(seed)
    known = site_infos(model)
    for turn, (site, place) in enumerate(known.items()):
        value, pos = cache[site], pick.randrange(n_pos)
        by_head = (Edit(site, value, pick.choice([None, (pos,)]), one_of(value, place.dims, pick)),)
        kinds = [(Edit(site, value, (pos,)),), (Edit(site, value),), by_head]
        for kind in kinds if thorough else [kinds[(turn + seed) % 3]]:
            yield list(kind)
    for _ in range(8 if thorough else 4):
        several = [mixed(pick.choice(list(known)), cache, known, n_pos, pick) for _ in range(pick.randint(2, 4))]
        if not norm_and_copies(several):  # else a whole forward pass
            yield several


def one_of(value: Tensor, dims: Sequence[str], pick: random.Random) -> tuple[int, ...]:
    """An index of the axis after batch and position (a head or neuron), sometimes negative."""
    size = next(n for n, axis in zip(value.shape[1:], dims[1:], strict=True) if axis not in ("pos", "query_pos"))
    return (pick.randrange(-size, size),)


def mixed(site: str, cache: dict[str, Tensor], known: dict, n_pos: int, pick: random.Random) -> Edit:
    """A random edit."""
    value = cache[site]
    positions = pick.choice([None, tuple(pick.sample(range(n_pos), 2))])
    rest = pick.choice([(), one_of(value, known[site].dims, pick)])
    halved = value.is_floating_point() and pick.random() < 0.3
    return Edit(site, (lambda x: 0.5 * x) if halved else value, positions, rest)


@torch.no_grad()
@unchecked()
def compared(case: Case, seed: int = 0, thorough: bool = True, dtype: torch.dtype = torch.float32) -> dict[str, Found]:
    """The errors and effects of each kind of site."""
    (tokens, others), model = prompts(case), hooked(case)
    model = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    _, cache = model.run_with_cache(others, names_filter=list(site_infos(model)))
    wanted = list(cells(model, cache, case.n_prompt, seed, thorough))
    expected, plain = [naive(model, tokens, cell) for cell in wanted], model(tokens)
    found: dict[str, Found] = {}
    differences, spy = [0.0] * len(wanted), Spy()
    for index, _ in run(model, tokens, [spy], wanted):
        differences[index] = far(spy.seen, expected[index])
    for turn, metric in enumerate(some(case) if thorough else some(case)[:1]):
        part = range(turn % 2, len(wanted), 2)
        for place, scores in run(model, tokens, [metric], [wanted[index] for index in part]):
            index = part[place]
            differences[index] = max(differences[index], far(scores[0], metric(expected[index])))
    for cell, logits, difference in zip(wanted, expected, differences, strict=True):
        scale = logits.abs().max().item()
        kind = kind_of(cell[0].site) if len(cell) == 1 else MIXED
        found.setdefault(kind, Found()).add(difference / scale, far(logits, plain) / scale)
    return found


def run(
    model: HookedTransformer, tokens: Tensor, metrics: list, wanted: Sequence[Cell]
) -> Iterator[tuple[int, Tensor]]:
    """The results of cells, none of which was run as a whole forward pass."""
    sites = {change.site for cell in wanted for change in cell}
    experiment = Experiment(model, tokens, metrics, compare=sites)
    assert experiment.fallback_reason is None
    yield from experiment.run(wanted, progress=False)
    assert experiment.cost.forwards == 1


def far(one: Tensor | None, other: Tensor) -> float:
    """The largest difference; infinite for a NaN or an empty tensor."""
    largest = float("inf") if one is None else (one - other).abs().max().item()
    return float("inf") if largest != largest else largest
