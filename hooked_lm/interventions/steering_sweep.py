"""`sweep_steering`: a metric under steering, over layers and coefficients."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.engine.controls import refuse_several_metrics, with_control
from hooked_lm.engine.pairs import RightAndWrong, needed_metric
from hooked_lm.engine.result import SweepResult, total_cost
from hooked_lm.engine.study import Metrics, Study
from hooked_lm.hooks import HookedRootModule
from hooked_lm.hooks.token_labels import Named, is_named, reading
from hooked_lm.interventions import contrast
from hooked_lm.interventions.changes import changes_of
from hooked_lm.interventions.contrast import STREAM, Prompts
from hooked_lm.interventions.steering import Layers, SteeringVectors
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.vision.inputs import Rows, VisionInputs, ids_of
from hooked_lm.results import Label
from hooked_lm.results.control import RANDOM_DIRECTION
from hooked_lm.results.groups import Groups, checked_groups
from hooked_lm.results.scores import METRIC, provenance

AFFORDABLE = 2e10  # floating-point operations of a control that is not asked for


def sweep_steering(
    model: HookedRootModule,
    vectors: SteeringVectors,
    prompts: Prompts,
    metric: Metrics | None = None,
    *,
    answers: RightAndWrong | None = None,
    coefficients: Sequence[float | int],
    layers: Layers = "each",
    positions: Named = "all",
    unit: bool = False,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    control: str | None = "auto",
    seed: int = 0,
) -> SweepResult:
    """The metric under steering, over layers and coefficients; each cell equals a forward pass under `vectors.hooks(...)`.

    Args:
        prompts: texts, ids [batch, pos] or conversations, which may differ in length: those of one length run together.
            The metric must then index positions from the end, and work for any number of prompts.
        metric, answers: as for `patching.sweep`; answers are those of all prompts.
        positions: "all" (or "prompt", the same here), or "last_prompt": the last token of each; of conversations also a role.
        coefficients, layers, unit: as for `SteeringVectors.hooks`.
        groups: a label for each prompt, such as its template: intervals count groups, not prompts (see `Scores`).
        max_memory: "auto", or the bytes that a forward pass may use in addition to the model; cells share passes if they fit.
        control: "random": also random directions of the same norms, drawn with `seed`, for `result.control`; "auto": of one
            metric, if that takes at most 2e10 floating-point operations; None.

    Returns a SweepResult with the axes (metric), layer and coefficient, whose labels are ints or strings such as "0.5".
    `.corrupted` is the run without steering, so `.effects()` is the effect of steering. Raises before any forward pass:
    ValueError for coefficients that are empty, repeated or not finite, for other positions, and for `control="random"` of several
    metrics.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.interventions import steering_vectors
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> women = ["Mary was ill, so", "Anna slept late because"]
    >>> men = ["Tom was ill, so", "Paul slept late because"]
    >>> vectors = steering_vectors(model, women, men, layers=[1, 2])
    >>> answers = (" she", " he")
    >>> result = sweep_steering(
    ...     model,
    ...     vectors,
    ...     "Lucy was ill, so",
    ...     answers=answers,
    ...     coefficients=[-2, 0, 2],
    ...     progress=False,
    ... )
    >>> bool(
    ...     result.select(layer=1, coefficient=-2).mean
    ...     < result.select(layer=1, coefficient=2).mean
    ... )
    True
    """
    if control not in ("auto", "random", None):
        raise ValueError(f"control must be 'auto', 'random' (directions of the same norm) or None, got {control!r}")
    refuse_several_metrics(metric, control)
    contrast.check_model(model)
    metric = needed_metric(model, metric, answers)
    if not isinstance(vectors, SteeringVectors):
        raise TypeError(
            f"vectors must be SteeringVectors, as steering_vectors(...) returns them; got a {type(vectors).__name__}"
        )
    if positions not in ("all", "prompt", "last_prompt") and not is_named(positions):
        raise ValueError(
            "a sweep generates nothing: positions must be 'all', 'prompt', 'last_prompt', or a role in conversations such as "
            f"'assistant', got {positions!r}"
        )
    labels = _labels(coefficients)
    sites = contrast.sites_of(model, vectors.site, vectors.chosen_layers(layers), STREAM)
    vectors.check_width(model, sites)
    given = contrast.listed(prompts, "prompts")
    ids = _ids(model, given)
    of_prompts = checked_groups(groups, len(ids))

    def swept(vectors: SteeringVectors, rows: list[int]) -> SweepResult:
        whole = given if isinstance(given, VisionInputs) else None  # its prompts have one length
        tokens: Rows = torch.cat([ids[row] for row in rows]) if whole is None else whole
        places = [*product(range(len(sites)), range(len(coefficients)))]
        hooks = [vectors.adding({[*sites][i]: coefficients[j]}, positions, unit) for i, j in places]
        with reading(given[rows].labels if isinstance(given, Chat) else None):
            cells: dict[tuple[int, ...], Any] = dict(zip(places, changes_of(model, tokens, hooks), strict=True))
        study = Study({"layer": list(sites), "coefficient": labels}, cells, title="steering")
        return study.carry_out(model, tokens, metric, None, max_memory, progress)

    shapes = [tokens.shape for tokens in ids]
    alike = [[row for row, shape in enumerate(shapes) if shape == one] for one in dict.fromkeys(shapes)]
    settings = {"site": vectors.site, "method": vectors.method, "positions": positions, "unit": unit}
    found = _joined([swept(vectors, rows) for rows in alike], alike)
    found = replace(found, about={**found.about, **provenance(model, **settings)}, groups=of_prompts)
    is_cheap = (found.cost or {}).get("flops", math.inf) <= AFFORDABLE and METRIC not in found.axes
    if control is None or (control == "auto" and not is_cheap):
        return found
    random = _of_same_norms(vectors, seed)
    other = _joined([swept(random, rows) for rows in alike], alike)
    return with_control(found, found, other, RANDOM_DIRECTION, "the direction", sizes_alone=True)


def _of_same_norms(vectors: SteeringVectors, seed: int) -> SteeringVectors:
    """Random directions with the norms of these, one for each layer."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {layer: torch.randn(found.shape, generator=generator) for layer, found in vectors.directions.items()}
    same = {layer: found * (vectors.directions[layer].norm() / found.norm()) for layer, found in drawn.items()}
    return replace(vectors, directions=same)


