"""Crosscoders: a dictionary over the vectors of two models side by side, such as a model and its fine-tune.

The vectors [base, tuned] are the input and the target of an ordinary BatchTopK dictionary, so `train_on` trains it. Each feature
then has a direction in either model, and their norms say whether it belongs to one of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.dictionaries.architectures import BatchTopK
from hooked_lm.interventions.dictionaries.sae import SAE, filled, frozen
from hooked_lm.interventions.dictionaries.stream import Activations, Pair, Prompts, Stream, check_same_inputs
from hooked_lm.interventions.dictionaries.train import train_on
from hooked_lm.interventions.dictionaries.training import TrainingConfig
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.weights.weight_scope import AdapterOrPath, under_adapter
from hooked_lm.notebook_repr import NotebookRepr
from hooked_lm.results import stored
from hooked_lm.results.scores import Scores, provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

FORMAT = "hooked_lm.Crosscoder"
BASE, TUNED = "base", "tuned"
BASE_ONLY, SHARED, TUNED_ONLY, MIXED = "base only", "shared", "tuned only", "mixed"
ONLY, ALIKE = 0.1, (0.3, 0.7)  # the share of a feature that is one model's alone, and shares that count as shared


class PairedActivations(NotebookRepr):
    """A stream of the vectors of two models at one site, side by side: [base, tuned] of the same token.

    The arguments are those of `Activations`, for both models; `adapter` is a LoRA that is on for the runs of `tuned`. A buffer is
    refused with a ValueError if the models read other tokens in its texts.
    """

    def __init__(
        self,
        base: Decoder,
        tuned: Decoder,
        prompts: Prompts,
        site: Site,
        *,
        adapter: AdapterOrPath | None = None,
        **options: Any,
    ) -> None:
        self.streams = [Activations(model, prompts, site, **options) for model in (base, tuned)]
        self.adapter = adapter
        check_same_inputs(*(stream.inputs(self.streams[0].batches(0)[0])[0] for stream in self.streams))

    @property
    def site(self) -> str:
        """The full name of the site."""
        return self.streams[0].sites[0]

    def __repr__(self) -> str:
        return f"PairedActivations(of '{self.site}', {len(self.streams[0].prompts)} prompts)"

    def fill(self, number: int) -> Pair:
        (base, tuned), batches = self.streams, self.streams[0].batches(number)
        for rows in batches:
            check_same_inputs(*(stream.inputs(rows)[0] for stream in self.streams))
        first = torch.cat([base.vectors(rows)[0] for rows in batches])
        with under_adapter(tuned.model, self.adapter):
            second = torch.cat([tuned.vectors(rows)[0] for rows in batches])
        both = torch.cat([first, second.to(first.device)], 1)
        return both, both

    def about(self) -> dict[str, Any]:
        base = self.streams[0].about()
        with under_adapter(self.streams[1].model, self.adapter):
            tuned = self.streams[1].about()
        return {**tuned, "base": base["model"], "sites": [self.site], "sha256": [base["sha256"], tuned["sha256"]]}


class BatchTopKOfBoth(BatchTopK):
    """A BatchTopK dictionary of vectors [base, tuned] whose features begin with the same direction in both.

    So a difference of their directions is due to the data, and two equal models keep equal ones.
    """

    @dataclass(frozen=True)
    class Config(BatchTopK.Config):
        def build(self, seed: int = 0) -> "BatchTopKOfBoth":
            return BatchTopKOfBoth(self, seed)

    cfg: Config

    def __init__(self, cfg: BatchTopK.Config, seed: int = 0) -> None:
        super().__init__(cfg, seed)
        with torch.no_grad():
            for weight in (self.W_dec, self.W_enc.T):
                base, tuned = weight.chunk(2, 1)
                tuned.copy_(base)
                weight.div_(weight.norm(dim=1, keepdim=True))


class Crosscoder(Tabular):
    """A dictionary of features that two models share, or that one of them has alone (Lindsey et al. 2024, "Sparse Crosscoders").

    `sae` is the dictionary of vectors [base, tuned]; `site` is where they are from. `about` says how it was trained.
    """

    def __init__(self, sae: SAE, site: str, about: Mapping[str, Any], figures: Scores | None = None) -> None:
        if sae.cfg.d_in % 2 or sae.cfg.width_out != sae.cfg.d_in:
            raise ValueError(
                f"a crosscoder reads and writes two vectors side by side, got {sae.cfg.d_in} to {sae.cfg.width_out}"
            )
        self.sae, self.site, self.about, self.figures = sae, site, dict(about), figures

    @property
    def d_model(self) -> int:
        """The width of a model's vectors."""
        return self.sae.cfg.d_in // 2

    @property
    def directions(self) -> tuple[Float[Tensor, "d_sae d_model"], Float[Tensor, "d_sae d_model"]]:
        """The directions of the features in the base and in the tuned model."""
        base, tuned = self.sae.W_dec.detach().split(self.d_model, 1)
        return base, tuned

    @property
    def tuned_share(self) -> Float[Tensor, " d_sae"]:
        """Of each feature, 0 if only the base writes it, 1 if only the tuned model does, 1/2 if both have directions of the same
        norm: (1 + (|tuned| - |base|) / max(|tuned|, |base|)) / 2."""
        base, tuned = (directions.norm(dim=1) for directions in self.directions)
        return (1 + (tuned - base) / torch.maximum(tuned, base).clamp_min(1e-12)) / 2

    @property
    def cosine(self) -> Float[Tensor, " d_sae"]:
        """The cosine of the directions of each feature in the two models."""
        return torch.nn.functional.cosine_similarity(*self.directions, dim=1)

    @property
    def kinds(self) -> list[str]:
        """What each feature is: "base only", "tuned only", "shared" or "mixed", by `tuned_share`."""
        return [_kind(share) for share in self.tuned_share.tolist()]

    def features(self, vectors: Float[Tensor, "row twice"]) -> Float[Tensor, "row d_sae"]:
        """The features of vectors [base, tuned]."""
        with torch.no_grad():
            return self.sae.encode(vectors.to(self.sae.W_enc))

    @torch.no_grad()
    def latent_scaling(self, stream: Stream, n_buffers: int = 1) -> Scores:
        """How much of each feature there is in either model: latent scaling (Minder et al. 2025, arXiv:2504.02922).

        A feature may look as if one model had it alone, because training took its direction out of the other, whose vectors
        contain it anyway. So the feature, times its direction in the model where that is longer, is fitted to what each
        model has at the same tokens; the factor with the least squared error says how much of it there is. "error": in the part
        of the vectors that the other features do not explain; "reconstruction": in what the whole dictionary explains. "ratio" is
        the smaller model's factor over the other one's: near 0 for a feature that one model has alone, near 1 for one of both.

        Args:
            stream: vectors [base, tuned], such as `PairedActivations` of held-out texts.
            n_buffers: how many of its buffers are read.

        Returns Scores with the axes "of" ("error", "reconstruction"), "model" ("base", "tuned", and "ratio") and "feature"; NaN
        for features that are never active.
        """
        base, tuned = self.directions
        is_tuned = tuned.norm(dim=1) >= base.norm(dim=1)
        longer = torch.where(is_tuned[:, None], tuned, base).double()
        fitted, below = torch.zeros(2, 2, len(longer)).to(longer), torch.zeros(len(longer)).to(longer)
        for number in range(n_buffers):
            vectors = stream.fill(number)[0].to(self.sae.W_enc)
            features = self.features(vectors)
            made = self.sae.decode(features)
            missing, explained = (of.split(self.d_model, 1) for of in (vectors - made, made - self.sae.b_dec))
            squares = features.double().pow(2).sum(0)
            below += squares * longer.pow(2).sum(1)
            for i, own in enumerate((base, tuned)):
                fitted[0, i] += _products(features, missing[i], longer) + squares * (own.double() * longer).sum(1)
                fitted[1, i] += _products(features, explained[i], longer)
        factors = torch.where(below > 0, fitted / below.clamp_min(1e-30), torch.nan)
        ratio = torch.where(is_tuned, factors[:, 0] / factors[:, 1], factors[:, 1] / factors[:, 0])
        values = torch.cat([factors, ratio[:, None]], 1).float().cpu()
        axes: dict[str, Sequence[Any]] = {
            "of": ["error", "reconstruction"],
            "model": [BASE, TUNED, "ratio"],
            "feature": list(range(len(tuned))),
        }
        return Scores(values[..., None], axes, about=self.about)

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each feature: `feature`, `kind`, `tuned_share`, `cosine`, and the norms of its directions, `base` and
        `tuned`."""
        base, tuned = (directions.norm(dim=1) for directions in self.directions)
        columns = {"tuned_share": self.tuned_share, "cosine": self.cosine, "base": base, "tuned": tuned}
        numbers = {name: column.cpu().numpy() for name, column in columns.items()}
        return pd.DataFrame({"feature": range(len(base)), "kind": self.kinds, **numbers})

    def plot(self, title: str = "") -> "go.Figure":
        """How many features have which share in the tuned model."""
        from hooked_lm import viz

        edges = torch.linspace(0, 1, 21)
        counts = torch.histogram(self.tuned_share.cpu().float(), edges).hist
        middles = ((edges[1:] + edges[:-1]) / 2).tolist()
        named = title or "Features by their share in the tuned model (0: base only, 1: tuned only)"
        return viz.lines(
            middles, {"features": counts}, title=named, x_title="share in the tuned model", y_title="features"
        )

    def save(self, path: str | Path) -> None:
        """Writes the crosscoder to one safetensors file; `load` restores it."""
        tensors = {f"sae.{name}": weight for name, weight in self.sae.state_dict().items()}
        header: dict[str, Any] = {"sae": self.sae.to_dict(), "site": self.site, "about": self.about, "axes": None}
        if self.figures is not None:
            tensors["figures"], header["axes"] = self.figures.values, list(self.figures.axes.items())
        stored.write(path, FORMAT, tensors, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Crosscoder":
        """Reads what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, FORMAT)
        weights = {name[4:]: weight.clone() for name, weight in tensors.items() if name.startswith("sae.")}
        figures = None
        if header["axes"] is not None:
            figures = Scores(tensors["figures"], dict(header["axes"]), about=header["about"])
        return cls(frozen(filled(header["sae"], weights, str(path))), header["site"], header["about"], figures)

    def __repr__(self) -> str:
        kinds = self.kinds
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in (SHARED, BASE_ONLY, TUNED_ONLY, MIXED))
        explained = ""
        if self.figures is not None:
            base, tuned = self.figures.select(figure="explained variance").mean.tolist()
            explained = f"; explains {base:.2f} of the base's variance, {tuned:.2f} of the tuned model's"
        return f"Crosscoder(of '{self.site}', {len(kinds)} features: {counts}{explained})"


