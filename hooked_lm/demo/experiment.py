"""Who receives the drink? Activation patching on the bundled model, from the prompts to a written report.

The task is to name the indirect object (Wang et al. 2022, arXiv:2211.00593): after "When Mary and John went to the
store, John gave a drink to" comes " Mary". In the corrupted prompt the other name is the giver, so the answer turns
around. Putting values of the clean run into the corrupted run, one at a time, shows which of them carry the answer.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm import patching, viz
from hooked_lm.demo import corpus
from hooked_lm.models.decoder import HookedTransformer

TEMPLATE = corpus.INDIRECT_OBJECT_TEMPLATES[0]
SETTING = {"place": "store", "object": "a drink", "gave": "gave"}
SITES = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "attn.hook_z", "attn.hook_pattern")
SHOWN_HEADS = 4


@dataclass(frozen=True)
class Pair:
    """A clean prompt and the same with the other giver; `answer` and `wrong` change places between them."""

    clean: str
    corrupted: str
    answer: str
    wrong: str


def prompt_pairs(n: int) -> list[Pair]:
    """`n` pairs of prompts that are alike but for their names: a woman and a man, who never met in a training text.

    Receiver and giver take turns. Raises ValueError for a number that is not positive or exceeds the pairs of names.

    >>> pair = prompt_pairs(1)[0]
    >>> pair.clean == pair.corrupted.replace(f",{pair.answer} gave", f",{pair.wrong} gave")
    True
    """
    everybody = product(corpus.FEMALE_NAMES, corpus.MALE_NAMES)
    couples = [couple for couple in everybody if corpus.is_held_out("indirect_object", *sorted(couple))]
    if not 1 <= n <= len(couples):
        raise ValueError(f"the number of prompt pairs must be from 1 to {len(couples)}, got {n}")
    chosen = couples[:: len(couples) // n][:n]
    return [_pair(*couple) if i % 2 == 0 else _pair(*reversed(couple)) for i, couple in enumerate(chosen)]


def _pair(receiver: str, giver: str) -> Pair:
    clean, corrupted = _prompt(receiver, giver, giver), _prompt(receiver, giver, receiver)
    return Pair(clean, corrupted, f" {receiver}", f" {giver}")


def _prompt(first: str, second: str, giver: str) -> str:
    return TEMPLATE.format(a=first, b=second, s=giver, **SETTING)


@dataclass(frozen=True)
class Result:
    """What the experiment found: logit differences, effects (0: corrupted, 1: clean), and where heads look."""

    model: HookedTransformer
    pairs: list[Pair]
    tokens: list[str]
    corrupted_tokens: list[str]
    clean_difference: float
    corrupted_difference: float
    resid: Float[Tensor, "layer pos"]
    heads: Float[Tensor, "layer head"]
    attn: Float[Tensor, "layer pos"]
    mlp: Float[Tensor, "layer pos"]
    patterns: Float[Tensor, "layer head query_pos key_pos"]

    @property
    def changed(self) -> list[int]:
        """The positions at which the first clean and corrupted prompt differ."""
        both = zip(self.tokens, self.corrupted_tokens, strict=True)
        return [pos for pos, (clean, corrupted) in enumerate(both) if clean != corrupted]

    def top_heads(self, n: int) -> list[tuple[int, int]]:
        """The (layer, head) of the largest effects, of either sign, the largest first."""
        order = self.heads.abs().flatten().argsort(descending=True)[:n]
        return [divmod(int(i), self.heads.shape[1]) for i in order]

    def ranking(self, n: int = 10) -> pd.DataFrame:
        """The top heads: what each restores, and where it looks from the last token, on average over the prompts."""
        rows = []
        for layer, head in self.top_heads(n):
            weight, pos = self.patterns[layer, head, -1].max(0)
            looked_at = f"{viz.visible(self.tokens[int(pos)])} (position {int(pos)})"
            rows.append((f"{layer}.{head}", self.heads[layer, head].item(), looked_at, weight.item()))
        return pd.DataFrame(rows, columns=["head", "restored", "the last token looks at", "weight"])


@torch.no_grad()
def run(model: HookedTransformer, pairs: Sequence[Pair]) -> Result:
    """Run both prompts of each pair, and patch the stream, the heads, attention and MLPs, a progress bar each.

    Raises ValueError if the model does not tell clean from corrupted, or the prompts differ in length.
    """
    answers = torch.tensor([[model.to_single_token(pair.answer), model.to_single_token(pair.wrong)] for pair in pairs])
    clean, corrupted = _aligned(model, pairs)
    names = [f"blocks.*.{site}" for site in SITES]
    clean_logits, cache = model.run_with_cache(clean, names_filter=names)
    clean_difference = logit_difference(clean_logits, answers)
    corrupted_difference = logit_difference(model(corrupted), answers)
    gap = clean_difference - corrupted_difference
    if gap.abs() < 1e-3:
        raise ValueError(f"the model answers clean and corrupted prompts alike (logit difference {clean_difference})")

    def restored(logits: Float[Tensor, "batch pos d_vocab"]) -> Tensor:
        return (logit_difference(logits, answers) - corrupted_difference) / gap

    return Result(
        model=model,
        pairs=list(pairs),
        tokens=_strings(model, clean[0]),
        corrupted_tokens=_strings(model, corrupted[0]),
        clean_difference=clean_difference.item(),
        corrupted_difference=corrupted_difference.item(),
        resid=patching.get_act_patch_resid_pre(model, corrupted, cache, restored),
        heads=patching.get_act_patch_attn_head_out_all_pos(model, corrupted, cache, restored),
        attn=patching.get_act_patch_attn_out(model, corrupted, cache, restored),
        mlp=patching.get_act_patch_mlp_out(model, corrupted, cache, restored),
        patterns=torch.stack([cache["pattern", layer].mean(0) for layer in range(model.cfg.n_layers)]),
    )


def _strings(model: HookedTransformer, tokens: Int[Tensor, " pos"]) -> list[str]:
    return [model.to_single_str_token(int(token)) for token in tokens]


def logit_difference(logits: Float[Tensor, "batch pos d_vocab"], answers: Int[Tensor, "batch 2"]) -> Float[Tensor, ""]:
    """How far the answer is ahead of the wrong name after the last token, on average over the prompts."""
    right, wrong = logits[:, -1].gather(1, answers.to(logits.device)).unbind(1)
    return (right - wrong).mean()


def _aligned(
    model: HookedTransformer, pairs: Sequence[Pair]
) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]:
    prompts = [pair.clean for pair in pairs] + [pair.corrupted for pair in pairs]
    tokens = [model.to_tokens(prompt)[0] for prompt in prompts]
    if len(lengths := {len(row) for row in tokens}) > 1:
        raise ValueError(f"patching needs prompts of one length, these have {sorted(lengths)} tokens")
    clean, corrupted = torch.stack(tokens).chunk(2)
    return clean, corrupted


# ---- the report ------------------------------------------------------------------------------------------------------


def write_report(result: Result, path: str | os.PathLike[str]) -> Path:
    """Write the experiment as one HTML page that needs no network; returns where."""
    cfg, pair = result.model.cfg, result.pairs[0]
    lead = (
        f"After “{pair.clean}” a language model should say “{pair.answer.strip()}”. "
        f"How does this one ({cfg.n_layers} layers, {cfg.n_heads} heads each) know? We put pieces of a run that is "
        "right into a run that is wrong, one at a time, and see how much of the right answer comes back."
    )
    sections = [
        _prompts_section(result),
        _stream_section(result),
        _heads_section(result),
        _layers_section(result),
        _patterns_section(result),
    ]
    return viz.report("Who receives the drink?", sections, path, lead=lead)


def _prompts_section(result: Result) -> viz.Section:
    shares = {"clean logit difference": result.clean_difference, "corrupted": result.corrupted_difference}
    facts = {name: f"{value:+.2f}".replace("-", "\N{MINUS SIGN}") for name, value in shares.items()}
    layer, head = result.top_heads(1)[0]
    strongest = f"{layer}.{head} ({result.heads[layer, head]:.0%})"
    return viz.Section(
        "Two prompts that differ in one name",
        viz.TokenStrip("clean", result.tokens, result.changed),
        viz.TokenStrip("corrupted", result.corrupted_tokens, result.changed),
        f"The giver decides who receives. Here is the first of {len(result.pairs)} such pairs, which differ in their "
        "names alone. The model was never shown these pairs of names together. The logit difference says how far the "
        "receiver of the clean prompt is ahead of its giver, after the last token, on average over the pairs. In all "
        "that follows 0 is the corrupted run and 1 the clean one: an effect of 0.5 brings half of the difference back.",
        viz.Facts({"prompt pairs": str(len(result.pairs)), **facts, "strongest head (restores)": strongest}),
    )


def _stream_section(result: Result) -> viz.Section:
    figure = _layer_map(result, result.resid)
    return viz.Section(
        "Where the answer is, layer by layer",
        "The residual stream before each layer, one position at a time. This much of the difference comes back when a "
        f"clean value is put in {_carriers(result, 0)}; {_carriers(result, len(result.resid) - 1)}.",
        viz.Plate(figure, "Clean residual stream put into the corrupted run. Tokens of the first prompt; names vary."),
    )


def _carriers(result: Result, layer: int) -> str:
    """The positions at which the stream before a layer restores a tenth or more, the strongest first."""
    effects = result.resid[layer]
    strong = [int(pos) for pos in effects.argsort(descending=True) if effects[pos] >= 0.1]
    places = [f"{effects[pos]:.0%} at `{viz.visible(result.tokens[pos])}` (position {pos})" for pos in strong]
    return f"before layer {layer}, {', '.join(places) or 'nowhere as much as 10%'}"


def _heads_section(result: Result) -> viz.Section:
    layers = [f"layer {layer}" for layer in range(len(result.heads))]
    heads = [f"{head}" for head in range(result.heads.shape[1])]
    figure = viz.heatmap(result.heads, heads, layers, x_title="head", value_name="restored", show_values=True)
    return viz.Section(
        "Which heads carry it",
        "The output of each attention head, at all positions together. The table ranks heads by the size of their "
        "effect, and says where each looks from the last token in the clean run.",
        viz.Plate(figure, "Clean head outputs (`hook_z`) put into the corrupted run."),
        result.ranking(8),
    )


def _layers_section(result: Result) -> viz.Section:
    return viz.Section(
        "What attention and MLPs add",
        "What each sublayer adds to the stream, one position at a time.",
        viz.Plate(_layer_map(result, result.attn), "Clean attention outputs (`hook_attn_out`) put in."),
        viz.Plate(_layer_map(result, result.mlp), "Clean MLP outputs (`hook_mlp_out`) put in."),
    )


def _layer_map(result: Result, values: Float[Tensor, "layer pos"]) -> Any:
    layers = [f"layer {layer}" for layer in range(len(values))]
    return viz.heatmap(values, result.tokens, layers, value_name="restored", show_values=True)


def _patterns_section(result: Result) -> viz.Section:
    top = result.top_heads(SHOWN_HEADS)
    labels = [f"head {layer}.{head}, restores {result.heads[layer, head]:.0%}" for layer, head in top]
    patterns = torch.stack([result.patterns[layer, head] for layer, head in top])
    return viz.Section(
        "Where these heads look",
        "Attention of the heads with the largest effects in the clean runs, from the token of a row to the token of a "
        "column, on average over the pairs.",
        viz.Plate(viz.attention_patterns(patterns, result.tokens, labels), "Each row of a panel sums to 1."),
    )
