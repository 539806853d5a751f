"""Training alignments: the search for the subspace that represents a causal variable."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from itertools import product
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.analysis.alignment.alignment import EXCHANGED, Alignment, BoundlessAlignment
from hooked_lm.analysis.alignment.interchange import (
    InterchangeAnswers,
    Location,
    Positions,
    RowNumbers,
    Vectors,
    check_run,
    hook_of,
)
from hooked_lm.analysis.attribution.gradients import check_grad_mode, freeze_weights
from hooked_lm.engine.answers import Answers
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, pair_of, prompts_of
from hooked_lm.engine.prompts import Prompts, chosen, position_axis, rows_of, site_of_layer, some_rows, values_of
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site
from hooked_lm.keywords import check_keywords
from hooked_lm.models.vision.inputs import PromptRows
from hooked_lm.progress import progress_bar
from hooked_lm.results import Label
from hooked_lm.results.measures import MetricScores
from hooked_lm.results.scores import provenance


@dataclass(frozen=True, eq=False)
class AlignedPairs:
    """Base prompts, the vectors of their source runs, and the right answers under the intervention."""

    model: HookedRootModule
    base: PromptRows
    vectors: Vectors
    location: Location
    question: InterchangeAnswers

    def some(self, rows: RowNumbers) -> "AlignedPairs":
        """Some of the pairs."""
        base, vectors = some_rows(self.model, self.base, rows.tolist()), self.vectors[rows.to(self.vectors.device)]
        return AlignedPairs(self.model, base, vectors, self.location.some(rows), self.question.some(rows))

    def logits(self, alignment: Alignment) -> Float[Tensor, "batch candidate"]:
        """The logits of the candidates under an alignment."""
        return self.question.logits(self.model, self.base, [hook_of(self.location, self.vectors, alignment.exchanged)])

    def loss(self, alignment: Alignment) -> Float[Tensor, ""]:
        """The mean cross entropy of the right answer, in nats."""
        logits = self.logits(alignment)
        return nn.functional.cross_entropy(logits.float(), self.question.targets.to(logits.device))

    def right(self, alignment: Alignment, rows: RowNumbers, batch_size: int) -> Float[Tensor, " row"]:
        """For each of these pairs 1 if the right answer has the highest logit, else 0."""
        with torch.no_grad():
            parts = [self.some(part) for part in rows.split(batch_size)]
            return torch.cat([part.question.right(part.logits(alignment)) for part in parts]).float()


@keeps_torch_state
def train_alignment(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    answers: Answers | None = None,
    *,
    site: Site,
    size: int | None,
    positions: Positions = None,
    source_positions: Positions = None,
    heads: int | str | None = None,
    answer_positions: int | Int[Tensor, "..."] = -1,
    candidates: Answers | None = None,
    held_out: float | Sequence[int] = 0.25,
    steps: int = 200,
    learning_rate: float = 0.02,
    batch_size: int = 32,
    size_cost: float = 1.0,
    seed: int = 0,
    progress: bool | None = None,
) -> Alignment:
    """Trains the subspace whose exchange between clean and corrupted runs makes the model give the answers.

    Args:
        corrupted, clean: texts or ids [batch, pos], pair by pair: the base runs and the source runs of the literature. Values
            of the clean run are put into the corrupted one. `VisionInputs` for a model that reads images. Or `Pairs` in place
            of both, with their answers; wrong answers are not read.
        answers: the answer of the causal model if the variable has its value in the clean prompt, a string or id for each pair.
        site, positions, source_positions, heads: the location of the subspace; see `Location.of`.
        size: the number of directions; None: it is trained too (boundless), starting at half of the width, with a loss of
            `size_cost` nats for the whole width.
        answer_positions: the position of the answer, one or [batch].
        candidates: the tokens that the answer is compared with, a list, or [batch, n]; None: the vocabulary.
        held_out: the share of pairs that are not trained on, or their indices. Pairs with something in common that the
            alignment could memorise, such as names, should be held out together.
        steps, learning_rate, batch_size: those of Adam, with batches drawn by `seed`. With a size of 0 or the whole width there
            is nothing to train.

    Returns the alignment, whose parameters do not require gradients. Its `accuracy` (Measures) is 1 or 0 for each held-out
    pair: whether the intervened model gives the answer. Its axis "exchanged" has the trained subspace, nothing, everything,
    and a random subspace of the same size, which is its `control`. `about["accuracy_trained_on"]` is the accuracy on the
    other pairs. Raises before training KeyError for an unknown site, ValueError for arguments that do not line up, and
    IndexError for positions or ids out of range; during training ValueError for a loss that is not finite. After an interrupt
    the model is unchanged.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.demo.experiment import prompt_pairs
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> pairs = prompt_pairs(24)
    >>> corrupted, clean = [pair.corrupted for pair in pairs], [pair.clean for pair in pairs]
    >>> answers = [pair.answer for pair in pairs]
    >>> candidates = [[pair.answer, pair.wrong_answer] for pair in pairs]
    >>> alignment = train_alignment(
    ...     model,
    ...     corrupted,
    ...     clean,
    ...     answers,
    ...     site=("resid_pre", 3),
    ...     size=24,
    ...     positions=-1,
    ...     candidates=candidates,
    ...     steps=30,
    ...     progress=False,
    ... )
    >>> bool(
    ...     alignment.accuracy.mean[0]
    ...     > alignment.accuracy.select(exchanged="random subspace").mean
    ... )
    True
    """
    check_grad_mode("training an alignment")
    corrupted, clean, answers = _prompts_and_answers(corrupted, clean, answers)
    location = Location.of(model, site, positions, heads, source_positions)
    schedule = Schedule(steps, learning_rate, batch_size, size_cost, seed, progress)
    pairs = _pairs(model, corrupted, clean, location, answers, answer_positions, candidates, batch_size)
    train, test = _split(len(pairs.base), held_out, seed)
    width = pairs.vectors.shape[2]
    if size is None:
        boundless = BoundlessAlignment(location, width, seed).to(pairs.vectors.device)
        history = _train(boundless, pairs, train, schedule)
        found = boundless.hardened()
    else:
        found = Alignment(location, width, size, seed).to(pairs.vectors.device)
        history = _train(found, pairs, train, schedule) if 0 < size < width else {"loss": []}
    found.requires_grad_(False)
    found.history = history
    trained_on = pairs.right(found, train, batch_size).mean().item()
    known = {"boundless": size is None, "held_out": test.tolist(), "accuracy_trained_on": trained_on}
    found.about = provenance(model, **known, **asdict(schedule))
    found.accuracy = _accuracy(found, pairs, test, schedule)
    if found.control is not None:
        found.control.warn_if_as_well()
    return found


@dataclass(frozen=True)
class Schedule:
    """The settings of training; raises ValueError for numbers out of range."""

    steps: int
    learning_rate: float
    batch_size: int
    size_cost: float
    seed: int
    progress: bool | None

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if (number := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be 1 at least, got {number}")
        for name in ("learning_rate", "size_cost"):
            if not 0 <= (number := getattr(self, name)) < float("inf"):
                raise ValueError(f"{name} must be a finite number and not negative, got {number}")

    def batches(self, rows: RowNumbers) -> Iterator[RowNumbers]:
        """Endless batches of rows, in a new order in each epoch."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield from rows[torch.randperm(len(rows), generator=generator)].split(self.batch_size)


