"""`causal_trace`: add noise to the subject of a prompt, and restore clean activations one cell at a time."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.engine.cells_before_blocks import is_of_images, rows_and_positions
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.edit import Edit, repeated
from hooked_lm.engine.experiment import Experiment, Metric
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.metric_rows import MetricOfRows
from hooked_lm.engine.metric_trace import TracedAccess
from hooked_lm.engine.pairs import RightAndWrong, needed_metric
from hooked_lm.engine.plan import SweepPlan
from hooked_lm.engine.prompts import AxisSelection, Prompts, chosen, present, rows_of, values_of
from hooked_lm.engine.result import SweepResult, metric_name
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.engine.study import Metrics, Study, named
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.select import Site
from hooked_lm.models.vision.inputs import PromptRows, ids_of, repeated_rows
from hooked_lm.patching.windows import windows_of
from hooked_lm.renamed import renamed
from hooked_lm.results.groups import Groups, checked_groups

# positions; a text, or one for each prompt; or images, each with the numbers of its tokens or patches
Subject = int | str | Sequence[int] | Sequence[str] | Mapping[int, AxisSelection]
EMBED = ("hook_embed_merged", "hook_embed", "embed.hook_embed")  # with images, of decoders, of encoders
SITES = ("resid_post", "attn_out", "mixer_out", "mlp_out")


@renamed(checkpoint="resume_file")
@keeps_torch_state
@reads_chats
def causal_trace(
    model: HookedRootModule,
    prompts: Prompts,
    subject: Subject,
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    noise: float = 3.0,
    noise_site: Site | None = None,
    n_samples: int = 10,
    seed: int = 0,
    window: int = 1,
    sites: str | Sequence[str] | None = None,
    layers: AxisSelection = "each",
    positions: AxisSelection = "each",
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    resume_file: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Locate factual recall: noise the embeddings of a subject, and measure which restored clean activations recover the answer.

    Causal tracing after Meng et al. 2022 (arXiv:2202.05262). Each prompt runs `n_samples` times with Gaussian noise on the
    embeddings of its subject. Each cell restores the clean values of one site at one position in a window of layers. Samples
    and cells share computation; the result equals that of one forward pass each.

    Args:
        prompts: texts or ids [batch, pos], of one length; `VisionInputs` for a model that reads images.
        subject: the tokens that get noise: one or more positions, the same in all prompts; a text, of which all occurrences in
            each prompt are used; or a list of texts, one per prompt. A token that overlaps the text is included. A mapping from
            images, numbered over all prompts, to indices among the tokens of each (None: all) means these tokens only.
        metric: maps the logits [batch, pos, d_vocab] of one sample of all prompts to one number per prompt [batch], or to one
            for all prompts, which is averaged over samples; or a mapping of names to such functions. See
            `hooked_lm.analysis.metrics`.
        answers: in place of a metric, as in `sweep`.
        noise: the standard deviation of the noise, as a multiple of the standard deviation of the embeddings of subject tokens.
        noise_site: the site that gets noise instead of the embeddings, such as "vision.hook_patch_embed" or "projector.hook_out",
            where the positions, and the indices of an image, are those of its patches.
        n_samples: how many noise samples each prompt gets.
        seed: seed of the noise; the global generators are not used, and a larger `n_samples` keeps the first samples.
        window: how many layers are restored together, centred on each layer; an even window has one more layer before the
            centre than after it, and windows are truncated at the ends of the model. The paper uses 1 for the residual stream
            and 10 for attention and MLPs.
        sites: short names; several add an axis. None: those of "resid_post", "attn_out", "mixer_out", "mlp_out" that the model
            has. Those of a vision tower, as "vision.resid_post", have the axis patch instead of position.
        layers, positions: "each" adds an axis, a list an axis of these indices, None restores all together.
        groups: as in `sweep`. None: each of several prompts is a group of its samples, which are not independent.
        max_memory, progress, resume_file: as in `sweep`.

    Returns a SweepResult with those of the axes (metric), (site), layer and position that the arguments add. `corrupted` are the
    runs with noise, `clean` those without, so `.restored()` is the recovered fraction. Its prompts are the
    `n_samples * batch` runs, with index `sample * batch + prompt`. NaN for windows in which no layer has the site.
    Raises before the sweep: ValueError for a subject that is empty or not in the prompt, for noise that is not a positive number,
    and for n_samples or window below 1; IndexError for positions and layers out of range; KeyError for a site that no layer has.

    >>> from hooked_lm import HookedTransformer, patching
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> paris = metrics.probability(model.to_single_token(" Paris"))
    >>> result = patching.causal_trace(
    ...     model,
    ...     "The capital of France is",
    ...     " France",
    ...     metric=paris,
    ...     sites="resid_post",
    ...     n_samples=4,
    ...     positions=[4, -1],
    ... )
    >>> result.axes["position"], bool(result.corrupted.mean() < result.clean.mean())
    (('4  France', '5  is'), True)
    >>> result.restored().mean[-1].round(
    ...     decimals=4
    ... ).abs()  # after the last layer only the last position counts
    tensor([0., 1.])
    """
    refuse_two_stacks(model, "causal_trace")
    metric = needed_metric(model, metric, answers)
    for name, number in (("noise", noise), ("n_samples", n_samples)):
        if not 0 < number < float("inf"):
            raise ValueError(f"{name} must be a positive number, got {number}")
    tokens = rows_of(model, prompts)
    embed = _noise_site(model, noise_site)
    noisy = subject_tokens(model, tokens, subject, embed)
    grid = _Grid(model, tokens, _names(model, sites), layers, positions, window)
    metrics = named(metric)
    clean = Experiment(model, tokens, list(metrics.values()), (), max_memory)
    labels = checked_groups(groups, n := clean.scores.shape[1]) or tuple(range(n))
    values = values_of(model, tokens, [embed, *grid.sites])
    noised = _noised(values[embed], noisy, noise, n_samples, seed)
    base = Edit(embed, noised, tuple(noisy.any(0).nonzero().flatten().tolist()))
    cells = dict(grid.cells({site: repeated(values[site], n_samples) for site in grid.sites}))
    of_samples: dict[str, Metric] = {
        name: OfSamples(metric, n_samples, len(tokens), clean.reads) for name, metric in metrics.items()
    }
    runs = repeated_rows(tokens, n_samples)
    return Study(grid.axes, cells, [base], "causal tracing").carry_out(
        model,
        runs,
        of_samples if isinstance(metric, Mapping) else of_samples[""],
        runs,
        max_memory,
        progress,
        resume_file,
        labels * n_samples if n > 1 else None,
    )


