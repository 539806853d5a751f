"""Steering vectors: directions that separate two sets of prompts, their quality, and the hooks that add them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.extras import lazy_import
from hooked_lm.hooks import HookedRootModule
from hooked_lm.interventions import contrast
from hooked_lm.interventions.base import Hooks
from hooked_lm.interventions.contrast import METRICS, SHARES, STREAM, PairPositions, Prompts, Sides
from hooked_lm.interventions.controllers import AddDirection
from hooked_lm.interventions.positions import Positions
from hooked_lm.models.vision.inputs import ids_of
from hooked_lm.results import Label, stored
from hooked_lm.results.bootstrap import in_words
from hooked_lm.results.measures import MetricScores
from hooked_lm.results.scores import Scores, provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.SteeringVectors"
LARGE_DOSE = 1.0
Layers = str | int | Sequence[int]  # "each", a layer or several
IN_WORDS = {
    "mean": "mean difference of the sides",
    "pca": "first component of the differences",
    "logistic": "logistic probe",
    "random": "random directions",
    "auc": "area under the ROC curve",
    "d_prime": "distance of the sides in standard deviations",
}


@dataclass(frozen=True, eq=False, repr=False)
class SteeringVectors(Tabular):
    """A direction for each layer, from the negative to the positive prompts; computed by `steering_vectors`.

    Args:
        directions: layer -> [d_model]. The length is the distance between the means of the two sides along the direction, so
            a coefficient of 1 moves a value from the negative mean to the positive one.
        midpoints: layer -> the projection of the midpoint between the sides, in lengths of the direction.
        separation: how well each direction separates held-out pairs: Scores with the axes metric, layer, and "of" (the method,
            "random" as a control), one value for each held-out pair. The metrics are accuracy (with the threshold of the
            training pairs), auc, and d_prime, the distance between the sides in standard deviations of one side. Intervals of
            accuracy and auc are Wilson's, which have a width even if all pairs are separated.
        site: the short name of the site.
        method: the method that computed them.
        norms: layer -> the mean norm of the values that the directions were computed from, the unit of a dose. Empty in files of
            earlier versions.

    Raises ValueError if the arguments have different layers.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> women = ["Mary was ill, so", "Anna slept late because"]
    >>> men = ["Tom was ill, so", "Paul slept late because"]
    >>> steering_vectors(model, women, men, layers=[1, 2]).to_dataframe()[
    ...     ["layer", "accuracy"]
    ... ]
       layer  accuracy
    0      1       1.0
    1      2       1.0
    """

    directions: Mapping[int, Float[Tensor, " d_model"]]
    midpoints: Mapping[int, float]
    separation: Scores
    site: str
    method: str
    norms: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept = {layer: found.detach().to("cpu", torch.float32) for layer, found in self.directions.items()}
        object.__setattr__(self, "directions", kept)
        layers = list(kept)
        if not layers or list(self.midpoints) != layers or list(self.separation.axes.get("layer", ())) != layers:
            raise ValueError(
                f"directions, midpoints and separation must have the same layers; got {layers}, {list(self.midpoints)} and the "
                f"axes {dict(self.separation.axes)}"
            )

    @property
    def layers(self) -> list[int]:
        """The layers with a direction."""
        return list(self.directions)

    @property
    def about(self) -> Mapping[str, Any]:
        """Metadata of the directions: model, versions, seed, settings."""
        return self.separation.about

    # ---- how good they are -------------------------------------------------------------------------------------------

    def best_layer(self) -> int:
        """The layer whose direction separates held-out pairs best, by accuracy, then by AUC; of equal ones the middle one.

        Several layers often separate all pairs. Steering has more effect in the middle of a model than in its first and last
        layers (Turner et al. 2023, arXiv:2308.10248; Rimsky et al. 2023, arXiv:2312.06681).
        """
        best = self.best_layers()
        return best[len(best) // 2]

    def best_layers(self) -> list[int]:
        """All layers whose directions separate held-out pairs as well as that of `best_layer`."""
        accuracy, auc, _ = self.separation.select(of=self.method).mean.tolist()
        found = dict(zip(self.layers, zip(accuracy, auc, strict=True), strict=True))
        return [layer for layer in self.layers if found[layer] == max(found.values())]

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each layer: the separation by its direction and by random ones, the norm of the direction, and the dose of a
        coefficient of 1."""
        table: dict[str, Any] = {"layer": self.layers}
        for of, prefix in ((self.method, ""), ("random", "random_")):
            for metric in METRICS:
                table[prefix + metric] = self.separation.select(metric=metric, of=of).mean.tolist()
        table["norm"] = [found.norm().item() for found in self.directions.values()]
        table |= {"dose": [self.dose(layer) for layer in self.layers]} if self.norms else {}
        return pd.DataFrame(table)

    def plot(self, metric: str = "accuracy", title: str = "") -> "go.Figure":
        """Lines over layers: the separation by the direction of each layer and by random directions, with its intervals over
        held-out pairs."""
        from hooked_lm import viz

        of_metric = self.separation.select(metric=metric)
        parts = {IN_WORDS.get(of, of): of_metric.select(of=of) for of in (self.method, "random")}
        lines = {name: part.mean for name, part in parts.items()}
        with in_words():
            intervals = {name: part.interval() for name, part in parts.items()} if of_metric.n_prompts > 1 else None
        title = title or f"Steering directions at {self.site}, on held-out pairs"
        y_title = IN_WORDS.get(metric, metric)
        return viz.lines(
            self.layers,
            lines,
            intervals,
            title,
            "layer",
            y_title,
            subtitle=of_metric._of_each,
            references=[*lines][1:],
        )

    # ---- steering ----------------------------------------------------------------------------------------------------

    def dose(self, layer: int, coefficient: float | int = 1.0, unit: bool = False) -> float:
        """The length of what a coefficient adds, in norms of the values that it is added to; raises ValueError as `hooks`."""
        [layer] = self.chosen_layers(layer)
        if layer not in self.norms:
            raise ValueError(
                "these vectors do not know the norms at their site, which doses are relative to: compute them again"
            )
        return coefficient * (1.0 if unit else self.directions[layer].norm().item()) / self.norms[layer]

    def hooks(
        self,
        coefficient: float | int | None = None,
        layers: Layers | None = None,
        positions: Positions = "all",
        unit: bool = False,
        *,
        dose: float | int | None = None,
    ) -> Hooks[AddDirection]:
        """Hook objects for `model.hooks(...)`, one for each layer, that add `coefficient` times the direction.

        Args:
            coefficient: 1, the default, moves by the distance between the two sides; negative ones move in the opposite
                direction.
            layers: a layer, several, or "each"; None: the best one.
            positions: "all"; "prompt", the prompt of `generate`; "last_prompt", its last token; "generated", the tokens after
                it; or numbers, negative ones from the end of the prompt. Outside `generate` all tokens are prompt, including
                padding: use texts of one length, or pad them on the left.
            unit: whether the direction is first scaled to length 1.
            dose: in place of a coefficient, the length of what is added relative to the norm of the values there, the same for
                every model and site. At the end of a prompt doses of 0.2 to 0.8 usually steer; see `steered_texts`.

        Warns of a dose above 1, which usually breaks text. Raises ValueError for a layer without a direction, an unknown name of
        positions, and a dose beside a coefficient or a unit.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> women = ["Mary was ill, so", "Anna slept late because"]
        >>> men = ["Tom was ill, so", "Paul slept late because"]
        >>> vectors = steering_vectors(model, women, men, layers=[1, 2])
        >>> with model.hooks(vectors.hooks(dose=-0.6, layers=2)):
        ...     model.generate("Lucy went home because", 1, do_sample=False, verbose=False)
        'Lucy went home because he'
        """
        if dose is not None and (coefficient is not None or unit):
            raise ValueError("a dose is the length of what is added: leave out coefficient and unit")
        chosen = [self.best_layer()] if layers is None else self.chosen_layers(layers)
        by = {layer: 1.0 if coefficient is None else float(coefficient) for layer in chosen}
        if dose is not None:
            by = {layer: dose / self.dose(layer) for layer in chosen}
        if self.norms:
            self._warn_if_large({layer: self.dose(layer, by[layer], unit) for layer in chosen})
        return self.adding(by, positions, unit)

    def adding(
        self, coefficients: Mapping[int, float], positions: Positions = "all", unit: bool = False
    ) -> Hooks[AddDirection]:
        """As `hooks`, for a coefficient of each layer, without a warning."""
        return Hooks(
            [
                AddDirection(self.site, layer, vector=self.direction(layer, unit), coefficient=by, positions=positions)
                for layer, by in coefficients.items()
            ]
        )

    def _warn_if_large(self, doses: Mapping[int, float]) -> None:
        layer = max(doses, key=lambda layer: abs(doses[layer]))
        if abs(doses[layer]) > LARGE_DOSE:
            warn_caller(
                f"steering at layer {layer} adds {abs(doses[layer]):.1f} times the norm of the values there, at which text "
                "usually repeats itself: hooks(dose=0.5) adds half the norm, and steered_texts(...) shows what several doses do"
            )

    def direction(self, layer: int, unit: bool = False) -> Float[Tensor, " d_model"]:
        """The direction of a layer, with `unit` scaled to length 1; ValueError if it is zero."""
        [layer] = self.chosen_layers(layer)
        found = self.directions[layer]
        if unit and not found.norm() > 0:
            raise ValueError(f"the direction of layer {layer} is zero: both sides are the same there")
        return F.normalize(found, dim=0) if unit else found

    def chosen_layers(self, layers: Layers) -> list[int]:
        """The layers that are meant by "each", a layer or several; raises ValueError for one without a direction."""
        if isinstance(layers, str) and layers != "each":
            raise ValueError(f"layers must be 'each', a layer or some, got {layers!r}")
        some = self.layers if isinstance(layers, str) else [layers] if isinstance(layers, int) else list(layers)
        if missing := [layer for layer in some if layer not in self.directions]:
            raise ValueError(f"there is no direction for layer {missing[0]}; there are {self.layers}")
        return some

    # ---- reading -----------------------------------------------------------------------------------------------------

    def project(
        self, model: HookedRootModule, prompts: Prompts, layers: Layers = "each", batch_size: int = 32
    ) -> Scores:
        """Projects the activations of prompts on the directions.

        0 is the midpoint between the sides of the training pairs, 0.5 the mean of the positive and -0.5 that of the negative
        side (at the position that the directions were computed at).

        Returns Scores with the axes layer and position. For one text, positions are its tokens; for several they count from
        the end of each (-1: the last), with NaN before a text begins. Raises ValueError for a model of another width.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> women = ["Mary was ill, so", "Anna slept late because"]
        >>> men = ["Tom was ill, so", "Paul slept late because"]
        >>> vectors = steering_vectors(model, women, men)
        >>> vectors.project(model, "Emma was sad, so").select(layer=2).mean[-1] > 0
        tensor(True)
        """
        contrast.check_model(model)
        texts = contrast.listed(prompts, "prompts")
        sites = contrast.sites_of(model, self.site, self.chosen_layers(layers), STREAM)
        self.check_width(model, sites)
        parts = contrast.read(model, texts, list(sites.values()), self._along(sites), batch_size)
        values = torch.stack([torch.cat(_flush(parts[site])) for site in sites.values()]).transpose(1, 2)
        n_pos = values.shape[1]
        positions: list[Label] = list(range(-n_pos, 0))
        if len(texts) == 1 and model.tokenizer is not None:
            ids = ids_of(contrast.tokenized(model, texts)[0][0])[0]
            positions = [f"{pos} {model.tokens.to_single_str_token(int(token))}" for pos, token in enumerate(ids)]
        about = provenance(model, site=self.site, method=self.method, unit="distance between the sides")
        return Scores(values, {"layer": list(sites), "position": positions}, about=about)

    def check_width(self, model: HookedRootModule, sites: Mapping[int, str]) -> None:
        """Raises ValueError for a model of another width."""
        for layer, site in sites.items():
            if (width := len(self.directions[layer])) != model.cfg.d_model:
                raise ValueError(f"the direction of layer {layer} is {width} wide, '{site}' {model.cfg.d_model}")

    def _along(self, sites: Mapping[int, str]) -> contrast.Take:
        """A function that projects the values of a site on its direction: [batch, pos], right-aligned, NaN at padding."""
        layer_of = {site: layer for layer, site in sites.items()}

        def take(site: str, value: Tensor, real: Tensor, rows: slice) -> Tensor:
            direction = self.directions[layer_of[site]].to(value.device)
            along = value.float() @ (direction / direction.square().sum()) - self.midpoints[layer_of[site]]
            return along.masked_fill(~real, torch.nan).gather(1, real.int().argsort(dim=1, stable=True))

        return take

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file; `load` restores it bit for bit."""
        tensors = {f"directions.{layer}": direction for layer, direction in self.directions.items()}
        found = {"axes": list(self.separation.axes.items()), "about": self.separation.about}
        header = {"site": self.site, "method": self.method, "midpoints": list(self.midpoints.items()), **found}
        header["norms"] = list(self.norms.items())
        stored.write(path, FORMAT, {**tensors, "separation": self.separation.values}, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "SteeringVectors":
        """Reads a file that `save` wrote; ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        midpoints = dict(header["midpoints"])
        separation = MetricScores(tensors["separation"], dict(header["axes"]), SHARES, about=header["about"])
        directions = {layer: tensors[f"directions.{layer}"] for layer in midpoints}
        return cls(directions, midpoints, separation, header["site"], header["method"], dict(header.get("norms", ())))

    def __repr__(self) -> str:
        best = self.best_layer()
        own, random = (
            self.separation.select(of=of, metric="accuracy", layer=best).mean for of in (self.method, "random")
        )
        n_layers = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        return (
            f"SteeringVectors({self.method} at {self.site}, {n_layers}; best layer {best}: accuracy "
            f"{own:.2f} on held-out pairs, random directions {random:.2f}"
            f"{f'; a coefficient of 1 is a dose of {self.dose(best):.2f}' if self.norms else ''})"
        )


