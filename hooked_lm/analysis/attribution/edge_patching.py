"""Exact edge patching: the output of one writer is exchanged in the input of one reader only."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hooked_lm.analysis.attribution.graph import LOGITS, Graph, Node
from hooked_lm.analysis.attribution.writers import Writers, check_sum
from hooked_lm.analysis.untrained import check_control, with_untrained_twin
from hooked_lm.engine.controls import refuse_several_metrics
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.edit import Cell, Edit
from hooked_lm.engine.identity import PROMPTS, identities
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import Pairs, RightAndWrong, both_runs, prompts_and_metric
from hooked_lm.engine.prompts import Prompts, replacement_word, values_of
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.study import Metrics, Study, SweepInterrupted
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows
from hooked_lm.models.weights.terms import times
from hooked_lm.renamed import renamed
from hooked_lm.results.groups import Groups
from hooked_lm.results.scores import METRIC

Edges = Sequence[tuple[str, str]]
JOINED = "patching edges"  # what was changed
FEW = 200  # edges, which are also patched in the untrained twin by default


@renamed(source=("replace_with", {"clean": None}))
@keeps_torch_state
@reads_chats
def patch_edges(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    edges: Edges | None = None,
    replace_with: str | None = None,
    direction: str = "denoise",
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    control: str | None = "auto",
) -> SweepResult:
    """Measures the effect of every edge of a model's graph, each exchanged alone.

    The difference of one writer's output between both runs is added to the input of one reader. The other terms of that input
    are those of the base run, and everything after the reader is recomputed (path patching of single edges: Goldowsky-Dill et
    al. 2023, arXiv:2304.05969). `attribute_edges` estimates the same.

    Args:
        corrupted, clean: texts or ids [batch, pos], as many prompts and tokens each; `VisionInputs` for a model that reads
            images. Or `Pairs` in place of both.
        metric: from logits [batch, pos, d_vocab] to a number for each prompt, or one for all; or several by name.
        answers: in place of a metric, as in `patching.sweep`.
        edges: names of writers and readers, e.g. [("L0H1", "L2H7<v>"), ("m3", "logits")]; None: all. See `Graph`.
        replace_with: what replaces the output of the writer: that of the other run (None; or by its name, "clean" or
            "corrupted"), "mean" (its mean over prompts), or "zero".
        direction: "denoise" changes the corrupted run, "noise" the clean run.
        groups, max_memory, progress: as for `patching.sweep`.
        control: "untrained": also the effects of these edges of the model's untrained twin, for `result.control`, which takes as
            long again; "auto": of at most 200 edges and one metric, in a small model; None.

    Returns a SweepResult with the axes writer and reader; NaN where there is no edge, or it is not in `edges`. Raises KeyError
    for an unknown name, and ValueError for a pair that is not an edge, an empty list, prompts that do not line up, a model whose
    stream is not the sum of its writers' outputs, and open hooks (see `check_unhooked`). An interrupt raises SweepInterrupted
    with the partial result.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(
    ...     model.to_single_token(" Mary"), model.to_single_token(" John")
    ... )
    >>> edges = [("L2H1", "logits"), ("m0", "L1H3<k>")]
    >>> result = patch_edges(
    ...     model, corrupted, clean, metric=answers, edges=edges, progress=False
    ... )
    >>> int(result.mean.isnan().logical_not().sum())
    2
    """
    check_control(control)
    refuse_several_metrics(metric, control)
    model = decoder(model, "edges are those of")
    replace_with = replacement_word(replace_with, direction)
    corrupted, clean, metric = prompts_and_metric(model, corrupted, clean, metric, answers)
    first, other = runs_of(model, corrupted, clean, replace_with, direction)
    graph = Graph.of(model)
    check_unhooked(model, graph)
    chosen = graph.is_edge if edges is None else chosen_edges(graph, edges)
    paths = _Edges(model, graph, first, other, replace_with)
    axes = {"writer": [node.name for node in graph.writers], "reader": [node.name for node in graph.readers]}
    changes = "corrupted" if direction == "denoise" else "clean"
    parts: list[SweepResult] = []
    try:
        for layer in range(model.cfg.n_layers):
            if cells := paths.cells(chosen, layer):
                study = Study(axes, cells, title=f"edges into layer {layer}", changes=changes)
                parts.append(study.carry_out(model, first, metric, other, max_memory, progress, groups=groups))
    except SweepInterrupted as interrupt:
        raise SweepInterrupted(SweepResult.joined([*parts, interrupt.result], JOINED)) from None
    found, prompts = SweepResult.joined(parts, JOINED), first if other is None or direction == "noise" else other
    settings: dict[str, Any] = {"replace_with": replace_with, "direction": direction}
    found = replace(found, about={**found.about, **settings, PROMPTS: identities(model, prompts)})
    settings |= {"metric": metric, "edges": edges, "groups": groups, "max_memory": max_memory, "progress": progress}
    again = partial(patch_edges, corrupted=corrupted, clean=clean, **settings, control=None)
    is_cheap = int(chosen.sum()) <= FEW and METRIC not in found.axes
    return with_untrained_twin(model, found, found, again, control, is_cheap)


def check_unhooked(model: Decoder, graph: Graph) -> None:
    """Raises ValueError for an open hook at the input of a reader, or at the norm before attention.

    Edges are exchanged there: the change of such a hook would be overwritten, or missed by the copies for single heads.
    """
    read = {node.site for node in graph.readers if node.name != LOGITS}
    norms = {f"blocks.{node.layer}.ln1" for node in graph.readers if node.head is not None}
    for site, point in model.all_points().items():
        if point.is_listening and (site in read or site.rpartition(".")[0] in norms):
            raise ValueError(f"a hook is open at '{site}', where edges are exchanged: close it before")


def runs_of(
    model: Decoder, corrupted: Prompts, clean: Prompts | None, replace_with: str, direction: str
) -> tuple[Rows, Rows | None]:
    """What the model reads in the base run and in the other run; raises ValueError for arguments that do not go together."""
    if clean is None and replace_with != "zero":
        raise ValueError(f"replace_with={replace_with!r} needs the other run: give clean=...")
    return both_runs(model, corrupted, clean, direction)[1:]


def chosen_edges(graph: Graph, edges: Edges) -> Tensor:
    """A mask [writer, reader] of these edges."""
    if not len(edges):
        raise ValueError("edges is empty: name at least one, or give None for all")
    chosen = torch.zeros_like(graph.is_edge)
    for writer, reader in edges:
        chosen[graph.edge(writer, reader)] = True
    return chosen


def changes_of(
    writers: Sequence[Writers], own: dict[str, Tensor], other: dict[str, Tensor] | None, replace_with: str
) -> dict[str, Tensor]:
    """The kept values of the other run (or its mean, or zero) minus those of the base run, by the writers' sites."""
    found = {}
    for some in writers:
        if replace_with == "zero" or other is None:
            found[some.site] = -own[some.site]
            continue
        new = other[some.site]
        found[some.site] = (new.mean(0, keepdim=True) if replace_with == "mean" else new) - own[some.site]
    return found


