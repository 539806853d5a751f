"""A Jacobian lens is what finite differences measure; it is kept, moved to folded weights, and refused by other models."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, VisionInputs
from hooked_lm.analysis import BackwardRules, JacobianLens, fit_jacobian_lens, logit_lens
from hooked_lm.analysis.reading.jacobians import PromptJacobian, PromptJacobians
from hooked_lm.hooks import HookPoint
from hooked_lm.models.twins import twin_of
from hooked_lm.results import stored
from tests.analysis.reading.test_lens import linear_model
from tests.close import GRADIENT, assert_apart, assert_close, assert_near, is_close
from tests.models.vision.test_toy import IMAGE, pixels, toy

TEXTS = [f"The capital of {name} is" for name in ("France", "Spain", "Italy", "Greece", "Egypt")]
WIDTH = 6
SIZES: dict[str, Any] = {
    "n_layers": 3, "d_model": WIDTH, "n_heads": 2, "d_head": 3, "d_mlp": 10, "d_vocab": 20, "n_ctx": 12, "act_fn": "gelu_new",
    "normalization_type": "LN", "seed": 0, "device": "cpu", "dtype": torch.float64,
}  # fmt: skip


def tiny(**fields: Any) -> HookedTransformer:
    """A small random model in double precision, with weights large enough that the blocks matter."""
    model = HookedTransformer(HookedTransformerConfig(**{**SIZES, **fields}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = 0.5 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.copy_(1 + drawn if name.endswith(".w") else drawn)
    return model


def ids(n_prompts: int = 1, n_pos: int = 7, seed: int = 1, d_vocab: int = 20) -> Tensor:
    return torch.randint(d_vocab, (n_prompts, n_pos), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def lens(demo: HookedTransformer) -> JacobianLens:
    return fit_jacobian_lens(demo, TEXTS, held_out=0.4)


# ---- what it is ------------------------------------------------------------------------------------------------------


def measured(model: HookedTransformer, tokens: Tensor, layer: int, positions: range, size: float = 1e-5) -> Tensor:
    """The Jacobian of a prompt by central differences: each dimension of each source moved alone, in a row of a batch."""
    site, last = f"blocks.{layer}.hook_resid_post", f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    found = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for source in positions:
        moves = torch.zeros(2 * WIDTH, tokens.shape[1], WIDTH, dtype=torch.float64)
        moves[:, source] = size * torch.cat([torch.eye(WIDTH), -torch.eye(WIDTH)]).double()
        hooks = [(site, lambda value, hook, moves=moves: value + moves)]
        with model.hooks(hooks):
            _, cache = model.run_with_cache(tokens.expand(2 * WIDTH, -1), names_filter=last)
        up, down = (
            cache[last][:, list(positions)].sum(1).split(WIDTH)
        )  # all targets that count; those before do not move
        found += ((up - down) / (2 * size)).T / len(positions)
    return found


@pytest.mark.parametrize("kind", ["LN", pytest.param("RMS", marks=pytest.mark.slow)])
def test_it_is_what_finite_differences_measure(kind: str):
    """The mean over prompts of the mean over sources of the sum over targets, without the first positions and the last."""
    model, tokens = tiny(normalization_type=kind), ids(2)
    found = fit_jacobian_lens(model, tokens, skip=2, sinks=None, outliers="keep", held_out=0)
    assert found.about["positions"] == 2 * 4
    for layer in range(3):
        expected = torch.stack([measured(model, row[None], layer, range(2, 6)) for row in tokens]).mean(0)
        assert_near(
            found.J[layer].double(), expected, 1e-6, because="central differences with steps of 1e-5, kept in fp32"
        )
    assert_apart(found.J[0], torch.eye(WIDTH))
    whole = fit_jacobian_lens(model, tokens, skip=0, sinks=None, outliers="keep", held_out=0)
    assert_apart(whole.J[0], found.J[0])  # the positions matter


def test_at_the_last_layer_it_is_the_identity(lens: JacobianLens, demo: HookedTransformer):
    assert_close(lens.J[-1], torch.eye(128))
    plain, read = (logit_lens(demo, TEXTS[0], lens=one, layers=[3], answers=" Paris") for one in (None, lens))
    assert_close(read.answers.values, plain.answers.values)


def test_of_a_linear_model_it_is_the_product_of_the_maps():
    model, M = linear_model(torch.Generator().manual_seed(0))
    tokens = ids(3, 8, d_vocab=24)
    found = fit_jacobian_lens(model, tokens, held_out=0.4)
    assert_close(found.J[0], (torch.eye(4) + M).T, depth=GRADIENT)
    assert_close(found.held_out.mean[0], torch.tensor(1.0))  # every prompt has the same
    assert found.held_out.mean[1].isnan()  # and nothing is to be explained
    streams = model.run_with_cache(tokens)[1]
    assert_close(found(streams["resid_post", 0], 0), streams["resid_post", 1])


def without_biases() -> HookedTransformer:
    model = tiny(normalization_type="RMS", act_fn="silu", gated_mlp=True)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".b_" in name:
                weight.zero_()
    return model


def test_by_the_rules_of_relp_it_gives_the_stream_itself():
    """Of one position, to which attention is 1, and without biases each part is the product of its input and the gradient."""
    model, tokens = without_biases(), ids(1, 2)
    streams = model.run_with_cache(tokens)[1]
    last = streams["resid_post", 2][0, 0].float()
    found = {name: fit_jacobian_lens(model, tokens, backward=name, skip=0, held_out=0) for name in ("relp", "plain")}
    for layer in range(3):
        assert_close(found["relp"](streams["resid_post", layer][0, 0], layer).float(), last, depth=GRADIENT)
    assert_apart(found["plain"](streams["resid_post", 0][0, 0], 0).float(), last)
    assert (found["relp"].name, found["plain"].name) == ("R-lens", "Jacobian lens")
    own = fit_jacobian_lens(model, tokens, backward=BackwardRules(freeze_norms=True), skip=0, held_out=0)
    assert own.name == "Jacobian lens (own rules)"
    assert_apart(own.J[0], found["plain"].J[0])


def test_earlier_positions_are_no_targets():
    """The rows of a source do not depend on what is before it, so a lens of the last source is that of its targets alone."""
    model, tokens = tiny(), ids()
    late = fit_jacobian_lens(model, tokens, skip=5, sinks=None, held_out=0)  # one source, one target: position 5 of 7
    assert_near(late.J[0].double(), measured(model, tokens, 0, range(5, 6)), 1e-6, because="central differences")


# ---- memory, interruptions -------------------------------------------------------------------------------------------


def test_memory_bounds_the_rows_of_a_pass(monkeypatch: pytest.MonkeyPatch):
    model, tokens, rows = tiny(), ids(), []
    run = PromptJacobians._run
    monkeypatch.setattr(PromptJacobians, "_run", lambda self, text, n: rows.append(n) or run(self, text, n))
    whole = fit_jacobian_lens(model, tokens, held_out=0)
    one = PromptJacobians(model, "resid_post", [0, 1, 2], BackwardRules(), 1, None, "auto").token_bytes * 7
    some = fit_jacobian_lens(model, tokens, held_out=0, max_memory=4 * one)
    assert rows == [WIDTH, 4]
    assert_close(some.J, whole.J)
    with pytest.raises(ValueError, match="too small: one copy of a prompt of 7 tokens"):
        fit_jacobian_lens(model, tokens, held_out=0, max_memory=one - 1)


def test_an_interrupted_fit_goes_on_to_the_same_numbers(tmp_path: Path):
    model, tokens, file, runs = tiny(), ids(6), tmp_path / "sums.safetensors", []

    def counted(value: Tensor, hook: HookPoint) -> None:
        runs.append(1)
        if len(runs) == 4:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"held_out": 0, "resume_file": file, "progress": False}
    whole = fit_jacobian_lens(model, tokens, held_out=0)
    with pytest.raises(KeyboardInterrupt), model.hooks([("blocks.2.hook_resid_pre", counted)]):
        fit_jacobian_lens(model, tokens, held_out=0, resume_file=file)
    with pytest.raises(ValueError, match="holds another fit"):
        fit_jacobian_lens(model, tokens, **options)  # the hook was part of the model
    file.unlink()

    computed, of = [], PromptJacobians.of

    def stopping(self: PromptJacobians, text: Any) -> PromptJacobian | None:
        computed.append(text)
        if len(computed) == 4:
            raise KeyboardInterrupt
        return of(self, text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PromptJacobians, "of", stopping)
        with pytest.raises(KeyboardInterrupt):
            fit_jacobian_lens(model, tokens, **options)
        again = fit_jacobian_lens(model, tokens, **options)
    assert len(computed) == 4 + 3  # three were kept
    assert torch.equal(again.J, whole.J)
    assert torch.equal(again.lengths, whole.lengths)
    assert again.about["positions"] == whole.about["positions"]
    with pytest.raises(ValueError, match="holds another fit"):
        fit_jacobian_lens(model, tokens, skip=2, **options)


# ---- what is left out ------------------------------------------------------------------------------------------------


@pytest.fixture
def with_outlier(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the Jacobian of the third prompt twenty times as large."""
    of, met = PromptJacobians.of, {}

    def spoiled(self: PromptJacobians, text: Any) -> PromptJacobian | None:
        found, key = of(self, text), text.tokens.flatten().tolist()[0]
        met.setdefault(key, len(met))
        if met[key] != 2 or found is None:
            return found
        eye = torch.eye(WIDTH, dtype=torch.float64)
        return replace(found, J=eye + 20 * (found.J - eye))

    return lambda: monkeypatch.setattr(PromptJacobians, "of", spoiled)


