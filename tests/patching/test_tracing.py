"""Causal tracing: each cell is, for each sample, a forward pass with noise on the subject and clean values in a window."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoder, HookedTransformer
from hooked_lm.analysis import metrics
from hooked_lm.patching import SweepInterrupted, causal_trace
from hooked_lm.patching.tracing import subject_tokens
from tests.close import assert_apart, assert_close
from tests.core import thinned
from tests.engine.small import (
    built,
    cached,
    close,
    global_generator_untouched,
    ids,
    no_hook_is_left,
    no_sweep,
    score,
    setting,
    stopping_after,
)
from tests.models.toys import toy, words

N_SAMPLES, SUBJECT = 2, [1, 2]
KINDS = ["standard", "rotary", "parallel", "post_norm", "shortformer", "hybrid", "delta rule", "mixture"]


def noises(embed: Tensor, subject: Sequence[int], noise: float, seed: int) -> list[Tensor]:
    """The noise of each sample, drawn again: normal, in units of the spread of the subject's embeddings."""
    generator = torch.Generator().manual_seed(seed)
    spread = noise * embed[:, subject].std()
    return [
        spread * torch.randn(len(embed) * len(subject), embed.shape[2], generator=generator) for _ in range(N_SAMPLES)
    ]


def by_hand(
    model: HookedTransformer, tokens: Tensor, site: str, window: int, noise: float = 3.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """The metric of each cell [layer, pos, run], and of the runs with noise."""
    clean, n_layers = cached(model, tokens), model.cfg.n_layers
    cells = torch.full((n_layers, tokens.shape[1], N_SAMPLES, len(tokens)), torch.nan)
    corrupted = []
    for sample, drawn in enumerate(noises(clean["hook_embed"], SUBJECT, noise, seed)):

        def make_noise(embed: Tensor, hook: Any, drawn: Tensor = drawn) -> Tensor:
            embed = embed.clone()
            embed[:, SUBJECT] += drawn.view(len(tokens), len(SUBJECT), -1)
            return embed

        corrupted.append(score(model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", make_noise)])))
        for layer in range(n_layers):
            near = [i for i in range(n_layers) if -(window // 2) <= i - layer < (window + 1) // 2]
            there = [name for i in near if (name := f"blocks.{i}.hook_{site}") in model.all_points()]
            for pos in range(tokens.shape[1]) if there else ():
                restore = [(name, setting((slice(None), pos), clean[name])) for name in there]
                logits = model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", make_noise), *restore])
                cells[layer, pos, sample] = score(logits)
    return cells.flatten(2), torch.cat(corrupted)


@pytest.mark.slow
@pytest.mark.parametrize("kind", thinned(KINDS, keep=["rotary", "hybrid"]))
def test_a_cell_is_a_forward_pass_with_noise_and_a_window_restored(kind: str):
    model, tokens = built(kind), ids(2, 4)
    for site, window in (("resid_post", 1), ("attn_out", 2), ("mlp_out", 3)):
        found = causal_trace(
            model, tokens, SUBJECT, metric=score, sites=site, window=window, n_samples=N_SAMPLES, progress=False
        )
        expected, corrupted = by_hand(model, tokens, site, window)
        close(found.values, expected)
        assert_close(found.corrupted, corrupted)
        assert_close(found.clean, score(model(tokens)).repeat(N_SAMPLES))
        assert list(found.axes) == ["layer", "position"]


def trace(model: HookedTransformer, tokens: Any, subject: Any = SUBJECT, **options: Any) -> Any:
    return causal_trace(model, tokens, subject, **{"metric": score, "n_samples": 2, "progress": False, **options})


# ---- what it means ---------------------------------------------------------------------------------------------------


def test_restoring_everything_gives_the_clean_run():
    """The last token after the last layer; or all tokens after the first, if the metric reads nothing earlier."""
    model, tokens = built("rotary"), ids()
    last = lambda logits: logits[:, -1, 3]  # noqa: E731
    found = trace(model, tokens, metric=last, sites="resid_post")
    assert_close(found.values[-1, -1], found.clean)
    assert_close(found.values[0, 0], found.corrupted, msg="no noise has come to this token")
    found = trace(model, tokens, sites="resid_post", positions=None)
    assert list(found.axes) == ["layer"]
    assert_close(found.values, found.clean.expand(3, -1))
    found = trace(model, tokens, sites=["attn_out", "mlp_out"], positions=None, layers=None)
    assert list(found.axes) == ["site"]


def test_noise_changes_positions_from_the_subject_on():
    model, tokens = built("rotary"), ids()
    before = trace(model, tokens, 2, metric=lambda logits: logits[:, 1, 3])
    assert_close(before.corrupted, before.clean)
    behind = trace(model, tokens, 2, metric=lambda logits: logits[:, 2, 3])
    assert (behind.corrupted - behind.clean).abs().min() > 1e-3


def test_sites_are_those_that_the_model_has():
    assert trace(built("rotary"), ids()).axes["site"] == ("resid_post", "attn_out", "mlp_out")
    found = trace(built("hybrid"), ids())
    assert found.axes["site"] == ("resid_post", "attn_out", "mixer_out", "mlp_out")
    missing = found.values.isnan().all(-1).all(-1)
    assert missing.int().tolist() == [[0, 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 1]]
    assert "site" not in trace(built("states"), ids(), sites=["resid_post"]).axes


def test_a_layer_of_a_list_has_the_window_around_it():
    model, tokens = built("standard"), ids()
    every = trace(model, tokens, window=3, sites="mlp_out", positions=[0, -2])
    some = trace(model, tokens, window=3, sites="mlp_out", positions=[0, -2], layers=[2, 0])
    assert dict(some.axes) == {"layer": (2, 0), "position": (0, 4)}
    assert_close(some.values, every.values[[2, 0]])


def test_an_encoder_is_traced_by_whole_forward_passes():
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "n_ctx": 8, "d_vocab": 20, "act_fn": "gelu"}
    model, tokens = HookedEncoder({**sizes, "seed": 0, "initializer_range": 0.5}).requires_grad_(False), ids()
    found = trace(model, tokens, sites="mlp_out")
    clean = cached(model, tokens)
    for sample, drawn in enumerate(noises(clean["embed.hook_embed"], SUBJECT, 3.0, 0)):
        noised = clean["embed.hook_embed"].clone()
        noised[:, SUBJECT] += drawn.view(2, 2, -1)
        for layer in range(2):
            restored = f"blocks.{layer}.hook_mlp_out", setting((slice(None), 3), clean[f"blocks.{layer}.hook_mlp_out"])
            expected = score(
                model.run_with_hooks(tokens, fwd_hooks=[("embed.hook_embed", setting(..., noised)), restored])
            )
            mine = found.values[layer, 3].view(2, 2)[sample]
            assert_close(mine, expected)


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_a_seed_repeats_and_the_first_draws_do_not_depend_on_their_number():
    model, tokens = built("rotary"), ids(3)

    def corrupted(**options: Any) -> Tensor:
        with global_generator_untouched():
            return trace(model, tokens, sites="mlp_out", **options).corrupted.view(-1, 3)

    first = corrupted()
    assert torch.equal(first, corrupted())
    assert_apart(first, corrupted(seed=1))
    assert_close(first, corrupted(n_samples=5)[:2])
    assert (first[0] - first[1]).abs().min() > 1e-3, "the samples are the same"
    assert (first - corrupted(noise=1e-6)).abs().max() > (corrupted(noise=1e-6) - score(model(tokens))).abs().max()


def test_noise_is_in_units_of_the_embeddings():
    model, tokens = built("rotary"), ids(2)
    with torch.no_grad():
        model.embed.W_E *= 7
    expected = by_hand(model, tokens, "mlp_out", 1, noise=0.5, seed=4)[1]
    found = trace(model, tokens, sites="mlp_out", noise=0.5, seed=4, n_samples=N_SAMPLES)
    assert_close(found.corrupted, expected)


def at_most(logits: Tensor) -> Tensor:
    """It reads other logits of each run."""
    best = int(logits[:, -1].argmax(-1)[0])
    return logits[:, -1 - best % 3, 3]


METRICS: dict[str, Callable[[Tensor], Any]] = {
    "tokens of each prompt": metrics.logit_difference(torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8])),
    "positions of each prompt": metrics.probability(3, positions=torch.tensor([3, 4, 5])),
    "several positions": metrics.log_probability([[3, 4]], positions=[3, 5]),
    "of one's own": lambda logits: logits[:, [2, -1]].softmax(-1)[:, :, 3].sum(1),
    "reads by what it sees": at_most,
}


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_sees_the_prompts_of_one_sample_at_a_time(name: str):
    model, tokens, metric = built("rotary"), ids(3), METRICS[name]
    found = trace(model, tokens, metric=metric, sites="resid_post", positions=[2, 5])
    one = trace(model, tokens, metric={"this": metric, "other": score}, sites="resid_post", positions=[2, 5])
    assert_close(one.select(metric="this").values, found.values)
    clean = cached(model, tokens)
    for sample, drawn in enumerate(noises(clean["hook_embed"], SUBJECT, 3.0, 0)[:2]):
        noised = clean["hook_embed"].clone()
        noised[:, SUBJECT] += drawn.view(3, 2, -1)
        for number, pos in enumerate((2, 5)):
            restore = setting((slice(None), pos), clean["blocks.1.hook_resid_post"])
            hooks = [("hook_embed", setting(..., noised)), ("blocks.1.hook_resid_post", restore)]
            expected = metric(model.run_with_hooks(tokens, fwd_hooks=hooks))
            mine = found.values[1, number].view(2, 3)[sample]
            assert_close(mine, expected)


def test_one_number_for_all_prompts_is_the_mean_over_samples():
    model, tokens = built("rotary"), ids(3)
    found = trace(model, tokens, metric=lambda logits: score(logits).mean(), sites="resid_post")
    each = trace(model, tokens, sites="resid_post")
    assert found.values.shape == (3, 6, 1)
    assert_close(found.mean, each.mean)
    alone = trace(model, tokens[:1], metric=lambda logits: score(logits).mean(), sites="resid_post")
    assert alone.values.shape == (3, 6, 2), "of one prompt it is the number of that prompt"


# ---- the subject -----------------------------------------------------------------------------------------------------


def test_a_subject_is_positions_or_a_text_anywhere():
    model = toy(tokenizer=words())
    tokens = model.to_tokens(["w3 w4 w5 w6", "w7 w3 w4 w3", "w4 w5 w4 w5"])
    assert tokens.shape == (3, 5), "with <s>"

    def where(subject: Any) -> list[list[int]]:
        return [row.nonzero().flatten().tolist() for row in subject_tokens(model, tokens, subject)]

    assert where(2) == where([2]) == [[2]] * 3
    assert where(range(1, 3)) == where([2, 1]) == [[1, 2]] * 3
    assert where([-1]) == [[4]] * 3
    assert where("w4") == [[2], [3], [1, 3]]
    assert where("w4 ") == where(" w4") == where("w4")
    assert where(["w4 w5", "w7", "w5"]) == [[2, 3], [1], [2, 4]]
    assert where("w4 w") == [[2, 3], [3, 4], [1, 2, 3, 4]], "a token counts if any of it does"


def test_prompts_with_their_subjects_in_different_places():
    """Equal to tracing each prompt separately: each gets noise on its own subject only."""
    model = toy(tokenizer=words())
    prompts = ["w3 w4 w5 w6", "w7 w8 w3 w9"]
    metric = lambda logits: torch.stack([logits[:, 1, 3], logits[:, -1, 3]], 1)  # noqa: E731
    at_one, at_end = (trace(model, prompts, "w3", metric=lambda x, i=i: metric(x)[:, i]) for i in (0, 1))
    moved = (at_one.corrupted - at_one.clean).view(2, 2).abs()
    assert (moved[:, 0] > 1e-3).all(), "the first prompt's subject is its first word"
    assert_close(moved[:, 1], 0.0, scale=at_one.clean, msg="and the other's is not")
    assert ((at_end.corrupted - at_end.clean).abs() > 1e-3).all()
    assert [*at_end.axes["position"]] == ["0 <s>", 1, 2, 3, 4]


# ---- bad input -------------------------------------------------------------------------------------------------------

WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"subject": []}, ValueError, "subject is empty"),
    ({"subject": ""}, ValueError, "subject is empty"),
    ({"subject": "w33"}, ValueError, "the subject 'w33' is not in the prompt '<s> w3 w4 w5'"),
    ({"subject": ["w3"]}, ValueError, "subject has 1 texts, but there are 2 prompts"),
    ({"subject": [4]}, IndexError, "position 4 is out of range"),
    ({"noise": 0.0}, ValueError, "noise must be a positive number, got 0.0"),
    ({"noise": float("nan")}, ValueError, "noise must be a positive number, got nan"),
    ({"n_samples": 0}, ValueError, "n_samples must be a positive number, got 0"),
    ({"window": 0}, ValueError, "window must be a number of layers from 1 on, got 0"),
    ({"sites": []}, ValueError, "sites is empty"),
    ({"sites": "mixer_out"}, KeyError, "no hook point 'blocks.0.hook_mixer_out'; did you mean"),
    ({"layers": [3]}, IndexError, "layer 3 is out of range"),
    ({"positions": [-5]}, IndexError, "position -5 is out of range"),
    ({"prompts": ["w3", "w3 w4"]}, ValueError, r"these have \[2, 3\]; call .* positions=torch.tensor\(\[1, 2\]\)"),
    ({"metric": lambda logits: logits[:, -1]}, ValueError, "one for each of the 2 prompts"),
    ({"metric": lambda logits: logits[:, -1, 0] * torch.nan}, ValueError, "is NaN"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_mistakes_are_refused_before_the_sweep(
    arguments: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
):
    model = toy(tokenizer=words())
    right = {"prompts": ["w3 w4 w5", "w6 w7 w8"], "subject": [1], "metric": lambda logits: logits[:, -1, 3]}
    with no_sweep(monkeypatch), pytest.raises(error, match=message):
        causal_trace(model, **{**right, **arguments})
    assert no_hook_is_left(model)


def test_a_text_needs_a_tokenizer():
    with pytest.raises(ValueError, match="needs a tokenizer, which this model lacks: give positions"):
        trace(built("rotary"), ids(), "w3")


def test_an_interrupt_keeps_the_scores_and_leaves_no_hook():
    model = built("rotary")
    with pytest.raises(SweepInterrupted) as caught:
        trace(model, ids(), metric=stopping_after(20), sites="mlp_out")
    assert 0 < int((~caught.value.result.values.isnan()).all(-1).sum()) < 18
    assert no_hook_is_left(model)