def _pairs(
    model: HookedRootModule,
    corrupted: Prompts,
    clean: Prompts | None,
    location: Location,
    answers: Answers,
    answer_positions: int | Tensor,
    candidates: Answers | None,
    batch_size: int,
) -> AlignedPairs:
    """The checked pairs; the source runs are computed here."""
    device = next(model.parameters()).device
    runs = pair_of(model, corrupted, clean, same_length=False)
    base_tokens, source_tokens = (rows.to(device) for rows in runs)
    check_run(model, location, base_tokens, source_tokens)
    question = InterchangeAnswers.of(model, base_tokens, answers, answer_positions, candidates)
    vectors = [
        location.some(rows).read_source(
            values_of(model, some_rows(model, source_tokens, rows.tolist()), [location.site])[location.site]
        )
        for rows in torch.arange(len(base_tokens)).split(batch_size)
    ]
    return AlignedPairs(model, base_tokens, torch.cat(vectors), location, question)


def _prompts_and_answers(
    corrupted: Prompts | Pairs, clean: Prompts | None, answers: Answers | None
) -> tuple[Prompts, Prompts | None, Answers]:
    """The arguments, of which Pairs hold all; raises TypeError without answers."""
    if answers is None and isinstance(corrupted, Pairs):
        answers = corrupted.answers
    if answers is None:
        raise TypeError("answers are missing: give answers=..., or Pairs with answers")
    return *prompts_of(corrupted, clean), answers


def _split(n: int, held_out: float | Sequence[int], seed: int) -> tuple[RowNumbers, Int[Tensor, " other"]]:
    """The pairs to train on, and those held out."""
    if isinstance(held_out, (int, float)):
        if not 0 < held_out < 1 or n < 2:
            raise ValueError(f"held_out is a share between 0 and 1 of two pairs at least; got {held_out} of {n}")
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        test = order[: min(max(round(held_out * n), 1), n - 1)]
    else:
        test = torch.tensor(chosen(held_out, n, "held_out"))
    is_test = torch.zeros(n, dtype=torch.bool)
    is_test[test] = True
    if is_test.all():
        raise ValueError(f"all {n} pairs are held out: none are left to train on")
    return (~is_test).nonzero()[:, 0], is_test.nonzero()[:, 0]


