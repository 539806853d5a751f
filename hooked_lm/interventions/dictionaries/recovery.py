"""Evaluates dictionaries on synthetic activations: how much of the features that are known to be there a dictionary has found."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.extras import lazy_import
from hooked_lm.interventions.dictionaries.floors import FIT_ROWS, check_control, floors_of
from hooked_lm.interventions.dictionaries.hook import Coder, decoded, encoded
from hooked_lm.interventions.dictionaries.normalized import Normalized
from hooked_lm.interventions.dictionaries.scores import DictionaryEvaluation, beside_floors
from hooked_lm.interventions.dictionaries.site import check_dictionary
from hooked_lm.interventions.dictionaries.synthetic import SyntheticFeatures, SyntheticSample
from hooked_lm.results.labels import Label
from hooked_lm.results.scores import provenance

if TYPE_CHECKING:
    from types import ModuleType

    optimize: ModuleType
else:
    optimize = lazy_import("scipy.optimize", "probes")

CHUNK = 4096  # rows that are encoded together
TAKEN_OVER = 0.5  # of the projection of a feature that another latent has to make up for: then the feature is absorbed


def evaluate_recovery(
    truth: SyntheticFeatures,
    sae: Coder,
    *,
    rows: int = 10_000,
    control: str | None = "auto",
    seed: int = 0,
) -> DictionaryEvaluation:
    """How much of known features a dictionary has found, beside a random and a PCA dictionary of the same size and L0.

    Latents (the features of the dictionary) are matched with true features one to one, so that the sum of the cosines of their
    directions is largest (the Hungarian algorithm). The `figures`:

    - "MCC": the mean absolute cosine of matched directions (Song et al. 2025, arXiv:2505.20254; for it alone, cosines of both
      signs are matched).
    - "cosine of features", "cosine of latents": the mean over true features (latents that are ever active) of the largest cosine
      with a latent (a true feature).
    - "F1": of a matched latent that is active as a guess that the feature is, the mean over all features, 0 for those without a
      latent; "F1 of frequent features", "F1 of rare features": of the third that is active most, and least, often.
    - "F1 by latent": the mean over latents of the F1 for the feature with the nearest direction; "uniqueness": the number of
      features that are nearest to a latent, over the number of latents. Both as `sae_lens.synthetic`.
    - "merged": the share of latents that are the nearest one of several features, at best 0.
    - "slope": the regression through 0 of the activation of a matched latent (times the norm of its direction) on the true
      magnitude where both are active; below 1 are shrunken activations.
    - "absorption", if features have parents: the share of rows with a parent in which its matched latent is silent and one other
      latent makes up at least half of its projection (after Chanin et al. 2024, arXiv:2409.14507). At best 0.
    - "explained variance", "L0" and "dead" as for `evaluate_dictionary`.

    In few dimensions random directions are near to any feature: read every number beside its floors.

    Args:
        rows: the number of rows that are drawn; they are others than those of `truth.sample(n, seed)`.
        control: "auto" measures the floors, None leaves them out.
        seed: of the rows and of the random dictionary.

    Returns the `figures` with the floors, and those of `each` feature. Warns if the dictionary has no larger MCC than the random
    one. Raises TypeError for a dictionary without `W_dec`, ValueError for one of another width, and for a feature that is active
    in no row; ImportError without scipy (`pip install 'hooked-lm[probes]'`).

    >>> from hooked_lm.interventions.dictionaries import synthetic_features
    >>> truth = synthetic_features(16, 16, active=2, spread=0.1, orthogonal=True)
    >>> found = evaluate_recovery(truth, truth.dictionary())
    >>> found.figures.select(figure=["MCC", "F1", "slope"]).mean.round(decimals=3)
    tensor([1., 1., 1.])
    """
    check_control(control)
    check_dictionary(sae)
    directions = directions_of(sae)
    if directions.shape[1] != truth.d_model:
        raise ValueError(
            f"the dictionary has directions of width {directions.shape[1]}, and the features are in {truth.d_model} dimensions"
        )
    sample = truth.sample(rows, seed + 1_000_003)  # not what a dictionary was trained on
    if silent := (sample.features == 0).all(0).nonzero()[:, 0].tolist():
        least = float(truth.frequencies.min())
        raise ValueError(
            f"features {', '.join(map(str, silent[:5]))} are active in none of {rows:,} rows: give more rows (the rarest is "
            f"active in {least:.2g} of them)"
        )
    floors, said = floors_of(sae, sample.activations[:FIT_ROWS].to(directions), control, seed)
    coders: dict[str, Coder] = {"values": sae, **(floors.by_name() if floors else {})}
    found = {name: _Recovered(truth, coder, sample) for name, coder in coders.items()}
    about = provenance(None, rows=rows, seed=seed, control=said) | {"true L0": truth.l0}
    wholes = {name: of.figures() for name, of in found.items()}
    columns = {name: torch.tensor(list(of.values())) for name, of in wholes.items()}
    figures = beside_floors(columns, {"figure": list(wholes["values"])}, about, "MCC")
    of_each = {name: of.each() for name, of in found.items()}
    columns = {name: torch.stack(list(of.values())) for name, of in of_each.items()}
    axes: dict[str, Sequence[Label]] = {"figure": list(of_each["values"]), "feature": list(range(truth.n_features))}
    figures.warn_if_no_better()
    return DictionaryEvaluation(figures, beside_floors(columns, axes, about, "F1"))


def directions_of(sae: object) -> Float[Tensor, "latent d_out"]:
    """The directions of a dictionary, `W_dec`. Raises TypeError for one that has none."""
    inner = sae.sae if isinstance(sae, Normalized) else sae
    weight = getattr(inner, "W_dec", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise TypeError(f"a {type(sae).__name__} has no directions: its W_dec must be a tensor [feature, d_out]")
    return weight.detach().float()


def cosines(one: Float[Tensor, "a d"], other: Float[Tensor, "b d"]) -> Float[Tensor, "a b"]:
    """The cosines of all pairs of directions; 0 with a direction that is zero."""
    return nn.functional.normalize(one, dim=1) @ nn.functional.normalize(other, dim=1).T


def matched(similarity: Float[Tensor, "latent feature"]) -> tuple[Int[Tensor, " pair"], Int[Tensor, " pair"]]:
    """The latents and features of a one-to-one matching with the largest sum, in the order of the latents."""
    latents, features = optimize.linear_sum_assignment(similarity.double().cpu().numpy(), maximize=True)
    return torch.as_tensor(latents), torch.as_tensor(features)


def absorbed(
    contributions: Float[Tensor, "row latent"], main: Bool[Tensor, " latent"], needed: Float[Tensor, " row"]
) -> Bool[Tensor, " row"]:
    """The rows in which all `main` latents of a feature are silent, and one other contributes at least `TAKEN_OVER` of what is
    needed along its direction."""
    others = contributions.masked_fill(main, -torch.inf)
    return (contributions[:, main] == 0).all(1) & (others.max(1).values >= TAKEN_OVER * needed)


class _Recovered:
    """What a dictionary makes of a sample of known features."""

    def __init__(self, truth: SyntheticFeatures, sae: Coder, sample: SyntheticSample) -> None:
        self.truth, self.directions = truth, directions_of(sae)
        self.cosines = cosines(self.directions, truth.directions.to(self.directions)).cpu()
        self.latents, self.features = matched(self.cosines)
        self.nearest = self.cosines.abs().argmax(1)  # feature of each latent
        self.parents = sorted({parent for parent in truth.parents if parent is not None})
        n_latents, n_pairs = len(self.cosines), len(self.latents)
        self.ever, self.n_active, self.error = torch.zeros(n_latents, dtype=torch.bool), 0, 0.0
        self.pairs, self.by_latent = torch.zeros(3, n_pairs), torch.zeros(3, n_latents)
        self.products, self.squares = torch.zeros(n_pairs).double(), torch.zeros(n_pairs).double()
        self.n_absorbed = torch.zeros(len(self.parents))
        self.rows = len(sample.activations)
        with torch.no_grad():
            for start in range(0, self.rows, CHUNK):
                self._add(sae, *(values[start : start + CHUNK] for values in sample))
        centred = sample.activations.double() - sample.activations.double().mean(0)
        self.variance = centred.pow(2).sum().item()
        self.present = (sample.features > 0).sum(0)

    def _add(self, sae: Coder, x: Float[Tensor, "row d"], true: Float[Tensor, "row feature"]) -> None:
        x = x.to(self.directions)
        found = encoded(sae, x)
        self.error += (decoded(sae, found, x).double() - x.double()).pow(2).sum().item()
        found = found.float().cpu()
        active, present = found != 0, true > 0
        self.ever |= active.any(0)
        self.n_active += int(active.sum())
        self.pairs += _counts(active[:, self.latents], present[:, self.features])
        self.by_latent += _counts(active, present[:, self.nearest])
        sizes = found[:, self.latents] * self.directions.norm(dim=1).cpu()[self.latents]
        magnitudes = true[:, self.features] * (active[:, self.latents] & present[:, self.features])
        lengths = self.truth.directions.norm(dim=1)[self.features]
        self.products += (sizes * magnitudes * lengths).double().sum(0)
        self.squares += (magnitudes * lengths).double().pow(2).sum(0)
        for number, parent in enumerate(self.parents):
            self.n_absorbed[number] += self._absorbed(found, true, parent)

    def _absorbed(self, found: Tensor, true: Tensor, parent: int) -> int:
        """In how many rows a parent is absorbed."""
        main = torch.zeros(found.shape[1], dtype=torch.bool)
        main[self.latents[self.features == parent]] = True
        rows = true[:, parent] > 0
        direction = self.truth.directions[parent]
        along = self.directions.cpu() @ direction / direction.norm()
        return int(absorbed(found[rows] * along, main, true[rows, parent] * direction.norm()).sum())

    def each(self) -> dict[str, Float[Tensor, " feature"]]:
        """The figures of each true feature; 0 for one without a latent, NaN for the slope of one that is never found."""
        hits, false, missed = self.pairs
        found = {
            "cosine": self.cosines[self.latents, self.features],
            "F1": _ratio(2 * hits, 2 * hits + false + missed),
            "precision": _ratio(hits, hits + false),
            "recall": _ratio(hits, hits + missed),
            "slope": (self.products / self.squares).float(),
        }
        whole = {
            name: torch.full((self.truth.n_features,), torch.nan if name == "slope" else 0.0).index_put(
                (self.features,), values
            )
            for name, values in found.items()
        }
        return {**whole, "frequency": self.present / self.rows}

    def figures(self) -> dict[str, float]:
        """The figures of the whole."""
        each, n = self.each(), self.truth.n_features
        third = max(1, n // 3)
        order = each["frequency"].argsort(descending=True, stable=True)
        hits, false, missed = self.by_latent
        signed = matched(self.cosines.abs())
        best_latent = self.cosines.argmax(0)
        several = (torch.bincount(best_latent, minlength=len(self.cosines)) > 1).float().mean()
        found: dict[str, float | Tensor] = {
            "MCC": self.cosines.abs()[signed].mean(),
            "cosine of features": self.cosines.max(0).values.mean(),
            "cosine of latents": self.cosines[self.ever].max(1).values.mean(),
            "F1": each["F1"].mean(),
            "F1 of frequent features": each["F1"][order[:third]].mean(),
            "F1 of rare features": each["F1"][order[-third:]].mean(),
            "F1 by latent": _ratio(2 * hits, 2 * hits + false + missed).mean(),
            "uniqueness": len(self.nearest.unique()) / len(self.cosines),
            "merged": several,
            "slope": each["slope"].nanmean(),
        }
        if self.parents:
            found["absorption"] = (self.n_absorbed / self.present[self.parents]).mean()
        found |= {"explained variance": 1 - self.error / self.variance, "L0": self.n_active / self.rows}
        found["dead"] = 1 - self.ever.float().mean()
        return {name: float(value) for name, value in found.items()}


def _counts(guessed: Bool[Tensor, "row pair"], true: Bool[Tensor, "row pair"]) -> Float[Tensor, "3 pair"]:
    """How often a guess is right, wrong, and missing."""
    return torch.stack([(guessed & true).sum(0), (guessed & ~true).sum(0), (~guessed & true).sum(0)]).float()


def _ratio(part: Float[Tensor, " pair"], whole: Float[Tensor, " pair"]) -> Float[Tensor, " pair"]:
    """The ratio, 0 where the whole is."""
    return torch.where(whole > 0, part / whole.clamp(min=1), 0.0)
