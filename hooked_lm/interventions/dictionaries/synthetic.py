"""Synthetic activations of known features: sparse sums of directions, of which it is known which are active in each row."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.interventions.dictionaries.architectures import JumpReLU
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.results import stored

FORMAT = "hooked_lm.SyntheticFeatures"
OWN_SEEDS = 20_220_910  # dictionaries start from random directions too, and must not start from the true ones
PLAIN = ("magnitude", "spread", "noise", "correlation")


class SyntheticSample(NamedTuple):
    """Rows of synthetic activations, and the true activation of each feature in them, 0 where it is not active."""

    activations: Float[Tensor, "row d_model"]
    features: Float[Tensor, "row feature"]


@dataclass(frozen=True, eq=False, repr=False)
class SyntheticFeatures(NotebookRepr):
    """Features with known directions and frequencies, and the activations that they add up to.

    An activation is the sum of the directions of its active features, each times a magnitude, and of noise. There may be more
    features than dimensions (superposition, Elhage et al. 2022, arXiv:2209.10652). `synthetic_features` draws one.

    Args:
        directions: [feature, d_model], of any norm but zero.
        frequencies: [feature]: the share of rows in which a feature is active, above 0, at most 1.
        parents: of each feature the index of its parent, or None. A feature with a parent is active only where its parent is
            (Chanin et al. 2024, arXiv:2409.14507), and there independently of all else; its frequency is still that of all rows.
            Parents come before their children.
        groups: of each feature the label of its group, or None. Features of a group without parents are active together more
            often than by chance: each is active where a normal number is large, and these numbers have the given `correlation`
            (a Gaussian copula). Frequencies are not changed.
        correlation: of the normal numbers of one group, from 0 to below 1.
        magnitude, spread: the mean of the magnitudes of an active feature, and the standard deviation of their logarithm.
        noise: the standard deviation of noise, in each dimension.

    Raises ValueError for sizes, frequencies and parents that do not fit.

    >>> truth = SyntheticFeatures(torch.eye(3), torch.tensor([0.5, 0.25, 0.1]))
    >>> activations, features = truth.sample(1000)
    >>> activations.shape, torch.equal(activations, features)
    (torch.Size([1000, 3]), True)
    """

    directions: Float[Tensor, "feature d_model"]
    frequencies: Float[Tensor, " feature"]
    parents: Sequence[int | None] = ()
    groups: Sequence[int | None] = ()
    correlation: float = 0.0
    magnitude: float = 1.0
    spread: float = 0.25
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.directions.ndim != 2 or self.frequencies.shape != self.directions.shape[:1]:
            raise ValueError(
                f"directions are [feature, d_model] and frequencies [feature], got {list(self.directions.shape)} and "
                f"{list(self.frequencies.shape)}"
            )
        n = len(self.directions)
        for name in ("parents", "groups"):
            given = tuple(getattr(self, name)) or (None,) * n
            object.__setattr__(self, name, given)
            if len(given) != n:
                raise ValueError(f"{name} has an entry for each of {n} features, got {len(given)}")
        if lost := (~(self.frequencies > 0) | (self.frequencies > 1)).nonzero()[:, 0].tolist():
            raise ValueError(
                f"a frequency is above 0 and at most 1, and that of feature {lost[0]} is {float(self.frequencies[lost[0]])}"
            )
        if flat := (self.directions.norm(dim=1) == 0).nonzero()[:, 0].tolist():
            raise ValueError(f"the direction of feature {flat[0]} is zero")
        for child, parent in enumerate(self.parents):
            if parent is not None:
                self._check_parent(child, parent)
        for name in PLAIN:
            number, least = getattr(self, name), 0.0
            if not isfinite(number) or number < least or (name == "magnitude" and number == 0):
                raise ValueError(f"{name} must be {'positive' if name == 'magnitude' else 'at least 0'}, got {number}")
        if self.correlation >= 1:
            raise ValueError(f"correlation must be below 1, got {self.correlation}")

    def _check_parent(self, child: int, parent: int) -> None:
        if not 0 <= parent < child:
            raise ValueError(f"a parent comes before its children, and that of feature {child} is {parent}")
        if self.frequencies[child] > self.frequencies[parent]:
            raise ValueError(
                f"feature {child} cannot be active more often ({float(self.frequencies[child]):.3g}) than its parent {parent} "
                f"({float(self.frequencies[parent]):.3g})"
            )

    @property
    def n_features(self) -> int:
        """The number of features."""
        return len(self.directions)

    @property
    def d_model(self) -> int:
        """The width of the activations."""
        return self.directions.shape[1]

    @property
    def l0(self) -> float:
        """The expected number of active features of a row."""
        return float(self.frequencies.sum())

    def sample(self, rows: int, seed: int = 0) -> SyntheticSample:
        """Draws rows of activations and the features that are active in them; the same for the same seed.

        Raises ValueError unless there is at least one row.
        """
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        generator = torch.Generator().manual_seed(seed)
        active = self._normal(rows, generator) > torch.special.ndtri(1 - self._given_parent().double()).float()
        for child, parent in enumerate(self.parents):
            if parent is not None:
                active[:, child] &= active[:, parent]
        size = torch.randn(rows, self.n_features, generator=generator) * self.spread - self.spread**2 / 2
        features = active * self.magnitude * size.exp()
        activations = features @ self.directions
        if self.noise:
            activations = activations + self.noise * torch.randn(rows, self.d_model, generator=generator)
        return SyntheticSample(activations, features)

    def dictionary(self) -> JumpReLU:
        """The dictionary of the true directions, in which a feature is active where the product with its direction is above half
        of the mean magnitude. That is right for orthogonal directions; where many overlap, a trained encoder can be better."""
        lengths = self.directions.norm(dim=1, keepdim=True)
        sae = JumpReLU.Config(self.d_model, self.n_features, threshold=self.magnitude / 2).build().requires_grad_(False)
        sae.W_dec.copy_(self.directions)
        sae.W_enc.copy_((self.directions / lengths**2).T)
        return sae.eval()

    def _given_parent(self) -> Float[Tensor, " feature"]:
        """The frequency of each feature in the rows where its parent is active."""
        of_parents = [1.0 if parent is None else float(self.frequencies[parent]) for parent in self.parents]
        return (self.frequencies / torch.tensor(of_parents)).clamp(max=1)

    def _normal(self, rows: int, generator: torch.Generator) -> Float[Tensor, "row feature"]:
        """Normal numbers, those of one group correlated."""
        own = torch.randn(rows, self.n_features, generator=generator)
        known = sorted({group for group in self.groups if group is not None})
        shared = torch.randn(rows, len(known), generator=generator)
        for feature, (group, parent) in enumerate(zip(self.groups, self.parents, strict=True)):
            if group is not None and parent is None:
                joint = shared[:, known.index(group)]
                own[:, feature] = self.correlation**0.5 * joint + (1 - self.correlation) ** 0.5 * own[:, feature]
        return own

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file, atomically; `load` restores it bit for bit."""
        tensors = {"directions": self.directions, "frequencies": self.frequencies}
        names = ("parents", "groups", *PLAIN)
        stored.write(path, FORMAT, tensors, {name: getattr(self, name) for name in names})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "SyntheticFeatures":
        """The features that `save` wrote. Raises ValueError for any other file."""
        tensors, metadata = stored.read(path, FORMAT)
        return cls(tensors["directions"], tensors["frequencies"], **metadata)

    def repr_table(self) -> Table:
        """The first features: their frequency, parent and group."""
        rows = [
            (i, f"{float(self.frequencies[i]):.4g}", self.parents[i], self.groups[i])
            for i in range(min(10, self.n_features))
        ]
        return Table(("feature", "frequency", "parent", "group"), rows)

    def __repr__(self) -> str:
        children = sum(parent is not None for parent in self.parents)
        parts = [f"{self.n_features:,} features in {self.d_model:,} dimensions", f"{self.l0:.3g} active"]
        parts += [f"{children} with a parent"] * (children > 0)
        parts += [f"{len({*self.groups} - {None})} correlated groups"] * (self.correlation > 0)
        return f"SyntheticFeatures({', '.join(parts)})"


