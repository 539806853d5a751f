"""SAELens's SAETransformerBridge on ours: dictionaries stand in the place of points and are taken out again."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sae_lens.analysis.sae_transformer_bridge import SAETransformerBridge
from sae_lens.registry import get_sae_class
from torch import Tensor

from hooked_lm.compat.bridge import TransformerBridge
from tests.close import assert_apart, assert_close

TEXT = "When Mary and John went to the store, John gave"


def dictionary(d_in: int, site: str, out: str | None = None) -> Any:
    """A random SAE, or a transcoder to another site."""
    cls, config = get_sae_class("standard" if out is None else "transcoder")
    more = {} if out is None else {"d_out": d_in, "apply_b_dec_to_input": False}
    cfg = config(d_in=d_in, d_sae=3 * d_in, **more)
    cfg.metadata.hook_name, cfg.metadata.hook_name_out = site, out
    sae = cls(cfg)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in sae.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    return sae.eval()


def demo() -> Any:
    bridge = SAETransformerBridge.boot_transformers("demo")
    return bridge, bridge.to_tokens(TEXT)


def llama(folder: Path) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=50,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return SAETransformerBridge.boot_transformers(str(folder), device="cpu"), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(params=["demo", "llama"])
def booted(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return demo() if request.param == "demo" else llama(tmp_path)


@pytest.mark.parametrize("site", ["blocks.1.hook_resid_post", "blocks.1.hook_out", "blocks.1.hook_mlp_out"])
def test_a_dictionary_in_the_place_of_a_site(booted: Any, site: str) -> None:
    bridge, tokens = booted
    assert isinstance(bridge, TransformerBridge)
    sae = dictionary(bridge.cfg.d_model, site)
    plain, cache = bridge.run_with_cache(tokens)
    name = bridge._resolve_hook_name(site)
    assert name in bridge.hook_dict

    def by_hand(value: Tensor, hook: Any) -> Tensor:
        return sae(value)

    expected = bridge.run_with_hooks(tokens, fwd_hooks=[(site, by_hand)])
    found = bridge.run_with_saes(tokens, saes=[sae])
    assert_close(found, expected)
    assert_apart(found, plain)
    kept = bridge.run_with_saes(tokens, saes=sae, use_error_term=True)
    assert_close(kept, plain)
    assert_close(bridge(tokens), plain)  # nothing stays behind

    logits, features = bridge.run_with_cache_with_saes(tokens, saes=[sae])
    assert_close(logits, expected)
    acts = bridge.get_sae_hook_name(sae)
    assert_close(features[acts], sae.encode(cache[site]))
    only = bridge.run_with_cache_with_saes(tokens, saes=[sae], names_filter=acts)[1]
    assert list(only) == [acts]


def test_hooks_on_features(booted: Any) -> None:
    bridge, tokens = booted
    site = "blocks.1.hook_resid_pre"
    sae = dictionary(bridge.cfg.d_model, site)

    def off(features: Tensor, hook: Any) -> Tensor:
        return torch.zeros_like(features)

    name = bridge.get_sae_hook_name(sae)
    found = bridge.run_with_hooks_with_saes(tokens, saes=[sae], fwd_hooks=[(name, off)])
    expected = bridge.run_with_hooks(tokens, fwd_hooks=[(site, lambda value, hook: sae.b_dec.expand_as(value))])
    assert_close(found, expected)
    assert_apart(found, bridge.run_with_saes(tokens, saes=[sae]))


def test_attached_until_reset(booted: Any) -> None:
    bridge, tokens = booted
    plain = bridge(tokens)
    sae = dictionary(bridge.cfg.d_model, "blocks.1.hook_out")
    bridge.add_sae(sae)
    assert list(bridge.acts_to_saes) == ["blocks.1.hook_out"]
    assert_close(bridge(tokens), bridge.run_with_saes(tokens, saes=[sae]))
    assert_apart(bridge(tokens), plain)
    bridge.reset_saes()
    assert_close(bridge(tokens), plain)
    _, cache = bridge.run_with_cache(tokens)
    assert "blocks.1.hook_out" in cache
    assert not [name for name in bridge.hook_dict if "sae" in name]


def test_a_transcoder(booted: Any) -> None:
    bridge, tokens = booted
    sae = dictionary(bridge.cfg.d_model, "blocks.1.mlp.hook_in", "blocks.1.hook_mlp_out")
    plain, cache = bridge.run_with_cache(tokens, names_filter="blocks.1.mlp.hook_in")
    given = sae(cache["blocks.1.mlp.hook_in"])
    expected = bridge.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_mlp_out", lambda value, hook: given)])
    found = bridge.run_with_saes(tokens, saes=[sae])
    assert_close(found, expected)
    assert_apart(found, plain)
    assert_close(bridge(tokens), plain)
