"""`ablate`: ablate one component of a model at a time, and measure the effect."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.edit import Change
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import RightAndWrong, needed_metric
from hooked_lm.engine.plan import SweepPlan
from hooked_lm.engine.prompts import (
    AxisSelection,
    HeadSelection,
    Prompts,
    check_has_mean,
    chosen,
    present,
    rows_of,
    some_rows,
    values_of,
)
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.engine.study import Metrics, Study
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.interventions.patch import other_rows
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.vision.inputs import PromptRows, VisionInputs, ids_of
from hooked_lm.renamed import renamed
from hooked_lm.results.groups import Groups

# prompts of any length
Dataset = Prompts | Sequence[Int[Tensor, "_"]] | Sequence[VisionInputs]

MIXED = ("attn_out", "mixer_out")  # outputs of token mixing: attention, or a state-space mixer
SITES: Mapping[str, Sequence[str]] = {
    "heads": ("z",),
    "mlps": ("mlp_out",),
    "attention": MIXED,
    "neurons": ("post",),
    "positions": ("resid_pre",),
    "layers": (*MIXED, "mlp_out", "laurel_out", "per_layer_out", "conv_out", "deepstack"),
}
REPLACEMENTS = ("zero", "mean", "resample")
TOKENS_A_RUN = 4096


@renamed(checkpoint="resume_file", method="replace_with")
@keeps_torch_state
@reads_chats
def ablate(
    model: HookedRootModule,
    prompts: Prompts,
    components: str = "heads",
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    replace_with: str = "zero",
    source_prompts: Dataset | None = None,
    layers: AxisSelection = "each",
    heads: HeadSelection = "each",
    neurons: AxisSelection = "each",
    positions: AxisSelection = None,
    seed: int = 0,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    resume_file: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Ablate one component of the model at a time: replace its activation by zeros, a mean or that of another prompt.

    Zero ablation of heads is due to Michel et al. 2019 (arXiv:1905.10650). Wang et al. 2022 (arXiv:2211.00593) use means, and
    causal scrubbing (Chan et al. 2022) resamples. The cells share computation; the result equals that of one forward pass
    per cell.

    Args:
        prompts: texts or ids [batch, pos], of one length; `VisionInputs` for a model that reads images.
        components: "heads" (the `z` of a head), "mlps" (`mlp_out`), "attention" (`attn_out`, or `mixer_out` in state-space
            layers), "neurons" (`post` of an MLP), "positions" (the residual stream before each layer, at one position), or
            "layers" (all outputs that a layer adds to the residual stream).
        metric: maps logits [batch, pos, d_vocab] to one number per prompt [batch] or one for all prompts; or a mapping of names
            to such functions. See `hooked_lm.analysis.metrics`.
        answers: in place of a metric, as in `sweep`.
        replace_with: "zero"; "mean", the mean over all source prompts and positions; "resample", the values of one other
            prompt at the same positions, the same prompt in all cells.
        source_prompts: for "mean" texts or ids of any length, BOS included; for "resample" texts or ids, of which one that is
            as long as the prompt and differs from it is drawn for each prompt. Either may be `VisionInputs`, or several of them,
            whose padding is left out. None: the prompts themselves, which "resample" permutes so that each gets the values of
            another.
        layers, heads, neurons: "each" adds an axis, a list an axis of these indices (heads: or labels such as "L1H7"), None
            ablates all together.
        positions: "each" or a list adds an axis, None ablates all positions together ("each" for components="positions").
        seed: seed of the draws of "resample", which do not use the global generators.
        groups, max_memory, progress, resume_file: as in `sweep`.

    Returns a SweepResult with those of the axes (metric), layer, position, head and neuron that the arguments add. Its baseline
    `corrupted` is the run without ablation, so `.effects()` is the effect of each ablation; there is no `clean`. NaN for a head,
    a neuron or a site that a layer lacks. Raises before the sweep: KeyError, with similar names, if none of the layers has the
    site (mixture-of-experts layers have no `post`, as each neuron sees only the tokens routed to it); IndexError for an index
    out of range; ValueError for unknown `components` or `replace_with`, an empty choice, and if there is no other prompt.

    >>> from hooked_lm import HookedTransformer, patching
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> paris = metrics.log_probability(model.to_single_token(" Paris"))
    >>> lost = patching.ablate(
    ...     model, "The capital of France is", "layers", metric=paris
    ... ).effects()
    >>> list(lost.axes), bool((lost.mean < -1).any())
    (['layer'], True)
    """
    refuse_two_stacks(model, "ablate")
    metric = needed_metric(model, metric, answers)
    _check_options(components, replace_with, source_prompts, heads, neurons)
    tokens = rows_of(model, prompts)
    rows = None if source_prompts is None else _rows(model, source_prompts)
    donors = _donors(model, tokens, rows, seed) if replace_with == "resample" else None
    plan = SweepPlan(
        model,
        tokens,
        _present(model, SITES[components], layers),
        layers,
        "each" if components == "positions" and positions is None else positions,
        heads if components == "heads" else None,
        neurons if components == "neurons" else None,
    )
    if donors is not None:
        value = _joined([values_of(model, some, plan.sites) for some in donors]).__getitem__
    elif replace_with == "mean":
        rows = _rows(model, tokens) if rows is None and _are_padded(tokens) else rows
        value = _means(model, [tokens] if rows is None else _of_equal_lengths(rows), plan.sites).__getitem__
    else:
        value = _zeros(model)
    study = _together(plan.study(value, f"ablating {components}"))
    return study.carry_out(model, tokens, metric, None, max_memory, progress, resume_file, groups)