class _Edges:
    """The change of every writer's output, and the inputs of the readers in the base run."""

    def __init__(self, model: Decoder, graph: Graph, tokens: Rows, other: Rows | None, replace_with: str) -> None:
        self.graph, self.writers = graph, Writers.of(model, graph)
        self.streams = {node.site: _stream(node) for node in graph.readers}
        sites = [some.site for some in self.writers]
        last = graph.readers[-1].site
        values = dict(values_of(model, tokens, [*dict.fromkeys([*sites, *self.streams.values(), last])]))
        own = {some.site: some.kept(values[some.site]) for some in self.writers}
        check_sum(self.writers, own, values[last])
        self.values = {site: values[stream] for site, stream in self.streams.items()}
        there = None
        if other is not None and replace_with != "zero":
            others = values_of(model, other, sites)
            there = {some.site: some.kept(others[some.site]) for some in self.writers}
        self.changes = changes_of(self.writers, own, there, replace_with)

    def cells(self, chosen: Tensor, layer: int) -> dict[tuple[int, ...], Cell]:
        """A cell for each chosen edge into a layer; readers of the same stream share its new values."""
        readers = [(i, node) for i, node in enumerate(self.graph.readers) if node.layer == layer]
        cells: dict[tuple[int, ...], Cell] = {}
        for some in self.writers:
            if not chosen[some.places][:, [i for i, _ in readers]].any():
                continue
            parts = some.parts(self.changes[some.site])
            for writer, change in enumerate(parts, some.first):
                new: dict[str, Tensor] = {}
                for i, reader in readers:
                    if chosen[writer, i]:
                        cells[writer, i] = [self._edit(reader, change, new)]
        return cells

    def _edit(self, reader: Node, change: Tensor, new: dict[str, Tensor]) -> Edit:
        stream = self.streams[reader.site]
        if stream not in new:
            new[stream] = self.values[reader.site] + times(change, 1 / reader.factor)
        first = int((change != 0).transpose(0, 1).flatten(1).any(1).long().argmax())  # no position before it differs
        positions = tuple(range(first, change.shape[1]))
        if reader.head is None:
            return Edit(reader.site, new[stream], positions)
        return Edit(reader.site, new[stream][:, :, None], positions, (reader.head,))


def _stream(reader: Node) -> str:
    """The site of the stream that a reader reads, which is its own but for the copies of heads."""
    return reader.site if reader.head is None else f"blocks.{reader.layer}.hook_resid_pre"