def test_outliers_are_winsorized_or_left_out(with_outlier: Callable[[], None]):
    model, tokens = tiny(), ids(5)
    tokens[:, 0] = torch.arange(5)
    each = [fit_jacobian_lens(model, row[None], held_out=0).J.double() for row in tokens]
    eye = torch.eye(WIDTH, dtype=torch.float64)
    with_outlier()
    found = {
        rule: fit_jacobian_lens(model, tokens, held_out=0, outliers=rule) for rule in ("winsorize", "leave out", "keep")
    }
    assert_close(found["leave out"].J.double(), torch.stack(each[:2] + each[3:]).mean(0), dtype=torch.float32)
    each[2] = eye + 20 * (each[2] - eye)
    assert_close(found["keep"].J.double(), torch.stack(each).mean(0), dtype=torch.float32)
    sizes = torch.stack([(one - eye).flatten(1).norm(dim=1) for one in each])
    limit = 3 * sizes.median(0).values
    assert bool((sizes[2, :2] > limit[:2]).all())
    each[2] = eye + (limit / sizes[2]).nan_to_num()[:, None, None] * (each[2] - eye)
    assert_close(found["winsorize"].J.double(), torch.stack(each).mean(0), dtype=torch.float32)
    assert "1 outlier winsorized" in repr(found["winsorize"])
    assert "1 outlier left out" in repr(found["leave out"])
    assert found["leave out"].about["prompts"] == 4
    assert found["keep"].about["left_out"]["outliers"] == {"prompts": 0, "rule": "keep", "limit": 3.0}


