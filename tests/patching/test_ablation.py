"""Ablation: each cell is one forward pass with one component replaced as documented."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import metrics
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.patching import SweepInterrupted, ablate
from hooked_lm.patching.ablation import SITES, _donors
from tests.close import LAYER, assert_apart, assert_close
from tests.core import thinned
from tests.engine.small import (
    built,
    cached,
    close,
    global_generator_untouched,
    ids,
    no_hook_is_left,
    no_sweep,
    run,
    score,
    setting,
    stopping_after,
)
from tests.models.toys import toy, words

KINDS = ["standard", "rotary", "parallel", "post_norm", "attn_only", "hybrid", "delta rule", "mixture"]
N_HEADS, SOME_NEURONS, SOME_POSITIONS = 4, [0, 7, 3], [1, -1]
ADDED = ("hook_attn_out", "hook_mixer_out", "hook_mlp_out")
ALL = slice(None)
Part = tuple[tuple[int, ...], list[str], Any]  # a place of the grid, the sites, and what of them


def parts(what: str, n_layers: int) -> Iterator[Part]:
    """The sites and indices that a cell ablates, derived independently."""
    for layer in range(n_layers):
        block = f"blocks.{layer}."
        if what == "heads":
            yield from (((layer, h), [f"{block}attn.hook_z"], (ALL, ALL, h)) for h in range(N_HEADS))
        elif what == "neurons":
            some = enumerate(SOME_NEURONS)
            yield from (((layer, i), [f"{block}mlp.hook_post"], (ALL, ALL, n)) for i, n in some)
        elif what == "positions":
            some = enumerate(SOME_POSITIONS)
            yield from (((layer, i), [f"{block}hook_resid_pre"], (ALL, pos)) for i, pos in some)
        else:
            names = {"mlps": ADDED[2:], "attention": ADDED[:2], "layers": ADDED}[what]
            yield (layer,), [block + name for name in names], ...


def by_hand(model: HookedTransformer, tokens: Tensor, what: str, values: dict[str, Tensor]) -> Tensor:
    """One forward pass per cell."""
    cells = list(parts(what, model.cfg.n_layers))
    shape = [1 + max(place[axis] for place, *_ in cells) for axis in range(len(cells[0][0]))]
    expected = torch.full((*shape, len(tokens)), torch.nan)
    for place, sites, index in cells:
        there = [site for site in sites if site in model.all_points()]
        if there:
            expected[place] = run(model, tokens, *((site, setting(index, values[site])) for site in there))
    return expected


def left(model: HookedTransformer, tokens: Tensor) -> dict[str, Tensor]:
    """The values of a run at all sites that some cell ablates."""
    ends = ("hook_z", "mlp.hook_post", "hook_resid_pre", *ADDED)
    return {site: value for site, value in cached(model, tokens).items() if site.endswith(ends)}


def choices(what: str) -> dict[str, Any]:
    return {"neurons": {"neurons": SOME_NEURONS}, "positions": {"positions": SOME_POSITIONS}}.get(what, {})


def exists(kind: str, what: str) -> bool:
    return kind != "attn_only" or what not in ("mlps", "neurons")


PARTS = [(kind, what) for kind in KINDS for what in SITES if exists(kind, what)]


@pytest.mark.parametrize(
    ("kind", "what"), thinned(PARTS, keep=[row for row in PARTS if row[0] in ("rotary", "hybrid")])
)
def test_a_cell_is_a_forward_pass_with_that_component_ablated(kind: str, what: str):
    """Two prompts are resampled from each other; the data sets have rows of several lengths, one as long as the prompts."""
    model, tokens = built(kind), ids()
    cache, swapped = left(model, tokens), left(model, tokens.flip(0))
    rows = [ids(1, n_pos, seed=n_pos)[0] for n_pos in (3, 5, 6, 8)]
    caches = [left(model, row[None]) for row in rows]
    of_rows = {site: torch.cat([cache[site] for cache in caches], 1) for site in cache}
    kinds: list[tuple[str, Any, dict[str, Tensor]]] = [
        ("zero", None, {site: torch.zeros_like(value) for site, value in cache.items()}),
        ("mean", None, {site: value.mean((0, 1), keepdim=True).expand_as(value) for site, value in cache.items()}),
        ("mean", rows, {site: of_rows[site].mean((0, 1), keepdim=True).expand_as(cache[site]) for site in of_rows}),
        ("resample", None, swapped),
        ("resample", rows, {site: value.expand_as(cache[site]) for site, value in caches[2].items()}),
    ]
    for kind, dataset, values in kinds:
        found = ablate(
            model,
            tokens,
            what,
            metric=score,
            replace_with=kind,
            source_prompts=dataset,
            progress=False,
            **choices(what),
        )
        close(found.values, by_hand(model, tokens, what, values))
        assert_close(found.corrupted, score(model(tokens)))
        assert found.clean is None
        assert list(found.axes) == ["layer", "head", "neuron", "position"][:1] + (
            [what[:-1]] if what in ("heads", "neurons", "positions") else []
        )


# ---- what it means ---------------------------------------------------------------------------------------------------


def test_all_heads_of_a_layer_together_leave_the_output_bias():
    model, tokens = built("standard"), ids()
    found = ablate(model, tokens, "heads", heads=None, metric=score, progress=False)
    assert list(found.axes) == ["layer"]
    for layer in range(model.cfg.n_layers):
        biased = model.blocks[layer].attn.b_O.expand(*tokens.shape, -1)
        expected = run(model, tokens, (f"blocks.{layer}.hook_attn_out", setting(..., biased)))
        assert_close(found.values[layer], expected)


@pytest.mark.parametrize("kind", ["standard", "parallel", "hybrid", "mixture"])
def test_without_any_layer_only_the_embedding_remains(kind: str):
    model, tokens = built(kind), ids()
    found = ablate(model, tokens, "layers", layers=None, metric=score, progress=False)
    assert found.values.shape == (2,)
    embedded = model.embedded(tokens)[0]
    logits = model.cap_logits(model.unembed(norm_of(model, "ln_final")(embedded)))
    assert_close(found.values, score(logits))


def test_a_prompt_of_one_token_resampled_at_the_start_is_the_other_prompt():
    model, tokens = built("rotary"), ids(2, 1)
    found = ablate(
        model, tokens, "positions", replace_with="resample", metric=lambda x: x[:, 0, 3], layers=[0], progress=False
    )
    assert_close(found.values[0, 0], model(tokens)[:, 0, 3].flip(0))


def test_texts_and_several_metrics():
    model = toy(tokenizer=words())
    two = {"three": score, "four": lambda logits: logits[:, -1, 4]}
    prompts, dataset = ["w3 w4 w5", "w6 w7 w8"], ["w9", "w3 w4 w5"]
    found = ablate(model, prompts, "mlps", metric=two, replace_with="mean", source_prompts=dataset, progress=False)
    assert dict(found.axes) == {"metric": ("three", "four"), "layer": (0, 1, 2)}
    rows = [model.to_tokens(text)[0] for text in dataset]
    tokens = model.to_tokens(prompts)
    alone = ablate(model, tokens, "mlps", metric=two["four"], replace_with="mean", source_prompts=rows, progress=False)
    assert_close(found.select(metric="four").values, alone.values)


def test_parts_that_a_layer_lacks_are_nan():
    found = ablate(built("hybrid"), ids(), "heads", metric=score, progress=False).values.isnan()
    assert found[[0, 2]].all()
    assert not found[1].any()
    found = ablate(built("mixture"), ids(), "neurons", metric=score, progress=False).values.isnan()
    assert found[1].all()
    assert not found[0].any()


# ---- draws -----------------------------------------------------------------------------------------------------------


def test_a_seed_repeats_and_leaves_the_global_generator_alone():
    model, tokens = built("rotary"), ids(6)

    def values(seed: int) -> Tensor:
        with global_generator_untouched():
            return ablate(
                model, tokens, "mlps", metric=score, replace_with="resample", seed=seed, progress=False
            ).values

    assert torch.equal(values(0), values(0))
    assert_apart(values(0), values(1))


@pytest.mark.parametrize("batch", [2, 3, 7])
def test_no_prompt_is_given_its_own_values(batch: int):
    tokens = torch.arange(batch)[:, None]
    model, rows = built("standard"), [*tokens[:, None], torch.tensor([[50]])]
    seen = set()
    for seed in range(40):
        [donors] = _donors(model, tokens, None, seed)
        [drawn] = _donors(model, tokens, rows, seed)
        assert sorted(donors.flatten().tolist()) == list(range(batch))
        assert not (donors == tokens).any()
        assert not (drawn == tokens).any()
        seen.add(tuple(drawn.flatten().tolist()))
    assert len(seen) > batch, "always the same rows"


# ---- bad input -------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"components": "head"}, ValueError, "components must be one of heads, .*'head'"),
    ({"replace_with": "median"}, ValueError, "replace_with must be one of 'zero', 'mean', 'resample', got 'median'"),
    ({"source_prompts": ids()}, ValueError, "'zero' does not use source_prompts"),
    ({"replace_with": "mean", "source_prompts": []}, ValueError, "source_prompts is empty"),
    (
        {"replace_with": "resample", "prompts": ids(1)},
        ValueError,
        "values of other prompts: give several, or source_prompts",
    ),
    (
        {"replace_with": "resample", "source_prompts": ids(3, 4)},
        ValueError,
        r"the 6 tokens of prompt 0 .* these 3 have \[4\]",
    ),
    ({"replace_with": "resample", "source_prompts": ids()[1:]}, ValueError, "prompt 1 and differs from it"),
    (
        {"components": "mlps", "heads": [1]},
        ValueError,
        r"heads=\[1\] goes with components='heads', but components='mlps'",
    ),
    ({"neurons": None}, ValueError, "neurons=None goes with components='neurons'"),
    ({"layers": [3]}, IndexError, "layer 3 is out of range"),
    ({"layers": []}, ValueError, "layer is empty"),
    ({"heads": [0, 4]}, IndexError, "head 4 is out of range"),
    ({"components": "positions", "positions": [6]}, IndexError, "position 6 is out of range"),
    (
        {"components": "heads", "layers": [0, 2]},
        KeyError,
        "no hook point 'blocks.0.attn.hook_z': .* exists for layer 1",
    ),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_mistakes_are_refused_before_the_sweep(
    arguments: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
):
    model = built("hybrid")
    with no_sweep(monkeypatch), pytest.raises(error, match=message):
        ablate(model, **{"prompts": ids(), "metric": score, **arguments})
    assert no_hook_is_left(model)


def test_layers_of_experts_have_no_neurons(monkeypatch: pytest.MonkeyPatch):
    with (
        no_sweep(monkeypatch),
        pytest.raises(KeyError, match=r"no hook point 'blocks\.1\.mlp\.hook_post': .* exists for layer 0"),
    ):
        ablate(built("mixture"), ids(), "neurons", metric=score, layers=[1])


def test_an_interrupt_keeps_the_scores_and_leaves_no_hook():
    model = built("rotary")
    with pytest.raises(SweepInterrupted) as caught:
        ablate(model, ids(), "heads", metric=stopping_after(5), replace_with="mean", progress=False)
    assert 0 < int((~caught.value.result.values.isnan()).all(-1).sum()) < 12
    assert no_hook_is_left(model)


def test_prompts_of_several_lengths_run_as_their_error_says():
    """Ids padded on the right, with a metric at the last token of each, are as each prompt alone."""
    model = toy(tokenizer=words())
    prompts, answers = ["w3 w4 w5", "w6", "w7 w8"], ["w9", "w10", "w11"]
    with pytest.raises(ValueError, match=r"prompts=model.to_tokens\(prompts, padding_side='right'\)") as error:
        ablate(model, prompts, metric=metrics.logit(answers, model=model))
    ends = re.search(r"positions=torch\.tensor\((\[[\d, ]+\])\)", str(error.value))
    assert ends is not None
    metric = metrics.logit(answers, positions=torch.tensor(json.loads(ends[1])), model=model)
    together = ablate(model, model.to_tokens(prompts, padding_side="right"), metric=metric)
    alone = [
        ablate(model, prompt, metric=metrics.logit([answer], model=model)).values
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    assert_close(together.values, torch.cat(alone, -1), LAYER)
