"""Steering: directions that are planted are found, steered runs are what a hand-written hook makes of them."""

import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis import metrics
from hooked_lm.demo import corpus
from hooked_lm.hooks import wrap
from hooked_lm.interventions.contrast import METHODS, METRICS, Sides, Split, rank_heads
from hooked_lm.interventions.steered_texts import repeated_share, steered_texts
from hooked_lm.interventions.steering import SteeringVectors, steering_vectors
from hooked_lm.interventions.steering_sweep import sweep_steering
from hooked_lm.results.bootstrap import bootstrap, wilson
from hooked_lm.results.scores import Scores
from tests.close import assert_apart, assert_close, assert_near
from tests.families import DECODER_CASES, ENCODER_CASES, ENCODER_DECODER_CASES
from tests.families._models import hooked, prompt
from tests.unchecked import unchecked

WIDTH, N = 24, 64  # of the toy's stream; pairs
N_NEW = 4  # tokens
PROMPTS = ["Mary went home because", "Yesterday, the lamps behind the door", "Paul"]
POSITIONS = ["all", "prompt", "last_prompt", "generated"]


@cache
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def women_and_men(n: int = 24) -> tuple[list[str], list[str]]:
    """Pairs that differ in length here and there."""
    ends = ("was ill, so", "slept late because", "called the doctor when")
    return tuple([f"{name} {ends[i % 3]}" for i, name in enumerate(names[:n])] for names in NAMES)  # type: ignore[return-value]


pytestmark = pytest.mark.filterwarnings("ignore:steering at layer .* adds")  # the tests of sums; see test_doses
NAMES = (corpus.FEMALE_NAMES, corpus.MALE_NAMES)


@cache
def vectors() -> SteeringVectors:
    return steering_vectors(demo(), *women_and_men())


def by_hand(model: Any, width: int, site: str = "resid_post", seed: int = 0) -> SteeringVectors:
    """Random directions of length 1 for all layers of a model."""
    layers = list(range(model.cfg.n_layers))
    drawn = torch.nn.functional.normalize(
        torch.randn(len(layers), width, generator=torch.Generator().manual_seed(seed))
    )
    values = torch.ones(len(METRICS), len(layers), 2, 3)
    separation = Scores(values, {"metric": METRICS, "layer": layers, "of": ["mean", "random"]})
    return SteeringVectors(dict(enumerate(drawn)), dict.fromkeys(layers, 0.0), separation, site, "mean")


# ---- directions ------------------------------------------------------------------------------------------------------


@cache
def planted() -> tuple[HookedTransformer, Tensor]:
    """A model whose stream is its embedding: tokens 2 i and 2 i + 1 are a pair, noise and a direction apart."""
    cfg = HookedTransformerConfig(
        n_layers=2, d_model=WIDTH, n_heads=2, d_head=4, n_ctx=3, d_vocab=2 * N, attn_only=True, normalization_type=None,
        positional_embedding_type="none", device="cpu", seed=0,
    )  # fmt: skip
    model, noise = HookedTransformer(cfg).requires_grad_(False), torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.zero_()
    direction = torch.nn.functional.normalize(torch.randn(WIDTH, generator=noise), dim=0)
    sides = torch.tensor([1.0, -1.0]).repeat(N)[:, None]
    model.embed.W_E.copy_(2 * torch.randn(WIDTH, generator=noise) + 0.5 * torch.randn(2 * N, WIDTH, generator=noise))
    model.embed.W_E += 1.5 * sides * direction
    return model, direction


def planted_pairs() -> tuple[Tensor, Tensor]:
    tokens = torch.arange(2 * N).view(N, 2)
    return tokens[:, :1], tokens[:, 1:]


@pytest.mark.parametrize("method", METHODS)
def test_a_planted_direction_is_found(method: str) -> None:
    model, direction = planted()
    found = steering_vectors(model, *planted_pairs(), method=method)
    for layer in found.layers:
        ours = found.directions[layer]
        assert torch.cosine_similarity(ours, direction, dim=0) > 0.95
        assert_near(
            ours @ direction, 3.0, 0.1, because="as long as the sides are apart, but for the noise of the pairs"
        )
    accuracy, auc, d_prime = found.separation.select(of=method, layer=1).mean
    assert accuracy > 0.95
    assert auc > 0.99
    assert_near(d_prime, 6, 1 / 3, because="an estimate from few pairs")
    assert 0.6 < found.separation.select(of="random", metric="auc", layer=1).mean < 0.9  # their signs are fitted, too
    back = steering_vectors(model, *reversed(planted_pairs()), method=method)
    assert_close(back.directions[0], -found.directions[0])


