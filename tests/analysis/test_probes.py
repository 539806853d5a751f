"""Probes recover what was planted, their controls are near chance, and what does not fit is refused."""

import math
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import Probes, RegressionProbes, train_probe
from hooked_lm.analysis.probe_tasks import Classification, Regression, task_of
from hooked_lm.interventions.controllers import AddDirection
from hooked_lm.results.bootstrap import wilson
from hooked_lm.viz.theme import FAINT, UP
from tests.close import assert_close, assert_equal
from tests.unchecked import unchecked

WIDTH, N = 12, 80


def planted(strength: float = 6.0, seed: int = 0) -> tuple[dict[int, Tensor], list[str], Tensor]:
    """Noise in layer 0; in layer 1 noise with the label along a direction, at another scale in each entry."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(WIDTH, generator=generator)
    direction /= direction.norm()
    labels = ["yes" if i % 2 else "no" for i in range(N)]
    signs = torch.tensor([1.0 if label == "yes" else -1.0 for label in labels])
    noise = torch.randn(2, N, WIDTH, generator=generator)
    return {0: noise[0], 1: noise[1] + strength / 2 * signs[:, None] * direction}, labels, direction


def test_a_probe_at_chance_says_so() -> None:
    """Of random labels, and not of labels that the vectors have."""
    generator = torch.Generator().manual_seed(0)
    vectors = {0: torch.randn(60, 8, generator=generator), 1: torch.randn(60, 8, generator=generator)}
    for random in (torch.rand(60, generator=generator) > 0.5, torch.randn(60, generator=generator)):
        with pytest.warns(
            UserWarning, match=r"no layer's probe is better than its control: the best, of layer \d, has"
        ):
            train_probe(vectors, random.tolist())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_probe(vectors, (vectors[1][:, 0] > 0).tolist())
        train_probe(vectors, vectors[1][:, 0].tolist())


def test_a_planted_direction_is_found_and_noise_is_not() -> None:
    vectors, labels, direction = planted()
    probes = train_probe(vectors, labels)
    assert probes.accuracy[1] > 0.95
    assert 0.3 < probes.accuracy[0] < 0.7
    assert (probes.mean[1] - 0.5).abs().max() < 0.15, "the control is near chance"
    assert probes.selectivity[1] > 0.35
    assert probes.majority == 0.5
    assert float(probes.direction(1) @ direction) > 0.9
    assert_equal(probes.direction(1, "no"), -probes.direction(1))
    low, high = probes.interval()
    assert low[0, 1] <= probes.accuracy[1] <= high[0, 1]
    assert list(probes.to_dataframe().columns) == [
        "layer",
        "accuracy",
        "low",
        "high",
        "control",
        "selectivity",
        "majority",
    ]
    assert "best layer 1" in repr(probes)
    scores = vectors[1] @ probes.weights[1, 0] + probes.biases[1, 0]
    assert ((scores > 0) == torch.tensor([label == "yes" for label in labels])).float().mean() > 0.95


def test_intervals_of_accuracies_are_between_0_and_1_and_never_a_point() -> None:
    """Those of the binomial distribution: the exact coverage of Wilson's interval for 12 prompts."""
    vectors, labels, _ = planted(30.0)
    probes = train_probe(vectors, labels, layers=None, groups=[i // 2 for i in range(N)])
    low, high = probes.interval()
    assert (low >= 0).all()
    assert (high <= 1).all()
    assert probes.accuracy[1] == 1
    assert high[0, 1] - low[0, 1] > 0.01
    assert f"{N // 2} groups; best layer 1" in repr(probes)
    for share in (0.1, 0.5, 0.9):
        outcomes = torch.ones(13, 12).tril(-1)  # 0 to 12 right
        inside = [bool(a <= share <= b) for a, b in zip(*wilson(outcomes), strict=True)]
        chances = [math.comb(12, k) * share**k * (1 - share) ** (12 - k) for k in range(13)]
        assert 0.92 < sum(p for p, is_in in zip(chances, inside, strict=True) if is_in) < 0.99


def test_the_seed_decides_and_files_give_everything_back(tmp_path: Path) -> None:
    vectors, labels, _ = planted(2.0)
    one, same, other = (train_probe(vectors, labels, seed=seed) for seed in (1, 1, 2))
    assert_equal(one.values, same.values)
    assert not torch.equal(one.values, other.values)
    one.save(tmp_path / "probes")
    found = Probes.load(tmp_path / "probes")
    assert_equal(found.values, one.values)
    assert_equal(found.weights, one.weights)
    assert (found.about, found.classes, found.counts, found.axes) == (one.about, one.classes, one.counts, one.axes)
    assert_equal(found.select(layer=[1]).direction(1), one.direction(1))
    with pytest.raises(ValueError, match="keep their axes"):
        one.select(of="probe")


def numbers(strength: float = 3.0) -> tuple[dict[int, Tensor], list[float], Tensor]:
    """Noise in layer 0; in layer 1 noise with a number along a direction."""
    vectors, _, direction = planted(0.0)
    labels = torch.randn(N, generator=torch.Generator().manual_seed(5)) * 7 + 100
    return (
        {0: vectors[0], 1: vectors[1] + strength * (labels[:, None] - 100) / 7 * direction},
        labels.tolist(),
        direction,
    )


def test_a_planted_number_is_found_and_noise_is_not(tmp_path: Path) -> None:
    vectors, labels, direction = numbers()
    probes = train_probe(vectors, labels)
    assert isinstance(probes, RegressionProbes)
    assert probes.r2[1] > 0.8
    assert probes.r2[0] < 0.1
    assert (probes.mean[1] < 0.1).all(), "the control explains nothing"
    assert float(probes.direction(1) @ direction) > 0.9
    low, high = probes.interval()
    assert low[0, 1] <= probes.r2[1] <= high[0, 1] <= 1
    assert list(probes.to_dataframe().columns) == ["layer", "r2", "low", "high", "control", "selectivity"]
    predicted = vectors[1] @ probes.weights[1, 0] + probes.biases[1, 0]
    assert torch.corrcoef(torch.stack([predicted, torch.tensor(labels)]))[0, 1] > 0.9
    assert "best layer 1 with r2 0." in repr(probes)
    assert [trace.name for trace in probes.plot().data if trace.name][-1] == "always the mean label"
    probes.save(tmp_path / "probes")
    again = RegressionProbes.load(tmp_path / "probes")
    assert_equal(again.direction(1), probes.direction(1))
    assert_close(again.select(layer=[1]).r2, probes.r2[1:])
    with pytest.raises(ValueError, match="no probe of 7"):
        probes.direction(7)


def test_r2_is_that_of_predictions_from_other_folds() -> None:
    vectors, labels, _ = numbers()
    folds = Regression.of(labels).folds(None, 4, 2)
    found = train_probe({1: vectors[1]}, torch.tensor(labels), n_folds=4, seed=2, regularisation=0.1)
    x, y = vectors[1].double(), torch.tensor(labels, dtype=torch.float64)
    predicted = torch.zeros_like(y)
    for train, test in folds:
        mean, std = x[train].mean(0), x[train].std(0, correction=0)
        z, centre = (x[train] - mean) / std, y[train].mean()
        weights = torch.linalg.solve(z.T @ z + 10 * torch.eye(WIDTH), z.T @ (y[train] - centre))
        predicted[test] = (x[test] - mean) / std @ weights + centre
    r2 = 1 - (y - predicted).square().sum() / (y - y.mean()).square().sum()
    assert_close(found.mean[0, 0], r2.float(), depth=3)


def test_numbers_of_a_group_are_held_out_together() -> None:
    generator = torch.Generator().manual_seed(0)
    groups = [i // 8 for i in range(N)]
    numbers = torch.randn(max(groups) + 1, generator=generator)
    names = torch.randn(max(groups) + 1, WIDTH, generator=generator) * 10
    vectors = {0: names[groups] + torch.randn(N, WIDTH, generator=generator)}
    alone, together = (train_probe(vectors, numbers[groups].tolist(), groups=given) for given in (None, groups))
    assert alone.mean[0, 0] > 0.95
    assert together.mean[0, 0] < 0.5
    assert together.n_prompts == 10


@pytest.mark.parametrize(
    ("labels", "error", "says"),
    [
        ([0.5] * N, ValueError, "all 80 labels are 0.5"),
        ([0.5, float("nan")] * (N // 2), ValueError, "finite, and that of prompt 1 is nan"),
        ([None] * N, TypeError, "classes .* or numbers .*, got None"),
        ([(1, 2)] * N, TypeError, "got \\(1, 2\\)"),
        (["a", 1] * (N // 2), TypeError, "labels are strings or numbers, and 'a' and 1 are both there"),
        ([], ValueError, "there are no labels"),
        ([1.0, 2.0], ValueError, "there are 2 prompts, and 5 folds need 5"),
        (list(range(N)), ValueError, "class 0 has 1 of the prompts, .* for a regression give floats"),
    ],
)
def test_labels_that_are_neither(labels: list, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        task_of(labels).folds(None, 5, 0)


def test_several_classes_have_a_direction_each() -> None:
    generator = torch.Generator().manual_seed(3)
    centres = 4 * torch.eye(WIDTH)[:3]
    labels = [i % 3 for i in range(60)]
    vectors = {5: centres[labels] + torch.randn(60, WIDTH, generator=generator)}
    probes = train_probe(vectors, labels, n_folds=3)
    assert probes.accuracy[0] > 0.9
    assert_close(probes.majority, 1 / 3)
    for label in range(3):
        assert (centres / 4 @ probes.direction(5, label)).argmax() == label
    with pytest.raises(ValueError, match=r"one of the classes \[0, 1, 2\], got None"):
        probes.direction(5)


def test_groups_are_held_out_together() -> None:
    """Vectors that name their group: without groups a probe knows the label from others of the group."""
    generator = torch.Generator().manual_seed(0)
    groups = [i // 8 for i in range(N)]
    labels = [group % 2 for group in groups]
    names = torch.randn(max(groups) + 1, WIDTH, generator=generator) * 10
    vectors = {0: names[groups] + torch.randn(N, WIDTH, generator=generator)}
    alone, together = train_probe(vectors, labels), train_probe(vectors, labels, groups=groups)
    assert alone.accuracy[0] == 1.0
    assert together.accuracy[0] < 0.9
    assert (together.n_prompts, together.about["groups"]) == (10, 10)


def test_a_model_and_its_cache_give_the_same_probes_and_directions_steer() -> None:
    model = HookedTransformer.from_pretrained("demo")
    names = ["Mary", "Alice", "Sarah", "Laura", "John", "Tom", "Peter", "David"]
    prompts = [f"When {name} went to the {place}," for place in ("store", "park") for name in names]
    labels = [i % 8 < 4 for i in range(16)]
    options = {"layers": [0, 2], "n_folds": 2, "positions": 2}
    options["groups"] = [text.split()[1] for text in prompts]
    probes = train_probe(model, labels, prompts=prompts, batch_size=5, **options)
    _, cache = model.run_with_cache(prompts)
    cached = train_probe(cache, labels, tokens=model.to_tokens(prompts)[:, 2], **options)
    assert_equal(probes.values, cached.values)
    with pytest.raises(ValueError, match="tokens are for a cache or vectors"):
        train_probe(model, labels, prompts=prompts, tokens=list(range(16)), **options)
    assert_close(probes.weights, cached.weights, depth=6)  # of an iterative fit, in batches of other sizes
    heads = train_probe(model, labels, prompts=prompts, site="z", layers=[1], n_folds=2)
    assert heads.direction(1).shape == cache["z", 1].shape[2:]
    steer = AddDirection("resid_post", 2, vector=probes.direction(2), coefficient=4.0)
    assert not torch.equal(model.run_with_hooks(prompts[0], fwd_hooks=[steer]), model(prompts[0]))
    with pytest.raises(ValueError, match="position 40 is out of range: a prompt has"):
        train_probe(model, labels, prompts=prompts, positions=40)
    with pytest.raises(ValueError, match="no vector at each position"):
        train_probe(model, labels, prompts=prompts, site="pattern")
    with pytest.raises(ValueError, match="a model needs prompts"):
        train_probe(model, labels)


def test_prompts_of_different_lengths_are_read_at_their_own_end() -> None:
    model = HookedTransformer.from_pretrained("demo")
    prompts = ["When Mary left", "The capital of France is", "When John went to the store", "Tom"] * 2
    probes = [
        train_probe(model, [0, 1] * 4, prompts=prompts, layers=[1], n_folds=2, batch_size=size) for size in (1, 8)
    ]
    assert_close(probes[0].weights, probes[1].weights)


@pytest.mark.parametrize(
    ("labels", "options", "says"),
    [
        (["yes"] * N, {}, "all 80 labels are 'yes'"),
        (["yes", *["no"] * (N - 1)], {}, "class 'yes' has 1 of the prompts, and 5 folds need 5"),
        (["yes", "no"], {}, "there are 2 labels"),
        (None, {"groups": [0, 1]}, "2 groups for 80 labels"),
        (None, {"groups": [i % 2 for i in range(N)]}, "class 'no' has 1 of the groups"),
        (None, {"n_folds": 1}, "n_folds must be at least 2"),
        (None, {"regularisation": 0.0}, "regularisation must be positive"),
        (None, {"prompts": ["a"]}, "prompts are for a model"),
    ],
)
def test_what_does_not_fit_is_refused(labels: list[str] | None, options: dict, says: str) -> None:
    vectors, known, _ = planted()
    with pytest.raises(ValueError, match=says):
        train_probe(vectors, known if labels is None else labels, **options)


def test_nan_is_refused_with_its_place() -> None:
    vectors, labels, _ = planted()
    vectors[1][7, 3] = torch.nan
    with pytest.raises(ValueError, match="vectors of layer 1 are NaN or infinite for 1 prompts, the first is 7"):
        train_probe(vectors, labels)


def test_the_figure_has_the_probe_the_control_and_the_largest_class() -> None:
    vectors, labels, _ = planted()
    figure = train_probe(vectors, labels, n_shuffles=1).plot()
    assert [trace.name for trace in figure.data if trace.name] == [
        "probe",
        "control (shuffled labels)",
        "largest class",
    ]
    assert figure.layout.xaxis.title.text == "layer"
    assert re.fullmatch(r"95% intervals over \d+ prompts", figure.layout.title.subtitle.text)
    assert [trace.line.color for trace in figure.data if trace.name] == [UP, FAINT, FAINT]


# ---- the control task ------------------------------------------------------------------------------------------------


def test_the_labels_of_a_control_task_are_those_of_tokens() -> None:
    labels, tokens = [0, 0, 1, 1, 0, 0, 1, 1], ["a", "a", "b", "b", "c", "c", "d", "d"]
    task, generator = Classification.of(labels), torch.Generator().manual_seed(0)
    drawn = torch.stack([task.control(tokens, generator) for _ in range(20)])
    assert_equal(drawn[:, ::2], drawn[:, 1::2])  # one label for each token
    assert_equal(drawn.sum(1), torch.full((20,), 4.0, dtype=torch.float64))
    assert len(drawn.unique(dim=0)) == 6, "any two of four tokens"
    for alike in (["a"] * 8, list(range(8))):  # the token says nothing: labels are shuffled
        drawn = torch.stack([task.control(alike, generator) for _ in range(20)])
        assert_equal(drawn.sum(1), torch.full((20,), 4.0, dtype=torch.float64))
        assert not torch.equal(drawn[:, ::2], drawn[:, 1::2])
    mixed = Classification.of([0, 1] * 4)  # of each token both labels: it says nothing of the new ones either
    drawn = torch.stack([mixed.control(tokens, generator) for _ in range(20)])
    assert_equal(drawn[:, ::2] + drawn[:, 1::2], torch.ones(20, 4, dtype=torch.float64))
    lengths = Regression.of([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]).control(tokens, generator)
    assert_equal(lengths[::2], lengths[1::2])


NAMES = ["Mary", "Alice", "Sarah", "Laura", "Emma", "Kate", "Lucy", "Anna"]
NAMES += ["John", "Tom", "Peter", "David", "Henry", "Paul", "Mark", "James"]
TELLS = "the token at this position alone predicts the labels"


def people() -> tuple[list[str], list[str]]:
    """The name in each prompt, and the prompts."""
    names = NAMES * 3
    return names, [f"When {name} went to the {('store', 'park', 'school')[i // 16]}," for i, name in enumerate(names)]


@pytest.mark.slow
@pytest.mark.parametrize("is_trained", [True, False])
def test_arbitrary_labels_of_names_are_no_better_than_the_control(is_trained: bool) -> None:
    """A probe learns them by heart, in a model without training too."""
    model = HookedTransformer.from_pretrained("demo")
    names, prompts = people()
    order = torch.randperm(len(NAMES), generator=torch.Generator().manual_seed(1)).tolist()
    labels = [order[NAMES.index(name)] % 2 for name in names]
    options = {"prompts": prompts, "positions": 2, "layers": [1], "n_folds": 4, "progress": False}
    with unchecked(), pytest.warns(UserWarning, match=TELLS):
        probes = train_probe(model if is_trained else model.untrained(0), labels, **options)
    assert probes.accuracy[0] > 0.85
    assert probes.selectivity[0] < 0.15
    assert probes.about["control"] == "a random label for each token"


@pytest.mark.slow
def test_what_a_model_has_learnt_is_better_than_the_control() -> None:
    """Which of two people gives, the first or the second, read at the giver: every name is either."""
    model = HookedTransformer.from_pretrained("demo")
    pairs = list(zip(NAMES[:8], NAMES[8:], strict=True))
    orders = [order for a, b in pairs for order in ((a, b), (b, a))]
    prompts = [f"When {a} and {b} went to the store, {giver} gave a drink to" for a, b in orders for giver in (a, b)]
    labels, groups = ["first", "second"] * len(orders), [i // 4 for i in range(len(prompts))]
    with unchecked():
        selectivity = [
            train_probe(
                of, labels, prompts=prompts, positions=10, layers=[2], groups=groups, progress=False
            ).selectivity
            for of in (model, model.untrained(0))
        ]
    assert selectivity[0] > 0.3
    assert selectivity[1] < 0.15


def test_tokens_that_tell_the_label_are_warned_of_and_others_are_not() -> None:
    vectors, labels, _ = planted()
    by_token = {"tokens": [f"{label}{i % 8}" for i, label in enumerate(labels)], "n_shuffles": 1}
    with pytest.warns(UserWarning, match=TELLS + r".*\(1.00, one guess for all 0.50\)"):
        train_probe(vectors, labels, **by_token)
    train_probe(vectors, labels, groups=by_token["tokens"], n_folds=2, **by_token)  # warnings are errors here
    for tokens in (["the"] * N, torch.arange(N), [i // 2 % 5 for i in range(N)]):
        train_probe(vectors, labels, tokens=tokens, n_shuffles=1)
    numbers = [float(i % 8) for i in range(N)]
    with pytest.warns(UserWarning, match=TELLS):
        train_probe(vectors, numbers, tokens=[i % 8 for i in range(N)], n_shuffles=1)
    with pytest.raises(ValueError, match="there are 2 tokens for 80 labels"):
        train_probe(vectors, labels, tokens=["a", "b"])


@pytest.mark.slow
def test_intervals_over_folds_contain_the_expected_accuracy() -> None:
    """Prompts of a fold share their probe, so Wilson's interval alone is too narrow."""
    found = []
    with unchecked():
        for seed in range(150):
            generator = torch.Generator().manual_seed(seed)
            labels = [i % 2 for i in range(24)]
            x = torch.randn(24, 4, generator=generator)
            x[:, 0] += 0.5 * (2 * torch.tensor(labels) - 1)
            found.append(train_probe({0: x}, labels, n_shuffles=1, seed=seed, progress=False))
    truth = torch.stack([probes.accuracy[0] for probes in found]).mean()
    inside = {"ours": 0, "wilson": 0}
    for probes in found:
        for name, (low, high) in (("ours", probes.interval()), ("wilson", wilson(probes.values))):
            inside[name] += int(low[0, 0] <= truth <= high[0, 0])
    assert inside["ours"] / 150 > 0.9
    assert inside["wilson"] / 150 < 0.92


def test_a_missing_package_is_named_before_the_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HookedTransformer.from_pretrained("demo")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setattr(model, "forward", lambda *_, **__: pytest.fail("the model ran"))
    with pytest.raises(ImportError, match=r"needs the package sklearn: pip install 'hooked-lm\[probes\]'"):
        train_probe(model, [0, 1] * 10, prompts=["a"] * 20)