# ---- noise -----------------------------------------------------------------------------------------------------------


def _noise_site(model: HookedRootModule, site: Site | None) -> str:
    """The full name of the site that gets noise; raises ValueError unless it has a vector at each position."""
    if site is None:
        site = next((name for name in EMBED if name in model.hook_dict), "hook_embed")
    names = model.names(site)
    dims = model.hook_dict[names[0]].dims
    if len(names) != 1 or dims[1:2] not in (("pos",), ("patch",)):
        raise ValueError(
            f"noise_site={site!r} must be one site [batch, pos, ...], got {names[0]!r} [{', '.join(dims)}]"
        )
    return names[0]


def subject_tokens(
    model: HookedRootModule, rows: PromptRows, subject: Subject, site: str = "hook_embed"
) -> Bool[Tensor, "batch pos"]:
    """A mask of the subject's tokens in each prompt, or of its patches in each image if the site is of images."""
    parts: list[Any] = [subject] if isinstance(subject, (int, str)) else list(subject)
    if not parts or any(isinstance(part, str) and not part.strip() for part in parts):
        raise ValueError("subject is empty: name the tokens that get noise")
    where = torch.zeros(rows_and_positions(model, rows, site), dtype=torch.bool)
    if isinstance(subject, Mapping):
        images = _places_of_images(model, rows, site, where.shape)
        for image, (number, which) in zip(chosen(parts, len(images), "image") or (), subject.items(), strict=True):
            row, positions = images[image]
            few = chosen(which, len(positions), f"token of image {number}")
            where[row, [positions[i] for i in (range(len(positions)) if few is None else few)]] = True
        return where
    if isinstance(parts[0], int):
        where[:, chosen(parts, where.shape[1], "position")] = True
        return where
    if is_of_images(model, site):
        raise ValueError(f"a text has no patches, which '{site}' has: give numbers of patches as subject")
    tokens = ids_of(rows)
    texts = parts * len(tokens) if isinstance(subject, str) else parts
    if len(texts) != len(tokens):
        raise ValueError(f"subject has {len(texts)} texts, but there are {len(tokens)} prompts: give one text for each")
    for number, (row, text) in enumerate(zip(tokens, texts, strict=True)):
        where[number, _found(model, row, text)] = True
    return where


