"""Linear probes of several layers: how well they predict held-out prompts, and the directions that they read."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.results.bootstrap import Resampling, bootstrap, in_words
from hooked_lm.results.bounds import SHARE, Bounds
from hooked_lm.results.control import Control
from hooked_lm.results.labels import Label
from hooked_lm.results.scores import Scores
from hooked_lm.results.tabular import Tabular, with_values

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")
    go = lazy_import("plotly.graph_objects", "viz")

PROBE, CONTROL = "probe", "control"
BY_TOKEN, SHUFFLED = "a random label for each token", "shuffled labels"  # what the control learns
Own = TypeVar("Own", bound="LayerProbes")


@dataclass(frozen=True, eq=False, repr=False)
class LayerProbes(Tabular, Scores):
    """Base class of probes of several layers.

    Args:
        values: [2, layer, prompt]: the measure for each prompt, or each group of prompts, when it was held out; of the probe,
            and of the control, a probe of a random label for each token, or of shuffled labels (`about["control"]`).
        axes: "of" ("probe", "control") and "layer".
        weights, biases: [layer, row, width] and [layer, row]: the probe of all prompts, for vectors as they are in the model.
        shape: the shape of a vector at the site, such as (d_model,) or (head, d_head).
        folds: the number of the fold with which each prompt, or group, was held out.
    """

    weights: Float[Tensor, "..."]
    biases: Float[Tensor, "..."]
    shape: Sequence[int]
    folds: Sequence[int]
    MEASURE: ClassVar[str] = ""

    def _check(self) -> None:
        if list(self.axes)[:1] != ["of"] or len(self.axes) != 2:
            raise ValueError(f"probes have the axes of and layer, these are {list(self.axes)}")
        object.__setattr__(self, "folds", list(self.folds))
        if len(self.folds) != self.n_prompts:
            raise ValueError(f"there are folds of {len(self.folds)} prompts, and values of {self.n_prompts}")

    def _interval_of(
        self,
        values: Float[Tensor, "cell prompt"],
        cells: Int[Tensor, " chosen"],
        resampling: Resampling,
        at_once: bool = False,
    ) -> tuple[Float[Tensor, " chosen"], Float[Tensor, " chosen"]]:
        """The wider of two intervals: over prompts, and over the means of folds, each of which one probe predicted."""
        folds, bounds = torch.tensor(self.folds), self._bounds
        means = torch.stack([values[:, folds == fold].mean(-1) for fold in folds.unique()], -1)
        low, high = super()._interval_of(values, cells, resampling, at_once)
        fold_low, fold_high = bootstrap(means, *resampling, chosen=cells)
        return low.minimum(fold_low.clamp(min=bounds.least)), high.maximum(fold_high.clamp(max=bounds.most))

    def _changed_by(self, name: str, index: int | list[int]) -> dict[str, Any]:
        if name == "of" or isinstance(index, int):
            raise ValueError(f"parts of probes keep their axes: select(layer=[...]), or use .values; got {name!r}")
        return {"weights": self.weights[index], "biases": self.biases[index]}

    @property
    @abstractmethod
    def chance(self) -> tuple[str, float]:
        """The measure of a guess that reads no activation: what it always says, and its value."""

    @property
    @abstractmethod
    def _about_labels(self) -> str:
        """The labels, in the title of the figure."""

    @property
    def _place(self) -> str:
        return list(self.axes)[1]

    @property
    def selectivity(self) -> Float[Tensor, " layer"]:
        """The measure minus that of the control (after Hewitt and Liang 2019, arXiv:1909.03368)."""
        return self.mean[0] - self.mean[1]

    @property
    def control(self) -> Control:
        """The measure of the best layer beside its control, which does as well if the interval of no layer, all of them at
        once, is above that of its control."""
        with in_words():
            low, _ = self.interval(simultaneous=True)
        (measured, control), best = self.mean, int(self.mean[0].argmax())
        name, numbers = str(self.about.get("control", SHUFFLED)), (measured[best].item(), control[best].item())
        return Control(name, self.MEASURE, *numbers, bool((low[0] <= control).all()), "the labels")

    def _rows(self, layer: Label) -> Float[Tensor, "row width"]:
        """The weights of a layer; raises ValueError for an unknown one."""
        places = list(self.axes[self._place])
        if layer not in places:
            raise ValueError(f"there is no probe of {layer!r}; there are {', '.join(map(str, places))}")
        return self.weights[places.index(layer)]

    def _unit(self, vector: Float[Tensor, " width"]) -> Float[Tensor, "..."]:
        return (vector / vector.norm()).reshape(tuple(self.shape))

    # ---- tables and figures ------------------------------------------------------------------------------------------

    def to_dataframe(self, per_prompt: bool = False, level: float = 0.95) -> "pd.DataFrame":
        """A row for each layer: the measure with its interval (`low`, `high`), `control`, `selectivity`, of classes `majority`.

        With `per_prompt`, a row for the probe and for the control of each layer and prompt (or group).
        """
        if per_prompt:
            return self._by_prompt()
        (low, _), (high, _) = self.interval(level)
        columns = {self.MEASURE: self.mean[0], **with_values(low=low, high=high)}
        columns |= {"control": self.mean[1], "selectivity": self.selectivity}
        table = pd.DataFrame({self._place: list(self.axes[self._place])})
        table = table.assign(**{name: column.numpy() for name, column in columns.items()})
        return table.assign(**dict(self._guesses()))

    def _guesses(self) -> list[tuple[str, float]]:
        """Further columns of the table: what guesses reach, with their names."""
        return []

    def plot(self, title: str = "", show_values: bool = False) -> "go.Figure":
        """Plot the measure on held-out prompts by layer with its interval, the control, and what a guess reaches."""
        from hooked_lm import viz

        labels = list(self.axes[self._place])
        is_numbered = all(isinstance(label, int) for label in labels)
        x = torch.tensor(labels if is_numbered else range(len(labels)), dtype=torch.float32)
        (low, control_low), (high, control_high) = self.interval()
        control = f"control ({self.about.get('control', SHUFFLED)})"
        lines = {"probe": self.mean[0], control: self.mean[1]}
        bounds = {"probe": (low, high), control: (control_low, control_high)}
        guess, value = self.chance
        lines[guess] = torch.full_like(x, value)
        title = title or f"{self.about.get('site', 'probes')}: {self._about_labels}"
        y_title = f"{self.MEASURE} on held-out prompts"
        figure = viz.lines(
            x,
            lines,
            bounds,
            title,
            self._place,
            y_title,
            show_values,
            subtitle=self._of_each,
            references=(control, guess),
        )
        if not is_numbered:
            figure.update_xaxes(tickvals=x.tolist(), ticktext=[str(label) for label in labels])
        return figure

    @property
    def _counted(self) -> str:
        return "group" if "groups" in self.about else "prompt"

    def _range(self) -> list[str]:
        return []  # it would be that of the probe and the control together

    def _summary(self) -> list[str]:
        best = int(self.mean[0].argmax())
        guess, value = self.chance
        return [
            f"best {self._place} {self.axes[self._place][best]} with {self.MEASURE} {self.mean[0, best]:.2f}, control "
            f"{self.mean[1, best]:.2f}, {guess} {value:.2f}",
            *([f"no better than {self.control.name}"] if self.control.does_as_well else []),
        ]


@dataclass(frozen=True, eq=False, repr=False)
class Probes(LayerProbes):
    """Linear probes of classes, with their accuracy on held-out prompts.

    Args:
        values: [2, layer, prompt]: the share of right predictions for each prompt, or each group of prompts, when it was held
            out; of the probe, and of the control, a probe of a random label for each token, or of shuffled labels
            (`about["control"]`).
        axes: "of" ("probe", "control") and "layer".
        weights, biases: [layer, class, width] and [layer, class]: the probe of all prompts, for vectors as they are in the
            model. With two classes there is one row, which is positive for the second class.
        classes: the labels, sorted; `counts` how many prompts have each.
        shape: the shape of a vector at the site, such as (d_model,) or (head, d_head).
        folds: the number of the fold with which each prompt, or group, was held out.

    `mean` and `interval` are those of the accuracies over prompts, or over groups. The interval is Wilson's (1927), or that of
    the means of folds where it is wider: the prompts of a fold share their probe, and are right or wrong together. (Of 300 sets
    of 24 to 40 prompts, Wilson's contained the expected accuracy in 86 to 89 %, this one in 92 to 95 %.)
    """

    classes: Sequence[Label]
    counts: Sequence[int]
    MEASURE: ClassVar[str] = "accuracy"

    def _known_bounds(self) -> Bounds:
        return SHARE

    @property
    def accuracy(self) -> Float[Tensor, " layer"]:
        """The accuracy on held-out prompts, by layer."""
        return self.mean[0]

    @property
    def majority(self) -> float:
        """The accuracy of always saying the most frequent class."""
        return max(self.counts) / sum(self.counts)

    @property
    def chance(self) -> tuple[str, float]:
        """The most frequent class, and `majority`."""
        return "largest class", self.majority

    @property
    def _about_labels(self) -> str:
        return f"{len(self.classes)} classes, {sum(self.counts)} prompts"

    def direction(self, layer: Label, label: Label | None = None) -> Float[Tensor, "..."]:
        """The unit vector along which the probe of a layer reads a class, in the shape of the site's vectors.

        With two classes it points from the first to the second, unless `label` is the first. With more, `label` is needed, and
        the direction is that of the class minus the mean of all classes. Raises ValueError for an unknown layer or class.
        """
        rows = self._rows(layer)
        known: list[Label | None] = list(self.classes)
        if label not in (known if len(known) > 2 else [*known, None]):
            raise ValueError(f"label must be one of the classes {list(self.classes)}, got {label!r}")
        if len(self.classes) == 2:
            found = rows[0] * (-1 if label is not None and label == self.classes[0] else 1)
        else:
            found = rows[known.index(label)] - rows.mean(0)
        return self._unit(found)

    def _guesses(self) -> list[tuple[str, float]]:
        return [("majority", self.majority)]


@dataclass(frozen=True, eq=False, repr=False)
class RegressionProbes(LayerProbes):
    """Linear probes of numbers, with the share of their variance that is explained on held-out prompts, R².

    Args:
        values: [2, layer, prompt]: 1 - (label - prediction)² / variance of the labels, for each prompt or the mean of each
            group of prompts, when it was held out; of the probe, and of the control, a probe of a random label for each
            token, or of shuffled labels (`about["control"]`).
        axes: "of" ("probe", "control") and "layer".
        weights, biases: [layer, 1, width] and [layer, 1]: the probe of all prompts, for vectors as they are in the model.
        shape: the shape of a vector at the site, such as (d_model,) or (head, d_head).
        folds: the number of the fold with which each prompt, or group, was held out.
        n_labels, label_mean, label_std: the number of labels, their mean and deviation.

    R² is 1 for right predictions, 0 for always saying the mean, and negative for worse ones. `mean` and `interval` are those of
    R²: bootstrap over prompts, or over groups, or over the means of folds where it is wider, with the variance of the labels
    treated as exact.
    """

    n_labels: int
    label_mean: float
    label_std: float
    MEASURE: ClassVar[str] = "r2"

    def _known_bounds(self) -> Bounds:
        return Bounds(most=1.0)

    @property
    def r2(self) -> Float[Tensor, " layer"]:
        """R² on held-out prompts, by layer."""
        return self.mean[0]

    @property
    def chance(self) -> tuple[str, float]:
        """Always the mean, which explains nothing."""
        return "always the mean label", 0.0

    @property
    def _about_labels(self) -> str:
        return f"numbers {self.label_mean:.3g} ± {self.label_std:.3g}, {self.n_labels} prompts"

    def direction(self, layer: Label) -> Float[Tensor, "..."]:
        """The unit vector along which the probe of a layer reads larger numbers, in the shape of the site's vectors.

        Raises ValueError for an unknown layer.
        """
        return self._unit(self._rows(layer)[0])
