"""Forward passes in which only some edges of a model are active: many circuits over the same prompts, in batches.

An active edge carries the output of its writer in this run, an inactive one the ablated output. So the input of a reader is

    stream + sum over writers of (1 - gate) * (ablated - written),

and its output is added to the stream as usual. Each row of a batch is a circuit. The layers before the first one with a closed
gate are the same as in the run without gates, and are computed once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.edge_patching import check_unhooked
from hooked_lm.analysis.attribution.gradients import Metric, freeze_weights
from hooked_lm.analysis.attribution.graph import Graph, Node
from hooked_lm.analysis.circuits.circuit import KL
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.engine.base_run import logits_of
from hooked_lm.engine.budget import Budget
from hooked_lm.engine.context import repeated_context
from hooked_lm.engine.identity import identities
from hooked_lm.engine.metric_rows import numbers_of
from hooked_lm.engine.metric_trace import TracedAccess, reads_of
from hooked_lm.engine.pairs import Pairs, RightAndWrong, pair_of, unpaired
from hooked_lm.engine.prompts import Prompts
from hooked_lm.engine.result import metric_name
from hooked_lm.hooks import HookPoint, is_listening
from hooked_lm.models.budget import token_bytes
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows
from hooked_lm.models.weights.terms import times
from hooked_lm.progress import progress_bar
from hooked_lm.renamed import renamed
from hooked_lm.results.gap import warn_if_small

REPLACEMENTS = ("corrupted", "mean", "zero")
Gates = Float[Tensor, "row writer reader"]
Constants = Mapping[str, Float[Tensor, "node d_model"]]  # by the sites of writers


@dataclass(frozen=True)
class SiteNodes:
    """The nodes of a site, which are adjacent in the graph; `rank` orders them as in the graph."""

    site: str
    layer: int
    rank: float
    nodes: slice
    of_heads: bool
    weight: float
    factor: float

    def parts(self, value: Tensor) -> Float[Tensor, "batch pos node d_model"]:
        """The terms of a site's nodes in the last stream, from the value at the site."""
        return times(value if self.of_heads else value[:, :, None], self.weight)


def site_nodes(nodes: Sequence[Node]) -> list[SiteNodes]:
    """The nodes, grouped by site."""
    found, start = [], 0
    for site, together in groupby(nodes, key=lambda node: node.site):
        first, *others = together
        stop = start + 1 + len(others)
        of_heads = first.head is not None
        found.append(SiteNodes(site, first.layer, first.rank, slice(start, stop), of_heads, first.weight, first.factor))
        start = stop
    return found


