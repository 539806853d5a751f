"""Trains dictionaries on the activations at a site of a model, or on other vectors, and evaluates them."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hooked_lm.engine.prompts import AxisSelection, chosen, some_rows
from hooked_lm.files import made_folder, writable_folder
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site
from hooked_lm.interventions.dictionaries.evaluate import figures_of, warn_if_poor
from hooked_lm.interventions.dictionaries.sae import config_of, frozen
from hooked_lm.interventions.dictionaries.scores import packed, unpacked
from hooked_lm.interventions.dictionaries.stream import Activations, Prompts, Sites, Stream, as_rows, batches
from hooked_lm.interventions.dictionaries.training import Config, DictionaryTraining, TrainingConfig
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders, from_dict
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
TRAINED = "hooked_lm.TrainedDictionary"
MEASURED_BY = "; no figures: evaluate_dictionary(model, texts, trained.sae) measures them"


@dataclass(frozen=True, repr=False)
class TrainedDictionary(Tabular):
    """A trained dictionary, its loss in each step (axis `step`), and its metrics on held-out texts (`figures`).

    `sae` is a dictionary (`SAE`), or the transcoders of several layers (`TranscoderSet`, `CrossLayerTranscoder`).
    Losses are for vectors scaled to a mean norm of sqrt(d). `figures` is None without held-out texts, as after `train_on`:
    `evaluate_dictionary(model, texts, trained.sae)` measures them on any texts.
    """

    sae: Any
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
        sae = frozen(from_dict(header["sae"], weights, str(path)))
        return cls(sae, **unpacked(tensors, header))

    def __repr__(self) -> str:
        losses = self.losses.mean
        found = f"loss {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses):,} steps" if len(losses) else "no steps"
        figures = MEASURED_BY if self.figures is None else "; figures on held-out texts"
        several = isinstance(self.sae, LayerTranscoders)
        size = f"{len(self.sae)} layers of {self.sae.d_sae:,}" if several else f"{self.sae.W_dec.shape[0]:,}"
        return f"TrainedDictionary({type(self.sae).__name__} of {size} features; {found}{figures})"


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
    layers: AxisSelection = None,
    cross_layer: bool = False,
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
    """Trains a sparse dictionary of a site on texts, or transcoders of several layers, and evaluates them on held-out texts.

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
        layers: "each" or some: trains a transcoder for each of these layers from the same passes over the texts, a
            `TranscoderSet`; `site` and `site_out` are then names without a layer, such as "mlp.hook_in" and "hook_mlp_out".
        cross_layer: whether the features of a layer also write to the later ones of `layers`: a `CrossLayerTranscoder`.
        buffer_prompts: the number of prompts in the buffer, whose vectors are shuffled together.
        batch_size: how many prompts run together, in training and in evaluation.
        skip: how many positions at the start of each prompt are excluded.
        held_out: the fraction of the prompts for evaluation, at least one; 0 for no evaluation.
        directory: the folder of checkpoints, every `checkpoint_every` steps, and of the final dictionary. An interrupted
            training resumes from it, with the same result as without the interruption.
        progress: show a bar; None: after two seconds.
        sizes: other settings of the kind's Config, such as `k`, or `skip_connection` for a transcoder.

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
    chosen_here = {"d_in", "d_sae", "hook_point", "hook_point_out", "n_outputs"}
    check_keywords("train_dictionary", sizes, {of.name for of in fields(config)} - chosen_here | set(ARGUMENTS))
    if not 0 <= held_out < 1:
        raise ValueError(f"held_out must be a fraction of the prompts, from 0 to below 1; got {held_out}")
    n_held = min(len(prompts) - 1, max(1, round(held_out * len(prompts)))) if held_out else 0
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    train, evaluation = (_rows(model, prompts, some) for some in (order[n_held:], order[:n_held]))
    reads, writes = _sites(model, site, site_out, layers, cross_layer)
    stream = Activations(
        model, train, reads, writes, buffer_prompts=buffer_prompts, batch_size=batch_size, skip=skip, seed=seed
    )
    read, written = stream.vectors([0])
    if site_out is not None:
        sizes = {"d_out": written.shape[-1], "subtract_b_dec": False, **sizes}
    one = config(d_in=read.shape[-1], d_sae=width, **sizes)
    cfg = one if layers is None else LayerTranscoders.Config((one,) * read.shape[1], cross_layer)
    trained = train_on(stream, cfg, settings, directory=directory, checkpoint_every=checkpoint_every, progress=progress)
    if not n_held:
        return trained
    figures = figures_of(model, evaluation, trained.sae, reads, writes, skip=skip, batch_size=batch_size, seed=seed)
    warn_if_poor(figures, steps, width)
    return TrainedDictionary(trained.sae, trained.losses, figures)


ARGUMENTS = signature(train_dictionary).parameters


def _sites(
    model: HookedRootModule, site: Site, site_out: Site | None, layers: AxisSelection, cross_layer: bool
) -> tuple[Sites, Sites | None]:
    """The sites of input and output: one, or a list of one for each layer."""
    if layers is None:
        if cross_layer:
            raise ValueError("a cross-layer transcoder has several layers: give layers='each' or some")
        return site, site_out
    if site_out is None:
        raise ValueError(
            "transcoders of several layers have an output site, too: give site_out, such as 'hook_mlp_out'"
        )
    for name, given in (("site", site), ("site_out", site_out)):
        if not isinstance(given, str):
            raise ValueError(
                f"with layers={layers!r}, {name} is a name without a layer, such as 'hook_mlp_out'; got {given!r}"
            )
    n_layers = getattr(getattr(model, "cfg", None), "n_layers", None)
    if n_layers is None:
        raise ValueError(
            f"a {type(model).__name__} has no layers by number: give the sites of one, and leave layers out"
        )
    numbers = chosen(layers, n_layers, "layer") or []
    return [(site, layer) for layer in numbers], [(site_out, layer) for layer in numbers]


def _rows(model: HookedRootModule, prompts: Prompts, rows: Sequence[int]) -> Prompts:
    if isinstance(prompts, VisionInputs):
        return some_rows(model, prompts, rows)
    return prompts[list(rows)] if isinstance(prompts, Tensor) else [prompts[row] for row in rows]


def train_on(
    stream: Stream,
    cfg: Config,
    settings: TrainingConfig | None = None,
    *,
    directory: str | Path | None = None,
    checkpoint_every: int = 500,
    progress: bool | None = None,
) -> TrainedDictionary:
    """Trains a dictionary on any stream of vectors; see `train_dictionary` for the arguments.

    `cfg` is that of a dictionary, or a `LayerTranscoders.Config` for a stream of several layers, [row, layer, width]. The
    dictionary knows the sites of the stream of a harvest (`store.stream`) and of `Activations`, unless `cfg` names others. A
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
    training = DictionaryTraining(stream, cfg, settings)
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
    sae, losses = training.finished()
    if folder is not None:
        sae.save(folder / FINISHED)
    return TrainedDictionary(sae, losses)