def _labels(coefficients: Sequence[float | int]) -> list[Label]:
    """Coefficients as labels; ValueError if they are empty, repeated or not finite."""
    if len(coefficients) == 0 or not all(map(math.isfinite, coefficients)):
        raise ValueError(f"coefficients are finite numbers, at least one, got {list(coefficients)}")
    if len(set(coefficients)) < len(coefficients):
        raise ValueError(f"a coefficient is given twice in {list(coefficients)}")
    return [int(number) if number == int(number) else repr(float(number)) for number in coefficients]


def _ids(model: HookedRootModule, prompts: contrast.Listed) -> list[Int[Tensor, "1 pos"]]:
    """The ids of each prompt separately; ValueError for pairs of texts, since sweeps do not support token types."""
    if isinstance(prompts, VisionInputs):
        return list(prompts.tokens.split(1))
    if isinstance(prompts, Chat):
        return [prompts[row].tokens for row in range(len(prompts))]
    found = [contrast.tokenized(model, prompts[row : row + 1])[0:2] for row in range(len(prompts))]
    if any((types := options.get("token_type_ids")) is not None and bool(types.any()) for _, options in found):
        raise ValueError(
            "a sweep reads single texts, and pairs of texts are given: run model.hooks(vectors.hooks(...)) instead"
        )
    return [ids_of(tokens) for (tokens,), _ in found]


def _joined(results: Sequence[SweepResult], groups: Sequence[Sequence[int]]) -> SweepResult:
    """The results of groups of prompts as one, in the order of the prompts."""
    if len(groups) == 1:
        return results[0]
    if any(result.n_prompts != len(rows) for result, rows in zip(results, groups, strict=True)):
        raise ValueError(
            "the prompts differ in length, so they run in groups: the metric must give a number for each prompt"
        )
    order = torch.tensor([row for rows in groups for row in rows]).argsort()
    values, baseline = (
        torch.cat([getattr(result, name) for result in results], -1)[..., order] for name in ("values", "corrupted")
    )
    return replace(results[0], values=values, corrupted=baseline, cost=total_cost(results), fingerprint="")
