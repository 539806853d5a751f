"""What a probe learns: classes or numbers; their folds, fits and measures, and the labels of a control task."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.results.bootstrap import bootstrap, wilson
from hooked_lm.results.labels import Label

if TYPE_CHECKING:
    import numpy as np

    linear_model: Any
    model_selection: Any
    pipeline: Any
    preprocessing: Any
else:
    linear_model = lazy_import("sklearn.linear_model", "probes")
    model_selection = lazy_import("sklearn.model_selection", "probes")
    pipeline = lazy_import("sklearn.pipeline", "probes")
    preprocessing = lazy_import("sklearn.preprocessing", "probes")

Groups = Sequence[str | int] | None
Folds = Sequence[tuple["np.ndarray", "np.ndarray"]]  # places of training and held-out prompts


def places_of(keys: Sequence[Label]) -> dict[Label, list[int]]:
    """The places of each key, in the order in which keys appear."""
    found: dict[Label, list[int]] = {}
    for place, key in enumerate(keys):
        found.setdefault(key, []).append(place)
    return found


@dataclass(frozen=True, eq=False)
class ProbeTask(ABC):
    """The targets [prompt] of a probe: codes of classes, or numbers."""

    targets: Float[Tensor, " prompt"]

    @abstractmethod
    def folds(self, groups: Groups, n_folds: int, seed: int) -> Folds:
        """Places of training and held-out prompts; raises ValueError for too few prompts or groups."""

    @abstractmethod
    def fitter(self, regularisation: float) -> Any:
        """A new model of scikit-learn."""

    @abstractmethod
    def measured(
        self, targets: Float[Tensor, " prompt"], predicted: Float[Tensor, " prompt"]
    ) -> Float[Tensor, " prompt"]:
        """The measure of each prediction."""

    @abstractmethod
    def guess(self, targets: Float[Tensor, " some"]) -> float:
        """The best prediction for prompts of which only these targets are known."""

    @property
    @abstractmethod
    def chance(self) -> float:
        """The measure of the same guess for all prompts."""

    @abstractmethod
    def interval(self, measured: Float[Tensor, " prompt"]) -> tuple[float, float]:
        """The 95% confidence interval of the mean measure."""

    def by_token(self, tokens: Sequence[Label], folds: Folds) -> Float[Tensor, " prompt"]:
        """The measure of each held-out prompt, guessed from the targets of the training prompts with the same token."""
        predicted = torch.zeros(len(tokens), dtype=torch.float64)
        for train, test in folds:
            known = {token: [i for i in train.tolist() if tokens[i] == token] for token in {tokens[i] for i in test}}
            for place in test.tolist():
                predicted[place] = self.guess(self.targets[known[tokens[place]] or train.tolist()])
        return self.measured(self.targets, predicted).float()

    def control(self, tokens: Sequence[Label], generator: torch.Generator) -> Float[Tensor, " prompt"]:
        """The targets of a control task: a random one for each token (Hewitt and Liang 2019, arXiv:1909.03368).

        Tokens exchange their targets, and the prompts of a token share out those that theirs has got. So a token says as much of
        the new targets as of the real ones: all if each has one, and nothing if it said nothing. If no two prompts have the same
        token, or all have, this shuffles the targets.
        """
        places = list(places_of(tokens).values())
        found = torch.empty_like(self.targets)
        for own, other in zip(places, torch.randperm(len(places), generator=generator).tolist(), strict=True):
            targets = self.targets[places[other]]
            drawn = targets[torch.randperm(len(targets), generator=generator)]
            found[own] = drawn.repeat(-(-len(own) // len(drawn)))[: len(own)]
        return found

    def held_out(
        self,
        x: "np.ndarray",
        targets: Float[Tensor, " prompt"],
        folds: Folds,
        regularisation: float,
    ) -> Float[Tensor, " prompt"]:
        """The measure of each prompt, predicted by the probe that was not trained on it."""
        predicted = torch.zeros(len(targets), dtype=torch.float64)
        for train, test in folds:
            some = targets.numpy()[train]
            if len(set(some.tolist())) < 2:  # by the chance of shuffling
                predicted[test] = float(some[0])
            else:
                predicted[test] = torch.as_tensor(self._pipeline(regularisation).fit(x[train], some).predict(x[test]))
        return self.measured(targets, predicted).float()

    def fitted(self, x: "np.ndarray", regularisation: float) -> tuple[Tensor, Tensor]:
        """The weights [row, width] and biases [row] of a probe of all prompts, for vectors that are not standardised."""
        scaler, probe = self._pipeline(regularisation).fit(x, self.targets.numpy())
        weights = torch.atleast_2d(torch.as_tensor(probe.coef_ / scaler.scale_))
        biases = torch.atleast_1d(torch.as_tensor(probe.intercept_)) - weights @ torch.as_tensor(scaler.mean_)
        return weights.float(), biases.float()

    def _pipeline(self, regularisation: float) -> Any:
        return pipeline.make_pipeline(preprocessing.StandardScaler(), self.fitter(regularisation))


@dataclass(frozen=True, eq=False)
class Classification(ProbeTask):
    """Logistic regression of classes; the measure is whether a prediction is right."""

    labels: Sequence[Label]
    classes: Sequence[Label]

    @classmethod
    def of(cls, labels: Sequence[Label]) -> "Classification":
        """The task of these labels; raises ValueError if all are the same."""
        known = sorted(set(labels), key=lambda label: (isinstance(label, str), label))
        if len(known) < 2:
            raise ValueError(f"a probe tells classes apart, and all {len(labels)} labels are {labels[0]!r}")
        return cls(torch.tensor([known.index(label) for label in labels]).double(), labels, known)

    def folds(self, groups: Groups, n_folds: int, seed: int) -> Folds:
        units, what = (range(len(self.labels)), "prompts") if groups is None else (groups, "groups")
        for label in dict.fromkeys(self.labels):
            n = len({unit for unit, own in zip(units, self.labels, strict=True) if own == label})
            if n < n_folds:
                hint = (
                    "; for a regression give floats" if isinstance(label, int) and len(self.classes) > n_folds else ""
                )
                raise ValueError(
                    f"class {label!r} has {n} of the {what}, and {n_folds} folds need {n_folds}: give more, or fewer folds{hint}"
                )
        kind = model_selection.StratifiedKFold if groups is None else model_selection.StratifiedGroupKFold
        named = [str(label) for label in self.labels]
        return list(kind(n_folds, shuffle=True, random_state=seed).split(named, named, groups))

    def fitter(self, regularisation: float) -> Any:
        return linear_model.LogisticRegression(C=regularisation, max_iter=2000)

    def guess(self, targets: Float[Tensor, " some"]) -> float:
        return float(targets.mode().values)

    @property
    def chance(self) -> float:
        return max(map(len, places_of(self.labels).values())) / len(self.labels)

    def interval(self, measured: Float[Tensor, " prompt"]) -> tuple[float, float]:
        low, high = wilson(measured)
        return float(low), float(high)

    def measured(
        self, targets: Float[Tensor, " prompt"], predicted: Float[Tensor, " prompt"]
    ) -> Float[Tensor, " prompt"]:
        return (predicted == targets).float()


@dataclass(frozen=True, eq=False)
class Regression(ProbeTask):
    """Ridge regression of numbers; the measure is 1 - error² / variance, whose mean is R²."""

    @classmethod
    def of(cls, labels: Sequence[float]) -> "Regression":
        """The task of these labels; raises ValueError if they do not vary, or are not finite."""
        targets = torch.tensor(labels, dtype=torch.float64)
        if not bool(targets.isfinite().all()):
            place = int((~targets.isfinite()).nonzero()[0])
            raise ValueError(f"labels of a regression are finite, and that of prompt {place} is {labels[place]}")
        if not float(targets.std(correction=0)) > 0:
            raise ValueError(f"a probe predicts what varies, and all {len(labels)} labels are {labels[0]}")
        return cls(targets)

    def folds(self, groups: Groups, n_folds: int, seed: int) -> Folds:
        n, what = (len(self.targets), "prompts") if groups is None else (len(set(groups)), "groups")
        if n < n_folds:
            raise ValueError(f"there are {n} {what}, and {n_folds} folds need {n_folds}: give more, or fewer folds")
        kind = model_selection.KFold if groups is None else model_selection.GroupKFold
        places = list(range(len(self.targets)))
        return list(kind(n_folds, shuffle=True, random_state=seed).split(places, places, groups))

    def fitter(self, regularisation: float) -> Any:
        return linear_model.Ridge(alpha=1 / regularisation)

    def guess(self, targets: Float[Tensor, " some"]) -> float:
        return float(targets.mean())

    @property
    def chance(self) -> float:
        return 0.0

    def interval(self, measured: Float[Tensor, " prompt"]) -> tuple[float, float]:
        low, high = bootstrap(measured[None])
        return float(low), float(high)

    def measured(
        self, targets: Float[Tensor, " prompt"], predicted: Float[Tensor, " prompt"]
    ) -> Float[Tensor, " prompt"]:
        return 1 - (targets - predicted).square() / targets.var(correction=0)


def task_of(labels: Sequence[Any] | Tensor) -> Classification | Regression:
    """Classes for strings, ints and bools, a regression for floats.

    Raises TypeError for other labels and for strings among numbers, ValueError for no labels and for labels that do not vary.

    >>> type(task_of([0, 1, 1])).__name__, type(task_of([0, 0.5])).__name__
    ('Classification', 'Regression')
    """
    given = labels.tolist() if hasattr(labels, "tolist") else list(labels)
    if not given:
        raise ValueError("there are no labels: give one for each prompt")
    plain = [one.item() if hasattr(one, "item") else one for one in given]
    if odd := [one for one in plain if not isinstance(one, str | Real)]:
        raise TypeError(f"labels are classes (strings, ints, bools) or numbers (floats), got {odd[0]!r}")
    is_word = [isinstance(one, str) for one in plain]
    if any(is_word) and not all(is_word):
        number = plain[is_word.index(False)]
        raise TypeError(
            f"labels are strings or numbers, and {plain[is_word.index(True)]!r} and {number!r} are both there"
        )
    if any(isinstance(one, float) for one in plain):
        return Regression.of([float(one) for one in plain])
    return Classification.of([one if isinstance(one, str) else int(one) for one in plain])