# ---- how they are made -----------------------------------------------------------------------------------------------


def steering_vectors(
    model: HookedRootModule,
    positive: Prompts,
    negative: Prompts,
    *,
    site: str = "resid_post",
    layers: Layers = "each",
    positions: PairPositions = -1,
    method: str = "mean",
    held_out: float = 0.25,
    seed: int = 0,
    batch_size: int = 32,
) -> SteeringVectors:
    """Directions that separate pairs of prompts, one for each layer, evaluated on held-out pairs.

    Args:
        positive, negative: texts, or ids [batch, pos], as many of each; their lengths may differ.
        site: the short name of a site [batch, pos, d_model].
        positions: the position in each prompt: one number for all (-1: the last token of each), one for each pair, or
            [pair, 2] for positive and negative; or "mean" over all its tokens.
        method: "mean", the mean of the differences (contrastive activation addition, Rimsky et al. 2023, arXiv:2312.06681);
            "pca", the first principal component of the differences, taken with both signs (representation engineering, Zou et
            al. 2023, arXiv:2310.01405); "logistic", the weights of a logistic probe.
        held_out: the fraction of pairs held out for evaluation, at least one pair.
        seed: seed of the choice of held-out pairs and of the random directions.
        batch_size: prompts in one forward pass; only the values at the positions are kept.

    Returns SteeringVectors. Raises before any forward pass: TypeError for a model whose input is not one text, KeyError for
    a site that no layer has, IndexError for a layer out of range, ValueError for sides of different size, fewer than two
    pairs, and an unknown method; later IndexError for a position that a prompt lacks, ValueError for values that are not
    finite and for sides that are equal in all layers.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> women = ["Mary was ill, so", "Anna slept late because"]
    >>> men = ["Tom was ill, so", "Paul slept late because"]
    >>> steering_vectors(model, women, men, layers=[1, 2]).directions[1].shape
    torch.Size([128])
    """
    sides, split, places, generator = contrast.prepared(model, positive, negative, positions, method, held_out, seed)
    sites = contrast.sites_of(model, site, layers, STREAM)
    up, down = (
        contrast.values_at(model, side, list(sites.values()), place, batch_size)
        for side, place in zip(sides, places, strict=True)
    )
    found = {layer: Sides(up[name], down[name], split) for layer, name in sites.items()}
    directions = {layer: of.direction(method) for layer, of in found.items()}
    if not any(direction.norm() > 0 for direction in directions.values()):
        raise ValueError(
            f"both sides are the same at {site} of layers {list(sites)}, positions {positions}: no direction separates them"
        )
    separation = [
        torch.stack([of.separation(directions[layer][None]), of.separation(of.control(generator))], 1)
        for layer, of in found.items()
    ]
    axes: dict[str, Sequence[Label]] = {"metric": METRICS, "layer": list(found), "of": [method, "random"]}
    about = provenance(model, site=site, **contrast.settings_of(method, positions, split, seed))
    midpoints = {
        layer: (of.midpoint(directions[layer]) / directions[layer].square().sum().clamp(min=1e-30)).item()
        for layer, of in found.items()
    }
    measured = MetricScores(torch.stack(separation, 1), axes, SHARES, about=about)
    norms = {layer: of.norm() for layer, of in found.items()}
    return SteeringVectors(directions, midpoints, measured, site, method, norms)


def _flush(parts: list[Tensor]) -> list[Tensor]:
    """Batches [batch, pos] of different length, padded on the left with NaN to the same length."""
    n_pos = max(part.shape[1] for part in parts)
    return [F.pad(part, (n_pos - part.shape[1], 0), value=torch.nan) for part in parts]