def test_sinks_are_left_out_and_said():
    model, tokens = tiny(), ids()

    def sink(value: Tensor, hook: HookPoint) -> Tensor:
        value[:, 3] *= 100
        return value

    with model.hooks([("blocks.0.hook_resid_post", sink)]):
        found = fit_jacobian_lens(model, tokens, held_out=0)
        every = fit_jacobian_lens(model, tokens, held_out=0, sinks=None)
    assert found.about["left_out"]["sinks"] == 1
    assert (found.about["positions"], every.about["positions"]) == (4, 5)
    assert "without 1 first position and 1 sink" in repr(found)
    assert_apart(found.J[0], every.J[0])


def test_padding_counts_for_nothing():
    """A prompt of images and text gives the same lens with padding on its left."""
    model, tokens = toy(), torch.tensor([[1, *[IMAGE] * 4, 2, 3, 10]])
    images = {"pixel_values": pixels(1)}
    padded = torch.nn.functional.pad(tokens, (5, 0))
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (5, 0))
    whole, with_padding = (
        fit_jacobian_lens(model, inputs, skip=2, held_out=0)
        for inputs in (VisionInputs(tokens, images), VisionInputs(padded, images, mask))
    )
    assert whole.about["positions"] == with_padding.about["positions"] == 8 - 2 - 1
    assert_close(with_padding.J, whole.J, depth=GRADIENT)
    assert_close(with_padding.lengths, whole.lengths, depth=GRADIENT)
    assert_apart(whole.J[0], torch.eye(24))


