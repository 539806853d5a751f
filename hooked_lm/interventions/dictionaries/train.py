"""Trains dictionaries on the activations at a site of a model, or on other vectors, and evaluates them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.engine.fingerprint import Digest
from hooked_lm.engine.prompts import some_rows
from hooked_lm.files import made_folder, writable_folder
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.dictionaries.evaluate import figures_of, warn_if_poor
from hooked_lm.interventions.dictionaries.sae import SAE, config_of, filled, frozen
from hooked_lm.interventions.dictionaries.scores import packed, unpacked
from hooked_lm.interventions.dictionaries.stream import Activations, Prompts, Stream, as_rows, batches
from hooked_lm.keywords import check_keywords
from hooked_lm.models.vision.inputs import VisionInputs
from hooked_lm.progress import progress_bar
from hooked_lm.results import stored
from hooked_lm.results.scores import Scores
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

CHECKPOINT, FINISHED = "checkpoint.safetensors", "dictionary.safetensors"
FORMAT, TRAINED = "hooked_lm.dictionary_training", "hooked_lm.TrainedDictionary"
MEASURED_BY = "; no figures: evaluate_dictionary(model, texts, trained.sae) measures them"


@dataclass(frozen=True, repr=False)
class TrainedDictionary(Tabular):
    """A trained dictionary, its loss in each step (axis `step`), and its metrics on held-out texts (`figures`).

    Losses are for vectors scaled to a mean norm of sqrt(d). `figures` is None without held-out texts, as after `train_on`:
    `evaluate_dictionary(model, texts, trained.sae)` measures them on any texts.
    """

    sae: SAE
    losses: Scores
    figures: Scores | None = None

    def to_dataframe(self) -> "pd.DataFrame":
        """The loss of each step."""
        return self.losses.to_dataframe()

    def _shown(self) -> Scores:
        return self.losses if self.figures is None else self.figures

    def plot(self, title: str = "") -> "go.Figure":
        """The loss by step as a line."""
        return self.losses.plot(title or "Loss in training")

    def save(self, path: str | Path) -> None:
        """Writes the dictionary, the losses and the figures to one safetensors file; `load` restores them bit for bit."""
        weights = {f"sae.{name}": weight for name, weight in self.sae.state_dict().items()}
        known = {"losses": self.losses, **({} if self.figures is None else {"figures": self.figures})}
        tensors, header = packed(known)
        stored.write(path, TRAINED, {**weights, **tensors}, {"sae": self.sae.to_dict(), **header})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "TrainedDictionary":
        """What `save` wrote, with the dictionary in evaluation mode. Raises ValueError for any other file."""
        tensors, header = stored.read(path, TRAINED)
        weights = {name[4:]: weight.clone() for name, weight in tensors.items() if name.startswith("sae.")}
        sae = frozen(filled(header["sae"], weights, str(path)))
        return cls(sae, **unpacked(tensors, header))

    def __repr__(self) -> str:
        losses = self.losses.mean
        found = f"loss {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses):,} steps" if len(losses) else "no steps"
        figures = MEASURED_BY if self.figures is None else "; figures on held-out texts"
        return f"TrainedDictionary({type(self.sae).__name__} of {self.sae.W_dec.shape[0]:,} features; {found}{figures})"


@dataclass(frozen=True)
class TrainingConfig:
    """The training settings of a dictionary.

    Args:
        steps, vectors_per_step: the number of steps, and of vectors in each step.
        learning_rate: of Adam, with a warmup over the first 5% of the steps and a decay to zero over the last 20%.
        sparsity: the weight of the penalty, with a warmup over the first 10% of the steps. TopK and BatchTopK have no penalty.
        dead_after: a feature counts as dead after so many vectors without an activation.
        auxiliary: the weight of the auxiliary loss that revives dead features: the error of their reconstruction of the residual
            (Gao et al. 2024, arXiv:2406.04093). It affects only features with positive pre-activations that larger ones or a
            threshold suppress: those of TopK, BatchTopK and JumpReLU.
        resample_after: after so many vectors without an activation, a feature is resampled: it gets the reconstruction error of
            a vector, drawn with probability proportional to its squared error (after Bricken et al. 2023). Only at the full
            learning rate, not during warmup and decay. None: never.
        seed: of the initial weights and of the order of vectors.
    """

    steps: int = 1000
    vectors_per_step: int = 512
    learning_rate: float = 1e-3
    sparsity: float = 1.0
    dead_after: int = 20_000
    auxiliary: float = 1 / 32
    seed: int = 0
    resample_after: int | None = 40_000

    def __post_init__(self) -> None:
        for name in ("steps", "vectors_per_step", "dead_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.resample_after is not None and self.resample_after < 1:
            raise ValueError(f"resample_after must be at least 1, or None, got {self.resample_after}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
        for name in ("sparsity", "auxiliary"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def rate(self, step: int) -> float:
        """The factor of the learning rate in a step."""
        warm, falling = max(1, self.steps // 20), max(1, self.steps // 5)
        return min(1.0, (step + 1) / warm, (self.steps - step) / falling)

    def sparsity_at(self, step: int) -> float:
        """The weight of the penalty in a step."""
        return self.sparsity * min(1.0, step / max(1, self.steps // 10))


def train_dictionary(
    model: HookedRootModule,
    prompts: Prompts,
    *,
    site: Site,
    kind: str = "topk",
    width: int,
    steps: int = 1000,
    vectors_per_step: int = 512,
    learning_rate: float = 1e-3,
    sparsity: float = 1.0,
    dead_after: int = 20_000,
    auxiliary: float = 1 / 32,
    resample_after: int | None = 40_000,
    site_out: Site | None = None,
    buffer_prompts: int = 256,
    batch_size: int = 32,
    skip: int = 0,
    held_out: float = 0.1,
    directory: str | Path | None = None,
    checkpoint_every: int = 500,
    seed: int = 0,
    progress: bool | None = None,
    **sizes: Any,
) -> TrainedDictionary:
    """Trains a sparse dictionary of a site on texts, and evaluates it on held-out texts.

    The model runs without gradients and is not changed. In training, vectors are scaled to a mean norm of sqrt(d), so that
    settings transfer between sites; the scale is folded into the resulting dictionary.

    Args:
        prompts: texts, token ids [prompt, pos], `VisionInputs` (at sites of the text), or stacked inputs of a model without a
            tokenizer.
        site: name or short name with layer, such as ("mlp_out", 1); heads are flattened.
        kind: "standard", "topk", "batchtopk", "jumprelu", "gated" or "transcoder".
        width: how many features (d_sae).
        steps, vectors_per_step, learning_rate, sparsity, dead_after, auxiliary, resample_after, seed: see `TrainingConfig`.
        site_out: the output site of a transcoder; if given, a dictionary of any kind is a transcoder.
        buffer_prompts: the number of prompts in the buffer, whose vectors are shuffled together.
        batch_size: how many prompts run together, in training and in evaluation.
        skip: how many positions at the start of each prompt are excluded.
        held_out: the fraction of the prompts for evaluation, at least one; 0 for no evaluation.
        directory: the folder of checkpoints, every `checkpoint_every` steps, and of the final dictionary. An interrupted
            training resumes from it, with the same result as without the interruption.
        progress: show a bar; None: after two seconds.
        sizes: other settings of the kind's Config, such as `k`.

    Warns if the result explains less than half of the variance of held-out texts, or if more than half of its features are never
    active there. Raises, before training, ValueError for invalid settings and for a directory with the checkpoint of another
    training, and TypeError for an unknown argument; FloatingPointError, with the step, for a loss that is not finite. Then
    nothing is returned or saved.

    >>> from random import Random
    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.demo.corpus import training_text
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> texts = [training_text(Random(seed)) for seed in range(40)]
    >>> trained = train_dictionary(
    ...     model, texts, site=("mlp_out", 1), width=256, k=8, steps=20, vectors_per_step=64
    ... )
    >>> trained.sae.cfg.hook_point, trained.figures.axes["figure"][:2]
    ('blocks.1.hook_mlp_out', ('explained variance', 'L0'))
    """
    prompts = [prompts] if isinstance(prompts, str) else as_rows(model, prompts)
    settings = TrainingConfig(
        steps, vectors_per_step, learning_rate, sparsity, dead_after, auxiliary, seed, resample_after
    )
    config = config_of(kind)
    chosen_here = {"d_in", "d_sae", "hook_point", "hook_point_out"}
    check_keywords("train_dictionary", sizes, {of.name for of in fields(config)} - chosen_here | set(ARGUMENTS))
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be a fraction of the prompts, from 0 to below 1; got {held_out}")
    n_held = min(len(prompts) - 1, max(1, round(held_out * len(prompts)))) if held_out else 0
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    train, evaluation = (_rows(model, prompts, some) for some in (order[n_held:], order[:n_held]))
    stream = Activations(
        model, train, site, site_out, buffer_prompts=buffer_prompts, batch_size=batch_size, skip=skip, seed=seed
    )
    read, written = stream.vectors([0])
    where: dict[str, Any] = dict(zip(("hook_point", "hook_point_out"), stream.sites, strict=False))
    if site_out is not None:
        sizes = {"d_out": written.shape[1], "subtract_b_dec": False, **sizes}
    cfg = config(d_in=read.shape[1], d_sae=width, **where, **sizes)
    trained = train_on(stream, cfg, settings, directory=directory, checkpoint_every=checkpoint_every, progress=progress)
    if not n_held:
        return trained
    figures = figures_of(model, evaluation, trained.sae, site, site_out, skip=skip, batch_size=batch_size, seed=seed)
    warn_if_poor(figures, steps, width)
    return TrainedDictionary(trained.sae, trained.losses, figures)


ARGUMENTS = signature(train_dictionary).parameters


def _rows(model: HookedRootModule, prompts: Prompts, rows: Sequence[int]) -> Prompts:
    if isinstance(prompts, VisionInputs):
        return some_rows(model, prompts, rows)
    return prompts[list(rows)] if isinstance(prompts, Tensor) else [prompts[row] for row in rows]


def train_on(
    stream: Stream,
    cfg: SAE.Config,
    settings: TrainingConfig | None = None,
    *,
    directory: str | Path | None = None,
    checkpoint_every: int = 500,
    progress: bool | None = None,
) -> TrainedDictionary:
    """Trains a dictionary on any stream of vectors; see `train_dictionary` for the arguments.

    The dictionary knows the sites of the stream of a harvest (`store.stream`) and of `Activations`, unless `cfg` names others. A
    stream has no held-out texts, so `figures` is None: `evaluate_dictionary(model, texts, trained.sae)` measures them.

    >>> from hooked_lm.interventions.dictionaries import ActivationBatches, TopK
    >>> rows = torch.randn(500, 16, generator=torch.Generator().manual_seed(0))
    >>> settings = TrainingConfig(steps=10, vectors_per_step=100)
    >>> trained = train_on(
    ...     ActivationBatches(rows), TopK.Config(d_in=16, d_sae=64, k=4), settings
    ... )
    >>> trained.losses.axes["step"][-1]
    9
    """
    settings = settings or TrainingConfig()
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    training = _Training(stream, cfg, settings)
    folder = None if directory is None else writable_folder(directory)
    if folder is not None and (folder / CHECKPOINT).exists():
        training.resume(folder / CHECKPOINT)
    source = batches(stream, settings.vectors_per_step, settings.seed, *training.place)
    steps = range(len(training.losses), settings.steps)
    training.sae.train()
    with torch.enable_grad():
        for step in progress_bar("training", len(steps), progress, steps=steps):
            (read, written), training.place = next(source)
            training.step(read, written, step)
            if folder is not None and ((step + 1) % checkpoint_every == 0 or step + 1 == settings.steps):
                training.save(made_folder(folder) / CHECKPOINT)
    found = training.finished()
    if folder is not None:
        found.sae.save(folder / FINISHED)
    return found


def _at_sites(cfg: SAE.Config, sites: Sequence[str]) -> SAE.Config:
    """The config with the sites of a stream that knows them, of input and output, where it names none itself."""
    known: dict[str, Any] = dict(zip(("hook_point", "hook_point_out"), sites, strict=False))
    return replace(cfg, **{name: site for name, site in known.items() if getattr(cfg, name) is None})


class _Training:
    """A dictionary in training, with all state that a checkpoint needs."""

    def __init__(self, stream: Stream, cfg: SAE.Config, settings: TrainingConfig) -> None:
        self.settings, self.about = settings, stream.about()
        read, written = stream.fill(0)
        if "sha256" not in self.about:
            self.about = {**self.about, "sha256 of the first buffer": Digest().of((read, written)).hex()}
        if (read.shape[1], written.shape[1]) != (cfg.d_in, cfg.width_out):
            raise ValueError(
                f"the stream has vectors of widths {read.shape[1]} and {written.shape[1]}, and the dictionary has inputs of "
                f"width {cfg.d_in} and outputs of width {cfg.width_out}"
            )
        self.scales = _scale(read), _scale(written)
        if cfg.subtract_b_dec and written is not read:
            raise ValueError(
                "b_dec belongs to the outputs and cannot be subtracted from other inputs: give subtract_b_dec=False"
            )
        self.sae = _at_sites(cfg, self.about.get("sites", [])).build(settings.seed).to(read.device)
        with torch.no_grad():
            self.sae.b_dec.copy_(written.mean(0) * self.scales[1])
        self.optimizer = torch.optim.Adam(self.sae.parameters(), lr=settings.learning_rate)
        self.unseen_for: Int[Tensor, " d_sae"] = torch.zeros(cfg.d_sae, dtype=torch.long, device=read.device)
        self.losses: list[float] = []
        self.place = (0, 0)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(self, read: Float[Tensor, "row d_in"], written: Float[Tensor, "row d_out"], number: int) -> None:
        """Makes one training step."""
        settings, sae = self.settings, self.sae
        x, target = read * self.scales[0], written * self.scales[1]
        loss, hidden, features = sae.objective(x, target, settings.sparsity_at(number))
        if bool((dead := self.unseen_for >= settings.dead_after).any()) and settings.auxiliary:
            loss = loss + settings.auxiliary * self._revived(target, hidden, features, dead)
        self.optimizer.zero_grad()
        loss.backward()
        length = torch.nn.utils.clip_grad_norm_(sae.parameters(), 10.0 * sae.cfg.width_out**0.5)
        if not (bool(loss.isfinite()) and bool(length.isfinite())):
            raise FloatingPointError(
                f"the loss is {loss.item():.4g} in step {number}, or its gradient is not finite: lower the learning rate; "
                "nothing is returned"
            )
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * settings.rate(number)
        self._keep_norms()
        self.optimizer.step()
        sae.after_step()
        self.unseen_for += len(x)
        self.unseen_for[(features.detach() > 0).any(0)] = 0
        if settings.resample_after is not None and settings.rate(number) == 1:
            dead = self.unseen_for >= settings.resample_after
            if bool(dead.any()):
                self._resample(dead, x, (target - sae.decode(features)).detach(), number)
        self.losses.append(loss.item())

    def _revived(
        self, target: Tensor, hidden: Tensor, features: Tensor, dead: Bool[Tensor, " d_sae"]
    ) -> Float[Tensor, ""]:
        """The auxiliary loss: the error of the residual's reconstruction by the top dead features, up to half the width."""
        sae = self.sae
        missing = target - sae.decode(features).detach()
        n_best = min(int(dead.sum()), max(1, sae.cfg.width_out // 2))
        values, places = hidden.masked_fill(~dead, -torch.inf).topk(n_best, sorted=False)
        revived = torch.zeros_like(hidden).scatter(-1, places, values.relu())
        return (missing - revived @ sae.W_dec).pow(2).sum(-1).mean()

    @torch.no_grad()
    def _resample(
        self,
        which: Bool[Tensor, " d_sae"],
        x: Float[Tensor, "row d_in"],
        missing: Float[Tensor, "row d_out"],
        number: int,
    ) -> None:
        """Resamples features: each detects a drawn vector, and writes its reconstruction error."""
        errors, n = missing.pow(2).sum(-1).clamp_min(1e-12), int(which.sum())
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)
        rows = errors.cpu().multinomial(n, replacement=n > len(x), generator=generator).to(x.device)
        sizes = errors[rows].sqrt()[:, None]
        centred = (x - x.mean(0))[rows]
        readers = (
            centred * sizes / centred.pow(2).sum(-1, keepdim=True).clamp_min(1e-12)
        )  # activation on its vector: size
        middle = x.mean(0) - self.sae.b_dec if self.sae.cfg.subtract_b_dec else x.mean(0)
        self.sae.resample(which, readers.T, missing[rows] / sizes, -readers @ middle)
        self.unseen_for[which] = 0
        for weight, state in self.optimizer.state.items():
            for average in (state["exp_avg"], state["exp_avg_sq"]) if weight is not self.sae.b_dec else ():
                (average.T if weight is self.sae.W_enc else average)[which] = 0

    @torch.no_grad()
    def _keep_norms(self) -> None:
        """Projects out of the gradient of the directions the component that would change their norm."""
        W, gradient = self.sae.W_dec, self.sae.W_dec.grad
        assert gradient is not None
        gradient -= (gradient * W).sum(1, keepdim=True) * W / W.pow(2).sum(1, keepdim=True)

    # ---- the end, and checkpoints ------------------------------------------------------------------------------------

    def finished(self) -> TrainedDictionary:
        """The dictionary for unscaled vectors, with the losses."""
        sae, (inputs, outputs) = self.sae, self.scales
        sae.scale_inputs_(inputs, outputs)
        sae.scale_features_(torch.full_like(sae.W_enc[0].detach(), 1 / outputs))
        sae = sae.eval().requires_grad_(False)
        losses = torch.tensor(self.losses)[:, None]
        about = {**self.about, **vars(self.settings), "dictionary": sae.to_dict(), "of": "loss"}
        return TrainedDictionary(sae, Scores(losses, {"step": range(len(losses))}, about=about))

    def _metadata(self) -> dict[str, Any]:
        """The metadata that must be equal in a checkpoint and a training that resumes from it."""
        return {"dictionary": self.sae.to_dict(), "settings": vars(self.settings), "stream": self.about}

    def save(self, path: Path) -> None:
        """Writes a checkpoint."""
        tensors = {f"sae.{name}": weight for name, weight in self.sae.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{name}": value for name, value in state.items()}
        tensors |= {"unseen_for": self.unseen_for, "losses": torch.tensor(self.losses, dtype=torch.float64)}
        stored.write(path, FORMAT, tensors, {**self._metadata(), "place": self.place, "scales": self.scales})

    @stored.names_the_file
    def resume(self, path: Path) -> None:
        """Resumes from a checkpoint; ValueError for one of another training."""
        tensors, header = stored.read(path, FORMAT)
        for name, ours in self._metadata().items():
            theirs = header[name]
            if wrong := next((key for key, value in ours.items() if theirs.get(key) != value), None):
                raise ValueError(
                    f"{path} is a checkpoint of another training: {wrong} is {theirs.get(wrong)!r} there and {ours[wrong]!r} "
                    "here; give the settings of that training, or another directory"
                )
        device = self.sae.W_enc.device
        self.sae.load_state_dict({name[4:]: value for name, value in tensors.items() if name.startswith("sae.")})
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            if name.startswith("adam."):
                _, index, key = name.split(".")
                state.setdefault(int(index), {})[key] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.unseen_for = tensors["unseen_for"].to(device)
        self.losses = tensors["losses"].tolist()
        self.place, self.scales = tuple(header["place"]), tuple(header["scales"])


def _scale(vectors: Float[Tensor, "row d"]) -> float:
    """The factor that scales vectors to a mean norm of sqrt(d)."""
    length = vectors.norm(dim=-1).mean().item()
    if not 0 < length < float("inf"):
        raise ValueError(
            f"the vectors have a mean norm of {length}, and training needs one that is positive and finite"
        )
    return vectors.shape[1] ** 0.5 / length
