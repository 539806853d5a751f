"""The tuned lens: an affine map for each layer from its residual stream to that of the last layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import check_grad_mode
from hooked_lm.analysis.reading.corpus import padded_on_the_right
from hooked_lm.analysis.reading.lens import decode
from hooked_lm.engine.prompts import AxisSelection, chosen, rows_of, some_rows
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.extras import lazy_import
from hooked_lm.models.checks import check_one_stream
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.vision.inputs import Rows, VisionInputs
from hooked_lm.progress import progress_bar
from hooked_lm.results import stored
from hooked_lm.results.bootstrap import in_words
from hooked_lm.results.scores import Scores, provenance
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["TunedLens", "train_tuned_lens"]

Texts = Sequence[str] | Int[Tensor, "*prompt pos"] | VisionInputs | Chat  # `_tokens` checks the shape


MEASURE = "KL divergence, nats"
RUNS = ["before", "after"]


@dataclass(frozen=True, eq=False, repr=False)
class TunedLens(Tabular):
    """Affine translators of the residual stream: the value x of layer `layers[i]` becomes `x + x A[i] + b[i]` (Belrose et al.
    2023, arXiv:2303.08112). With zeros this is the logit lens.

    `site` is the site whose values are translated. The stream after the last block needs no translation: its part stays zero.
    `losses`, with the axes step and layer, is the KL divergence in training, in nats. `held_out`, with the axes run ("before",
    "after") and layer, is that on each held-out prompt.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis.reading.lens import logit_lens
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> lens = TunedLens.identity(model)
    >>> found = logit_lens(model, "The capital of France is", lens=lens)
    >>> bool(torch.equal(found.logits, logit_lens(model, "The capital of France is").logits))
    True
    """

    A: Float[Tensor, "layer d_model d_model"]
    b: Float[Tensor, "layer d_model"]
    layers: tuple[int, ...]
    site: str
    losses: Scores
    held_out: Scores

    @classmethod
    def identity(cls, model: Decoder, layers: AxisSelection = "each", site: str = "resid_post") -> "TunedLens":
        """The lens before training, which changes nothing."""
        which = chosen(layers, model.cfg.n_layers, "layer") or []
        d_model, unknown = model.cfg.d_model, torch.full((2, len(which), 1), float("nan"))
        about = provenance(model, of=MEASURE, site=site, n_layers=model.cfg.n_layers)
        held_out = Scores(unknown, {"run": RUNS, "layer": which}, about=about)
        A, b = torch.zeros(len(which), d_model, d_model), torch.zeros(len(which), d_model)
        return cls(A, b, tuple(which), site, _losses(torch.zeros(0, len(which), 1), which, about), held_out)

    @property
    def about(self) -> dict[str, Any]:
        """The model, versions and training settings."""
        return dict(self.held_out.about)

    def check(self, model: Any, site: str, layers: Sequence[int]) -> None:
        """Raises ValueError if the lens does not fit the model, site or layers."""
        if self.A.shape[-1] != model.cfg.d_model:
            raise ValueError(
                f"this lens is of {self.about.get('model')}, whose d_model is {self.A.shape[-1]}; "
                f"this model's is {model.cfg.d_model}: train one for it"
            )
        if self.about["n_layers"] != model.cfg.n_layers:
            raise ValueError(
                f"this lens is of {self.about['model']} with {self.about['n_layers']} layers, this model has "
                f"{model.cfg.n_layers}: train one for it"
            )
        if site != self.site:
            raise ValueError(f"this lens was trained on {self.site!r}, not on {site!r}")
        if untrained := [layer for layer in layers if layer not in self.layers]:
            raise ValueError(f"this lens was not trained for layers {untrained}; it has {list(self.layers)}")

    def __call__(self, stream: Float[Tensor, "*lead d_model"], layer: int) -> Float[Tensor, "*lead d_model"]:
        """The translated stream of a layer."""
        place = self.layers.index(layer)
        return translated(stream, self.A[place].to(stream.device), self.b[place].to(stream.device))

    def to_dataframe(self) -> "pd.DataFrame":
        """A row for each layer: `before` and `after`, the mean held-out divergence before and after training, in nats."""
        before, after = self.held_out.mean.tolist()
        return pd.DataFrame({"layer": list(self.layers), "before": before, "after": after})

    def plot(self, title: str = "") -> "go.Figure":
        """Lines of the held-out divergence by layer, before and after training, with its intervals over held-out prompts."""
        from hooked_lm import viz

        names = ("before training", "after training")
        with in_words():
            ends = zip(*self.held_out.interval(), strict=True) if self.held_out.n_prompts > 1 else []
        return viz.lines(
            list(self.layers),
            dict(zip(names, self.held_out.mean, strict=True)),
            dict(zip(names, ends, strict=False)),
            title=title or "Tuned lens on held-out prompts",
            x_title="layer",
            y_title=MEASURE,
        )

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file; `load` restores it exactly."""
        tensors = {"A": self.A, "b": self.b, "losses": self.losses.values, "held_out": self.held_out.values}
        header = {"layers": self.layers, "site": self.site, "about": self.about}
        stored.write(path, "hooked_lm.TunedLens", tensors, header)

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "TunedLens":
        """Read what `save` wrote. Raises ValueError for any other file."""
        tensors, header = stored.read(path, "hooked_lm.TunedLens")
        layers, about = tuple(header["layers"]), header["about"]
        held_out = Scores(tensors.pop("held_out"), {"run": RUNS, "layer": layers}, about=about)
        losses = _losses(tensors.pop("losses"), layers, about)
        return cls(**tensors, layers=layers, site=header["site"], losses=losses, held_out=held_out)

    def __repr__(self) -> str:
        of = f"TunedLens({self.about.get('model')}, {self.site} of {len(self.layers)} layers"
        if not len(self.losses.values):
            return f"{of}; untrained)"
        before, after = self.held_out.mean.mean(1).tolist()
        return f"{of}; held-out KL {before:.3g} before training, {after:.3g} after)"