def synthetic_features(
    n_features: int,
    d_model: int,
    *,
    active: float | int = 4.0,
    exponent: float | int = 1.0,
    most: float = 0.4,
    n_parents: int = 0,
    n_children: int = 2,
    n_groups: int = 0,
    correlation: float = 0.5,
    orthogonal: bool = False,
    magnitude: float = 1.0,
    spread: float = 0.25,
    noise: float = 0.0,
    seed: int = 0,
) -> SyntheticFeatures:
    """Draws features with random directions of norm 1, and frequencies that follow Zipf's law.

    The frequency of feature `i` is proportional to `(i + 1) ** -exponent`, but at most `most`.

    Args:
        active: how many features are active in a row on average.
        exponent: 1 is Zipf's law; 0 gives all features one frequency.
        n_parents, n_children: so many of the most frequent features have so many children each, which are the next ones.
        n_groups: the features without a parent are dealt out to so many groups, whose features have this `correlation`.
        orthogonal: directions that are orthogonal to each other; there are at most `d_model` of them.
        magnitude, spread, noise: as for `SyntheticFeatures`.

    Raises ValueError for numbers that do not fit: more active features than frequencies up to `most` allow, more children than
    features, more orthogonal directions than dimensions.

    >>> truth = synthetic_features(64, 32, active=3, n_parents=4, n_groups=5)
    >>> truth
    SyntheticFeatures(64 features in 32 dimensions, 3 active, 8 with a parent, 5 correlated groups)
    """
    if n_features < 1 or d_model < 1:
        raise ValueError(f"n_features and d_model must be at least 1, got {n_features} and {d_model}")
    if orthogonal and n_features > d_model:
        raise ValueError(f"{n_features} directions cannot be orthogonal in {d_model} dimensions: give orthogonal=False")
    if min(n_parents, n_children, n_groups) < 0 or n_parents * (1 + n_children) > n_features:
        raise ValueError(
            f"n_parents={n_parents} with n_children={n_children} each are {n_parents * (1 + n_children)} features, and there are "
            f"{n_features}"
        )
    drawn = torch.randn(n_features, d_model, generator=torch.Generator().manual_seed(seed + OWN_SEEDS))
    directions = torch.linalg.qr(drawn.T)[0].T.contiguous() if orthogonal else drawn / drawn.norm(dim=1, keepdim=True)
    places = range(n_features)
    with_parent = range(n_parents, n_parents * (1 + n_children))
    parents = [(i - n_parents) % n_parents if i in with_parent else None for i in places]
    groups = [i % n_groups if n_groups and i not in with_parent else None for i in places]
    frequencies = _zipf(n_features, active, exponent, most)
    return SyntheticFeatures(
        directions, frequencies, parents, groups, correlation if n_groups else 0.0, magnitude, spread, noise
    )


def _zipf(n: int, active: float, exponent: float, most: float) -> Float[Tensor, " feature"]:
    """Frequencies by Zipf's law, cut at the largest, that add up to the number of active features."""
    if not 0 < most <= 1:
        raise ValueError(f"most is a frequency, above 0 and at most 1, got {most}")
    if not 0 < active <= most * n:
        raise ValueError(
            f"active must be above 0 and at most {most * n:.4g} ({n} features of frequency most={most}), got {active}"
        )
    shape = torch.arange(1, n + 1, dtype=torch.float64) ** -exponent
    low, high = 0.0, most / float(shape.min())
    for _ in range(80):  # the sum grows with the scale, up to most * n
        scale = (low + high) / 2
        low, high = (scale, high) if float((scale * shape).clamp(max=most).sum()) < active else (low, scale)
    return (high * shape).clamp(max=most).float()
