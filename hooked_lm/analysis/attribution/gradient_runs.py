"""The common part of all attribution methods: the base run, the values put into it, and the sums that fill a grid."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.analysis.attribution.backward_rules import PLAIN, BackwardRules, Keep
from hooked_lm.analysis.attribution.gradients import Hooks, Metric, Tape, logits_for
from hooked_lm.engine.edit import Edit, by_position
from hooked_lm.engine.metric_rows import MetricOfRows
from hooked_lm.engine.metric_trace import Logits, reads_of
from hooked_lm.engine.plan import FEATURES, SweepPlan
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.vision.inputs import Rows, repeated_rows

Effects = Float[Tensor, "batch pos_or_1 feature_or_1"]


@dataclass(frozen=True)
class Estimates:
    """The metric of the base run [prompt] (one number for all: [1]), and for each site the estimated changes of it
    [batch, pos, feature]; an axis whose entries are exchanged together has length 1."""

    scores: Float[Tensor, " prompt"]
    effects: Mapping[str, Effects]


@dataclass
class PassCounts:
    """The number of forward and backward passes, each of all prompts or a part of them."""

    forwards: int = 0
    backwards: int = 0


@dataclass
class GradientRun:
    """The base run of some prompts; `source(site)` returns the values that are put into it.

    `metric` is a metric of these prompts; `tape` takes another one for copies of them.
    """

    model: HookedRootModule
    tokens: Rows
    metric: Metric
    sites: Sequence[str]
    source: Callable[[str], Tensor]
    sums: Mapping[str, "RowSums"]
    n_copies: int = 1  # how many copies of these prompts a pass may hold
    cost: PassCounts = field(default_factory=PassCounts)
    rules: BackwardRules = PLAIN

    def tape(
        self, sites: Sequence[str] | None = None, hooks: Hooks = (), metric: Metric | None = None, copies: int = 1
    ) -> Tape:
        """A forward pass with a graph, of the prompts or of several copies of them."""
        self.cost.forwards += 1
        tokens = repeated_rows(self.tokens, copies) if copies > 1 else self.tokens
        sites = self.sites if sites is None else sites
        return Tape(self.model, tokens, sites, metric or self.metric, hooks, self.rules)

    def gradients(self, tape: Tape, again: bool = False) -> dict[str, Tensor]:
        """The gradients at the sites of a tape; raises ValueError, naming the site, if the metric does not depend on it."""
        self.cost.backwards += 1
        return tape.gradients(check=True, again=again)

    def seen(self, sites: Sequence[str]) -> tuple[dict[str, Tensor], Tensor | Logits]:
        """The values of the base run at these sites, and its logits; without a graph."""
        self.cost.forwards += 1
        return seen(self.model, self.tokens, sites)

    def new(self, site: str, old: Tensor) -> Tensor:
        """The new value at a site, in the shape of `old`; raises ValueError if it does not fit."""
        dims, value = self.model.hook_dict[site].dims, self.source(site).to(old)
        edit = Edit(site, value)
        whole = edit.source(by_position(old, dims), dims, by_position(old, dims).shape[1])
        return whole.movedim(1, dims.index("query_pos")) if "query_pos" in dims else whole

    def difference(self, site: str, old: Tensor) -> Tensor:
        """The new value minus `old`; 0 where both are minus infinity, as masked scores are."""
        new = self.new(site, old)
        difference = new - old
        return (
            difference.masked_fill_(new == old, 0.0) if "query_pos" in self.model.hook_dict[site].dims else difference
        )

    def product(self, site: str, gradient: Tensor, old: Tensor) -> Effects:
        """Gradient times difference, summed over what each cell exchanges."""
        difference = self.difference(site, old)
        if "query_pos" in self.model.hook_dict[site].dims:  # inf * 0 would be NaN
            difference = difference.masked_fill(gradient == 0, 0.0)
        return self.sums[site].product(gradient, difference)


@dataclass(frozen=True)
class RowSums:
    """Sums over the axes of a site (`dims`), except batch and, where cells separate them, `position` and `feature`."""

    site: str
    dims: tuple[str, ...]
    position: str | None
    feature: str | None

    @classmethod
    def of(cls, plan: SweepPlan, site: str) -> "RowSums":
        """The sums for a site of a plan; raises ValueError for a site without prompts or positions."""
        dims = plan.model.hook_dict[site].dims
        where = next(
            (dim for dim in ("pos", "query_pos", *(dims[1:2] if "key_pos" in dims[1:2] else ())) if dim in dims), None
        )
        if dims[:1] != ("batch",) or (where is None and plan.positions is not None):
            raise ValueError(
                f"'{site}' [{', '.join(dims)}] is not [batch, pos, ...]: its values cannot be attributed to"
            )
        of_kind = FEATURES[plan.feature] if plan.feature is not None else ()
        feature = next((dim for dim in of_kind if dim in dims), None)
        return cls(site, dims, None if plan.positions is None else where, feature)

    def product(self, gradient: Tensor, difference: Tensor) -> Effects:
        """The products, summed over the axes that are not kept."""
        letters = {dim: chr(ord("a") + i) for i, dim in enumerate(self.dims)}
        own, kept = "".join(letters.values()), "".join(letters[dim] for dim in self._kept)
        return self._shaped(torch.einsum(f"{own},{own}->{kept}", _wide(gradient), _wide(difference)))

    def total(self, effects: Tensor) -> Effects:
        """Effects at a site, summed over the axes that are not kept, which may have length 1."""
        gone = [i for i, dim in enumerate(self.dims) if dim not in self._kept]
        order = [dim for dim in self.dims if dim in self._kept]
        summed = _wide(effects).sum(gone) if gone else _wide(effects)
        return self._shaped(summed.permute([order.index(dim) for dim in self._kept]))

    @property
    def _kept(self) -> list[str]:
        return [dim for dim in ("batch", self.position, self.feature) if dim is not None]

    def _shaped(self, kept: Tensor) -> Effects:
        kept = kept if self.feature is not None else kept[..., None]
        return kept if self.position is not None else kept[:, None]


def _wide(value: Tensor) -> Tensor:
    """The value in at least fp32, since sums are long."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


