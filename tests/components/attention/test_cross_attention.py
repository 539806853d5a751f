"""Relative biases, cross attention and the blocks around it, each against its formula written out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.t5.modeling_t5 import T5Attention

from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import SharedBias
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.blocks.cross import PostNormCrossBlock, PreNormCrossBlock
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.stack_context import EncodedSource, StackContext
from hooked_lm.components.verification import identities, weights_after_norms
from hooked_lm.hooks.recorder import Recorder
from tests.close import assert_close

D, HEADS, D_HEAD = 12, 3, 4
CPU = torch.device("cpu")


def filled(module: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(3)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    for name, part in module.named_modules():
        if hasattr(part, "name"):
            part.name = name
    return module.requires_grad_(False)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def listening(module: Any, *points: str) -> dict[str, Tensor]:
    """What passes these points from now on."""
    seen: dict[str, Tensor] = {}
    for point in points:
        module.get_submodule(point).add_hook(lambda value, hook, point=point: seen.update({point: value}))
    return seen


# ---- relative bias ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 12), (6, 20), (4, 3)])
def test_buckets_are_those_of_transformers(n_buckets: int, max_distance: int, bidirectional: bool):
    bias = RelativeBias.Config(HEADS, n_buckets, max_distance, bidirectional).build()
    distance = torch.arange(-300, 301)[None]
    expected = T5Attention._relative_position_bucket(distance, bidirectional, n_buckets, max_distance)
    assert torch.equal(bias.buckets(distance), expected)


def test_buckets_of_a_small_table():
    """Eight buckets both ways: 0 and 1 apart have their own, 2 and 3 up to the log of 12, and the same ahead."""
    bias = RelativeBias.Config(HEADS, 8, 12, bidirectional=True).build()
    far = torch.tensor([[0, -1, -2, -3, -4, -5, -12, -50, 1, 2, 5, 50]])
    assert bias.buckets(far).tolist() == [[0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 7]]
    behind = RelativeBias.Config(HEADS, 8, 12, bidirectional=False).build()
    assert behind.buckets(far).tolist() == [[0, 1, 2, 3, 4, 4, 7, 7, 0, 0, 0, 0]]


def test_a_bias_continues_after_cached_tokens():
    bias = filled(RelativeBias.Config(HEADS, 8, 12, bidirectional=False).build())
    whole = bias.bias(StackContext(1, 7, CPU), torch.float32)
    cache = KeyValueCache(1)
    cache[0].append(drawn(1, 5, HEADS, D_HEAD), drawn(1, 5, HEADS, D_HEAD))
    assert torch.equal(bias.bias(StackContext(1, 2, CPU, cache=cache), torch.float32), whole[:, :, 5:])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_adds_its_bias_on_both_paths(shared: bool, causal: bool):
    table = filled(RelativeBias.Config(HEADS, 8, 12, bidirectional=not causal).build())
    position_bias = SharedBias() if shared else table.cfg
    attn = filled(Attention.Config(D, HEADS, D_HEAD, position_bias=position_bias, causal=causal).build())
    x, context = drawn(2, 9, D), StackContext(2, 9, CPU)
    own = table if shared else attn.position_bias
    distance = torch.arange(9)[None] - torch.arange(9)[:, None]
    added = own.W_rel[own.buckets(distance)].permute(2, 0, 1)
    context.score_bias = added[None] if shared else None

    q, k, v = (torch.einsum("bpm,nmh->bnph", x, W) for W in (attn.W_Q, attn.W_K, attn.W_V))
    scores = q @ k.mT * D_HEAD**-0.5 + added
    if causal:
        scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = torch.einsum("bnph,nhm->bpm", scores.softmax(-1) @ v, attn.W_O)
    assert_close(attn(x, context=context), expected)
    seen = listening(attn, "hook_attn_scores", *([] if shared else ["position_bias.hook_bias"]))
    assert_close(attn(x, context=context), expected)
    assert_close(seen["hook_attn_scores"], scores)
    if not shared:
        assert torch.equal(seen["position_bias.hook_bias"], added.expand(2, -1, -1, -1))


# ---- cross attention -------------------------------------------------------------------------------------------------


def cross_by_hand(attn: Any, x: Tensor, source: EncodedSource) -> Tensor:
    def projected(name: str, of: Tensor) -> Tensor:
        b = getattr(attn, f"b_{name}")
        made = torch.einsum("bpm,nmh->bnph", of, getattr(attn, f"W_{name}"))
        return made if b is None else made + b[:, None]

    scores = projected("Q", x) @ projected("K", source.resid).mT * attn.scale
    if source.real is not None:
        scores = scores.masked_fill(~source.real[:, None, None], float("-inf"))
    out = torch.einsum("bnph,nhm->bpm", scores.softmax(-1) @ projected("V", source.resid), attn.W_O)
    return out if attn.b_O is None else out + attn.b_O


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("n_pos", [1, 4])
@pytest.mark.parametrize("biases", [True, False])
def test_cross_attention(biases: bool, n_pos: int, padded: bool):
    attn = filled(CrossAttention.Config(D, HEADS, D_HEAD, scale=0.7, qkv_bias=biases, out_bias=biases).build())
    real = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]]).bool() if padded else None
    x, source = drawn(2, n_pos, D), EncodedSource(drawn(2, 6, D), real)
    expected = cross_by_hand(attn, x, source)
    assert_close(attn(x, StackContext(2, n_pos, CPU, source=source)), expected)
    seen = listening(attn, "hook_attn_scores", "hook_pattern", "hook_k", "hook_result")
    assert_close(attn(x, StackContext(2, n_pos, CPU, source=source)), expected)
    assert seen["hook_pattern"].shape == (2, HEADS, n_pos, 6)
    assert seen["hook_k"].shape == (2, 6, HEADS, D_HEAD)
    if real is not None:
        assert (seen["hook_pattern"].transpose(1, 3)[~real] == 0).all()


def test_a_caching_source_computes_keys_and_values_once():
    attn = filled(CrossAttention.Config(D, HEADS, D_HEAD).build())
    source, context = EncodedSource(drawn(2, 6, D), cache_kv=True), StackContext(2, 1, CPU)
    context.source = source
    first = attn(drawn(2, 1, D), context, 5)
    attn.W_K.zero_()
    assert torch.equal(attn(drawn(2, 1, D), context, 5), first)
    assert not torch.equal(attn(drawn(2, 1, D), context, 6), first), "another layer"


# ---- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [PreNormCrossBlock, PostNormCrossBlock])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_blocks(kind: Any, scale: float):
    norm = LayerNorm.Config(D)
    block = filled(
        kind.Config(
            attn=Attention.Config(D, HEADS, D_HEAD, qkv_bias=True, out_bias=True),
            cross_attn=CrossAttention.Config(D, HEADS, D_HEAD, qkv_bias=True, out_bias=True),
            mlp=MLP.Config(D, 20),
            ln1=norm,
            ln2=norm,
            ln3=norm,
            residual_scale=scale,
        ).build(layer=0)
    )
    x, source = drawn(2, 5, D), EncodedSource(drawn(2, 7, D))
    attn = block.attn.forward
    if kind is PreNormCrossBlock:
        expected = x + scale * attn(block.ln1(x))
        expected = expected + scale * cross_by_hand(block.cross_attn, block.ln2(expected), source)
        expected = expected + scale * block.mlp(block.ln3(expected))
    else:
        expected = block.ln1(x + scale * attn(x))
        expected = block.ln2(expected + scale * cross_by_hand(block.cross_attn, expected, source))
        expected = block.ln3(expected + scale * block.mlp(expected))
    assert_close(block(x, StackContext(2, 5, CPU, source=source)), expected)

    names = [name for name, part in block.named_modules() if hasattr(part, "dims") and "hook_" in name]
    seen: dict[str, Tensor] = {}
    for name in names:  # a hook that does more than record would have the copies of the stream pass ln1's sites
        block.get_submodule(name).add_hook(Recorder(seen))
    assert_close(block(x, StackContext(2, 5, CPU, source=source)), expected)
    assert list(seen) == names, "sites are listed in the order of computation"
    for name, pair in identities(block, seen.__getitem__, lambda: source.resid):
        assert_close(*pair(), msg=name)


def test_the_weights_after_each_norm():
    norm, sizes = LayerNorm.Config(D), (D, HEADS, D_HEAD)
    parts = {"attn": Attention.Config(*sizes), "cross_attn": CrossAttention.Config(*sizes), "mlp": MLP.Config(D, 20)}
    norms = {"ln1": norm, "ln2": norm, "ln3": norm}
    pre = PreNormCrossBlock.Config(**parts, **norms).build(0)
    found = {name: [weight for _, weight, _ in readers] for name, readers in weights_after_norms(pre)}
    assert found == {"ln1": ["W_Q", "W_K", "W_V"], "ln2": ["W_Q"], "ln3": ["W_in"]}
    assert weights_after_norms(PostNormCrossBlock.Config(**parts, **norms).build(0)) == []
