"""`run_each`: run the same prompts once for each of several lists of hooks, at the speed of a sweep."""

import os
from collections.abc import Mapping, Sequence

from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong, both_runs, prompts_and_metric
from hooked_lm.engine.prompts import Prompts
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.stacks import Target
from hooked_lm.engine.study import Metrics, Study
from hooked_lm.hooks import HookedRootModule
from hooked_lm.interventions.changes import GivenHooks, changes_of, labels_of
from hooked_lm.renamed import renamed
from hooked_lm.results.groups import Groups


@renamed(checkpoint="resume_file")
@keeps_torch_state
@reads_chats
def run_each(
    model: HookedRootModule,
    prompts: Prompts | Pairs,
    cells: Sequence[GivenHooks] | Mapping[str, GivenHooks],
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    clean: Prompts | None = None,
    base: GivenHooks = (),
    decoder_input: Target = None,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    resume_file: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Run the prompts once for each cell, with the hooks of that cell, and measure every run.

    The result equals that of a loop over `model.run_with_hooks(prompts, fwd_hooks=[*base, *cell])`, but is computed many times
    faster, because the cells share computation. This applies to controllers of `hooked_lm.interventions` that change each
    position independently. Function hooks, other controllers, padded prompts and models other than decoders run as whole
    forward passes; a warning gives the reason.

    Args:
        prompts: texts or ids [batch, pos], of one length; `VisionInputs` for a model that reads images, as in `sweep`. Or
            `Pairs`: the corrupted prompts run, `clean` are the clean ones, and the answers are the metric if none is given.
        cells: a list of cells, or cells by name. A cell is a hook or a list of hooks: controllers, pairs (site, function), and
            `Edit`s. The names are the labels of the result; a list gives names such as "ZeroAblate z L5H3".
        metric: maps logits [batch, pos, d_vocab] to one number per prompt [batch] or one for all prompts; or a mapping of names
            to such functions. See `hooked_lm.analysis.metrics`.
        answers: in place of a metric, as in `sweep`.
        clean: prompts for the baseline `clean` of the result, which `.restored()` needs. They run without cells.
        base: hooks of every run, including the run without a cell.
        decoder_input, groups, max_memory, progress, resume_file: as in `sweep`.

    Returns a SweepResult with the axes (metric) and cell. Its baseline `corrupted` is the run with `base` alone, so `.effects()`
    is the effect of each cell. Raises before the sweep, naming the cell and the hook: KeyError for a site that does not exist,
    IndexError for an index out of range, ValueError for settings that do not fit the site, TypeError for hooks that change no
    value (detectors, controllers of gradients).

    >>> from hooked_lm import HookedTransformer, patching
    >>> from hooked_lm.analysis import metrics
    >>> from hooked_lm.interventions import Scale, ZeroAblate
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> paris = metrics.log_probability(model.to_single_token(" Paris"))
    >>> cells = [
    ...     ZeroAblate("z", 2, heads=[3]),
    ...     [Scale("mlp_out", 1, factor=0.5), ZeroAblate("attn_out", 3, positions=-1)],
    ... ]
    >>> result = patching.run_each(model, "The capital of France is", cells, metric=paris)
    >>> result.axes["cell"]
    ('ZeroAblate z L2H3', 'Scale mlp_out L1 + ZeroAblate attn_out L3 pos -1')
    >>> bool((result.effects().mean != 0).all())
    True
    """
    prompts, clean, metric = prompts_and_metric(model, prompts, clean, metric, answers)
    model, tokens, other = both_runs(model, prompts, clean, "denoise", decoder_input, "prompts", reads_pairs=True)
    given = list(cells.values()) if isinstance(cells, Mapping) else list(cells)
    labels = list(cells) if isinstance(cells, Mapping) else labels_of(model, given)
    shared, *changes = changes_of(model, tokens, [base, *given], ["base", *labels])
    study = Study({"cell": labels}, {(i,): cell for i, cell in enumerate(changes)}, shared, "running cells")
    return study.carry_out(model, tokens, metric, other, max_memory, progress, resume_file, groups)
