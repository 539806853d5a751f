"""Linear probes: what can be read off the activations of a site, with held-out accuracy and a control."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.probe_vectors import checked_vectors, vectors_of
from hooked_lm.engine.progress import progress_bar
from hooked_lm.extras import later
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.labels import Label
from hooked_lm.results.scores import Scores, origin

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import plotly.graph_objects as go

    linear_model: Any
    model_selection: Any
    pipeline: Any
    preprocessing: Any
else:
    linear_model = later("sklearn.linear_model", "probes")
    model_selection = later("sklearn.model_selection", "probes")
    pipeline = later("sklearn.pipeline", "probes")
    preprocessing = later("sklearn.preprocessing", "probes")
    pd = later("pandas", "viz")

PROBE, CONTROL = "probe", "control"

__all__ = ["Probes", "train_probe"]


@dataclass(frozen=True, eq=False, repr=False)
class Probes(Scores):
    """Linear probes of several layers, with their accuracy on held-out prompts.

    Args:
        values: [2, layer, prompt]: the share of right predictions for each prompt, or each group of prompts, when it was held
            out; of the probe, and of the control, a probe of shuffled labels.
        axes: "of" ("probe", "control") and "layer".
        weights, biases: [layer, class, width] and [layer, class]: the probe of all prompts, for vectors as they are in the model.
            With two classes there is one row, which is positive for the second class.
        classes: the labels, sorted; `counts` how many prompts have each.
        shape: the shape of a vector at the site, such as (d_model,) or (head, d_head).

    `mean` and `interval` are those of the accuracies: bootstrap over prompts, or over groups. If all predictions are right,
    nothing varies, and the interval is a point.
    """

    weights: Float[Tensor, "..."]
    biases: Float[Tensor, "..."]
    classes: Sequence[Label]
    counts: Sequence[int]
    shape: Sequence[int]

    def _check(self) -> None:
        super()._check()
        if list(self.axes)[:1] != ["of"] or len(self.axes) != 2:
            raise ValueError(f"probes have the axes of and layer, these are {list(self.axes)}")

    def _changed_by(self, name: str, index: int | list[int]) -> dict[str, Any]:
        if name == "of" or isinstance(index, int):
            raise ValueError(f"parts of probes keep their axes: select(layer=[...]), or use .values; got {name!r}")
        return {"weights": self.weights[index], "biases": self.biases[index]}

    # ---- numbers -----------------------------------------------------------------------------------------------------

    @property
    def accuracy(self) -> Float[Tensor, " layer"]:
        """The accuracy on held-out prompts, by layer."""
        return self.mean[0]

    @property
    def selectivity(self) -> Float[Tensor, " layer"]:
        """The accuracy minus that of the control (after Hewitt and Liang 2019, arXiv:1909.03368)."""
        return self.mean[0] - self.mean[1]

    @property
    def majority(self) -> float:
        """The accuracy of always saying the most frequent class."""
        return max(self.counts) / sum(self.counts)

    def direction(self, layer: Label, label: Label | None = None) -> Float[Tensor, "..."]:
        """The unit vector along which the probe of a layer reads a class, in the shape of the site's vectors.

        With two classes it points from the first to the second, unless `label` is the first. With more, `label` is needed, and
        the direction is that of the class minus the mean of all classes. Raises ValueError for an unknown layer or class.
        """
        places = list(self.axes[list(self.axes)[1]])
        if layer not in places:
            raise ValueError(f"there is no probe of {layer!r}; there are {', '.join(map(str, places))}")
        known: list[Label | None] = list(self.classes)
        if label not in (known if len(known) > 2 else [*known, None]):
            raise ValueError(f"label must be one of the classes {list(self.classes)}, got {label!r}")
        rows = self.weights[places.index(layer)]
        if len(self.classes) == 2:
            found = rows[0] * (-1 if label is not None and label == self.classes[0] else 1)
        else:
            found = rows[known.index(label)] - rows.mean(0)
        return (found / found.norm()).reshape(tuple(self.shape))

    # ---- tables and figures ------------------------------------------------------------------------------------------

    def to_dataframe(self, per_prompt: bool = False, level: float = 0.95) -> "pd.DataFrame":
        """A row for each layer: `accuracy` with its interval (`low`, `high`), `control`, `selectivity`, and `majority`.

        With `per_prompt`, a row for the probe and for the control of each layer and prompt (or group).
        """
        if per_prompt:
            return super().to_dataframe(per_prompt=True)
        (low, _), (high, _) = self.interval(level)
        place = list(self.axes)[1]
        columns = {"accuracy": self.accuracy, "low": low, "high": high}
        columns |= {"control": self.mean[1], "selectivity": self.selectivity}
        table = pd.DataFrame({place: list(self.axes[place])})
        return table.assign(**{name: column.numpy() for name, column in columns.items()}, majority=self.majority)

    def plot(self, title: str = "", show_values: bool = False) -> "go.Figure":
        """Plot the accuracy on held-out prompts by layer with its interval, the control, and the share of the largest class."""
        from hooked_lm import viz

        place = list(self.axes)[1]
        labels = list(self.axes[place])
        is_numbered = all(isinstance(label, int) for label in labels)
        x = torch.tensor(labels if is_numbered else range(len(labels)), dtype=torch.float32)
        (low, control_low), (high, control_high) = self.interval()
        lines = {"probe": self.accuracy, "control (shuffled labels)": self.mean[1]}
        bounds = {"probe": (low, high), "control (shuffled labels)": (control_low, control_high)}
        lines["largest class"] = torch.full_like(x, self.majority)
        title = title or f"{self.about.get('site', 'probes')}: {len(self.classes)} classes, {sum(self.counts)} prompts"
        figure = viz.lines(x, lines, bounds, title, place, "accuracy on held-out prompts", show_values=show_values)
        if not is_numbered:
            figure.update_xaxes(tickvals=x.tolist(), ticktext=[str(label) for label in labels])
        return figure

    def _summary(self) -> list[str]:
        best = int(self.accuracy.argmax())
        place = list(self.axes)[1]
        return [
            f"best {place} {self.axes[place][best]} with {self.accuracy[best]:.2f}, control {self.mean[1][best]:.2f}, "
            f"largest class {self.majority:.2f}"
        ]


def train_probe(
    source: Decoder | ActivationCache | Mapping[int, Tensor],
    labels: Sequence[str | int | bool],
    *,
    prompts: Sequence[str] | Tensor | None = None,
    site: str = "resid_post",
    layers: Sequence[int] | None = None,
    positions: int = -1,
    groups: Sequence[str | int] | None = None,
    n_folds: int = 5,
    n_shuffles: int = 3,
    regularisation: float = 1.0,
    seed: int = 0,
    batch_size: int = 32,
    progress: bool | None = None,
) -> Probes:
    """Logistic regression of a label from the activations of each layer, evaluated on held-out prompts.

    Prompts are cut into folds, stratified by label. Each fold is predicted by a probe of the others, so every prompt is held out
    once. Vectors are standardised by the mean and deviation of the training prompts. The control does the same with shuffled
    labels, which no activation predicts: it shows what the number of prompts and the width allow by chance.

    Args:
        source: a model, which runs `prompts`; a cache of a run without padding; or vectors [prompt, width] by layer.
        labels: the class of each prompt.
        site: the short name of a site, one for each layer. Heads are side by side.
        layers: None for all layers.
        positions: the position whose vector is read; negative ones count from the last token of each prompt.
        groups: prompts of one group, such as those of one template or entity, are held out together; intervals are over groups.
        n_folds: the number of folds; each class needs as many prompts, or groups.
        n_shuffles: shuffled labelings over which the control is averaged.
        regularisation: the inverse strength of the L2 penalty (C of scikit-learn).
        batch_size: how many prompts run together.
        progress: whether to show a bar; None: if the work takes longer than a second.

    Returns Probes: `accuracy`, `selectivity`, `to_dataframe`, `plot`, and `direction(layer)` for steering. Raises ValueError for
    labels that do not fit, a single class, too few prompts or groups, positions out of range and values that are not finite;
    ImportError without scikit-learn (`pip install 'hooked-lm[probes]'`).

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> names = ["Mary", "Alice", "Sarah", "Laura", "John", "Tom", "Peter", "David"]
    >>> prompts = [f"When {name} went to the {place}," for place in ("store", "park") for name in names]
    >>> probes = train_probe(model, [i % 8 < 4 for i in range(16)], prompts=prompts, positions=1, layers=[0, 3], n_folds=4)
    >>> probes.direction(3).shape
    torch.Size([128])
    """
    classes = [label if isinstance(label, str) else int(label) for label in labels]
    known = sorted(set(classes), key=lambda label: (isinstance(label, str), label))
    vectors, name = vectors_of(source, prompts, site, layers, positions, batch_size)
    data = {layer: checked_vectors(value, len(classes), layer) for layer, value in vectors.items()}
    _check_numbers(n_folds, n_shuffles, regularisation)
    folds = _folds(classes, groups, n_folds, seed)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.tensor([known.index(label) for label in classes])
    shuffled = [codes[torch.randperm(len(codes), generator=generator)] for _ in range(n_shuffles)]
    right, weights, biases = [], [], []
    for value in progress_bar("probes", len(data), progress, unit="layers", steps=list(data.values())):
        x = value.flatten(1).double().numpy()
        chance = torch.stack([_held_out(x, labeling, folds, regularisation) for labeling in shuffled])
        right.append(torch.stack([_held_out(x, codes, folds, regularisation), chance.mean(0)]))
        weight, bias = _fitted(x, codes, regularisation)
        weights.append(weight)
        biases.append(bias)
    values = _by_group(torch.stack(right, 1), groups)
    settings = {"folds": n_folds, "shuffles": n_shuffles, "regularisation": regularisation, "seed": seed}
    about = origin(source if isinstance(source, Decoder) else None, site=name, position=positions, **settings)
    if groups is not None:
        about["groups"] = values.shape[-1]
    shape = list(next(iter(data.values())).shape[1:])
    counts = [classes.count(label) for label in known]
    axes: dict[str, Sequence[Label]] = {"of": [PROBE, CONTROL], "layer": list(data)}
    return Probes(values, axes, torch.stack(weights), torch.stack(biases), known, counts, shape, about=about)


# ---- folds and fits --------------------------------------------------------------------------------------------------


def _check_numbers(n_folds: int, n_shuffles: int, regularisation: float) -> None:
    for name, number, least in (("n_folds", n_folds, 2), ("n_shuffles", n_shuffles, 1)):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    if not regularisation > 0:
        raise ValueError(f"regularisation must be positive, got {regularisation}")


def _folds(
    classes: Sequence[Label], groups: Sequence[str | int] | None, n_folds: int, seed: int
) -> "list[tuple[np.ndarray, np.ndarray]]":
    """Places of training and held-out prompts; raises ValueError for one class, and for too few prompts or groups."""
    if groups is not None and len(groups) != len(classes):
        raise ValueError(f"there are {len(groups)} groups for {len(classes)} labels: give one for each prompt")
    known = dict.fromkeys(classes)
    if len(known) < 2:
        raise ValueError(
            f"a probe tells classes apart, and all {len(classes)} labels are {next(iter(known), 'missing')!r}"
        )
    units = range(len(classes)) if groups is None else groups
    what = "prompts" if groups is None else "groups"
    for label in known:
        n = len({unit for unit, own in zip(units, classes, strict=True) if own == label})
        if n < n_folds:
            raise ValueError(
                f"class {label!r} has {n} {what}, and {n_folds} folds need {n_folds}: give more, or fewer folds"
            )
    kind = model_selection.StratifiedKFold if groups is None else model_selection.StratifiedGroupKFold
    split = kind(n_folds, shuffle=True, random_state=seed).split(
        list(classes), [str(label) for label in classes], groups
    )
    return list(split)


def _held_out(
    x: "np.ndarray", codes: Tensor, folds: "list[tuple[np.ndarray, np.ndarray]]", regularisation: float
) -> Float[Tensor, " prompt"]:
    """Whether each prompt is predicted by the probe that was not trained on it."""
    right = torch.zeros(len(codes))
    for train, test in folds:
        targets = codes.numpy()[train]
        if len(set(targets.tolist())) < 2:  # by the chance of shuffling
            predicted = torch.full((len(test),), int(targets[0]))
        else:
            predicted = torch.as_tensor(_pipeline(regularisation).fit(x[train], targets).predict(x[test]))
        right[test] = (predicted == codes[test]).float()
    return right


def _fitted(x: "np.ndarray", codes: Tensor, regularisation: float) -> tuple[Tensor, Tensor]:
    """The weights and biases of a probe of all prompts, for vectors that are not standardised."""
    fitted = _pipeline(regularisation).fit(x, codes.numpy())
    scaler, probe = fitted[0], fitted[1]
    weights = torch.as_tensor(probe.coef_ / scaler.scale_)
    biases = torch.as_tensor(probe.intercept_) - weights @ torch.as_tensor(scaler.mean_)
    return weights.float(), biases.float()


def _pipeline(regularisation: float) -> Any:
    probe = linear_model.LogisticRegression(C=regularisation, max_iter=2000)
    return pipeline.make_pipeline(preprocessing.StandardScaler(), probe)


def _by_group(
    right: Float[Tensor, "of layer prompt"], groups: Sequence[str | int] | None
) -> Float[Tensor, "of layer unit"]:
    """The mean over the prompts of each group."""
    if groups is None:
        return right
    places = {group: [i for i, own in enumerate(groups) if own == group] for group in dict.fromkeys(groups)}
    return torch.stack([right[..., some].mean(-1) for some in places.values()], -1)