def test_pairs_that_are_all_separated_still_have_an_interval(tmp_path: Path) -> None:
    """Six held-out pairs on the right side do not make all pairs."""
    found = vectors()
    found.save(tmp_path / "vectors")
    for separation in (found.separation, SteeringVectors.load(tmp_path / "vectors").separation):
        part = separation.select(of="mean")
        low, high = part.interval()
        is_full = part.mean == 1
        assert is_full[:2].any()
        assert (high - low)[:2].min() > 0.2
        assert_close(low[:2][is_full[:2]].min(), wilson(torch.ones(6))[0])
        assert (part.select(metric="auc").top(3)["high"] == 1).all()
        d_prime = part.select(metric="d_prime")
        assert_close(torch.stack(d_prime.interval()), torch.stack(bootstrap(d_prime.values)))


@pytest.mark.parametrize("method", METHODS)
def test_shuffled_sides_are_told_apart_by_chance(method: str) -> None:
    positive, negative = planted_pairs()
    swap = (torch.rand(N, 1, generator=torch.Generator().manual_seed(3)) < 0.5).expand(-1, 1)
    shuffled = torch.where(swap, negative, positive), torch.where(swap, positive, negative)
    found = steering_vectors(planted()[0], *shuffled, method=method, held_out=0.5)
    assert (found.separation.select(metric="auc").mean - 0.5).abs().max() < 0.25
    assert (found.separation.select(metric="accuracy").mean - 0.5).abs().max() < 0.25


def read_alone(texts: list[str], positions: list[int | str], layer: int) -> Tensor:
    """What each prompt leaves by itself, at a position or in the mean."""
    values = [
        demo().run_with_cache(text, names_filter=[("resid_post", layer)])[1]["resid_post", layer][0].detach()
        for text in texts
    ]
    return torch.stack([v.mean(0) if isinstance(at, str) else v[at] for v, at in zip(values, positions, strict=True)])


@pytest.mark.parametrize(
    ("positions", "sides"),
    [
        (-1, ([-1] * 12, [-1] * 12)),
        ("mean", (["mean"] * 12, ["mean"] * 12)),
        ([1, -2] * 6, ([1, -2] * 6, [1, -2] * 6)),
        (torch.tensor([[-1, -2]] * 12), ([-1] * 12, [-2] * 12)),
    ],
    ids=["last", "mean", "by pair", "by side"],
)
def test_mean_directions_and_their_separation_by_hand(positions: Any, sides: Any) -> None:
    texts = women_and_men(12)
    found = steering_vectors(demo(), *texts, positions=positions, batch_size=7, layers=[2], seed=5, held_out=0.34)
    up, down = (read_alone(side, places, 2) for side, places in zip(texts, sides, strict=True))
    order = torch.randperm(12, generator=torch.Generator().manual_seed(5))
    held, train = order[:4].sort().values, order[4:].sort().values
    direction = up[train].mean(0) - down[train].mean(0)
    assert_close(found.directions[2], direction)
    threshold = ((up[train] @ direction).mean() + (down[train] @ direction).mean()) / 2
    high, low = up[held] @ direction, down[held] @ direction
    accuracy = ((high > threshold).float().mean() + (low < threshold).float().mean()) / 2
    auc = sum(float(one > other) for one in high for other in low) / 16
    scores = found.separation.select(layer=2, of="mean")
    assert scores.n_prompts == 4
    assert_close(scores.mean[:2], torch.tensor([accuracy, auc]))
    deviation = ((high.var(correction=0) + low.var(correction=0)) / 2).sqrt()
    assert_close(scores.mean[2], (high - low).mean() / deviation)
    assert_close(found.midpoints[2], float(threshold / direction.square().sum()))


