"""Streaming statistics of sites: one pass over any number of batches, in constant memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.recorder import position_axis
from hooked_lm.interventions.collector import pick_site
from hooked_lm.interventions.streaming import Streaming
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.results import stored
from hooked_lm.results.scores import Scores

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["Statistics", "Summary"]

FORMAT = "hooked_lm.Statistics"
NAMES = ("mean", "std", "minimum", "maximum")
EXTENT = (torch.min, torch.mean, torch.max)
AT_ONCE = 1 << 20  # entries in one chunk


@dataclass(frozen=True, eq=False, repr=False)
class Summary(NotebookRepr):
    """Statistics of a site over `count` vectors, for each entry of [*features], in double precision.

    `variance` is the population variance (divided by `count`). `covariance` is [*features, *features]. `histogram` is
    [*features, bin]: counts of the values between neighbouring `edges`, including the last edge; `below` and `above`
    [*features] count the values outside.
    """

    count: int
    mean: Float[Tensor, "*features"]
    variance: Float[Tensor, "*features"]
    minimum: Float[Tensor, "*features"]
    maximum: Float[Tensor, "*features"]
    covariance: Float[Tensor, "..."] | None = None
    histogram: Int[Tensor, "*features bin"] | None = None
    below: Int[Tensor, "*features"] | None = None
    above: Int[Tensor, "*features"] | None = None

    def __repr__(self) -> str:
        more = [name for name in ("covariance", "histogram") if getattr(self, name) is not None]
        means = f"means {self.mean.min():.4g} to {self.mean.max():.4g}" if self.mean.numel() else "no features"
        beside = "".join(f", {name}" for name in more)
        return f"Summary({self.count:,} vectors of {[*self.mean.shape]}; {means}{beside})"

    def repr_table(self) -> Table:
        """Each statistic with the smallest, mean and largest of its numbers."""
        named = [(name, value) for name, value in self.tensors().items() if name != "count" and value.numel()]
        rows = [(name, [*v.shape], *(f"{f(v.double()).item():.4g}" for f in EXTENT)) for name, v in named]
        return Table(("statistic", "shape", "smallest", "mean", "largest"), rows)

    @property
    def std(self) -> Float[Tensor, "*features"]:
        """The standard deviation."""
        return self.variance.sqrt()

    def tensors(self) -> dict[str, Tensor]:
        """The statistics that were computed, by name."""
        found = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return {"count": torch.tensor(self.count), **found}


class Moments:
    """The state of one site: count, mean, sum of squared (or multiplied) deviations, extremes, histogram."""

    def __init__(self, features: tuple[int, ...], device: torch.device, covariance: bool, edges: Tensor | None) -> None:
        self.features, size = features, prod(features)
        self.count = 0
        self.mean = torch.zeros(size, dtype=torch.float64, device=device)
        self.spread = self.mean.new_zeros((size, size) if covariance else (size,))
        self.minimum = torch.full_like(self.mean, torch.inf)
        self.maximum = torch.full_like(self.mean, -torch.inf)
        self.edges = None if edges is None else edges.to(self.mean)
        n_bins = 0 if edges is None else len(edges) + 1  # including one below and one above
        self.histogram = torch.zeros((size, n_bins), dtype=torch.long, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        edges = () if self.edges is None else (self.edges,)
        return [self.mean, self.spread, self.minimum, self.maximum, self.histogram, *edges]

    def saved(self) -> dict[str, Tensor]:
        """The tensors of a file, on the CPU."""
        names = ("mean", "spread", "minimum", "maximum", "histogram")
        return {name: getattr(self, name).cpu() for name in names}

    def add(self, values: Shaped[Tensor, "sample feature"]) -> None:
        """Adds vectors, in chunks."""
        values = values if values.is_floating_point() else values.double()
        for part in values.split(max(1, AT_ONCE // max(1, values.shape[1]))):
            if len(part):
                self._add(part)

    def _add(self, values: Float[Tensor, "sample feature"]) -> None:
        has_pairs, n = self.spread.ndim == 2, len(values)
        values = values.to(torch.float32 if values.itemsize < 4 else values.dtype)
        self.minimum = torch.minimum(self.minimum, values.amin(0))
        self.maximum = torch.maximum(self.maximum, values.amax(0))
        if self.edges is not None:
            self.histogram += self._counted(values, self.edges)
        values = values.double() if has_pairs else values
        near = values.mean(0)
        deviations = values - near  # small numbers, so their sums are accurate enough to correct `near`
        off = deviations.sum(0).double() / n
        squares = deviations.T @ deviations if has_pairs else deviations.square_().sum(0).double()
        self.merge(n, near.double() + off, squares - n * (torch.outer(off, off) if has_pairs else off.square()))

    def merge(self, count: int, mean: Tensor, spread: Tensor) -> None:
        """Adds the moments of other data (Chan, Golub and LeVeque 1979), without differences of large sums."""
        total = self.count + count
        if not count:
            return
        shift = mean - self.mean
        between = torch.outer(shift, shift) if self.spread.ndim == 2 else shift.square()
        self.spread += spread + between * (self.count * count / total)
        self.mean += shift * (count / total)
        self.count = total

    def _counted(self, values: Tensor, edges: Tensor) -> Tensor:
        """The number of values in each bin, [feature, bin]: below, between the edges, above; NaN is not counted."""
        n_bins = len(edges) + 1
        bins = torch.bucketize(values, edges, right=True)
        bins -= (values == edges[-1]).long()
        bins += torch.arange(values.shape[1], device=values.device) * n_bins
        return torch.bincount(bins[~values.isnan()], minlength=values.shape[1] * n_bins).view(-1, n_bins)

    def summary(self) -> Summary:
        shape = self.features
        pairs = self.spread.ndim == 2
        spread = self.spread.diagonal() if pairs else self.spread
        numbers = [self.mean, spread / max(1, self.count), self.minimum, self.maximum]
        mean, variance, minimum, maximum = (number.cpu().clone().view(shape) for number in numbers)
        covariance = (self.spread / max(1, self.count)).cpu().view(shape + shape) if pairs else None
        counts = self.histogram.cpu().clone().view(*shape, -1)
        bins = (None, None, None) if self.edges is None else (counts[..., 1:-1], counts[..., 0], counts[..., -1])
        return Summary(self.count, mean, variance, minimum, maximum, covariance, *bins)


@dataclass(eq=False, repr=False)
class Statistics(Streaming[Moments]):
    """Mean, variance, covariance, extremes and histogram of sites, over all batches.

    Deviations from the mean are computed in chunks and merged in double precision: with fp32 data, a variance of 1 around a
    mean of a million is accurate to six digits.

    Args:
        n_axes: how many of the last axes are features; the others are samples. 1 is each entry of a vector (heads are
            samples), 2 at ("z", 3) each entry of each head, 0 one number for everything.
        covariance: whether to compute the covariance of all features.
        edges: the increasing edges of the histogram's bins.

    Padding is excluded if it is known: in generation, and after `batch(tokens, mask)` before a forward pass. In generation
    without the key/value cache, which computes all tokens at every step, each token counts once. Both need a site whose
    first axes are batch and position. Adding a batch temporarily needs 8 MiB in addition to histograms and covariances.

    Raises ValueError for edges that do not increase, a site with fewer axes, a mask that does not fit.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = Statistics("resid_post", 2)
    >>> for text in ["The capital of France is", "When Mary and John"]:
    ...     _ = model.run_with_hooks(text, fwd_hooks=[found])
    >>> summary = found["blocks.2.hook_resid_post"]
    >>> summary.count, list(summary.variance.shape)
    (11, [128])
    >>> found.scores().select(statistic="std")
    Scores(site 1 x feature 128, 1 prompt; means 0.6729 to 7.036)
    """

    n_axes: int = field(default=1, kw_only=True)
    covariance: bool = field(default=False, kw_only=True)
    edges: Sequence[float | int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_axes < 0:
            raise ValueError(f"n_axes must be at least 0, got {self.n_axes}")
        if self.edges is not None:
            self.edges = tuple(map(float, self.edges))
            if len(self.edges) < 2 or any(not a < b for a, b in zip(self.edges, self.edges[1:], strict=False)):
                raise ValueError(f"edges must be at least two increasing numbers, got {self.edges}")

    def see(self, value: object, hook: HookPoint) -> None:
        name = hook.name or ""
        if not isinstance(value, Tensor) or value.ndim < self.n_axes:
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"'{name}' is {got}, which does not have the last n_axes={self.n_axes} axes")
        value = self._counted(value.detach(), hook)
        features = tuple(value.shape[value.ndim - self.n_axes :])
        edges = None if self.edges is None else torch.tensor(self.edges, dtype=torch.float64)
        state = self._state(name, features, lambda: Moments(features, value.device, self.covariance, edges))
        state.add(value.reshape(-1, prod(features)))

    def _counted(self, value: Tensor, hook: HookPoint) -> Tensor:
        """The entries of a value that are not padding and were not counted at an earlier step of generation."""
        read, axis, name = self.inputs.latest, position_axis(value.ndim, hook.dims), hook.name or ""
        if read is None or (read.n_new == read.ids.shape[1] and read.mask.all()):
            return value
        if hook.dims[:2] in ((), ("batch", "pos")):
            texts = self.inputs.texts_of(value, name)
            value, mask = value[:, -texts.n_new :], texts.mask[:, -texts.n_new :]
            return value if mask.all() else value[mask.to(value.device)]
        if not read.mask.all():
            raise ValueError(f"a mask of tokens does not apply to '{name}', whose axes are {hook.dims}")
        n_seen = 0 if axis is None else max(0, value.shape[axis] - read.n_new)
        return value if axis is None else value.narrow(axis, n_seen, value.shape[axis] - n_seen)

    def __getitem__(self, site: str | tuple[str, int]) -> Summary:
        """The statistics of a site, by its name or as ("z", 1); KeyError if it had no values."""
        return self._states[pick_site(site, self._states)].summary()

    def found_shown(self) -> Table:
        """A row for each site: its features, the number of vectors, and the smallest, mean and largest number."""
        rows = []
        for site, state in self._states.items():
            numbers = (state.minimum.min(), state.mean.mean(), state.maximum.max())
            rows.append((site, [*state.features], f"{state.count:,}", *(f"{number.item():.4g}" for number in numbers)))
        return Table(("site", "features", "vectors", "smallest", "mean", "largest"), rows)

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each site and feature: `count`, `mean`, `std`, `minimum`, `maximum`."""
        rows: list[dict[str, Any]] = []
        for site in self.sites:
            found = self[site]
            columns = {name: getattr(found, name).flatten().tolist() for name in NAMES}
            for i, place in enumerate(product(*map(range, found.mean.shape))):
                feature = place[0] if len(place) == 1 else place
                rows.append(
                    {"site": site, "feature": feature, "count": found.count, **{n: c[i] for n, c in columns.items()}}
                )
        return pd.DataFrame(rows, columns=["site", "feature", "count", *NAMES])

    def plot(self, statistic: str = "mean", title: str = "") -> "go.Figure":
        """A figure of the mean, std, minimum or maximum of each feature at each site.

        Raises ValueError if there were no values, or if the sites have different numbers of features.
        """
        return self.scores().select(statistic=statistic).plot(title or f"{statistic.capitalize()} of each feature")

    def scores(self) -> Scores:
        """Mean, std, minimum and maximum with axes "site", "statistic" and "feature" (or "feature 0", "feature 1", ...).

        Raises ValueError if there were no values, or if the sites have different numbers of features.
        """
        shapes = {site: state.features for site, state in self._states.items()}
        if len(set(shapes.values())) != 1:
            raise ValueError(f"scores need sites with the same features; these are {shapes or 'none'}")
        found = torch.stack([torch.stack([getattr(self[site], name) for name in NAMES]) for site in shapes])
        features = next(iter(shapes.values()))
        axes = {"feature" if len(features) == 1 else f"feature {i}": range(n) for i, n in enumerate(features)}
        counts = {site: state.count for site, state in self._states.items()}
        about = {"detector": type(self).__name__, "counts": counts}
        return Scores(found[..., None], {"site": list(shapes), "statistic": NAMES, **axes}, about=about)

    def merge(self, other: "Statistics") -> None:
        """Adds the statistics of another object with the same settings; ValueError if they differ (then nothing is added)."""
        for setting in ("n_axes", "covariance", "edges"):
            if getattr(self, setting) != getattr(other, setting):
                raise ValueError(f"{setting} is {getattr(self, setting)} here and {getattr(other, setting)} there")
        for site, theirs in other._states.items():
            if site in self._states and self._states[site].features != theirs.features:
                raise ValueError(f"'{site}' has features {self._states[site].features} here, {theirs.features} there")
        for site, theirs in other._states.items():
            device = theirs.mean.device
            mine = self._states.setdefault(site, Moments(theirs.features, device, self.covariance, theirs.edges))
            mine.merge(theirs.count, theirs.mean.to(mine.mean), theirs.spread.to(mine.mean))
            mine.minimum = torch.minimum(mine.minimum, theirs.minimum.to(mine.mean))
            mine.maximum = torch.maximum(mine.maximum, theirs.maximum.to(mine.mean))
            mine.histogram += theirs.histogram.to(mine.histogram)

    def write(self) -> None:
        """Writes the current statistics of each site to the store; ValueError without one."""
        run = self.run
        for site in self.sites:
            run.add(site, self[site].tensors(), detector=type(self).__name__, edges=self.edges)

    def save(self, path: str | Path) -> None:
        """Writes the statistics to one safetensors file; `load` restores them bit for bit."""
        tensors = {
            f"{site}/{name}": value for site, state in self._states.items() for name, value in state.saved().items()
        }
        counts = {site: state.count for site, state in self._states.items()}
        shapes = {site: state.features for site, state in self._states.items()}
        settings = {"n_axes": self.n_axes, "covariance": self.covariance, "edges": self.edges}
        stored.write(path, FORMAT, tensors, {"counts": counts, "shapes": shapes, "settings": settings})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Statistics":
        """Statistics from a file that `save` wrote, at the sites that had values; more data can be added.

        Raises ValueError for any other file.
        """
        tensors, header = stored.read(path, FORMAT)
        found = cls(list(header["counts"]), **header["settings"])
        edges = None if found.edges is None else torch.tensor(found.edges, dtype=torch.float64)
        for site, count in header["counts"].items():
            state = Moments(tuple(header["shapes"][site]), torch.device("cpu"), found.covariance, edges)
            state.count = count
            for name in state.saved():
                setattr(state, name, tensors[f"{site}/{name}"].clone())
            found._states[site] = state
        return found


def summary_of(tensors: Mapping[str, Tensor]) -> Summary:
    """The summary with these tensors, as read from a store."""
    rest: dict[str, Any] = {name: value for name, value in tensors.items() if name != "count"}
    return Summary(int(tensors["count"]), **rest)