def _products(
    features: Float[Tensor, "row d_sae"],
    vectors: Float[Tensor, "row d_model"],
    directions: Float[Tensor, "d_sae d_model"],
) -> Float[Tensor, " d_sae"]:
    """For each feature, the sum over rows of its value times the product of the row's vector with its direction."""
    return ((features.double().T @ vectors.double()) * directions).sum(1)


def _kind(share: float) -> str:
    if share < ONLY:
        return BASE_ONLY
    if share > 1 - ONLY:
        return TUNED_ONLY
    return SHARED if ALIKE[0] <= share <= ALIKE[1] else MIXED


def train_crosscoder(
    base: Decoder,
    tuned: Decoder,
    prompts: Sequence[str] | Tensor,
    *,
    site: Site,
    width: int,
    k: int = 16,
    steps: int = 1000,
    vectors_per_step: int = 512,
    learning_rate: float = 1e-3,
    held_out: float = 0.1,
    buffer_prompts: int = 256,
    batch_size: int = 32,
    skip: int = 0,
    adapter: AdapterOrPath | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Crosscoder:
    """Trains a crosscoder with BatchTopK (Minder et al. 2025, arXiv:2504.02922) on the vectors of two models at one site.

    With an L1 penalty instead, directions of features that both models have shrink to zero in one of them; with BatchTopK far
    fewer do, and `latent_scaling` of the result finds them. Train one of the base with itself as well: what it finds there is
    not due to the fine-tune.

    Args:
        base, tuned: two models with the same tokens.
        prompts: texts, or ids [prompt, pos], in which what was tuned occurs.
        site: name or short name with layer, such as ("resid_post", 2).
        width, k: the number of features, and of the active ones of a token, on average.
        held_out: the fraction of the prompts on which it is measured, at least one.
        adapter: a LoRA that is on for the runs of `tuned`, which may then be `base` itself; see `model.with_adapter`.
        steps, vectors_per_step, learning_rate, buffer_prompts, batch_size, skip, seed, progress: as for `train_dictionary`.

    Returns a Crosscoder, with `figures` of held-out prompts: the explained variance of either model, and the mean number of
    active features. Raises as `train_dictionary`.

    >>> from random import Random
    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.demo.corpus import training_text
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> texts = [training_text(Random(seed)) for seed in range(40)]
    >>> found = train_crosscoder(
    ...     model,
    ...     model,
    ...     texts,
    ...     site=("resid_post", 1),
    ...     width=64,
    ...     k=8,
    ...     steps=10,
    ...     vectors_per_step=64,
    ... )
    >>> found.site, len(found.kinds), found.d_model
    ('blocks.1.hook_resid_post', 64, 128)
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be a fraction of the prompts, above 0 and below 1; got {held_out}")
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    n_held = max(1, round(held_out * len(prompts)))
    if n_held >= len(prompts):
        raise ValueError(f"{len(prompts)} prompts are too few to train on some and to measure on others")
    parts = [order[n_held:], order[:n_held]]
    train, rest = (prompts[part] if isinstance(prompts, Tensor) else [prompts[i] for i in part] for part in parts)
    options = {"batch_size": batch_size, "skip": skip, "seed": seed}
    stream = PairedActivations(base, tuned, train, site, adapter=adapter, buffer_prompts=buffer_prompts, **options)
    d_model = stream.fill(0)[0].shape[1] // 2
    cfg = BatchTopKOfBoth.Config(d_in=2 * d_model, d_sae=width, k=k)
    settings = TrainingConfig(steps, vectors_per_step, learning_rate, seed=seed)
    sae = train_on(stream, cfg, settings, progress=progress).sae
    about = provenance(tuned, base=provenance(base)["model"], site=stream.site, steps=steps, k=k, seed=seed)
    about |= {"adapter": None if adapter is None else str(adapter)}
    held = PairedActivations(base, tuned, rest, site, adapter=adapter, buffer_prompts=len(rest), **options)
    return Crosscoder(sae, stream.site, about, _figures(sae, held.fill(0)[0], about))


@torch.no_grad()
def _figures(sae: SAE, vectors: Float[Tensor, "row twice"], about: Mapping[str, Any]) -> Scores:
    """The explained variance of either model's vectors, and the number of active features of a token."""
    features = sae.encode(vectors)
    missing, centred = vectors - sae.decode(features), vectors - vectors.mean(0)
    d_model = vectors.shape[1] // 2
    halves = [slice(None, d_model), slice(d_model, None)]
    explained = [1 - missing[:, half].pow(2).sum() / centred[:, half].pow(2).sum() for half in halves]
    active = (features > 0).sum(1).float().mean()
    values = torch.stack([torch.stack(explained), active.expand(2)])
    return Scores(values[..., None], {"figure": ["explained variance", "L0"], "model": [BASE, TUNED]}, about=about)