def test_prompts_without_positions_are_warned_of_or_refused(demo: HookedTransformer):
    with pytest.warns(UserWarning, match="1 of 2 prompts have no position that counts"):
        found = fit_jacobian_lens(demo, ["Mary", TEXTS[0]], layers=[3], held_out=0, skip=2)
    assert found.about["left_out"]["short_prompts"] == 1
    with pytest.raises(ValueError, match="no prompt has a position that counts: the first 20"):
        fit_jacobian_lens(demo, TEXTS, layers=[3], skip=20)


# ---- one model's -----------------------------------------------------------------------------------------------------


def test_folded_weights_read_the_same(demo: HookedTransformer, lens: JacobianLens):
    """Folds move the stream by its mean at most, which the final norm takes out: both lenses fit both models."""
    raw = HookedTransformer.from_pretrained_no_processing("demo")
    of_raw = fit_jacobian_lens(raw, TEXTS, held_out=0.4)
    reads = [
        logit_lens(model, TEXTS[1], lens=one, answers=" Madrid") for model in (demo, raw) for one in (lens, of_raw)
    ]
    expected = reads[0].answers.select(metric="log_probability").values
    for read in reads[1:]:
        assert_close(read.answers.select(metric="log_probability").values, expected, depth=GRADIENT)
    assert_apart(logit_lens(demo, TEXTS[1], answers=" Madrid").answers.values, reads[0].answers.values)
    centre = torch.eye(128) - 1 / 128
    assert_close(lens.J, torch.eye(128) + centre @ (of_raw.J - torch.eye(128)), depth=GRADIENT)
    one, other = lens.vectors(demo, [" Paris", " Rome"]), of_raw.vectors(raw, [" Paris", " Rome"])
    assert_close(one[:, 0] - one[:, 1], other[:, 0] - other[:, 1], depth=GRADIENT)  # `W_U` is centred in one of them
    assert_close(of_raw.vectors(demo, [" Paris", " Rome"]), one, depth=GRADIENT)


def test_other_models_are_refused_by_name(demo: HookedTransformer, lens: JacobianLens):
    with pytest.raises(ValueError, match=r"other weights of demo .* says something else: a log probability is"):
        logit_lens(twin_of(demo), TEXTS[0], lens=lens)
    with pytest.raises(ValueError, match="with 4 layers and d_model 128; this model has 3 and 6"):
        logit_lens(tiny(), ids(), lens=lens)
    with pytest.raises(ValueError, match="'resid_post', not on 'resid_pre'"):
        logit_lens(demo, TEXTS[0], lens=lens, site="resid_pre")
    with pytest.raises(ValueError, match="does not know what the model says"):
        logit_lens(twin_of(demo), TEXTS[0], lens=replace(lens, probe=None))
    some = replace(lens, J=lens.J[1:2], layers=(1,), lengths=lens.lengths[1:2])
    with pytest.raises(ValueError, match=r"not fitted for layers \[0\]"):
        logit_lens(demo, TEXTS[0], lens=some, layers=[0])


@pytest.mark.slow
def test_half_precision_is_the_same_model(lens: JacobianLens):
    half = HookedTransformer.from_pretrained("demo", dtype="bfloat16")
    found = logit_lens(half, TEXTS[0], lens=lens, positions=[-1], answers=" Paris").answers
    assert found.select(metric="rank", layer=3).mean.item() == 0


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_holds_everything(lens: JacobianLens, demo: HookedTransformer, tmp_path: Path):
    lens.save(tmp_path / "lens.safetensors")
    again = JacobianLens.load(tmp_path / "lens.safetensors")
    assert (again.about, repr(again), again.layers) == (lens.about, repr(lens), lens.layers)
    for name in ("J", "lengths"):
        assert torch.equal(getattr(again, name), getattr(lens, name))
    again.check(demo, "resid_post", [0])
    assert again.to_dataframe().equals(lens.to_dataframe())
    with pytest.raises(ValueError, match="holds type JacobianLens, not TunedLens"):
        stored.read(tmp_path / "lens.safetensors", "hooked_lm.TunedLens")


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_the_published_layout(lens: JacobianLens, demo: HookedTransformer, tmp_path: Path, ending: str):
    file = tmp_path / f"lens.{ending}"
    lens.to_published(file, torch.float32)
    again = JacobianLens.from_published(file, demo)
    assert torch.equal(again.J[:3], lens.J[:3])
    assert torch.equal(again.J[3], torch.eye(128))
    assert again.about["prompts"] == lens.about["prompts"]
    again.check(demo, "resid_post", [0, 3])
    if ending == "pt":
        content = torch.load(file, weights_only=True)
        assert content.keys() == {"J", "n_prompts", "source_layers", "d_model", "metadata"}
        assert (content["source_layers"], content["d_model"]) == ([0, 1, 2], 128)
    with pytest.raises(ValueError, match="it is of another model"):
        JacobianLens.from_published(file, tiny())
    with pytest.raises(ValueError, match="does not know how long the vectors"):
        again.steer(demo, " Paris")
    assert_close(again.measured(demo, TEXTS).lengths.isfinite().float(), torch.ones(4))
    assert again.measured(demo, TEXTS).steer(demo, " Paris", [1])[0].coefficient > 0


