"""Checks that the sizes of the parts of a config tree fit together, before a model is built from it."""

from dataclasses import fields, is_dataclass

from hooked_lm.components.attention.multihead import AbstractAttention, Attention
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.embeddings.rotary_scaling import LongRopeScaling


def check_tied(unembed: Unembed.Config | None, embed: Embed.Config) -> None:
    """Raises ValueError if an unembedding is tied to an embedding with another number of tokens."""
    if unembed is not None and unembed.tied and unembed.d_vocab != embed.d_vocab:
        raise ValueError(
            f"an unembedding of {unembed.d_vocab} tokens cannot be tied to an embedding of {embed.d_vocab}: "
            "make d_vocab_out equal to d_vocab, or set tie_word_embeddings=False"
        )


def check_fit(part: object) -> None:
    """Raises ValueError if a norm does not fit the heads that it normalises, or rotary factors the pairs of features."""
    if isinstance(part, tuple):
        for each in {id(each): each for each in part}.values():  # most layers have the same config
            check_fit(each)
    elif is_dataclass(part) and not isinstance(part, type):
        if isinstance(part, AbstractAttention.Config):
            _check_norms(part)
        elif isinstance(part, Rotary) and isinstance(part.scaling, LongRopeScaling):
            _check_factors(part.scaling, part.dim)
        for field in fields(part):
            check_fit(getattr(part, field.name))


def _check_norms(attn: AbstractAttention.Config) -> None:
    norms = [("qk_norm", attn.qk_norm, attn.n_heads)]
    if isinstance(attn, Attention.Config):
        norms += [("k_norm" if attn.k_norm else "qk_norm", attn.k_norm or attn.qk_norm, attn.n_kv)]
        norms += [("v_norm", attn.v_norm, attn.n_kv)]
    for name, norm, n_heads in norms:
        if norm is None:
            continue
        if norm.d_model != attn.d_head:
            raise ValueError(f"{name} normalises vectors of width {norm.d_model}, but d_head is {attn.d_head}")
        if (own := getattr(norm, "n_heads", None)) not in (None, n_heads):
            raise ValueError(f"{name} has weights for {own} heads, but there are {n_heads}")


def _check_factors(scaling: LongRopeScaling, dim: int) -> None:
    for name in ("short_factor", "long_factor"):
        if (n := len(getattr(scaling, name))) != dim // 2:
            raise ValueError(f"{name} of LongRope has {n} numbers, but {dim} rotary features are {dim // 2} pairs")
