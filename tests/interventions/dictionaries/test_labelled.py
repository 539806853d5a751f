"""What `evaluate_labels` says of dictionaries whose latents are, or are not, the labels."""

from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import linear_model, metrics
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.demo.corpus import NAMES, TASKS
from hooked_lm.interventions.dictionaries import JumpReLU, evaluate_labels, load
from hooked_lm.interventions.dictionaries.halves import half, held_together
from hooked_lm.interventions.dictionaries.labelled import (
    _above_floors,
    _Data,
    _figures,
    _Probe,
    auroc,
    aurocs,
    logistic,
)
from tests.close import assert_close, assert_near

D, CLASSES, EACH = 6, 4, 40


def data(noise: float = 0.1, seed: int = 0) -> _Data:
    """Vectors of four classes: each has a direction, and all have noise in two more dimensions."""
    generator = torch.Generator().manual_seed(seed)
    labels = [i % CLASSES for i in range(CLASSES * EACH)]
    x = torch.zeros(len(labels), D)
    x[range(len(labels)), labels] = 1 + 0.1 * torch.rand(len(labels), generator=generator)
    x[:, CLASSES:] = noise * torch.randn(len(labels), D - CLASSES, generator=generator)
    of = torch.tensor([[label == each for label in labels] for each in range(CLASSES)])
    return _Data(x, of, half(labels, torch.arange(len(labels)), 0))


def made(readers: Tensor, writers: Tensor) -> JumpReLU:
    sae = JumpReLU.Config(D, len(readers), threshold=0.3).build().requires_grad_(False)
    sae.W_enc.copy_(readers.T)
    sae.W_dec.copy_(writers)
    return sae.eval()


def figures(sae: Any, of: _Data, k: tuple[int, ...] = (1, 2)) -> dict[str, Tensor]:
    probes = [_Probe.of(of.x[of.train], with_it[of.train]) for with_it in of.of]
    return _figures(of, sae, probes, k).figures


def test_a_latent_for_each_label_is_perfect() -> None:
    """The ablation of its latent costs a label all that a balanced guess can lose, and the others nothing."""
    found = figures(made(torch.eye(D), torch.eye(D)), data())
    ones = torch.ones(CLASSES)
    for name in ("AUROC k=1", "AUROC k=2", "AUROC of vectors"):
        assert torch.equal(found[name], ones), name
    assert torch.equal(found["absorption"], 0 * ones)
    assert_close(found["TPP"], ones / 2)


def test_a_latent_for_two_labels_does_not_tell_them_apart() -> None:
    """It ranks the prompts of the other above a third of those without the label's own, and below none: AUROC 1 - 1/6."""
    both = torch.eye(D)
    both[0, 1], both[1] = 1, torch.zeros(D)
    of = data()
    of.x[:, :CLASSES] = of.x[:, :CLASSES].round()  # of one magnitude, so that ties are ties
    found = figures(made(both, both), of)
    assert_close(found["AUROC k=1"], torch.tensor([5 / 6, 5 / 6, 1, 1]))
    assert float(found["TPP"][0]) < 0.4


