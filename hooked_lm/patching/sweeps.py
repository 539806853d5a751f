"""`sweep`: activation patching of any sites, layers, positions, heads or neurons from any source, with per-prompt results."""

import os
from collections.abc import Sequence

from hooked_lm.engine.controls import with_shuffled_answers, without_shuffled_answers
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong, both_runs, prompts_and_metric
from hooked_lm.engine.plan import SweepPlan, by_component
from hooked_lm.engine.prompts import AxisSelection, HeadSelection, Prompts, Source, Values, replacement
from hooked_lm.engine.result import SweepResult, metric_name
from hooked_lm.engine.stacks import Target
from hooked_lm.engine.study import Metrics
from hooked_lm.hooks import HookedRootModule
from hooked_lm.renamed import renamed
from hooked_lm.results.groups import Groups


@renamed(checkpoint="resume_file", source=("replace_with", {"clean": None}))
@keeps_torch_state
@reads_chats
def sweep(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    sites: str | Sequence[str] | None = None,
    by: str | None = None,
    layers: AxisSelection = "each",
    positions: AxisSelection = "each",
    heads: HeadSelection = None,
    neurons: AxisSelection = None,
    replace_with: Values | None = None,
    direction: str = "denoise",
    decoder_input: Target = None,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    resume_file: str | os.PathLike[str] | None = None,
    control: str | None = "auto",
) -> SweepResult:
    """Patch activations of one run into another, one cell of a grid at a time, and measure each patched run.

    Activation patching (Meng et al. 2022, arXiv:2202.05262; Heimersheim and Nanda 2024, arXiv:2404.15255), as exact as one
    forward pass per cell and many times faster, because the cells share computation.

    Args:
        corrupted, clean: texts or ids [batch, pos] of the same shape; `VisionInputs` for a model that reads images. Of a dual
            encoder, `VisionInputs(texts, {"pixel_values": images})`; each cell is a whole forward pass. Or `Pairs` in place of
            both, whose answers are the metric if none is given.
        metric: maps logits [batch, pos, d_vocab] to one number per prompt [batch] or one for all prompts; or a mapping of names
            to such functions. See `hooked_lm.analysis.metrics`. Of a dual encoder, it maps the similarities [image, text] to
            one number per image or one for all.
        answers: in place of a metric, the right and the wrong next token, (" Mary", " John"), or a list of each with one for each
            prompt: their logit difference at the last position.
        sites: short names ("resid_pre", "z", "mlp_out", "pattern", ...); several add an axis. None: "resid_pre".
        by: a grid by name: "head" is `sites="z", positions=None, heads="each"`; "neuron" the same with "post" and `neurons`;
            "position" each position of "resid_pre"; "layer" the output of attention (or the mixer) and of the MLP, all
            positions together. What else is given, such as `positions=[-1]` or `sites="q"`, is used instead.
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
        progress: whether to show a progress bar; None: if the work takes longer than two seconds.
        resume_file: a file for partial results, from which the same sweep resumes.
        control: "shuffled": the same with the answers of other prompts, in the same passes, for `result.control`; "auto": where
            the metric is one of `analysis.metrics` over six prompts or more, and nothing is resumed; None. There is none where
            shuffling changes no number, as of answers that are all equal; "shuffled" warns of that.

    Returns a SweepResult with those of the axes (metric), (site), layer, position, head and neuron that the arguments add.
    Raises before the sweep: ValueError for prompts of different shapes, an empty choice, or values that do not fit; KeyError
    for a site that no layer has; IndexError for an index out of range. An interrupt raises SweepInterrupted with the
    partial result.

    >>> from hooked_lm import HookedTransformer, patching
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(
    ...     model.to_single_token(" Mary"), model.to_single_token(" John")
    ... )
    >>> result = patching.sweep(
    ...     model, corrupted, clean, metric=answers, sites="z", positions=None, heads="each"
    ... )
    >>> list(result.axes), result.mean.shape == (model.cfg.n_layers, model.cfg.n_heads)
    (['layer', 'head'], True)
    """
    new = replacement(replace_with, direction)
    corrupted, clean, metric = prompts_and_metric(model, corrupted, clean, metric, answers)
    model, first, other = both_runs(model, corrupted, clean, direction, decoder_input, reads_pairs=True)
    names, positions, heads, neurons = by_component(model, by, sites, positions, heads, neurons)
    plan = SweepPlan(model, first, names, layers, positions, heads, neurons)
    values = Source(model, new, other, first, plan.sites, plan.shapes)
    changes = "corrupted" if direction == "denoise" else "clean"
    study = plan.study(values.value, f"patching {', '.join(names)}", changes)
    both = with_shuffled_answers(metric, len(first), None if resume_file and control == "auto" else control)
    found = study.carry_out(model, first, both, other, max_memory, progress, resume_file, groups)
    return found if both is metric else without_shuffled_answers(found, metric_name(metric), control)