def _check_options(
    components: str, replace_with: str, source_prompts: Dataset | None, heads: HeadSelection, neurons: AxisSelection
) -> None:
    if components not in SITES:
        raise ValueError(f"components must be one of {', '.join(SITES)}, got {components!r}")
    if replace_with not in REPLACEMENTS:
        raise ValueError(f"replace_with must be one of {', '.join(map(repr, REPLACEMENTS))}, got {replace_with!r}")
    if replace_with == "zero" and source_prompts is not None:
        raise ValueError(
            "replace_with='zero' does not use source_prompts: leave them out, or give replace_with='mean' or 'resample'"
        )
    for name, choice in (("heads", heads), ("neurons", neurons)):
        if components != name and choice != "each":
            raise ValueError(f"{name}={choice!r} goes with components={name!r}, but components={components!r}")


def _present(model: HookedRootModule, names: Sequence[str], layers: AxisSelection) -> list[str]:
    """The site names that at least one of the layers has; if there is none, the first, for which `SweepPlan` raises."""
    some = chosen(layers, model.cfg.n_layers, "layer") or range(model.cfg.n_layers)
    return present(model, names, some) or [names[0]]


def _together(study: Study) -> Study:
    """The study with the axis "site" removed: the cells of the sites are merged into one per layer."""
    if "site" not in study.axes:
        return study
    cells: dict[tuple[int, ...], list[Change]] = {}
    for (_, *place), cell in study.cells.items():
        cells.setdefault(tuple(place), []).extend(cell)
    axes = {name: labels for name, labels in study.axes.items() if name != "site"}
    return replace(study, axes=axes, cells=cells)


# ---- replacement values ----------------------------------------------------------------------------------------------


def _zeros(model: HookedRootModule) -> Callable[[str], Tensor]:
    return lambda site: torch.zeros([1] * len(model.hook_dict[site].dims))


def _rows(model: HookedRootModule, prompts: Dataset) -> list[PromptRows]:
    """Each source prompt as a batch of one, without padding."""
    given = [prompts] if isinstance(prompts, (str, VisionInputs, Chat)) else prompts
    batches = [rows_of(model, some, "source_prompts") for some in given]
    rows = [_unpadded(some_rows(model, batch, [i])) for batch in batches for i in range(len(batch))]
    if not rows:
        raise ValueError("source_prompts is empty: give at least one")
    return rows


