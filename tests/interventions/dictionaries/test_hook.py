"""Dictionaries in runs: on every class of model, in generation, in threads, in files, and what is said of bad ones."""

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm.interventions import AddDirection, HookObject, Hooks
from hooked_lm.interventions.dictionaries import (
    SAE,
    Dictionary,
    Features,
    Gated,
    JumpReLU,
    TopK,
    Transcode,
    Transcoder,
    run_with_features,
)
from tests.close import assert_apart, assert_close
from tests.interventions.tables import KINDS, D, numbers
from tests.models.toys import ids, toy

# The two sites of a transcoder in each class of model.
TWO_SITES = {"decoder": ["blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out"]}
TWO_SITES |= {"encoder": ["blocks.0.mlp.hook_pre", "blocks.0.hook_mlp_out"]}
TWO_SITES |= {"encoder-decoder": ["decoder.0.mlp.hook_pre", "decoder.0.hook_mlp_out"], "module": ["0", "2"]}


def noisy(cfg: SAE.Config) -> SAE:
    """A dictionary whose biases are some numbers, too."""
    sae = cfg.build(3)
    with torch.no_grad():
        for i, weight in enumerate(sae.parameters()):
            weight += 0.1 * numbers(*weight.shape, seed=i).abs()
    return sae.eval().requires_grad_(False)


def one_row_more(features: Tensor) -> None:
    features[1, :, 5] += 2


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_class_of_model(kind: str) -> None:
    make, inputs, site = KINDS[kind]
    model, sae = make(), noisy(TopK.Config(D, 48, k=6))
    plain, (_, clean) = model(*inputs), model.run_with_cache(*inputs, names_filter=site)
    watch = Features(site, sae=sae)
    assert torch.equal(model.run_with_hooks(*inputs, fwd_hooks=[watch]), plain)
    assert torch.equal(watch.features, sae.encode(clean[site]))

    cases: list[tuple[dict[str, Any], Any]] = [
        ({"error": "drop"}, sae),
        ({"edit": one_row_more}, lambda v: v + 2 * torch.tensor([0.0, 1, 0])[:, None, None] * sae.W_dec[5]),
    ]
    for how, by_hand in cases:
        dictionary = Dictionary(site, sae=sae, **how)
        found = model.run_with_hooks(*inputs, fwd_hooks=[dictionary])
        expected = model.run_with_hooks(*inputs, fwd_hooks=[(site, lambda value, hook, f=by_hand: f(value))])
        assert_close(found, expected)
        assert_apart(found, plain, msg="the control: it matters")
        if "edit" in how:
            assert_close(found[[0, 2]], plain[[0, 2]])  # rows are apart
    assert_close(model.run_with_hooks(*inputs, fwd_hooks=[Dictionary(site, sae=sae)]), plain)
    with dictionary.disabled():
        assert torch.equal(model.run_with_hooks(*inputs, fwd_hooks=[dictionary]), plain)
    assert not any(point.is_listening for point in model.hook_points())


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [{"value": 0}, {"value": 1.5}, {"factor": -2}, {"coefficient": 4.0}])
def test_one_feature_is_set_scaled_or_raised(kind: str, change: dict[str, Any]) -> None:
    make, inputs, site = KINDS[kind]
    model, sae = make(), noisy(SAE.Config(D, 48))
    by_hand = {"value": lambda v, n: n, "factor": lambda v, n: v * n, "coefficient": lambda v, n: v + n}
    [(name, number)] = change.items()
    active = (
        sae.encode(model.run_with_cache(*inputs, names_filter=site)[1][site])[:, 1].mean(0).topk(2).indices.tolist()
    )

    def edit(features: Tensor) -> None:
        features[:, 1, active] = by_hand[name](features[:, 1, active], number)

    hook = Dictionary(site, sae=sae, feature=[active[0], active[1] - 48], positions=1, **change)
    found = model.run_with_hooks(*inputs, fwd_hooks=[hook])
    assert_close(found, model.run_with_hooks(*inputs, fwd_hooks=[Dictionary(site, sae=sae, edit=edit)]))
    assert_apart(found, model(*inputs), msg="the control: it matters")
    again = HookObject.from_dict(hook.to_dict())
    assert_close(model.run_with_hooks(*inputs, fwd_hooks=[again]), found)