def test_what_the_split_is_and_that_nobody_else_draws() -> None:
    state = torch.random.get_rng_state()
    one, same = (steering_vectors(demo(), *women_and_men(8), method="logistic", seed=2) for _ in range(2))
    other = steering_vectors(demo(), *women_and_men(8), method="logistic", seed=3)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(one.directions[layer], same.directions[layer]) for layer in one.layers)
    assert torch.equal(one.separation.values, same.separation.values)
    assert not torch.equal(one.directions[2], other.directions[2])
    split = Split.drawn(8, 0.25, torch.Generator().manual_seed(2))
    assert sorted([*split.train.tolist(), *split.held.tolist()]) == list(range(8))
    assert len(split.held) == 2
    assert one.about["seed"] == 2
    assert one.about["held_out_pairs"] == 2
    assert one.about["model"] == "demo"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_probe_is_trained_where_no_gradients_are_wanted(mode: Any) -> None:
    expected = steering_vectors(demo(), *women_and_men(4), method="logistic", layers=[2])
    with mode():
        found = steering_vectors(demo(), *women_and_men(4), method="logistic", layers=[2])
        assert torch.equal(found.directions[2], expected.directions[2])


def test_layers_behind_the_last_that_is_read_do_not_run() -> None:
    ran: list[int] = []
    handles = [block.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, block in enumerate(demo().blocks)]
    steering_vectors(demo(), ["Mary was ill, so"] * 2, ["Tom was ill, so"] * 2, layers=[0, 1])
    for handle in handles:
        handle.remove()
    assert ran == [0, 1, 0, 1]


def test_ties_count_half() -> None:
    flat = torch.zeros(4, 3)
    split = Split(torch.tensor([0, 1]), torch.tensor([2, 3]))
    assert Sides(flat, flat, split).separation(torch.ones(1, 3)).tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]
    up, down = torch.tensor([2.0, 2, 1, 3])[:, None], torch.tensor([-2.0, -2, 0, 2])[:, None]
    assert Sides(up, down, split).separation(torch.ones(1, 1)).tolist() == [[0.75, 0.5], [0.75, 0.75], [1.0, 1.0]]


def test_one_held_out_pair_has_no_deviation() -> None:
    found = steering_vectors(demo(), *women_and_men(2), layers=[2]).separation.select(of="mean", layer=2)
    assert found.n_prompts == 1
    assert found.select(metric="d_prime").mean.isnan()
    assert not found.select(metric="auc").mean.isnan()


def test_the_model_is_as_it_was() -> None:
    model = demo()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    flags = [weight.requires_grad for weight in model.parameters()]
    steering_vectors(model, *women_and_men(6), method="logistic")
    with pytest.raises(IndexError, match="position 40"):
        steering_vectors(model, *women_and_men(6), positions=40)
    assert not model.list_hooks()
    assert flags == [weight.requires_grad for weight in model.parameters()]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


# ---- steered runs ----------------------------------------------------------------------------------------------------


def test_a_steered_run_is_that_of_a_hand_written_hook_and_nothing_else_changes() -> None:
    model, tokens = demo(), demo().to_tokens(PROMPTS[1])
    direction = vectors().directions[2]

    def add(value: Tensor, hook: Any) -> Tensor:
        return value + 1.5 * direction

    sites = ["blocks.2.hook_mlp_out", "blocks.2.hook_resid_post", "blocks.3.hook_attn_out"]
    _, plain = model.run_with_cache(tokens, names_filter=sites)
    with model.hooks(vectors().hooks(1.5, layers=2)):
        steered, cache = model.run_with_cache(tokens, names_filter=sites)
    assert_close(steered, model.run_with_hooks(tokens, fwd_hooks=[(("resid_post", 2), add)]))
    assert torch.equal(cache[sites[0]], plain[sites[0]])
    assert not torch.equal(cache[sites[2]], plain[sites[2]])
    assert_close(cache[sites[1]], plain[sites[1]] + 1.5 * direction)
    with model.hooks([*vectors().hooks(1.5, layers=2), *vectors().hooks(-1.5, layers=2)]):
        assert torch.equal(model(tokens), model(tokens))
        assert_apart(model(tokens), steered)
    assert_close(model(tokens), model.run_with_hooks(tokens, fwd_hooks=[]))


