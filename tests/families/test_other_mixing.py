"""Decoders that mix tokens in ways of their own: what the table's comparison would notice."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from hooked_lm import pretrained
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.families import family
from hooked_lm.families.decoders.rwkv.channel_mix import ChannelMix
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.models.config.tree import DecoderConfig
from tests.close import GRADIENT, assert_apart, assert_close
from tests.families import other_mixing
from tests.families._case import reference
from tests.families._models import (
    assert_past_matters,
    backpropagate,
    distance,
    every_block,
    exported_gradients,
    gradients_of,
    hooked,
    logits_of,
    prompt,
    with_tree,
)
from tests.families.test_state_space import every_attention, every_mixer, every_norm, reverse, swap

CASES = {str(case): case for case in other_mixing.CASES}


def every_channel_mix(**changes: Any) -> Callable[[DecoderConfig], DecoderConfig]:
    def altered(block: Any) -> Any:
        is_channel = isinstance(block.mixer, ChannelMix.Config)
        return replace(block, mixer=replace(block.mixer, **changes)) if is_channel else block

    return lambda tree: replace(tree, blocks=tuple(altered(block) for block in tree.blocks))


def every_mlp(change: Callable[[Any], dict[str, Any]]) -> Callable[[DecoderConfig], DecoderConfig]:
    return every_block(lambda block: {"mlp": replace(block.mlp, **change(block.mlp))})


WRONG_TREES = {
    "one lambda for all layers": (
        "diffllama-grouped",
        every_attention(lambda a: {"z_norm": replace(a.z_norm, lam_init=0.2)}),
    ),
    "eps of the norm of differences": (
        "diffllama-grouped",
        every_attention(lambda a: {"z_norm": replace(a.z_norm, eps=1e-6)}),
    ),
    "eps of the last norm": ("rwkv-two-layers", lambda tree: replace(tree, ln_final=replace(tree.ln_final, eps=0.02))),
    "no norm of the embedding": (
        "rwkv-two-layers",
        lambda tree: replace(tree, embed=replace(tree.embed, norm=replace(tree.embed.norm, eps=1e-6))),
    ),
    "activation of channel mixing": ("rwkv-two-layers", every_channel_mix(act_fn="relu")),
    "fewer keys": ("doge-grouped", every_attention(lambda _: {"keep": 4})),
    "window of keys": ("doge-biased-tied-window-of-keys", every_attention(lambda _: {"window": None})),
    "cap of the gates": ("xlstm-narrow-keys-tight-caps-large-eps", every_mixer(lambda _: {"gate_cap": 15.0})),
    "eps of the divisor": ("xlstm-narrow-keys-tight-caps-large-eps", every_mixer(lambda _: {"denominator_eps": 1e-6})),
    "eps of the norm of heads": ("xlstm-four-heads", every_mixer(lambda _: {"eps": 1e-6})),
    "eps of the norms of blocks": ("jetmoe-two-of-four", every_norm(eps=0.02)),
    "eps of the router's norm": ("zaya-biased-untied-local-wide-convolutions", every_mlp(lambda _: {"eps": 1e-6})),
    "window of local attention": (
        "zaya-biased-untied-local-wide-convolutions",
        every_attention(lambda _: {"window": None}),
    ),
    "one expert less in attention": ("jetmoe-two-of-four", every_attention(lambda _: {"top_k": 1})),
    "softmax of all experts in attention": (
        "jetmoe-two-of-four",
        every_attention(lambda _: {"router": SoftmaxRouter()}),
    ),
}


@pytest.mark.parametrize("wrong", WRONG_TREES)
@torch.no_grad()
def test_a_wrong_tree_is_noticed(wrong: str) -> None:
    name, alter = WRONG_TREES[wrong]
    right, tokens = hooked(CASES[name]), prompt(CASES[name])
    model = with_tree(right, alter(right.cfg.tree))
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


@pytest.mark.parametrize(
    ("name", "part", "damage"),
    [
        ("diffllama-grouped", "attn.z_norm", swap("lambda_q1", "lambda_q2")),
        ("diffllama-grouped", "attn", lambda attn: attn.W_O_pair.copy_(attn.W_O_pair.flip(0))),
        ("diffllama-grouped", "attn", lambda attn: attn.W_V.copy_(attn.W_V.flip(0))),
        ("jetmoe-two-of-four", "attn", lambda attn: attn.W_O.copy_(attn.W_O.flip(0))),
        ("jetmoe-two-of-four", "attn", lambda attn: attn.W_router.copy_(attn.W_router.flip(1))),
        ("jetmoe-two-of-four", "mlp", lambda mlp: mlp.b_out.zero_()),
        ("zaya-three-experts", "", swap("b_attn", "b_mlp")),
        ("zaya-three-experts", "ln1_post", reverse("b")),
        ("zaya-three-experts", "attn", swap("W_V_current", "W_V_delayed")),
        ("zaya-three-experts", "attn.conv_q.channels", reverse("W_conv")),
        ("zaya-three-experts", "attn.conv_k", lambda conv: conv.W_head.copy_(conv.W_head.flip(1))),
        ("zaya-three-experts", "attn.k_norm", reverse("w")),
        ("zaya-three-experts", "mlp", reverse("w_prev")),
        ("zaya-three-experts", "mlp", swap("W_1", "W_2")),
        ("zaya-gelu-narrow-convolutions-half-heads", "mlp", reverse("b_choice")),
        ("doge-grouped", "", swap("w_attn", "w_mlp")),
        ("doge-grouped", "attn", reverse("A")),
        ("doge-grouped", "attn", reverse("W_dt")),
        ("rwkv-two-layers", "mixer", swap("mix_in", "mix_gate")),
        ("rwkv-three-layers-tied-default-width", "mixer", reverse("mix_in")),
    ],
)
@torch.no_grad()
def test_wrong_weights_are_noticed(name: str, part: str, damage: Callable[[Any], None]) -> None:
    model, tokens = copy.deepcopy(hooked(CASES[name])), prompt(CASES[name])
    damage(model.blocks[1].get_submodule(part))
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("rwkv-two-layers", swap("W_K", "W_V")),
        ("rwkv-two-layers", swap("mix_K", "mix_R")),
        ("rwkv-two-layers", reverse("decay")),
        ("rwkv-two-layers", reverse("bonus")),
        ("xlstm-four-heads", swap("W_Q", "W_K")),
        ("xlstm-four-heads", swap("W_V", "W_gate")),
        ("xlstm-four-heads", swap("W_i", "W_f")),
        ("xlstm-four-heads", reverse("b_i")),
    ],
)
@torch.no_grad()
def test_wrong_weights_of_mixers_are_noticed(name: str, damage: Callable[[Any], None]) -> None:
    model, tokens = copy.deepcopy(hooked(CASES[name])), prompt(CASES[name])
    damage(model.blocks[0].mixer)
    assert distance(model(tokens), logits_of(CASES[name], tokens)) > 1e-3


@torch.no_grad()
def test_chunks_of_xlstm() -> None:
    """Prompts longer than a chunk, which transformers computes by another kernel. In bf16 it fails there: the products in
    mlstm_chunkwise_parallel_fw_H of modeling_xlstm.py would be of two dtypes."""
    case = CASES["xlstm-four-heads"]
    theirs = reference(replace(case, name="chunks", fields=case.fields | {"chunk_size": 16}))
    model = pretrained.from_pretrained_no_processing("tiny", hf_model=theirs)
    tokens = prompt(case, length=150)
    assert_close(model(tokens), copy.deepcopy(theirs)(tokens).logits)
    with pytest.raises(RuntimeError, match="dtype"):
        copy.deepcopy(theirs).to(torch.bfloat16)(tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bias": True}, "use_bias=True is not supported for xlstm: its RMS norms would have biases"),
        ({"weight_mode": "fused"}, "weight_mode='fused' is not supported for xlstm; 'single' is"),
        ({"add_out_norm": False}, "add_out_norm=False"),
        ({"num_hidden_layers": 2, "num_blocks": 3}, "num_hidden_layers=2 and num_blocks=3 differ"),
    ],
)
def test_configs_of_xlstm_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_config(family("xlstm"), CONFIG_MAPPING["xlstm"](**fields))


@pytest.mark.parametrize("name", ["rwkv-two-layers", "xlstm-four-heads"])
@torch.no_grad()
def test_states_carry_something(name: str) -> None:
    assert_past_matters(CASES[name])


@pytest.mark.parametrize("name", ["rwkv-two-layers", "xlstm-four-heads"])
@torch.no_grad()
def test_padding_on_the_left_is_skipped(name: str) -> None:
    """A padded row has the logits of the row alone. transformers does not use the mask of these models: padding changes them."""
    case = CASES[name]
    row, pads = prompt(case, batch=1, length=9), torch.full((1, 4), 7)
    padded = torch.cat([pads, row], 1)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(row)], 1)
    alone = logits_of(case, row)
    assert_close(hooked(case)(padded, attention_mask=mask)[:, 4:], alone)
    theirs = copy.deepcopy(reference(case))(padded, attention_mask=mask).logits[:, 4:]
    assert_apart(theirs, alone)


@torch.no_grad()
def test_rwkv_that_rescales_has_the_same_logits() -> None:
    """transformers halves the stream every few layers in evaluation, and the weights with it: only the eps of norms notices."""
    case = CASES["rwkv-three-layers-tied-default-width"]
    fields = case.fields | {"layer_norm_epsilon": 1e-12, "rescale_every": 1}
    theirs = reference(replace(case, name="rescaled", fields=fields))
    model, tokens = pretrained.from_pretrained_no_processing("tiny", hf_model=theirs), prompt(case)
    ran = copy.deepcopy(theirs)
    assert_close(model(tokens), ran(tokens).logits, dtype=torch.float32, scale=100.0)
    assert not torch.equal(ran.rwkv.blocks[2].attention.output.weight, theirs.rwkv.blocks[2].attention.output.weight)
    with pytest.raises(ValueError, match=r"divided the weights of hf_model in a run \(rescale_every\)"):
        pretrained.from_pretrained_no_processing("tiny", hf_model=ran)
    ran.train()
    ran(tokens)
    again = pretrained.from_pretrained_no_processing("tiny", hf_model=ran)
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("name", ["doge-grouped", "doge-biased-tied-window-of-keys"])
def test_a_few_keys_by_their_values(name: str) -> None:
    """The same logits and gradients as transformers with more keys than are kept, with a cache too.

    Tokens are distinct: equal ones have equal biases in the first layer, and DogeAttention.prepare_dynamic_mask in transformers'
    modeling_doge.py keeps some of them by chance (of topk); here they are the last ones, up to rounding.
    """
    case = replace(CASES[name], name="few-keys", fields=CASES[name].fields | {"keep_window_size": 5})
    tokens = torch.randperm(61, generator=torch.Generator().manual_seed(3))[:48].view(2, 24)
    model, theirs = copy.deepcopy(hooked(case)), copy.deepcopy(reference(case))
    expected = theirs(tokens).logits
    assert_close(model(tokens), expected)
    backpropagate(model(tokens)), backpropagate(expected)
    found = {name: weight.clone() for name, weight in exported_gradients(model).items()}
    for weight, gradient in gradients_of(theirs).items():
        assert_close(found[weight], gradient, depth=GRADIENT, msg=weight)

    model, cache = hooked(case), KeyValueCache(2)
    with torch.no_grad():
        whole = model(tokens)
        steps = [model(piece, past_kv_cache=cache) for piece in tokens.split([9, 1, 1, 13], 1)]
        assert_close(torch.cat(steps, 1), whole)
        assert model.verify(tokens).ok, str(model.verify(tokens))
        every = hooked(replace(case, name="all-keys", fields=case.fields | {"keep_window_size": 24}))(tokens)
    assert_close(whole[:, :5], every[:, :5])
    assert_apart(whole, every)


def test_doge_with_experts_is_refused() -> None:
    with pytest.raises(
        ValueError, match="is_moe=True is not supported for doge: its experts in transformers are not causal"
    ):
        read_config(family("doge"), CONFIG_MAPPING["doge"](is_moe=True))


@torch.no_grad()
def test_a_router_reads_that_of_the_layer_before() -> None:
    """A run that starts later is refused; an edit of the state reaches the routers of all later layers."""
    case = CASES["zaya-three-experts"]
    model, tokens = hooked(case), prompt(case)
    _, cache = model.run_with_cache(tokens)
    with pytest.raises(ValueError, match="the router of layer 1 reads the state of that of layer 0, which did not run"):
        model(cache["resid_pre", 1], start_at_layer=1)
    sites = ["blocks.1.mlp.hook_prev_state", "blocks.2.mlp.hook_prev_state"]
    with model.hooks([("blocks.0.mlp.hook_router_state", lambda state, hook: -state)]):
        _, edited = model.run_with_cache(tokens, names_filter=sites)
    assert_close(edited[sites[0]], -cache[sites[0]])
    assert_apart(edited[sites[1]], cache[sites[1]])


@torch.no_grad()
def test_tokens_that_skip_the_experts() -> None:
    """In transformers ZayaRouter.forward (modeling_zaya.py) sends them to expert 0 with weight 0."""
    case = CASES["zaya-gelu-narrow-convolutions-half-heads"]
    sites = ["blocks.1.mlp.hook_expert_indices", "blocks.1.mlp.hook_out"]
    _, cache = hooked(case).run_with_cache(prompt(case), names_filter=sites)
    skipped = cache[sites[0]][..., 0] == 4
    assert 0 < skipped.sum() < skipped.numel()
    assert (cache[sites[1]].abs().amax(-1) == 0).equal(skipped)


@torch.no_grad()
def test_padding_of_zaya_with_biases() -> None:
    """A padded row has the logits of the row alone. In transformers the projections of padding are biases, and ZayaCCAProjection
    (modeling_zaya.py) convolves them, while nothing precedes a row without padding."""
    case = CASES["zaya-biased-untied-local-wide-convolutions"]
    row, pads = prompt(case, batch=1, length=9), torch.full((1, 4), 7)
    padded, mask = torch.cat([pads, row], 1), torch.tensor([[0] * 4 + [1] * 9])
    alone = logits_of(case, row)
    assert_close(hooked(case)(padded, attention_mask=mask)[:, 4:], alone)
    assert_apart(copy.deepcopy(reference(case))(padded, attention_mask=mask).logits[:, 4:], alone)
