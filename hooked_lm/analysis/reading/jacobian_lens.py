"""The Jacobian lens: a linear map for each layer from its residual stream to what it adds to that of the last layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.analysis.attribution.backward_rules import NAMED
from hooked_lm.analysis.reading import published_lenses
from hooked_lm.analysis.reading.lens import decode
from hooked_lm.components.embeddings.transformed_unembed import check_linear
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of
from hooked_lm.components.norms.scales import ChannelScale
from hooked_lm.engine.prompts import AxisSelection, Prompts, chosen
from hooked_lm.extras import lazy_import
from hooked_lm.interventions import AddDirection, Hooks, ProjectOut, SwapDirections
from hooked_lm.interventions.positions import Positions
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.weights.digest import sampled_digest
from hooked_lm.models.weights.fixed_norm import norm_gain
from hooked_lm.results import stored
from hooked_lm.results.bootstrap import in_words
from hooked_lm.results.scores import Scores, provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["JacobianLens", "weights_known"]

FORMAT = "hooked_lm.JacobianLens"
PARALLEL = 0.999  # two directions with this cosine cannot be told apart
N_SAMPLED = 256  # tokens whose log probabilities identify a model
ROUNDED = 8.0  # errors of rounding one number; the same weights in bfloat16, folded or not, changed by up to 4.3
SMALLEST = 1e-3  # what is allowed at least, as ROUNDED in units of the spread of log probabilities
KNOWN = ("weights", "processed", "dtype", "backward")  # of `about`, what a published file says of the model and the fit
Tokens = str | int | Sequence[str | int] | Int[Tensor, "..."]


@dataclass(frozen=True, eq=False, repr=False)
class JacobianLens(Tabular):
    """The mean Jacobians of a model: the stream x of layer `layers[i]` becomes `J[i] x`, which the final norm and the unembedding
    decode (Gurnee et al. 2026, "Verbalizable Representations Form a Global Workspace in Language Models", Transformer Circuits
    Thread). With the identity this is the logit lens; at the last layer it is. Fitted by `fit_jacobian_lens`.

    Args:
        J: [layer, d_model, d_model], rows are dimensions of the last layer's stream.
        layers, site: the streams that are read.
        held_out: the share of each held-out prompt's Jacobian, less the identity, that the mean explains: Scores with the axis
            layer. 1 if all prompts have the same; below 0 if the identity is nearer.
        lengths: the typical length of each layer's vectors, the unit of a dose; NaN if it is not known.
        probe: token ids and the log probabilities of the model after each, which tell another model from the same one with folded
            or rounded weights.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import fit_jacobian_lens, logit_lens
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> texts = [f"The capital of {name} is" for name in ("France", "Spain", "Italy")]
    >>> lens = fit_jacobian_lens(model, texts)
    >>> found = logit_lens(model, "The capital of Greece is", lens=lens, positions=-1)
    >>> found.to_dataframe().query("layer == 3 and rank == 0")["token"].item()
    ' Athens'
    """

    J: Float[Tensor, "layer d_model d_model"]
    layers: tuple[int, ...]
    site: str
    held_out: Scores
    lengths: Float[Tensor, " layer"]
    probe: tuple[Int[Tensor, " pos"], Float[Tensor, "pos token"]] | None = None

    @classmethod
    def of(
        cls,
        model: Decoder,
        J: Float[Tensor, "layer d_model d_model"],
        layers: tuple[int, ...],
        site: str,
        held_out: Scores,
        lengths: Float[Tensor, " layer"],
        tokens: Int[Tensor, " pos"] | None,
    ) -> "JacobianLens":
        """A lens that knows its model by what it says after some tokens."""
        return cls(J, layers, site, held_out, lengths, None if tokens is None else (tokens, _log_probs(model, tokens)))

    @property
    def about(self) -> dict[str, Any]:
        """The model, the fingerprint of its weights, versions, settings, and what was left out."""
        return dict(self.held_out.about)

    @property
    def name(self) -> str:
        """What the lens is called in titles."""
        backward = self.about.get("backward", "plain")
        kind = "Jacobian lens" if backward == "plain" else _named(backward)
        return f"rotated {kind}" if "rotated" in self.about else kind

    # ---- reading -----------------------------------------------------------------------------------------------------

    def check(self, model: Decoder, site: str, layers: Sequence[int]) -> None:
        """Raises ValueError if the lens does not fit the model, its weights, the site or the layers.

        Weights that `fold_ln` and other folds changed fit: they change the stream at most by its mean, which the final norm
        takes out, and no prediction. So do weights in another dtype, which change predictions by its rounding: the median change
        of a log probability, over tokens and positions, is at most 8 errors of rounding (0.03 in bfloat16) of the standard
        deviation over tokens. Other weights are refused; a change that is smaller than this rounding goes unnoticed.
        """
        name, d_model = self.about.get("model"), self.J.shape[-1]
        if d_model != model.cfg.d_model or self.about["n_layers"] != model.cfg.n_layers:
            raise ValueError(
                f"this lens is of {name}, with {self.about['n_layers']} layers and d_model {d_model}; this model has "
                f"{model.cfg.n_layers} and {model.cfg.d_model}: fit one for it"
            )
        if site != self.site:
            raise ValueError(f"this lens was fitted on {self.site!r}, not on {site!r}")
        if missing := [layer for layer in layers if layer not in self.layers]:
            raise ValueError(f"this lens was not fitted for layers {missing}; it has {list(self.layers)}")
        self._check_weights(model)

    def _check_weights(self, model: Decoder) -> None:
        """Raises ValueError for other weights than those of the fit, unless they are folded."""
        if self.about.get("weights") in (None, sampled_digest(model)):  # a published lens knows no weights
            return
        processed, own = self.about.get("processed"), list(model.cfg.processed)
        of = f"{self.about.get('model')} (processed by {processed}; this model's: {own})"
        how = f"this lens was fitted on other weights of {of}"
        if self.probe is None:
            raise ValueError(
                f"{how}, and does not know what the model says: load the same weights, or fit a lens for these"
            )
        tokens, expected = self.probe
        found = _log_probs(model, tokens)
        change, spread = (found - expected).abs().median(), expected.std(-1).mean()
        if not bool(change <= _tolerance(model, self.about.get("dtype")) * spread):
            raise ValueError(
                f"{how}, and this model says something else: {_worst(found, expected)}, and half of them change by "
                f"{float(change):.3f} or more. Fit a lens for it, or, if hooks are open, close them first"
            )

    def __call__(self, stream: Float[Tensor, "*lead d_model"], layer: int) -> Float[Tensor, "*lead d_model"]:
        """`J` of a layer times its stream, computed in the wider dtype of both, in that of the stream."""
        J = self.J[self.layers.index(layer)].to(stream.device)
        dtype = torch.promote_types(stream.dtype, J.dtype)
        return (stream.to(dtype) @ J.to(dtype).T).to(stream.dtype)

    # ---- directions --------------------------------------------------------------------------------------------------

    def vectors(
        self, model: Decoder, tokens: Tokens, layers: AxisSelection = "each"
    ) -> Float[Tensor, "layer token d_model"]:
        """The direction of each token at each layer: `J^T` times the token's direction before the final norm.

        The product of the stream with it is the token's logit by this lens, before the norm's division and without biases: the
        column of `W_U` goes through the norm's weight, and for a LayerNorm through its centring. Where `W_U` is centred
        (`center_unembed`), it is the logit less the mean of all.

        >>> from hooked_lm import HookedTransformer
        >>> from hooked_lm.analysis import fit_jacobian_lens
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> lens = fit_jacobian_lens(model, ["Mary went home."], layers=[1], held_out=0)
        >>> lens.vectors(model, [" she", " he"]).shape
        torch.Size([1, 2, 128])
        """
        which = self._chosen(layers)
        self.check(model, self.site, which)
        ids = model.tokens.single_token_ids(tokens, model.device).reshape(-1)
        before = before_final_norm(model, model.W_U.detach()[:, ids].T).to(self.J.dtype).cpu()
        return torch.stack([before @ self.J[self.layers.index(layer)] for layer in which])

    def steer(
        self,
        model: Decoder,
        token: Tokens,
        layers: AxisSelection = "each",
        *,
        dose: float = 0.5,
        positions: Positions = "all",
    ) -> Hooks[AddDirection]:
        """Hooks that add the token's direction. The dose is the length of what is added at each layer, in typical lengths of the
        vectors there, so that several layers add up; a negative one steers away. The control is `lens.rotated().steer(...)`: a
        random direction and the same length.

        >>> from hooked_lm import HookedTransformer
        >>> from hooked_lm.analysis import fit_jacobian_lens
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> texts = ["Mary went home because she was ill.", "Tom left as he was late."]
        >>> lens = fit_jacobian_lens(model, texts)
        >>> with model.hooks(lens.steer(model, " she", [1, 2], dose=0.6)):
        ...     model.generate("Tom left early because", 1, do_sample=False, verbose=False)
        'Tom left early because she'
        """
        which = self._chosen(layers)
        lengths = [float(self.lengths[self.layers.index(layer)]) for layer in which]
        if any(length != length for length in lengths):
            raise ValueError(
                "a published lens does not know how long the vectors of its layers are, which doses are relative to: "
                "lens = lens.measured(model, prompts), or AddDirection with lens.vectors(...)"
            )
        vectors = self.vectors(model, token, which)
        if vectors.shape[1] != 1:
            raise ValueError(f"steering is along one token, got {vectors.shape[1]}: add the hooks of several")
        return Hooks(
            [
                AddDirection(self.site, i, vector=vector, coefficient=dose * by, unit=True, positions=positions)
                for i, by, vector in zip(which, lengths, vectors[:, 0], strict=True)
            ]
        )

    def ablate(
        self,
        model: Decoder,
        tokens: Tokens,
        layers: AxisSelection = "each",
        *,
        dose: float = 1.0,
        positions: Positions = "all",
    ) -> Hooks[ProjectOut]:
        """Hooks that take the span of the tokens' directions out of the stream: all of it with a dose of 1, a share below."""
        which = self._chosen(layers)
        vectors = self.vectors(model, tokens, which)
        each = zip(which, vectors, strict=True)
        return Hooks([ProjectOut(self.site, i, vectors=v, strength=dose, positions=positions) for i, v in each])

    def swap(
        self,
        model: Decoder,
        tokens: Sequence[str | int],
        layers: AxisSelection,
        *,
        dose: float = 1.0,
        positions: Positions = "all",
    ) -> Hooks[SwapDirections]:
        """Hooks that exchange how much of two tokens' directions the stream has; with a dose of 2 twice that change, with 0 none.

        At one layer: a second swap at a later one would undo the first. Raises ValueError for several layers, and for tokens
        whose directions can hardly be told apart (a cosine above 0.999).
        """
        which = self._chosen(layers)
        if len(which) != 1:
            raise ValueError(f"a swap is at one layer, got {which}: a second one would undo the first")
        vectors = self.vectors(model, list(tokens), which)[0]
        if len(vectors) != 2:
            raise ValueError(f"a swap is of two tokens, got {len(vectors)}")
        if abs(cosine := float(torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0))) > PARALLEL:
            raise ValueError(
                f"the directions of {tokens[0]!r} and {tokens[1]!r} at layer {which[0]} have the cosine {cosine:.4f}: choose "
                "tokens that are further apart, or another layer"
            )
        return Hooks([SwapDirections(self.site, which[0], vectors=vectors, strength=dose, positions=positions)])

    def rotated(self, seed: int = 0) -> "JacobianLens":
        """The placebo: the same lens after a random rotation of the stream. Its directions are random, with the lengths of these
        and the same angles between them."""
        d_model = self.J.shape[-1]
        generator = torch.Generator().manual_seed(seed)
        Q, R = torch.linalg.qr(torch.randn(d_model, d_model, generator=generator, dtype=torch.float64))
        rotation = (Q * R.diagonal().sign()).to(self.J.dtype)
        held_out = replace(self.held_out, about={**self.about, "rotated": seed})
        return replace(self, J=self.J @ rotation, held_out=held_out)

    def _chosen(self, layers: AxisSelection) -> list[int]:
        """These layers of the lens, or all that it has."""
        if isinstance(layers, str) and layers == "each":
            return list(self.layers)
        return chosen(layers, self.about["n_layers"], "layer") or []

    # ---- what it is --------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> Float[Tensor, " layer"]:
        """How far `J` of each layer is from the identity: the norm of the difference, in norms of the identity."""
        eye = torch.eye(self.J.shape[-1], dtype=self.J.dtype)
        return (self.J - eye).flatten(1).norm(dim=1) / eye.norm()

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each layer: `size`, the distance of `J` from the identity in norms of it; `explained`, the mean share of a
        held-out prompt's Jacobian that the lens explains, with its interval; `length`, the typical length of a vector."""
        table = pd.DataFrame({"layer": list(self.layers), "size": self.sizes.tolist()})
        if not bool(self.held_out.values.isnan().all()):
            table["explained"] = self.held_out.mean.tolist()
            if self.held_out.n_prompts > 1:
                table["low"], table["high"] = (end.tolist() for end in self.held_out.interval())
        return table.assign(length=self.lengths.tolist())

    def plot(self, title: str = "") -> "go.Figure":
        """A line over layers: the share of held-out prompts' Jacobians that the lens explains, with its intervals. Of a lens that
        was not measured, the distance from the identity."""
        from hooked_lm import viz

        title = title or f"{self.name[0].upper()}{self.name[1:]}"
        if bool(self.held_out.values.isnan().all()):
            return viz.lines(
                list(self.layers), {"size": self.sizes}, None, title, "layer", "distance from the identity"
            )
        with in_words():
            interval = self.held_out.interval() if self.held_out.n_prompts > 1 else None
        found = {"explained": self.held_out.mean}
        ends = None if interval is None else {"explained": interval}
        return viz.lines(
            list(self.layers), found, ends, title, "layer", "explained share of a held-out prompt's Jacobian"
        )

    def __repr__(self) -> str:
        about, left = self.about, self.about.get("left_out", {})
        first, sinks, far = left.get("first_positions", 0), left.get("sinks", 0), left.get("outliers", {})
        parts = [f"{first} first position{'s' * (first != 1)}"] * bool(first)
        parts += [f"{sinks} sink{'s' * (sinks != 1)}"] * bool(sinks)
        n_far, rule = far.get("prompts", 0), {"winsorize": "winsorized"}.get(far.get("rule", ""), "left out")
        shares = self.held_out.mean[~self.held_out.mean.isnan()]
        said = [f"{self.name} of {about.get('model')}, {len(self.layers)} layers, {about.get('prompts')} prompts"]
        said += [f"without {' and '.join(parts)}"] * bool(parts)
        said += [f"{n_far} outlier{'s' * (n_far != 1)} {rule}"] * bool(n_far)
        said += [f"explains {float(shares.mean()):.2f} of held-out ones"] * bool(len(shares))
        return f"JacobianLens({'; '.join(said)})"

    # ---- files -------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `load` restores it exactly."""
        tensors = {"J": self.J, "held_out": self.held_out.values, "lengths": self.lengths}
        if self.probe is not None:
            tensors |= {"probe_tokens": self.probe[0], "probe_log_probs": self.probe[1]}
        stored.write(path, FORMAT, tensors, {"layers": self.layers, "site": self.site, "about": self.about})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "JacobianLens":
        """Read what `save` wrote. Raises ValueError for any other file; `from_published` reads those of other packages."""
        tensors, header = stored.read(path, FORMAT)
        layers = tuple(header["layers"])
        held_out = Scores(tensors["held_out"], {"layer": layers}, about=header["about"])
        probe = (tensors["probe_tokens"], tensors["probe_log_probs"]) if "probe_tokens" in tensors else None
        return cls(tensors["J"], layers, header["site"], held_out, tensors["lengths"], probe)

    def to_published(self, path: str | Path, dtype: torch.dtype = torch.float16) -> None:
        """Write the published layout: `J`, {layer: [d_model, d_model]} without the last layer, `n_prompts`, `source_layers`,
        `d_model` and `metadata`. A path that ends in ".safetensors" has the same without pickle: tensors "J.0", "J.1", ...; any
        other is a file of `torch.save`, as TransformerLens and the published lenses have. What the lens knows of its weights
        and of its backward pass is in `metadata`, where `from_published` finds it.

        Raises ValueError for another site than "resid_post", for `rotated()` and for a lens of the last layer alone.
        """
        if self.site != "resid_post":
            raise ValueError(f"the published layout is of the stream after each block, this lens is of {self.site!r}")
        if "rotated" in self.about:
            raise ValueError("the published layout has no last layer, which this placebo rotates: use save")
        last = self.about["n_layers"] - 1
        matrices = {layer: J.to(dtype) for layer, J in zip(self.layers, self.J, strict=True) if layer != last}
        if not matrices:
            raise ValueError("the published layout has no last layer, and this lens has no other: nothing is written")
        facts = {"estimator": "jacobian_lens", "target_layer": last, "model": str(self.about.get("model"))}
        facts["hooked_lm"] = {name: self.about[name] for name in KNOWN if name in self.about}
        if self.probe is not None:
            facts["hooked_lm"]["probe"] = [part.tolist() for part in self.probe]
        published_lenses.write(path, matrices, int(self.about.get("prompts") or 0), facts)

    @classmethod
    def from_published(cls, path: str | Path, model: Decoder) -> "JacobianLens":
        """Read a file in the published layout, as a lens of this model. A file of `torch.save` is read without running its pickle
        (`weights_only`).

        Of a file that `to_published` wrote the weights are compared (see `check`); others have no fingerprint, only sizes. Raises
        ValueError for a file of another layout, of other sizes or of another target than the last layer.
        """
        found = published_lenses.read(path)
        n_layers, d_model = model.cfg.n_layers, model.cfg.d_model
        layers = sorted(found.matrices)
        if found.d_model != d_model or layers[-1] >= n_layers or found.target not in (None, n_layers - 1):
            raise ValueError(
                f"{path} is of layers {layers} with d_model {found.d_model} and the target layer {found.target}; this model has "
                f"{n_layers} layers and d_model {d_model}: it is of another model"
            )
        matrices = {**found.matrices, n_layers - 1: torch.eye(d_model)}
        facts = {"site": "resid_post", "n_layers": n_layers, "prompts": found.n_prompts}
        own = found.metadata.pop("hooked_lm", {})
        tokens, log_probs = own.get("probe", (None, None))
        facts |= {name: own[name] for name in KNOWN if name in own}
        about = provenance(model, **facts, published=found.metadata)
        scores = Scores(torch.full((len(matrices), 1), torch.nan), {"layer": list(matrices)}, about=about)
        J, probe = torch.stack([*matrices.values()]), tokens and (torch.tensor(tokens), torch.tensor(log_probs))
        return cls(J, tuple(matrices), "resid_post", scores, torch.full((len(J),), torch.nan), probe)

    @torch.no_grad()
    def measured(self, model: Decoder, prompts: Prompts) -> "JacobianLens":
        """The same lens, which knows how long the vectors of these prompts are at its layers (see `steer`)."""
        self.check(model, self.site, self.layers)
        sites = [model.names((self.site, layer))[0] for layer in self.layers]
        _, cache = model.run_with_cache(prompts, names_filter=sites, return_type=None)
        real = cache.attention_mask.bool() if cache.attention_mask is not None else slice(None)
        lengths = [cache[site][real].float().norm(dim=-1).median().cpu() for site in sites]
        return replace(self, lengths=torch.stack(lengths))


