"""Activation patching on the bundled model, from prompts to a report: who receives the drink?

The task is indirect-object identification (Wang et al. 2022, arXiv:2211.00593): after "When Mary and John went to the
store, John gave a drink to" comes " Mary". In the corrupted prompt the other name is the giver, so the answer is
reversed. Activations of the clean run are patched into the corrupted run, one at a time, to show which of them carry the
answer. All results are kept for each pair of prompts, so that the report has confidence intervals.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm import patching, viz
from hooked_lm.analysis import metrics
from hooked_lm.demo import corpus
from hooked_lm.engine.pairs import pair_of
from hooked_lm.extras import lazy_import
from hooked_lm.hooks.head_labels import head_label, parse_head_label
from hooked_lm.models.vision.inputs import ids_of
from hooked_lm.notebook_repr import NotebookRepr, Table
from hooked_lm.pretrained import HookedTransformer
from hooked_lm.results.bootstrap import in_words
from hooked_lm.results.control import sentence_of

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

TEMPLATE = corpus.INDIRECT_OBJECT_TEMPLATES[0]
SETTING = {"place": "store", "object": "a drink", "gave": "gave"}
RESID, ATTN, MLP = SITES = ("resid_pre", "attn_out", "mlp_out")
RANKED_HEADS, SHOWN_HEADS = 8, 4
MINUS = "\N{MINUS SIGN}"

Cost = Mapping[str, int | float]


@dataclass(frozen=True)
class PromptPair:
    """A clean prompt and the prompt with the other giver, for which `answer` and `wrong_answer` are swapped."""

    clean: str
    corrupted: str
    answer: str
    wrong_answer: str


def prompt_pairs(n: int) -> list[PromptPair]:
    """`n` pairs of prompts that are alike but for their names: a woman and a man, who never met in a training text.

    Receiver and giver take turns. Raises ValueError for a number that is not positive or exceeds the pairs of names.

    >>> pair = prompt_pairs(1)[0]
    >>> pair.clean == pair.corrupted.replace(
    ...     f",{pair.answer} gave", f",{pair.wrong_answer} gave"
    ... )
    True
    """
    everybody = product(corpus.FEMALE_NAMES, corpus.MALE_NAMES)
    couples = [couple for couple in everybody if corpus.is_held_out("indirect_object", *sorted(couple))]
    if not 1 <= n <= len(couples):
        raise ValueError(f"the number of prompt pairs must be from 1 to {len(couples)}, got {n}")
    chosen = couples[:: len(couples) // n][:n]
    return [_pair(*couple) if i % 2 == 0 else _pair(*reversed(couple)) for i, couple in enumerate(chosen)]


def _pair(receiver: str, giver: str) -> PromptPair:
    clean, corrupted = _prompt(receiver, giver, giver), _prompt(receiver, giver, receiver)
    return PromptPair(clean, corrupted, f" {receiver}", f" {giver}")


def _prompt(first: str, second: str, giver: str) -> str:
    return TEMPLATE.format(a=first, b=second, s=giver, **SETTING)


@dataclass(frozen=True)
class Work:
    """The cost of sweeps, and the cost of one forward pass for each of their cells."""

    cells: int
    seconds: float
    layer_rows: int  # a token in a layer is one
    flops: int
    layer_rows_of_forwards: int
    flops_of_forwards: int

    def __str__(self) -> str:
        spent, otherwise = self.flops / 1e9, self.flops_of_forwards / 1e9
        return (
            f"{self.cells} cells in {self.seconds:.2f} s: {spent:.1f} GFLOP, "
            f"where a forward pass for each cell would have taken {otherwise:.1f}"
        )


@dataclass(frozen=True)
class Result(NotebookRepr):
    """The results of the experiment for each pair of prompts, and attention patterns.

    `differences` are logit differences, in nats. `sites`, `heads` and `heads_by_position` are effects: the share of the mean
    difference between clean and corrupted run that a cell brings back (0: corrupted, 1: clean).
    """

    model: HookedTransformer
    pairs: list[PromptPair]
    tokens: list[str]
    corrupted_tokens: list[str]
    differences: patching.SweepResult  # run: clean, corrupted
    sites: patching.SweepResult  # site x layer x position
    heads: patching.SweepResult  # layer x head, all positions together
    heads_by_position: patching.SweepResult  # layer x position x head
    patterns: Float[Tensor, "layer head query_pos key_pos"]
    work: Work

    def repr_table(self) -> Table:
        """The results in a line each."""
        parts = {name: getattr(self, name) for name in ("differences", "sites", "heads", "work")}
        return Table(("", "value"), [(name, str(part)) for name, part in parts.items()])

    def __repr__(self) -> str:
        return f"Result({len(self.pairs)} pairs of prompts of {len(self.tokens)} tokens; {self.work})"

    @property
    def changed(self) -> list[int]:
        """The positions at which the first clean and corrupted prompt differ."""
        both = zip(self.tokens, self.corrupted_tokens, strict=True)
        return [pos for pos, (clean, corrupted) in enumerate(both) if clean != corrupted]

    def top_heads(self, n: int) -> list[tuple[int, int]]:
        """The (layer, head) of the largest effects, of either sign, the largest first."""
        top = self.heads.top(n)
        return list(zip(top["layer"].tolist(), top["head"].tolist(), strict=True))

    def acting(self, label: str) -> "Acting":
        """The position at which the head with this label has its largest effect, and the key to which it attends most there."""
        layer, head = parse_head_label(label)
        effects = self.heads_by_position.mean[layer, :, head]
        position = int(effects.abs().argmax())
        weight, looks_at = self.patterns[layer, head, position].max(0)
        return Acting(position, effects[position].item(), int(looks_at), weight.item())

    def ranking(self, n: int = 10) -> "pd.DataFrame":
        """The top heads: the effect of each, with its interval; the position at which it acts and its effect there alone; the
        key to which it attends most from there, and the weight of this key.

        With one pair of prompts the table has no interval (`low`, `high`).
        """
        top, names = self.heads.top(n), [head_label(layer, head) for layer, head in self.top_heads(n)]
        ranking = pd.DataFrame({"head": names, "restored": top["restored"]})
        ranking = ranking.join(top[[end for end in ("low", "high") if end in top]])
        acting = [self.acting(name) for name in names]
        ranking["acts at"] = [_place(self, each.position) for each in acting]
        ranking["restored there"] = [each.effect for each in acting]
        ranking["looks there at"] = [_place(self, each.looks_at) for each in acting]
        ranking["weight"] = [each.weight for each in acting]
        return ranking


@dataclass(frozen=True)
class Acting:
    """Where a head acts: the position of its largest effect, this effect, and the key to which it attends most from there."""

    position: int
    effect: float
    looks_at: int
    weight: float


@torch.no_grad()
def run(model: HookedTransformer, pairs: Sequence[PromptPair]) -> Result:
    """Runs both prompts of each pair, then patches the stream, attention and MLPs, and the heads, with progress bars.

    Raises ValueError if the model does not tell clean from corrupted, or the prompts differ in length.
    """
    runs = pair_of(model, [pair.corrupted for pair in pairs], [pair.clean for pair in pairs])
    corrupted, clean = map(ids_of, runs)
    answers, wrong_answers = [pair.answer for pair in pairs], [pair.wrong_answer for pair in pairs]
    difference = metrics.logit_difference(answers, wrong_answers, model=model)
    clean_logits, cache = model.run_with_cache(clean, names_filter="blocks.*.attn.hook_pattern")
    gap = (difference(clean_logits) - difference(model(corrupted))).mean()
    if gap.abs() < 1e-3:
        raise ValueError(f"the model answers clean and corrupted prompts alike (they are {gap:.1g} nats apart)")
    sites = patching.sweep(model, corrupted, clean, metric=difference, sites=SITES)
    heads = patching.sweep(model, corrupted, clean, metric=difference, sites="z", positions=None, heads="each")
    by_position = patching.sweep(model, corrupted, clean, metric=difference, sites="z", heads="each")
    assert heads.clean is not None
    baselines = torch.stack([heads.clean, heads.corrupted])
    return Result(
        model=model,
        pairs=list(pairs),
        tokens=_strings(model, clean[0]),
        corrupted_tokens=_strings(model, corrupted[0]),
        differences=patching.SweepResult(baselines, {"run": ["clean", "corrupted"]}, heads.corrupted, heads.clean),
        sites=sites.restored(),
        heads=heads.restored(),
        heads_by_position=by_position.restored(),
        patterns=torch.stack([cache["pattern", layer].mean(0) for layer in range(model.cfg.n_layers)]),
        work=_work([sites, heads, by_position], _forward_cost(model, corrupted)),
    )


def _strings(model: HookedTransformer, tokens: Int[Tensor, " pos"]) -> list[str]:
    return [model.to_single_str_token(int(token)) for token in tokens]


def _forward_cost(model: HookedTransformer, tokens: Int[Tensor, "batch pos"]) -> Cost:
    """What one forward pass costs, counted as in all sweeps: the cost of a cell that changes everything before layer 0."""

    def mean(logits: Float[Tensor, "batch pos d_vocab"]) -> Float[Tensor, " batch"]:
        return logits.mean((1, 2))

    sweep = patching.sweep(model, tokens, metric=mean, layers=[0], positions=None, replace_with="zero", progress=False)
    return sweep.cost or {}


def _work(sweeps: Sequence[patching.SweepResult], forward: Cost) -> Work:
    """The work of sweeps; their whole forward passes, such as that of the base run, count too."""
    cells = sum(int((~sweep.mean.isnan()).sum()) for sweep in sweeps)
    costs = [sweep.cost or {} for sweep in sweeps]
    spent = {name: sum(cost[name] for cost in costs) for name in ("forwards", "layer_rows", "flops", "seconds")}
    rows, flops = (int(spent[name] + spent["forwards"] * forward[name]) for name in ("layer_rows", "flops"))
    return Work(cells, spent["seconds"], rows, flops, cells * int(forward["layer_rows"]), cells * int(forward["flops"]))


# ---- the report ------------------------------------------------------------------------------------------------------


def write_report(result: Result, path: str | os.PathLike[str]) -> Path:
    """Writes the experiment as one self-contained HTML page; returns its path."""
    cfg, pair = result.model.cfg, result.pairs[0]
    lead = (
        f"After “{pair.clean}” a language model should say “{pair.answer.strip()}”. "
        f"How does this one ({cfg.n_layers} layers, {cfg.n_heads} heads each) know? We put pieces of a run that is "
        "right into a run that is wrong, one at a time, and see how much of the right answer comes back."
    )
    with in_words() as of_skewness:
        sections = [
            _prompts_section(result),
            _stream_section(result),
            _heads_section(result),
            _layers_section(result),
            _patterns_section(result),
            _work_section(result.work),
        ]
    lead += "".join(f" ({words[0].upper()}{words[1:]}.)" for words in of_skewness)
    return viz.report("Who receives the drink?", sections, path, lead=lead)


def _prompts_section(result: Result) -> viz.Section:
    n_pairs = len(result.pairs)
    means, (low, high) = result.differences.mean, result.differences.interval()
    names = ("clean logit difference", "corrupted")
    facts = {name: _signed(value) for name, value in zip(names, means.tolist(), strict=True)}
    notes = {
        name: f"{_signed(a)} to {_signed(b)}" for name, a, b in zip(names, low.tolist(), high.tolist(), strict=True)
    }
    top, strongest = result.heads.top(1), "strongest head (restores)"
    facts[strongest] = f"{result.ranking(1)['head'][0]} ({top['restored'][0]:.0%})"
    if n_pairs > 1:
        notes[strongest] = f"{top['low'][0]:.0%} to {top['high'][0]:.0%}"
    intervals = (
        "Intervals are those of all cells of a figure at once, which all contain the means of other pairs like these in 95% of "
        "cases; the mean difference that is called 1 is taken as given."
        if n_pairs > 1
        else "There are no intervals: one pair says nothing about others."
    )
    return viz.Section(
        "Two prompts that differ in one name",
        viz.TokenRow("clean", result.tokens, result.changed),
        viz.TokenRow("corrupted", result.corrupted_tokens, result.changed),
        f"The giver decides who receives. Here is the first of {n_pairs} such pairs, which differ in their "
        "names alone. The model was never shown these pairs of names together. The logit difference says how far the "
        "receiver of the clean prompt is ahead of its giver, after the last token, on average over the pairs. In all "
        "that follows 0 is the corrupted run and 1 the clean one: an effect of 0.5 brings half of the difference back. "
        + intervals,
        viz.KeyFigures({"prompt pairs": str(n_pairs), **facts}, notes if n_pairs > 1 else {}),
    )


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", MINUS)


def _stream_section(result: Result) -> viz.Section:
    last = result.model.cfg.n_layers - 1
    return viz.Section(
        "Where the answer is, layer by layer",
        "The residual stream before each layer, one position at a time. This much of the difference comes back when a "
        f"clean value is put in {_carriers(result, 0)}; {_carriers(result, last)}.",
        viz.CaptionedFigure(
            _layer_map(result, RESID),
            "Clean residual stream put into the corrupted run; empty cells change nothing. Tokens of the first prompt; "
            "names vary." + (" Point at a cell for its interval." if len(result.pairs) > 1 else ""),
        ),
    )


def _place(result: Result, position: int) -> str:
    """The token at a position in the first clean prompt, with the position."""
    return f"{viz.visible(result.tokens[position])} ({position})"


def _carriers(result: Result, layer: int) -> str:
    """The positions at which the stream before a layer restores a tenth or more, the strongest first."""
    effects = result.sites.select(site=RESID, layer=layer).mean
    strong = [int(pos) for pos in effects.argsort(descending=True) if effects[pos] >= 0.1]
    places = [f"{effects[pos]:.0%} at `{viz.visible(result.tokens[pos])}` (position {pos})" for pos in strong]
    return f"before layer {layer}, {', '.join(places) or 'nowhere as much as 10%'}"


def _heads_section(result: Result) -> viz.Section:
    effects, ranking = result.heads, result.ranking(RANKED_HEADS)
    layers, heads = [f"layer {layer}" for layer in effects.axes["layer"]], effects.axes["head"]
    every = viz.heatmap(
        effects.mean,
        heads,
        layers,
        x_title="head",
        value_name="restored",
        show_values=True,
        interval=_interval(effects),
        upwards=True,
    )
    top = effects.top(RANKED_HEADS)
    restored, *ends = (torch.tensor(top[name].to_numpy()) for name in ("restored", "low", "high") if name in top)
    interval = (ends[0], ends[1]) if ends else None
    strongest = viz.bars(restored, ranking["head"].tolist(), interval, x_title="head", y_title="restored")
    with_intervals = ", with 95% intervals over the pairs, of all heads at once" if interval else ""
    return viz.Section(
        "Which heads carry it",
        "The output of each attention head, at all positions together.",
        viz.CaptionedFigure(every, "Clean head outputs (`hook_z`) put into the corrupted run."),
        viz.CaptionedFigure(
            strongest, f"The heads with the largest effects{with_intervals}. {sentence_of(effects.control)}".rstrip()
        ),
        "A head acts at some position: the same heads are patched at one position at a time, too. The table says where each has "
        f"its largest effect and where it looks from there in the clean run. {_chain(result, RANKED_HEADS)}",
        viz.CaptionedFigure(
            _acting_map(result), "The same head outputs, put in at one position. Tokens of the first prompt."
        ),
        ranking,
    )


def _chain(result: Result, n: int) -> str:
    """Which heads act at the same position and look at the same token there, the earliest first."""
    found: dict[tuple[int, int], list[str]] = {}
    for layer, head in result.top_heads(n):
        label = head_label(layer, head)
        acting = result.acting(label)
        found.setdefault((acting.position, acting.looks_at), []).append(label)
    parts = [
        f"{', '.join(sorted(heads))} act{'s' * (len(heads) == 1)} at `{_place(result, position)}` and "
        f"look{'s' * (len(heads) == 1)} at `{_place(result, key)}`"
        for (position, key), heads in sorted(found.items())
    ]
    return f"{'; '.join(parts)}."


def _acting_map(result: Result) -> Any:
    """The effects of the top heads at each position, the largest at the top."""
    places = result.top_heads(RANKED_HEADS)

    def of_places(every: Float[Tensor, "layer position head"]) -> Float[Tensor, "place position"]:
        return torch.stack([every[layer, :, head] for layer, head in places])

    ends = _interval(result.heads_by_position)
    return viz.heatmap(
        of_places(result.heads_by_position.mean),
        result.tokens,
        [head_label(layer, head) for layer, head in places],
        x_title="token",
        value_name="restored",
        show_values=True,
        interval=None if ends is None else (of_places(ends[0]), of_places(ends[1])),
    )


def _layers_section(result: Result) -> viz.Section:
    return viz.Section(
        "What attention and MLPs add",
        "What each sublayer adds to the stream, one position at a time.",
        viz.CaptionedFigure(_layer_map(result, ATTN), "Clean attention outputs (`hook_attn_out`) put in."),
        viz.CaptionedFigure(_layer_map(result, MLP), "Clean MLP outputs (`hook_mlp_out`) put in."),
    )


def _layer_map(result: Result, site: str) -> Any:
    effects = result.sites.select(site=site)
    layers = [f"layer {layer}" for layer in effects.axes["layer"]]
    return viz.heatmap(
        effects.mean,
        result.tokens,
        layers,
        x_title="token",
        value_name="restored",
        show_values=True,
        interval=_interval(effects),
        upwards=True,
    )


def _interval(effects: patching.SweepResult) -> tuple[Tensor, Tensor] | None:
    return effects.interval(simultaneous=True) if effects.n_prompts > 1 else None


def _patterns_section(result: Result) -> viz.Section:
    top = result.top_heads(SHOWN_HEADS)
    names = [head_label(layer, head) for layer, head in top]
    labels = [f"{name}, acts at {_place(result, result.acting(name).position)}" for name in names]
    patterns = torch.stack([result.patterns[layer, head] for layer, head in top])
    return viz.Section(
        "Where these heads look",
        "Attention of the heads with the largest effects in the clean runs, from the token of a row to the token of a "
        "column, on average over the pairs. A head matters in the row of the token at which it acts.",
        viz.CaptionedFigure(viz.attention_patterns(patterns, result.tokens, labels), "Each row of a panel sums to 1."),
    )


def _work_section(work: Work) -> viz.Section:
    return viz.Section(
        "What this took",
        f"{work}. In tokens that pass a layer it is {work.layer_rows:,} instead of {work.layer_rows_of_forwards:,}. The "
        "cells share what they have in common, and only what a change can reach is computed; the numbers are the same.",
    )
