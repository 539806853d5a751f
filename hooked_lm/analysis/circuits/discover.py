"""`discover`: find the edges that a task depends on, with any of the methods."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution import edges
from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.attribution.edge_patching import patch_edges
from hooked_lm.analysis.attribution.gradients import Metric
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.circuits.acdc import acdc
from hooked_lm.analysis.circuits.circuit import SEEN, Circuit
from hooked_lm.analysis.circuits.exchange import exchange
from hooked_lm.analysis.circuits.held_out import HeldOut, MeasuredPairs, is_per_prompt, of_prompts, searched
from hooked_lm.analysis.circuits.masks import train_masks
from hooked_lm.analysis.circuits.prune import check_size, prune
from hooked_lm.analysis.circuits.run import Runner, check_replacement
from hooked_lm.analysis.circuits.top import at_least, largest
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.identity import PROMPTS, identities
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong
from hooked_lm.engine.prompts import Prompts, kind_of
from hooked_lm.engine.result import METRIC_NAME, SweepResult, metric_name
from hooked_lm.keywords import check_keywords
from hooked_lm.models.decoder import Decoder
from hooked_lm.renamed import renamed
from hooked_lm.results.gap import one_warning
from hooked_lm.results.scores import provenance

SEARCHES: Mapping[str, tuple[Callable[..., Circuit], str]] = {
    "acdc": (acdc, "threshold"),
    "pruning": (prune, "n_edges"),
    "exchange": (exchange, "n_edges"),
    "masks": (train_masks, "n_edges"),
}
CHECKED = 100  # default number of edges whose estimates are compared with exact patching
OPTIONS: Mapping[str, Sequence[str]] = {
    "acdc": (),
    "pruning": ("share", "steps"),
    "exchange": ("share", "steps", "rounds"),
    "masks": ("steps", "learning_rate"),
    **dict.fromkeys(edges.METHODS, ("steps", "backward", "check")),
    "exact": ("edges",),
}
SEEDED = ("masks", *edges.METHODS)  # the methods that draw something
METHODS = (*edges.METHODS, "exact", *SEARCHES)


@renamed(ablation=("replace_with", {"resample": "corrupted"}))
@keeps_torch_state
@reads_chats
def discover(
    model: Decoder,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metric | None = None,
    answers: RightAndWrong | None = None,
    method: str | SweepResult = "eap-ig-inputs",
    n_edges: int | None = None,
    threshold: float | None = None,
    replace_with: str = "corrupted",
    held_out: HeldOut = None,
    seed: int = 0,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    **options: Any,
) -> Circuit:
    """Find a circuit: the edges that the behaviour of a model on the clean prompts depends on.

    A circuit fits the prompts of its search better than others. So the search sees a part of the prompts, and the circuit knows
    which (`about["search_prompts"]`): `evaluate` judges it on the others.

    Args:
        corrupted, clean: texts or ids [batch, pos] of the same shape. The circuit runs on the clean prompts; by default edges
            outside the circuit carry their values from the corrupted prompts. Or `Pairs` in place of both.
        metric: maps logits to one number per prompt, or one for all; None: that of Pairs with answers, or else KL(model ||
            circuit) at the last position.
        answers: in place of a metric, the right and the wrong next tokens, as for `patching.sweep`.
        method: the search method.
            "eap", "eap-ig-inputs", "eap-ig-activations", "relp", "gim": the edges with the largest estimated effects
            (`attribute_edges`) on the clean run, that is with `direction="noise"`;
            `about["agreement"]` compares the estimates with exact patching of `check` random edges, by default 100.
            "exact": the edges with the largest effects when patched one at a time (`patch_edges`).
            An Attribution or SweepResult with the axes writer and reader: the edges with the largest effects in it.
            "acdc" (needs threshold), and "pruning" (`prune`), "exchange" (`exchange`) and "masks" (`train_masks`), which need
            n_edges.
        n_edges: the maximum number of edges of the circuit, all on paths from input to logits.
        threshold: alternatively, the smallest absolute effect of an edge, in units of the metric. Edges that are then on no path
            are left out.
        replace_with: what edges outside the circuit carry: "corrupted", "mean" or "zero"; see `Runner`. Measured effects have
            their own.
        held_out: the pairs that the search does not see: a share, or their places; 0 for none. None: half of them if at least 8
            have different clean prompts, and the metric has a number for each; else none. The search is that of the other pairs
            alone, and the effects in a result are averaged over its other prompts. Pairs with the same clean prompt are held out
            together.
        seed: seed of the choice of held-out pairs, and of methods that draw something.
        max_memory, progress: as for `patching.sweep`.
        options: further arguments of the method, such as `steps` or `check`.

    Measured effects are scores with one sign, however the method is given: the change of the metric if the edge is ablated, which
    is negative for an edge that raises it. A result with `direction="denoise"` has what clean edges restore, so its effects are
    scores with the other sign.

    Returns a Circuit, which is empty if no edge reaches the threshold. Warns as `evaluate`. Raises ValueError for an unknown
    `method` or `replace_with`, for "eap", "relp" and "gim" without a metric, unless exactly one of n_edges and threshold is
    given, the one that the method takes, and for pairs held out with a metric that has one number for all; TypeError for another
    kind of `method`, and for options that the method does not take.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(
    ...     model.to_single_token(" Mary"), model.to_single_token(" John")
    ... )
    >>> discover(
    ...     model, corrupted, clean, metric=answers, method="eap", n_edges=40
    ... ).n_edges <= 40
    True
    """
    check_replacement(replace_with)
    _check_limits(method, n_edges, threshold)
    limits = {name: limit for name, limit in (("n_edges", n_edges), ("threshold", threshold)) if limit is not None}
    if not isinstance(method, str):
        if options:
            raise TypeError(f"effects that were measured take no options, got {', '.join(options)}")
        if replace_with not in ("corrupted", measured := method.about.get("replace_with", replace_with)):
            raise ValueError(
                f"these effects were measured with replace_with={measured!r}, not {replace_with!r}: leave it out"
            )
        return _of_result(model, method, held_out, seed, limits)
    pairs = MeasuredPairs.of(model, corrupted, clean, metric, answers)
    if pairs.metric is None and method in edges.OF_ONE_RUN:
        raise ValueError(
            f"KL(model || circuit) is at its least in the full model, where {method!r} would take its gradient: give a metric, "
            "or another method, such as 'eap-ig-inputs'"
        )
    check_keywords(f"method {method!r}", options, OPTIONS[method])
    known = identities(model, pairs.clean)
    seen = _searched(pairs, known, held_out, seed, max_memory)
    if len(seen) < len(known):
        pairs = pairs.some(seen)
    common: dict[str, Any] = {"max_memory": max_memory, "progress": progress, **options}
    if method in SEEDED:
        common["seed"] = seed
    with one_warning():
        found = _search(model, pairs, method, replace_with, limits, common)
    return replace(found, about={**found.about, SEEN: [known[place] for place in seen]})


def _search(
    model: Decoder,
    pairs: MeasuredPairs,
    method: str,
    replace_with: str,
    limits: Mapping[str, Any],
    options: dict[str, Any],
) -> Circuit:
    """The circuit that a method finds with these pairs."""
    if method in SEARCHES:
        search, _ = SEARCHES[method]
        common = {"metric": pairs.metric, "replace_with": replace_with, **options}
        return search(model, pairs.corrupted, pairs.clean, **common, **limits).pruned()
    metric, named = pairs.metric, metric_name(pairs.metric) or "the metric"
    if metric is None:
        runner = Runner(model, pairs.corrupted, pairs.clean, max_memory=options["max_memory"])
        metric, named = runner.metric, runner.metric_name
    common = {"metric": metric, "replace_with": replace_with, "direction": "noise", **options}
    found = _effects(model, pairs.corrupted, pairs.clean, method, common)
    settings = {name: value for name, value in options.items() if name not in ("max_memory", "progress")}
    about = {"replace_with": replace_with, METRIC_NAME: named, "direction": common["direction"], **settings}
    return _best(model, found, method, limits, about)


def _searched(
    pairs: MeasuredPairs, known: Sequence[str], held_out: HeldOut, seed: int, max_memory: int | str
) -> list[int]:
    """The pairs that a search sees; raises ValueError for a metric that cannot be that of some of them."""
    seen = searched(known, held_out, seed)
    if len(seen) == len(known) or is_per_prompt(pairs.model, pairs.metric, pairs.clean, max_memory):
        return seen
    if held_out is not None:
        raise ValueError(
            f"the metric has one number for all {len(known)} prompts, so none can be held out: give held_out=0, or a metric with "
            "a number for each prompt"
        )
    return list(range(len(known)))


def _of_result(model: Decoder, found: SweepResult, held_out: HeldOut, seed: int, limits: Mapping[str, Any]) -> Circuit:
    """The circuit of the largest effects in a result, averaged over the prompts that are not held out."""
    known = found.about.get(PROMPTS, [])
    if known and found.n_prompts == len(known):
        seen = searched(known, held_out, seed)
        found, known = of_prompts(found, seen), [known[place] for place in seen]
    elif held_out:
        raise ValueError(
            "this result has one number for all prompts, or does not say of which prompts it is: none can be held out"
        )
    name = f"the largest effects ({found.method})" if isinstance(found, Attribution) else "the largest effects"
    about = {key: value for key, value in found.about.items() if key != PROMPTS}
    about["direction"] = "denoise" if found.base == "corrupted" else "noise"
    return _best(model, found, name, limits, about | ({SEEN: known} if known else {}))


def _check_limits(method: object, n_edges: int | None, threshold: float | None) -> None:
    """Raises ValueError unless exactly one limit is given, and the method takes it; TypeError for what is no method."""
    if not isinstance(method, str | SweepResult):
        raise TypeError(
            f"method must be one of {', '.join(map(repr, METHODS))}, or a result of attribute_edges or patch_edges; got "
            f"{kind_of(method)}"
        )
    if isinstance(method, str) and method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, or an Attribution; got {method!r}")
    if (n_edges is None) == (threshold is None):
        raise ValueError(f"give n_edges or threshold, one of them; got n_edges={n_edges}, threshold={threshold}")
    given = "threshold" if n_edges is None else "n_edges"
    if isinstance(method, str) and method in SEARCHES and given != SEARCHES[method][1]:
        raise ValueError(f"method {method!r} needs {SEARCHES[method][1]}, not {given}")
    if n_edges is not None:
        check_size(n_edges)
    if threshold is not None and not 0 <= threshold < float("inf"):
        raise ValueError(f"the threshold must be a finite number and not negative, got {threshold}")


def _effects(
    model: Decoder,
    corrupted: Prompts,
    clean: Prompts,
    method: str,
    options: Mapping[str, Any],
) -> SweepResult:
    """The measured or estimated effect of ablating each edge of the clean run."""
    if method == "exact":
        return patch_edges(model, corrupted, clean, control=None, **options)
    return edges.attribute_edges(model, corrupted, clean, method=method, control=None, **{"check": CHECKED, **options})


def _best(model: Decoder, found: SweepResult, method: str, limits: Mapping[str, Any], about: dict[str, Any]) -> Circuit:
    """The circuit of the edges with the largest effects."""
    found.warn_if_close()
    graph = Graph.of(model)
    scores = scores_of(graph, found)
    felt = scores.masked_fill(scores == 0, torch.nan)  # edges without effect are never kept
    by_number = "n_edges" in limits
    best = largest(graph, felt, limits["n_edges"]) if by_number else at_least(graph, felt, limits["threshold"])
    agreement = {}
    if isinstance(found, Attribution) and len(found.agreement):
        agreement = {"agreement": found.agreement.iloc[0].astype(float).to_dict()}
    return Circuit(graph, best, scores, about={**about, **provenance(model, method=method, **limits), **agreement})


def scores_of(graph: Graph, found: SweepResult) -> Float[Tensor, "writer reader"]:
    """The mean effects of ablating edges, from a result with the axes writer and reader, in the order of a graph; NaN for others.

    What an edge of the clean run adds to the corrupted run is lost by ablating it: those effects change their sign.
    Raises ValueError for other axes, and for nodes that the graph does not have: a result of another model.
    """
    if list(found.axes) != ["writer", "reader"]:
        raise ValueError(f"edges have the axes writer and reader, and this result {', '.join(found.axes) or 'none'}")
    names = ([node.name for node in graph.writers], [node.name for node in graph.readers])
    for axis, known in zip(("writer", "reader"), names, strict=True):
        if unknown := [label for label in found.axes[axis] if label not in known]:
            raise ValueError(f"this result is of another model: there is no {axis} {unknown[0]!r} in {graph!r}")
    effects = -found.effects().mean if _restores(found) else found.effects().mean
    scores = torch.full(graph.is_edge.shape, torch.nan)
    rows, columns = (_places(known, found.axes[axis]) for axis, known in zip(("writer", "reader"), names, strict=True))
    scores[rows[:, None], columns] = effects
    return scores.masked_fill(~graph.is_edge, torch.nan)


def _restores(found: SweepResult) -> bool:
    """Whether the edges of a result carry values of the clean run in the corrupted one."""
    return found.base == "corrupted" and found.clean is not None and found.about.get("replace_with", "clean") != "zero"


def _places(known: Sequence[str], labels: Sequence[str | int]) -> Tensor:
    return torch.tensor([known.index(str(label)) for label in labels])
