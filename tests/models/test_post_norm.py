"""Models whose norms stand in the stream: what they have in common with others, and what they refuse."""

from dataclasses import replace

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.components.blocks.post_norm import NormedResidualBlock, PostNormBlock
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.models.config.flat import HookedTransformerConfig
from tests.close import assert_close
from tests.models.structures import D_MODEL, D_VOCAB, random_model, random_tokens

SIZES = {"n_layers": 2, "d_model": D_MODEL, "n_ctx": 8, "n_heads": 3, "d_vocab": D_VOCAB, "d_mlp": 5}


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    tree = HookedTransformerConfig(**SIZES, act_fn="gelu", device="cpu").tree
    blocks = tuple(PostNormBlock.Config(attn=b.attn, ln1=b.ln1, mlp=b.mlp, ln2=b.ln2) for b in tree.blocks)
    return random_model(replace(tree, blocks=blocks, ln_final=None))


@pytest.fixture(scope="module")
def run(model: HookedTransformer) -> tuple[torch.Tensor, ActivationCache]:
    with torch.no_grad():
        return model.run_with_cache(random_tokens())


def test_the_stream_of_every_layer(model: HookedTransformer, run: tuple[torch.Tensor, ActivationCache]):
    logits, cache = run
    stack, labels = cache.accumulated_resid(return_labels=True)
    assert labels == ["0_pre", "1_pre", "final_post"]
    assert torch.equal(stack[1], cache["normalized_resid_post", 0])
    assert torch.equal(stack[1], cache["resid_pre", 1])
    assert_close(model.unembed(cache.accumulated_resid(apply_ln=True)[-1]), logits)


def test_the_stream_within_layers(run: tuple[torch.Tensor, ActivationCache]):
    _, cache = run
    stack, labels = cache.accumulated_resid(layer=1, incl_mid=True, mlp_input=True, apply_ln=True, return_labels=True)
    assert labels == ["0_pre", "0_mid", "1_pre", "1_mid"]
    assert torch.equal(stack[1], cache["normalized_resid_mid", 0])
    assert torch.equal(stack[3], cache["normalized_resid_mid", 1])


@pytest.mark.parametrize(
    "take_apart",
    [
        lambda cache: cache.decompose_resid(),
        lambda cache: cache.decompose_resid(layer=0, mlp_input=True),
        lambda cache: cache.decompose_resid(layer=1, mode="attn"),
        lambda cache: cache.stack_head_results(),
        lambda cache: cache.stack_neuron_results(layer=1),
        lambda cache: cache.get_full_resid_decomposition(),
        lambda cache: cache.get_full_resid_decomposition(expand_neurons=False),
    ],
)
def test_the_stream_is_no_sum(run: tuple[torch.Tensor, ActivationCache], take_apart):
    with pytest.raises(ValueError, match="normalise the stream itself"):
        take_apart(run[1])


def test_before_the_first_block_there_is_a_sum(run: tuple[torch.Tensor, ActivationCache]):
    _, cache = run
    assert_close(cache.decompose_resid(layer=0).sum(0), cache["resid_pre", 0])


def test_what_one_layer_writes_is_told(model: HookedTransformer, run: tuple[torch.Tensor, ActivationCache]):
    _, cache = run
    neurons = cache.get_neuron_results(1)
    assert_close(neurons.sum(-2) + model.blocks[1].mlp.b_out.detach(), cache["mlp_out", 1])


def test_there_is_no_constant_sum_of_biases(model: HookedTransformer):
    with pytest.raises(ValueError, match="normalise the stream itself"):
        model.accumulated_bias(1)
    assert torch.equal(model.accumulated_bias(0), torch.zeros(D_MODEL))


def test_runs_can_start_and_stop_between_blocks(model: HookedTransformer, run: tuple[torch.Tensor, ActivationCache]):
    logits, cache = run
    with torch.no_grad():
        resid = model(random_tokens(), stop_at_layer=1)
        assert_close(resid, cache["resid_pre", 1])
        assert_close(model(resid, start_at_layer=1), logits)


def test_sublayers_that_add_to_the_normalised_stream():
    """The stream of each layer is shown; it is no sum, its biases are no constant, and weights before its norms are kept."""
    tree = HookedTransformerConfig(**SIZES, act_fn="gelu", device="cpu").tree
    model = random_model(replace(tree, blocks=tuple(NormedResidualBlock.Config(**vars(b)) for b in tree.blocks)))
    with torch.no_grad():
        logits, cache = model.run_with_cache(random_tokens())
        assert_close(model.unembed(cache.accumulated_resid(apply_ln=True)[-1]), logits)
        assert_close(cache["resid_mid", 1], model.blocks[1].ln1(cache["resid_pre", 1]) + cache["attn_out", 1])
    with pytest.raises(ValueError, match="normalise the stream itself"):
        cache.decompose_resid()
    with pytest.raises(ValueError, match="normalise the stream itself"):
        model.accumulated_bias(1)
    before = model.W_out.detach().clone()
    model.process_weights_()
    assert torch.equal(model.W_out, before)
    assert_close(model(random_tokens()).log_softmax(-1), logits.log_softmax(-1))