def _are_padded(rows: PromptRows) -> bool:
    return isinstance(rows, VisionInputs) and rows.attention_mask is not None and not bool(rows.attention_mask.all())


def _unpadded(row: PromptRows) -> PromptRows:
    """A prompt without its padding."""
    if not isinstance(row, VisionInputs) or row.attention_mask is None:
        return row
    real = row.attention_mask[0].bool()
    return replace(row, images=row.images, **{name: x[:, real] for name, x in row.of_rows().items()})


def _of_equal_lengths(rows: Sequence[PromptRows]) -> list[PromptRows]:
    """The rows, those of text with each length together."""
    by_length: dict[int, list[Tensor]] = {}
    for row in rows:
        if isinstance(row, Tensor):
            by_length.setdefault(row.shape[1], []).append(row)
    return [*map(torch.cat, by_length.values()), *(row for row in rows if isinstance(row, VisionInputs))]


def _means(model: HookedRootModule, groups: Sequence[PromptRows], sites: Sequence[str]) -> dict[str, Tensor]:
    """The mean of each site over all tokens, [1, 1, ...], in fp32 or higher precision."""
    means: dict[str, Tensor] = {}
    n_seen = n_new = 0

    def add(value: Tensor, hook: HookPoint) -> None:
        name = hook.name or ""
        check_has_mean(name, value)
        new = value.to(torch.promote_types(value.dtype, torch.float32)).mean((0, 1), keepdim=True)
        means[name] = torch.lerp(means.get(name, new), new, n_new / (n_seen + n_new))

    with torch.no_grad():
        for group in groups:
            few = max(1, TOKENS_A_RUN // group.shape[1])
            for batch in [group] if isinstance(group, VisionInputs) else group.split(few):
                n_new = batch.shape.numel()
                model.run_with_hooks(batch, return_type=None, fwd_hooks=[(site, add) for site in sites])
                n_seen += n_new
    return means


def _donors(
    model: HookedRootModule, tokens: PromptRows, rows: Sequence[PromptRows] | None, seed: int
) -> list[PromptRows]:
    """The prompts whose values replace those of each prompt, in batches one after the other."""
    generator = torch.Generator().manual_seed(seed)
    if _are_padded(tokens):
        raise ValueError(
            "replace_with='resample' puts values at the same positions, and the prompts are padded: give one length"
        )
    if rows is None:
        if len(tokens) < 2:
            raise ValueError(
                "replace_with='resample' needs values of other prompts: give several, or source_prompts=..."
            )
        return [some_rows(model, tokens, other_rows(len(tokens), generator).tolist())]
    lengths = sorted({row.shape[1] for row in rows})
    fitting = [row.to(ids_of(tokens).device) for row in rows if row.shape[1] == tokens.shape[1]]
    drawn: list[PromptRows] = []
    for number in range(len(tokens)):
        prompt = some_rows(model, tokens, [number])
        others = [row for row in fitting if not _are_equal(row, prompt)]
        if not others:
            raise ValueError(
                f"no source prompt has the {prompt.shape[1]} tokens of prompt {number} and differs from it; "
                f"these {len(rows)} have {lengths} tokens"
            )
        drawn.append(others[int(torch.randint(len(others), (), generator=generator))])
    texts = [row for row in drawn if isinstance(row, Tensor)]
    return [torch.cat(texts)] if len(texts) == len(drawn) else drawn


def _are_equal(row: PromptRows, other: PromptRows) -> bool:
    """Whether two prompts have the same tokens and images."""
    first, second = (each.images if isinstance(each, VisionInputs) else {} for each in (row, other))
    same_images = first.keys() == second.keys() and all(torch.equal(x, second[name]) for name, x in first.items())
    return same_images and torch.equal(ids_of(row), ids_of(other))


def _joined(values: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The values of several batches as those of one."""
    return {site: torch.cat([each[site] for each in values]) for site in values[0]}