def test_signs_units_and_layers() -> None:
    model, she = demo(), metrics.logit_difference(demo().to_single_token(" she"), demo().to_single_token(" he"))
    found = {}
    for coefficient in (-2, 0, 2):
        with model.hooks(vectors().hooks(coefficient)):
            found[coefficient] = she(model("Tom left early because")).item()
    assert found[-2] < found[0] < 0 < found[2]
    assert found[2] - found[0] > 3
    [raw], [unit] = vectors().hooks(2.0, layers=3), vectors().hooks(2.0, layers=3, unit=True)
    assert (raw.hook_point, raw.layer) == ("resid_post", 3)
    assert_close(unit.vector.norm(), 1)
    assert_close(unit.vector * vectors().directions[3].norm(), raw.vector)
    assert [hook.layer for hook in vectors().hooks(1, layers="each")] == [0, 1, 2, 3]
    assert [hook.layer for hook in vectors().hooks(1)] == [vectors().best_layer()]


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gptj", "mixtral", "mamba"])
def test_a_coefficient_is_a_distance_along_the_direction(family: str) -> None:
    case = next(case for case in DECODER_CASES if case.family == family)
    model, tokens = hooked(case), prompt(case)
    site = "resid_post" if model.names(lambda name: name.endswith("hook_resid_post")) else "resid_pre"
    found = steering_vectors(model, tokens, tokens.flip(0), site=site, held_out=0.4)
    layer = model.cfg.n_layers - 1
    plain = found.project(model, tokens, layers=layer)
    with model.hooks(found.hooks(-2.5, layers=layer, positions=[1, -1])):
        moved = found.project(model, tokens, layers=layer)
    expected = torch.zeros(tokens.shape[1])
    expected[[1, -1]] = -2.5
    assert_close(moved.mean[0] - plain.mean[0], expected)


def test_projections_of_the_sides_are_half_a_direction_from_the_middle() -> None:
    women, men = women_and_men()
    split = Split.drawn(24, 0.25, torch.Generator().manual_seed(0))
    for sign, side in ((0.5, women), (-0.5, men)):
        found = vectors().project(demo(), [side[int(i)] for i in split.train], batch_size=5)
        assert found.axes["position"][-1] == -1
        assert_close(found.mean[:, -1], torch.full((4,), sign))
    alone = vectors().project(demo(), "Mary")
    n = len(alone.axes["position"])
    among = vectors().project(demo(), [*PROMPTS, "Mary"]).values[..., 3]
    assert_close(among[:, -n:], alone.values[..., 0])
    assert among[:, :-n].isnan().all()
    assert alone.axes["position"][-1].endswith("Mary")


# ---- generation ------------------------------------------------------------------------------------------------------


def generated(model: Any, input: Any, hooks: Any, use_cache: bool, **options: Any) -> tuple[Tensor, Tensor]:
    """New tokens, and the stream at all tokens."""
    site = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    with model.hooks(hooks):
        tokens, cache = model.generate(
            input, N_NEW, do_sample=False, stop_at_eos=False, use_past_kv_cache=use_cache, verbose=False,
            return_type="tokens", return_cache=True, names_filter=[site], **options,
        )  # fmt: skip
    return tokens, cache[site]


def steered_by_hand(model: Any, tokens: Tensor, direction: Tensor, positions: str, layer: int) -> tuple[Tensor, Tensor]:
    """The same by whole runs, with a hook that is told how long the prompt is."""
    n_prompt = tokens.shape[1]
    where = {
        "all": slice(None),
        "prompt": slice(n_prompt),
        "last_prompt": slice(n_prompt - 1, n_prompt),
        "generated": slice(n_prompt, None),
    }[positions]

    def add(value: Tensor, hook: Any) -> Tensor:
        value[:, where] += direction
        return value

    for _ in range(N_NEW):
        logits = model.run_with_hooks(tokens, fwd_hooks=[(f"blocks.{layer}.hook_resid_post", add)])
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    with model.hooks([(f"blocks.{layer}.hook_resid_post", add)]):
        last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
        return tokens, model.run_with_cache(tokens, names_filter=[last])[1][last].detach()


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "recurrent_gemma"])
def test_steered_generation_is_that_of_whole_runs(family: str, positions: str) -> None:
    case = next(case for case in DECODER_CASES if case.family == family)
    model, tokens = hooked(case), prompt(case, length=5)
    directions, layer = by_hand(model, model.cfg.d_model), model.cfg.n_layers - 2
    expected = steered_by_hand(model, tokens, 6 * directions.directions[layer], positions, layer)
    hooks = directions.hooks(6, layers=layer, positions=positions)
    for use_cache in (True, False):
        found = generated(model, tokens, hooks, use_cache)
        assert torch.equal(found[0], expected[0])
        assert_close(found[1], expected[1])
    plain = generated(model, tokens, [], True)[1]
    assert (plain - expected[1])[:, -1].abs().max() > 1e-3, "steering that is seen nowhere proves nothing"


