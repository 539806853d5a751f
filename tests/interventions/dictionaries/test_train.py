"""Training: what was planted is found, on vectors and at a model's site; checkpoints, seeds, figures, mistakes."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.demo.corpus import training_text
from hooked_lm.hooks import wrap
from hooked_lm.interventions.dictionaries import (
    SAE,
    ActivationBatches,
    Activations,
    BatchTopK,
    Gated,
    JumpReLU,
    TopK,
    TrainingConfig,
    Transcoder,
    evaluate_dictionary,
    load,
    train_dictionary,
    train_on,
)  # fmt: skip
from hooked_lm.interventions.dictionaries import train as training_file
from hooked_lm.interventions.dictionaries.stream import batches
from tests.close import assert_close, assert_near
from tests.families import ENCODER_CASES
from tests.families._models import hooked, prompt

D, N, ACTIVE = 20, 32, 3
SITE = "blocks.1.hook_mlp_out"


def planted(seed: int = 99) -> Tensor:
    """Directions that no dictionary begins with."""
    directions = torch.randn(N, D, generator=torch.Generator().manual_seed(seed))
    return directions / directions.norm(dim=1, keepdim=True)


def mixtures(directions: Tensor, rows: int = 4096, seed: int = 98) -> Tensor:
    """Sums of three of the directions, of sizes from 0.5 to 1.5, around a point that is not zero."""
    generator = torch.Generator().manual_seed(seed)
    active = torch.rand(rows, len(directions), generator=generator).argsort(1).argsort(1) < ACTIVE
    sizes = 0.5 + torch.rand(rows, len(directions), generator=generator)
    return (active * sizes) @ directions + 0.3


def found_of(directions: Tensor, sae: SAE) -> float:
    """The mean, over directions, of the best cosine that a feature has with it."""
    rows = sae.W_dec.detach() / sae.W_dec.detach().norm(dim=1, keepdim=True)
    return (directions @ rows.T).max(1).values.mean().item()


def explained(sae: SAE, x: Tensor) -> float:
    return 1 - ((sae(x) - x).pow(2).sum() / (x - x.mean(0)).pow(2).sum()).item()


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = Random(0)
    return [training_text(rng) for _ in range(64)]


# ---- planted ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "cfg", [TopK.Config(D, 48, k=ACTIVE), BatchTopK.Config(D, 48, k=ACTIVE)], ids=["topk", "batchtopk"]
)
def test_planted_directions_are_recovered(cfg: SAE.Config) -> None:
    directions = planted()
    settings = TrainingConfig(steps=500, vectors_per_step=256, learning_rate=3e-3, dead_after=5000)
    sae = train_on(ActivationBatches(mixtures(directions)), cfg, settings).sae
    assert found_of(directions, sae) > 0.9
    assert found_of(directions, cfg.build(0)) < 0.6  # before the training
    assert found_of(planted(7), sae) < 0.75  # of directions that the data do not have
    fresh = mixtures(directions, 1000, seed=1)
    features = sae.encode(fresh)
    assert_near((features > 0).sum(1).float().mean(), ACTIVE, 0.5 / ACTIVE, because="it is trained to, not told")
    assert explained(sae, fresh) > 0.85
    assert not sae.training
    assert_close(sae.W_dec.norm(dim=1), torch.ones(48))


PENALIZED = pytest.mark.parametrize(
    ("cfg", "sparsity"),
    [(SAE.Config(D, 48), 1.5), (JumpReLU.Config(D, 48), 1.0), (Gated.Config(D, 48), 3.0)],
    ids=["standard", "jumprelu", "gated"],
)


@pytest.mark.slow
@PENALIZED
def test_planted_directions_are_recovered_by_kinds_with_a_penalty(cfg: SAE.Config, sparsity: float) -> None:
    directions = planted()
    settings = TrainingConfig(steps=2000, vectors_per_step=256, learning_rate=3e-3, sparsity=sparsity)
    sae = train_on(ActivationBatches(mixtures(directions, 8192)), cfg, settings).sae
    assert found_of(directions, sae) > 0.9
    assert (sae.encode(mixtures(directions, 1000, seed=1)) > 0).sum(1).float().mean() < 6


@pytest.mark.slow
@PENALIZED
def test_the_penalty_makes_features_sparse_and_the_error_small(cfg: SAE.Config, sparsity: float) -> None:
    directions = planted()
    data, fresh = mixtures(directions), mixtures(directions, 1000, seed=1)

    def trained(weight: float) -> SAE:
        settings = TrainingConfig(steps=200, vectors_per_step=256, learning_rate=3e-3, sparsity=weight)
        return train_on(ActivationBatches(data), cfg, settings).sae

    def n_active(sae: SAE) -> float:
        return (sae.encode(fresh) > 0).sum(1).float().mean().item()

    free, sparse = trained(0.0), trained(sparsity)
    assert explained(free, fresh) > 0.9
    assert n_active(sparse) < 0.75 * n_active(free)
    assert explained(sparse, fresh) > 0.5
    assert found_of(directions, sparse) > found_of(directions, cfg.build(0)) + 0.1


class Shy(TopK.Config):
    """Half of the features begin so far below zero that they are never among the largest."""

    def build(self, seed: int = 0) -> TopK:
        sae = super().build(seed)
        with torch.no_grad():
            sae.b_enc[: self.d_sae // 2] = -2
        return sae


@pytest.mark.slow
def test_the_auxiliary_loss_revives_dead_features() -> None:
    data = mixtures(planted())

    def dead(auxiliary: float) -> float:
        settings = TrainingConfig(
            steps=120, vectors_per_step=256, learning_rate=3e-3, dead_after=1000, auxiliary=auxiliary
        )
        sae = train_on(ActivationBatches(data), Shy(D, 128, k=ACTIVE), settings).sae
        return (sae.encode(data) > 0).any(0).logical_not()[:64].float().mean().item()

    assert dead(0.0) > 0.85
    assert dead(1 / 32) < 0.65


ALL_KINDS = [
    SAE.Config(D, 64),
    TopK.Config(D, 64, k=ACTIVE),
    BatchTopK.Config(D, 64, k=ACTIVE),
    JumpReLU.Config(D, 64),
    Gated.Config(D, 64),
    Transcoder.Config(D, 64, d_out=7),
]


def buried(cfg: SAE.Config) -> SAE.Config:
    """The same, with half of the features so far below zero that no vector activates them, and no loss moves them."""

    class Buried(type(cfg)):  # type: ignore[misc]
        def build(self, seed: int = 0) -> SAE:
            sae = super().build(seed)
            with torch.no_grad():
                for weight in sae.per_feature()[: 2 if isinstance(sae, Gated) else 1]:
                    weight[: self.d_sae // 2] = -20
            return sae

    return Buried(**vars(cfg))


@pytest.mark.parametrize("cfg", ALL_KINDS, ids=lambda cfg: type(cfg.build()).kind)
def test_features_of_every_kind_that_nothing_activates_resample(cfg: SAE.Config) -> None:
    data = mixtures(planted())
    is_transcoder = isinstance(cfg, Transcoder.Config)
    written = data @ torch.randn(D, 7, generator=torch.Generator().manual_seed(3)) + 2 if is_transcoder else None

    def dead(resample_after: int | None) -> tuple[float, float]:
        settings = TrainingConfig(
            steps=100, vectors_per_step=256, learning_rate=3e-3, sparsity=0.05 if is_transcoder else 0.5, dead_after=1000,
            resample_after=resample_after,
        )  # fmt: skip
        sae = train_on(ActivationBatches(data, written), buried(cfg), settings).sae
        target = data if written is None else written
        silent = (sae.encode(data) > 0).any(0).logical_not()[:32].float().mean().item()
        return silent, (sae(data) - target).pow(2).sum().item()

    (before, plain_error), (after, error) = dead(None), dead(3000)
    assert before == 1.0  # the auxiliary loss does not reach them
    assert after < 0.2
    if not is_transcoder:  # whose error is that of what its penalty leaves
        assert error < 1.1 * plain_error


def test_a_feature_begins_as_what_is_missing_of_a_vector() -> None:
    data = mixtures(planted(), 64)
    for cfg in ALL_KINDS[:5]:
        training = training_file.DictionaryTraining(
            ActivationBatches(data), cfg, TrainingConfig(steps=9, vectors_per_step=64)
        )
        training.step(data, data, 0)
        x, sae = data * training.scales[0][0], training.parts[0]
        with torch.no_grad():
            missing = x - sae(x)
        which = torch.zeros(64, dtype=torch.bool)
        which[[3, 40, 41]] = True
        before = {name: weight.detach().clone() for name, weight in sae.named_parameters()}
        training.unseen_for[:] = 9
        training._resample(which[None], [x], [missing], 1)
        hidden = sae.hidden(x).detach()
        for feature in (3, 40, 41):
            row = int((sae.W_dec[feature] @ missing.T).div(missing.norm(dim=1)).argmax())
            assert_close(sae.W_dec[feature].detach(), missing[row] / missing[row].norm())
            assert_close(hidden[row, feature], missing[row].norm().clamp(max=D**0.5))  # of a target at most
            assert_close(hidden[:, feature].mean(), torch.tensor(0.0), scale=hidden[:, feature])
        for name, weight in sae.named_parameters():
            rest = (
                before[name]
                if name == "b_dec"
                else before[name].T[~which].T
                if name == "W_enc"
                else before[name][~which]
            )
            now = weight if name == "b_dec" else weight.T[~which].T if name == "W_enc" else weight[~which]
            assert torch.equal(now, rest)
            state = training.optimizer.state[weight]["exp_avg_sq"]
            if name != "b_dec":
                assert not (state.T if name == "W_enc" else state)[which].any()
        assert training.unseen_for.tolist() == [[0 if w else 9 for w in which]]


def test_a_transcoder_learns_a_map_between_two_spaces() -> None:
    directions, generator = planted(), torch.Generator().manual_seed(3)
    read = mixtures(directions)
    written = read @ torch.randn(D, 7, generator=generator) + 2
    settings = TrainingConfig(steps=200, vectors_per_step=256, learning_rate=1e-2, sparsity=0.02)
    cfg = Transcoder.Config(D, 64, d_out=7)
    sae = train_on(ActivationBatches(read, written), cfg, settings).sae
    assert 1 - ((sae(read) - written).pow(2).sum() / (written - written.mean(0)).pow(2).sum()) > 0.8


LEARNED = "thirty steps of Adam, which divides small gradients by themselves, enlarge what was rounded"


def test_the_scale_of_the_data_does_not_matter() -> None:
    data, settings = mixtures(planted()), TrainingConfig(steps=30, vectors_per_step=128)
    small = train_on(ActivationBatches(data), JumpReLU.Config(D, 48), settings).sae
    large = train_on(ActivationBatches(1000 * data), JumpReLU.Config(D, 48), settings).sae
    assert_near(1000 * small(data), large(1000 * data), 1e-3, because=LEARNED)
    assert_near(1000 * small.encode(data), large.encode(1000 * data), 1e-3, because=LEARNED)


# ---- seeds and checkpoints -------------------------------------------------------------------------------------------


def assert_same(one: SAE, other: SAE) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["batchtopk", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("topk", "jumprelu"))]
)
def test_a_training_that_was_broken_off_goes_on_as_if_it_had_not_been(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: HookedTransformer, texts: list[str]
) -> None:
    options: dict[str, Any] = {
        "site": ("mlp_out", 1),
        "kind": kind,
        "width": 160,
        "steps": 12,
        "vectors_per_step": 64,
        "buffer_prompts": 8,
    }
    options |= {"k": 4} if kind != "jumprelu" else {}
    options |= {"dead_after": 64, "resample_after": 192}
    state = torch.get_rng_state()
    whole = train_dictionary(model, texts, **options)
    assert torch.equal(torch.get_rng_state(), state)
    if kind != "jumprelu":  # of which no feature dies so soon
        never = train_dictionary(model, texts, **{**options, "resample_after": None})
        assert not torch.equal(never.sae.W_enc, whole.sae.W_enc)
    assert_same(train_dictionary(model, texts, **options).sae, whole.sae)
    options |= {"directory": tmp_path, "checkpoint_every": 5}
    step = training_file.DictionaryTraining.step

    def breaks_off(self: Any, read: Tensor, written: Tensor, number: int) -> None:
        if number == 8:
            raise KeyboardInterrupt
        step(self, read, written, number)

    with monkeypatch.context() as patched:
        patched.setattr(training_file.DictionaryTraining, "step", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            train_dictionary(model, texts, **options)
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.safetensors"]
    with pytest.raises(ValueError, match="of another training: steps is 12 there and 13 here"):
        train_dictionary(model, texts, **{**options, "steps": 13})
    resumed = train_dictionary(model, texts, **options)
    assert_same(resumed.sae, whole.sae)
    assert torch.equal(resumed.losses.values, whole.losses.values)
    assert torch.equal(resumed.figures.values, whole.figures.values)
    assert_same(load(tmp_path / "dictionary.safetensors"), whole.sae)
    other = train_dictionary(model, texts, **{**options, "directory": None, "seed": 1})
    assert not torch.equal(other.sae.W_enc, whole.sae.W_enc)


@dataclass
class Buffers:
    """Buffers of given sizes, again and again, of vectors that say where they come from."""

    sizes: Sequence[int]

    def fill(self, number: int) -> tuple[Tensor, Tensor]:
        vectors = torch.full((self.sizes[number % len(self.sizes)], 4), 1.0 + number)
        return vectors, vectors

    def about(self) -> dict[str, Any]:
        return {"sizes": list(self.sizes)}


def test_a_small_last_buffer_is_joined_by_the_next() -> None:
    """As the last one of an epoch may be: a training does not end there, and resumes there."""
    stream = Buffers((50, 40, 10))
    found = list(islice(batches(stream, 20, seed=0), 9))
    assert [int(read.amax()) for (read, _), _ in found] == [1, 1, 2, 2, 4, 4, 4, 5, 5]  # buffer 3, joined to 2
    place = found[4][1]
    assert place[0] == 2
    again = batches(stream, 20, 0, *place)
    for (expected, _), after in found[5:]:
        (read, _), place = next(again)
        assert torch.equal(read, expected)
        assert place == after
    settings = TrainingConfig(steps=12, vectors_per_step=20)
    train_on(stream, TopK.Config(d_in=4, d_sae=8, k=2), settings, progress=False)
    with pytest.raises(ValueError, match="the buffer holds 10 vectors, fewer than a step needs"):
        train_on(Buffers((10, 50)), TopK.Config(d_in=4, d_sae=8, k=2), settings, progress=False)


def test_the_model_stays_as_it_was(model: HookedTransformer, texts: list[str]) -> None:
    model.train()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    train_dictionary(model, texts, site=("resid_post", 1), width=160, k=4, steps=3, vectors_per_step=64)
    assert model.training
    model.eval()
    assert all(torch.equal(weight, before[name]) and weight.grad is None for name, weight in model.named_parameters())
    assert all(weight.requires_grad for weight in model.parameters())
    assert not model.list_hooks()


# ---- streams and figures ---------------------------------------------------------------------------------------------


def test_a_filling_is_the_vectors_of_the_next_texts_without_padding(model: HookedTransformer, texts: list[str]) -> None:
    stream = Activations(model, texts[:6], SITE, buffer_prompts=4, batch_size=3, skip=1)
    seen = torch.cat([stream.fill(number)[0] for number in range(3)])  # twice each of the six texts

    def of(text: str) -> Tensor:
        return model.run_with_cache(text, names_filter=SITE)[1][SITE][0, 1:]

    expected = torch.cat([of(text) for text in texts[:6]])
    assert len(seen) == 2 * len(expected)
    assert (torch.cdist(expected, seen, compute_mode="donot_use_mm_for_euclid_dist") < 1e-3).sum(1).ge(2).all()
    assert torch.equal(stream.fill(1)[0], stream.fill(1)[0])
    heads = Activations(model, texts[:6], ("z", 0)).fill(0)[0]
    assert heads.shape[1] == model.cfg.n_heads * model.cfg.d_head


def test_figures_are_those_of_hand_written_runs(model: HookedTransformer, texts: list[str]) -> None:
    sae = train_dictionary(model, texts, site=SITE, width=160, k=4, steps=10, vectors_per_step=64, held_out=0).sae
    apart = texts[:5]
    figures = evaluate_dictionary(model, apart, sae, batch_size=2)
    rows = [model.run_with_cache(text, names_filter=SITE)[1][SITE][0] for text in apart]
    x = torch.cat(rows)
    features = sae.encode(x)

    def loss(change: Any) -> float:
        each = [
            model.run_with_hooks(t, return_type="loss", loss_per_token=True, fwd_hooks=[(SITE, change)]) for t in apart
        ]
        return torch.cat([losses.flatten() for losses in each]).mean().item()

    plain, spliced = loss(lambda v, hook: None), loss(lambda v, hook: sae(v))
    mean, zero = loss(lambda v, hook: x.mean(0).expand_as(v).clone()), loss(lambda v, hook: torch.zeros_like(v))
    probabilities = [
        [model.run_with_hooks(text, fwd_hooks=[(SITE, change)])[0, :-1].log_softmax(-1) for text in apart]
        for change in (lambda v, hook: None, lambda v, hook: sae(v))
    ]
    log_p, log_q = (torch.cat(each) for each in probabilities)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    expected = {
        "explained variance": explained(sae, x), "L0": (features > 0).sum(1).float().mean().item(),
        "dead": (features > 0).any(0).logical_not().float().mean().item(), "CE": plain, "CE spliced": spliced,
        "CE mean-ablated": mean, "CE zero-ablated": zero, "CE recovered (mean)": (mean - spliced) / (mean - plain),
        "CE recovered (zero)": (zero - spliced) / (zero - plain), "KL spliced": divergence,
    }  # fmt: skip
    assert list(figures.axes["figure"]) == list(expected)
    assert_close(figures.values[:, 0].tolist(), list(expected.values()))
    assert len({round(value, 3) for value in (plain, spliced, mean, zero)}) == 4


@pytest.mark.slow
def test_a_poor_dictionary_says_so(model: HookedTransformer, texts: list[str]) -> None:
    """After three steps; one that trains long enough, and has as many features as are needed, says nothing."""
    common: dict[str, Any] = {"site": ("mlp_out", 1), "kind": "topk", "progress": False}
    with pytest.warns(
        UserWarning, match=r"the dictionary explains 0\.\d\d of the variance .*train longer \(steps, now 1\)"
    ):
        train_dictionary(model, texts, **common, width=64, k=4, steps=1)
    with pytest.warns(UserWarning, match=r"has \d\d% features that are never active there, .* \(width, now 4,096\)"):
        train_dictionary(model, texts, **common, width=4096, k=1, steps=30)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train_dictionary(model, texts, **common, width=64, k=16, steps=60)
    assert found.figures is not None
    assert found.figures.select(figure="explained variance").mean > 0.5


def test_a_dictionary_that_loses_nothing_recovers_everything(model: HookedTransformer, texts: list[str]) -> None:
    class Halves:
        def encode(self, x: Tensor) -> Tensor:
            return torch.cat([x.relu(), (-x).relu()], -1)

        def decode(self, features: Tensor) -> Tensor:
            positive, negative = features.chunk(2, -1)
            return positive - negative

    for skip in (0, 1):
        figures = evaluate_dictionary(model, texts[:5], Halves(), site=SITE, skip=skip)
        shares = ["explained variance", "CE recovered (mean)", "CE recovered (zero)"]
        assert_close(figures.select(figure=shares).mean, torch.ones(3))
    reads, writes = "blocks.1.mlp.hook_in", SITE
    options: dict[str, Any] = {"width": 160, "steps": 5, "vectors_per_step": 64, "k": 4}
    trained = train_dictionary(model, texts, site=reads, site_out=writes, **options)
    assert trained.figures.select(figure="CE recovered (zero)").mean.isfinite()
    assert (trained.sae.cfg.hook_point, trained.sae.cfg.hook_point_out) == (reads, writes)


def test_models_of_other_classes() -> None:
    case = ENCODER_CASES[0]
    model, tokens = hooked(case), prompt(case, batch=8).clamp(min=3)
    site = next(name for name in model.all_points() if name.endswith("hook_mlp_out"))
    trained = train_dictionary(model, tokens, site=site, width=40, k=3, steps=3, vectors_per_step=16)
    assert list(trained.figures.axes["figure"]) == ["explained variance", "L0", "dead"]
    net = wrap(torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU()))
    trained = train_dictionary(net, torch.randn(50, 4), site="1", width=12, k=3, steps=3, vectors_per_step=16)
    assert trained.figures.select(figure="L0").mean <= 3


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_what_is_not_finite_is_an_error_and_nothing_is_saved(tmp_path: Path) -> None:
    data, cfg = mixtures(planted()), TopK.Config(D, 48, k=3)
    data[17, 3] = torch.nan
    with pytest.raises(ValueError, match="mean norm of nan"):
        train_on(ActivationBatches(data), cfg, directory=tmp_path)

    class Spoils(SAE):
        def penalty(self, hidden: Tensor, features: Tensor) -> Tensor:
            return super().penalty(hidden, features) * torch.nan

    class Config(SAE.Config):
        def build(self, seed: int = 0) -> SAE:
            return Spoils(self, seed)

    with pytest.raises(FloatingPointError, match="the loss is nan in step 0"):
        train_on(ActivationBatches(mixtures(planted())), Config(D, 48), TrainingConfig(steps=5), directory=tmp_path)
    assert not list(tmp_path.iterdir())


def test_settings_that_make_no_sense_are_refused(model: HookedTransformer, texts: list[str]) -> None:
    for name, wrong in {
        "steps": 0,
        "vectors_per_step": 0,
        "learning_rate": 0.0,
        "sparsity": -1.0,
        "held_out": 1.0,
        "buffer_prompts": 0,
        "batch_size": 0,
        "resample_after": 0,
    }.items():
        with pytest.raises(ValueError, match=name):
            train_dictionary(model, texts, site=SITE, width=160, k=4, **{name: wrong})
    with pytest.raises(ValueError, match="no dictionary of kind 'odd'; there are standard, topk"):
        train_dictionary(model, texts, site=SITE, width=160, kind="odd")
    with pytest.raises(ValueError, match="matches 4 sites"):
        train_dictionary(model, texts, site="blocks.*.hook_mlp_out", width=160, k=4)
    with pytest.raises(ValueError, match=r"'corpus\.jsonl' is the name of a file, not a text"):
        Activations(model, "corpus.jsonl", SITE)
    with pytest.raises(ValueError, match="prompts is empty: give at least one"):
        train_dictionary(model, [], site=SITE, width=160, k=4)
    with pytest.raises(ValueError, match=r"buffer holds .* fewer than a step needs \(4096\)"):
        train_dictionary(model, texts, site=SITE, width=160, k=4, vectors_per_step=4096, steps=2)
    with pytest.raises(
        ValueError, match="widths 20 and 20, and the dictionary has inputs of width 5 and outputs of width 5"
    ):
        train_on(ActivationBatches(mixtures(planted())), SAE.Config(5, 9))
    with pytest.raises(TypeError, match="train_dictionary has no argument 'widht'; did you mean 'width'"):
        train_dictionary(model, texts, site=SITE, width=160, widht=3)
    with pytest.raises(TypeError, match="train_dictionary has no argument 'k'"):  # a setting of another kind
        train_dictionary(model, texts, site=SITE, width=160, kind="standard", k=3)


def test_batch_size_is_how_many_prompts_run_together(model: HookedTransformer, texts: list[str]) -> None:
    sizes: list[int] = []
    with model.hooks([("hook_tokens", lambda tokens, hook: sizes.append(len(tokens)))]):
        options: dict[str, Any] = {"width": 160, "k": 4, "steps": 2, "vectors_per_step": 16}
        train_dictionary(model, texts[:12], site=SITE, batch_size=5, held_out=0.5, **options)
    assert max(sizes) == 5
    assert sizes.count(5) > 1
