"""What `evaluate_recovery` says of dictionaries whose mistakes are known: none, merged, split, shrunken, absorbed, random."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hooked_lm.interventions.dictionaries import (
    SAE,
    ActivationBatches,
    DictionaryEvaluation,
    JumpReLU,
    Normalized,
    SyntheticFeatures,
    TopK,
    TrainingConfig,
    evaluate_recovery,
    random_dictionary,
    synthetic_features,
    train_on,
)
from tests.close import assert_close, assert_near

N, ROWS = 12, 3000
BEST = {"dead": 0.0, "merged": 0.0}  # at best 0; everything else at best 1, but for L0


@pytest.fixture(scope="module")
def truth() -> SyntheticFeatures:
    return synthetic_features(N, N, active=2.5, spread=0.1, orthogonal=True)


def made(encoder: Tensor, directions: Tensor, threshold: float = 0.1) -> JumpReLU:
    """A dictionary with these rows that read, and these that write."""
    sae = JumpReLU.Config(encoder.shape[1], len(encoder), threshold=threshold).build().requires_grad_(False)
    sae.W_enc.copy_(encoder.T)
    sae.W_dec.copy_(directions)
    return sae.eval()


def figures(truth: SyntheticFeatures, sae: Any, **options: Any) -> dict[str, float]:
    found = evaluate_recovery(truth, sae, **{"rows": ROWS, "control": None, **options}).figures
    return dict(zip(found.axes["figure"], found.mean.tolist(), strict=True))


def test_the_true_dictionary_is_perfect(truth: SyntheticFeatures) -> None:
    found = figures(truth, truth.dictionary())
    _, features = truth.sample(ROWS, 1_000_003)
    assert_close(found.pop("L0"), float((features > 0).sum(1).float().mean()))
    assert_close(list(found.values()), torch.tensor([BEST.get(name, 1.0) for name in found]))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.2, 5))
def test_order_and_units_of_latents_do_not_matter(seed: int, scale: float) -> None:
    truth = synthetic_features(20, 10, active=2, n_parents=3)  # with interference, so that no figure is at its end
    sae = truth.dictionary()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(20, generator=generator)
    factors = scale * (0.5 + torch.rand(20, generator=generator))
    other = made(sae.W_enc.T[order], sae.W_dec[order])
    other.threshold.copy_(sae.threshold)
    other.scale_features_(factors)
    first, second = figures(truth, sae, rows=800), figures(truth, other, rows=800)
    assert_close(list(first.values()), torch.tensor(list(second.values())))


def test_two_features_that_are_merged_lose_what_they_should(truth: SyntheticFeatures) -> None:
    """The latent of both has the cosine 1 / sqrt(2) with each, is matched with one, and guesses that where the other is."""
    one, other = 3, 7
    both = (truth.directions[one] + truth.directions[other]) / 2**0.5
    rows = torch.cat([truth.directions[[i for i in range(N) if i not in (one, other)]], both[None]])
    found = figures(truth, made(rows, rows))
    half = 2**-0.5
    assert_close(found["cosine of features"], (N - 2 + 2 * half) / N)
    assert_close(found["cosine of latents"], (N - 2 + half) / (N - 1))
    assert_close(found["MCC"], (N - 2 + half) / (N - 1))
    assert_close(found["merged"], 1 / (N - 1))
    assert found["uniqueness"] == 1  # which does not see it
    active = truth.sample(ROWS, 1_000_003).features > 0
    either = (active[:, one] | active[:, other]).sum()
    of_both = [float(2 * active[:, i].sum() / (active[:, i].sum() + either)) for i in (one, other)]
    assert min(abs(found["F1"] - (N - 2 + lucky) / N) for lucky in of_both) < 1e-5
    each = evaluate_recovery(truth, made(rows, rows), rows=ROWS, control=None).to_dataframe()
    assert_close(sorted(each.loc[[one, other], "cosine"]), torch.tensor([0.0, half]))
    assert_near(each["F1"].mean(), found["F1"], 1e-5, because="the mean of the same numbers")


def test_a_feature_with_two_latents_is_found_once(truth: SyntheticFeatures) -> None:
    rows = torch.cat([truth.directions, truth.directions[:2]])
    found = figures(truth, made(rows, rows / torch.tensor([*[1.0] * N, 1, 1])[:, None]))
    assert_close(found["F1"], 1.0)
    assert_close(found["cosine of features"], 1.0)
    assert_close(found["uniqueness"], N / (N + 2))
    assert found["merged"] == 0


def test_latents_that_are_never_active_are_dead(truth: SyntheticFeatures) -> None:
    rows = torch.cat([truth.directions, truth.directions[:3]])
    readers = torch.cat([truth.directions, torch.zeros(3, N)])
    found = figures(truth, made(readers, rows))
    assert_close(found["dead"], 3 / (N + 3))
    assert_near(found["F1"], 1.0, 0.1, because="zeros that are rounded may be active")


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.2])
def test_shrunken_activations_have_their_slope(truth: SyntheticFeatures, factor: float) -> None:
    found = figures(truth, made(truth.directions * factor, truth.directions))
    assert_close(found["slope"], factor)
    assert_close(found["F1"], 1.0)


def test_a_parent_that_its_child_absorbs() -> None:
    """The latent of the parent is silent where the child is active, whose latent writes the parent as well."""
    parents = [None, None, 0]
    truth = SyntheticFeatures(torch.eye(3), torch.tensor([0.5, 0.3, 0.2]), parents, spread=0.1)
    readers = torch.tensor([[1.0, 0.0, -3.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    writers = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    active = truth.sample(ROWS, 1_000_003).features > 0
    share = float((active[:, 0] & active[:, 2]).sum() / active[:, 0].sum())
    absorbing = evaluate_recovery(truth, made(readers, writers), rows=ROWS, control=None)
    assert_close(absorbing.figures.select(figure="absorption").mean, share)
    assert_close(absorbing.to_dataframe()["recall"].to_numpy(), torch.tensor([1 - share, 1, 1]))
    assert figures(truth, made(torch.eye(3), writers))["absorption"] == 0  # its own latent is active as well
    writers[2, 0] = 0.3  # too little to have taken over
    assert figures(truth, made(readers, writers))["absorption"] == 0
    assert figures(truth, truth.dictionary())["absorption"] == 0


def test_random_directions_are_as_good_as_their_floor() -> None:
    truth = synthetic_features(60, 20, active=3)
    random = random_dictionary(truth.sample(2000).activations, 80, 3, seed=5)
    with warnings.catch_warnings():  # one of two random ones is no better than the other
        warnings.filterwarnings("ignore", message="the dictionary is no better than a random one")
        found = evaluate_recovery(truth, random, rows=ROWS).figures
    for name in ("MCC", "cosine of features", "F1"):
        at = list(found.axes["figure"]).index(name)
        assert_near(found.mean[at], found.floors["random"][at], 0.2, because="two draws of 80 directions")
    assert found.floors["random"][0] > 0.4  # in 20 dimensions: a number that looks good without its floor


def test_a_dictionary_without_merit_says_so(truth: SyntheticFeatures) -> None:
    same = truth.directions[:1].expand(N, N)
    with pytest.warns(
        UserWarning, match=r"no better than a random one of the same size and L0: MCC 0\.\d+, random"
    ) as caught:
        found = evaluate_recovery(truth, made(same, same), rows=ROWS)
    assert len(caught) == 1
    assert found.figures.no_better_than[0] == "random"
    assert "no better than a random" in repr(found)
    good = evaluate_recovery(truth, truth.dictionary(), rows=ROWS)
    assert good.figures.no_better_than == []
    assert "no better" not in repr(good)


TRAINED = {
    "topk": (TopK.Config(24, 64, k=3), 0.0),
    "standard": (SAE.Config(24, 64), 2.0),
    "jumprelu": (JumpReLU.Config(24, 64), 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_training_beats_both_floors(kind: str) -> None:
    cfg, sparsity = TRAINED[kind]
    truth = synthetic_features(48, 24, active=2, exponent=0.7)
    settings_ = TrainingConfig(steps=800, vectors_per_step=256, learning_rate=3e-3, sparsity=sparsity)
    sae = train_on(ActivationBatches(truth.sample(20_000).activations), cfg, settings_, progress=False).sae
    found = evaluate_recovery(truth, sae, rows=5000).figures
    for name in ("MCC", "cosine of features", "F1", "explained variance"):
        at = list(found.axes["figure"]).index(name)
        for kind_of_floor, floor in found.floors.items():
            if (name, kind_of_floor) != ("explained variance", "PCA"):  # which explains more than an L1 penalty leaves
                assert found.mean[at] > floor[at] + 0.1, (name, kind_of_floor)
    assert found.no_better_than == []


# ---- tables, files, mistakes -----------------------------------------------------------------------------------------


def test_tables_figures_and_files(truth: SyntheticFeatures, tmp_path: Path) -> None:
    found = evaluate_recovery(truth, truth.dictionary(), rows=ROWS)
    table = found.to_dataframe()
    assert list(table.columns[:4]) == ["feature", "cosine", "cosine (random)", "cosine (PCA)"]
    assert len(table) == N
    assert list(found.figures.to_dataframe().columns) == ["figure", "mean", "random", "PCA"]
    shown = found._repr_html_()
    assert "random" in shown
    assert "PCA" in shown
    bars = found.plot().data[0]
    assert len(bars.y) == 3 * (len(found.figures.axes["figure"]) - 1)  # three of each, but of L0
    found.save(tmp_path / "found")
    loaded = DictionaryEvaluation.load(tmp_path / "found")
    for name in ("figures", "each"):
        one, other = getattr(found, name), getattr(loaded, name)
        assert torch.equal(one.values.nan_to_num(9), other.values.nan_to_num(9))
        assert torch.equal(one.random.nan_to_num(9), other.random.nan_to_num(9))
        assert (one.axes, one.about, one.headline) == (other.axes, other.about, other.headline)


def test_a_normalised_dictionary_has_the_directions_of_its_own(truth: SyntheticFeatures) -> None:
    found = figures(truth, Normalized(truth.dictionary(), "constant_norm_rescale"))
    assert_close([found["MCC"], found["cosine of features"]], [1.0, 1.0])


def test_mistakes(truth: SyntheticFeatures) -> None:
    sae = truth.dictionary()
    rare = SyntheticFeatures(torch.eye(N), torch.tensor([0.5] * (N - 2) + [1e-6] * 2))
    with pytest.raises(ValueError, match=r"features 10, 11 are active in none of 100 rows: give more rows"):
        evaluate_recovery(rare, sae, rows=100)
    with pytest.raises(ValueError, match="directions of width 12, and the features are in 5 dimensions"):
        evaluate_recovery(synthetic_features(5, 5, active=1), sae)
    with pytest.raises(ValueError, match="control must be 'auto' or None, got 'random'"):
        evaluate_recovery(truth, sae, control="random")

    class Identity:
        def encode(self, x: Tensor) -> Tensor:
            return x

        decode = encode

    with pytest.raises(TypeError, match="a Identity has no directions: its W_dec"):
        evaluate_recovery(truth, Identity())
