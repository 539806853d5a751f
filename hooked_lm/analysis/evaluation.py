"""`evaluate`: metrics of a model on prompts."""

from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.experiment import Experiment
from hooked_lm.engine.metrics import Metric
from hooked_lm.engine.pairs import RightAndWrong, needed_metric
from hooked_lm.engine.prompts import Prompts, rows_of
from hooked_lm.engine.study import Metrics, named
from hooked_lm.hooks import HookedRootModule
from hooked_lm.results.groups import Groups, checked_groups
from hooked_lm.results.measures import MetricScores
from hooked_lm.results.scores import METRIC, provenance


@reads_chats
def evaluate(
    model: HookedRootModule,
    prompts: Prompts,
    metric: Metrics | None = None,
    *,
    answers: RightAndWrong | None = None,
    groups: Groups = None,
    max_memory: int | str = "auto",
) -> MetricScores:
    """A metric of the logits for each prompt; `.mean` is the mean, `.interval()` its 95% confidence interval.

    The interval of `metrics.accuracy` is Wilson's (1927), that of other metrics bootstrap over prompts.

    Args:
        prompts: texts or ids [batch, pos], of one length; `VisionInputs` for a model that reads images.
        metric: maps logits [batch, pos, d_vocab] to one number per prompt [batch] or one for all; or a mapping of names to such
            functions, which adds an axis "metric". See `hooked_lm.analysis.metrics`.
        answers: in place of a metric, as in `patching.sweep`.
        groups: a label for each prompt, such as its template: intervals count groups, not prompts (see `Scores`).
        max_memory: as in `patching.sweep`.

    Raises ValueError for prompts of different lengths, for groups that are not one label for each prompt, and for a metric that
    is NaN or has another number of prompts.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import evaluate, metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> answers = metrics.accuracy([[" Paris"], [" Rome"]], model=model)
    >>> evaluate(
    ...     model, ["The capital of France is", "The capital of Italy is"], answers
    ... ).mean
    tensor(1.)
    """
    metrics = named(needed_metric(model, metric, answers))
    names = [name for name in metrics if name]
    scores = Experiment(model, rows_of(model, prompts), list(metrics.values()), max_memory=max_memory).scores
    shares = [isinstance(one, Metric) and one.name == "accuracy" for one in metrics.values()]
    values, axes = scores if names else scores[0], {METRIC: names} if names else {}
    return MetricScores(values, axes, shares, about=provenance(model), groups=checked_groups(groups, scores.shape[1]))