@pytest.mark.parametrize("positions", POSITIONS)
def test_rows_of_a_padded_batch_are_steered_as_they_are_alone(positions: str) -> None:
    hooks = vectors().hooks(-1.3, layers="each", positions=positions)
    for use_cache in (True, False):
        tokens, stream = generated(demo(), PROMPTS, hooks, use_cache)
        for row, text in enumerate(PROMPTS):
            alone, own = generated(demo(), text, hooks, use_cache)
            n = alone.shape[1]
            assert torch.equal(tokens[row, -n:], alone[0])
            assert_close(stream[row, -n:], own[0])


def test_texts_padded_on_the_left_are_steered_at_their_ends() -> None:
    with demo().hooks(vectors().hooks(-1.3, layers=1, positions="last_prompt")):
        together = demo()(PROMPTS, padding_side="left")[:, -1]
        alone = torch.cat([demo()(text)[:, -1] for text in PROMPTS])
    assert_close(together, alone)
    assert (together - demo()(PROMPTS, padding_side="left")[:, -1]).abs().amax(1).min() > 0.1


# ---- sweeps and rankings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["all", "last_prompt"])
def test_a_sweep_is_a_run_for_each_cell(positions: str) -> None:
    she = metrics.logit_difference(demo().to_single_token(" she"), demo().to_single_token(" he"))
    coefficients, prompts = [-2, 0.5, 3], ["Tom", *PROMPTS]  # the first and the last are of one length
    sweep = sweep_steering(
        demo(), vectors(), prompts, {"she": she, "he": lambda logits: -she(logits)}, coefficients=coefficients,
        layers=[3, 1], positions=positions, progress=False,
    )  # fmt: skip
    assert sweep.axes == {"metric": ("she", "he"), "layer": (3, 1), "coefficient": (-2, "0.5", 3)}
    for layer in (3, 1):
        for label, coefficient in zip(sweep.axes["coefficient"], coefficients, strict=True):
            with demo().hooks(vectors().hooks(coefficient, layers=layer, positions=positions)):
                expected = torch.cat([she(demo()(text)) for text in prompts]).detach()
            found = sweep.select(layer=layer, coefficient=label)
            assert_close(found.select(metric="she").values, expected)
            assert_close(found.select(metric="he").values, -expected)
    unsteered = torch.cat([she(demo()(text)) for text in prompts]).detach()
    assert_close(sweep.select(metric="she").corrupted, unsteered)
    figure = sweep.select(metric="she").plot()  # a line for each layer, over coefficients
    assert [(line.name, line.x) for line in figure.data if line.name] == [
        ("layer 3", (-2, 0.5, 3)),
        ("layer 1", (-2, 0.5, 3)),
    ]
    assert (figure.layout.yaxis.title.text, figure.layout.title.text.startswith("Steering")) == ("she", True)


def test_heads_are_ranked_by_what_they_say() -> None:
    women, men = women_and_men(12)
    ranking = rank_heads(demo(), women, men, held_out=0.5).select(metric="auc")
    up, down = (
        torch.stack(
            [demo().run_with_cache(text, names_filter=[("z", 1)])[1]["z", 1][0, -1, 3].detach() for text in side]
        )
        for side in (women, men)
    )
    split = Split.drawn(12, 0.5, torch.Generator().manual_seed(0))
    direction = (up - down)[split.train].mean(0)
    auc = sum(float(a @ direction > b @ direction) for a in up[split.held] for b in down[split.held]) / 36
    assert auc > 0.9
    assert_close(ranking.select(layer=1, head=3).mean, auc)
    assert ranking.axes == {"layer": (0, 1, 2, 3), "head": (*range(8), "mlp")}

    def silence(value: Tensor, hook: Any) -> Tensor:
        value[:, :, 3] = 0
        return value

    with demo().hooks([(("z", 1), silence)]):
        silent = rank_heads(demo(), women, men, held_out=0.5).select(metric="auc", layer=1)
    assert silent.select(head=3).mean == 0.5
    assert torch.equal(silent.select(head=2).values, ranking.select(layer=1, head=2).values)