def weights_known(model: Decoder) -> dict[str, Any]:
    """What identifies a model's weights, as metadata."""
    dtype = str(model.embed.W_E.dtype).removeprefix("torch.")
    return {"weights": sampled_digest(model), "processed": list(model.cfg.processed), "dtype": dtype}


def before_final_norm(model: Decoder, x: Float[Tensor, "*lead d_model"]) -> Float[Tensor, "*lead d_model"]:
    """Directions of the normalised stream as directions of the stream: through the norm's weight and a LayerNorm's centring.

    Raises ValueError for a model with a transform before the unembedding, or with another norm than these.
    """
    check_linear(model.unembed)
    norm = norm_of(model, "ln_final")
    if not isinstance(norm, (LayerNorm, RMSNorm, ChannelScale, torch.nn.Identity)):
        raise ValueError(f"the final norm is a {type(norm).__name__}, through which a token has no direction")
    if (gain := norm_gain(norm)) is not None:
        x = x * gain
    return x - x.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else x


@torch.no_grad()
def _log_probs(model: Decoder, tokens: Int[Tensor, " pos"]) -> Float[Tensor, "pos token"]:
    """The log probabilities of some tokens after each of these."""
    stream = model(tokens[None].to(model.device), return_type=None, stop_at_layer=model.cfg.n_layers)
    log_probs = decode(model, stream[0]).log_softmax(-1).float().cpu()
    n = log_probs.shape[-1]
    return log_probs[:, torch.linspace(0, n - 1, min(N_SAMPLED, n)).long()]


def _tolerance(model: Decoder, dtype: str | None) -> float:
    """How much rounding may change log probabilities of a model and of another one, whose dtype is known by name."""
    both = [model.embed.W_E.dtype, getattr(torch, dtype or "bfloat16")]
    return max(SMALLEST, ROUNDED * max(torch.finfo(one).eps / 2 for one in both))


def _worst(found: Tensor, expected: Tensor) -> str:
    place = int((found - expected).abs().argmax())
    return (
        f"a log probability is {float(found.flatten()[place]):.3f} in place of {float(expected.flatten()[place]):.3f}"
    )


def _named(backward: Mapping[str, Any] | str) -> str:
    """What a lens with these rules of its backward pass is called."""
    rules = next((name for name, rules in NAMED.items() if rules.settings == backward), "")
    return {"relp": "R-lens", "gim": "Jacobian lens (GIM)"}.get(rules, "Jacobian lens (own rules)")
