"""Identities of attention within blocks and to global tokens, which have a stream of their own."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from hooked_lm.components.attention.multihead import Attention, project
from hooked_lm.components.attention.steps import softmax
from hooked_lm.components.blocks.wiring import Sum, Wiring
from hooked_lm.components.norms.norm import norm_unhooked
from hooked_lm.components.verification.blocks import wired_identities
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Pair,
    Sites,
    add_bias,
    common_input_weights,
    identities,
    norm_identity,
    norm_output,
    weights_after_norms,
    within,
)
from hooked_lm.families.encoder_decoders.pegasus_x.block_local import BlockLocalAttention
from hooked_lm.families.encoder_decoders.pegasus_x.global_stream import GlobalStreamBlock

OF_ONE_SOFTMAX = ("softmax(attn_scores) == pattern", "pattern @ v == z")


@identities.register
def _(
    attn: BlockLocalAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention, and those of the two groups of keys that each query has."""
    for name, pair in identities.dispatch(Attention)(attn, at, get_input, value_input):
        if name not in OF_ONE_SOFTMAX:
            yield name, pair
    for query, key, kind in (("q", "k_global", "_to_global"), ("q_global", "k_global", "_among_global")):
        yield f"{query} {key}^T * scale == attn_scores{kind}", _scores(attn, at, query, key, kind)
    yield "q_global k^T * scale == attn_scores_from_global", _scores(attn, at, "q_global", "k", "_from_global")
    for kinds, z in ((("_to_global", ""), "z"), (("_among_global", "_from_global"), "z_global")):
        first, second = (f"pattern{kind}" for kind in kinds)
        yield f"softmax over global tokens and tokens == {first}, {second}", _patterns(at, kinds)
        yield f"{first} @ v_global + {second} @ v == {z}", _mixed(at, kinds, z)


def _scores(attn: BlockLocalAttention, at: Sites, query: str, key: str, kind: str) -> Pair:
    def scores() -> tuple[Tensor, Tensor]:
        found = at(f"hook_attn_scores{kind}")
        made = torch.einsum("bqnh,bknh->bnqk", at(f"hook_{query}"), at(f"hook_{key}")) * attn.scale
        return made[found.isfinite()], found[found.isfinite()]

    return scores


def _patterns(at: Sites, kinds: tuple[str, str]) -> Pair:
    def joined(name: str) -> Tensor:
        return torch.cat([at(f"hook_{name}{kind}") for kind in kinds], -1)

    return lambda: (softmax(joined("attn_scores"), None), joined("pattern"))


def _mixed(at: Sites, kinds: tuple[str, str], z: str) -> Pair:
    def mixed() -> tuple[Tensor, Tensor]:
        groups = zip(kinds, ("hook_v_global", "hook_v"), strict=True)
        parts = [torch.einsum("bnqk,bknh->bqnh", at(f"hook_pattern{kind}"), at(v)) for kind, v in groups]
        return parts[0] + parts[1], at(f"hook_{z}")

    return mixed


@identities.register
def _(block: GlobalStreamBlock, at: Sites, shift: LazyTensor | None = None) -> Iterator[Identity]:
    """Those of a pre-norm block, and the same of the stream of global tokens."""
    yield from wired_identities(block, at, block.wiring(), shift)
    before, mid, after = (f"hook_global_resid_{place}" for place in ("pre", "mid", "post"))
    sums = Sum(mid, before, ("hook_global_attn_out",)), Sum(after, mid, ("hook_global_mlp_out",))
    yield from wired_identities(block, at, Wiring(sums))

    def resid() -> Tensor:
        return at(before)

    yield from norm_identity(block, "ln1_global", at, resid)
    attn = block.attn
    for name, W, b in (("q", attn.W_Q, attn.b_Q), ("k", attn.W_K, attn.b_K), ("v", attn.W_V, attn.b_V)):

        def projected(name: str = name, W: Tensor = W, b: Tensor | None = b) -> tuple[Tensor, Tensor]:
            return project(norm_output(block, "ln1_global", at, resid), W, b), at(f"attn.hook_{name}_global")

        yield f"ln1_global.normalized * w + b -> {name}_global", projected

    def attn_out() -> tuple[Tensor, Tensor]:
        z = within(at, "attn")("hook_z_global")
        return block.scaled(add_bias(torch.einsum("bpnh,nhm->bpm", z, attn.W_O), attn.b_O)), at("hook_global_attn_out")

    def neurons() -> tuple[Tensor, Tensor]:
        x = norm_unhooked(block.ln2, at("hook_global_resid_mid"))
        return F.linear(x, block.mlp.W_in.T, block.mlp.b_in), at("hook_global_mlp_pre")

    def mlp_out() -> tuple[Tensor, Tensor]:
        post = at("hook_global_mlp_post")
        return block.scaled(F.linear(post, block.mlp.W_out.T, block.mlp.b_out)), at("hook_global_mlp_out")

    yield "z_global @ W_O == global_attn_out", attn_out
    yield "ln2(global_resid_mid) -> global_mlp_pre", neurons
    yield (
        "act(global_mlp_pre) == global_mlp_post",
        lambda: (
            block.mlp.act_fn(at("hook_global_mlp_pre")),
            at("hook_global_mlp_post"),
        ),
    )
    yield "global_mlp_post -> global_mlp_out", mlp_out


@weights_after_norms.register
def _(block: GlobalStreamBlock) -> list[tuple[str, list[InputWeight]]]:
    """Each norm with the weights after it; those of attention follow two norms, and neither can be folded into them."""
    return [("ln1", []), ("ln1_global", []), ("ln2", common_input_weights(block.mlp))]
