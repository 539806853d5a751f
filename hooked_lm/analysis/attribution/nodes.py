"""Attribution: the effects of all cells of a sweep, estimated from gradients in a few passes instead of one for each cell."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.attribution.attribution_result import Attribution
from hooked_lm.analysis.attribution.backward_rules import BackwardRules, rules_of
from hooked_lm.analysis.attribution.checking import Check, check_valid, exact_values
from hooked_lm.analysis.attribution.gradient_runs import (
    Collected,
    Estimates,
    GradientRun,
    PartialMetric,
    PassCounts,
    RowSums,
    joined,
    seen,
)
from hooked_lm.analysis.attribution.gradients import check_grad_mode
from hooked_lm.analysis.attribution.methods import METHODS
from hooked_lm.analysis.attribution.twin import with_estimates_of_twin, with_estimates_of_twin_each
from hooked_lm.analysis.untrained import check_control
from hooked_lm.engine.budget import Budget
from hooked_lm.engine.cells_before_blocks import has_one_image_each
from hooked_lm.engine.controls import refuse_several_metrics
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.experiment import Metric
from hooked_lm.engine.keeps_torch_state import keeps_torch_state
from hooked_lm.engine.metric_trace import Logits, reads_of
from hooked_lm.engine.pairs import Pairs, RightAndWrong, both_runs, prompts_and_metric
from hooked_lm.engine.plan import FEATURES, SweepPlan, by_component
from hooked_lm.engine.prompts import (
    OTHER_RUN,
    AxisSelection,
    HeadSelection,
    Prompts,
    Source,
    Values,
    replacement,
    site_of_layer,
    some_rows,
)
from hooked_lm.engine.result import METRIC_NAME, WHAT, metric_name
from hooked_lm.engine.stacks import Target, has_two_stacks, refuse_two_stacks
from hooked_lm.engine.study import Metrics, named
from hooked_lm.hooks import HookedRootModule
from hooked_lm.models.budget import token_bytes
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.vision.inputs import Rows, VisionInputs
from hooked_lm.renamed import renamed
from hooked_lm.results import Label
from hooked_lm.results.gap import one_warning
from hooked_lm.results.groups import Groups, checked_groups
from hooked_lm.results.scores import METRIC, provenance

NODES = ("resid_pre", "attn_out", "mlp_out", "z", "post")


@renamed(source=("replace_with", {"clean": None}))
@keeps_torch_state
@reads_chats
def attribute(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    sites: str | Sequence[str] | None = None,
    by: str | None = None,
    layers: AxisSelection = "each",
    positions: AxisSelection = "each",
    heads: HeadSelection = None,
    neurons: AxisSelection = None,
    replace_with: Values | None = None,
    direction: str = "denoise",
    decoder_input: Target = None,
    method: str = "gradient",
    backward: str | BackwardRules = "plain",
    steps: int = 8,
    check: Check = None,
    seed: int = 0,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    control: str | None = "auto",
) -> Attribution:
    """Estimates the result of `patching.sweep` for all cells at once, and checks the estimates by exact patching.

    Args:
        corrupted, clean, sites, by, layers, positions, heads, neurons, replace_with, direction, decoder_input: as for
            `patching.sweep`; the grid is the same.
        metric, answers: as for `patching.sweep`, but the metric is differentiable.
        method: "gradient" is gradient times difference, in one forward and one backward pass (attribution patching: Nanda
            2023; Syed et al. 2023, arXiv:2310.10348). "ig-inputs" takes the mean gradient over runs whose embeddings (of words
            and images; of patches at sites of a vision tower) are between those of both runs (Sundararajan et al. 2017,
            arXiv:1703.01365); "ig-activations" does so for the
            activations of each site of each layer (Hanna et al. 2024, arXiv:2403.17806). "atp*" computes the patterns of
            exchanged queries and keys, and drops one layer's gradient at a time (Kramar et al. 2024, arXiv:2403.00745), whose
            mean counts here where it exceeds the estimate without dropping.
            "relp" and "gim" are "gradient" with a backward pass of this name.
        backward: what backward passes use in place of derivatives; forward passes are the same. "relp" has coefficients of
            layer-wise relevance propagation: constant divisors in norms, act(x) / x for activation functions, and half for each
            factor of a gated activation (Jafari et al. 2025, arXiv:2508.21258). "gim" has constant divisors, the softmax at
            temperature 2, and gradients divided by 4 at queries and keys and by 2 at values (Edin et al. 2025,
            arXiv:2505.17630). Or `BackwardRules`. Not for "atp*".
        steps: the number of gradients for each integral (Gauss-Legendre).
        check: the cells that are also patched exactly: True all, a number that many at random, False none. None: as many as
            2e11 floating-point operations allow, at most 2000.
        seed: the seed of the random cells.
        groups: a label for each prompt, such as its template: intervals count groups, not prompts (see `Scores`).
        max_memory: "auto", or the bytes that a pass may take in addition to the model; prompts are split into parts that fit.
        control: "untrained": also the estimates of the model's untrained twin, for `result.control`; "auto": where estimates are
            checked by exact patching, which costs more, the model is small and the metric is one; None.

    Returns an Attribution with the axes (metric), (site), layer, position, head or neuron, as far as they exist; its `values`
    are estimates of the metric with each cell exchanged, `exact` the results of exact patching, `agreement` how well both
    agree. The model's weights, flags, mode and hooks are unchanged. Raises as `patching.sweep`, and ValueError for an unknown
    method, steps below 1, a metric or a site without a gradient, and gradients that are NaN, named by site; RuntimeError in
    inference mode. Warns if the clean and the corrupted prompts hardly differ by the metric: effects are then those of noise.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> clean, corrupted = "When Mary and John left, John", "When Mary and John left, Mary"
    >>> answers = metrics.logit_difference(
    ...     model.to_single_token(" Mary"), model.to_single_token(" John")
    ... )
    >>> found = attribute(
    ...     model,
    ...     corrupted,
    ...     clean,
    ...     metric=answers,
    ...     sites="z",
    ...     positions=None,
    ...     heads="each",
    ...     progress=False,
    ... )
    >>> list(found.axes), bool(found.agreement["spearman"].item() > 0.6)
    (['layer', 'head'], True)
    """
    names, positions, heads, neurons = by_component(model, by, sites, positions, heads, neurons)
    check_control(control)
    refuse_several_metrics(metric, control)
    given = (corrupted, clean, metric, answers, replace_with, direction, method, steps)

    def estimated(on: HookedRootModule, check: Check) -> Attribution:
        job = AttributionJob(on, *given, max_memory, decoder_input, backward)
        plan = SweepPlan(job.model, job.tokens, names, layers, positions, heads, neurons)
        [found] = job.carry_out([plan], check, seed, progress, groups)
        return found

    return with_estimates_of_twin(model, estimated(model, check), estimated, control, replace_with)


@renamed(source=("replace_with", {"clean": None}))
@keeps_torch_state
@reads_chats
def attribute_nodes(
    model: HookedRootModule,
    corrupted: Prompts | Pairs,
    clean: Prompts | None = None,
    *,
    metric: Metrics | None = None,
    answers: RightAndWrong | None = None,
    sites: Sequence[str] = NODES,
    replace_with: Values | None = None,
    direction: str = "denoise",
    decoder_input: Target = None,
    method: str = "gradient",
    backward: str | BackwardRules = "plain",
    steps: int = 8,
    check: Check = None,
    seed: int = 0,
    groups: Groups = None,
    max_memory: int | str = "auto",
    progress: bool | None = None,
    control: str | None = "auto",
) -> dict[str, Attribution]:
    """`attribute` for several sites in the same passes: each by layer, position, and head or neuron if it has them.

    Returns an Attribution for each site, by its short name. The other arguments and the errors are those of `attribute`.

    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.analysis import metrics
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> answers = metrics.logit_difference(
    ...     model.to_single_token(" Mary"), model.to_single_token(" John")
    ... )
    >>> both = "When Mary and John left, Mary", "When Mary and John left, John"
    >>> nodes = attribute_nodes(model, *both, metric=answers, check=False)
    >>> {
    ...     site: list(found.axes)
    ...     for site, found in nodes.items()
    ...     if site in ("mlp_out", "z", "post")
    ... }
    {'mlp_out': ['layer', 'position'], 'z': ['layer', 'position', 'head'], 'post': ['layer', 'position', 'neuron']}
    """
    if isinstance(sites, str) or not sites:
        raise ValueError(f"sites must be a list of short names, got {sites!r}")
    check_control(control)
    refuse_several_metrics(metric, control)
    given = (corrupted, clean, metric, answers, replace_with, direction, method, steps)

    def estimated(on: HookedRootModule, check: Check) -> dict[str, Attribution]:
        job, names = AttributionJob(on, *given, max_memory, decoder_input, backward), sites
        if has_two_stacks(job.model) and tuple(sites) == NODES:
            names = [f"{stack.blocks}.{name}" for stack in job.model.stacks for name in NODES]
        plans = [SweepPlan(job.model, job.tokens, [name], **{f"{_feature(on, name)}s": "each"}) for name in names]
        return dict(zip(names, job.carry_out(plans, check, seed, progress, groups), strict=True))

    return with_estimates_of_twin_each(model, estimated(model, check), estimated, control, replace_with)


def _feature(model: Any, name: str) -> str:
    """The axis of a site other than positions ("head" or "neuron"); "position" if it has none."""
    dims = {dim for layer in range(model.stack_of(name)[1]) for dim in _dims(model, name, layer)}
    return next((kind for kind, words in FEATURES.items() if dims & set(words)), "position")


def _dims(model: Any, name: str, layer: int) -> tuple[str, ...]:
    site = site_of_layer(model, name, layer)
    return () if site is None else model.hook_dict[site].dims


class AttributionJob:
    """The checked arguments of an attribution; `carry_out` estimates."""

    def __init__(
        self,
        model: HookedRootModule,
        corrupted: Prompts | Pairs,
        clean: Prompts | None,
        metric: Metrics | None,
        answers: RightAndWrong | None,
        replace_with: Values | None,
        direction: str,
        method: str,
        steps: int,
        max_memory: int | str,
        decoder_input: Target = None,
        backward: str | BackwardRules = "plain",
    ) -> None:
        if method == "atp*":
            refuse_two_stacks(model, "the method 'atp*'")
        check_grad_mode("attribution")
        if method not in METHODS:
            raise ValueError(f"there is no method {method!r}; the methods are {', '.join(METHODS)}")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise ValueError(f"steps must be a whole number from 1 on, got {steps!r}")
        device = next(model.parameters()).device
        source = replacement(replace_with, direction)
        corrupted, clean, metric = prompts_and_metric(model, corrupted, clean, metric, answers)
        model, first, other = both_runs(model, corrupted, clean, direction, decoder_input)
        self.tokens, self.other = first.to(device), None if other is None else other.to(device)
        self.model, self.metric, self.source = model, metric, source
        self.metrics = named(metric)
        self.changes = "corrupted" if direction == "denoise" else "clean"
        self.name, self.method, self.steps = method, METHODS[method], steps
        self.rules = rules_of(method, self.method.rules, backward)
        self.max_memory, self.budget = max_memory, Budget.of(max_memory, device)

    def carry_out(
        self, plans: Sequence[SweepPlan], check: Check, seed: int, progress: bool | None, groups: Groups = None
    ) -> list[Attribution]:
        """The estimates of all plans from the same passes, with the results of exact patching."""
        check_valid(check)
        started = time.perf_counter()
        with torch.no_grad():
            estimated, scores, clean, cost = self._estimated(plans)
        of_prompts = checked_groups(groups, scores.shape[-1])
        spent = {**asdict(cost), "seconds": time.perf_counter() - started}
        shaped = (lambda part: part) if isinstance(self.metric, Mapping) else (lambda part: part[0])
        own, other = shaped(scores), None if clean is None else shaped(clean)
        runs = {"corrupted": own, "clean": other} if self.changes == "corrupted" else {"corrupted": other, "clean": own}
        about = provenance(self.model, method=self.name, steps=self.steps, seed=seed)
        about |= {"backward": rules} if (rules := self.rules.settings) else {}
        about |= {METRIC_NAME: name} if (name := metric_name(self.metric)) else {}
        found = []
        for plan, values in zip(plans, map(shaped, estimated), strict=True):
            axes: dict[str, list[Label]] = dict(plan.axes)
            if isinstance(self.metric, Mapping):
                axes = {METRIC: list(self.metrics), **axes}
            given = (self.tokens, self.other, self.source, self.metric)
            exact = exact_values(plan, values, *given, check, seed, self.changes, self.max_memory, progress)
            settings: dict[str, Any] = {
                **runs,
                "cost": spent,
                "base": self.changes,
                "about": about | {WHAT: f"estimated patching of {', '.join(plan.names)}"},
                "method": self.name,
                "groups": of_prompts,
            }
            found.append(Attribution(values, axes, **settings, exact=exact))
        if other is not None:
            with one_warning():  # all plans have the same runs
                found[0].warn_if_close()
        return found

    def _estimated(self, plans: Sequence[SweepPlan]) -> tuple[list[Tensor], Tensor, Tensor | None, PassCounts]:
        """For each plan the estimates [metric, *grid, prompt]; the metrics of the base run and of the other run; the cost."""
        for site, shape in ((site, shape) for plan in plans for site, shape in plan.shapes.items()):
            if not has_one_image_each(self.model, self.tokens, shape[0]):
                raise ValueError(f"'{site}' has {shape[0]} images: attribution there needs one in each of the prompts")
        sums = {site: RowSums.of(plan, site) for plan in plans for site in plan.sites}
        news = NewValues(
            self.model, self.tokens, self.other, self.source, [*sums, *self.method.also(self.model, [*sums])]
        )
        rows, n_copies = self._parts(list(sums))
        rows, on_parts = self._metrics_of(rows, news.cost)
        found = [Collected(plans, len(self.tokens) if len(rows) > 1 else None) for _ in self.metrics]
        for some in rows:
            source = news.of(some)
            for collected, metric, part in zip(found, self.metrics.values(), on_parts, strict=True):
                own = part.on(some) if part else metric
                run = GradientRun(
                    self.model,
                    some_rows(self.model, self.tokens, some),
                    own,
                    list(sums),
                    source,
                    sums,
                    n_copies,
                    news.cost,
                    self.rules,
                )
                collected.add(_checked(self.method.estimate(run, self.steps), metric), some)
        width = max(len(collected.scores) for collected in found)
        by_metric = [collected.values() for collected in found]
        values = [_stacked([of_plans[i] for of_plans in by_metric], width) for i in range(len(plans))]
        scores = _stacked([collected.scores for collected in found], width)
        clean = None
        if news.logits is not None:
            clean = _stacked([_scores(metric, news.logits) for metric in self.metrics.values()], width)
        return values, scores, clean, news.cost

    def _metrics_of(self, rows: list[slice], cost: PassCounts) -> tuple[list[slice], list[PartialMetric | None]]:
        """The parts of the prompts, with each metric as a `PartialMetric`, or None if there is one part only.

        A metric that is one number for all prompts needs them in one pass.
        """
        if len(rows) == 1:
            return rows, [None] * len(self.metrics)
        cost.forwards += len(rows)
        whole = joined([seen(self.model, some_rows(self.model, self.tokens, some), [])[1] for some in rows])
        parts = [PartialMetric(metric, whole) for metric in self.metrics.values()]
        if any(len(part.scores) == 1 for part in parts):
            return [slice(0, len(self.tokens))], [None] * len(parts)
        return rows, [*parts]

    def _parts(self, sites: Sequence[str]) -> tuple[list[slice], int]:
        """The parts of the prompts that fit into memory, and the number of copies of a part that do."""
        n_prompts, n_pos = self.tokens.shape
        whole = [slice(0, n_prompts)]
        listens = any(point.is_listening for point in self.model.hook_points())  # hooks may depend on the batch size
        if listens or isinstance(self.tokens, VisionInputs):
            return whole, 1
        size = n_pos * self._token_bytes(sites)
        if self.budget.is_user_set and size > self.budget.n_bytes:
            raise ValueError(f"max_memory={self.budget.n_bytes:,} bytes is too little: one prompt takes about {size:,}")
        n = max(1, min(n_prompts, self.budget.n_bytes // size))
        rows = [slice(start, min(start + n, n_prompts)) for start in range(0, n_prompts, n)]
        if not self.method.copies:
            return rows, 1
        return rows, max(1, min(self.budget.n_bytes // (n * size), self.budget.n_tokens // (n * n_pos)))

    def _token_bytes(self, sites: Sequence[str]) -> int:
        """The approximate bytes of a token in a pass with a graph."""
        model = self.model
        if not isinstance(model, Decoder):
            return token_bytes(model)
        in_steps = self.method.in_steps or self.rules.shows_scores
        shows_scores = in_steps or any("key_pos" in model.hook_dict[site].dims for site in sites)
        seen_keys = 16 * model.cfg.n_layers * model.cfg.n_heads * self.tokens.shape[1] if shows_scores else 0
        return token_bytes(model.blocks) + 8 * model.cfg.d_vocab_out + seen_keys


class NewValues:
    """The new values of the sites, for a part of the prompts at a time; `logits` are those of the other run."""

    def __init__(
        self, model: HookedRootModule, tokens: Rows, other: Rows | None, source: Values, sites: Sequence[str]
    ) -> None:
        self.model, self.other, self.sites = model, other, list(dict.fromkeys(sites))
        self.runs = other is not None and isinstance(source, str) and source in OTHER_RUN.values()
        self.given: dict[str, Tensor] = {}
        self._logits: list[Tensor | Logits] = []
        self.n_prompts, self.cost = len(tokens), PassCounts()
        if not self.runs:
            given = Source(model, source, other, tokens, self.sites)
            self.given = {site: given.value(site) for site in self.sites}

    def of(self, rows: slice) -> Callable[[str], Tensor]:
        """A function from a site to its new values for some prompts."""
        values = {site: new[rows] if len(new) == self.n_prompts else new for site, new in self.given.items()}
        if self.other is not None:
            self.cost.forwards += 1
            found, logits = seen(self.model, some_rows(self.model, self.other, rows), self.sites if self.runs else [])
            self._logits.append(logits)
            values = found if self.runs else values
        return values.__getitem__

    @property
    def logits(self) -> Tensor | Logits | None:
        return joined(self._logits) if self._logits else None


def _checked(found: Estimates, metric: Metric) -> Estimates:
    """The estimates; raises ValueError if the metric is NaN."""
    if bool(found.scores.isnan().any()):
        name = getattr(metric, "name", getattr(metric, "__name__", type(metric).__name__))
        raise ValueError(f"the metric {name} of the unchanged run is NaN: nothing can be compared with it")
    return found


def _scores(metric: Metric, logits: Tensor | Logits) -> Float[Tensor, " prompt"]:
    """The value of a metric on logits."""
    return torch.as_tensor(reads_of([metric], logits)[1][0]).detach().reshape(-1)


def _stacked(each: Sequence[Tensor], width: int) -> Tensor:
    """One tensor of all metrics; one number for all prompts is repeated if other metrics have one per prompt."""
    if len(each) == 1:
        return each[0][None]
    return torch.stack([part.expand(*part.shape[:-1], width).cpu().float() for part in each])
