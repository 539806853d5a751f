"""`sweep`: activation patching of any sites, layers, positions, heads or neurons from any source, with per-prompt results."""

import os
from collections.abc import Sequence

from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.plan import Plan
from hooked_lm.engine.prompts import (
    Prompts,
    Source,
    Values,
    Which,
    WhichHeads,
    aligned,
    check_direction,
    replacement,
    rows_of,
)
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.stacks import Target, has_two_stacks, joined
from hooked_lm.engine.study import Metrics
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.vision.inputs import Rows, ids_of
from hooked_lm.renamed import renamed
from hooked_lm.results.groups import Groups


@renamed(checkpoint="resume_file", source=("replace_with", {"clean": None}))
@keeps_torch_state
def sweep(
    model: HookedRootModule,
    corrupted: Prompts,
    clean: Prompts | None = None,
    *,
    metric: Metrics,
    sites: str | Sequence[str] = "resid_pre",
    layers: Which = "each",
    positions: Which = "each",
    heads: WhichHeads = None,
    neurons: Which = None,
    replace_with: Values | None = None,
    direction: str = "denoise",
    decoder_input: Target = None,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    resume_file: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Patch activations of one run into another, one cell of a grid at a time, and measure each patched run.

    Activation patching (Meng et al. 2022, arXiv:2202.05262; Heimersheim and Nanda 2024, arXiv:2404.15255), as exact as one
    forward pass per cell and many times faster, because the cells share computation.

    Args:
        corrupted, clean: texts or ids [batch, pos] of the same shape; `VisionInputs` for a model that reads images. Of a dual
            encoder, `VisionInputs(texts, {"pixel_values": images})`; each cell is a whole forward pass.
        metric: maps logits [batch, pos, d_vocab] to one number per prompt [batch] or one for all prompts; or a mapping of names
            to such functions. See `hooked_lm.analysis.metrics`. Of a dual encoder, it maps the similarities [image, text] to
            one number per image or one for all.
        sites: short names ("resid_pre", "z", "mlp_out", "pattern", ...); several add an axis.
        layers, positions, heads, neurons: "each" adds an axis, a list an axis of these indices, None patches all together. The
            position of scores and patterns is that of the query. Heads may be labels, ["L1H7", "L2H0"], which have one axis.
        replace_with: what replaces the values of the run that changes: those of the other run (None; or by its name, "clean"
            or "corrupted"), "mean" (their mean over prompts), "zero", a tensor that broadcasts against the site
            [batch, pos, ...], or a cache.
        direction: "denoise" patches clean values into the corrupted run, "noise" corrupted values into the clean run.
        decoder_input: the decoder input of an encoder-decoder in all runs: ids or texts, one for all prompts or one per prompt;
            None: its start token. Its sites are "encoder.resid_pre", "decoder.z", "decoder.cross_attn.pattern",
            ..., those of one stack in a grid; each cell is a whole forward pass.
        groups: a label for each prompt, such as its template: intervals count groups, not prompts (see `Scores`).
        max_memory: how much memory a pass may use in addition to the model: "auto", bytes, or a size such as "512MB".
        progress: whether to show a progress bar; None: if the work takes longer than a second.
        resume_file: a file for partial results, from which the same sweep resumes.

    Returns a SweepResult with those of the axes (metric), (site), layer, position, head and neuron that the arguments add.
    Raises before the sweep: ValueError for prompts of different shapes, an empty choice, or values that do not fit; KeyError
    for a site that no layer has; IndexError for an index out of range. An interrupt raises SweepInterrupted with the
    partial result.

    >>> from hooked_lm import HookedTransformer, patching
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(model.to_single_token(" Mary"), model.to_single_token(" John"))
    >>> result = patching.sweep(model, corrupted, clean, metric=answers, sites="z", positions=None, heads="each")
    >>> list(result.axes), result.mean.shape == (model.cfg.n_layers, model.cfg.n_heads)
    (['layer', 'head'], True)
    """
    new = replacement(replace_with, direction)
    model, first, other = both_runs(model, corrupted, clean, direction, decoder_input, reads_pairs=True)
    names = list(sites) if isinstance(sites, Sequence) and not isinstance(sites, str) else [sites]
    if not names:
        raise ValueError("sites is empty: name at least one")
    plan = Plan(model, first, names, layers, positions, heads, neurons)
    values = Source(model, new, other, first, plan.sites, plan.shapes)
    changes = "corrupted" if direction == "denoise" else "clean"
    study = plan.study(values.value, f"patching {', '.join(names)}", changes)
    return study.carry_out(model, first, metric, other, max_memory, progress, resume_file, groups)


def both_runs(
    model: HookedRootModule,
    corrupted: Prompts,
    clean: Prompts | None,
    direction: str,
    decoder_input: Target = None,
    name: str = "corrupted",
    reads_pairs: bool = False,
) -> tuple[HookedRootModule, Rows, Rows | None]:
    """The model to run, what it reads in the patched run, and in the other run; raises ValueError if their shapes differ.

    `name` is the name of the first prompts in errors; `reads_pairs` as for `rows_of`."""
    check_direction(direction)
    first: Rows = rows_of(model, corrupted, name, reads_pairs)
    other: Rows | None = None
    if clean is None:
        if direction == "noise":
            raise ValueError("direction='noise' changes the clean run: give clean=...")
    else:
        other = rows_of(model, clean, "clean", reads_pairs)
        aligned(first, other, model)
    if has_two_stacks(model):
        first = joined(model, ids_of(first), decoder_input)
        other = None if other is None else joined(model, ids_of(other), decoder_input)
    elif decoder_input is not None:
        raise ValueError(f"decoder_input is for encoder-decoders, and this is a {type(model).__name__}")
    return (model, first, other) if direction == "denoise" or other is None else (model, other, first)