def _train(alignment: Alignment, pairs: AlignedPairs, rows: RowNumbers, schedule: Schedule) -> dict[str, list[float]]:
    """Trains on these pairs; returns the history of the steps."""
    optimiser = torch.optim.Adam(alignment.parameters(), lr=schedule.learning_rate)
    slower = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.05, schedule.steps)
    history: dict[str, list[float]] = {"loss": []}
    steps = progress_bar(
        f"aligning {pairs.location.site}", schedule.steps, schedule.progress, steps=range(schedule.steps)
    )
    with torch.enable_grad(), freeze_weights(pairs.model, begins=()):
        for step, batch in zip(steps, schedule.batches(rows), strict=False):
            alignment.anneal(step / schedule.steps)
            loss = pairs.some(batch).loss(alignment)
            if not bool(loss.isfinite()):
                raise ValueError(
                    f"the loss of step {step} is {loss.item()}: at '{pairs.location.site}' nothing was learnt"
                )
            optimiser.zero_grad()
            (loss + schedule.size_cost * alignment.extent()).backward()
            optimiser.step()
            slower.step()
            history["loss"].append(loss.item())
            if isinstance(alignment, BoundlessAlignment):
                history.setdefault("size", []).append(alignment.boundary.item() * alignment.width)
    if not all(bool(weight.isfinite().all()) for weight in alignment.parameters()):
        raise ValueError(f"the gradient of the last step is not finite: at '{pairs.location.site}' nothing was learnt")
    return history


def _accuracy(found: Alignment, pairs: AlignedPairs, rows: RowNumbers, schedule: Schedule) -> MetricScores:
    """The accuracy on these pairs, with its baselines."""

    def of(size: int, seed: int = 0) -> Alignment:
        return Alignment(found.location, found.width, size, seed).to(pairs.vectors.device)

    each = [found, of(0), of(found.width), of(found.size, schedule.seed + 1)]
    values = torch.stack([pairs.right(which, rows, schedule.batch_size) for which in each])
    return MetricScores(values, {"exchanged": EXCHANGED}, [True], about=found.about)


@reads_chats
def sweep_alignments(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    answers: Answers | None = None,
    *,
    size: int | None,
    site: str = "resid_pre",
    layers: Sequence[int] | str = "each",
    positions: Sequence[int] | str = "each",
    **settings: Any,
) -> MetricScores:
    """Trains an alignment at each layer and position; returns the accuracies on held-out pairs.

    Args:
        site: a short name; of a vision tower, as "vision.resid_pre", with its layers and patches.
        layers, positions: "each", or a list.
        corrupted, clean, answers, size and settings: as for `train_alignment`. The held-out pairs are the same for all.

    Returns Measures with the axes exchanged (the trained "subspace" and its baselines), layer and position (in a tower patch);
    NaN in layers without the site. Raises the errors of `train_alignment`.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.demo.experiment import prompt_pairs
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> corrupted = [pair.corrupted for pair in prompt_pairs(8)]
    >>> clean = [pair.clean for pair in prompt_pairs(8)]
    >>> answers = [pair.answer for pair in prompt_pairs(8)]
    >>> where = {"layers": [0, 2], "positions": [10, 14]}
    >>> found = sweep_alignments(
    ...     model, corrupted, clean, answers, size=8, steps=2, progress=False, **where
    ... )
    >>> found.select(exchanged="everything").mean
    tensor([[1., 0.],
            [0., 0.]])
    """
    known = set(signature(train_alignment).parameters) - {"model", "corrupted", "clean", "answers", "site", "positions"}
    check_keywords("sweep_alignments", settings, known)
    corrupted, clean, answers = _prompts_and_answers(corrupted, clean, answers)
    tokens = rows_of(model, corrupted, "corrupted")
    some_layers = chosen(layers, model.stack_of(site)[1] or 1, "layer") or []
    sites = [site_of_layer(model, site, layer) for layer in some_layers]
    if not any(sites):
        model.names((site, some_layers[0]))  # raises KeyError, with similar names
    axis, labels = position_axis(model, tokens, next(where for where in sites if where is not None))
    some_positions = chosen(positions, len(labels), "position") or []
    tried: dict[tuple[int, int], MetricScores] = {}
    for (row, where), (column, at) in product(enumerate(sites), enumerate(some_positions)):
        if where is not None:
            found = train_alignment(model, tokens, clean, answers, site=where, positions=at, size=size, **settings)
            assert found.accuracy is not None, "what was trained has been tried"
            tried[row, column] = found.accuracy
    first = next(iter(tried.values()))
    values = torch.full((len(EXCHANGED), len(sites), len(some_positions), first.n_prompts), torch.nan)
    for place, scores in tried.items():
        values[(slice(None), *place)] = scores.values
    axes: dict[str, Sequence[Label]] = {
        "exchanged": EXCHANGED,
        "layer": some_layers,
        axis: [labels[pos] for pos in some_positions],
    }
    about = {name: value for name, value in first.about.items() if name != "accuracy_trained_on"}
    return MetricScores(values, axes, [True], about=about)
