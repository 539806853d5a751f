"""A metric of all prompts, measured on logits of which each row is of one of them: a part, several runs, another order."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.engine.metric_trace import Logits, Metric, TracedAccess, reads_of, select_logits


class MetricOfRows:
    """Measures a metric on rows of logits, in one run of all its prompts or in several.

    `base` are logits of all prompts, which prompts without a row read. `reads` are the logits that the metric is known to read;
    others are computed once it reads them. The logits of the rows are indexed once, whatever the number of runs.

    >>> both_positions = MetricOfRows(lambda logits: logits[:, -1, 0])
    >>> both_positions(
    ...     torch.tensor([[[1.0]], [[2.0]], [[3.0]]]), torch.tensor([[0, 1], [2, 0]])
    ... )
    tensor([[1., 2.],
            [3., 1.]])
    """

    def __init__(self, metric: Metric, reads: TracedAccess | None = None, base: Logits | None = None) -> None:
        self.metric, self.reads, self.base = metric, reads, base
        self._of_base: dict[TracedAccess, Tensor] = {}

    def __call__(
        self, logits: Float[Tensor, "row ..."], rows: Int[Tensor, "run prompt"]
    ) -> Float[Tensor, "run number"]:
        """The metric of each run, in which prompt i reads row `rows[run, i]` of the logits, or its own of `base` (-1).

        It is one number for each prompt, or one for all. Raises ValueError if the metric gives anything else.
        """
        n_rows, n_prompts = len(logits), rows.shape[1]
        places = torch.where(rows < 0, n_rows + torch.arange(n_prompts), rows).to(logits.device)
        known: dict[TracedAccess, Tensor] = {}

        def of_run(run: Int[Tensor, " prompt"], reads: TracedAccess) -> Tensor:
            if reads not in known:
                known[reads] = self._with_base(select_logits(logits, reads), reads)
            return known[reads][run]

        shape, scores = torch.Size([n_prompts, *logits.shape[1:]]), []
        for run in places:
            own = Logits(shape, logits.dtype, logits.device, partial(of_run, run))
            self.reads, [score] = reads_of([self.metric], own, self.reads)
            scores.append(numbers_of(torch.as_tensor(score), n_prompts))
        return torch.stack(scores)

    def _with_base(self, own: Tensor, reads: TracedAccess) -> Tensor:
        """The logits of the rows that are read, followed by those of the base run."""
        if self.base is None:
            return own
        if reads not in self._of_base:
            self._of_base = {reads: self.base.some(reads).detach()}
        base = self._of_base[reads]
        return torch.cat([own.to(base), base])


def numbers_of(score: object, n_prompts: int) -> Float[Tensor, " number"]:
    """What a metric gave as one number, or one for each prompt; raises ValueError for anything else."""
    if not isinstance(score, Tensor) or score.ndim > 1 or score.numel() not in (1, n_prompts):
        got = tuple(score.shape) if isinstance(score, Tensor) else type(score).__name__
        raise ValueError(f"the metric must give one number, or one for each of the {n_prompts} prompts, got {got}")
    return score.reshape(-1)


@dataclass(frozen=True)
class RearrangedMetric:
    """A metric of `len(source)` prompts as one of other rows: prompt i reads row `source[i]` of the logits, and its number is
    that of the rows `i` of `kept`. The metric has one number for each prompt, which depends on the logits of that prompt alone.
    """

    metric: Metric
    source: tuple[int, ...]
    kept: tuple[int, ...]
    has_own_answers: bool = True  # whether each prompt is read by its own numbers

    @classmethod
    def of_rows(cls, metric: Metric, rows: Sequence[int], n_prompts: int) -> "RearrangedMetric":
        """The metric of some of its prompts; the others read the first of them, and their numbers are left out."""
        place = {row: at for at, row in enumerate(rows)}
        return cls(metric, tuple(place.get(row, 0) for row in range(n_prompts)), tuple(rows))

    @classmethod
    def permuted(cls, metric: Metric, answers: Sequence[int]) -> "RearrangedMetric":
        """The metric with the answers of other prompts: row i has those of prompt `answers[i]`."""
        source = [0] * len(answers)
        for row, prompt in enumerate(answers):
            source[prompt] = row
        return cls(metric, tuple(source), tuple(answers), has_own_answers=False)

    @cached_property
    def _of_rows(self) -> MetricOfRows:
        return MetricOfRows(self.metric)

    @property
    def name(self) -> str:
        return str(getattr(self.metric, "name", getattr(self.metric, "__name__", "")))

    @property
    def rises_with_answer(self) -> bool:
        return self.has_own_answers and bool(getattr(self.metric, "rises_with_answer", False))

    def __call__(self, logits: Float[Tensor, "..."]) -> Float[Tensor, " row"]:
        scores = self._of_rows(logits, torch.tensor([self.source]))
        if scores.shape != (1, len(self.source)):
            raise ValueError(f"the metric must give one number for each of the {len(self.source)} prompts")
        return scores[0, list(self.kept)]