def _places_of_images(
    model: HookedRootModule, rows: PromptRows, site: str, shape: torch.Size
) -> list[tuple[int, Sequence[int]]]:
    """For each image its row and positions at a site: those of its tokens in a prompt, or all of its own."""
    if is_of_images(model, site):
        return [(image, range(shape[1])) for image in range(shape[0])]
    if model.images_among(ids_of(rows)) is None:
        raise ValueError(f"subject: images have tokens in a HookedVisionLanguage, and this is a {type(model).__name__}")
    tokens = model.image_positions(rows).cells[..., 0]
    at = [(tokens == image).nonzero() for image in range(int(tokens.max()) + 1)]
    return [(int(each[0, 0]), each[:, 1].tolist()) for each in at]


def _found(model: HookedRootModule, row: Int[Tensor, " pos"], text: str) -> list[int]:
    """The positions of the tokens that overlap any occurrence of a text."""
    if getattr(model, "tokenizer", None) is None:
        raise ValueError("a text as subject needs a tokenizer, which this model lacks: give positions")
    ends = [len(model.to_string(row[: pos + 1])) for pos in range(len(row))]
    whole = model.to_string(row)
    spans = [match.span() for match in re.finditer(re.escape(text.rstrip()), whole)]
    if not spans:
        raise ValueError(f"the subject {text!r} is not in the prompt {whole!r}")
    tokens = enumerate(zip([0, *ends[:-1]], ends, strict=True))
    return [pos for pos, (start, stop) in tokens if any(start < last and first < stop for first, last in spans)]


def _noised(
    embed: Float[Tensor, "batch pos d_model"], where: Bool[Tensor, "batch pos"], noise: float, n_samples: int, seed: int
) -> Float[Tensor, "row pos d_model"]:
    """The noised embeddings of all samples, concatenated; at least fp32."""
    embed = embed.cpu().to(torch.promote_types(embed.dtype, torch.float32))
    spread = noise * embed[where].std()
    generator = torch.Generator().manual_seed(seed)
    samples = embed.repeat(n_samples, 1, 1, 1)
    for sample in samples:
        sample[where] += spread * torch.randn(embed[where].shape, generator=generator)
    return samples.flatten(0, 1)


class OfSamples:
    """A metric of [batch] prompts on logits of [n_samples * batch] rows, one sample after the other."""

    def __init__(self, metric: Metric, n_samples: int, n_prompts: int, reads: TracedAccess) -> None:
        self.of_rows = MetricOfRows(metric, reads)
        self.rows = torch.arange(n_samples * n_prompts).view(n_samples, n_prompts)
        self.__name__ = metric_name(metric)

    def __call__(self, logits: Tensor) -> Tensor:
        scores = self.of_rows(logits, self.rows)
        return scores.flatten() if scores.shape == self.rows.shape else scores.mean()


# ---- restoration -----------------------------------------------------------------------------------------------------


def _names(model: HookedRootModule, sites: str | Sequence[str] | None) -> list[str]:
    """The short names of the restored sites."""
    if sites is None:
        return present(model, SITES, range(model.cfg.n_layers))
    names = [sites] if isinstance(sites, str) else list(sites)
    if not names:
        raise ValueError("sites is empty: name at least one")
    return names


class _Grid:
    """Sites x layers x positions, each cell a window of layers."""

    def __init__(
        self,
        model: HookedRootModule,
        tokens: PromptRows,
        names: Sequence[str],
        layers: AxisSelection,
        positions: AxisSelection,
        window: int,
    ) -> None:
        plan = SweepPlan(model, tokens, names, None if layers is None else "each", positions)
        self.names, self.positions, self.axes = plan.names, plan.positions, dict(plan.axes)
        self.layers = chosen(layers, plan.n_layers, "layer")
        self.windows = windows_of(self.layers, window, max(plan.n_layers, 1))
        if self.layers is not None:
            self.axes["layer"] = list(self.layers)
        near = set().union(*self.windows)
        self.found = {(name, layer): site for (name, layer), site in plan.found.items() if layer in near}

    @property
    def sites(self) -> list[str]:
        """The full names of all sites that some cell restores."""
        return list(self.found.values())

    def cells(self, values: Mapping[str, Tensor]) -> Iterator[tuple[tuple[int, ...], list[Edit]]]:
        """Yield each grid index with the edits that restore `values` there; indices without edits are left out."""
        positions = [None] if self.positions is None else [(pos,) for pos in self.positions]
        grid = product(enumerate(self.names), enumerate(self.windows), enumerate(positions))
        for (number, name), (row, window), (column, where) in grid:
            there = [self.found[name, layer] for layer in window if (name, layer) in self.found]
            edits = [Edit(site, values[site], where) for site in there]
            place = [number] if len(self.names) > 1 else []
            place += [row] if self.layers is not None else []
            place += [column] if self.positions is not None else []
            if edits:
                yield tuple(place), edits