@torch.no_grad()
def seen(model: HookedRootModule, tokens: Rows, sites: Sequence[str]) -> tuple[dict[str, Tensor], Tensor | Logits]:
    """The values of a run at these sites, and its logits."""
    keep = Keep()
    with model.hooks(fwd_hooks=[(site, keep) for site in sites]):
        logits = logits_for(model, tokens)
    return keep.live, logits


class Filled:
    """The grid of a plan, to which effects are added for some prompts at a time."""

    def __init__(self, plan: SweepPlan, n_prompts: int) -> None:
        self.plan = plan
        sizes = [1 if axis is None else len(axis) for axis in (plan.layers, plan.positions, plan.features)]
        self._all = torch.zeros(len(plan.names), *sizes, n_prompts)  # site, layer, position, feature, prompt
        self._is_there = torch.zeros(len(plan.names), sizes[0], 1, sizes[2], 1, dtype=torch.bool)

    def add(self, effects: Mapping[str, Effects], rows: slice) -> None:
        """Adds the effects of some prompts; sums over prompts if the metric is one number for all."""
        plan = self.plan
        for (name, layer), site in plan.found.items():
            at = plan.names.index(name), 0 if plan.layers is None else plan.layers.index(layer)
            block, there = self._block(effects[site])
            if self._all.shape[-1] == 1:
                self._all[at] += block.sum(-1, keepdim=True)
            else:
                self._all[at][..., rows] += block
            self._is_there[at] |= there[:, None]

    def _block(self, effects: Effects) -> tuple[Float[Tensor, "pos feature batch"], Bool[Tensor, " feature"]]:
        """The selected positions and features, and which of the features exist."""
        plan, block = self.plan, effects.permute(1, 2, 0).to(self._all)
        if plan.positions is not None and plan.positions != list(range(len(block))):
            block = block[plan.positions]
        if plan.features is None:
            return block, torch.ones(1, dtype=torch.bool)
        n, wanted = block.shape[1], torch.tensor(plan.features)
        if plan.features != list(range(n)):
            block = F.pad(block, (0, 0, 0, max(n, int(wanted.max()) + 1) - n))[:, wanted]
        return block, wanted < n

    def values(self, scores: Float[Tensor, " prompt"]) -> Float[Tensor, "*grid prompt"]:
        """The metric with each cell exchanged, [*grid, prompt]; NaN for cells that do not exist."""
        self._all += scores.to(self._all)
        if not bool(self._is_there.all()):
            self._all.masked_fill_(~self._is_there, torch.nan)
        if self.plan.pairs:
            rows, columns = zip(*self.plan.pairs, strict=True)
            layers, heads = self.plan.layers or [], self.plan.features or []
            at = [layers.index(layer) for layer in rows], [heads.index(head) for head in columns]
            self._all = self._all[:, at[0], :, at[1]].movedim(0, 2).contiguous()
        return self._all.view(*(len(labels) for labels in self.plan.axes.values()), self._all.shape[-1])