class Runner:
    """Run circuits of one model on fixed prompts, and measure them with one metric.

    Args:
        corrupted, clean: texts or ids [batch, pos] of the same shape; `VisionInputs` for a model that reads images. Circuits
            run on the clean prompts. Or `Pairs` in place of both.
        metric: maps logits to one number per prompt, or one for all; None: that of Pairs with answers, or else KL(model ||
            circuit) at the last position.
        replace_with: what an edge outside the circuit carries. "corrupted": the output of its writer on the corrupted prompt
            (resample ablation); "mean": the mean of that over the corrupted prompts at each position; "zero": zeros.
        max_memory: "auto", or the bytes that a pass may use in addition to the model.
        answers: in place of a metric, the right and the wrong next tokens, as for `patching.sweep`.

    Raises TypeError and ValueError as `Graph.of`; ValueError for prompts of different shapes or with padding, an unknown
    `replace_with`, a model whose residual stream is not the sum of its writers' outputs, and a metric that is NaN.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> runner = Runner(
    ...     model, "When Mary and John left, Mary", "When Mary and John left, John"
    ... )
    >>> gates = torch.ones(2, 37, 101)
    >>> gates[1] = 0
    >>> whole, nothing = runner.values(gates)[:, 0].tolist()
    >>> abs(whole) < 1e-6, nothing > 0.1
    (True, True)
    """

    @renamed(ablation=("replace_with", {"resample": "corrupted"}))
    @torch.no_grad()
    def __init__(
        self,
        model: Decoder,
        corrupted: Prompts | Pairs,
        clean: Prompts | None = None,
        metric: Metric | None = None,
        replace_with: str = "corrupted",
        max_memory: int | str = "auto",
        answers: RightAndWrong | None = None,
    ) -> None:
        check_replacement(replace_with)
        self.model, self.graph, self.replace_with = model, Graph.of(model), replace_with
        check_unhooked(model, self.graph)
        self.writers, self.readers = site_nodes(self.graph.writers), site_nodes(self.graph.readers)
        device = next(model.parameters()).device
        corrupted, clean, metric = unpaired(model, corrupted, clean, metric, answers)
        other, own = (rows.to(device) for rows in pair_of(model, corrupted, clean))
        self.prompts = identities(model, own)
        plain, self.streams, end, self.context = _run_whole(model, own, self.writers)
        written, _, other_end, _ = _run_whole(model, other, self.writers)
        _check_sum(plain, written, end - other_end, end)
        self.ablated = {site: _ablated(value, replace_with) for site, value in written.items()}
        self.differences = torch.cat([self.ablated[place.site] - plain[place.site] for place in self.writers])
        self.is_kl = metric is None
        self.metric = metric if metric is not None else _kl_to(model, end)
        self.reads: TracedAccess | None = None  # logits that the metric reads; all, once it reads others than in `full`
        self.full: Float[Tensor, " prompt"] = self._scores(end, 1)[0].float().cpu()
        if bool(self.full.isnan().any()):
            raise ValueError("the metric of the full model is NaN: no circuit can be compared with it")
        self.n_rows = self._rows(Budget.of(max_memory, device))

    def _rows(self, budget: Budget) -> int:
        """The number of circuits per pass."""
        stream = self.streams[0]
        n_tokens, heads = stream.shape[:2].numel(), max(place.nodes.stop - place.nodes.start for place in self.readers)
        numbers = (len(self.graph.writers) + 8 * heads) * stream.shape[-1]
        width = numbers * stream.element_size() + max(token_bytes(block) for block in self.model.blocks)
        return max(1, min(budget.n_tokens // n_tokens, budget.n_bytes // (n_tokens * width)))

    @property
    def n_prompts(self) -> int:
        return len(self.full)

    @property
    def n_edges(self) -> int:
        return self.graph.n_edges

    @property
    def metric_name(self) -> str:
        """The name of the metric."""
        if self.is_kl:
            return KL
        return metric_name(self.metric) or "metric"

    def empty(self) -> Float[Tensor, " prompt"]:
        """The metric of the circuit without edges."""
        return self.values(torch.zeros(1, *self.graph.is_edge.shape))[0]

    def ablating(self, constants: Constants) -> "Runner":
        """The same runner with these vectors in place of what edges outside of a circuit carry, at all prompts and positions; see
        `optimal_constants`. Raises ValueError unless there is one for each writer."""
        found, places = copy(self), {place.site: place for place in self.writers}
        if constants.keys() != places.keys():
            odd = next(iter(constants.keys() ^ places.keys()))
            raise ValueError(
                f"constants are for each site of writers, {', '.join(places)}; {odd!r} is missing, or is none"
            )
        found.ablated, differences = {}, []
        for site, constant in constants.items():
            old, nodes = self.ablated[site], places[site].nodes
            if constant.shape != (len(old), old.shape[-1]):
                raise ValueError(f"{site} needs constants [{len(old)}, {old.shape[-1]}], got {list(constant.shape)}")
            found.ablated[site] = constant.to(old)[:, None, None].expand_as(old)
            differences.append(found.ablated[site] - (old - self.differences[nodes]))
        found.differences, found.replace_with = torch.cat(differences), "constants"
        return found

    def check_scale(self, empty: Float[Tensor, " prompt"]) -> None:
        """Raises ValueError if the full model has the metric of the one without edges; warns as `warn_if_close`."""
        if not abs(float((self.full.double() - empty.double()).mean())) > 1e-6:
            raise ValueError(
                f"no scale: the metric is {float(empty.mean()):.6g} without edges and as much in the full model; "
                "faithfulness is the share of this difference that a circuit recovers"
            )
        self.warn_if_close(empty)

    def warn_if_close(self, empty: Float[Tensor, " prompt"]) -> None:
        """Warns if the metric of the full model may be that without edges: then circuits are shares of nothing."""
        difference = self.full - empty
        advice = "the model may not do this task, as an untrained one does not; other prompts or another metric may differ more"
        warn_if_small(difference, "the full model and the one without edges", advice)

    @torch.no_grad()
    def values(
        self, gates: Float[Tensor, "..."] | Bool[Tensor, "..."], progress: bool | None = None
    ) -> Float[Tensor, "row prompt"]:
        """The metric of circuits on the CPU, from gates [row, writer, reader] between 0 (ablated) and 1 (active).

        Gates that are not edges of the graph are ignored.
        """
        parts = self._checked(gates).split(self.n_rows)
        bar = progress_bar("circuits", len(parts), progress, unit="passes", steps=parts)
        found = [self._pass(some[:, None]).float().cpu() for some in bar]
        return torch.cat(found) if found else self.full.new_zeros(0, self.n_prompts)

    def with_graph(self, gates: Gates) -> Float[Tensor, "row prompt"]:
        """As `values`, in one pass that is differentiable with respect to the gates but not the weights. Raises ValueError for
        a metric without a gradient."""
        with torch.enable_grad(), freeze_weights(self.model):
            scores = self._pass(self._checked(gates)[:, None])
        if gates.requires_grad and not scores.requires_grad:
            raise ValueError("the metric has no gradient: it must be computed from the logits by differentiable steps")
        return scores

    def gradient(self, gates: Float[Tensor, "writer reader"]) -> Float[Tensor, "writer reader"]:
        """The gradient of the mean metric with respect to each gate, 0 for gates that are not edges. Raises ValueError if it is
        NaN or the metric has none."""
        own = gates.detach()[None].clone().requires_grad_()
        return self._derived(own, self.with_graph(own).mean())[0]

    def gradients(self, gates: Float[Tensor, "writer reader"]) -> Float[Tensor, "prompt writer reader"]:
        """As `gradient`, of the metric of each prompt; of a metric with one number for all, [1, writer, reader]."""
        own = gates.detach().expand(self.n_prompts, -1, -1).clone().requires_grad_()
        with torch.enable_grad(), freeze_weights(self.model):
            total = self._pass(own[None]).sum()
        return self._derived(own, total)

    def _derived(self, gates: Tensor, total: Float[Tensor, ""]) -> Tensor:
        """The gradient of a number with respect to gates."""
        if not total.requires_grad:
            raise ValueError("the metric has no gradient: it must be computed from the logits by differentiable steps")
        [found] = torch.autograd.grad(total, [gates])
        if bool(found.isnan().any()):
            raise ValueError("the gradient of the metric with respect to the gates is NaN")
        return found

    def _checked(self, gates: Tensor) -> Gates:
        shape = self.graph.is_edge.shape
        if gates.ndim != 3 or gates.shape[1:] != shape:
            raise ValueError(f"gates must be [row, {shape[0]} writers, {shape[1]} readers], got {list(gates.shape)}")
        return gates if gates.is_floating_point() else gates.float()

    # ---- one pass ----------------------------------------------------------------------------------------------------

    def _pass(self, gates: Float[Tensor, "row prompt_or_1 writer reader"]) -> Float[Tensor, "row prompt"]:
        stream = self.streams[0]
        closed = ((1 - gates) * self.graph.is_edge.to(gates.device)).to(stream)
        used = (closed.detach() != 0).any(0).any(0).cpu() | (self.graph.is_edge if gates.requires_grad else False)
        start = self._first_layer(used)
        if start is None:
            return self.full.expand(len(gates), -1)
        n_rows, cut = len(gates), GatedPass(self, closed, used, start)
        stream, context = self.streams[start].repeat(n_rows, 1, 1), repeated_context(self.context, n_rows)
        with self.model.hooks(fwd_hooks=list(cut.hooks())):
            for block in list(self.model.blocks)[start:]:
                stream = block(stream, context)
        return self._scores(stream, n_rows)

    def _first_layer(self, used: Bool[Tensor, "writer reader"]) -> int | None:
        """The first layer in which a reader's input changes; None if no input changes."""
        layers = [place.layer for place in self.readers if bool(used[:, place.nodes].any())]
        if not layers:
            return None
        return 0 if self._borrows else min(layers)

    @property
    def _borrows(self) -> bool:
        """Whether layers share keys and values (cross-layer KV sharing); then every pass has to run all layers."""
        sites = {place.site for place in self.readers}
        queries = [site for site in sites if site.endswith("hook_q_input")]
        return any(site.replace("hook_q_input", "hook_k_input") not in sites for site in queries)

    def _scores(self, end: Float[Tensor, "batch pos d_model"], n_rows: int) -> Float[Tensor, "row prompt"]:
        """The metric of each row, computed from the residual stream after the last block."""
        normalized = norm_of(self.model, "ln_final")(end).to(self.model.embed.W_E.dtype)
        points = (module for module in self.model.unembed.modules() if isinstance(module, HookPoint))
        shown = is_listening(*points)
        found = []
        for row in normalized.unflatten(0, (n_rows, -1)):
            logits = self.model.cap_logits(self.model.unembed(row)) if shown else logits_of(self.model, row)
            self.reads, [scores] = reads_of([self.metric], logits, self.reads)
            found.append(numbers_of(scores, len(row)))
        return torch.stack(found)


@dataclass
class GatedPass:
    """The hooks of one pass: they record the outputs of writers, and change the inputs of readers."""

    runner: Runner
    closed: Float[Tensor, "row prompt_or_1 writer reader"]
    used: Bool[Tensor, "writer reader"]
    start: int
    written: list[tuple[SiteNodes, Tensor]] = field(
        default_factory=list
    )  # ablated minus written, [rows, node, numbers]
    n_joined: int = 0
    joined: Tensor = field(default_factory=lambda: torch.empty(0))  # the first `n_joined` of them

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        for place in self.runner.readers:
            if bool(self.used[:, place.nodes].any()):
                yield place.site, self._reading(place)
        for place in self.runner.writers:
            if not self._is_known(place) and bool(self.used[place.nodes].any()):
                yield place.site, _Recording(self, place)

    def _is_known(self, place: SiteNodes) -> bool:
        """Whether the outputs at this site are the same in all rows as in the run without gates."""
        return place.layer < self.start or place.rank < 0

    def keep(self, place: SiteNodes, value: Tensor) -> None:
        """Store the ablated minus the written outputs of a site."""
        parts = place.parts(value).unflatten(0, (len(self.closed), -1)).transpose(2, 3)
        ablated = self.runner.ablated[place.site].transpose(0, 1)
        self.written.append((place, (ablated - parts).flatten(0, 1).flatten(2)))

    def _known(self, places: slice, reader: SiteNodes) -> Float[Tensor, "row prompt pos reader d_model"] | None:
        """What these writers, whose outputs are known before the pass, change at a reader."""
        if not bool(self.used[places, reader.nodes].any()):
            return None
        closed = self.closed[:, :, places, reader.nodes].transpose(2, 3)
        different = self.runner.differences[places]
        if closed.shape[1] == 1:
            change = (closed[:, 0].flatten(0, 1) @ different.flatten(1)).unflatten(
                0, closed.shape[:1] + closed.shape[2:3]
            )
            return change.unflatten(2, different.shape[1:]).permute(0, 2, 3, 1, 4)
        change = closed.transpose(0, 1).flatten(1, 2) @ different.transpose(0, 1).flatten(2)
        return change.unflatten(2, different.shape[2:]).unflatten(1, (len(closed), -1)).permute(1, 0, 3, 2, 4)

    def _found(self, reader: SiteNodes) -> Float[Tensor, "row prompt pos reader d_model"] | None:
        """What the writers whose outputs this pass has computed change at a reader."""
        before = [(place, difference) for place, difference in self.written if place.rank < reader.rank]
        if not any(bool(self.used[place.nodes, reader.nodes].any()) for place, _ in before):
            return None
        if len(before) != self.n_joined:  # the readers of a layer have the same writers before them
            self.n_joined, self.joined = len(before), torch.cat([difference for _, difference in before], 1)
        closed = torch.cat([self.closed[:, :, place.nodes, reader.nodes] for place, _ in before], 2).transpose(2, 3)
        shape = self.runner.differences.shape
        change = closed.expand(-1, shape[1], -1, -1).flatten(0, 1) @ self.joined
        return change.unflatten(2, shape[2:]).unflatten(0, (len(closed), -1)).transpose(2, 3)

    def _reading(self, reader: SiteNodes) -> Callable[[Tensor, Any], Tensor]:
        known = slice(0, max(place.nodes.stop for place in self.runner.writers if self._is_known(place)))

        def read(value: Tensor, hook: HookPoint) -> Tensor:
            changes = [each for each in (self._known(known, reader), self._found(reader)) if each is not None]
            if not changes:
                return value
            total = value.unflatten(0, (len(self.closed), -1))
            for change in changes:
                total = total + times(change if reader.of_heads else change[:, :, :, 0], 1 / reader.factor)
            return total.flatten(0, 1)

        return read


class _Recording:
    """A hook that records the outputs of a site's nodes."""

    records = True

    def __init__(self, cut: GatedPass, place: SiteNodes) -> None:
        self.cut, self.place = cut, place

    def __call__(self, value: Tensor, hook: HookPoint) -> None:
        self.cut.keep(self.place, value)


# ---- clean and corrupted runs ----------------------------------------------------------------------------------------

Written = dict[str, Float[Tensor, "node prompt pos d_model"]]


def _run_whole(
    model: Decoder, tokens: Rows, writers: Sequence[SiteNodes]
) -> tuple[Written, list[Tensor], Tensor, Context]:
    """The outputs of the writers, the residual stream before each block, that after the last block, and the run's context."""
    written: Written = {}
    streams: list[Tensor] = []
    by_site = {place.site: place for place in writers}

    def keep(value: Tensor, hook: Any) -> None:
        written[hook.name] = by_site[hook.name].parts(value).permute(2, 0, 1, 3).clone()

    def keep_stream(value: Tensor, hook: HookPoint) -> None:
        streams.append(value.clone())

    layers = range(len(model.blocks))
    hooks = [*((site, keep) for site in by_site), *((f"blocks.{i}.hook_resid_pre", keep_stream) for i in layers)]
    with model.hooks(fwd_hooks=hooks):
        stream, _, context = model.embedded(tokens)
        if context.real is not None:
            raise ValueError("the prompts are padded: give prompts of as many tokens each")
        for block in model.blocks:
            stream = block(stream, context)
    return written, streams, stream, context


def check_replacement(replace_with: str) -> None:
    """Raises ValueError unless edges outside of a circuit can carry it."""
    if replace_with not in REPLACEMENTS:
        raise ValueError(f"replace_with must be one of {', '.join(map(repr, REPLACEMENTS))}, got {replace_with!r}")


def _ablated(
    value: Float[Tensor, "node prompt pos d_model"], replace_with: str
) -> Float[Tensor, "node prompt pos d_model"]:
    """The ablated outputs of writers, from their outputs on the corrupted prompts."""
    if replace_with == "corrupted":
        return value
    return (
        torch.zeros_like(value) if replace_with == "zero" else value.mean(1, keepdim=True).expand_as(value).contiguous()
    )


def _check_sum(plain: Written, other: Written, difference: Tensor, end: Tensor) -> None:
    """Raises ValueError unless the final streams of two runs differ by the sum of the differences of the writers' outputs."""
    total = sum((plain[site] - other[site]).sum(0) for site in plain) - difference
    size, missed = float(end.abs().max()), float(total.abs().max())
    if not missed <= max(1e-4, 32 * torch.finfo(end.dtype).eps) * size:
        raise ValueError(
            "the last stream is not the sum of what the writers of the graph add to it: the differences of "
            f"two runs disagree by {missed:.2g}, its largest number is {size:.2g}; the edges of this model cannot be separated"
        )


def _kl_to(model: Decoder, end: Float[Tensor, "batch pos d_model"]) -> Metric:
    """KL(model || run) at the last position."""
    last = model.cap_logits(model.unembed(norm_of(model, "ln_final")(end[:, -1:]).to(model.embed.W_E.dtype)))
    return metrics.kl_divergence(last[:, 0])