def _losses(values: Float[Tensor, "step layer 1"], layers: Sequence[int], about: Mapping[str, Any]) -> Scores:
    """The divergences of each step of training."""
    return Scores(values, {"step": range(len(values)), "layer": layers}, about=about)


def translated(
    stream: Float[Tensor, "*lead d_model"], A: Float[Tensor, "d_model d_model"], b: Float[Tensor, " d_model"]
) -> Float[Tensor, "*lead d_model"]:
    """`x + x A + b`, computed in the wider dtype of `x` and `A`, and returned in that of `x`."""
    dtype = torch.promote_types(stream.dtype, A.dtype)
    wide = stream.to(dtype)
    return (wide + wide @ A.to(dtype) + b.to(dtype)).to(stream.dtype)


def train_tuned_lens(
    model: Decoder,
    prompts: Texts,
    *,
    steps: int = 250,
    learning_rate: float = 1e-3,
    batch_size: int = 8,
    held_out: float = 0.1,
    layers: AxisSelection = "each",
    site: str = "resid_post",
    seed: int = 0,
    progress: bool | None = None,
) -> TunedLens:
    """Train a tuned lens: Adam on KL(model || lens), the divergence between the predictions of model and lens.

    Each step takes `batch_size` prompts, runs the model once without gradients, and updates the translators of all layers. The
    learning rate decays linearly to zero. Logits of one layer are in memory at a time. The model's weights get no gradient.

    Args:
        prompts: texts, truncated at n_ctx, token ids [prompt, pos], conversations (`model.chat`), or `VisionInputs`; split long
            texts into several prompts.
        held_out: the fraction of prompts (at least one prompt) on which the divergence is measured before and after training.
        layers, site: the sites whose values are translated.
        seed: seed of the order of the prompts.
        progress: whether to show a progress bar; None: if the work takes longer than two seconds.

    Raises before training: ValueError for fewer than two prompts and for numbers out of range, TypeError for a single string,
    RuntimeError in inference mode. Raises FloatingPointError, with step and layer, if a divergence is not finite.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> texts = [
    ...     f"The capital of {country} is"
    ...     for country in ("France", "Spain", "Italy", "Greece")
    ... ]
    >>> lens = train_tuned_lens(model, texts, steps=10)
    >>> before, after = lens.held_out.mean.mean(1).tolist()
    >>> after < before
    True
    """
    check_grad_mode("training a lens")
    _check(steps, learning_rate, batch_size, held_out)
    which = chosen(layers, model.cfg.n_layers, "layer")
    if which is None:
        raise ValueError("a lens has a translator for each layer: layers must be 'each' or some, not None")
    tokens, mask = _tokens(model, prompts)
    order = torch.randperm(len(tokens), generator=(generator := torch.Generator().manual_seed(seed)))
    n_held = min(len(order) - 1, max(1, round(held_out * len(order))))
    training = _Training(model, site, which)
    before = training.measured(tokens, mask, order[:n_held], batch_size)
    optimizer = torch.optim.Adam([training.A, training.b], lr=learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses = []
    batches = enumerate(_batches(order[n_held:], batch_size, steps, generator))
    for step, rows in progress_bar("tuned lens", steps, progress, steps=batches):
        losses.append(training.step(some_rows(model, tokens, rows.tolist()), mask[rows], step))
        optimizer.step()
        schedule.step()
    after = training.measured(tokens, mask, order[:n_held], batch_size)
    settings = {"steps": steps, "learning_rate": learning_rate, "batch_size": batch_size, "seed": seed, "site": site}
    n_prompts = {"prompts": len(order) - n_held, "held_out": n_held}
    about = provenance(model, of=MEASURE, **settings, n_layers=model.cfg.n_layers, **n_prompts)
    shown = Scores(torch.stack([before, after]), {"run": RUNS, "layer": which}, about=about)
    curves = _losses(torch.stack(losses)[..., None], which, about)
    return TunedLens(training.A.detach().cpu(), training.b.detach().cpu(), tuple(which), site, curves, shown)


def _check(steps: int, learning_rate: float, batch_size: int, held_out: float) -> None:
    """Raises ValueError for numbers out of range."""
    for name, value in {"steps": steps, "batch_size": batch_size}.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be positive, got {learning_rate}")
    if not 0 < held_out < 1:
        raise ValueError(f"held_out is a share of the prompts, above 0 and below 1, got {held_out}")


def _tokens(model: Decoder, texts: Texts) -> tuple[Rows, Bool[Tensor, "prompt pos"]]:
    """What the model reads of all prompts, and a mask that is True except at padding."""
    refuse_two_stacks(model, "train_tuned_lens")
    if isinstance(texts, str):
        raise TypeError("a lens is trained on several texts, in a list, got one string")
    if len(texts) < 2:
        raise ValueError(f"a lens is trained on some prompts and measured on others: give at least 2, not {len(texts)}")
    if isinstance(texts, Chat):
        tokens, real, _ = padded_on_the_right(texts)
        return tokens, real
    if isinstance(texts, VisionInputs):
        rows, given = rows_of(model, texts), texts.attention_mask
        return rows, (torch.ones(rows.shape) if given is None else given.cpu()).bool()
    if isinstance(texts, Tensor):
        if texts.ndim != 2 or texts.shape[1] == 0:
            raise ValueError(f"token ids are [prompt, pos] with some tokens, got {list(texts.shape)}")
        model.tokens.check_ids(texts)
        return texts.cpu(), torch.ones_like(texts, dtype=torch.bool, device="cpu")
    tokens, mask = model.tokens.encode(list(texts), padding_side="right", truncate=True)
    return tokens, mask.bool()


def _batches(order: Tensor, size: int, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of prompt indices for `steps` steps, reshuffled after each epoch."""
    left = order[:0]
    for _ in range(steps):
        if not len(left):
            left = order[torch.randperm(len(order), generator=generator)]
        rows, left = left[:size], left[size:]
        yield rows


def divergence(
    model: Decoder, own: Float[Tensor, "row d_vocab"], stream: Float[Tensor, "row d_model"]
) -> Float[Tensor, " row"]:
    """KL(own || decode(stream)) of each row, in nats; `own` are log probabilities."""
    log_probs = decode(model, stream).log_softmax(-1)
    return (own.exp() * (own - log_probs)).sum(-1)


class _Training:
    """The state of the training: the translators of all layers, their gradients and losses."""

    def __init__(self, model: Decoder, site: str, layers: Sequence[int]) -> None:
        check_one_stream(model, "there is no tuned lens")
        self.model, self.layers = model, layers
        self.sites = [model.names((site, layer))[0] for layer in layers]
        self.last = model.stack.site_after(model, model.cfg.n_layers - 1)
        for name in self.sites:
            if model.hook_dict[name].dims != ("batch", "pos", "d_model"):
                raise ValueError(f"'{name}' is not a residual stream [batch, pos, d_model], so a lens cannot decode it")
        n, d_model = len(layers), model.cfg.d_model
        self.A = torch.zeros(n, d_model, d_model, device=model.device, requires_grad=True)
        self.b = torch.zeros(n, d_model, device=model.device, requires_grad=True)

    @torch.no_grad()
    def streams(
        self, tokens: Rows, mask: Bool[Tensor, "batch pos"]
    ) -> tuple[Float[Tensor, "row d_vocab"], dict[str, Float[Tensor, "row d_model"]]]:
        """The model's log probabilities and the values of all sites, at positions that are not padding."""
        model, sites = self.model, [*self.sites, self.last]
        tokens, mask = tokens.to(model.device), mask.to(model.device)
        _, cache = model.run_with_cache(tokens, attention_mask=mask.long(), names_filter=sites, return_type=None)
        return decode(model, cache[self.last][mask]).log_softmax(-1), {name: cache[name][mask] for name in self.sites}

    def step(self, tokens: Rows, mask: Bool[Tensor, "batch pos"], number: int) -> Float[Tensor, " layer"]:
        """Set the gradients of the translators for a batch; returns its mean divergence at each layer."""
        own, streams = self.streams(tokens, mask)
        self.A.grad, self.b.grad = torch.zeros_like(self.A), torch.zeros_like(self.b)
        losses = torch.zeros(len(self.layers))
        for place, (layer, site) in enumerate(zip(self.layers, self.sites, strict=True)):
            if site == self.last:
                continue
            A, b = self.A[place].detach().requires_grad_(), self.b[place].detach().requires_grad_()
            with torch.enable_grad():
                loss = divergence(self.model, own, translated(streams[site], A, b)).mean()
                found = torch.autograd.grad(loss, [A, b])  # weights get no gradient
            if not all(bool(part.isfinite().all()) for part in (loss, *found)):
                raise FloatingPointError(
                    f"the divergence at layer {layer} is {loss.item():.4g} in step {number}, or its gradient is not finite: "
                    "lower the learning rate; nothing is returned"
                )
            self.A.grad[place], self.b.grad[place] = found
            losses[place] = loss.item()
        return losses

    @torch.no_grad()
    def measured(
        self, tokens: Rows, mask: Bool[Tensor, "prompt pos"], rows: Tensor, size: int
    ) -> Float[Tensor, "layer some_prompt"]:
        """The mean divergence of each of these prompts at each layer."""
        parts = []
        for some in rows.split(size):
            own, streams = self.streams(some_rows(self.model, tokens, some.tolist()), mask[some])
            counts = mask[some].sum(1).tolist()
            seen = (translated(streams[site], self.A[i], self.b[i]) for i, site in enumerate(self.sites))
            each = [divergence(self.model, own, stream) for stream in seen]
            parts.append(torch.stack([torch.stack([p.mean() for p in one.split(counts)]) for one in each]).cpu())
        found = torch.cat(parts, 1)
        if not bool(found.isfinite().all()):
            wrong = [layer for layer, part in zip(self.layers, found, strict=True) if not bool(part.isfinite().all())]
            raise FloatingPointError(f"the divergence on held-out prompts is not finite at layers {wrong}")
        return found
