"""Edge attribution: the effect of every writer's output on every reader, estimated by a few backward passes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.attribution.backward_rules import GIM, PLAIN, RELP, BackwardRules, Keep, rules_of
from hooked_lm.analysis.attribution.checking import Check, check_valid, n_checked
from hooked_lm.analysis.attribution.edge_gradients import InputGradients, Readers, by_layer
from hooked_lm.analysis.attribution.edge_patching import changes_of, check_unhooked, patch_edges, runs_of
from hooked_lm.analysis.attribution.gradient_runs import PartialMetric, PassCounts
from hooked_lm.analysis.attribution.gradients import (
    Hooks,
    Metric,
    Tape,
    check_grad_mode,
    freeze_weights,
    logits_for,
)
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.analysis.attribution.integrated import moved
from hooked_lm.analysis.attribution.twin import with_estimates_of_twin
from hooked_lm.analysis.attribution.writers import Writers, check_sum
from hooked_lm.analysis.untrained import check_control
from hooked_lm.components.norms.norm import upcast
from hooked_lm.engine.budget import Budget
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.cost import token_cost
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.identity import PROMPTS, identities
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.metric_trace import Logits, reads_of
from hooked_lm.engine.pairs import Pairs, RightAndWrong, prompts_and_metric
from hooked_lm.engine.prompts import Prompts, replacement_word
from hooked_lm.engine.result import METRIC_NAME, WHAT, metric_name
from hooked_lm.engine.study import Metrics
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.budget import bytes_of, token_bytes
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows, VisionInputs, repeated_rows
from hooked_lm.renamed import renamed
from hooked_lm.results.groups import Groups
from hooked_lm.results.scores import provenance

OF_ONE_RUN = {"eap": PLAIN, "relp": RELP, "gim": GIM}  # the rules of methods with one backward pass
METHODS = ("eap", "eap-ig-inputs", "eap-ig-activations", "relp", "gim")
AT_ONCE = 1 << 24  # default limit on the bytes of the gradients of one layer's readers

EdgeScores = Float[Tensor, "writer reader batch"]


@renamed(source=("replace_with", {"clean": None}))
@keeps_torch_state
@reads_chats
def attribute_edges(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    method: str = "eap",
    steps: int = 5,
    replace_with: str | None = None,
    direction: str = "denoise",
    backward: str | BackwardRules = "plain",
    check: Check = None,
    seed: int = 0,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    control: str | None = "auto",
) -> Attribution:
    """Estimates the effect of every edge of a model's graph, as `patch_edges` measures it, from gradients.

    The score of an edge is the writer's output in the other run minus that in the base run, times the gradient of the metric
    with respect to the reader's input, summed over positions. The gradient is

    - "eap": that of the base run. Two forward passes and one backward (Syed et al. 2023, arXiv:2310.10348);
    - "eap-ig-inputs": the mean over runs whose embeddings, and features of images, are between those of both runs (Hanna et
      al. 2024, arXiv:2403.17806);
    - "eap-ig-activations": for the writers of each site in turn, the mean over runs in which their outputs are between those
      of both runs (as in Marks et al. 2024, arXiv:2403.19647). A backward pass for each step of each site;
    - "relp", "gim": as "eap", by the backward pass of this name (see `backward` of `attribute`).

    If the runs differ much, the means estimate the large effects better, while "eap" ranks the many small ones better. Memory
    is needed for a backward pass and the readers of one layer, not for all edges at once.

    Args:
        corrupted, clean: texts or ids [batch, pos], as many prompts and tokens each; `VisionInputs` for a model that reads
            images. Or `Pairs` in place of both.
        metric: from logits [batch, pos, d_vocab] to one number for each prompt, or to one for all; differentiable.
        answers: in place of a metric, as in `patching.sweep`.
        steps: the number of runs that integrated gradients average: the midpoints of as many equal intervals.
        replace_with: what replaces the outputs of writers: those of the other run (None; or by its name, "clean" or
            "corrupted"), "mean" (their mean over prompts), or "zero".
        direction: "denoise" changes the corrupted run, "noise" the clean run.
        backward: what backward passes use in place of derivatives, as for `attribute`; for the methods named "eap".
        check: how many edges to measure exactly, for `agreement`: True all, a number that many drawn by `seed`, False none,
            None as many as are affordable (for the bundled model all, up to about 20 prompts).
        groups: a label for each prompt, such as its template: intervals count groups, not prompts (see `Scores`).
        max_memory: "auto", or the bytes that the gradients of one layer's readers may take; also for the exact runs.
        progress: whether the exact runs show a progress bar; None: if the work takes longer than two seconds.
        control: as for `attribute`.

    Returns an Attribution with the axes writer and reader (see `Graph`; NaN where there is no edge): `effects()` are the
    scores. Warns if the metrics of the two runs differ by less than two standard errors over prompts (one prompt has none):
    then the model may not do this task, and the effects be parts of nothing. Raises TypeError for another model, ValueError for
    prompts that do not line up, a metric without a gradient, gradients that are NaN, a model whose stream is not the sum of its
    writers' outputs, and open hooks at the inputs of readers (see `check_unhooked`); RuntimeError in inference mode.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(
    ...     model.to_single_token(" Mary"), model.to_single_token(" John")
    ... )
    >>> found = attribute_edges(model, corrupted, clean, metric=answers, check=5)
    >>> list(found.axes), int(found.agreement["cells"].item())
    (['writer', 'reader'], 5)
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be a positive number, got {steps!r}")
    rules = rules_of(method, OF_ONE_RUN.get(method, PLAIN), backward)
    corrupted, clean, metric = prompts_and_metric(model, corrupted, clean, metric, answers)
    if not callable(metric):
        raise TypeError(f"metric must be one function of the logits, got a {type(metric).__name__}")
    check_valid(check)
    check_control(control)
    check_grad_mode("edge attribution")
    model = decoder(model, "edges are those of")
    replace_with = replacement_word(replace_with, direction)
    first, other = runs_of(model, corrupted, clean, replace_with, direction)
    edges = _Edges(model, metric, first, other, replace_with, rules, max_memory)
    started = time.perf_counter()
    with freeze_weights(model):
        scores = edges.scores(method, steps)
    cost = {**asdict(edges.cost), "seconds": time.perf_counter() - started}
    settings: dict[str, Any] = {WHAT: "estimated patching of edges"}
    settings |= {"replace_with": replace_with, "direction": direction}
    settings |= {"backward": rules.settings} if rules != PLAIN else {}
    settings |= {"steps": steps} if method not in OF_ONE_RUN else {}
    settings |= {METRIC_NAME: name} if (name := metric_name(metric)) else {}
    settings |= {PROMPTS: identities(model, first if other is None or direction == "noise" else other)}
    found = edges.attribution(scores, method, direction, settings | {"check_seed": seed}).grouped(groups)
    found = replace(found, cost=cost)
    found.warn_if_close()
    drawn = _drawn(model, edges.graph, first.shape.numel(), check, seed)
    same: dict[str, Any] = {"metric": metric, "replace_with": replace_with, "direction": direction}
    same |= {"max_memory": max_memory, "control": None}
    if drawn:
        exact = patch_edges(model, corrupted, clean, edges=drawn, progress=progress, **same)
        found = replace(found, exact=exact.values)
    same |= {"method": method, "steps": steps, "backward": backward, "groups": groups}
    estimated = partial(attribute_edges, corrupted=corrupted, clean=clean, **same)
    return with_estimates_of_twin(model, found, estimated, control, replace_with)


