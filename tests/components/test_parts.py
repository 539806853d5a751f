"""Each part against its formula, written out."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from hooked_lm.components.activations import ACTIVATIONS, XIELU, activation
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.embeddings.embed import Embed, Unembed, soft_capped
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.embeddings.rotary_scaling import Backward, LinearScaling, ProportionalScaling
from hooked_lm.components.mlp import MLP, GatedMLP
from hooked_lm.components.norms.layer_norm import HeadLayerNorm, LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.hooks import HookPoint
from tests.close import assert_apart, assert_close, assert_near


def filled(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    for name, part in module.named_modules():
        if hasattr(part, "name"):
            part.name = name
    return module.requires_grad_(False)


def listened(module: nn.Module, x: torch.Tensor, *points: str) -> torch.Tensor:
    """The output while somebody listens to these points."""
    handles = [module.get_submodule(point).add_hook(lambda value, hook: None) for point in points]
    out = module(x)
    for handle in handles:
        handle.remove()
    return out


@pytest.mark.every_parameter
@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("kind", ["layer", "rms", "gemma"])
def test_norms(kind: str, weight: bool) -> None:
    x = 3 * torch.randn(2, 5, 8) + 1
    if kind == "layer":
        norm = filled(LayerNorm.Config(8, eps=0.1, weight=weight, bias=weight).build())
        centred = x - x.mean(-1, keepdim=True)
        expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()
        expected = expected * norm.w + norm.b if weight else expected
    else:
        norm = filled(RMSNorm.Config(8, eps=0.1, weight=weight, offset=float(kind == "gemma")).build())
        expected = x / (x.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()
        expected = expected * (norm.w + (kind == "gemma")) if weight else expected
    assert_close(norm(x), expected)
    for point in ("hook_scale", "hook_normalized"):
        assert_close(listened(norm, x, point), expected)


def test_each_head_has_a_norm_of_its_own() -> None:
    x = 3 * torch.randn(2, 5, 3, 8) + 1
    norm = filled(HeadLayerNorm.Config(8, eps=0.1, n_heads=3).build(("batch", "pos", "head", "d_head")))
    each = [nn.functional.layer_norm(x[:, :, head], (8,), norm.heads[head], eps=0.1) for head in range(3)]
    assert_close(norm(x), torch.stack(each, 2))
    assert_close(listened(norm, x, "hook_normalized"), torch.stack(each, 2))


def test_mlps() -> None:
    x = torch.randn(2, 5, 8)
    plain = filled(MLP.Config(8, 12, "relu").build())
    assert_close(plain(x), (x @ plain.W_in + plain.b_in).relu() @ plain.W_out + plain.b_out)
    gated = filled(GatedMLP.Config(8, 12, "relu").build())
    assert_close(gated(x), ((x @ gated.W_gate).relu() * (x @ gated.W_in)) @ gated.W_out)


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("dim", [8, 4])
def test_rotary_scores_depend_on_distance_alone(adjacent: bool, dim: int) -> None:
    rotary = Rotary(dim, theta=100.0, adjacent_pairs=adjacent)
    q, k = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 9, 1, 8).unbind(0)
    angles = rotary.angles(torch.arange(9)[None], 9)
    turned = torch.einsum("bqnd,bknd->qk", rotary.rotate(q, angles), rotary.rotate(k, angles))
    for shift in range(-8, 9):
        diagonal = turned.diagonal(shift)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal), scale=turned)
    assert_close(rotary.rotate(q, angles).norm(dim=-1), q.norm(dim=-1))
    assert torch.equal(rotary.rotate(q, angles)[..., dim:], q[..., dim:])
    first, second = (0, 1) if adjacent else (0, dim // 2)
    unit = torch.zeros(1, 9, 1, 8)
    unit[..., first] = 1
    pair = rotary.rotate(unit, angles)[0, 3, 0]
    assert_close(pair[first].item(), math.cos(3))
    assert_close(pair[second].item(), math.sin(3))


@pytest.mark.parametrize("scaling", [None, LinearScaling(3.0)])
def test_backward_rotary_undoes_rotary(scaling: LinearScaling | None) -> None:
    x, positions = torch.randn(2, 9, 3, 8), torch.arange(9)[None]
    there, back = Rotary(8, 100.0, scaling=scaling), Rotary(8, 100.0, scaling=Backward(scaling))
    turned = there.rotate(x, there.angles(positions, 9))
    assert_apart(turned, x)
    assert_close(back.rotate(turned, back.angles(positions, 9)), x)


def test_features_are_rotated_in_pairs() -> None:
    with pytest.raises(ValueError, match=r"rotary_dim must be even, .*; got 3"):
        Rotary(3).base_frequencies()


def test_only_a_share_of_the_pairs_is_rotated() -> None:
    some, every = ProportionalScaling(0.4, factor=2.0), LinearScaling(2.0)
    cos, sin = Rotary(16, 100.0, adjacent_pairs=True, scaling=some).angles(torch.arange(6)[None], 6)
    expected, _ = Rotary(16, 100.0, adjacent_pairs=True, scaling=every).angles(torch.arange(6)[None], 6)
    assert_close(cos[..., :3], expected[..., :3])
    assert (cos[..., 3:] == 1).all()
    assert (sin[..., 3:] == 0).all()


def test_embeddings() -> None:
    embed = filled(Embed.Config(11, 6, scale=2.0).build())
    assert torch.equal(embed(torch.tensor([[3, 4]])), 2 * embed.W_E[[3, 4]][None])
    unembed = filled(Unembed.Config(6, 11, bias=True, soft_cap=2.0, scale=3.0).build(embed))
    x = torch.randn(1, 2, 6)
    expected = 3 * (x @ unembed.W_U + unembed.b_U)
    assert_close(unembed(x), expected)  # the cap is the model's to apply
    assert_close(soft_capped(unembed(x), 2.0), 2 * (expected / 2).tanh())
    assert torch.equal(soft_capped(x, None), x)


@pytest.mark.parametrize("n_kv", [4, 2, 1])
def test_attention_head_by_head(n_kv: int) -> None:
    attn = filled(Attention.Config(16, 4, 6, n_key_value_heads=n_kv, qkv_bias=True, out_bias=True).build())
    x = torch.randn(2, 5, 16)
    expected = attn.b_O.expand(2, 5, 16).clone()
    future = torch.ones(5, 5).triu(1).bool()
    for head in range(4):
        shared = head * n_kv // 4
        q = x @ attn.W_Q[head] + attn.b_Q[head]
        k, v = x @ attn.W_K[shared] + attn.b_K[shared], x @ attn.W_V[shared] + attn.b_V[shared]
        scores = (q @ k.transpose(1, 2) / 6**0.5).masked_fill(future, float("-inf"))
        expected += scores.softmax(-1) @ v @ attn.W_O[head]
    assert_close(attn(x), expected)
    assert_close(listened(attn, x, "hook_pattern"), expected)
    assert_close(listened(attn, x, "hook_result"), expected)
    per_head = x[:, :, None].repeat(1, 1, 4, 1)
    assert_close(attn(per_head, x[:, :, None].repeat(1, 1, n_kv, 1), x), expected)


def test_weights_lie_as_the_matrices_of_one_product() -> None:
    attn = Attention.Config(16, 4, 6).build()
    assert attn.W_Q.shape == (4, 16, 6)
    assert attn.W_Q.transpose(1, 2).flatten(0, 1).data_ptr() == attn.W_Q.data_ptr()
    assert attn.W_O.flatten(0, 1).data_ptr() == attn.W_O.data_ptr()


def test_activations() -> None:
    x = torch.linspace(-3, 3, 31)
    by_hand = {
        "relu2": x.clamp(min=0) ** 2,
        "solu": x * x.softmax(-1),
        "gelu_new": x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()),
        "silu": x * x.sigmoid(),
        "quick_gelu": x * (1.702 * x).sigmoid(),
    }
    for name, expected in by_hand.items():
        assert_close(ACTIVATIONS[name](x), expected)
    with pytest.raises(ValueError, match=r"'tanhh'.*gelu_new"):
        activation("tanhh")


def test_xielu() -> None:
    act = activation(XIELU.Config(beta=0.5))
    assert set(act.state_dict()) == {"alpha_p", "alpha_n", "beta", "eps"}, "as checkpoints have them"
    act.alpha_p.data.fill_(0.3)
    act.alpha_n.data.fill_(-0.7)
    x = torch.linspace(-3, 3, 31)
    up, down = math.log1p(math.exp(0.3)), 0.5 + math.log1p(math.exp(-0.7))
    expected = torch.where(x > 0, up * x**2, down * (x.exp() - 1 - x)) + 0.5 * x
    assert_close(act(x), expected)
    small = torch.tensor([-1e-3, 1e-3], requires_grad=True)
    act(small).sum().backward()
    assert_near(small.grad, 0.5, 0.01, because="the slope is beta at zero itself")


@pytest.mark.parametrize("kind", [MLP, GatedMLP])
def test_a_tool_may_hook_the_input_of_an_mlp(kind: Any) -> None:
    """As SAELens does: a point of its own, and a `forward` on the instance that goes through it first."""
    mlp = kind.Config(4, 8).build()
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.normal_()
    x = torch.randn(1, 2, 4)
    expected = mlp(2 * x)
    mlp.hook_in.add_hook(lambda value, hook: 2 * value)
    assert torch.equal(mlp(x), expected)
    mlp.hook_in, inner = HookPoint(), mlp.forward
    mlp.forward = lambda x: inner(mlp.hook_in(x))
    assert torch.equal(mlp(2 * x), expected)
    mlp.hook_in.add_hook(lambda value, hook: 2 * value)
    assert torch.equal(mlp(x), expected), "twice"


@torch.no_grad()
def test_a_gate_that_a_hook_keeps_is_not_overwritten_by_the_product() -> None:
    mlp = GatedMLP.Config(4, 8, act_fn="linear").build()
    for weight in mlp.parameters():
        weight.normal_()
    x, kept = torch.randn(1, 2, 4), []
    mlp.hook_pre.add_hook(lambda value, hook: kept.append(value))
    mlp(x)
    assert_close(kept[0], x @ mlp.W_gate)
