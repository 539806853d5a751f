"""`sae_lens.synthetic` on the same activations and dictionaries: equal figures."""

from typing import Any

import pytest
from sae_lens.registry import get_sae_class
from sae_lens.synthetic import (
    ActivationGenerator,
    FeatureDictionary,
    eval_sae_on_synthetic_data,
)
from torch import Tensor

from hooked_lm.interventions.dictionaries import (
    SyntheticFeatures,
    SyntheticSample,
    evaluate_recovery,
    pca_dictionary,
    random_dictionary,
    synthetic_features,
)
from tests.close import assert_close, assert_near

ROWS = 4000
SAME = {  # our figure -> theirs
    "MCC": "mcc",
    "uniqueness": "uniqueness",
    "explained variance": "explained_variance",
    "L0": "sae_l0",
}


class Replayed(ActivationGenerator):
    """Their generator, which draws the features of a sample of ours."""

    def __init__(self, sample: SyntheticSample) -> None:
        super().__init__(sample.features.shape[1], 0.5)
        self.given = sample.features

    def sample(self, batch_size: int) -> Tensor:
        return self.given[:batch_size]


@pytest.fixture(scope="module")
def truth() -> SyntheticFeatures:
    return synthetic_features(40, 16, active=2.5, n_parents=4)


def theirs(sae: Any) -> Any:
    """A dictionary of theirs with the weights of one of ours."""
    cls, config = get_sae_class("topk" if hasattr(sae.cfg, "k") else "jumprelu")
    options = {"k": sae.cfg.k} if hasattr(sae.cfg, "k") else {}
    made = cls(config(d_in=sae.cfg.d_in, d_sae=sae.cfg.d_sae, **options))
    made.load_state_dict(sae.state_dict())
    return made.eval()


def dictionaries(truth: SyntheticFeatures) -> dict[str, Any]:
    x = truth.sample(2000).activations
    return {"true": truth.dictionary(), "random": random_dictionary(x, 64, 3), "PCA": pca_dictionary(x, 32, 3)}


@pytest.mark.filterwarnings("ignore:the dictionary is no better than a random one")
@pytest.mark.parametrize("kind", ["true", "random", "PCA"])
def test_figures_are_theirs(truth: SyntheticFeatures, kind: str) -> None:
    sae = dictionaries(truth)[kind]
    sample = truth.sample(ROWS, 1_000_003)  # the rows of seed 0
    directions = FeatureDictionary(truth.n_features, truth.d_model, initializer=None)
    directions.feature_vectors.data.copy_(truth.directions)
    expected = eval_sae_on_synthetic_data(theirs(sae), directions, Replayed(sample), num_samples=ROWS)
    found = evaluate_recovery(truth, sae, rows=ROWS, control=None).figures
    ours = dict(zip(found.axes["figure"], found.mean.tolist(), strict=True))
    for name, of_theirs in SAME.items():
        assert_near(ours[name], getattr(expected, of_theirs), 1e-4, because="their sums are in single precision")
    assert_close(ours["F1 by latent"], expected.classification.f1_score)
    assert round(ours["dead"] * len(sae.W_dec)) == expected.dead_latents
    assert_near(found.about["true L0"], expected.true_l0, 0.05, because="ours is expected, theirs is of these rows")