@dataclass(frozen=True)
class _GradientRuns:
    """Runs whose gradients are averaged for the edges of the writers `of`; each adds a share of the changes of `moved`."""

    of: Sequence[Writers]
    moved: Sequence[Writers]
    shares: Float[Tensor, " run"]


class _Edges:
    """The two runs, and the scores of all edges from backward passes."""

    def __init__(
        self,
        model: Decoder,
        metric: Metric,
        tokens: Rows,
        other: Rows | None,
        replace_with: str,
        rules: BackwardRules,
        max_memory: int | str,
    ) -> None:
        self.device = next(model.parameters()).device
        self.model, self.metric = model, metric
        self.n_bytes = AT_ONCE if max_memory == "auto" else bytes_of(max_memory)
        self.budget, self.cost = Budget.of(max_memory, self.device), PassCounts()
        self.tokens, self.other = tokens.to(self.device), None if other is None else other.to(self.device)
        self.replace_with = replace_with
        self.graph = Graph.of(model)
        check_unhooked(model, self.graph)
        self.writers, self.readers = Writers.of(model, self.graph), Readers.of(model, self.graph)
        self.rules = rules
        self.part: PartialMetric | None = None  # the metric of copies of the prompts
        with torch.no_grad():
            context = model.embedded(self.tokens)[2]
        self.inputs = InputGradients(model, context, rules)

    def scores(self, method: str, steps: int) -> EdgeScores:
        """The scores of all edges; NaN where there is none."""
        in_one_run = method in OF_ONE_RUN
        base = self._differentiated(self.readers) if in_one_run else self._watched(self.tokens)
        changed = (
            None if self.other is None else self._watched(self.other)
        )  # after the backward pass, whose graph is freed
        if base.logits is not None:
            self.part = PartialMetric(self.metric, base.logits)
        check_sum(self.writers, base.kept, base.last)
        self.unchanged, self.baseline = base.scores, None if changed is None else changed.scores
        self.changes = changes_of(self.writers, base.kept, None if changed is None else changed.kept, self.replace_with)
        base.kept, changed = {}, None
        total = torch.zeros((*self.graph.is_edge.shape, len(self.tokens)), device=self.device)
        if in_one_run:
            self._add(total, base, self.writers, 1.0)
        for way in self._gradient_runs(method, steps):
            later = [some for some in self.readers if some.nodes[0].rank > way.of[0].rank]
            for shares in way.shares.split(self._n_copies):
                run = self._differentiated(later, self._moves(way.moved, shares), len(shares))
                self._add(total, run, way.of, len(shares) / steps)
        return total.masked_fill_(~self.graph.is_edge[:, :, None].to(total.device), torch.nan)

    def _gradient_runs(self, method: str, steps: int) -> Iterator[_GradientRuns]:
        shares = (torch.arange(steps) + 0.5) / steps
        if method == "eap-ig-inputs":
            yield _GradientRuns(self.writers, [some for some in self.writers if some.nodes[0].is_input], shares)
        if method == "eap-ig-activations":
            for some in self.writers:
                yield _GradientRuns([some], [some], shares)

    def _moves(self, writers: Sequence[Writers], shares: Float[Tensor, " copy"]) -> Hooks:
        """Hooks that add shares of the writers' changes to their outputs, one in each copy of the prompts."""
        return [(some.added, moved(some.change(self.changes[some.site]), shares)) for some in writers]

    @cached_property
    def _n_copies(self) -> int:
        """How many copies of the prompts a pass may hold."""
        if isinstance(self.tokens, VisionInputs) or any(point.is_listening for point in self.model.hook_points()):
            return 1  # hooks may depend on the batch size
        n_tokens = self.tokens.shape.numel()
        n_bytes = n_tokens * token_bytes(self.model.blocks)
        return max(1, min(self.budget.n_tokens // n_tokens, self.budget.n_bytes // n_bytes))

    def _watched(self, tokens: Rows) -> "_Run":
        """A run without gradients."""
        self.cost.forwards += 1
        copy, last = _Copy(), self.readers[-1].seen
        with torch.no_grad(), self.model.hooks(fwd_hooks=[(site, copy) for site in [*self._written, last]]):
            logits = logits_for(self.model, tokens)
            _, [scores] = reads_of([self.metric], logits)
        found = _Run(torch.as_tensor(scores).detach().reshape(-1), self._kept(copy), copy.live[last], logits=logits)
        copy.live.clear()
        return found

    def _differentiated(self, readers: Sequence[Readers], moves: Hooks = (), n_copies: int = 1) -> "_Run":
        """A run and its gradients at the `seen` sites of these readers; with moves, outputs of writers are not kept, and there
        may be copies of the prompts."""
        self.cost.forwards += 1
        self.cost.backwards += 1
        keep = Keep()
        streams = dict.fromkeys(_stream(some.layer) for some in readers if some.is_after_norm)
        sites = dict.fromkeys([*streams, *([] if moves else self._written)])
        seen = [some.seen for some in readers]
        hooks: Hooks = [*moves, *((site, keep) for site in sites)]
        metric = self.metric if self.part is None else self.part.on(slice(0, len(self.tokens)), n_copies)
        tape = Tape(self.model, repeated_rows(self.tokens, n_copies), seen, metric, hooks, self.rules)
        found = _Run(
            tape.scores.detach(),
            {} if moves else self._kept(keep),
            tape.live[seen[-1]].detach(),
            {site: keep.live[site].detach() for site in streams},
            tape.gradients(),
            n_copies,
        )
        tape.live.clear()  # hooks stay alive until garbage collection; their values should not
        keep.live.clear()
        return found

    @property
    def _written(self) -> list[str]:
        return [some.site for some in self.writers]

    def _kept(self, keep: Keep) -> dict[str, Tensor]:
        return {some.site: some.kept(keep.live[some.site].detach()) for some in self.writers}

    def _add(self, total: EdgeScores, run: "_Run", writers: Sequence[Writers], weight: float) -> None:
        """Adds the scores of the edges from these writers by the gradients of a run, and deletes these gradients."""
        there = [some for some in self.readers if some.seen in run.gradients]
        for layer, readers in by_layer(there).items():
            columns = slice(readers[0].first, readers[-1].first + len(readers[-1].nodes))
            earlier = [some for some in writers if some.rank < readers[-1].nodes[0].rank]
            for rows in self._some_prompts(run.n_copies * (columns.stop - columns.start)):
                read = self._read(readers, run, run.streams.get(_stream(layer)), rows)
                for written in earlier:
                    parts = written.parts(self.changes[written.site][rows])
                    total[written.places, columns, rows] += weight * _products(parts, read)
                del read  # before the next one is allocated
            for some in readers:
                del run.gradients[some.seen]

    def _read(
        self, readers: Sequence[Readers], run: "_Run", stream: Tensor | None, rows: slice
    ) -> Float[Tensor, "reader some_prompts pos d_model"]:
        """The gradients at the inputs of the readers of a layer, for some prompts, with respect to terms of the last stream;
        their means over copies."""
        like = run.last[: len(self.tokens)][rows]
        found = like.new_empty(sum(len(some.nodes) for some in readers), *like.shape)
        for some in readers:
            own = found[some.first - readers[0].first :][: len(some.nodes)]
            given = run.of_rows(run.gradients[some.seen], rows), None if stream is None else run.of_rows(stream, rows)
            of_copies = self.inputs.at(some, *given)
            own.copy_(of_copies if run.n_copies == 1 else of_copies.unflatten(1, (run.n_copies, -1)).mean(1))
            if (factor := some.nodes[0].factor) != 1.0:
                own /= factor
        return found

    def _some_prompts(self, n_readers: int) -> Iterator[slice]:
        """Slices of the prompts, each of as many as the memory allows."""
        n_prompts, n_pos = self.tokens.shape
        width = 4 * n_readers * n_pos * self.model.cfg.d_model
        at_once = max(1, min(n_prompts, self.n_bytes // width))
        for start in range(0, n_prompts, at_once):
            yield slice(start, start + at_once)

    def attribution(self, scores: EdgeScores, method: str, direction: str, settings: dict[str, Any]) -> Attribution:
        """The result, without exact values."""
        if len(self.unchanged) == 1 < scores.shape[2]:  # one number for all prompts
            scores = scores.sum(2, keepdim=True)
        of_first, of_other = self.unchanged, self.baseline
        if direction == "noise":
            assert of_other is not None, "the corrupted run"
            of_first, of_other = of_other, of_first
        axes = {
            "writer": [node.name for node in self.graph.writers],
            "reader": [node.name for node in self.graph.readers],
        }
        return Attribution(
            scores + self.unchanged,
            axes,
            of_first,
            of_other,
            base="corrupted" if direction == "denoise" else "clean",
            method=method,
            about=provenance(self.model, **settings),
        )


@dataclass
class _Run:
    """A run: its metric, the kept outputs of its writers, the last stream, and the requested streams before layers and
    gradients."""

    scores: Float[Tensor, " prompt"]
    kept: dict[str, Tensor]
    last: Float[Tensor, "batch pos d_model"]
    streams: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    n_copies: int = 1
    logits: Tensor | Logits | None = None

    def of_rows(self, value: Float[Tensor, "rows ..."], some: slice) -> Tensor:
        """The part of a value that is of some prompts, in all copies."""
        return value[some] if self.n_copies == 1 else value.unflatten(0, (self.n_copies, -1))[:, some].flatten(0, 1)


def _stream(layer: int) -> str:
    return f"blocks.{layer}.hook_resid_pre"


class _Copy(Keep):
    """Keeps copies: without gradients, later operations may work in place on the value."""

    def __call__(self, value: Tensor, hook: Any) -> None:
        self.live[hook.name] = value.clone()


def _products(
    parts: Float[Tensor, "writer some_prompts pos d_model"], read: Float[Tensor, "reader some_prompts pos d_model"]
) -> Float[Tensor, "writer reader some_prompts"]:
    """The product of each writer and reader, summed over features, then in at least fp32 over positions."""
    by_position = torch.bmm(parts.flatten(1, 2).transpose(0, 1), read.flatten(1, 2).permute(1, 2, 0))
    return upcast(by_position).unflatten(0, parts.shape[1:3]).sum(1).permute(1, 2, 0)


def _drawn(model: Decoder, graph: Graph, n_tokens: int, check: Check, seed: int) -> list[tuple[str, str]]:
    """The edges to measure exactly."""
    of_token = sum(token_cost(block).total for block in model.blocks)
    n = n_checked(check, graph.n_edges, n_tokens * of_token / 2)  # on average half of the layers are after an edge
    drawn = torch.randperm(graph.n_edges, generator=torch.Generator().manual_seed(seed))[:n].sort().values
    chosen = torch.zeros_like(graph.is_edge)
    chosen[tuple(graph.is_edge.nonzero()[drawn].T)] = True
    return list(graph.named(chosen))
