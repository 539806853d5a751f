"""The experiments and metrics that a study has by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import Parameter, signature

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm import patching
from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.nodes import attribute
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.study import Metrics, named
from hooked_lm.hooks import HookedRootModule
from hooked_lm.interventions.steering import SteeringVectors
from hooked_lm.interventions.steering_sweep import sweep_steering
from hooked_lm.models.text.chat import Chat
from hooked_lm.renamed import in_present_names
from hooked_lm.results import Scores

Ids = Int[Tensor, "pair pos"] | Chat
Answers = list[list[int]]  # of each pair
# a function as `patching.sweep`: (model, corrupted, clean, metric=), to numbers with named axes, one for each pair
Experiment = Callable[..., Scores]
MakesMetric = Callable[[Answers, Answers], Callable[[Tensor], Tensor]]
ON_GPU = "8GiB"  # of max_memory: that which is free differs between runs, and with it how cells share passes


def ablate(
    model: HookedRootModule,
    corrupted: Ids,
    clean: Ids,
    *,
    metric: Metrics,
    components: str = "heads",
    **options: object,
) -> SweepResult:
    """`patching.ablate` on the clean prompts."""
    found = patching.ablate(model, clean, components, metric=metric, **options)  # type: ignore[arg-type]
    return replace(found, corrupted=_scores(model, corrupted, metric), clean=found.corrupted, base="clean")


def steer(
    model: HookedRootModule,
    corrupted: Ids,
    clean: Ids,
    *,
    metric: Metrics,
    vectors: SteeringVectors,
    coefficients: Sequence[float | int],
    **options: object,
) -> SweepResult:
    """`sweep_steering` of the corrupted prompts."""
    found = sweep_steering(model, vectors, corrupted, metric, coefficients=coefficients, **options)  # type: ignore[arg-type]
    return replace(found, clean=_scores(model, clean, metric))


@torch.no_grad()
def _scores(model: HookedRootModule, tokens: Ids, metric: Metrics) -> Float[Tensor, "..."]:
    """The metric of an unchanged run, [pair], or [metric, pair] of several by name."""
    logits = model(tokens)
    found = torch.stack([torch.as_tensor(each(logits)).reshape(-1) for each in named(metric).values()])
    return found if isinstance(metric, Mapping) else found[0]


def _of_answers(make: Callable[[Answers], metrics.Metric], answers: Answers, wrong_answers: Answers) -> metrics.Metric:
    """A metric that reads the right answers alone."""
    return make(answers)


OF_ANSWERS = (metrics.logit, metrics.probability, metrics.log_probability, metrics.rank)
EXPERIMENTS: Mapping[str, Experiment] = {
    "sweep": patching.sweep,
    "attribute": attribute,
    "ablate": ablate,
    "steer": steer,
}
TAKES: Mapping[str, Callable[..., Scores]] = {**EXPERIMENTS, "ablate": patching.ablate, "steer": sweep_steering}
GIVEN = (
    "model",
    "corrupted",
    "clean",
    "prompts",
    "metric",
    "answers",
    "resume_file",
    "control",
)  # by the study, not as options
METRICS: Mapping[str, MakesMetric] = {
    "logit_difference": metrics.logit_difference,
    **{make.__name__: partial(_of_answers, make) for make in OF_ANSWERS},
}


def experiment_of(
    given: str | Experiment, options: Mapping[str, object], on_gpu: bool
) -> tuple[str, Experiment, dict[str, object]]:
    """The name of an experiment, the experiment, and its options with the defaults of a study.

    Options are sorted by name, so that their order does not matter. Raises ValueError for an unknown name, and for options
    whose values would depend on which pairs run together.
    """
    if not isinstance(options, Mapping):
        raise TypeError(
            f"options must be a dict of keyword arguments of the experiment, got a {type(options).__name__}"
        )
    if not isinstance(given, str):
        if not callable(given):
            raise TypeError(f"experiment must be a name or a function as patching.sweep, got {given!r}")
        name = getattr(getattr(given, "func", given), "__qualname__", type(given).__name__)
        settings = dict(sorted(options.items()))
        return name, partial(given, **settings) if settings else given, settings
    if given not in EXPERIMENTS:
        raise ValueError(f"experiment must be one of {', '.join(map(repr, EXPERIMENTS))}, or a function; got {given!r}")
    options = in_present_names(TAKES[given], options)
    _check_options(given, options)
    new = options.get("replace_with")
    if given == "ablate":
        if new in ("mean", "resample") and options.get("source_prompts") is None:
            raise ValueError(f"replace_with={new!r} needs source_prompts=..., the same for all pairs")
    elif new == "mean":
        raise ValueError(
            "replace_with='mean' is the mean of the pairs that run together: give a tensor or a cache of a mean"
        )
    defaults: dict[str, object] = {"progress": False}
    if given == "attribute":
        defaults["check"] = False
    if on_gpu:
        defaults["max_memory"] = ON_GPU
    whole = dict(sorted({**defaults, **options}.items()))
    alone: dict[str, object] = {} if given == "ablate" else {"control": None}  # that of a batch would say little
    return given, partial(EXPERIMENTS[given], **whole, **alone), whole


def _check_options(name: str, options: Mapping[str, object]) -> None:
    """Raises TypeError for an argument that the experiment has not, or that the study gives itself, and for one that it needs."""
    known = {key: of.default for key, of in signature(TAKES[name]).parameters.items() if key not in GIVEN}
    for key in options:
        if key not in known:
            own = " (the study gives it itself)" if key in GIVEN else ""
            raise TypeError(f"options: the experiment {name!r} takes {', '.join(known)}; got {key!r}{own}")
    if missing := [key for key, default in known.items() if default is Parameter.empty and key not in options]:
        raise TypeError(
            f"options: the experiment {name!r} needs {' and '.join(map(repr, missing))}, such as options={{{missing[0]!r}: ...}}"
        )


def metrics_of(given: str | MakesMetric | Sequence[str]) -> dict[str, MakesMetric]:
    """The functions that make metrics, by name; raises ValueError for an unknown or repeated name, TypeError otherwise."""
    if callable(given):
        return {getattr(given, "__name__", type(given).__name__): given}
    names = [given] if isinstance(given, str) else list(given)
    if unknown := [name for name in names if name not in METRICS]:
        raise ValueError(f"metric must be of {', '.join(map(repr, METRICS))}, or a function; got {unknown[0]!r}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"metric must be different names, at least one; got {names}")
    return {name: METRICS[name] for name in names}
