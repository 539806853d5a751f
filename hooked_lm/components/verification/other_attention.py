"""Latent and disentangled attention."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.attention.disentangled import DisentangledAttention
from hooked_lm.components.attention.latent import LatentAttention
from hooked_lm.components.attention.multihead import project
from hooked_lm.components.verification.attention import mixing_identities, products
from hooked_lm.components.verification.registry import (
    Identity,
    InputWeight,
    LazyTensor,
    Pair,
    Sites,
    add_bias,
    identities,
    input_weights,
    norm_identity,
    norm_output,
)


@identities.register
def _(
    attn: LatentAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""

    def latent() -> Tensor:
        return norm_output(attn, "kv_norm", at, lambda: at("hook_kv_latent"))

    def keys() -> tuple[Tensor, Tensor]:
        return attn.keys(get_input(), latent()), at("hook_k")

    yield from norm_identity(attn, "kv_norm", at, lambda: at("hook_kv_latent"))
    yield (
        "ln1.normalized * w + b -> kv_latent",
        lambda: (
            add_bias(get_input() @ attn.W_DKV, attn.b_DKV),
            at("hook_kv_latent"),
        ),
    )
    yield "latent, x W_KR -> k", keys
    yield "latent -> v", lambda: (project(latent(), attn.W_UV, None), at("hook_v"))
    if attn.cfg.d_q_latent is None:
        yield "ln1.normalized * w + b -> q", lambda: (project(get_input(), attn.W_Q, None), at("hook_q"))
    else:

        def queries() -> tuple[Tensor, Tensor]:
            shown = norm_output(attn, "q_norm", at, lambda: at("hook_q_latent"))
            return project(shown, attn.W_UQ, None), at("hook_q")

        yield from norm_identity(attn, "q_norm", at, lambda: at("hook_q_latent"))
        yield (
            "ln1.normalized * w + b -> q_latent",
            lambda: (
                add_bias(get_input() @ attn.W_DQ, attn.b_DQ),
                at("hook_q_latent"),
            ),
        )
        yield "latent -> q", queries
    for name in "qk":
        yield f"features of {name} without rotary == those of rot_{name}", _without_rotary(attn, name, at)
    yield from mixing_identities(attn, at, lambda: at("hook_rot_q"), lambda: at("hook_rot_k"))


def _without_rotary(attn: LatentAttention, name: str, at: Sites) -> Pair:
    d = attn.cfg.d_nope
    return lambda: (at(f"hook_{name}")[..., :d], at(f"hook_rot_{name}")[..., :d])


@input_weights.register
def _(attn: LatentAttention) -> list[InputWeight]:
    """The weights that the input is multiplied by."""
    names = ["DKV", "KR"] + ([] if attn.cfg.d_q_latent is None else ["DQ"])
    down: list[InputWeight] = [(attn, f"W_{x}", f"b_{x}") for x in names]
    return [*down, (attn, "W_Q", "b_Q")] if attn.cfg.d_q_latent is None else down


@identities.register
def _(
    attn: DisentangledAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Identities between the sites of a run with input `get_input()`."""
    for name in "qkv":

        def projected(name: str = name) -> tuple[Tensor, Tensor]:
            W, b = getattr(attn, f"W_{name.upper()}"), getattr(attn, f"b_{name.upper()}")
            return add_bias(torch.einsum("bpm,nmh->bpnh", get_input(), W), b), at(f"hook_{name}")

        yield f"ln1.normalized * w + b -> {name}", projected
    terms = ["hook_c2p"] * attn.cfg.c2p + ["hook_p2c"] * attn.cfg.p2c
    yield "q k^T * scale + c2p + p2c == attn_scores, where a key is real", products(attn.scale, at, terms)
    yield from mixing_identities(attn, at)


@input_weights.register
def _(attn: DisentangledAttention) -> list[InputWeight]:
    """The weights that the input is multiplied by."""
    return [(attn, f"W_{x}", f"b_{x}") for x in "QKV"]
