"""Synthetic features: their frequencies, correlations, hierarchy and magnitudes are those that were asked for."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hooked_lm.interventions.dictionaries import SyntheticFeatures, TopK, random_dictionary, synthetic_features
from hooked_lm.interventions.dictionaries.recovery import cosines
from tests.close import assert_close, assert_near
from tests.unchecked import unchecked

ROWS = 40_000


@settings(max_examples=20, deadline=None)
@given(
    n=st.integers(1, 60),
    share=st.floats(0.01, 0.99),
    exponent=st.floats(0, 3),
    most=st.floats(0.1, 1),
    seed=st.integers(0, 5),
)
def test_frequencies_follow_zipf_and_add_up(n: int, share: float, exponent: float, most: float, seed: int) -> None:
    active = share * most * n
    truth = synthetic_features(n, 8, active=active, exponent=exponent, most=most, seed=seed)
    assert_close(truth.l0, active, scale=truth.frequencies.sum())
    assert float(truth.frequencies.max()) <= most * (1 + 1e-6)
    below = truth.frequencies < most * (1 - 1e-4)  # those that are not cut have one constant
    constants = truth.frequencies[below] * torch.arange(1.0, n + 1)[below] ** exponent
    assert not len(constants) or float(constants.max() / constants.min()) < 1 + 1e-3
    assert_close(truth.directions.norm(dim=1), torch.ones(n))


def test_features_are_active_as_often_as_they_should() -> None:
    """With correlation and parents, too: both change what is active together, not how often."""
    truth = synthetic_features(48, 16, active=4, n_parents=4, n_children=3, n_groups=5, correlation=0.7)
    _, features = truth.sample(ROWS)
    found = (features > 0).float().mean(0)
    errors = (truth.frequencies * (1 - truth.frequencies) / ROWS).sqrt()
    assert float(((found - truth.frequencies) / errors).abs().max()) < 4.5


def test_children_are_active_only_with_their_parents() -> None:
    truth = synthetic_features(20, 16, n_parents=3, n_children=2)
    active = truth.sample(ROWS).features > 0
    for child in range(3, 9):
        parent = truth.parents[child]
        assert parent == (child - 3) % 3
        assert not bool((active[:, child] & ~active[:, parent]).any())
    assert bool((active[:, 9] & ~active[:, 0]).any())


def test_the_features_of_a_group_are_active_together() -> None:
    truth = synthetic_features(12, 8, active=3, exponent=0, n_groups=3, correlation=0.8)
    active = (truth.sample(ROWS).features > 0).float()
    correlations = torch.corrcoef(active.T)
    same = torch.tensor([[i % 3 == j % 3 and i != j for j in range(12)] for i in range(12)])
    other = torch.tensor([[i % 3 != j % 3 for j in range(12)] for i in range(12)])
    assert float(correlations[same].min()) > 0.4
    assert float(correlations[other].abs().max()) < 4.5 / ROWS**0.5


def test_activations_are_the_sums_of_their_features() -> None:
    truth = synthetic_features(30, 10, magnitude=2.0, spread=0.3, noise=0.5)
    activations, features = truth.sample(ROWS)
    rest = activations - features @ truth.directions
    assert_near(rest.std(), 0.5, 0.02, because="the deviation of a sample")
    sizes = features[features > 0]
    assert_near(sizes.mean(), 2.0, 0.02, because="the mean of a sample")
    assert_near(sizes.log().std(), 0.3, 0.02, because="the deviation of a sample")


def test_seeds_decide() -> None:
    truth = synthetic_features(30, 10, n_groups=3, noise=0.1)
    assert torch.equal(truth.sample(50).activations, truth.sample(50).activations)
    assert not torch.equal(truth.sample(50).activations, truth.sample(50, seed=1).activations)
    assert torch.equal(truth.directions, synthetic_features(30, 10).directions)
    assert not torch.equal(truth.directions, synthetic_features(30, 10, seed=1).directions)


@pytest.mark.parametrize("seed", [0, 1])
def test_no_dictionary_starts_from_the_truth(seed: int) -> None:
    truth = synthetic_features(64, 24, seed=seed)
    started = TopK.Config(24, 64, k=3).build(seed).W_dec.detach()
    floor = random_dictionary(truth.sample(100).activations, 64, 3, seed=seed).W_dec
    for one, other in ((truth.directions, started), (truth.directions, floor), (started, floor)):
        assert float(cosines(one, other).max()) < 0.9


def test_orthogonal_directions() -> None:
    directions = synthetic_features(12, 16, orthogonal=True).directions
    assert_close(directions @ directions.T, torch.eye(12))


def test_saved_features_load(tmp_path: Path) -> None:
    truth = synthetic_features(20, 16, n_parents=2, n_groups=3, noise=0.25)
    truth.save(tmp_path / "truth")
    loaded = SyntheticFeatures.load(tmp_path / "truth")
    assert torch.equal(loaded.sample(100).activations, truth.sample(100).activations)
    assert (loaded.parents, loaded.groups, repr(loaded)) == (truth.parents, truth.groups, repr(truth))


@pytest.mark.parametrize(
    ("given_", "says"),
    [
        ({"frequencies": torch.tensor([0.5, 0.0])}, "that of feature 1 is 0.0"),
        ({"frequencies": torch.tensor([0.5, 1.5])}, "at most 1, and that of feature 1"),
        ({"frequencies": torch.ones(3)}, r"\[feature\], got \[2, 2\] and \[3\]"),
        ({"directions": torch.tensor([[1.0, 0.0], [0.0, 0.0]])}, "direction of feature 1 is zero"),
        ({"parents": [None, 1]}, "a parent comes before its children, and that of feature 1 is 1"),
        ({"parents": [None, 0], "frequencies": torch.tensor([0.1, 0.2])}, "cannot be active more often"),
        ({"parents": [None]}, "an entry for each of 2 features, got 1"),
        ({"correlation": 1.0}, "correlation must be below 1"),
        ({"noise": -1.0}, "noise must be at least 0"),
        ({"magnitude": 0.0}, "magnitude must be positive"),
    ],
)
def test_features_that_do_not_fit_are_refused(given_: dict[str, object], says: str) -> None:
    with unchecked(), pytest.raises(ValueError, match=says):
        SyntheticFeatures(**{"directions": torch.eye(2), "frequencies": torch.tensor([0.5, 0.25]), **given_})


@pytest.mark.parametrize(
    ("settings_", "says"),
    [
        ({"active": 10}, r"active must be above 0 and at most 3.2 \(8 features of frequency most=0.4\)"),
        ({"orthogonal": True}, "8 directions cannot be orthogonal in 4 dimensions"),
        ({"n_parents": 3, "n_children": 2}, "are 9 features, and there are 8"),
        ({"most": 0.0}, "most is a frequency"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(settings_: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        synthetic_features(8, 4, **{"active": 2, **settings_})
    with pytest.raises(ValueError, match="rows must be at least 1"):
        synthetic_features(8, 4, active=2).sample(0)
