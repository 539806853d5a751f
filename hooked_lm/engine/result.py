"""SweepResult: the scores of a sweep, one for each cell of a grid and each prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.results import Label
from hooked_lm.results.bounds import SHARE, Bounds
from hooked_lm.results.control import CONTROL, Control
from hooked_lm.results.gap import warn_if_small
from hooked_lm.results.scores import METRIC, POSITION, Scores
from hooked_lm.results.significance import Significance

Own = TypeVar("Own", bound="SweepResult")

DIRECTIONS = {"corrupted": "denoising: ", "clean": "noising: "}
SCALE, WHAT, METRIC_NAME = "scale", "what", "metric"  # in `about`: how values are scaled, what was changed, the metric
CHANGE, RESTORED = "change", "restored"  # the scales of `effects` and of `normalized`
CHANGE_RESTORED = f"{CHANGE} {RESTORED}"  # that of both, in any order
PAIRED_RESTORED = f"paired {RESTORED}"  # that of `restored` where the clean run is changed


def metric_name(metric: object) -> str:
    """The name of a metric in words; "" for one without a name, such as a lambda.

    >>> metric_name(torch.logit), metric_name(lambda logits: logits)
    ('logit', '')
    """
    name = str(getattr(metric, "name", getattr(metric, "__name__", "")))
    return name.replace("_", " ") if name.isidentifier() else ""


def total_cost(parts: Sequence["SweepResult"]) -> dict[str, int | float]:
    """The cost of all parts of a sweep; that of parts without one is 0."""
    names = dict.fromkeys(name for part in parts for name in part.cost or ())
    return {name: sum((part.cost or {}).get(name, 0) for part in parts) for name in names}


@dataclass(frozen=True, eq=False, repr=False)
class SweepResult(Scores):
    """The scores of a sweep over a grid of interventions, for each prompt, with the baselines.

    Args:
        values: [*grid, prompt], in fp32 on the CPU; NaN for cells that do not exist, such as a head that a layer lacks.
            A metric that returns one number for all prompts counts as one prompt.
        axes: the axes of the grid in order, each with its labels (strings or ints, no two alike), e.g.
            {"metric": ["logit_difference"], "layer": [0, 1], "position": ["0 <bos>", "1 When"]}. Several metrics are
            the first axis, "metric".
        corrupted: the metric of the corrupted run, [prompt], or [metric, prompt] if there is an axis "metric".
        clean: the metric of the clean run, or None.
        cost: the cost of the sweep (forwards, layer_rows, flops, seconds), or None.
        base: the run that was changed, "corrupted" or "clean".
        fingerprint: identifies the sweep, for resuming from a file; empty for parts and rescaled results.
        about: metadata: the model, versions, seeds.
        binary: of each metric, whether its value for a prompt is 0 or 1, as accuracies are. None: whether all values and
            baselines are, and some are 1. `effects`, `normalized` and `select` keep it.

    Means of 0/1 values have Wilson's interval, and those of their differences Newcombe's: see `interval`.

    Raises ValueError for inconsistent shapes.

    >>> import torch
    >>> result = SweepResult(
    ...     torch.tensor([[1.0, 2.0], [5.0, 7.0]]),
    ...     {"layer": [0, 1]},
    ...     torch.zeros(2),
    ...     torch.full((2,), 6.0),
    ... )
    >>> result
    SweepResult(layer 2, 2 prompts; means 1.5 to 6, corrupted 0, clean 6)
    >>> result.normalized().mean
    tensor([0.2500, 1.0000])
    """

    corrupted: Float[Tensor, "..."]
    clean: Float[Tensor, "..."] | None = None
    cost: Mapping[str, int | float] | None = None
    base: str = "corrupted"
    fingerprint: str = ""
    binary: Sequence[bool] | None = None
    _BY_METRIC: ClassVar[tuple[str, ...]] = ("corrupted", "clean", "binary")
    _OF_MEANS: ClassVar[Mapping[str, Any]] = {"fingerprint": "", "binary": None}
    _METRIC_IN_ABOUT: ClassVar[str] = METRIC_NAME

    def __post_init__(self) -> None:
        if self.base not in ("corrupted", "clean") or (self.base == "clean" and self.clean is None):
            raise ValueError(f"base must be 'corrupted', or 'clean' where there is that run; got {self.base!r}")
        object.__setattr__(self, "cost", None if self.cost is None else dict(self.cost))
        super().__post_init__()
        object.__setattr__(self, "binary", self._found_binary() if self.binary is None else list(self.binary))

    def _check(self) -> None:
        shape = [*([len(self.axes[METRIC])] if METRIC in self.axes else []), self.n_prompts]
        for name, tensor in (("corrupted", self.corrupted), ("clean", self.clean)):
            if tensor is not None and list(tensor.shape) != shape:
                raise ValueError(f"the {name} baseline must be {shape}, got {list(tensor.shape)}")
        if self.binary is not None and len(self.binary) != (n := len(self.axes.get(METRIC, [""]))):
            raise ValueError(f"binary has an entry for each of {n} metrics, got {len(self.binary)}")

    def _found_binary(self) -> list[bool]:
        """Of each metric, whether all values and baselines are 0 or 1. Zeros alone may be a difference."""
        n = len(self.axes.get(METRIC, [""]))
        parts = [part.reshape(n, part.numel() // max(n, 1)) for part in (self.values, *self._runs)]
        all_are = [((part == 0) | (part == 1) | part.isnan()).all(1) for part in parts]
        some_are_1 = [(part == 1).any(1) for part in parts]
        return [False] * n if self._scale else (torch.stack(all_are).all(0) & torch.stack(some_are_1).any(0)).tolist()

    @property
    def _runs(self) -> list[Float[Tensor, "..."]]:
        """The baselines."""
        return [run for run in (self.corrupted, self.clean) if run is not None]

    def _known_bounds(self) -> Bounds | None:
        """Of 0/1 values, their ends at this scale, if there are several prompts."""
        n = self.n_prompts if self.groups is None else len({*self.groups})
        if self.binary != [True] or n < 2:
            return None
        is_scaled, runs = RESTORED in self._scale, torch.stack(self._runs)
        if CHANGE in self._scale:
            size = float((runs[-1] - runs[0]).abs().max()) if is_scaled else 1.0
            return Bounds(-size, size, is_difference=True)
        if self._scale == PAIRED_RESTORED:
            size = float((runs[-1] - runs[0]).abs().max())
            return Bounds(1 - size, 1 + size, is_difference=True)
        return Bounds(float(runs.min()), float(runs.max())) if is_scaled else SHARE

    @property
    def unchanged(self) -> Float[Tensor, "..."]:
        """The baseline of the run that was changed: its metric without a change."""
        return self.clean if self.base == "clean" and self.clean is not None else self.corrupted

    @classmethod
    def joined(
        cls, parts: Sequence["SweepResult"], what: str, axes: Mapping[str, Sequence[Label]] | None = None
    ) -> "SweepResult":
        """One result of parts with the same runs, each of other cells of one grid; `what` was changed, in words.

        `axes` are those of the grid of which a part has only some labels. Cells that no part has are NaN, and costs are added.

        >>> of_layers = [
        ...     SweepResult(torch.full((1, 2), 3.0 + i), {"layer": [i]}, torch.zeros(2))
        ...     for i in (0, 1)
        ... ]
        >>> SweepResult.joined(of_layers, "layers", {"layer": [0, 1, 2]}).mean
        tensor([3., 4., nan])
        """
        first, axes = parts[0], {**parts[0].axes, **(axes or {})}
        values = torch.full([*map(len, axes.values()), first.values.shape[-1]], torch.nan)
        for part in parts:
            labels = [[list(axes[name]).index(label) for label in of] for name, of in part.axes.items()]
            at = torch.meshgrid(*map(torch.tensor, labels), indexing="ij")
            values[at] = torch.where(part.values.isnan(), values[at], part.values)
        about = {**first.about, WHAT: what}
        return replace(first, values=values, axes=axes, cost=total_cost(parts), fingerprint="", about=about)

    def effects(self: Own) -> Own:
        """The effect of each cell: every value minus the value of the unchanged run for the same prompt.

        `effects().normalized()` and `normalized().effects()` are the same.
        """
        start = self.unchanged
        clean = None if self.clean is None else self.clean - start
        cells = self._of_cells(lambda values: values - self._for_cells(start))
        about = {**self.about, SCALE: CHANGE_RESTORED if RESTORED in self._scale else CHANGE}
        return replace(self, **cells, corrupted=self.corrupted - start, clean=clean, fingerprint="", about=about)

    def normalized(self: Own) -> Own:
        """The values rescaled so that the mean of the corrupted run is 0 and that of the clean run is 1; see also `restored`.

        Warns if these means may be equal: if they differ by less than two standard errors over prompts.

        Effects are only divided by the difference of these means: an effect of 0 stays 0. Each metric is scaled separately.
        Intervals treat the scale as exact. Raises ValueError if there is no clean run, or if the two means differ by no more
        than
        rounding: a millionth of the largest value, or of 1.
        """
        if self.clean is None:
            raise ValueError(
                "this sweep has no clean baseline to scale by: give clean=... to the sweep, or use effects(), which needs none"
            )
        corrupted, clean = (part.double().mean(-1, keepdim=True) for part in (self.corrupted, self.clean))
        sizes = torch.maximum(self.corrupted.abs(), self.clean.abs()).amax(-1).clamp(min=1).flatten()
        names = self.axes.get(METRIC, [""])
        for metric, low, high, size in zip(names, corrupted.flatten(), clean.flatten(), sizes, strict=True):
            if not abs(high - low) > 1e-6 * size:
                of = f" of {metric!r}" if metric else ""
                raise ValueError(
                    f"cannot normalise: the clean mean{of} is {high:.6g}, the corrupted mean {low:.6g}; "
                    f"they must differ by more than {1e-6 * size:.2g}"
                )
        self.warn_if_close()

        is_change = CHANGE in self._scale

        def scaled(values: Tensor, of_cells: bool = False) -> Tensor:
            start, span = torch.zeros_like(corrupted) if is_change else corrupted, clean - corrupted
            if of_cells:
                start, span = self._for_cells(start), self._for_cells(span)
            return ((values.double() - start) / span).float()

        cells = self._of_cells(lambda values: scaled(values, of_cells=True))
        scale = CHANGE_RESTORED if is_change else self._scale or RESTORED
        return replace(
            self,
            **cells,
            corrupted=scaled(self.corrupted),
            clean=scaled(self.clean),
            fingerprint="",
            about={**self.about, SCALE: scale},
        )

    def restored(self: Own) -> Own:
        """How much of the clean answer each cell has: 0 as in the corrupted run, 1 as in the clean run, in both directions.

        The effect on each prompt as a share of the mean difference of the two runs, from 0 for `direction="denoise"` and from
        1 for "noise". So intervals are those of paired differences: they leave out how prompts differ from each other. The
        means are those of `normalized()`, as are warnings and errors.

        >>> result = SweepResult(
        ...     torch.tensor([[3.0, 5.0]]),
        ...     {"layer": [0]},
        ...     torch.tensor([0.0, 2.0]),
        ...     torch.tensor([6.0, 8.0]),
        ... )
        >>> result.restored().values
        tensor([[0.5000, 0.5000]])
        """
        change = self.effects().normalized()
        if self.base == "corrupted" or change.clean is None:
            return change
        cells = change._of_cells(lambda values: values + 1)
        about = {**self.about, SCALE: PAIRED_RESTORED}
        return replace(change, **cells, corrupted=change.corrupted + 1, clean=change.clean + 1, about=about)

    def significant(
        self, level: float = 0.05, correction: str = "max", n_permutations: int | None = None, seed: int = 0
    ) -> Significance:
        """Which cells have an effect at all, by flipping the signs of the effects on pairs of prompts.

        A cell without effect is as likely to change the metric of a pair by x as by -x. The |t| of each cell is compared with
        those where the signs of pairs are flipped; with `groups`, those of a group together. The hypothesis is that effects
        are symmetric around 0: of skewed effects more cells may be significant than the level says, of which it warns
        (`SkewWarning`).

        Args:
            level: the share of errors that is allowed.
            correction: "max" compares with the largest |t| of all cells (step-down), so that a table without any effect has a
                significant cell in 5% of cases, however cells depend on each other; "holm" does so from the p-values of single
                cells, which takes more flips and finds less; "bh" allows 5% of the significant cells to be wrong.
            n_permutations: how many flips; None: 10,000 (1,000 to 10,000 of more than 6,700 cells), for "holm" and "bh" up to
                100,000. All, if there are no more: the test is then exact.
            seed: the seed of the flips.

        Returns a Significance, with each metric corrected for its own cells. Raises ValueError for one prompt or a metric
        with one number for all, for an unknown correction, and for so few pairs or flips that no cell could be significant.

        >>> import torch
        >>> result = SweepResult(
        ...     torch.tensor([[2.0, 3, 2, 3, 2, 3], [2, -1, 2, -1, 2, -2]]),
        ...     {"layer": [0, 1]},
        ...     torch.zeros(6),
        ... )
        >>> result.significant().is_significant
        tensor([ True, False])
        """
        return Significance.of(self._tested(), level, correction, n_permutations, seed)

    def _tested(self) -> Scores:
        """The effects that `significant` tests."""
        return self.effects()

    @property
    def control(self) -> Control | None:
        """What the same method finds on a control, if it was run; parts that are selected have none."""
        return Control.of(self.about)

    def warn_if_close(self) -> None:
        """Warns if the difference of the baselines may be 0: within two standard errors."""
        if self.clean is not None:
            between, advice = "the clean and the corrupted prompts", "use effects(), or other prompts"
            warn_if_small(self.clean - self.corrupted, between, advice)

    @property
    def _scale(self) -> str:
        """How values are scaled: "", or some of the words above."""
        return str(self.about.get(SCALE, ""))

    def _for_cells(self, baseline: Float[Tensor, "*metric prompt_or_1"]) -> Tensor:
        """A baseline in a shape that broadcasts to the values."""
        n_other = self.values.ndim - baseline.ndim
        return baseline.view(*baseline.shape[:-1], *[1] * n_other, baseline.shape[-1])

    def _ranked(self: Own) -> Own:
        return self.effects()

    @property
    def _column(self) -> str:
        name, _ = self._named("value")
        return "effect" if name.startswith(CHANGE) else name

    def _changed_by(self, name: str, index: int | list[int]) -> dict[str, Any]:
        about = {key: value for key, value in self.about.items() if key != CONTROL}  # which is that of the whole
        return {"fingerprint": "", "about": about}

    def _pictured(self) -> dict[str, Any]:
        means = self._baseline_means()
        metrics = self.axes.get(METRIC, ())
        metric = str(metrics[0]) if len(metrics) == 1 else str(self.about.get(METRIC_NAME, ""))
        what = str(self.about.get(WHAT, ""))
        which = "" if self.clean is None else f"{self.base} "  # a single run is neither clean nor corrupted
        value = "what one change adds to that" if CHANGE in self._scale else "that"
        run = f"the {which}run" if CHANGE in self._scale else f"the {which}run with one change"
        subtitle = f"{DIRECTIONS[self.base] if which else ''}each value is {value} of {run}"
        if any(isinstance(label, str) for label in self.axes.get(POSITION, ())):
            subtitle += f"; tokens of the {which}prompt{'s' * (self.n_prompts > 1)}"
        subtitle += f"; {self.control}" if self.control is not None else ""
        short, long = self._named(metric or "metric")
        return {
            "title": ": ".join(filter(None, [what[:1].upper() + what[1:], long if metric or self._scale else ""])),
            "subtitle": subtitle,
            "value_name": short,
            "baselines": [dict(zip(means, each, strict=True)) for each in zip(*means.values(), strict=True)],
        }

    def _named(self, metric: str) -> tuple[str, str]:
        """What the values are: beside the figure, and in its title."""
        share = "restored" if self.base == "corrupted" else "kept"
        change = "restored" if self.base == "corrupted" else "change of the share kept"
        return {
            CHANGE: (f"change of {metric}",) * 2,
            RESTORED: (share, f"share of {metric} {share}"),
            PAIRED_RESTORED: (share, f"share of {metric} {share}"),
            CHANGE_RESTORED: (change, f"{'change of the ' * (change != share)}share of {metric} {share}"),
        }.get(self._scale, (metric, metric))

    def _baseline_means(self) -> dict[str, list[float]]:
        """The means of the runs for each metric, that of the changed run first; exact zeros and ones after `normalized`."""
        runs = {"corrupted": self.corrupted, "clean": self.clean}
        if self.clean is None:
            runs = {"unchanged": self.corrupted}
        elif self.base == "clean":
            runs = {"clean": self.clean, "corrupted": self.corrupted}
        means = {name: run.reshape(-1, self.n_prompts).mean(-1) for name, run in runs.items() if run is not None}
        if RESTORED in self._scale:
            means = {name: mean.where(mean.abs() > 1e-6, 0.0) for name, mean in means.items()}
        return {name: mean.tolist() for name, mean in means.items()}

    def _summary(self) -> list[str]:
        means = {name: sum(each) / len(each) for name, each in self._baseline_means().items()}
        order = {"corrupted": means.get("corrupted", means.get("unchanged")), "clean": means.get("clean")}
        control = [] if self.control is None else [repr(self.control)]
        return [*(f"{name} {mean:.4g}" for name, mean in order.items() if mean is not None), *control]