def test_layers_without_heads_are_left_out() -> None:
    case = next(case for case in DECODER_CASES if case.family == "recurrent_gemma")
    model, tokens = hooked(case), prompt(case, 6)
    ranking = rank_heads(model, tokens, tokens.flip(0)).select(metric="accuracy")
    attends = [f"blocks.{layer}.attn.hook_z" in model.hook_dict for layer in range(model.cfg.n_layers)]
    assert set(attends) == {True, False}
    assert (~ranking.select(head=0).mean.isnan()).tolist() == attends
    assert not ranking.select(head="mlp").mean.isnan().any()


# ---- other models ----------------------------------------------------------------------------------------------------


def test_an_encoder_is_steered_too() -> None:
    case = next(case for case in ENCODER_CASES if case.family == "bert")
    model, tokens = hooked(case), prompt(case, 6)
    found = steering_vectors(model, tokens, tokens.flip(0), positions=2)
    with model.hooks(found.hooks(3.0, layers=0, positions=[0])):
        steered = model(tokens)

    def add(value: Tensor, hook: Any) -> Tensor:
        value[:, 0] += 3 * found.directions[0]
        return value

    assert_close(steered, model.run_with_hooks(tokens, fwd_hooks=[("blocks.0.hook_resid_post", add)]))
    assert_apart(steered, model(tokens))
    assert rank_heads(model, tokens, tokens.flip(0)).select(metric="auc").mean.shape[0] == model.cfg.n_layers
    options: dict[str, Any] = {"coefficients": [3], "layers": [0], "positions": "last_prompt", "progress": False}
    sweep = sweep_steering(model, found, tokens, lambda logits: logits[:, 0, 3], **options)
    with model.hooks(found.hooks(3.0, layers=0, positions="last_prompt")):
        assert_close(sweep.values[0, 0], model(tokens)[:, 0, 3].detach())


def test_models_that_do_not_read_one_text_are_refused() -> None:
    case = ENCODER_DECODER_CASES[0]
    for model in (hooked(case), wrap(torch.nn.Linear(3, 3))):
        with pytest.raises(TypeError, match=f"HookedEncoder, got {type(model).__name__}"):
            steering_vectors(model, *women_and_men(4))
        with pytest.raises(TypeError, match="contrasts need a HookedTransformer"):
            vectors().project(model, "Mary")


# ---- files, tables, errors -------------------------------------------------------------------------------------------


def test_files_are_bit_for_bit(tmp_path: Path) -> None:
    vectors().save(tmp_path / "v.safetensors")
    back = SteeringVectors.load(tmp_path / "v.safetensors")
    assert back.layers == vectors().layers
    assert back.midpoints == vectors().midpoints
    assert all(torch.equal(back.directions[layer], vectors().directions[layer]) for layer in back.layers)
    assert torch.equal(back.separation.values, vectors().separation.values)
    assert dict(back.separation.axes) == dict(vectors().separation.axes)
    assert back.about == vectors().about
    assert (back.site, back.method, repr(back)) == (vectors().site, vectors().method, repr(vectors()))
    vectors().separation.save(tmp_path / "s.safetensors")
    with pytest.raises(ValueError, match=r"holds type MetricScores, not SteeringVectors"):
        SteeringVectors.load(tmp_path / "s.safetensors")


# ---- doses -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dose_is_a_share_of_the_norm_there() -> None:
    """Of the values that the directions were computed from, at their positions; for each layer and site."""
    women, men = women_and_men()
    for site in ("resid_post", "mlp_out"):
        found = steering_vectors(demo(), women, men, site=site, held_out=0.25, seed=0)
        split = Split.drawn(len(women), 0.25, torch.Generator().manual_seed(0))
        train = [side[i] for side in (women, men) for i in split.train]
        for layer in found.layers:
            norms = [demo().run_with_cache(text)[1][site, layer][0, -1].norm().item() for text in train]
            assert_close(found.norms[layer], sum(norms) / len(norms))
            [hook] = found.hooks(dose=-0.7, layers=layer)
            added = hook.coefficient * found.direction(layer)
            assert_close(added.norm().item(), 0.7 * found.norms[layer])
            assert added @ found.direction(layer) < 0
            assert_close(found.dose(layer, hook.coefficient), -0.7)
        [hook] = found.hooks(3.0, layers=1, unit=True)
        assert_close(found.dose(1, 3.0, unit=True), 3 / found.norms[1])
    assert found.to_dataframe()["dose"].tolist() == [found.dose(layer) for layer in found.layers]


