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
    Pair,
    Read,
    Reader,
    Sites,
    below,
    identities,
    input_weights,
    norm_identity,
    normed,
    plus,
)


@identities.register
def _(attn: LatentAttention, at: Sites, read: Read, read_value: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with input `read()`."""
    kv_at = below(at, "kv_norm")

    def latent() -> Tensor:
        return normed(attn.kv_norm, kv_at, lambda: at("hook_kv_latent"))

    def keys() -> tuple[Tensor, Tensor]:
        return attn.keys(read(), latent()), at("hook_k")

    yield from norm_identity("kv_norm", attn.kv_norm, kv_at, lambda: at("hook_kv_latent"))
    yield (
        "ln1.normalized * w + b -> kv_latent",
        lambda: (
            plus(read() @ attn.W_DKV, attn.b_DKV),
            at("hook_kv_latent"),
        ),
    )
    yield "latent, turning part -> k", keys
    yield "latent -> v", lambda: (project(latent(), attn.W_UV, None), at("hook_v"))
    if attn.cfg.d_q_latent is None:
        yield "ln1.normalized * w + b -> q", lambda: (project(read(), attn.W_Q, None), at("hook_q"))
    else:
        q_at = below(at, "q_norm")

        def queries() -> tuple[Tensor, Tensor]:
            shown = normed(attn.q_norm, q_at, lambda: at("hook_q_latent"))
            return project(shown, attn.W_UQ, None), at("hook_q")

        yield from norm_identity("q_norm", attn.q_norm, q_at, lambda: at("hook_q_latent"))
        yield (
            "ln1.normalized * w + b -> q_latent",
            lambda: (
                plus(read() @ attn.W_DQ, attn.b_DQ),
                at("hook_q_latent"),
            ),
        )
        yield "latent -> q", queries
    for name in "qk":
        yield f"what does not turn in {name} stays", _still(attn, name, at)
    yield from mixing_identities(attn, at, lambda: at("hook_rot_q"), lambda: at("hook_rot_k"))


def _still(attn: LatentAttention, name: str, at: Sites) -> Pair:
    d = attn.cfg.d_nope
    return lambda: (at(f"hook_{name}")[..., :d], at(f"hook_rot_{name}")[..., :d])


@input_weights.register
def _(attn: LatentAttention) -> list[Reader]:
    """The weights that read the stream."""
    names = ["DKV", "KR"] + ([] if attn.cfg.d_q_latent is None else ["DQ"])
    down: list[Reader] = [(attn, f"W_{x}", f"b_{x}") for x in names]
    return [*down, (attn, "W_Q", "b_Q")] if attn.cfg.d_q_latent is None else down


@identities.register
def _(attn: DisentangledAttention, at: Sites, read: Read, read_value: Read | None = None) -> Iterator[Identity]:
    """Identities between the sites of a run with input `read()`."""
    for name in "qkv":

        def projected(name: str = name) -> tuple[Tensor, Tensor]:
            W, b = getattr(attn, f"W_{name.upper()}"), getattr(attn, f"b_{name.upper()}")
            return plus(torch.einsum("bpm,nmh->bpnh", read(), W), b), at(f"hook_{name}")

        yield f"ln1.normalized * w + b -> {name}", projected
    terms = ["hook_c2p"] * attn.cfg.c2p + ["hook_p2c"] * attn.cfg.p2c
    yield "q k^T * scale + c2p + p2c == attn_scores, where a key is real", products(attn.scale, at, terms)
    yield from mixing_identities(attn, at)


@input_weights.register
def _(attn: DisentangledAttention) -> list[Reader]:
    """The weights that read the stream."""
    return [(attn, f"W_{x}", f"b_{x}") for x in "QKV"]
