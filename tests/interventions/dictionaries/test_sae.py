"""Dictionaries by their formulas, and spliced into runs of models of several kinds."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer
from hooked_lm.analysis import features_table, max_activating_examples
from hooked_lm.hooks import HookPoint, wrap
from hooked_lm.interventions import Hooks
from hooked_lm.interventions.dictionaries import (
    SAE,
    BatchTopK,
    Dictionary,
    Features,
    Gated,
    JumpReLU,
    Normalized,
    TopK,
    Transcode,
    Transcoder,
    evaluate_dictionary,
    run_with_features,
)  # fmt: skip
from tests.close import assert_apart, assert_close, assert_near
from tests.families import DECODER_CASES, ENCODER_CASES
from tests.families._models import hooked, prompt

D, WIDTH = 128, 64
SITE = "blocks.1.hook_mlp_out"
TEXTS = ["The capital of France is", "When Mary and John went to the store, John gave"]
CONFIGS = [
    SAE.Config(D, WIDTH),
    TopK.Config(D, WIDTH, k=5),
    BatchTopK.Config(D, WIDTH, k=5),
    JumpReLU.Config(D, WIDTH, threshold=0.4),
    Gated.Config(D, WIDTH),
    Transcoder.Config(D, WIDTH),
]


def filled(cfg: SAE.Config, seed: int = 3) -> SAE:
    """A dictionary whose every weight is some number, biases and thresholds included."""
    sae = cfg.build(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sae.state_dict().items():
            noise = 0.3 * torch.randn(weight.shape, generator=generator)
            weight.copy_(noise.abs() if name == "threshold" else weight + noise)
    return sae.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture
def sae() -> SAE:
    return filled(TopK.Config(D, WIDTH, k=5))


# ---- formulas --------------------------------------------------------------------------------------------------------


def by_hand(sae: SAE, x: Tensor) -> Tensor:
    """Features of one vector, number by number."""
    centred = [float(v) - float(b) for v, b in zip(x, sae.b_dec, strict=True)] if sae.cfg.subtract_b_dec else x.tolist()
    read = [sum(c * float(w) for c, w in zip(centred, column, strict=True)) for column in sae.W_enc.T]
    if isinstance(sae, Gated):
        sizes = [float(r.exp()) * h + float(b) for r, h, b in zip(sae.r_mag, read, sae.b_mag, strict=True)]
        opened = [h + float(b) > 0 for h, b in zip(read, sae.b_gate, strict=True)]
        return torch.tensor([max(size, 0.0) if is_open else 0.0 for size, is_open in zip(sizes, opened, strict=True)])
    hidden = [h + float(b) for h, b in zip(read, sae.b_enc, strict=True)]
    if isinstance(sae, (JumpReLU, BatchTopK)):
        return torch.tensor([h if h > max(float(t), 0) else 0.0 for h, t in zip(hidden, sae.threshold, strict=True)])
    least = sorted(hidden)[-sae.cfg.k] if isinstance(sae, TopK) else 0.0
    return torch.tensor([h if h >= least and h > 0 else 0.0 for h in hidden])


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: type(cfg.build()).kind)
def test_each_kind_computes_its_formula(cfg: SAE.Config) -> None:
    sae, x = filled(cfg), torch.randn(2, 3, D)
    features = sae.encode(x)
    assert 0.02 < (features > 0).float().mean() < 0.9  # something is on, and something off
    assert_close(features[1, 2], by_hand(sae, x[1, 2]))
    made = sum(f * row for f, row in zip(features[1, 2], sae.W_dec, strict=True)) + sae.b_dec
    assert_close(sae(x)[1, 2], made)


def test_batch_topk_shares_k_among_the_rows_of_a_batch_in_training() -> None:
    sae, x = filled(BatchTopK.Config(D, WIDTH, k=5)).train(), torch.randn(40, D)
    x[0] *= 10
    active = (sae.encode(x) > 0).sum(1)
    assert active.sum() == 40 * 5
    assert active[0] > 5
    hidden = ((x - sae.b_dec) @ sae.W_enc + sae.b_enc).relu()
    least = hidden.flatten().sort(descending=True).values[40 * 5 - 1]
    assert torch.equal(sae.encode(x), hidden * (hidden >= least))


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: type(cfg.build()).kind)
def test_features_in_other_units_mean_the_same(cfg: SAE.Config) -> None:
    sae, same, x = filled(cfg), filled(cfg), torch.randn(50, D)
    factors = torch.full((WIDTH,), 3.0)
    same.scale_features_(factors)
    assert_close(same.encode(x), sae.encode(x) * factors)
    assert_close(same(x), sae(x))


def test_the_gradient_of_a_threshold_is_the_rectangle_around_it() -> None:
    sae = JumpReLU.Config(2, 3, threshold=0.5, bandwidth=0.2).build()
    with torch.no_grad():
        sae.W_enc.copy_(torch.tensor([[1.0, 0, 0], [0, 1, 0]]))
    x = torch.tensor([[0.55, 0.45]])  # the third feature is far from its threshold
    hidden = sae.hidden(x)
    [penalty] = torch.autograd.grad(sae.penalty(hidden, sae.activate(hidden)), sae.threshold)
    assert_close(penalty, torch.tensor([-5.0, -5.0, 0.0]))
    [value] = torch.autograd.grad(sae.encode(x).sum(), sae.threshold)
    assert_close(value, torch.tensor([-2.5, -2.5, 0.0]))


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="d_sae must be at least 1, got 0"):
        SAE.Config(4, 0)
    with pytest.raises(ValueError, match="k=9 features of d_sae=8"):
        TopK.Config(4, 8, k=9)
    with pytest.raises(ValueError, match=r"width of the output, 5, .* inputs of width 4"):
        SAE.Config(4, 8, d_out=5)


# ---- in runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: type(cfg.build()).kind)
def test_with_its_error_a_dictionary_changes_nothing(model: HookedTransformer, cfg: SAE.Config) -> None:
    plain = model(TEXTS)
    for error in ("keep", "detach"):
        logits = model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(SITE, sae=filled(cfg), error=error)])
        assert_close(logits, plain)
    lost = model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(SITE, sae=filled(cfg), error="drop")])
    assert_apart(lost, plain)


def test_without_its_error_the_site_holds_the_reconstruction(model: HookedTransformer, sae: SAE) -> None:
    _, cache = model.run_with_cache(TEXTS, names_filter=SITE)
    expected = model.run_with_hooks(TEXTS, fwd_hooks=[(SITE, lambda value, hook: sae(cache[SITE]))])
    dictionary = Dictionary("mlp_out", 1, sae, error="drop")
    logits, features = run_with_features(model, TEXTS, [dictionary])
    assert torch.equal(logits, expected)
    assert torch.equal(features[SITE], sae.encode(cache[SITE]))
    assert torch.equal(model(TEXTS), model(TEXTS))
    assert not model.list_hooks()


def test_an_edit_of_one_feature_moves_the_value_along_its_direction_alone(model: HookedTransformer, sae: SAE) -> None:
    _, cache = model.run_with_cache(TEXTS, names_filter=SITE)
    number = int(sae.encode(cache[SITE]).flatten(0, 1).sum(0).argmax())
    before = sae.encode(cache[SITE])

    def triple(features: Tensor) -> None:
        features[:, :, number] *= 3

    def by_hand(value: Tensor, hook: HookPoint) -> Tensor:
        return value + 2 * before[:, :, number, None] * sae.W_dec[number]

    dictionary = Dictionary(SITE, sae=sae, edit=triple)
    seen: list[Tensor] = []
    with model.hooks([dictionary, (SITE, lambda value, hook: seen.append(value))]):
        logits = model(TEXTS)
    assert_close(logits, model.run_with_hooks(TEXTS, fwd_hooks=[(SITE, by_hand)]))
    assert_close(seen[0], by_hand(cache[SITE], HookPoint()))
    assert torch.equal(dictionary.features, before)  # of before the edit
    returned = Dictionary(SITE, sae=sae, edit=lambda features: features * 1)
    assert_close(model.run_with_hooks(TEXTS, fwd_hooks=[returned]), model(TEXTS))


def test_watching_changes_nothing_and_can_be_switched_off(model: HookedTransformer, sae: SAE) -> None:
    watch = Features("blocks.*.hook_mlp_out", sae=sae)
    logits, features = run_with_features(model, TEXTS, [watch])
    assert torch.equal(logits, model(TEXTS))
    assert list(features) == [f"blocks.{layer}.hook_mlp_out" for layer in range(4)]
    with pytest.raises(ValueError, match="features of 4 sites"):
        _ = watch.features
    watch.forget()
    with watch.disabled():
        model.run_with_hooks(TEXTS, fwd_hooks=[watch])
    assert not watch.by_site


def test_gradients_reach_the_features(model: HookedTransformer, sae: SAE) -> None:
    """The gradient of a linear continuation, checked against differences; before the site it is as without a dictionary."""

    def score(logits: Tensor) -> Tensor:
        return logits[0, -1, 7].double()

    def gradients(error: str) -> tuple[Tensor, Tensor]:
        dictionary, early = Dictionary(SITE, sae=sae, error=error), []
        hooks = [("blocks.0.hook_resid_pre", lambda value, hook: early.append(value)), dictionary]
        result = score(model.run_with_hooks(TEXTS[:1], fwd_hooks=hooks))
        return torch.autograd.grad(result, [early[0], dictionary.features], allow_unused=True)

    early: list[Tensor] = []
    plain = score(
        model.run_with_hooks(TEXTS[:1], fwd_hooks=[("blocks.0.hook_resid_pre", lambda v, hook: early.append(v))])
    )
    [without] = torch.autograd.grad(plain, early)
    kept, of_features = gradients("keep")
    assert_close(kept, without)
    detached, same = gradients("detach")
    assert_close(same, of_features)
    assert_apart(detached, without)
    position, number = 2, int(of_features[0, 2].abs().argmax())

    def moved(by: float) -> Tensor:
        def edit(features: Tensor) -> None:
            features[0, position, number] += by

        return score(model.run_with_hooks(TEXTS[:1], fwd_hooks=[Dictionary(SITE, sae=sae, edit=edit)]))

    with torch.no_grad():
        slope = (moved(0.02) - moved(-0.02)) / 0.04
    assert_near(of_features[0, position, number], slope, 0.02, because="a difference quotient, not a slope")
    with torch.no_grad():
        model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(SITE, sae=sae)])
    assert all(weight.grad is None for weight in model.parameters())


def test_heads_are_read_side_by_side(model: HookedTransformer, sae: SAE) -> None:
    site = "blocks.1.attn.hook_z"
    _, cache = model.run_with_cache(TEXTS, names_filter=site)
    seen: list[Tensor] = []
    dictionary = Dictionary(site, sae=sae, error="drop")
    with model.hooks([dictionary, (site, lambda value, hook: seen.append(value))]):
        model(TEXTS)
    assert dictionary.features.shape == (*cache[site].shape[:2], WIDTH)
    assert torch.equal(seen[0], sae(cache[site].flatten(-2)).view_as(cache[site]))
    small = filled(TopK.Config(cache[site].shape[-1], WIDTH, k=5))
    _, features = run_with_features(model, TEXTS, [Dictionary(site, sae=small)])
    assert features[site].shape == (*cache[site].shape[:3], WIDTH)  # as wide as one head: each by itself


def test_rows_of_a_batch_and_steps_of_a_generation_are_as_alone(model: HookedTransformer, sae: SAE) -> None:
    def strong(features: Tensor) -> Tensor:
        return 3 * features

    dictionary = Dictionary(SITE, sae=sae, edit=strong)
    with model.hooks([dictionary]):
        tokens = model.to_tokens(TEXTS[1])
        options = {"max_new_tokens": 6, "do_sample": False, "verbose": False, "stop_at_eos": False}
        cached = model.generate(tokens, **options)
        assert dictionary.features.shape == (1, 1, WIDTH)  # of the last step
        assert torch.equal(cached, model.generate(tokens, use_past_kv_cache=False, **options))
        together = model(model.to_tokens(TEXTS[:1]).repeat(2, 1))
        assert_close(together[:1], model(TEXTS[0]))
    assert not torch.equal(cached, model.generate(tokens, **options))


def test_a_transcoder_stands_for_an_mlp(model: HookedTransformer) -> None:
    reads, writes = "blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out"
    transcoder = filled(Transcoder.Config(D, WIDTH, hook_point=reads, hook_point_out=writes))
    _, cache = model.run_with_cache(TEXTS, names_filter=[reads, writes])
    expected = model.run_with_hooks(TEXTS, fwd_hooks=[(writes, lambda value, hook: transcoder(cache[reads]))])
    splice = Transcode(sae=transcoder, error="drop")
    logits, features = run_with_features(model, TEXTS, [splice])
    assert torch.equal(logits, expected)
    assert torch.equal(features[reads], transcoder.encode(cache[reads]))
    kept = Transcode([reads, writes], sae=transcoder)
    assert_close(model.run_with_hooks(TEXTS, fwd_hooks=[kept]), model(TEXTS))

    def fails(value: Tensor, hook: HookPoint) -> None:
        raise RuntimeError("broken off")

    with pytest.raises(RuntimeError):
        model.run_with_hooks(TEXTS, fwd_hooks=[splice, ("blocks.1.mlp.hook_post", fails)])
    assert torch.equal(model.run_with_hooks(TEXTS, fwd_hooks=[splice]), expected)  # as if nothing had happened
    with pytest.raises(ValueError, match="is computed before what it should be made of"):
        model.run_with_hooks(TEXTS, fwd_hooks=[Transcode([writes, reads], sae=transcoder)])
    with pytest.raises(ValueError, match=r"two sites by full name, \[read, written\]"):
        Transcode(writes, sae=transcoder)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "mamba", "bert"])
def test_other_models(family: str) -> None:
    case = next(case for case in (*DECODER_CASES, *ENCODER_CASES) if case.family == family)
    model, tokens = hooked(case), prompt(case).clamp(min=3)
    site = "blocks.0.hook_resid_post" if "blocks.0.hook_resid_post" in model.hook_dict else list(model.all_points())[-1]
    _, cache = model.run_with_cache(tokens, names_filter=site)
    sae = filled(JumpReLU.Config(cache[site].shape[-1], 40, threshold=0.1))
    kept, _ = run_with_features(model, tokens, [Dictionary(site, sae=sae)])
    assert_close(kept, model(tokens))
    expected = model.run_with_hooks(tokens, fwd_hooks=[(site, lambda value, hook: sae(value))])
    assert torch.equal(run_with_features(model, tokens, [Dictionary(site, sae=sae, error="drop")])[0], expected)
    assert_apart(expected, model(tokens))


def test_a_module_that_nobody_rewrote() -> None:
    net = wrap(nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3)))
    x, sae = torch.randn(4, 6), filled(TopK.Config(10, 20, k=4))
    logits, features = run_with_features(net, x, [Dictionary("1", sae=sae, error="drop")])
    hidden = net.module[:2](x)
    assert torch.equal(logits, net.module[2](sae(hidden)))
    assert torch.equal(features["1"], sae.encode(hidden))


def test_any_object_with_encode_and_decode(model: HookedTransformer) -> None:
    class Halves:
        def encode(self, x: Tensor) -> Tensor:
            return torch.cat([x.relu(), (-x).relu()], -1)

        def decode(self, features: Tensor) -> Tensor:
            return features[..., :D] - features[..., D:]

    logits, features = run_with_features(model, TEXTS, [Dictionary(SITE, sae=Halves(), error="drop")])
    assert_close(logits, model(TEXTS))
    assert features[SITE].shape[-1] == 2 * D


def test_an_object_that_puts_heads_side_by_side_itself_is_shown_the_heads(model: HookedTransformer, sae: SAE) -> None:
    """As those of SAELens do at `hook_z`, and their config names the site."""
    site = "blocks.1.attn.hook_z"

    class Reshapes:
        hook_z_reshaping_mode = True
        cfg = SimpleNamespace(d_in=D, metadata=SimpleNamespace(hook_name=site))

        def encode(self, x: Tensor) -> Tensor:
            self.shape = x.shape
            return sae.encode(x.flatten(-2))

        def decode(self, features: Tensor) -> Tensor:
            return sae.decode(features).view(*features.shape[:-1], *self.shape[-2:])

    ours = model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(site, sae=sae, error="drop")])
    assert torch.equal(model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(sae=Reshapes(), error="drop")]), ours)


class Remembering:
    """Takes a scale out in `encode`, and puts it back in one `decode`, which uses it up."""

    def __init__(self, sae: SAE) -> None:
        self.sae, self.scale = sae, None

    def encode(self, x: Tensor) -> Tensor:
        self.scale = x.norm(dim=-1, keepdim=True)
        return self.sae.encode(x / self.scale)

    def decode(self, features: Tensor) -> Tensor:
        scale, self.scale = self.scale, None
        return self.sae.decode(features) * scale


@pytest.mark.parametrize("error", ["keep", "detach", "drop"])
def test_an_object_that_remembers_from_encode_to_decode(model: HookedTransformer, sae: SAE, error: str) -> None:
    def stronger(features: Tensor) -> None:
        features[:, :, 3] += 2

    def by_hand(value: Tensor, hook: Any) -> Tensor:
        scale = value.norm(dim=-1, keepdim=True)
        moved = value + 2 * scale * sae.W_dec[3]
        return moved if error != "drop" else moved - value + scale * sae.decode(sae.encode(value / scale))

    site = "blocks.1.hook_mlp_out"
    edited = model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(site, sae=Remembering(sae), edit=stronger, error=error)])
    assert_close(edited, model.run_with_hooks(TEXTS, fwd_hooks=[(site, by_hand)]))


def test_half_precision_goes_in_and_comes_out(sae: SAE) -> None:
    value = torch.randn(1, 3, D, dtype=torch.bfloat16)
    point = HookPoint("batch", "pos", "d_model")
    point.name = "here"
    dictionary = Dictionary("here", sae=sae)
    assert_close(dictionary(value, point), value)
    assert dictionary.features.dtype == torch.float32


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_errors_name_both_sides(model: HookedTransformer, sae: SAE) -> None:
    narrow = filled(TopK.Config(60, WIDTH, k=5))
    with pytest.raises(
        ValueError, match=r"'blocks.1.hook_mlp_out' has vectors of width 128 .* \(TopK\) reads .* width 60"
    ):
        model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(SITE, sae=narrow)])
    into = filled(Transcoder.Config(D, WIDTH, d_out=60))
    with pytest.raises(ValueError, match=r"decode of Transcoder gave \[2, \d+, 60\], and 'blocks.1.hook_mlp_out' has"):
        model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(SITE, sae=into)])
    broken = filled(TopK.Config(D, WIDTH, k=5))
    broken.W_enc[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"encode of TopK at 'blocks.1.hook_mlp_out' gave features .* NaN"):
        model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(SITE, sae=broken)])
    with pytest.raises(ValueError, match=r"the edit must change the features in place or return .*, got \[1\]"):
        model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(SITE, sae=sae, edit=lambda features: torch.zeros(1))])
    with pytest.raises(TypeError, match="a Linear has no encode"):
        Dictionary(SITE, sae=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="error must be one of 'keep', 'detach', 'drop', got 'add'"):
        Dictionary(SITE, sae=sae, error="add")
    with pytest.raises(ValueError, match=r"a transcoder reads one site and writes another \('b'\): use Transcode"):
        Dictionary(sae=Transcoder.Config(D, WIDTH, hook_point="a", hook_point_out="b").build())
    with pytest.raises(ValueError, match="needs a hook_point"):
        Dictionary(sae=sae)
    with pytest.raises(KeyError, match="no hook point"):
        model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary("blocks.1.hook_mlp_aut", sae=sae)])
    with pytest.raises(ValueError, match="two dictionaries have features at"):
        run_with_features(model, TEXTS, [Dictionary(SITE, sae=sae), Features(SITE, sae=sae)])
    with pytest.raises(
        TypeError, match="run_with_features has no argument 'attention_msk'; did you mean 'attention_mask'"
    ):
        run_with_features(model, TEXTS, Features(SITE, sae=sae), attention_msk=None)
    watch = Features(SITE, sae=sae)
    alone, listed = (run_with_features(model, TEXTS, one)[1][SITE] for one in (watch, [watch]))
    assert torch.equal(alone, listed)
    assert not model.list_hooks()


@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda cfg: type(cfg.build()).kind)
def test_hooks_with_dictionaries_are_saved_and_loaded(model: HookedTransformer, cfg: SAE.Config, tmp_path) -> None:
    one = Dictionary(SITE, sae=filled(cfg), error="drop")
    Hooks([one, Features("mlp_out", 2, filled(cfg, seed=5))]).save(tmp_path / "hooks.safetensors")
    again, watch = Hooks.load(tmp_path / "hooks.safetensors")
    assert repr(again) == repr(one)
    assert (watch.hook_point, watch.layer) == ("mlp_out", 2)
    assert all(
        torch.equal(a, b) for a, b in zip(again.sae.state_dict().values(), one.sae.state_dict().values(), strict=True)
    )
    ours = model.run_with_hooks(TEXTS, fwd_hooks=[one])
    assert torch.equal(model.run_with_hooks(TEXTS, fwd_hooks=[again]), ours)
    with pytest.raises(ValueError, match="its edit is a function"):
        Dictionary(SITE, sae=filled(cfg), edit=lambda features: None).to_dict()


OWN, OTHER = "blocks.1.hook_resid_post", "blocks.2.hook_resid_post"


def test_a_dictionary_at_another_site_than_its_own_warns_once_for_each(model: HookedTransformer) -> None:
    sae = filled(TopK.Config(D, WIDTH, k=4, hook_point=OWN))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for site in (OWN, "blocks.2.hook_resid_pre", "blocks.1.hook_out"):  # the same value
            model.run_with_hooks(TEXTS, fwd_hooks=[Features(site, sae=sae)])
        model.run_with_hooks(
            TEXTS, fwd_hooks=[Features(OTHER, sae=sae.at(OTHER)), Features("*.hook_mlp_out", sae=sae.at(None))]
        )
        model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(OTHER, sae=Normalized(sae, "layer_norm").at(OTHER))])
    assert sae.cfg.hook_point == OWN
    assert sae.at(OTHER).W_enc is sae.W_enc
    says = rf"the dictionary reads '{OWN}', and here it reads '{OTHER}'.* sae.at\('{OTHER}'\)"
    reads = Features(OTHER, sae=sae)
    with pytest.warns(UserWarning, match=says) as caught:
        model.run_with_hooks(TEXTS, fwd_hooks=[reads])
    assert len(caught) == 1
    model.run_with_hooks(TEXTS, fwd_hooks=[reads])
    for use in (
        lambda: model.run_with_hooks(TEXTS, fwd_hooks=[Dictionary(OTHER, sae=Normalized(sae, "layer_norm"))]),
        lambda: evaluate_dictionary(model, TEXTS, sae.at(OWN), site=OTHER, control=None),
        lambda: max_activating_examples(model, TEXTS, site=OTHER, sae=sae.at(OWN), feature=1, k=1),
        lambda: features_table(model, sae.at(OWN), TEXTS, site=OTHER),
    ):
        with pytest.warns(UserWarning, match=says) as caught:
            use()
        assert len(caught) == 1


def test_a_transcoder_warns_of_either_site(model: HookedTransformer) -> None:
    reads, writes, other = "blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out", "blocks.2.hook_mlp_out"
    transcoder = filled(Transcoder.Config(D, WIDTH, hook_point=reads, hook_point_out=writes))
    with pytest.warns(
        UserWarning, match=rf"writes '{writes}', and here it writes '{other}'.* sae.at\('{reads}', '{other}'\)"
    ):
        model.run_with_hooks(TEXTS, fwd_hooks=[Transcode([reads, other], sae=transcoder)])
    with pytest.warns(UserWarning, match=rf"reads '{reads}', and here it reads 'blocks.0.mlp.hook_in'"):
        model.run_with_hooks(TEXTS, fwd_hooks=[Transcode(["blocks.0.mlp.hook_in", writes], sae=transcoder)])
    model.run_with_hooks(TEXTS, fwd_hooks=[Transcode([reads, other], sae=transcoder.at(reads, other))])
