"""Transcoders of several layers: formulas, training, splicing, figures and files."""

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hooked_lm
from hooked_lm import HookedTransformer
from hooked_lm.analysis.reading.feature_runs import logit_effects
from hooked_lm.analysis.reading.neurons import to_logits
from hooked_lm.demo.corpus import training_text
from hooked_lm.harvest import harvest
from hooked_lm.interventions import Hooks
from hooked_lm.interventions.dictionaries import (
    SAE,
    ActivationBatches,
    Activations,
    BatchTopK,
    CrossLayerTranscoder,
    Dictionary,
    Features,
    Gated,
    JumpReLU,
    LayerTranscoders,
    TopK,
    TrainedDictionary,
    TrainingConfig,
    Transcode,
    Transcoder,
    TranscoderSet,
    evaluate_dictionary,
    load_circuit_tracer,
    load_saelens,
    load_transcoders,
    run_with_features,
    save_circuit_tracer,
    save_saelens,
    train_dictionary,
    train_on,
)  # fmt: skip
from hooked_lm.interventions.dictionaries import train as training_file
from hooked_lm.interventions.dictionaries.training import DictionaryTraining
from tests.close import GRADIENT, assert_apart, assert_close, assert_near

READ, WRITTEN = "mlp.hook_in", "hook_mlp_out"
KINDS: dict[str, type[SAE]] = {"jumprelu": JumpReLU, "relu": Transcoder, "topk": TopK, "batchtopk": BatchTopK}
TEXTS = ["The capital of France is", "When Mary and John went to the store, John gave"]


def configs(kind: str = "topk", n: int = 3, d: int = 8, width: int = 24, skip: bool = False) -> tuple[SAE.Config, ...]:
    k = {"k": 4} if "topk" in kind else {}
    return tuple(
        KINDS[kind].Config(
            d, width, subtract_b_dec=False, hook_point=f"blocks.{layer}.{READ}", hook_point_out=f"blocks.{layer}.{WRITTEN}",
            skip_connection=skip, **k,
        )
        for layer in range(n)
    )  # fmt: skip


def noisy(cfg: LayerTranscoders.Config, scale: float = 0.3) -> LayerTranscoders:
    """Transcoders whose every weight is some number."""
    made, generator = cfg.build(), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in made.state_dict().items():
            noise = scale * torch.randn(weight.shape, generator=generator)
            weight.copy_(noise.abs() if name.endswith("threshold") else weight + noise)
    return made.eval().requires_grad_(False)


def drawn(n: int = 3, d: int = 8, rows: int = 6, seed: int = 1) -> list[Tensor]:
    return list(torch.randn(n, rows, d, generator=torch.Generator().manual_seed(seed)))


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo", device="cpu")


@pytest.fixture(scope="module")
def texts() -> list[str]:
    rng = Random(5)
    return [training_text(rng) for _ in range(24)]


def of_model(kind: str = "topk", across: bool = False, skip: bool = False, scale: float = 0.1) -> LayerTranscoders:
    return noisy(LayerTranscoders.Config(configs(kind, 4, 128, 48, skip), across), scale)


# ---- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False], ids=["skip", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_its_transcoders(kind: str, skip: bool) -> None:
    made, xs = noisy(LayerTranscoders.Config(configs(kind, skip=skip))), drawn()
    assert isinstance(made, TranscoderSet)
    features = [made.encode(place, x) for place, x in enumerate(xs)]
    for place, (x, out) in enumerate(zip(xs, made(xs), strict=True)):
        W, b = made.encoder(place)
        hidden = x @ W + b
        assert_close(made.hidden(place, x), hidden)
        assert_close(made.activate(place, hidden), features[place])
        skipped = 0 if (W_skip := made.skip(place)) is None else x @ W_skip
        decoder = made.decoder(place, place)
        assert decoder is not None
        assert_close(out, features[place] @ decoder + made.bias(place) + skipped)
        assert made.decoder(place, (place + 1) % 3) is None
    assert (made.skip(0) is not None) == skip