class Collected:
    """The estimates for one metric: a grid for each plan, and the metric of the base run.

    `n_prompts` is the number of prompts if they are added in parts; None: all are added at once, and the metric may be one
    number.
    """

    def __init__(self, plans: Sequence[SweepPlan], n_prompts: int | None = None) -> None:
        self.plans, self.n_prompts = plans, n_prompts
        self._grids: list[Filled] = []
        self._scores: list[Tensor] = []

    def add(self, found: Estimates, rows: slice) -> None:
        """Adds the estimates of some prompts."""
        self._scores.append(found.scores)
        n_prompts = len(found.scores) if self.n_prompts is None else self.n_prompts
        self._grids = self._grids or [Filled(plan, n_prompts) for plan in self.plans]
        for grid in self._grids:
            grid.add(found.effects, rows)

    @property
    def scores(self) -> Float[Tensor, " prompt"]:
        """The metric of the base run."""
        return torch.cat(self._scores)

    def values(self) -> list[Tensor]:
        """For each plan the metric with each cell exchanged."""
        return [grid.values(self.scores) for grid in self._grids]


# ---- parts and copies of the prompts ---------------------------------------------------------------------------------


class PartialMetric:
    """A metric of all prompts when some (or copies of them) are run: the others keep their logits of the base run."""

    def __init__(self, metric: Metric, logits: Tensor | Logits) -> None:
        base = Logits.of(logits) if isinstance(logits, Tensor) else logits
        reads, [scores] = reads_of([metric], base)
        self.scores = torch.as_tensor(scores).detach().reshape(-1)
        self.of_rows, self.n_prompts = MetricOfRows(metric, reads, base), base.shape[0]

    def on(self, some: slice, copies: int = 1) -> Metric:
        """The metric of these prompts."""
        rows = torch.full((copies, self.n_prompts), -1)
        rows[:, some] = torch.arange(copies * (some.stop - some.start)).view(copies, -1)

        def metric(logits: Tensor) -> Tensor:
            scores = self.of_rows(logits, rows)
            return scores[:, some].flatten() if scores.shape == rows.shape else scores.sum()

        own = self.of_rows.metric
        metric.__name__ = getattr(own, "name", getattr(own, "__name__", type(own).__name__))
        return metric


def joined(parts: Sequence[Tensor | Logits]) -> Tensor | Logits:
    """The logits of all prompts, from the logits of parts."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    known = [part for part in parts if isinstance(part, Logits)]
    shape = torch.Size([sum(part.shape[0] for part in known), *known[0].shape[1:]])
    return Logits(shape, known[0].dtype, known[0].device, lambda reads: torch.cat([part.some(reads) for part in known]))
