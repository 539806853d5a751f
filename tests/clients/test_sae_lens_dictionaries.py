"""SAELens's own dictionaries in our hooks, and its files read and written here."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sae_lens import SAE as TheirSAE
from sae_lens.registry import get_sae_class
from sae_lens.saes.batchtopk_sae import BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.interventions.dictionaries import (
    SAE,
    BatchTopK,
    Dictionary,
    Features,
    Gated,
    JumpReLU,
    TopK,
    Transcode,
    Transcoder,
    load_saelens,
    run_with_features,
    save_saelens,
)
from tests.close import assert_apart, assert_close

SITE, OUT = "blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out"
WIDTH, K = 192, 8
PLAIN: list[dict[str, Any]] = [
    {"architecture": "standard"},
    {"architecture": "standard", "apply_b_dec_to_input": False},
    {"architecture": "standard", "normalize_activations": "layer_norm"},
    {"architecture": "topk", "k": K},
    {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True},
    {"architecture": "jumprelu"},
    {"architecture": "gated"},
]
TRANSCODERS: list[dict[str, Any]] = [{"architecture": "transcoder"}, {"architecture": "jumprelu_transcoder"}]


def label(options: dict[str, Any]) -> str:
    return " ".join(str(value) for value in options.values())


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def tokens(model: HookedTransformer) -> Tensor:
    return model.to_tokens(["The capital of France is Paris", "When Mary and John went to the store, John gave"])


def theirs(options: dict[str, Any]) -> Any:
    """A dictionary of theirs with random weights, biases and thresholds too."""
    cls, config = get_sae_class(options["architecture"])
    transcodes = "transcoder" in options["architecture"]
    given = {name: value for name, value in options.items() if name != "architecture"}
    cfg = config(
        d_in=128, d_sae=WIDTH, **given, **({"d_out": 128, "apply_b_dec_to_input": False} if transcodes else {})
    )
    cfg.metadata.hook_name = SITE
    if transcodes:
        cfg.metadata.hook_name_out = OUT
    sae = cls(cfg)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sae.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.1 * (drawn.abs() if name == "threshold" else drawn))
    return sae.eval()


def dense(features: Tensor) -> Tensor:
    return features.to_dense() if features.is_sparse else features


@pytest.mark.parametrize("options", PLAIN, ids=label)
def test_their_objects_work_in_our_hooks(model: HookedTransformer, tokens: Tensor, options: dict[str, Any]) -> None:
    sae = theirs(options)
    plain, cache = model.run_with_cache(tokens, names_filter=SITE)
    watch = Features(sae=sae)  # at the site that its metadata names
    logits, features = run_with_features(model, tokens, [watch])
    assert torch.equal(logits, plain)
    assert_close(features[SITE], sae.encode(cache[SITE]))
    kept = model.run_with_hooks(tokens, fwd_hooks=[Dictionary(sae=sae)])
    assert_close(kept, plain)
    alone = model.run_with_hooks(tokens, fwd_hooks=[Dictionary(sae=sae, error="drop")])
    by_hand = model.run_with_hooks(tokens, fwd_hooks=[(SITE, lambda value, hook: sae(value))])
    assert_close(alone, by_hand)
    assert_apart(alone, plain)


@pytest.mark.parametrize("error", ["keep", "drop"])
@pytest.mark.parametrize("normalized", ["none", "layer_norm"])
def test_an_edit_of_their_features(model: HookedTransformer, tokens: Tensor, normalized: str, error: str) -> None:
    sae = theirs({"architecture": "standard", "normalize_activations": normalized})

    def stronger(features: Tensor) -> None:
        features[:, :, 17] += 3

    def by_hand(value: Tensor, hook: Any) -> Tensor:
        features = sae.encode(value)
        stronger(features)
        changed = sae.decode(features)
        return changed if error == "drop" else changed + value - sae(value)

    edited = model.run_with_hooks(tokens, fwd_hooks=[Dictionary(sae=sae, edit=stronger, error=error)])
    expected = model.run_with_hooks(tokens, fwd_hooks=[(SITE, by_hand)])
    assert_close(edited, expected)
    assert_apart(edited, model(tokens))


def test_their_objects_put_heads_side_by_side(model: HookedTransformer, tokens: Tensor) -> None:
    cls, config = get_sae_class("standard")
    sae = cls(config(d_in=128, d_sae=WIDTH, reshape_activations="hook_z")).eval()
    site = "blocks.1.attn.hook_z"
    plain = model(tokens)
    kept = model.run_with_hooks(tokens, fwd_hooks=[Dictionary(site, sae=sae)])
    assert_close(kept, plain)
    dropped = model.run_with_hooks(tokens, fwd_hooks=[Dictionary(site, sae=sae, error="drop")])
    by_hand = model.run_with_hooks(tokens, fwd_hooks=[(site, lambda value, hook: sae(value))])
    assert_close(dropped, by_hand)


@pytest.mark.parametrize("options", TRANSCODERS, ids=label)
def test_their_transcoders_work_in_our_hooks(model: HookedTransformer, tokens: Tensor, options: dict[str, Any]) -> None:
    sae = theirs(options)
    _, cache = model.run_with_cache(tokens, names_filter=SITE)
    replaced = model.run_with_hooks(tokens, fwd_hooks=[Transcode([SITE, OUT], sae=sae, error="drop")])
    by_hand = model.run_with_hooks(tokens, fwd_hooks=[(OUT, lambda value, hook: sae(cache[SITE]))])
    assert_close(replaced, by_hand)


@pytest.mark.parametrize("options", [*PLAIN, *TRANSCODERS], ids=label)
def test_their_files_are_read(model: HookedTransformer, options: dict[str, Any], tmp_path: Path) -> None:
    sae = theirs(options)
    sae.save_model(tmp_path)
    ours = load_saelens(tmp_path)
    x = torch.randn(3, 5, 128, generator=torch.Generator().manual_seed(1))
    expected, found = dense(sae.encode(x)), ours.encode(x)
    assert_close(found, expected)
    assert_close(ours.decode(found), sae.decode(sae.encode(x)))


def test_their_batch_topk_is_read_after_training(tmp_path: Path) -> None:
    sae = BatchTopKTrainingSAE(BatchTopKTrainingSAEConfig(d_in=128, d_sae=WIDTH, k=K))
    with torch.no_grad():
        sae.topk_threshold.fill_(0.7)
        sae.W_dec.mul_(3)
    sae.save_inference_model(tmp_path)
    their = TheirSAE.load_from_disk(tmp_path)
    ours = load_saelens(tmp_path)
    x = torch.randn(20, 128, generator=torch.Generator().manual_seed(1))
    assert_close(ours.encode(x), their.encode(x))
    assert_close(ours.decode(ours.encode(x)), their.decode(their.encode(x)))
    assert type(their) is get_sae_class("jumprelu")[0]
    sae.save_model(tmp_path / "training")
    ours = load_saelens(tmp_path / "training").eval()
    assert_close(ours.encode(x), their.encode(x))


@pytest.mark.parametrize(
    "cfg",
    [
        SAE.Config(128, WIDTH, hook_point=SITE),
        TopK.Config(128, WIDTH, k=K, hook_point=SITE),
        BatchTopK.Config(128, WIDTH, k=K, hook_point=SITE),
        JumpReLU.Config(128, WIDTH, subtract_b_dec=False, hook_point=SITE),
        Gated.Config(128, WIDTH, hook_point=SITE),
        Transcoder.Config(128, WIDTH, hook_point=SITE, hook_point_out=OUT),
    ],
    ids=lambda cfg: type(cfg.build()).kind,
)
def test_our_files_are_read_by_them(cfg: Any, tmp_path: Path) -> None:
    sae = cfg.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in sae.state_dict().items():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.1 * (drawn.abs() if name == "threshold" else drawn))
    save_saelens(sae.eval(), tmp_path)
    their = TheirSAE.load_from_disk(tmp_path)
    x = torch.randn(3, 5, 128, generator=generator)
    assert_close(dense(their.encode(x)), sae.encode(x))
    assert_close(their.decode(their.encode(x)), sae.decode(sae.encode(x)))
    assert their.cfg.metadata.hook_name == SITE
