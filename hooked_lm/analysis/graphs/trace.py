"""Attribution graphs of one prompt, with the features of transcoders or with neurons (Ameisen et al. 2025, "Circuit tracing",
transformer-circuits.pub/2025/attribution-graphs/methods.html)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.analysis.attribution.gradients import check_grad_mode
from hooked_lm.analysis.graphs.build import ROUND, EdgeRows
from hooked_lm.analysis.graphs.completeness import biases_of, check_sums, error_of_differences, error_of_sums
from hooked_lm.analysis.graphs.features import FeatureSources
from hooked_lm.analysis.graphs.frozen import FINAL
from hooked_lm.analysis.graphs.graph import AttributionGraph
from hooked_lm.analysis.graphs.interventions import drawn, intervene, one_prompt
from hooked_lm.analysis.graphs.neurons import NeuronSources
from hooked_lm.analysis.graphs.sources import Sources
from hooked_lm.analysis.graphs.targets import Target, TargetReads, checked_targets, logit_targets
from hooked_lm.analysis.untrained import check_control, untrained_twin
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import RightAndWrong
from hooked_lm.engine.prompts import Prompts
from hooked_lm.interventions.dictionaries.transcoder_set import LayerTranscoders
from hooked_lm.models.budget import memory_of
from hooked_lm.models.decoder import Decoder
from hooked_lm.results.scores import provenance

NEURONS = 500  # of a graph without dictionaries
CANDIDATES = 8  # as many neurons may be chosen from for each that is kept
CHECKED = 20  # features that are ablated in the model
N_DIFFERENCES = 3  # features whose edges are compared with finite differences

Targets = Sequence[str | int | Target] | Int[Tensor, " token"] | Target | str | int


@keeps_torch_state
@reads_chats
def attribution_graph(
    model: Decoder,
    prompt: Prompts,
    transcoders: LayerTranscoders | None = None,
    *,
    targets: Targets | None = None,
    answers: RightAndWrong | None = None,
    n_logits: int = 10,
    probability: float = 0.95,
    positions: int = -1,
    max_nodes: int | None = None,
    round_size: int = ROUND,
    constant_positions: int | None = None,
    check: int = CHECKED,
    control: str | LayerTranscoders | None = "auto",
    seed: int = 0,
    max_memory: int | str = "auto",
    progress: bool | None = None,
) -> AttributionGraph:
    """Trace which tokens and features, or neurons, of a prompt lead to an output, by exact direct effects between them.

    Attention patterns and the scales of norms are held constant. Then each target reads a sum of what tokens, features, errors
    and biases write: the edge from a source is its activation times the inner product of what it writes, carried by attention
    and the stream but by no MLP, and what the target reads. The edges into a feature, its bias and `others` sum to its
    pre-activation, those into a neuron to its activation, those into a target to its value; biases are computed by themselves,
    and the function raises if a sum is wrong. What the patterns depend on is no part of the graph.

    A token node is what enters the first block at a position: the embedding of the token, with that of the position. An error
    node is what an MLP writes at a position and no feature explains; in a graph of neurons it is what the other neurons write.
    The activation of a neuron is written as its argument times a constant; each of the two factors of a gated one has half.

    Args:
        prompt: one prompt.
        transcoders: their active features are nodes. None: neurons are, which needs no dictionary.
        targets: tokens, as strings or ids, or `Target` values, which read any site. None: the most likely next tokens. The
            target of a token is its logit minus the mean logit, before a soft cap.
        answers: the right and the wrong next token, whose logit difference is the target.
        n_logits, probability: without targets, the most likely tokens up to this probability in all, at most so many.
        positions: the position of the logits.
        max_nodes: how many features to keep, those with the largest influence on the targets. None: all active features; of
            neurons 500.
        round_size: how many features are added before influences are computed anew.
        constant_positions: at so many first positions what MLPs write is constant, a bias, and no node. None: 1 if the prompt
            begins with the beginning-of-sequence token, whose features say nothing of the prompt; else 0.
        check: how many features of the pruned graph to ablate exactly in the model (see `intervene`); drawn with the `seed`.
        control: of neurons, "untrained": also make the graph of the untrained twin, for its scores and agreement; "auto": for
            small models. Of transcoders there is a control only with transcoders that were trained in the same way on
            `model.untrained(seed)`: give these. The model's own explain less of the twin for that reason alone.
        max_memory: the memory that the edges and the backward passes may take, besides the model.

    Returns an AttributionGraph. Raises TypeError for another model and for both targets and answers; ValueError for several
    prompts, for `control="untrained"` with transcoders, for a part of the model that is not linear while patterns and norms are
    constant (experts in a graph of neurons, gated attention, mixers), by its name, and for numbers out of range.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> prompt = "When Mary and John went to the store, John gave a drink to"
    >>> graph = attribution_graph(model, prompt, answers=(" Mary", " John"), max_nodes=50)
    >>> len(graph.features), graph.targets, bool(graph.completeness["sums"] < 1e-5)
    (50, ["logit ' Mary' - logit ' John'"], True)
    """
    model = decoder(model, "an attribution graph needs")
    check_grad_mode("an attribution graph")
    _check_control(control, transcoders)
    tokens = one_prompt(model, prompt, "prompt")
    _check_numbers(
        tokens, targets, answers, n_logits, probability, positions, max_nodes, round_size, constant_positions, check
    )
    constant = _n_constant(model, tokens) if constant_positions is None else constant_positions
    given = _as_list(model, targets, tokens.shape[1])
    sources = _sources(model, tokens, transcoders, constant, given)
    wanted = TargetReads(
        _targets(model, sources.frozen.values[FINAL], given, answers, n_logits, probability, positions)
    )
    wanted.check_widths(sources.frozen.values)
    n = max_nodes or (NEURONS if transcoders is None else len(sources.features))
    if isinstance(sources, NeuronSources):
        _choose_candidates(sources, wanted, n, memory_of(max_memory, tokens.device))
    rows = EdgeRows(sources, wanted, n, max_memory)
    rows.add_most_influential(round_size, progress)
    how = {"max_nodes": max_nodes, "round_size": round_size, "constant_positions": constant, "seed": seed}
    sizes = {"n_layers": len(model.blocks), "d_vocab": model.cfg.d_vocab}
    about = provenance(model, prompt=prompt if isinstance(prompt, str) else None, **sizes, position=positions, **how)
    if transcoders is not None:
        about["transcoders"] = repr(transcoders)
    found = _graph(model, rows, about)
    if check:
        nodes = drawn(found.pruned(), check, seed)
        measured = intervene(model, found, transcoders, nodes=nodes, seed=seed, max_memory=max_memory)
        found = replace(found, agreement=measured)
    same: dict[str, Any] = {"answers": answers}
    if answers is None:
        same = {"targets": given or [int(token) for token in found.target_ids]}
    same |= {"positions": positions, "round_size": round_size, "check": check, "seed": seed, "max_memory": max_memory}
    return replace(found, control=_control(model, tokens, transcoders, control, found, same))


def _sources(
    model: Decoder,
    tokens: Int[Tensor, "1 pos"],
    transcoders: LayerTranscoders | None,
    constant: int,
    given: list[str | int | Target] | None,
) -> Sources:
    """The features of the transcoders, or the neurons, and the values at the sites that targets read."""
    sites = [each.site for each in given or () if isinstance(each, Target) and each.site is not None]
    if transcoders is None:
        return NeuronSources(model, tokens, constant, sites)
    return FeatureSources(model, tokens, transcoders, constant, sites)


def _check_control(control: str | LayerTranscoders | None, transcoders: LayerTranscoders | None) -> None:
    """Raises ValueError for a control that compares nothing: transcoders of the twin go with transcoders of the model."""
    if isinstance(control, LayerTranscoders):
        if transcoders is None:
            raise ValueError("control is transcoders, and this is a graph of neurons: give control='untrained'")
        return
    check_control(control)
    if control == "untrained" and transcoders is not None:
        raise ValueError(
            "the untrained twin needs transcoders of its own: train some on model.untrained(seed) and give control=them; those "
            "of the model explain less of the twin, whatever training brought about"
        )


def _control(
    model: Decoder,
    tokens: Int[Tensor, "1 pos"],
    transcoders: LayerTranscoders | None,
    control: str | LayerTranscoders | None,
    graph: AttributionGraph,
    same: dict[str, Any],
) -> dict[str, float]:
    """The scores of a graph of the untrained twin with as many nodes and the same settings, and its agreement with the twin.

    Empty without a twin.
    """
    of_twin = control if isinstance(control, LayerTranscoders) else None
    if transcoders is not None and of_twin is None:
        return {}
    twin = untrained_twin(model, control if of_twin is None else "untrained", seed=same["seed"])  # type: ignore[arg-type]
    if twin is None:
        return {}
    other = attribution_graph(
        decoder(twin, "an attribution graph needs"),
        tokens,
        of_twin,
        max_nodes=max(len(graph.features), 1),
        constant_positions=graph.about["constant_positions"],
        control=None,
        progress=False,
        **same,
    )
    found = dict(other.scores)
    return found if other.agreement is None else found | {"correlation": other.agreement.correlation["correlation"]}


def _graph(model: Decoder, rows: EdgeRows, about: dict[str, Any]) -> AttributionGraph:
    """The graph of the rows, with its biases, and its sums and edges checked."""
    sources, targets = rows.sources, rows.targets
    kept, adjacency, others = rows.matrix()
    n_targets, n = len(targets.targets), len(adjacency)
    ends = torch.cat([torch.arange(len(kept)), torch.arange(n - n_targets, n)])
    biases, totals = torch.zeros(n), torch.zeros(n)
    biases[ends] = biases_of(sources, targets, kept)
    totals[ends] = torch.cat([sources.totals[kept], targets.reads(sources.frozen.values)])
    ids = sources.frozen.tokens[0].cpu()
    for target, into, rest in zip(targets.targets, adjacency[n - n_targets :], others[n - n_targets :], strict=True):
        if not bool(into.any()) and not bool(rest):
            raise ValueError(
                f"target {target.name!r} depends on no token, feature or error: its direction is 0, or its site is computed "
                "before the blocks; choose a site of a block"
            )
    found = AttributionGraph(
        features=sources.features[kept],
        errors=sources.errors,
        tokens=[str(token) if model.tokenizer is None else model.to_single_str_token(token) for token in ids.tolist()],
        targets=[target.name for target in targets.targets],
        adjacency=adjacency,
        activations=sources.activations[kept],
        probabilities=targets.weights,
        totals=totals,
        biases=biases,
        others=others,
        token_ids=ids,
        target_ids=torch.tensor([target.token_id for target in targets.targets]),
        unit=sources.unit,
        about=about,
        directions=targets.directions,
        reads=[(target.site or "", target.position) for target in targets.targets],
    )
    errors = error_of_sums(adjacency[ends], biases[ends], others[ends], totals[ends])
    names = [found.names[node] for node in ends.tolist()]
    check_sums(errors, names, sources.eps)
    strongest = found.influence[: len(kept)].topk(min(N_DIFFERENCES, len(kept))).indices.tolist()
    differences = error_of_differences(sources, targets, kept, strongest, adjacency[ends])
    return replace(found, completeness={"sums": float(errors.max()), "differences": differences})


def _choose_candidates(sources: NeuronSources, targets: TargetReads, n: int, n_bytes: int) -> None:
    """Leaves the neurons that a graph may choose from: those with the largest estimated effects, as many as the memory holds."""
    most = max(n, min(CANDIDATES * n, n_bytes // (8 * n)))
    if len(sources.features) > most:
        chosen = sources.total_effects(targets).topk(most).indices.sort().values
        sources.keep(sources.features[chosen])


def _targets(
    model: Decoder,
    final: Tensor,
    given: list[str | int | Target] | None,
    answers: RightAndWrong | None,
    n_logits: int,
    probability: float,
    position: int,
) -> list[Target]:
    """The targets in their order; logits of tokens are computed together."""
    if given is None:
        return logit_targets(model, final, None, answers, n_logits, probability, position)
    tokens = [each for each in given if not isinstance(each, Target)]
    logits = iter(logit_targets(model, final, tokens, None, 1, 1.0, position) if tokens else [])
    return [each if isinstance(each, Target) else next(logits) for each in given]


def _as_list(model: Decoder, targets: Targets | None, n_pos: int) -> list[str | int | Target] | None:
    """The targets as a list, with full names of sites."""
    if targets is None:
        return None
    given = [targets] if isinstance(targets, (str, int, Target)) else list(targets)
    return [
        checked_targets(model, [each], n_pos)[0]
        if isinstance(each, Target)
        else int(each)
        if isinstance(each, Tensor)
        else each
        for each in given
    ]


def _n_constant(model: Decoder, tokens: Int[Tensor, "1 pos"]) -> int:
    """1 if a prompt begins with the beginning-of-sequence token, else 0."""
    begin = getattr(model.tokenizer, "bos_token_id", None)
    return int(begin is not None and int(tokens[0, 0]) == begin)


def _check_numbers(
    tokens: Int[Tensor, "batch pos"],
    targets: object,
    answers: object,
    n_logits: int,
    probability: float,
    position: int,
    max_nodes: int | None,
    round_size: int,
    constant_positions: int | None,
    check: int,
) -> None:
    if check < 0:
        raise ValueError(f"check must be at least 0, the number of features that are ablated, got {check}")
    if targets is not None and answers is not None:
        raise TypeError("targets and answers are both given: answers are short for the difference of two logits")
    n_pos = tokens.shape[1]
    for name, number in (("n_logits", n_logits), ("max_nodes", max_nodes), ("round_size", round_size)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if not 0 < probability <= 1:
        raise ValueError(f"probability must be a number above 0 and at most 1, got {probability}")
    if not -n_pos <= position < n_pos:
        raise ValueError(f"position {position} is out of range: the prompt has {n_pos} tokens")
    if constant_positions is not None and not 0 <= constant_positions < n_pos:
        raise ValueError(f"constant_positions must be from 0 to {n_pos - 1}, got {constant_positions}")
    if targets is not None and not isinstance(targets, (str, int, Target)) and not len(targets):  # type: ignore[arg-type]
        raise ValueError("targets are empty: give at least one, or None for the most likely tokens")
