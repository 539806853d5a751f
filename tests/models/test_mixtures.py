"""Decoders with mixtures of experts in some blocks: what the rest of the package asks of them."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.parallel import ParallelBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.experts.moe import ClampedGatedMLP, MoE
from hooked_lm.components.experts.router import GroupedSigmoidRouter, SoftmaxRouter, TopKRouter
from hooked_lm.components.mlp import MLP, GatedMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.verification import output_weights
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.models.weights.fold import process_weights
from tests.close import assert_close
from tests.models.structures import D_MODEL, D_VOCAB, N_CTX, random_model, random_tokens

ATTENTION = Attention.Config(D_MODEL, 3, 4, qkv_bias=True)
DENSE = GatedMLP.Config(D_MODEL, 10)
SHARED = MoE.Config(DENSE, 4, 2, SoftmaxRouter(), shared=replace(DENSE, bias=True), shared_gate=True, router_bias=True)
MIXTURES = {
    "gated": MoE.Config(DENSE, 4, 2, SoftmaxRouter(renormalize=True)),
    "corrected": MoE.Config(DENSE, 6, 3, GroupedSigmoidRouter(3, 2), shared=replace(DENSE, bias=True)),
    "averaged": MoE.Config(DENSE, 4, 2, SoftmaxRouter(), shared=replace(DENSE, bias=True), out_scale=0.5),
    "clamped": MoE.Config(ClampedGatedMLP.Config(D_MODEL, 10), 4, 2, TopKRouter(), router_bias=True),
    "clamped, without biases": MoE.Config(ClampedGatedMLP.Config(D_MODEL, 10, bias=False), 4, 1, TopKRouter()),
    "plain": MoE.Config(MLP.Config(D_MODEL, 10, "relu"), 4, 2, SoftmaxRouter()),
    "shared": SHARED,
}
NORMS = {"LN": LayerNorm.Config(D_MODEL), "RMS": RMSNorm.Config(D_MODEL)}
each_mixture = pytest.mark.parametrize("kind", MIXTURES)
each_norm = pytest.mark.parametrize("norm", NORMS)


def tree(kind: str, norm: str = "LN", block: Any = PreNormBlock) -> DecoderConfig:
    """A dense block, and a sparse one."""
    blocks = [
        block.Config(attn=ATTENTION, ln1=NORMS[norm], mlp=mlp, ln2=NORMS[norm]) for mlp in (DENSE, MIXTURES[kind])
    ]
    return DecoderConfig(
        n_ctx=N_CTX,
        embed=Embed.Config(D_VOCAB, D_MODEL),
        blocks=tuple(blocks),
        unembed=Unembed.Config(D_MODEL, D_VOCAB),
        ln_final=NORMS[norm],
    )


def built(
    kind: str, norm: str = "LN", block: Any = PreNormBlock, dtype: torch.dtype = torch.float64
) -> HookedTransformer:
    return random_model(tree(kind, norm, block), dtype=dtype).requires_grad_(False)


@each_norm
@each_mixture
@pytest.mark.parametrize("block", [PreNormBlock, ParallelBlock])
def test_rewrites_keep_the_predictions(kind: str, norm: str, block: Any) -> None:
    model = built(kind, norm, block)
    before = model(random_tokens()).log_softmax(-1)
    process_weights(model)
    assert_close(model(random_tokens()).log_softmax(-1), before)
    assert {"fold_ln", "center_unembed"} <= set(model.cfg.processed)
    mlp = model.blocks[1].mlp
    assert (mlp.b_router is not None) == (norm == "LN" or mlp.cfg.router_bias), (
        "folding a norm leaves its bias in the router"
    )
    if norm == "LN":
        assert "center_writing_weights" in model.cfg.processed
        for weight in output_weights(mlp):
            assert_close(weight.mean(-1), 0.0, scale=weight)
        assert not hasattr(model.blocks[1].ln2, "w")
    assert model.verify(random_tokens()).ok, str(model.verify(random_tokens()))


@each_norm
@each_mixture
def test_a_rewritten_model_is_built_again_from_its_config(kind: str, norm: str) -> None:
    model = built(kind, norm)
    process_weights(model)
    again = HookedTransformer(HookedTransformerConfig.from_dict(model.cfg.to_dict()))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(random_tokens()), model(random_tokens()))
    other = built(kind, norm)
    other.load_and_process_state_dict(built(kind, norm).state_dict())
    assert_close(other(random_tokens()), model(random_tokens()))


@each_mixture
def test_identities(kind: str) -> None:
    report = built(kind, dtype=torch.float32).verify(random_tokens())
    assert report.ok, str(report)
    assert report["mlp: router(router_logits) == expert_weights"].errors == (0.0,)


def test_a_wrong_site_of_an_expert_is_noticed() -> None:
    model = built("gated")

    def shifted(value: Tensor, hook: HookPoint) -> Tensor:
        return value + 1

    busy = model.run_with_cache(random_tokens())[1]["expert_indices", 1][0, 0, 0].item()
    model.blocks[1].mlp.experts[busy].hook_pre.add_hook(shifted)
    failed = model.verify(random_tokens()).failed
    assert failed == ["mlp: experts: ln2.normalized * w + b -> pre"]


def test_flat_names() -> None:
    cfg = built("gated").cfg
    assert (cfg.d_mlp, cfg.act_fn, cfg.gated_mlp, cfg.attn_only) == (10, "silu", True, False)
    for kind in MIXTURES:
        model = built(kind)
        matrices = [p for n, p in model.named_parameters() if n.startswith("blocks.") and ".W_" in n]
        assert model.cfg.n_params == sum(p.numel() for p in matrices)


def test_short_names_and_aliases() -> None:
    _, cache = built("shared").run_with_cache(random_tokens())
    assert cache["router_logits", -1].shape == (2, 6, 4)
    assert cache["expert_weights", 1].shape == cache["expert_indices", 1].shape == (2, 6, 2)
    assert cache["blocks.1.mlp.shared.hook_post"].shape == (2, 6, 10)


def test_positions_and_batch_can_be_left_out_of_a_cache() -> None:
    tokens = random_tokens(1)
    _, cache = built("gated").run_with_cache(tokens, names_filter="*", remove_batch_dim=True, pos_slice=-1)
    assert cache["router_logits", 1].shape == (1, 4)
    positions = [cache[f"blocks.1.mlp.experts.{e}.hook_routed_positions"] for e in range(4)]
    assert sum(map(len, positions)) == 12, "tokens of experts are not positions of the prompt"


def test_what_a_mixture_adds_can_be_decomposed_as_a_whole() -> None:
    model = built("corrected")
    _, cache = model.run_with_cache(random_tokens())
    whole, stream = cache.get_full_resid_decomposition(expand_neurons=False), cache["resid_post", -1]
    assert_close(whole.sum(0), stream)
    assert_close(cache.decompose_resid().sum(0), stream)
    for refused in (lambda: cache.get_neuron_results(1), lambda: cache.get_full_resid_decomposition()):
        with pytest.raises(ValueError, match=r"the neurons of layer 1 belong to experts.*expand_neurons=False"):
            refused()


def test_weights_that_cannot_be_stacked() -> None:
    for name in ("W_in", "W_gate", "W_out", "b_in", "b_out"):
        with pytest.raises(ValueError, match=rf"blocks \[1\] are mixtures.*model.blocks\[1\].mlp.experts\[0\].{name}"):
            getattr(built("gated"), name)


def test_the_sum_of_biases() -> None:
    model = built("corrected")
    attention = model.accumulated_bias(2, include_mlp_biases=False)
    shared = model.blocks[1].mlp.shared.b_out
    assert_close(model.accumulated_bias(2), attention + shared)
    assert torch.equal(built("gated").accumulated_bias(2), built("gated").accumulated_bias(2, include_mlp_biases=False))
    for kind in ("clamped", "plain", "shared"):
        with pytest.raises(ValueError, match="depends on its experts"):
            built(kind).accumulated_bias(2)


@each_mixture
def test_generation_with_a_cache(kind: str) -> None:
    model, tokens = built(kind), random_tokens(2, 3)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False, "verbose": False}
    cached = model.generate(tokens, use_past_kv_cache=True, return_type="tokens", **options)
    assert torch.equal(cached, model.generate(tokens, use_past_kv_cache=False, return_type="tokens", **options))


def test_training_moves_the_experts_that_were_used() -> None:
    model = built("shared").requires_grad_(True)
    model.blocks[1].mlp.experts[0].requires_grad_(False)
    before = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(random_tokens(), return_type="loss").backward()
    optimizer.step()
    indices = before.run_with_cache(random_tokens())[1]["expert_indices", 1]
    for e in range(4):
        moved = not torch.equal(model.blocks[1].mlp.experts[e].W_out, before.blocks[1].mlp.experts[e].W_out)
        assert moved == (e != 0 and e in indices)
    assert not torch.equal(model.blocks[1].mlp.W_router, before.blocks[1].mlp.W_router)