@pytest.mark.parametrize("skip", [True, False], ids=["skip", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cross_layer_transcoder_writes_to_its_layer_and_those_after_it(kind: str, skip: bool) -> None:
    made, xs = noisy(LayerTranscoders.Config(configs(kind, skip=skip), across=True)), drawn()
    assert isinstance(made, CrossLayerTranscoder)
    features = [made.encode(place, x) for place, x in enumerate(xs)]
    for target, out in enumerate(made.outputs(features, xs)):
        expected = made.bias(target).clone()
        for source in range(3):
            decoder = made.decoder(source, target)
            assert (decoder is None) == (source > target)
            if decoder is not None:
                expected = expected + features[source] @ decoder
        if (W_skip := made.skip(target)) is not None:
            expected = expected + xs[target] @ W_skip
        assert_close(out, expected)
        assert_close(out, made.output(target, features[: target + 1], xs[target]))
    assert made.sources(2) == [0, 1, 2]


@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.sampled_from(sorted(KINDS)))
def test_units_of_features_and_of_vectors_are_converted(n: int, d: int, across: bool, kind: str) -> None:
    """Of transcoders of inputs and outputs that were multiplied by a number for each site."""
    made = noisy(LayerTranscoders.Config(configs(kind, n, d, 6, skip=True), across))
    xs, generator = drawn(n, d), torch.Generator().manual_seed(n)
    inputs, scales = (0.5 + 2 * torch.rand(n, generator=generator) for _ in range(2))
    expected = [
        out / scale for out, scale in zip(made([x * f for x, f in zip(xs, inputs, strict=True)]), scales, strict=True)
    ]
    with torch.no_grad():
        for place, sae in enumerate(made.parts):
            sae.scale_inputs_(float(inputs[place]), *scales[place : place + sae.cfg.n_outputs].tolist())
            factors = 0.5 + torch.rand(
                6, generator=generator
            )  # of TopK one, as others change which features are the largest
            sae.scale_features_(factors[:1].expand(6) if kind == "topk" else factors)
    assert_close(made(xs), expected, scale=torch.stack(expected).abs().max())


def test_a_skip_connection_needs_the_inputs() -> None:
    sae = Transcoder.Config(8, 24, skip_connection=True).build()
    x = drawn()[0]
    assert_close(sae.decode(sae.encode(x), of=x), sae(x))
    with pytest.raises(ValueError, match=r"give decode\(features, of=x\)"):
        sae.decode(sae.encode(x))
    assert not torch.equal(sae.scale_inputs_(2.0, 3.0)(x), sae(2 * x))


def test_an_autoencoder_with_a_skip_connection_would_copy_its_input() -> None:
    for settings in ({}, {"subtract_b_dec": False, "hook_point": "a.0.b", "hook_point_out": "a.0.b"}):
        with pytest.raises(ValueError, match="an autoencoder would copy its input"):
            TopK.Config(8, 24, k=4, skip_connection=True, **settings)
    with pytest.raises(ValueError, match="the stream has one site: an autoencoder would copy its input"):
        train_on(ActivationBatches(torch.randn(50, 8)), Transcoder.Config(8, 24, skip_connection=True))


def test_gradients_through_a_set_are_those_of_its_formula() -> None:
    made, xs = noisy(LayerTranscoders.Config(configs("relu"), across=True)), drawn()
    x = xs[0].clone().requires_grad_(True)
    [gradient] = torch.autograd.grad(made([x, *xs[1:]])[2].sum(), x)
    active = (made.hidden(0, x) > 0).float()
    decoder = made.decoder(0, 2)
    assert decoder is not None
    assert_close(gradient, (active * decoder.sum(1)) @ made.encoder(0)[0].T, depth=GRADIENT)


# ---- training --------------------------------------------------------------------------------------------------------


def stream_of(n: int = 3, d: int = 8, rows: int = 512) -> ActivationBatches:
    """Inputs, and outputs that depend on the inputs of the layer and of the one before it, in several units."""
    generator = torch.Generator().manual_seed(0)
    read = torch.randn(rows, n, d, generator=generator)
    maps = torch.randn(n, d, d, generator=generator)
    own = torch.einsum("rld,lde->rle", read.relu(), maps)
    before = torch.einsum("rd,de->re", (-read[:, 0]).relu(), maps[0].T)
    written = own + before[:, None] * torch.tensor([0.0] + [1.0] * (n - 1))[:, None]
    return ActivationBatches(read, written * torch.tensor([1.0, 5.0, 0.2, 3.0][:n])[:, None] + 1)


SETTINGS = TrainingConfig(steps=30, vectors_per_step=64, learning_rate=5e-3, dead_after=200, resample_after=600)


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_trains_each_transcoder_as_if_it_were_alone(kind: str) -> None:
    """With dead features, the auxiliary loss and resampling: of the first layer, whose seeds are those of a single one."""
    stream, each = stream_of(), configs(kind, width=64, skip=True)
    together = train_on(stream, LayerTranscoders.Config(each), SETTINGS).sae
    read, written = stream.fill(0)
    alone = train_on(ActivationBatches(read[:, 0], written[:, 0]), each[0], SETTINGS).sae
    for name, weight in alone.state_dict().items():
        assert_near(
            together.parts[0].state_dict()[name], weight, 1e-3, because="thirty steps of Adam enlarge what was rounded"
        )
    assert_apart(alone.W_enc, each[0].build().W_enc)


def explained(made: LayerTranscoders, stream: ActivationBatches) -> list[float]:
    read, written = stream.fill(0)
    outs = made(list(read.unbind(1)))
    ys = written.unbind(1)
    return [1 - float((y - out).pow(2).sum() / (y - y.mean(0)).pow(2).sum()) for y, out in zip(ys, outs, strict=True)]


def test_a_cross_layer_transcoder_learns_what_a_set_cannot() -> None:
    """The input of the first layer moves the outputs of the others, which a transcoder of their own inputs does not see."""
    stream = stream_of()
    settings = TrainingConfig(steps=150, vectors_per_step=128, learning_rate=1e-2)
    found = {
        across: train_on(stream, LayerTranscoders.Config(configs("batchtopk", width=64), across), settings).sae
        for across in (False, True)
    }
    apart, across = (explained(found[which], stream) for which in (False, True))
    assert min(across) > 0.4
    assert all(one < other - 0.1 for one, other in zip(apart[1:], across[1:], strict=True))
    for sae in found[True].parts:
        assert_close(sae.W_dec.norm(dim=1).mean(), torch.tensor(1.0))


def test_the_gradient_of_the_loss_is_that_of_finite_differences() -> None:
    made = noisy(LayerTranscoders.Config(configs("relu", skip=True), across=True)).double().requires_grad_(True)
    xs, ys = ([x.double() for x in drawn(seed=seed)] for seed in (1, 2))
    loss, _, _ = made.objective(xs, ys, 0.3)
    for name in ("transcoders.0.W_dec", "transcoders.1.W_enc", "transcoders.2.W_skip", "transcoders.1.b_dec"):
        weight = dict(made.named_parameters())[name]
        [gradient] = torch.autograd.grad(loss, weight, retain_graph=True)
        generator = torch.Generator().manual_seed(7)
        direction = torch.randn(weight.shape, generator=generator).double()
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight.add_(step * direction)
                ends.append(made.objective(xs, ys, 0.3)[0].item())
                weight.sub_(step * direction)
        slope = (gradient * direction).sum().item()
        assert_near(slope, (ends[0] - ends[1]) / 2e-5, 1e-4, because="finite differences")
        assert abs(slope) > 1e-3


def test_an_interrupted_training_of_layers_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, stream = LayerTranscoders.Config(configs("jumprelu", skip=True), across=True), stream_of()
    whole = train_on(stream, cfg, SETTINGS)
    step = DictionaryTraining.step

    def breaks_off(self: Any, read: Tensor, written: Tensor, number: int) -> None:
        if number == 25:
            raise KeyboardInterrupt
        step(self, read, written, number)

    with monkeypatch.context() as patched:
        patched.setattr(training_file.DictionaryTraining, "step", breaks_off)
        with pytest.raises(KeyboardInterrupt):
            train_on(stream, cfg, SETTINGS, directory=tmp_path, checkpoint_every=10)
    with pytest.raises(ValueError, match="of another training: "):
        train_on(stream, LayerTranscoders.Config(configs("jumprelu", skip=True)), SETTINGS, directory=tmp_path)
    resumed = train_on(stream, cfg, SETTINGS, directory=tmp_path)
    again = hooked_lm.load(tmp_path / "dictionary.safetensors")
    for name, weight in whole.sae.state_dict().items():
        assert torch.equal(resumed.sae.state_dict()[name], weight)
        assert torch.equal(again.state_dict()[name], weight)
    assert torch.equal(resumed.losses.values, whole.losses.values)


def test_features_that_nothing_activates_resample_in_all_layers() -> None:
    """Each begins as a drawn vector of its layer, and writes what is missing at all sites to which it writes."""
    cfg, stream = LayerTranscoders.Config(configs("relu"), across=True), stream_of(rows=64)
    training = DictionaryTraining(stream, cfg, TrainingConfig(steps=9, vectors_per_step=64))
    read, written = stream.fill(0)
    training.step(read, written, 0)
    xs = [x * scale for x, scale in zip(read.unbind(1), training.scales[0], strict=True)]
    ys = [y * scale for y, scale in zip(written.unbind(1), training.scales[1], strict=True)]
    missing = [y - made.detach() for y, made in zip(ys, training.sae(xs), strict=True)]
    which = torch.zeros(3, 24, dtype=torch.bool)
    which[1, 5] = which[2, 7] = True
    before = training.parts[0].W_dec.detach().clone()
    training._resample(which, xs, missing, 1)
    assert torch.equal(training.parts[0].W_dec, before)
    for place, feature in ((1, 5), (2, 7)):
        error = torch.cat(missing[place:], 1)
        sae = training.parts[place]
        row = int((error @ sae.W_dec[feature] / error.norm(dim=1)).argmax())
        assert_close(sae.W_dec[feature].detach(), error[row] / error[row].norm())
        size = error[row].norm().clamp(max=error.shape[1] ** 0.5)  # of a target at most
        assert_close(sae.hidden(xs[place])[row, feature].detach(), size)


def test_new_features_do_not_raise_the_error_by_which_the_next_are_larger() -> None:
    """Large errors are those of the training so far: a feature that took its size from them would make them larger."""
    stream, cfg = stream_of(rows=64), LayerTranscoders.Config(configs("relu"))
    training = DictionaryTraining(stream, cfg, TrainingConfig(steps=9, vectors_per_step=64))
    read, _ = stream.fill(0)
    xs = [x * scale for x, scale in zip(read.unbind(1), training.scales[0], strict=True)]
    sizes = []
    for factor in (1e3, 1e6):
        missing = [factor * torch.ones(64, 8) for _ in range(3)]
        training._resample(torch.ones(3, 24, dtype=torch.bool), xs, missing, 1)
        sizes.append(training.parts[1].hidden(xs[1]).abs().max().detach())
    assert_close(*sizes)


def test_streams_and_configs_that_do_not_go_together() -> None:
    stream, each = stream_of(), configs()
    with pytest.raises(ValueError, match="of 3 layers, and what is trained has 2 layers"):
        train_on(stream, LayerTranscoders.Config(each[:2]))
    with pytest.raises(ValueError, match="of 3 layers, and what is trained has no layers"):
        train_on(stream, each[0])
    with pytest.raises(ValueError, match="widths 8 and 8, and the dictionary has inputs of width 9"):
        train_on(stream, LayerTranscoders.Config(configs(d=9)))


# ---- from a model, and from a harvest --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("across", [True, False], ids=["across", "set"])
def test_training_from_a_model_and_from_its_harvest(
    model: HookedTransformer, texts: list[str], tmp_path: Path, across: bool
) -> None:
    options: dict[str, Any] = {"layers": [1, 3], "cross_layer": across, "kind": "batchtopk", "width": 40, "k": 4}
    found = train_dictionary(
        model, texts, site=READ, site_out=WRITTEN, **options, steps=60, vectors_per_step=64, learning_rate=5e-3, skip=1
    )
    made = found.sae
    assert isinstance(made, CrossLayerTranscoder if across else TranscoderSet)
    assert (made.layers, made.sites[0], made.sites_out[1]) == ((1, 3), f"blocks.1.{READ}", f"blocks.3.{WRITTEN}")
    assert list(found.figures.axes["layer"]) == [1, 3, "all"]
    assert found.figures.no_better_than == []
    found.save(tmp_path / "trained")
    again = hooked_lm.load(tmp_path / "trained")
    assert isinstance(again, TrainedDictionary)
    assert repr(again) == repr(found)
    assert torch.equal(again.sae.parts[1].W_dec, made.parts[1].W_dec)
    sites = [f"blocks.{layer}.{name}" for name in (READ, WRITTEN) for layer in (1, 3)]
    store = harvest(model, texts, sites, tmp_path / "store", progress=False)
    stream = store.stream(sites[:2], sites[2:])
    read, written = stream.fill(0)
    assert read.shape == written.shape == (len(store), 2, 128)
    rows = {tuple(row) for row in store[sites[1]][:].tolist()}
    assert {tuple(row) for row in read[:, 1].tolist()} == rows
    cfg = LayerTranscoders.Config(tuple(BatchTopK.Config(128, 40, subtract_b_dec=False, k=4) for _ in range(2)), across)
    from_store = train_on(stream, cfg, TrainingConfig(steps=3, vectors_per_step=64)).sae
    assert from_store.sites == made.sites


def test_sites_of_layers(model: HookedTransformer, texts: list[str]) -> None:
    options: dict[str, Any] = {"width": 40, "kind": "topk", "k": 4}
    with pytest.raises(ValueError, match="give layers='each' or some"):
        train_dictionary(model, texts, site=("mlp_out", 1), cross_layer=True, **options)
    with pytest.raises(ValueError, match="have an output site, too: give site_out"):
        train_dictionary(model, texts, site=READ, layers="each", **options)
    with pytest.raises(ValueError, match="site_out is a name without a layer"):
        train_dictionary(model, texts, site=READ, site_out=("mlp_out", 1), layers="each", **options)
    with pytest.raises(ValueError, match="a list of sites and one as long of site_out"):
        Activations(model, texts, [(READ, 0), (READ, 1)], ("mlp_out", 0))
    with pytest.raises(ValueError, match=r"vectors of one width; got .*hook_post 512"):
        Activations(model, texts, [(READ, 0), ("post", 1)], [("mlp_out", 0), ("mlp_out", 1)]).vectors([0])


# ---- splicing --------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("skip", [True, False], ids=["skip", "plain"])
@pytest.mark.parametrize("across", [True, False], ids=["across", "set"])
def test_all_mlps_are_replaced_at_once(model: HookedTransformer, across: bool, skip: bool) -> None:
    """Each layer reads what the others have changed: as hooks by hand do that keep the features."""
    made = of_model("batchtopk", across, skip)
    features: list[Tensor] = []
    xs: list[Tensor] = []

    def read(place: int) -> Any:
        def hook(value: Tensor, hook: Any) -> None:
            xs.append(value)
            features.append(made.encode(place, value))

        return hook

    def write(place: int) -> Any:
        return lambda value, hook: made.output(place, [features[source] for source in made.sources(place)], xs[place])

    by_hand = [(site, read(place)) for place, site in enumerate(made.sites)]
    by_hand += [(site, write(place)) for place, site in enumerate(made.sites_out)]
    plain = model(TEXTS)
    expected = model.run_with_hooks(TEXTS, fwd_hooks=by_hand)
    splice = Transcode(sae=made, error="drop")
    for _ in range(2):  # nothing is left over
        assert_close(model.run_with_hooks(TEXTS, fwd_hooks=[splice]), expected)
    assert_apart(expected, plain)
    assert list(splice.by_site) == list(made.sites)
    assert_close(model.run_with_hooks(TEXTS, fwd_hooks=[Transcode(sae=made)]), plain, msg="the error is added back")


def test_an_edit_moves_all_outputs_to_which_a_feature_writes(model: HookedTransformer) -> None:
    made, layer, feature = of_model("relu", across=True), 1, 17
    sites = list(made.sites_out)
    _, plain = model.run_with_cache(TEXTS, names_filter=sites)
    steer = Transcode(sae=made, feature={layer: feature}, coefficient=2.5, positions=-1)
    frozen = [(f"blocks.{i}.{READ}", lambda value, hook: plain_inputs[hook.name]) for i in (2, 3)]
    _, plain_inputs = model.run_with_cache(TEXTS, names_filter=list(made.sites))
    with model.hooks([*frozen, steer]), torch.no_grad():
        _, found = model.run_with_cache(TEXTS, names_filter=sites)
    for target in range(4):
        decoder = made.decoder(layer, target)
        moved = torch.zeros_like(plain[sites[target]])
        if decoder is not None:
            moved[:, -1] = 2.5 * decoder[feature]
        wanted = plain[sites[target]] + moved
        if target < 2:  # the outputs of later layers are those of inputs that were put back
            assert_close(found[sites[target]], wanted)
        else:
            assert_close(found[sites[target]] - plain[sites[target]], moved, scale=plain[sites[target]].abs().max())

    def stronger(features: Tensor) -> None:
        features[:, -1, feature] += 2.5

    by_function = Transcode(sae=made, edit={layer: stronger})
    with torch.no_grad():
        one, other = (model.run_with_hooks(TEXTS, fwd_hooks=[hook]) for hook in (steer, by_function))
    assert_close(one, other)


def test_gradients_of_features_reach_all_outputs(model: HookedTransformer) -> None:
    """The gradient of a logit with respect to a feature is what a small change of it does."""
    made = of_model("relu", across=True)
    splice = Transcode(sae=made, error="detach")
    logits, features = run_with_features(model, TEXTS[0], splice)
    [gradient] = torch.autograd.grad(logits[0, -1, 5], features[made.sites[1]], retain_graph=True)
    best = divmod(int(gradient[0].abs().argmax()), made.d_sae)
    ends = []
    for step in (0.01, -0.01):
        edit = Transcode(sae=made, feature={1: best[1]}, coefficient=step, positions=best[0])
        with torch.no_grad():
            ends.append(model.run_with_hooks(TEXTS[0], fwd_hooks=[edit])[0, -1, 5].item())
    # the rest of the run is not linear, and where the error is added back gradients flow through the model itself
    kept = Transcode(sae=made)
    logits, features = run_with_features(model, TEXTS[0], kept)
    [whole] = torch.autograd.grad(logits[0, -1, 5], features[made.sites[1]])
    assert_near(
        whole[0][best], (ends[0] - ends[1]) / 0.02, 0.02, because="finite differences of a run that is not linear"
    )
    assert_apart(whole, gradient)


def test_features_of_all_layers_are_read_without_a_change(model: HookedTransformer) -> None:
    made = of_model()
    logits, features = run_with_features(model, TEXTS, Features(sae=made))
    plain, cache = model.run_with_cache(TEXTS, names_filter=list(made.sites))
    assert torch.equal(logits, plain)
    for place, site in enumerate(made.sites):
        assert_close(features[site], made.encode(place, cache[site]))


def test_the_logits_of_a_feature_are_those_of_all_it_writes(model: HookedTransformer) -> None:
    sae = of_model("relu", across=True).parts[1]
    found = logit_effects(model, sae, 7, "blocks.1.hook_mlp_out")
    each = [to_logits(model, sae.directions(number)[7]) for number in range(3)]
    assert_close(found, torch.stack(each).sum(0))


@pytest.mark.parametrize("across", [True, False], ids=["across", "set"])
def test_generation_with_a_cache(model: HookedTransformer, across: bool) -> None:
    splice = Transcode(sae=of_model("topk", across, skip=True), error="drop")
    options: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": False, "return_type": "tokens"}
    with torch.no_grad(), model.hooks([splice]):
        one, other = (model.generate(TEXTS[0], 4, use_past_kv_cache=past, **options) for past in (True, False))
    assert torch.equal(one, other)


def test_an_interrupted_run_leaves_nothing_behind(model: HookedTransformer) -> None:
    splice = Transcode(sae=of_model("relu", across=True), error="drop")

    def stops(value: Tensor, hook: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        expected = model.run_with_hooks(TEXTS, fwd_hooks=[splice])
        with pytest.raises(KeyboardInterrupt):
            model.run_with_hooks(TEXTS[0], fwd_hooks=[splice, ("blocks.2.hook_resid_mid", stops)])
        assert_close(model.run_with_hooks(TEXTS, fwd_hooks=[splice]), expected)
        with pytest.raises(KeyboardInterrupt):
            model.run_with_hooks(TEXTS[0], fwd_hooks=[splice, ("blocks.2.hook_resid_mid", stops)])
        middle = model(TEXTS[0], stop_at_layer=1)
        with pytest.raises(ValueError, match="computed before what it should be made of, 'blocks"):
            model.run_with_hooks(middle, start_at_layer=1, fwd_hooks=[splice])


def test_hooks_with_transcoders_are_files(model: HookedTransformer, tmp_path: Path) -> None:
    made = of_model("jumprelu", across=True, skip=True)
    hooks = Hooks([Transcode(sae=made, feature={2: [3, 5]}, value=0, error="drop"), Features(sae=made)])
    hooks.save(tmp_path / "hooks")
    again = Hooks.load(tmp_path / "hooks")
    with torch.no_grad():
        one, other = (model.run_with_hooks(TEXTS, fwd_hooks=list(of)) for of in (hooks, again))
    assert torch.equal(one, other)
    assert repr(again[0]) == repr(hooks[0])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"feature": 3, "value": 0}, "feature of a TranscoderSet is given by the number of the layer"),
        ({"feature": {7: 3}, "value": 0}, "has no layer 7: its layers are [0, 1, 2, 3]"),
        ({"edit": lambda features: None}, "edit of a TranscoderSet is given by the number of the layer"),
        ({"hook_point": ["blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out"]}, "have the sites in their configs"),
    ],
)
def test_edits_of_layers_that_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Transcode(sae=of_model(), **settings)
    with pytest.raises(ValueError, match="feature of a Transcoder is given not by layer"):
        Transcode(["a", "b"], sae=Transcoder.Config(8, 24).build(), feature={1: 2}, value=0)
    with pytest.raises(ValueError, match="a transcoder reads one site and writes another"):
        Dictionary("blocks.0.hook_mlp_out", sae=of_model())


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("across", [True, False], ids=["across", "set"])
def test_figures_of_layers_are_those_of_hand_written_runs(
    model: HookedTransformer, texts: list[str], across: bool
) -> None:
    made, some = of_model("batchtopk", across), texts[:6]
    found = evaluate_dictionary(model, some, made, control=None, batch_size=4)
    assert list(found.axes["layer"]) == [0, 1, 2, 3, "all"]
    reads, writes = ([(name, layer) for layer in range(4)] for name in (READ, WRITTEN))
    x, y = Activations(model, some, reads, writes).vectors(range(6))
    outs = made(list(x.unbind(1)))
    errors = torch.stack([(out - one).pow(2).sum() for out, one in zip(outs, y.unbind(1), strict=True)])
    totals = (y - y.mean(0)).pow(2).sum((0, 2))
    expected = torch.cat([1 - errors / totals, 1 - (errors.sum() / totals.sum())[None]])
    assert_close(found.select(figure="explained variance").mean, expected)
    n_active = torch.stack([(made.encode(i, x[:, i]) > 0).float().sum(1).mean() for i in range(4)])
    assert_close(found.select(figure="L0").mean, torch.cat([n_active, n_active.sum()[None]]))

    def run(layers: list[int]) -> tuple[float, float]:
        """The loss and the divergence with the outputs of some layers replaced."""
        splice = Transcode(sae=made, error="drop")
        listening = [*made.sites, *(made.sites_out[layer] for layer in layers)]
        losses, divergences = [], []
        for text in some:
            clean = model(text)[0, :-1].log_softmax(-1)
            logits = model.run_with_hooks(text, fwd_hooks=[(site, splice) for site in listening])[0]
            after, tokens = logits[:-1].log_softmax(-1), model.to_tokens(text)[0, 1:]
            losses.append(-after.gather(1, tokens[:, None])[:, 0])
            divergences.append((clean.exp() * (clean - after)).sum(-1))
        return torch.cat(losses).mean().item(), torch.cat(divergences).mean().item()

    with torch.no_grad():
        alone, together = run([2]), run([0, 1, 2, 3])
    for layer, (loss, divergence) in ((2, alone), ("all", together)):
        assert_close(found.select(figure=["CE spliced", "KL spliced"], layer=layer).mean.tolist(), [loss, divergence])


