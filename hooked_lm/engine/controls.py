"""Controls of effects over a grid: the same prompts with shuffled answers, or another model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from hooked_lm.callers import warn_caller
from hooked_lm.engine.metric_rows import RearrangedMetric
from hooked_lm.engine.metrics import Metric
from hooked_lm.engine.result import METRIC_NAME, SweepResult
from hooked_lm.engine.study import Metrics
from hooked_lm.results.bootstrap import in_words
from hooked_lm.results.control import SHUFFLED, Control
from hooked_lm.results.groups import sums_by_group
from hooked_lm.results.sign_flips import ROUNDING, fewest_units

LEVEL, FLIPS = 0.05, 1000  # of the significance by which a result and its control are compared
LACKS = {SHUFFLED: "the answers"}
OWN = "own"  # the metric of the answers, beside that of shuffled ones
Own = TypeVar("Own", bound=SweepResult)


def with_control(
    found: Own, effects: SweepResult, other: SweepResult, name: str, lacks: str, sizes_alone: bool = False
) -> Own:
    """The result with a control: its own `effects`, and `other`, those of the same method on the control, are compared by how
    many cells are significant, or by the largest effect if `sizes_alone`, or prompts are few, or no cell is significant. Warns if
    the control does about as well."""
    control = _compared(effects.effects(), other.effects(), name, lacks, sizes_alone)
    control.warn_if_as_well()
    return replace(found, about={**found.about, **control.about()})


def _compared(own: SweepResult, other: SweepResult, name: str, lacks: str, sizes_alone: bool) -> Control:
    size, of_other = (float(each.mean.abs().nan_to_num().max()) for each in (own, other))
    by_size = Control.compared(name, "largest effect", size, of_other, lacks)
    if not sizes_alone and is_testable(own):
        with in_words():
            n_own, n_other = (each.significant(LEVEL, n_permutations=FLIPS).n_significant for each in (own, other))
        if n_own:
            control = Control.compared(name, "significant cells", n_own, n_other, lacks)
            has_its_own_scale = name != SHUFFLED  # as the logits of a twin have
            has_size = has_its_own_scale or by_size.does_as_well
            return control._replace(does_as_well=control.does_as_well and has_size)
    return by_size


def is_testable(found: SweepResult) -> bool:
    """Whether there are so many prompts, or groups, that a cell can be significant."""
    return sums_by_group(found.values.reshape(-1, found.n_prompts)[:1], found.groups).shape[1] >= fewest_units(LEVEL)


def refuse_several_metrics(metric: Metrics | None, control: str | None) -> None:
    """Raises ValueError for several metrics if a control is asked for by name: it compares one number with another."""
    if control not in (None, "auto") and isinstance(metric, Mapping):
        raise ValueError(
            f"control={control!r} compares numbers of one metric, and {len(metric)} are given, each in its own units: give one "
            "function, or control=None"
        )


# ---- shuffled answers ------------------------------------------------------------------------------------------------


def cycle(n: int, generator: torch.Generator) -> list[int]:
    """For each of n places another one: the next in a random cycle."""
    order = torch.randperm(n, generator=generator)
    following = torch.empty(n, dtype=torch.long)
    following[order] = order.roll(-1)
    return following.tolist()


def with_shuffled_answers(metric: Metrics, n_prompts: int, control: str | None, seed: int = 0) -> Metrics:
    """The metric, and beside it the same with the answers of another prompt each, if this is the control; by the names of both.

    "auto" has it for a metric of this package, over as many prompts as significance takes. Raises ValueError for another
    word, and for several metrics or too few prompts if the control is asked for.
    """
    if control not in (None, "auto", "shuffled"):
        raise ValueError(f"control must be 'auto', 'shuffled' (answers) or None, got {control!r}")
    if control is None or (control == "auto" and (not isinstance(metric, Metric) or n_prompts < fewest_units(LEVEL))):
        return metric
    if isinstance(metric, Mapping) or n_prompts < 2:
        what = "several metrics" if isinstance(metric, Mapping) else "one prompt"
        raise ValueError(f"answers are shuffled among prompts, of one metric; got {what}: give control=None")
    shuffled = RearrangedMetric.permuted(metric, cycle(n_prompts, torch.Generator().manual_seed(seed)))
    return {OWN: metric, SHUFFLED: shuffled}


def without_shuffled_answers(found: SweepResult, metric_name: str, control: str | None = "auto") -> SweepResult:
    """The result of the metric of `with_shuffled_answers`, with the other as its control, unless shuffling changes no number, as
    where all answers are the same; warns of that if the control is asked for by name."""
    own, other = (found.select(metric=name) for name in (OWN, SHUFFLED))
    about = {name: value for name, value in own.about.items() if name != METRIC_NAME}
    own = replace(own, about=about | ({METRIC_NAME: metric_name} if metric_name else {}))
    if not _is_same(own, other):
        return with_control(own, own, other, SHUFFLED, LACKS[SHUFFLED])
    if control == "shuffled":
        warn_caller(
            "there is no control: with shuffled answers every number is the same, in all runs and cells, so all answers are the "
            "same or the metric does not tell them apart; give prompts with several answers, or another metric"
        )
    return own


def _is_same(own: SweepResult, other: SweepResult) -> bool:
    """Whether all numbers of two results are the same up to rounding: those of cells and of both runs."""
    pairs = [(own.values, other.values), (own.corrupted, other.corrupted)]
    pairs += [] if own.clean is None or other.clean is None else [(own.clean, other.clean)]
    size = max(float(part.abs().where(part.isfinite(), 0.0).max()) for pair in pairs for part in pair)
    return all(torch.allclose(*pair, rtol=0, atol=ROUNDING * size, equal_nan=True) for pair in pairs)
