"""TransformerBridge: unfolded under both styles' names, folded on demand."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer, compat
from hooked_lm.compat.bridge import TransformerBridge, TransformerBridgeConfig
from hooked_lm.hooks import HookPoint
from tests.close import assert_apart, assert_close
from tests.families import CASES, reference

TEXT = "When Mary and John went to the store, John gave"
NATIVE: dict[str, Any] = {"d_model": 16, "d_head": 8, "n_layers": 2, "n_ctx": 8, "d_vocab": 10, "act_fn": "gelu"}


@pytest.fixture
def bridge() -> TransformerBridge:
    bridge = TransformerBridge.boot_transformers("demo")
    assert isinstance(bridge, TransformerBridge)
    return bridge


@pytest.fixture
def shim() -> Iterator[None]:
    compat.install()
    yield
    compat.uninstall()


def case_of(family: str) -> Any:
    return next(case for case in CASES if case.family == family)


def test_the_weights_are_as_they_are_until_they_are_folded(bridge: TransformerBridge) -> None:
    plain = HookedTransformer.from_pretrained_no_processing("demo")
    folded = HookedTransformer.from_pretrained("demo")
    assert torch.equal(bridge(TEXT), plain(TEXT))
    assert not bridge.cfg.processed
    assert not bridge.compatibility_mode
    bridge.enable_compatibility_mode(no_processing=True)
    assert bridge.compatibility_mode
    assert torch.equal(bridge(TEXT), plain(TEXT))
    bridge.enable_compatibility_mode()
    assert torch.equal(bridge(TEXT), folded(TEXT))
    assert_apart(bridge(TEXT), plain(TEXT))  # the logits are centred
    _, cache = bridge.run_with_cache(TEXT)
    _, expected = folded.run_with_cache(TEXT)
    assert list(cache) == list(expected)
    assert all(torch.equal(cache[name], expected[name]) for name in cache)
    assert torch.equal(cache["blocks.1.hook_out"], expected["resid_post", 1])


def test_folding_in_part(bridge: TransformerBridge) -> None:
    bridge.enable_compatibility_mode(center_unembed=False, fold_value_biases=False)
    expected = HookedTransformer.from_pretrained("demo", center_unembed=False, fold_value_biases=False)
    assert bridge.cfg.processed == expected.cfg.processed
    assert torch.equal(bridge.W_U, expected.W_U)


def test_points(bridge: TransformerBridge) -> None:
    point = bridge.blocks[1].attn.hook_q
    assert isinstance(point, HookPoint)
    assert bridge.hook_dict["blocks.1.attn.q.hook_out"] is point
    assert bridge.get_hook_point("blocks.1.attn.q.hook_out") is bridge.get_hook_point("blocks.1.attn.hook_q") is point
    assert bridge.get_hook_point("blocks.1.attn.nothing") is None
    assert bridge._hook_registry == bridge.all_points()
    assert bridge.hook_aliases["blocks.1.attn.q.hook_out"] == "blocks.1.attn.hook_q"
    assert bridge._collect_hook_aliases_from_registry() == bridge.hook_aliases
    new = HookPoint()
    bridge.blocks[1].attn.hook_q = new
    bridge.setup()
    assert bridge.get_hook_point("blocks.1.attn.q.hook_out") is new


def test_a_hook_at_an_alias_changes_the_run(bridge: TransformerBridge) -> None:
    def nothing(value: Tensor, hook: HookPoint) -> Tensor:
        return torch.zeros_like(value)

    changed = bridge.run_with_hooks(TEXT, fwd_hooks=[("blocks.0.mlp.out.hook_in", nothing)])
    assert torch.equal(changed, bridge.run_with_hooks(TEXT, fwd_hooks=[("blocks.0.mlp.hook_post", nothing)]))
    assert_apart(changed, bridge(TEXT))


def test_parts(bridge: TransformerBridge) -> None:
    assert bridge.layer_types() == ["attn+mlp"] * 4
    assert [layer for layer, _ in bridge.blocks_with("attn")] == [0, 1, 2, 3]
    assert bridge.blocks_with("mixer") == []
    assert "attn" in bridge.block_submodules(0)
    assert "hook_resid_pre" not in bridge.block_submodules(0)
    hooks = bridge.block_hooks(2)
    assert hooks == sorted(hooks)
    assert "attn.hook_z" in hooks
    layers, weights = bridge.stack_params_for("mlp", "mlp.W_in", lambda weight: weight.T)
    assert layers == [0, 1, 2, 3]
    assert torch.equal(weights, bridge.W_in.transpose(1, 2))
    with pytest.raises(ValueError, match="no block has a submodule 'mixer'"):
        bridge.stack_params_for("mixer", "W")


def test_weights_by_their_names(bridge: TransformerBridge) -> None:
    weights = bridge.tl_parameters()
    assert weights["blocks.1.attn.W_Q"] is bridge.blocks[1].attn.W_Q
    assert dict(bridge.tl_named_parameters()).keys() == weights.keys() == bridge.get_params().keys()


def test_the_original_model(bridge: TransformerBridge) -> None:
    tokens = bridge.to_tokens(TEXT)
    theirs = bridge.original_model
    with torch.no_grad():
        assert_close(theirs(tokens).logits, bridge(tokens))
    ours = bridge.generate(tokens, max_new_tokens=2, do_sample=False, verbose=False)
    assert torch.equal(bridge.hf_generate(tokens, max_new_tokens=2, do_sample=False), ours)
    assert bridge.hf_generate(TEXT, max_new_tokens=2, do_sample=False).startswith(TEXT)


def test_copies_and_device(bridge: TransformerBridge) -> None:
    twin = copy.deepcopy(bridge).to("cpu")
    assert type(twin) is TransformerBridge
    assert twin.hook_dict["blocks.0.hook_out"] is twin.blocks[0].hook_resid_post
    assert twin.hook_dict["blocks.0.hook_out"] is not bridge.hook_dict["blocks.0.hook_out"]


@pytest.mark.parametrize(("model_type", "expected"), [("bert", HookedEncoder), ("t5", HookedEncoderDecoder)])
def test_other_kinds_of_model_have_the_methods_of_a_bridge(model_type: str, expected: type) -> None:
    model: Any = TransformerBridge.boot_transformers("tiny", hf_model=reference(case_of(model_type)))
    assert isinstance(model, expected)
    model.enable_compatibility_mode(disable_warnings=True)
    assert model.compatibility_mode
    assert dict(model.tl_named_parameters()).keys() == model.state_dict().keys()
    assert type(model.original_model) is type(reference(case_of(model_type)))
    with pytest.raises(ValueError, match="fold_ln"):
        model.enable_compatibility_mode(fold_ln=True)


def test_a_model_in_memory() -> None:
    theirs = reference(case_of("llama"))
    bridge = TransformerBridge.boot_transformers(
        "tiny", hf_model=theirs, device="cpu", dtype=torch.float64, n_devices=1
    )
    assert isinstance(bridge, TransformerBridge)
    assert bridge.W_Q.dtype == torch.float64


@pytest.mark.parametrize(
    "options",
    [{"load_weights": False}, {"trust_remote_code": True}, {"model_class": HookedTransformer}],
)
def test_what_is_not_done_here_is_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        TransformerBridge.boot_transformers("demo", **options)


def test_new_models() -> None:
    bridge = TransformerBridge.boot_native({**NATIVE, "seed": 3, "architecture": "TransformerLensNative"})
    again = TransformerBridge.boot_native(TransformerBridgeConfig(**NATIVE, seed=3), dtype=torch.float64)
    assert type(bridge) is TransformerBridge
    assert again.W_E.dtype == torch.float64
    assert_close(bridge.W_Q, again.W_Q, dtype=torch.float32)
    _, cache = bridge.run_with_cache(torch.tensor([[1, 2, 3]]))
    assert cache["blocks.1.hook_out"].shape == (1, 3, 16)
    with pytest.raises(ValueError, match="architecture='GPT2LMHeadModel'"):
        TransformerBridge.boot_native({**NATIVE, "architecture": "GPT2LMHeadModel"})
    with pytest.raises(ValueError, match="is_multimodal=True"):
        TransformerBridgeConfig(**NATIVE, is_multimodal=True)


@pytest.mark.usefixtures("shim")
def test_the_lent_name() -> None:
    from transformer_lens import TransformerBridge as top  # type: ignore[import-not-found]
    from transformer_lens.config import TransformerBridgeConfig as config  # type: ignore[import-not-found]
    from transformer_lens.model_bridge import TransformerBridge as shim  # type: ignore[import-not-found]
    from transformer_lens.model_bridge.bridge import TransformerBridge as deep  # type: ignore[import-not-found]

    assert top is shim is deep is TransformerBridge
    assert config is TransformerBridgeConfig