@pytest.mark.slow
def test_floors_of_transcoders_are_fitted_to_the_outputs(model: HookedTransformer, texts: list[str]) -> None:
    """A random transcoder explains something, and less than a linear map; with a skip connection about as much as that."""
    made = of_model("topk")
    with pytest.warns(UserWarning, match="no better than a random one"):
        found = evaluate_dictionary(model, texts, made, skip=1)
    assert list(found.floors) == ["random", "PCA"]
    with pytest.warns(UserWarning, match="no better than a random one"):
        skipping = evaluate_dictionary(model, texts, of_model("topk", skip=True), skip=1)
    plain, linear = (of.select(figure="explained variance").floors["random"] for of in (found, skipping))
    assert ((plain > 0) & (plain < linear)).all()
    assert linear[-1] > 0.8
    assert found.select(figure="L0").mean[:4].eq(4).all()
    sae = made.parts[1]
    with pytest.warns(UserWarning, match="no better than a random one"):
        one = evaluate_dictionary(model, texts, sae, skip=1)
    assert_close(one.floors["random"][:3], found.select(layer=1).floors["random"][:3])
    assert_close(one.compared()["random"], float(plain[1]))


def test_floors_of_few_vectors_do_not_explain_their_noise() -> None:
    from hooked_lm.interventions.dictionaries import random_dictionary

    generator = torch.Generator().manual_seed(0)
    x, noise = (torch.randn(200, 16, generator=generator) for _ in range(2))
    for skip in (False, True):
        floor = random_dictionary(x, 64, 4, outputs=noise, skip_connection=skip)
        fresh, target = (torch.randn(2000, 16, generator=generator) for _ in range(2))
        assert 1 - (floor(fresh) - target).pow(2).sum() / target.pow(2).sum() > -0.1
        known = random_dictionary(x, 64, 4, outputs=x.relu(), skip_connection=skip)
        assert 1 - (known(fresh) - fresh.relu()).pow(2).sum() / fresh.relu().pow(2).sum() > (0.5 if skip else 0.3)


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("across", [True, False], ids=["across", "set"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_keep_every_bit(kind: str, across: bool, tmp_path: Path) -> None:
    made = noisy(LayerTranscoders.Config(configs(kind, skip=True), across))
    made.parts[0].W_enc.data = made.parts[0].W_enc.data.bfloat16()
    made.save(tmp_path / "file")
    for again in (
        hooked_lm.load(tmp_path / "file"),
        load_transcoders(tmp_path / "file"),
        type(made).load(tmp_path / "file"),
    ):
        assert type(again) is type(made)
        assert again.cfg == made.cfg
        for name, weight in made.state_dict().items():
            assert torch.equal(again.state_dict()[name], weight)
            assert again.state_dict()[name].dtype == weight.dtype
    other = TranscoderSet if across else CrossLayerTranscoder
    with pytest.raises(ValueError, match=f"holds type {type(made).__name__}, not {other.__name__}"):
        other.load(tmp_path / "file")


@pytest.mark.parametrize("kind", ["jumprelu", "relu", "batchtopk"])
def test_circuit_tracer_both_ways(kind: str, tmp_path: Path) -> None:
    """With circuit-tracer itself in `tests/clients/test_transcoders.py`."""
    for across, skip in ((False, False), (False, True), (True, False)):
        made = noisy(LayerTranscoders.Config(configs(kind, skip=skip), across))
        folder = tmp_path / f"{across}{skip}"
        save_circuit_tracer(made, folder, scan="mine")
        again, xs = load_circuit_tracer(folder), drawn()
        assert (again.sites, again.sites_out, type(again)) == (made.sites, made.sites_out, type(made))
        assert_close(again(xs), made(xs))
        assert_close(load_transcoders(folder)(xs), made(xs))


@pytest.mark.parametrize(
    ("listed", "wanted"),
    [
        ("hf://owner/name/a/b.safetensors?revision=r1", ("owner/name", "a/b.safetensors", {"revision": "r1"})),
        ("hf://owner/name@r2/b.safetensors", ("owner/name", "b.safetensors", {"revision": "r2"})),
        ("hf://owner/name/b.safetensors", ("owner/name", "b.safetensors", {"revision": "mine"})),
    ],
)
def test_files_on_the_hub_have_their_revision(
    listed: str, wanted: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the hub does not give is not said to be damage of the folder."""
    asked: list[tuple] = []

    def refuse(repository: str, patterns: list[str], **options: Any) -> Path:
        asked.append((repository, *patterns, options))
        raise ValueError("the hub did not give it")

    monkeypatch.setattr("hooked_lm.hub_files.snapshot", refuse)
    (tmp_path / "config.yaml").write_text(f"transcoders: ['{listed}']")
    with pytest.raises(ValueError, match=r"^the hub did not give it$"):
        load_circuit_tracer(tmp_path, READ, WRITTEN, revision="mine")
    assert asked == [wanted]
    (tmp_path / "config.yaml").write_text("transcoders: 3")
    with pytest.raises(ValueError, match="transcoders must be a list of files, got 3"):
        load_circuit_tracer(tmp_path, READ, WRITTEN)
    (tmp_path / "config.yaml").write_text("transcoders: ['hf://name']")
    with pytest.raises(ValueError, match=r"expected hf://OWNER/NAME/PATH"):
        load_circuit_tracer(tmp_path, READ, WRITTEN)


def test_what_circuit_tracer_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no transcoder of kind 'topk': train one of kind 'batchtopk'"):
        save_circuit_tracer(noisy(LayerTranscoders.Config(configs("topk"))), tmp_path)
    with pytest.raises(ValueError, match="no files for a cross-layer transcoder with skip connections"):
        save_circuit_tracer(noisy(LayerTranscoders.Config(configs("relu", skip=True), across=True)), tmp_path)
    with pytest.raises(ValueError, match=r"of all layers from 0 on, and these are of layers \[1, 2\]"):
        save_circuit_tracer(noisy(LayerTranscoders.Config(configs("relu")[1:])), tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="does not say which sites"):
        load_circuit_tracer(tmp_path)
    with pytest.raises(ValueError, match=r"has no layer_0\.safetensors and no W_enc_0"):
        load_circuit_tracer(tmp_path, READ, WRITTEN)
    save_circuit_tracer(noisy(LayerTranscoders.Config(configs("relu"))), tmp_path)
    (tmp_path / "layer_1.safetensors").unlink()
    with pytest.raises(ValueError, match="of 2 layers, and none of layer 1"):
        load_circuit_tracer(tmp_path)


def test_saelens_skip_transcoders_both_ways(tmp_path: Path) -> None:
    for kind in ("relu", "jumprelu"):
        sae = noisy(LayerTranscoders.Config(configs(kind, skip=True))).parts[0]
        save_saelens(sae, tmp_path / kind)
        again = load_saelens(tmp_path / kind)
        assert again.cfg.skip_connection
        assert_close(again(drawn()[0]), sae(drawn()[0]))


def test_transcoders_that_do_not_go_together() -> None:
    one, two = (cfg.build() for cfg in configs(n=2))
    with pytest.raises(ValueError, match="a gated dictionary has two pre-activations"):
        TranscoderSet([Gated.Config(8, 24, subtract_b_dec=False, hook_point="b.0.a", hook_point_out="b.0.c").build()])
    with pytest.raises(TypeError, match="Linear"):
        TranscoderSet([torch.nn.Linear(2, 2)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"in the order of their layers, one for each; got layers \[1, 0\]"):
        TranscoderSet([two, one])
    with pytest.raises(ValueError, match="have the same sizes"):
        TranscoderSet([one, configs(n=2, width=30)[1].build()])
    with pytest.raises(ValueError, match="some of the transcoders have a skip connection"):
        TranscoderSet([one, configs(n=2, skip=True)[1].build()])
    with pytest.raises(ValueError, match="each transcoder names its sites"):
        TranscoderSet([Transcoder.Config(8, 24).build()])
    with pytest.raises(ValueError, match=r"write to \[2, 1\] sites \(n_outputs\), got \[1, 1\]"):
        CrossLayerTranscoder([one, two])
    with pytest.raises(ValueError, match="reads and writes sites of that layer"):
        TranscoderSet([one.at("blocks.0.mlp.hook_in", "blocks.1.hook_mlp_out")])
    made = TranscoderSet([one, two])
    with pytest.raises(ValueError, match="features are a sequence with one tensor for each of 2 layers, got 1"):
        made.outputs([torch.zeros(2, 24)])


# ---- those of the bundled model --------------------------------------------------------------------------------------

DEMO = Path(hooked_lm.__file__).parent / "demo"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "demo-cross-layer"])
def test_the_bundled_transcoders_are_as_good_as_their_figures_say(model: HookedTransformer, name: str) -> None:
    made = load_transcoders(name)
    assert {weight.dtype for weight in made.parameters()} == {torch.float32}
    assert made.layers == (0, 1, 2, 3)
    report = json.loads((DEMO / "transcoders.json").read_text())
    rng = Random(77)
    found = evaluate_dictionary(model, [training_text(rng) for _ in range(60)], made, skip=1)
    for figure, tolerance in (("explained variance", 0.03), ("CE recovered (mean)", 0.03), ("KL spliced", 1.0)):
        known = torch.tensor(report[name]["figures"][figure])
        assert_near(found.select(figure=figure).mean, known, tolerance, because="sixty other texts")
    assert found.no_better_than == []
    whole = found.select(layer="all")
    assert whole.select(figure="CE recovered (mean)").mean > 0.9


def test_the_bundled_transcoders_are_small() -> None:
    files = ["transcoders.safetensors", "cross_layer_transcoder.safetensors"]
    assert sum((DEMO / file).stat().st_size for file in files) < 4e6