class Runs:
    def __reduce__(self) -> Any:
        return (print, ("this ran",))


def test_what_is_no_published_lens_is_refused(
    demo: HookedTransformer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "lens.pt"
    file.write_bytes(pickle.dumps({"J": Runs()}))
    with pytest.raises(ValueError, match="no file of tensors and numbers"):
        JacobianLens.from_published(file, demo)
    assert "this ran" not in capsys.readouterr().out
    for content, said in (
        ({"weights": torch.eye(2)}, "holds no Jacobian lens"),
        ({"J": {0: torch.ones(2)}}, "holds no"),
    ):
        torch.save(content, file)
        with pytest.raises(ValueError, match=said):
            JacobianLens.from_published(file, demo)
    with pytest.raises(FileNotFoundError):
        JacobianLens.from_published(tmp_path / "none.pt", demo)
    sums = {"jacobian_sum": {0: 4 * torch.eye(128)}, "n_done": 2, "target_layer": 3}
    torch.save(sums, file)
    found = JacobianLens.from_published(file, demo)
    assert torch.equal(found.J[0], 2 * torch.eye(128))
    torch.save({**sums, "target_layer": 2}, file)
    with pytest.raises(ValueError, match="the target layer 2"):
        JacobianLens.from_published(file, demo)


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"skip": -1}, ValueError, "skip must be at least 0"),
        ({"sinks": 0.5}, ValueError, "above 1, or None"),
        ({"outliers": "drop"}, ValueError, "'winsorize', 'leave out', 'keep'"),
        ({"held_out": 1}, ValueError, "from 0 and below 1"),
        ({"layers": None}, ValueError, "not None"),
        ({"layers": [4]}, IndexError, "layer 4 is out of range"),
        ({"site": "pattern"}, ValueError, "is not a residual stream"),
        ({"backward": "eap"}, ValueError, "backward must be one of"),
        ({"prompts": TEXTS[:1]}, ValueError, "give at least 2, or held_out=0"),
        ({"prompts": []}, ValueError, "there are 0"),
        ({"max_memory": "lots"}, ValueError, "max_memory must be"),
    ],
)
def test_what_is_wrong_is_said(demo: HookedTransformer, options: dict[str, Any], error: type, said: str):
    with pytest.raises(error, match=said):
        fit_jacobian_lens(demo, **{"prompts": TEXTS, **options})


def test_attention_in_both_directions_is_refused():
    model = HookedTransformer(HookedTransformerConfig(**{**SIZES, "attention_dir": "bidirectional"}))
    with pytest.raises(ValueError, match="layer 0 attends in both directions"):
        fit_jacobian_lens(model, ids())


def test_a_placebo_has_the_same_lengths_and_angles(lens: JacobianLens, demo: HookedTransformer):
    placebo, tokens = lens.rotated(), [" Paris", " Rome", " she"]
    one, other = lens.vectors(demo, tokens), placebo.vectors(demo, tokens)
    assert_close(other @ other.mT, one @ one.mT, depth=GRADIENT)
    assert torch.nn.functional.cosine_similarity(one, other, dim=-1).abs().max() < 0.4  # of 128 dimensions, 12 draws
    assert not is_close(lens.rotated(1).J, placebo.J)
    assert torch.equal(lens.rotated().J, placebo.J)
    assert (placebo.name, "rotated Jacobian lens" in repr(placebo)) == ("rotated Jacobian lens", True)