def test_labels_that_nothing_tells_are_at_chance() -> None:
    of, sae = data(), made(torch.eye(D), torch.eye(D))
    orders = [torch.randperm(len(of.x), generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    found = [figures(sae, of._replace(of=of.of[:, order])) for order in orders]
    mean = torch.stack([each["AUROC k=1"] for each in found]).mean()
    assert_near(mean, 0.5, 0.2, because="each of the 20 is of 80 prompts, and has a standard deviation of 0.075")
    assert float(torch.stack([each["TPP"] for each in found]).mean().abs()) < 0.1


def test_absorption_is_seen_where_another_latent_has_taken_over() -> None:
    """A latent stands for class 0 where the entry 4 is negative, another where it is positive. As one of both it is absorbed by
    the other; as two, the label is split, and nothing is absorbed."""
    of = data()
    of.x[:, 4] = torch.tensor([-1.0, 1.0]).repeat_interleave(CLASSES).repeat(len(of.x) // (2 * CLASSES))
    readers, writers = torch.eye(D), torch.eye(D)
    readers[0, 4], readers[4, 0], writers[4, 0] = -1.0, 1.0, 1.0
    sae = made(readers, writers)
    sae.threshold.copy_(torch.tensor([1.5, 0.3, 0.3, 0.3, 1.5, 0.3]))
    active = sae.encode(of.x) != 0
    assert torch.equal(active[:, 0] | active[:, 4], of.of[0])
    alone, both = figures(sae, of, (1,)), figures(sae, of, (1, 2))
    test = of.of[0] & ~of.train
    shares = [float(active[test, latent].float().mean()) for latent in (0, 4)]
    assert min(abs(float(alone["absorption"][0]) - share) for share in shares) < 1e-6
    assert torch.equal(alone["absorption"][1:], torch.zeros(CLASSES - 1))
    assert torch.equal(both["absorption"], torch.zeros(CLASSES))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), d=st.integers(1, 12), apart=st.floats(0, 5))
def test_probes_and_their_measure_are_those_of_scikit_learn(seed: int, d: int, apart: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    there = torch.arange(60) % 3 == 0
    x = torch.randn(60, d, generator=generator).round(decimals=1) + apart * there[:, None]
    fitted = linear_model.LogisticRegression(class_weight="balanced", tol=1e-8, max_iter=1000)
    fitted.fit(x.double().numpy(), there.numpy())
    expected = torch.cat([torch.from_numpy(fitted.coef_[0]), torch.from_numpy(fitted.intercept_)])
    assert_near(logistic(x, there), expected, 1e-4, because="theirs stops at a tolerance")
    assert_close(auroc(x[:, 0], there), metrics.roc_auc_score(there.numpy(), x[:, 0].numpy()))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_rows_that_count_twice_are_rows_that_are_there_twice(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    there, scores = torch.arange(20) % 3 == 0, torch.randn(20, generator=generator).round(decimals=1)
    counts = torch.randint(3, (4, 20), generator=generator)
    counts[:, :2] = 1  # one with the label, one without
    for count, found in zip(counts, aurocs(scores, there, counts.double()), strict=True):
        assert_close(found, auroc(scores.repeat_interleave(count), there.repeat_interleave(count)))
    assert aurocs(scores, there, torch.zeros(1, 20).double()).isnan().all()


def test_a_difference_is_over_distinct_prompts() -> None:
    """A dictionary that is a little better than its floor: the interval of ten prompts includes 0, that of 400 does not, and of
    ten prompts that are each there 40 times it is that of ten."""

    def interval(n: int, repeats: int = 1) -> tuple[float, float]:
        generator = torch.Generator().manual_seed(2)
        there = torch.arange(n) % 2 == 0
        own, other = (apart * there + torch.randn(n, generator=generator) for apart in (1.2, 0.6))
        scores = {"values": own[None].repeat(1, repeats), "random": other[None].repeat(1, repeats)}
        found = _above_floors(scores, there[None].repeat(1, repeats), torch.arange(n).repeat(repeats), 0)
        assert list(found) == ["random"]
        low, high = found["random"]
        return low, high

    few, many = interval(10), interval(400)
    assert few[0] < 0 < few[1]
    assert 0 < many[0] < many[1] < 0.3
    assert_close(torch.tensor(interval(10, 40)), torch.tensor(few))


def test_halves_are_stratified_and_drawn() -> None:
    labels, units = ["a"] * 10 + ["b"] * 5, torch.arange(15)
    train = half(labels, units, 0)
    assert (int(train[:10].sum()), int(train[10:].sum())) == (5, 3)
    assert torch.equal(train, half(labels, units, 0))
    assert not torch.equal(train, half(labels, units, 1))


@settings(max_examples=20, deadline=None)
@given(shared=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_what_is_shared_is_held_together(shared: list[tuple[int, int]]) -> None:
    units = held_together(*zip(*shared, strict=True)).tolist()
    alone = {(i, unit) for i, unit in enumerate(units)}
    for name, unit in alone:
        near = {
            units[i] for i, each in enumerate(shared) if any(a == b for a, b in zip(each, shared[name], strict=True))
        }
        assert near == {unit}
    assert {*units} == {*range(max(units) + 1)}
    of_one = held_together([pair[0] for pair in shared]).tolist()
    assert len({*of_one}) == len({pair[0] for pair in shared})


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), repeats=st.integers(1, 5))
def test_no_unit_is_in_both_halves(seed: int, repeats: int) -> None:
    units = torch.arange(24).repeat(repeats)
    labels = [unit % 3 for unit in units.tolist()]
    train = half(labels, units, seed)
    assert not {*units[train].tolist()} & {*units[~train].tolist()}
    for label in range(3):
        assert int(train[[each == label for each in labels]].sum()) == 4 * repeats


# ---- on the bundled model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo", device="cpu")


def items(task: str, n: int) -> list[Any]:
    rng = Random(7)
    return [TASKS[task](rng) for _ in range(n)]


def test_the_bundled_dictionary_has_a_latent_of_the_pronoun(model: HookedTransformer) -> None:
    found = items("pronouns", 60)
    prompts, women = [item.prompt for item in found], [item.answer in (" she", " her") for item in found]
    result = evaluate_labels(model, prompts, load("demo"), women, skip=1)
    table = result.to_dataframe()
    assert list(table["label"]) == ["False", "True"]
    assert table["AUROC k=1"].min() > 0.95 > table["AUROC k=1 (random)"].max()
    assert "TPP" not in table.columns  # of two labels, none can lose more than the other
    assert result.figures.headline == "AUROC k=1"
    assert result.figures.no_better_than == []
    low, high = result.figures.above_floors["random"]
    means = result.figures.compared()
    assert 0 < low < means["dictionary"] - means["random"] < high
    assert f"(difference {low:.2g} to {high:.2g})" in repr(result)
    assert result.each.above_floors == {}  # it is of the mean over labels
    last = evaluate_labels(model, prompts, load("demo"), women, positions=0, control=None, k=[3])
    at_start = last.figures.select(figure="AUROC k=3").mean
    assert_near(at_start, 0.5, 0.8, because="BOS knows nothing, and rounding orders what is equal")
    assert last.figures.random is None


def test_a_label_that_one_half_lacks_is_refused() -> None:
    """Eight prompts are there twice, four of them with another label the second time, which the halves may not share."""
    labels, units = ["a"] * 8 + ["a", "b"] * 4, torch.arange(8).repeat_interleave(2)
    train = half(labels, units, 0)
    assert 0 < sum(label == "b" for label, fits in zip(labels, train.tolist(), strict=True) if fits) < 4
    with pytest.raises(ValueError, match="one half of the prompts has none with the label 'b'"):
        half(labels, units, 32)


def test_prompts_that_are_repeated_are_not_known_by_heart(model: HookedTransformer) -> None:
    """Each prompt has an arbitrary label, and is there six times: nothing could tell the labels of others."""
    prompts = [item.prompt for item in items("pronouns", 200)]
    distinct = list(dict.fromkeys(prompts))[:40]
    labels = [Random(3).sample([True, False] * 20, 40)[distinct.index(prompt)] for prompt in distinct] * 6
    with pytest.warns(UserWarning, match="no better than a random one .* AUROC k=5 .*, random .* .difference -"):
        result = evaluate_labels(model, distinct * 6, load("demo"), labels, k=[5], skip=1)
    for name in ("AUROC k=5", "AUROC of vectors"):
        assert abs(float(result.figures.select(figure=name).mean) - 0.5) < 0.2, name
    assert "random" in result.figures.no_better_than
    assert result.figures.about["distinct prompts"] == 40
    assert result.figures.about["prompts"] == 240


def test_groups_are_held_out_together(model: HookedTransformer) -> None:
    """Groups with an arbitrary label each, which the first token names: it tells the label of the prompts of a known group."""
    groups = [name for name in NAMES[:24] for _ in range(4)]
    prompts = [f"{name} {verb}" for name in NAMES[:24] for verb in ("went", "sat", "left", "ran")]
    arbitrary = dict(zip(NAMES, Random(0).sample([True, False] * 12, 24), strict=False))
    labels = [arbitrary[name] for name in groups]
    options: dict[str, Any] = {"positions": 1, "control": None, "k": [5]}
    free = evaluate_labels(model, prompts, load("demo"), labels, **options)
    held = evaluate_labels(model, prompts, load("demo"), labels, groups=groups, **options)
    of_free, of_held = (float(each.figures.select(figure="AUROC of vectors").mean) for each in (free, held))
    assert of_free > 0.95
    assert 0.1 < of_held < 0.9
    assert held.figures.about["groups"] == 24


def test_mistakes(model: HookedTransformer) -> None:
    sae = load("demo")
    prompts = [f"{name} {verb}" for verb in ("went", "sat") for name in ("John", "Mary", "Tom", "Anna")]
    labels: list[Any] = [True, False] * 4
    with pytest.raises(ValueError, match="all prompts have the label 'a', so that none can be told from others"):
        evaluate_labels(model, prompts, sae, ["a"] * 8)
    with pytest.raises(ValueError, match="the label 'b' has 3 distinct prompts or groups, and needs at least 4"):
        evaluate_labels(model, prompts, sae, ["a"] * 5 + ["b"] * 3)
    with pytest.raises(ValueError, match="the label False has 2 distinct prompts or groups, and needs at least 4"):
        evaluate_labels(model, prompts[:4] * 2, sae, labels)
    with pytest.raises(ValueError, match="groups has 2 labels, and there are 8 prompts"):
        evaluate_labels(model, prompts, sae, labels, groups=["a", "b"])
    with pytest.raises(ValueError, match="there are 7 labels for 8 prompts"):
        evaluate_labels(model, prompts, sae, labels[:7])
    with pytest.raises(ValueError, match="position 3 is out of range: a prompt has 3 tokens"):
        evaluate_labels(model, prompts, sae, labels, positions=3)
    for k in ([], [0, 1], [2, 1], [513]):
        with pytest.raises(ValueError, match="k are numbers of latents, ascending, from 1 to 512"):
            evaluate_labels(model, prompts, sae, labels, k=k)
    with pytest.raises(ValueError, match="control must be 'auto' or None"):
        evaluate_labels(model, prompts, sae, labels, control="none")
