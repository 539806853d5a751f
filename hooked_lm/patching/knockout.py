"""`attention_knockout`: mask attention from some positions to others, and measure the effect."""

import os
from collections.abc import Iterator, Mapping
from itertools import product

import torch
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.edit import Edit
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.pairs import RightAndWrong, needed_metric
from hooked_lm.engine.prompts import AxisSelection, Prompts, chosen, rows_of, site_of_layer
from hooked_lm.engine.result import SweepResult
from hooked_lm.engine.stacks import refuse_two_stacks
from hooked_lm.engine.study import Metrics, Study
from hooked_lm.hooks import HookedRootModule, HookPoint, UnknownSite
from hooked_lm.hooks.indices import Indices, plain_indices
from hooked_lm.models.vision.inputs import Rows
from hooked_lm.patching.windows import windows_of
from hooked_lm.renamed import renamed
from hooked_lm.results import Label
from hooked_lm.results.groups import Groups

Edges = Mapping[str, tuple[Indices, Indices]]


@renamed(checkpoint="resume_file")
@keeps_torch_state
@reads_chats
def attention_knockout(
    model: HookedRootModule,
    prompts: Prompts,
    edges: Edges,
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    window: int = 1,
    layers: AxisSelection = "each",
    heads: AxisSelection = None,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    resume_file: str | os.PathLike[str] | None = None,
) -> SweepResult:
    """Mask attention edges from some tokens to others, in one window of layers at a time.

    Attention knockout after Geva et al. 2023 (arXiv:2304.14767): the scores of the edge are set to minus infinity before the
    softmax, which renormalises over the other keys. The cells share computation; the result equals that of one forward pass
    per cell.

    Args:
        prompts: texts or ids [batch, pos], of one length.
        edges: a mapping of names to (from, to): queries at the positions `to` no longer attend to keys at the positions `from`.
            Each is an int, several ints or a slice; negative positions count from the end.
        metric: maps logits [batch, pos, d_vocab] to one number per prompt [batch] or one for all prompts; or a mapping of names
            to such functions. See `hooked_lm.analysis.metrics`.
        answers: in place of a metric, as in `sweep`.
        window: in how many layers an edge is masked, centred on each layer; an even window has one more layer before the
            centre than after it, and windows are truncated at the ends of the model.
        layers: "each" adds an axis, a list an axis of these layers, None masks all layers together.
        heads: None masks all heads together, "each" or a list adds an axis.
        groups, max_memory, progress, resume_file: as in `sweep`.

    Returns a SweepResult with those of the axes (metric), edge, layer and head that the arguments add. `corrupted` is the run
    without masking, so `.effects()` is the effect of each edge; there is no `clean`. NaN for windows without attention scores
    (state-space layers), and for heads that a window lacks. Raises before the sweep: ValueError for an edge without positions or
    with a position that masks nothing in any layer (such as a key after the query), for a query left without keys, for a window
    below 1, and for layers that attend to pooled keys; IndexError for positions, layers and heads out of range; KeyError if no
    layer of the windows has attention scores.

    >>> from hooked_lm import HookedTransformer, patching
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> paris = metrics.log_probability(model.to_single_token(" Paris"))
    >>> edges = {
    ...     "subject": (4, -1),
    ...     "the rest": ([1, 2, 3], -1),
    ... }  # of <|endoftext|>, The, capital, of, France, is
    >>> result = patching.attention_knockout(
    ...     model, "The capital of France is", edges, metric=paris, layers=None
    ... ).effects()
    >>> result.axes["edge"], bool(result.mean[0] < -1)
    (('subject', 'the rest'), True)
    """
    refuse_two_stacks(model, "attention_knockout")
    metric = needed_metric(model, metric, answers)
    tokens = rows_of(model, prompts)
    grid = _Grid(model, tokens, edges, layers, heads, window)
    study = Study(grid.axes, dict(grid.cells()), title="knocking out attention")
    return study.carry_out(model, tokens, metric, None, max_memory, progress, resume_file, groups)


