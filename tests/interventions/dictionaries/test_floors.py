"""Random and PCA dictionaries, and the figures that stand beside those of every dictionary."""

import warnings
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.demo.corpus import training_text
from hooked_lm.interventions.dictionaries import (
    Activations,
    DictionaryScores,
    TopK,
    TrainedDictionary,
    evaluate_dictionary,
    load,
    pca_dictionary,
    random_dictionary,
    train_dictionary,
)
from hooked_lm.interventions.dictionaries.floors import floors_of
from hooked_lm.results import Scores
from tests.close import assert_close, assert_near

SITE = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo", device="cpu")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = Random(3)
    return [training_text(rng) for _ in range(40)]


@pytest.fixture(scope="module")
def x() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(600, 16, generator=generator) * torch.arange(1.0, 17) + 3


def error(sae: TopK, x: Tensor) -> float:
    return float((sae(x) - x).double().pow(2).sum())


def test_random_directions_have_the_best_common_factor(x: Tensor) -> None:
    sae = random_dictionary(x, 40, 5)
    best = error(sae, x)
    assert best < float((x - x.mean(0)).double().pow(2).sum())  # the mean alone
    for factor in (0.98, 1.02):
        other = random_dictionary(x, 40, 5)
        other.W_enc.mul_(factor)
        assert error(other, x) > best
    assert ((sae.encode(x) != 0).sum(1) <= 5).all()
    assert not torch.equal(sae.W_dec, random_dictionary(x, 40, 5, seed=1).W_dec)


def test_principal_components_are_the_best_of_their_number(x: Tensor) -> None:
    """With one component, and one feature for each of its signs, the error is what the other eigenvalues add up to."""
    centred = (x - x.mean(0)).double()
    values = torch.linalg.eigvalsh(centred.T @ centred)
    assert_near(error(pca_dictionary(x, 2, 1), x), float(values[:-1].sum()), 1e-4, because="sums in half the precision")
    whole = pca_dictionary(x, 64, 16)
    assert_close(whole(x), x)
    assert (whole.cfg.d_sae, whole.cfg.k) == (32, 16)
    assert error(pca_dictionary(x, 32, 4), x) < error(pca_dictionary(x, 8, 4), x)  # more to choose from


@pytest.mark.parametrize("make", [random_dictionary, pca_dictionary])
def test_the_norm_of_directions_changes_no_reconstruction(x: Tensor, make: Any) -> None:
    one, other = make(x, 20, 4), make(x, 20, 4, norm=2.5)
    assert_close(other.W_dec.norm(dim=1), torch.full((20,), 2.5))
    assert_close(other(x), one(x))
    assert not other.training
    assert not any(weight.requires_grad for weight in other.parameters())


def test_floors_have_the_size_and_the_sparsity_of_the_dictionary(x: Tensor) -> None:
    sae = TopK.Config(16, 24, k=5).build().eval()
    floors, said = floors_of(sae, x, "auto")
    assert floors is not None
    assert floors.pca is not None
    assert said == "random and PCA dictionaries with 5 active features"
    assert floors.random.cfg == floors.pca.cfg == TopK.Config(16, 24, k=5)
    assert floors_of(sae, x[:5], "auto") == (None, "none: 5 vectors are too few")
    few, said = floors_of(sae, x[:31], "auto")
    assert few is not None
    assert (few.pca, list(few.by_name())) == (None, ["random"])
    assert "31 vectors are too few for 16 principal components" in said
    assert list(floors.by_name()) == ["random", "pca"]
    assert floors_of(sae, x, None) == (None, "none")


def test_mistakes(x: Tensor) -> None:
    with pytest.raises(ValueError, match="4 vectors have fewer than k=4 principal components: give more"):
        pca_dictionary(x[:4], 20, 4)
    with pytest.raises(ValueError, match="at least two, got"):
        random_dictionary(x[:1], 20, 4)
    with pytest.raises(ValueError, match="k=9 features of d_sae=8 cannot be active"):
        random_dictionary(x, 8, 9)
    with pytest.raises(ValueError, match="random has the shape of the values"):
        DictionaryScores(torch.zeros(1, 1), {"figure": ["L0"]}, random=torch.zeros(2, 1))


# ---- beside the figures of a model -----------------------------------------------------------------------------------


def test_floors_are_measured_as_the_dictionary_is(model: HookedTransformer, texts: list[str]) -> None:
    """The columns are what `evaluate_dictionary` says of the random and the PCA dictionary of the same vectors themselves."""
    sae = load("demo")
    found = evaluate_dictionary(model, texts, sae, skip=1, batch_size=8)
    vectors, _ = Activations(model, texts, SITE, skip=1, batch_size=8).vectors(range(len(texts)))
    floors, _ = floors_of(sae, vectors, "auto")
    assert floors is not None
    assert floors.pca is not None
    for floor, column in ((floors.random, found.random), (floors.pca, found.pca)):
        assert column is not None
        alone = evaluate_dictionary(model, texts, floor.at(SITE), skip=1, control=None)
        assert alone.random is None
        assert_near(
            column, alone.values, 1e-3, because="vectors of another batch round otherwise, and change the top k"
        )
    at = list(found.axes["figure"]).index("explained variance")
    assert found.mean[at] > found.floors["PCA"][at] > found.floors["random"][at]
    assert "random 0." in repr(found)
    without = evaluate_dictionary(model, texts, sae, skip=1, batch_size=8, control=None)
    assert torch.equal(without.values, found.values)
    assert "floors: none" in repr(without)


def test_a_dictionary_that_is_no_better_than_random_says_so(model: HookedTransformer, texts: list[str]) -> None:
    untrained = TopK.Config(128, 256, k=8, hook_point=SITE).build().eval()
    with pytest.warns(
        UserWarning, match="no better than a random one of the same size and L0: explained variance"
    ) as caught:
        found = evaluate_dictionary(model, texts, untrained)
    assert len(caught) == 1
    assert found.no_better_than == ["random", "PCA"]
    assert "no better than a random or a PCA dictionary" in repr(found)
    assert found.select(figure="L0").no_better_than == []  # which is no question of better


def test_few_vectors_have_no_floors(model: HookedTransformer) -> None:
    few = evaluate_dictionary(model, ["John"], load("demo"))
    assert few.floors == {}
    assert "vectors are too few" in repr(few)


def test_training_reports_the_floors_and_files_keep_them(
    model: HookedTransformer, texts: list[str], tmp_path: Path
) -> None:
    with warnings.catch_warnings():  # a training of five steps is poor
        warnings.filterwarnings("ignore", message="the dictionary explains")
        trained = train_dictionary(model, texts, site=SITE, width=64, k=4, steps=5, vectors_per_step=32, skip=1)
    assert isinstance(trained.figures, DictionaryScores)
    assert trained.figures.random is not None
    trained.save(tmp_path / "trained")
    loaded = TrainedDictionary.load(tmp_path / "trained").figures
    assert isinstance(loaded, DictionaryScores)
    assert loaded.random is not None
    assert torch.equal(loaded.random, trained.figures.random)
    assert repr(loaded) == repr(trained.figures)
    older = TrainedDictionary(trained.sae, trained.losses, Scores(torch.ones(1, 1), {"figure": ["L0"]}))
    older.save(tmp_path / "older")
    assert type(TrainedDictionary.load(tmp_path / "older").figures) is Scores
