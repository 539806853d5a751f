"""Hook objects on whole language models: a wrapped model of transformers, and modules inside a model of the package."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from hooked_lm import HookedTransformer
from hooked_lm.hooks import HookPoint, wrap
from tests.close import GRADIENT, assert_close
from tests.hooks.test_objects import Affine, Keep

IDS = torch.tensor([[1, 5, 2, 9], [3, 3, 8, 0]])


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    cfg = GPT2Config(
        vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    return GPT2LMHeadModel(cfg).eval()


def test_a_cache_by_dotted_globs() -> None:
    hf = gpt2()
    net = wrap(hf)
    output, cache = net.run_with_cache(IDS, names_filter="transformer.h.*.attn.c_attn")
    assert list(cache) == ["transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"]
    states = hf(IDS, output_hidden_states=True).hidden_states
    for block, before, value in zip(hf.transformer.h, states, cache.values(), strict=False):
        assert_close(value, block.attn.c_attn(block.ln_1(before)).detach())
    assert_close(output.logits, hf(IDS).logits)
    assert "  h  ModuleList" in repr(net.names()).splitlines()


def test_parts_of_a_model_output_and_inputs_by_name() -> None:
    net, hf = wrap(gpt2()), gpt2()
    sites = ["transformer", "transformer[last_hidden_state]", "transformer.input[input_ids]", "transformer.h.1.input"]
    _, cache = net.run_with_cache(input_ids=IDS, names_filter=sites)
    states = hf(IDS, output_hidden_states=True).hidden_states
    assert torch.equal(cache["transformer.input[input_ids]"], IDS)
    assert_close(cache["transformer"], states[-1].detach())
    assert_close(cache["transformer[last_hidden_state]"], states[-1].detach())
    assert_close(cache["transformer.h.1.input"], states[1].detach())
    with pytest.raises(KeyError, match=r"'transformer.h.0.attn\[1\]' is not a tensor in this run"):
        net.run_with_cache(IDS, names_filter="transformer.h.0.attn[1]")  # the weights, which are None unless asked for


def test_objects_on_a_model_nobody_rewrote() -> None:
    net, hf = wrap(gpt2()), gpt2()
    hf.transformer.h[0].attn.register_forward_hook(lambda m, a, out: (0 * out[0], *out[1:]))
    hf.transformer.h[1].mlp.register_forward_pre_hook(lambda m, a: (2 * a[0] + 1,))
    objects = [Affine("transformer.h.0.attn", 0.0), Affine("transformer.h.1.mlp", 2.0, 1.0, when="pre")]
    keep = Keep("transformer.h.*.ln_1", direction="bwd")
    with net.hooks([*objects, keep]):
        logits = net(IDS).logits
    assert_close(logits, hf(IDS).logits)
    grads: list[Tensor] = []
    for block in hf.transformer.h:
        block.ln_1.register_full_backward_hook(lambda m, a, out: grads.append(out[0]))
    hf(IDS).logits.square().sum().backward()
    logits.square().sum().backward()
    assert_close(keep.seen, grads, depth=GRADIENT)


def test_registered_objects_in_the_models_own_generation() -> None:
    net, hf = wrap(gpt2()), gpt2()
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    plain = hf.generate(IDS, **options)
    hf.transformer.h[1].mlp.register_forward_hook(lambda m, a, out: -20 * out)
    expected = hf.generate(IDS, **options)
    assert not torch.equal(expected, plain)
    hook_id = net.register(Affine("transformer.h.1.mlp", -20.0))
    assert torch.equal(net.module.generate(IDS, **options), expected)
    net.unregister(hook_id)
    assert torch.equal(net.module.generate(IDS, **options), plain)


def test_an_encoder_decoder_nobody_rewrote() -> None:
    torch.manual_seed(0)
    cfg = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, decoder_start_token_id=0)
    hf = T5ForConditionalGeneration(cfg).eval()
    expected = hf(input_ids=IDS, decoder_input_ids=IDS[:, :2], output_hidden_states=True)
    net = wrap(hf)
    sites = ["encoder", "decoder.block.1.layer.1.EncDecAttention.input[key_value_states]", "decoder.block.1"]
    output, cache = net.run_with_cache(input_ids=IDS, decoder_input_ids=IDS[:, :2], names_filter=sites)
    assert_close(output.logits, expected.logits)
    assert_close(cache[sites[0]], expected.encoder_last_hidden_state.detach())
    assert_close(cache[sites[1]], expected.encoder_last_hidden_state.detach())
    assert cache["decoder.block.1"].shape == (2, 2, 8)


# ---- modules inside the package's own models -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.mark.parametrize("site", ["blocks.*.mlp", "blocks.1.attn", "unembed", "blocks.2.ln1"])
def test_inputs_of_a_models_modules(model: HookedTransformer, site: str) -> None:
    tokens, expected = model.to_tokens("The capital of France is"), []
    modules = [
        module for name, module in model.named_modules() if name == site or ("*" in site and name.endswith(".mlp"))
    ]
    handles = [module.register_forward_pre_hook(lambda m, args: expected.append(args[0].clone())) for module in modules]
    model(tokens)
    for handle in handles:
        handle.remove()
    keep = Keep(site, when="pre")
    model.run_with_hooks(tokens, fwd_hooks=[keep])
    assert_close(keep.seen, expected)
    handles = [module.register_forward_pre_hook(lambda m, args: (0.5 * args[0], *args[1:])) for module in modules]
    halved = model(tokens)
    for handle in handles:
        handle.remove()
    assert_close(model.run_with_hooks(tokens, fwd_hooks=[Affine(site, 0.5, when="pre")]), halved)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_in_generation_inputs_of_modules_know_their_places(model: HookedTransformer) -> None:
    asked: list[Any] = []

    class Asks(Keep):
        def __call__(self, value: Tensor, hook: HookPoint) -> None:
            asked.append((hook.name, hook.step, hook.positions.tolist(), value.shape[1]))  # type: ignore[union-attr]

    tokens = model.to_tokens("The capital of France is")
    n = tokens.shape[1]
    with model.hooks([Asks("blocks.0.mlp", when="pre")]):
        model.generate(tokens, 2, verbose=False, stop_at_eos=False, seed=0)
    name = "blocks.0.mlp.input"
    assert asked == [(name, 0, [*range(n)], n), (name, 1, [n], 1)]