class _Grid:
    """Edges x layers x heads, each cell a window of layers."""

    def __init__(
        self,
        model: HookedRootModule,
        tokens: Rows,
        edges: Edges,
        layers: AxisSelection,
        heads: AxisSelection,
        window: int,
    ) -> None:
        if not edges:
            raise ValueError("edges is empty: name at least one")
        self.edges = {name: _positions(name, ends, tokens.shape[1]) for name, ends in edges.items()}
        self.layers = chosen(layers, model.cfg.n_layers, "layer")
        self.windows = windows_of(self.layers, window, model.cfg.n_layers)
        near = sorted(set().union(*self.windows))
        found = {layer: site_of_layer(model, "attn_scores", layer) for layer in near}
        attns = {layer: getattr(model.blocks[layer], "attn", None) for layer in near}
        pooled = [layer for layer, attn in attns.items() if getattr(attn, "pools_keys", False)]
        if pooled:
            raise ValueError(
                f"the layers {pooled} also attend to blocks that pool several tokens, so an edge is not all that connects two "
                "tokens: choose other layers, or edit hook_pooled_scores"
            )
        self.sites = {layer: site for layer, site in found.items() if site is not None}
        if not self.sites:
            raise UnknownSite(f"no attention to mask: none of the layers {near} has a site 'attn_scores'")
        self.visible, self.n_heads = _visible(model, tokens, self.sites)
        self.heads = chosen(heads, max(self.n_heads.values()), "head")
        for name, (keys, queries) in self.edges.items():
            self._check(name, keys, queries)
        self.axes: dict[str, list[Label]] = {"edge": list(self.edges)}
        if self.layers is not None:
            self.axes["layer"] = list(self.layers)
        if self.heads is not None:
            self.axes["head"] = list(self.heads)

    def _check(self, name: str, keys: list[int], queries: list[int]) -> None:
        """Raises ValueError for a position that masks nothing, and for a query left without keys."""
        cut = torch.stack([seen.any(0)[queries][:, keys] for seen in self.visible.values()]).any(0)
        edge = f"edge {name!r}, from the keys {keys} to the queries {queries},"
        for role, positions, cuts in (("key", keys, cut.any(0)), ("query", queries, cut.any(1))):
            if not bool(cuts.all()):
                useless = positions[int((~cuts).nonzero()[0])]
                raise ValueError(
                    f"{edge} masks nothing at the {role} {useless} in any of these layers: a query attends to itself and earlier "
                    "positions only, in layers with a window to the last of them"
                )
        for layer, seen in self.visible.items():
            left = seen[:, queries].clone()
            left[:, :, keys] = False
            if bool((blind := ~left.any(-1).all(0)).any()):
                query = queries[int(blind.nonzero()[0])]
                raise ValueError(
                    f"{edge} leaves the query {query} of layer {layer} without keys: keep one, such as its own position"
                )

    def cells(self) -> Iterator[tuple[tuple[int, ...], list[Edit]]]:
        """Yield each grid index with the edits that mask its edge; indices without edits are left out."""
        heads: list[int | None] = [None] if self.heads is None else [*self.heads]
        masked = torch.full((1, 1, 1, 1), float("-inf"))
        grid = product(enumerate(self.edges.values()), enumerate(self.windows), enumerate(heads))
        for (number, (keys, queries)), (row, window), (column, head) in grid:
            there = [layer for layer in window if layer in self.sites and (head or 0) < self.n_heads[layer]]
            rest = (slice(None) if head is None else head, keys)
            edits = [Edit(self.sites[layer], masked, tuple(queries), rest) for layer in there]
            index = {"edge": number, "layer": row, "head": column}
            if edits:
                yield tuple(index[axis] for axis in self.axes), edits


def _positions(name: str, ends: tuple[Indices, Indices], n_pos: int) -> tuple[list[int], list[int]]:
    """The key and query positions of an edge, each sorted and without duplicates."""
    what = f"edge {name!r}: position"
    given = (plain_indices(what, end) for end in ends)
    keys, queries = ([end] if isinstance(end, int) else end for end in given)
    if not keys or not queries:
        raise ValueError(f"edge {name!r}, from {keys} to {queries}: both ends need a position")
    keys, queries = (chosen(end, n_pos, what) or [] for end in (keys, queries))
    return sorted(set(keys)), sorted(set(queries))


def _visible(
    model: HookedRootModule, tokens: Rows, sites: Mapping[int, str]
) -> tuple[dict[int, Bool[Tensor, "batch query_pos key_pos"]], dict[int, int]]:
    """The keys that each query of a layer attends to in any head, and the number of heads; by one forward pass."""
    seen: dict[str, Tensor] = {}
    n_heads: dict[str, int] = {}

    def record(scores: Tensor, hook: HookPoint) -> None:
        name = hook.name or ""
        seen[name], n_heads[name] = (scores > float("-inf")).all(1).cpu(), scores.shape[1]

    with torch.no_grad():
        model.run_with_hooks(tokens, return_type=None, fwd_hooks=[(site, record) for site in sites.values()])
    return {layer: seen[site] for layer, site in sites.items()}, {layer: n_heads[site] for layer, site in sites.items()}