def test_doses_that_mean_nothing(tmp_path: Path) -> None:
    for wrong in ({"coefficient": 1.0}, {"unit": True}):
        with pytest.raises(ValueError, match="a dose is the length of what is added: leave out coefficient and unit"):
            vectors().hooks(dose=0.5, **wrong)
    earlier = replace(vectors(), norms={})
    with pytest.raises(ValueError, match="these vectors do not know the norms"):
        earlier.hooks(dose=0.5)
    assert "dose" not in earlier.to_dataframe()
    assert repr(earlier) == repr(vectors()).partition("; a coefficient of 1 is a dose of 0.")[0] + ")"
    vectors().save(tmp_path / "v.safetensors")
    assert SteeringVectors.load(tmp_path / "v.safetensors").norms == vectors().norms


def test_a_dose_that_breaks_text_warns() -> None:
    layer = vectors().best_layer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vectors().hooks(dose=0.9)
        vectors().hooks(dose=-0.9, layers="each")
        vectors().hooks()
    for large in ({"dose": 1.2}, {"coefficient": 1.2 / vectors().dose(layer)}, {"dose": -1.2, "layers": "each"}):
        with pytest.warns(UserWarning, match=r"adds 1\.2 times the norm .* hooks\(dose=0\.5\) adds half"):
            vectors().hooks(**large)


OF_MEN = ["Tom left early because", "Paul went home because", "James was tired, so"]


def test_texts_at_doses_are_those_of_generate() -> None:
    found = steered_texts(demo(), vectors(), OF_MEN, doses=[0.3, 0.5], max_new_tokens=8)
    for dose, texts, shares in zip(found.doses, found.texts, found.repeated, strict=True):
        for start, text, share in zip(OF_MEN, texts, shares.tolist(), strict=True):
            with demo().hooks(vectors().hooks(dose=dose)):
                assert demo().generate(start, 8, do_sample=False, verbose=False) == start + text
            ids = demo().to_tokens(text, prepend_bos=False)[0].tolist()
            assert share == repeated_share(ids) == 0.0
    assert found.doses[0] == 0.0
    assert found.repeating == []
    assert all(" he " in text for text in found.texts[0])
    assert all(" she " in text for text in found.texts[2]), "it steers"
    assert list(found.to_dataframe().columns) == ["dose", "prompt", "text", "share of repeated bigrams"]
    assert found.plot().layout.yaxis.title.text == "share of repeated bigrams"


def test_text_that_repeats_itself_is_noticed() -> None:
    with pytest.warns(
        UserWarning, match=r"text repeats itself at the doses 3 \(.*, without steering .*: use smaller ones"
    ):
        found = steered_texts(demo(), vectors(), OF_MEN, doses=[0.5, 3], max_new_tokens=16)
    assert found.repeating == [3.0]
    assert repr(found) == "SteeredTexts(3 prompts at the doses 0, 0.5, 3; repeated text at 3)"
    with pytest.raises(ValueError, match="give at least one prompt and one dose, got 0 and 1"):
        steered_texts(demo(), vectors(), [], doses=[1])


def test_of_layers_that_separate_equally_well_the_middle_one_steers() -> None:
    found = SteeringVectors(
        dict.fromkeys(range(5), torch.ones(2)),
        dict.fromkeys(range(5), 0.0),
        Scores(
            torch.tensor([0.5, 1.0, 1.0, 1.0, 0.9])[:, None, None].expand(3, 5, 2, 1),
            {"metric": METRICS, "layer": range(5), "of": ["mean", "random"]},
        ),
        "resid_post",
        "mean",
    )
    assert (found.best_layers(), found.best_layer()) == ([1, 2, 3], 2)
    assert [hook.layer for hook in found.hooks()] == [2]