@torch.no_grad()
def test_raising_a_feature_is_adding_its_direction(tmp_path: Path) -> None:
    model, sae = toy("rotary"), noisy(SAE.Config(D, 48))
    site = "blocks.1.hook_resid_pre"
    hook = Dictionary(site, sae=sae, feature=5, coefficient=3)
    Hooks([hook]).save(tmp_path / "hooks")
    assert "feature=5, coefficient=3" in repr(hook)
    direction = AddDirection(site, vector=sae.W_dec[5], coefficient=3)
    expected = model.run_with_hooks(ids(), fwd_hooks=[direction])
    for one in (hook, *Hooks.load(tmp_path / "hooks")):
        assert_close(model.run_with_hooks(ids(), fwd_hooks=[one]), expected)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"value": 0}, "value=0 is of a feature, and none is given: add feature="),
        ({"positions": [1]}, r"positions=\[1\] is of a feature"),
        ({"feature": 5}, r"feature=5 needs one of value, factor, coefficient; got none \(value=0 ablates it\)"),
        ({"feature": 5, "value": 0, "factor": 2}, "got value=0, factor=2"),
        ({"feature": 5, "value": 0, "edit": one_row_more}, "give feature=... or edit=..., not both"),
        ({"feature": 5, "factor": float("nan")}, "factor of Dictionary must be finite"),
    ],
)
def test_settings_of_an_edit_that_do_not_go_together(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Dictionary("z", 0, SAE.Config(D, 48).build(), **settings)


def test_a_feature_that_does_not_exist() -> None:
    hook = Dictionary("blocks.1.hook_resid_pre", sae=SAE.Config(D, 48).build(), feature=48, value=0)
    with pytest.raises(IndexError, match="48"):
        toy("rotary").run_with_hooks(ids(), fwd_hooks=[hook])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_transcoder_in_every_class_of_model(kind: str) -> None:
    make, inputs, _ = KINDS[kind]
    model, (reads, writes) = make(), TWO_SITES[kind]
    plain, (_, clean) = model(*inputs), model.run_with_cache(*inputs, names_filter=[reads, writes])
    d_in, d_out = clean[reads].shape[-1], clean[writes].shape[-1]
    transcoder = noisy(Transcoder.Config(d_in, 40, d_out=d_out))
    splice = Transcode([reads, writes], sae=transcoder, error="drop")
    found = model.run_with_hooks(*inputs, fwd_hooks=[splice])
    by_hand = (writes, lambda value, hook: transcoder(clean[reads]))
    assert_close(found, model.run_with_hooks(*inputs, fwd_hooks=[by_hand]))
    assert_apart(found, plain, msg="the control: it matters")
    kept = Transcode([reads, writes], sae=transcoder)
    assert_close(model.run_with_hooks(*inputs, fwd_hooks=[kept]), plain)
    assert torch.equal(model(*inputs), plain)
    assert not any(point.is_listening for point in model.hook_points())


@pytest.mark.parametrize("kind", ["dictionary", "transcoder", "watched"])
def test_generation_with_a_cache_is_generation_without(kind: str) -> None:
    model, tokens = toy("rotary"), ids(2, 5)
    hooks = {
        "dictionary": Dictionary("resid_post", 1, noisy(JumpReLU.Config(D, 48, threshold=0.1)), error="drop"),
        "transcoder": Transcode(TWO_SITES["decoder"], sae=noisy(Transcoder.Config(D, 48)), error="drop"),
        "watched": Features("resid_post", 1, noisy(SAE.Config(D, 48))),
    }
    hook, found = hooks[kind], []
    for use_past_kv_cache in (True, False):
        seen: list[Tensor] = []
        end = ("blocks.2.hook_resid_post", lambda value, hook, seen=seen: seen.append(value[:, -1].clone()))
        options: dict[str, Any] = {"do_sample": False, "stop_at_eos": False, "verbose": False}
        with torch.no_grad(), model.hooks([hook, end]):
            text = model.generate(tokens, 4, use_past_kv_cache=use_past_kv_cache, **options)
        found.append((text, torch.stack(seen), hook.by_site))  # type: ignore[attr-defined]
    assert torch.equal(found[0][0], found[1][0])
    assert_close(found[0][1], found[1][1])
    for site, features in found[0][2].items():
        assert features.shape[1] == 1  # of the last step, which shows one token
        assert_close(features, found[1][2][site][:, -1:])
    if kind != "watched":
        assert not torch.equal(found[0][0], model.generate(tokens, 4, **options))


def test_threads_share_a_transcoder() -> None:
    """Each waits between what is read and what is written, until the other has read."""
    model, (reads, writes) = toy("rotary"), TWO_SITES["decoder"]
    splice = Transcode([reads, writes], sae=noisy(Transcoder.Config(D, 48)), error="drop")
    tokens, barrier, found = [ids(1, 5, seed=seed) for seed in range(2)], threading.Barrier(2), {}
    with torch.no_grad():
        expected = [model.run_with_hooks(one, fwd_hooks=[splice]) for one in tokens]

    def run(i: int) -> None:
        def wait(value: Tensor, hook: Any) -> None:
            barrier.wait(20)

        with torch.no_grad():
            found[i] = model.run_with_hooks(tokens[i], fwd_hooks=[splice, ("blocks.1.mlp.hook_post", wait)])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[i], expected[i]) for i in range(2))
    assert not torch.equal(*expected)


def test_a_model_with_a_registered_dictionary_is_copied() -> None:
    """Though what the dictionary saw in the last run stands in its graph."""
    model, tokens = toy("rotary"), ids(2, 5)
    hooks = [Dictionary("resid_post", 1, noisy(TopK.Config(D, 48, k=4)), error="drop")]
    hooks.append(Transcode(TWO_SITES["decoder"], sae=noisy(Transcoder.Config(D, 48)), error="drop"))
    numbers = [model.register(hook) for hook in hooks]
    expected = model(tokens)
    assert hooks[0].features.requires_grad
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(hook.by_site for hook in twin.registered().values())
        assert torch.equal(twin(tokens), expected)
    for number in numbers:
        model.unregister(number)
    assert not torch.equal(model(tokens), expected)