def test_tables_and_figures() -> None:
    table = vectors().to_dataframe()
    assert list(table["layer"]) == [0, 1, 2, 3]
    assert table["random_auc"].between(0, 1).all()
    assert_close(table["norm"][2], vectors().directions[2].norm().item())
    best = int(table.sort_values(["accuracy", "auc"], ascending=False, kind="stable")["layer"].iloc[0])
    assert best in vectors().best_layers()
    best = vectors().best_layers()[len(vectors().best_layers()) // 2]
    assert vectors().best_layer() == best
    assert f"best layer {best}" in repr(vectors())
    figure = vectors().plot("auc")
    bands = [line for line in figure.data if line.fill == "toself"]
    assert len(bands) == 2, "intervals over held-out pairs"
    drawn = {line.name: torch.tensor([*line.y], dtype=torch.float32) for line in figure.data if line.name}
    assert drawn.keys() == {"mean difference of the sides", "random directions"}
    assert_close(drawn["mean difference of the sides"], torch.tensor([*table["auc"]], dtype=torch.float32))
    assert_close(drawn["random directions"], torch.tensor([*table["random_auc"]], dtype=torch.float32))


def changed(name: str, value: Any) -> dict[str, Any]:
    women, men = women_and_men(4)
    return {"model": demo(), "positive": women, "negative": men, name: value}


@pytest.mark.parametrize(
    ("name", "value", "error", "match"),
    [
        ("positive", [], ValueError, "the positive prompts are empty"),
        ("negative", ["a", "b"], ValueError, "4 positive and 2 negative"),
        ("positive", torch.zeros(2, 2, 2).long(), ValueError, r"got \(2, 2, 2\)"),
        ("method", "median", ValueError, "mean, pca, logistic, got 'median'"),
        ("held_out", 0.0, ValueError, "between 0 and 1, got 0.0"),
        ("positions", "last", ValueError, "'mean', got 'last'"),
        ("positions", [1, 2], ValueError, r"each of 4 pairs, or \[4, 2\].*got shape \[2\]"),
        ("positions", 50, IndexError, "position 50 is out of range: prompt 0 has"),
        ("positions", [0, 0, 0, -50], IndexError, "position -50 is out of range: prompt 3 has"),
        ("batch_size", 0, ValueError, "at least 1, got 0"),
        ("site", "resid_pots", KeyError, "resid_post"),
        ("site", "z", ValueError, "expected .*d_model"),
        ("layers", [], ValueError, r"got \[\]"),
        ("layers", [9], IndexError, "layer 9 is out of range"),
        ("positions", 0, ValueError, "both sides are the same"),
    ],
)
def test_what_is_wrong_is_said(name: str, value: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        steering_vectors(**changed(name, value))
    assert not demo().list_hooks()


def test_more_that_is_said() -> None:
    with pytest.raises(ValueError, match="at least two pairs"):
        steering_vectors(demo(), "Mary", "Tom")

    def break_one(value: Tensor, hook: Any) -> Tensor:
        value[1, -1, 0] = torch.nan
        return value

    with (
        demo().hooks([(("resid_post", 2), break_one)]),
        pytest.raises(ValueError, match=r"blocks.2.*not finite.*of 1 prompt"),
    ):
        steering_vectors(demo(), ["Mary was ill, so"] * 2, ["Tom was ill, so"] * 2)
    with pytest.raises(ValueError, match="no direction for layer 7; there are"):
        vectors().hooks(1.0, layers=7)
    with pytest.raises(ValueError, match="last_prompt"):
        vectors().hooks(1.0, positions="first")
    zero = steering_vectors(planted()[0], *planted_pairs(), layers=[1])
    with pytest.raises(ValueError, match=r"24 wide.*128"):
        zero.project(demo(), "Mary")
    with pytest.raises(ValueError, match=r"24.*128"), demo().hooks(zero.hooks(1.0, layers=1)):
        demo()("Mary")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"coefficients": []}, "at least one"),
        ({"coefficients": [1, 1.0]}, "twice"),
        ({"coefficients": [float("nan")]}, "finite"),
        ({"coefficients": [1], "positions": "generated"}, "generates nothing"),
        ({"coefficients": [1], "metric": lambda logits: logits.mean()}, "a number for each prompt"),
    ],
)
def test_what_a_sweep_refuses(options: dict[str, Any], match: str) -> None:
    metric = options.pop("metric", metrics.logit(5))
    with pytest.raises(ValueError, match=match):
        sweep_steering(demo(), vectors(), ["Mary", "Tom", "Mary went"], metric, progress=False, **options)


def test_a_sweep_takes_steering_vectors() -> None:
    with unchecked(), pytest.raises(TypeError, match=r"vectors must be SteeringVectors.*got a Tensor"):
        sweep_steering(demo(), torch.zeros(128), "Mary", metrics.logit(5), coefficients=[1])  # type: ignore[arg-type]