def test_a_new_dictionary_shifts_nothing() -> None:
    """A bias that begins at anything but zero would move every feature, and every value."""
    for cfg in (SAE.Config(D, 48), TopK.Config(D, 48, k=4), JumpReLU.Config(D, 48), Gated.Config(D, 48)):
        sae = cfg.build()
        assert not any(weight.any() for name, weight in sae.named_parameters() if name.startswith("b_"))
        assert torch.equal(sae(torch.zeros(2, D)), torch.zeros(2, D))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_files_keep_the_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    transcoder = noisy(Transcoder.Config(D, 48)).to(dtype)
    objects = [Dictionary("resid_post", 1, noisy(TopK.Config(D, 48, k=4)).to(dtype), error="drop")]
    objects += [Transcode(TWO_SITES["decoder"], sae=transcoder, error="detach"), Features("z", 1, transcoder)]
    Hooks(objects).save(tmp_path / "hooks.safetensors")
    again = Hooks.load(tmp_path / "hooks.safetensors")
    model, tokens = toy("rotary"), ids(2, 5)
    for before, after in zip(objects, again, strict=True):
        assert repr(before) == repr(after)
        for name, weight in before.sae.state_dict().items():
            same = after.sae.state_dict()[name]  # type: ignore[attr-defined]
            assert same.dtype == dtype
            assert torch.equal(same, weight)
    with torch.no_grad():
        one, other = (model.run_with_hooks(tokens, fwd_hooks=stack[:2]) for stack in (objects, again))
    assert torch.equal(one, other)
    twin: Any = HookObject.from_dict(objects[0].to_dict())
    twin.sae.W_dec.zero_()
    assert objects[0].sae.W_dec.any()  # not the same memory


class Broken:
    """An object of somebody else's, whose `encode` gives what it is told to."""

    def __init__(self, gives: Any) -> None:
        self.gives = gives

    def encode(self, x: Tensor) -> Any:
        return self.gives(x)

    def decode(self, features: Tensor) -> Tensor:
        return features


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make_hook", [Dictionary, Features], ids=["dictionary", "watched"])
def test_bad_features_are_named_and_nothing_stays(kind: str, make_hook: Any) -> None:
    make, inputs, site = KINDS[kind]
    model = make()

    def nan_once(x: Tensor) -> Tensor:
        x = x.clone()
        x[1, 2, 3] = torch.nan
        return x

    for gives, error, words in (
        (
            nan_once,
            ValueError,
            rf"encode of Broken at '{site}' gave features \[3, 6, 32\] of which 1 are NaN or infinite$",
        ),
        (lambda x: x / 0, ValueError, "are NaN or infinite"),
        (lambda x: (x, x), TypeError, rf"encode of Broken at '{site}' gave a tuple, no tensor"),
    ):
        hook = make_hook(site, sae=Broken(gives))
        with pytest.raises(error, match=words):
            model.run_with_hooks(*inputs, fwd_hooks=[hook])
        assert not hook.by_site
    spoil = (site, lambda value, hook: value * torch.nan)
    with pytest.raises(ValueError, match="the site's own value is not finite either"):
        model.run_with_hooks(*inputs, fwd_hooks=[spoil, make_hook(site, sae=Broken(lambda x: x))])
    with pytest.raises(ValueError, match=rf"'{site}' has vectors of width 32 .* \(TopK\) reads vectors of width 31"):
        model.run_with_hooks(*inputs, fwd_hooks=[make_hook(site, sae=TopK.Config(31, 40, k=3).build())])
    assert not any(point.is_listening for point in model.hook_points())
    assert model.registered() == {}


@pytest.mark.parametrize("make_hook", [Dictionary, Features])
def test_a_dictionary_elsewhere(make_hook: Any) -> None:
    """As one from a file is, which is on the CPU, beside a model on a GPU."""
    make, inputs, site = KINDS["decoder"]
    hook = make_hook(site, sae=SAE.Config(D, 48).build().to("meta"))
    with pytest.raises(ValueError, match=r"the dictionary is on meta, what it reads on cpu: move it, sae.to\('cpu'\)"):
        make().run_with_hooks(*inputs, fwd_hooks=[hook])


def test_what_a_dictionary_writes_into_its_input_reaches_nobody() -> None:
    class Centres(Broken):
        def encode(self, x: Tensor) -> Tensor:
            x -= 7
            return x

    model, tokens = toy("rotary"), ids(2, 5)
    with torch.no_grad():
        plain = model(tokens)
        logits, features = run_with_features(model, tokens, [Features("resid_post", 1, Centres(None))])
        _, cache = model.run_with_cache(tokens, names_filter=("resid_post", 1))
    assert torch.equal(logits, plain)
    assert torch.equal(features["blocks.1.hook_resid_post"], cache["resid_post", 1] - 7)
