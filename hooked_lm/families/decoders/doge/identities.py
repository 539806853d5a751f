"""Identities of attention whose keys a bias chooses."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.context import Context
from hooked_lm.components.verification.attention import biased
from hooked_lm.components.verification.registry import Identity, LazyTensor, Sites, identities
from hooked_lm.families.decoders.doge.value_mask import ValueMaskedAttention


@identities.register
def _(
    attn: ValueMaskedAttention, at: Sites, get_input: LazyTensor, value_input: LazyTensor | None = None
) -> Iterator[Identity]:
    """Those of attention, and those of the bias and the choice of keys."""
    yield from identities.dispatch(Attention)(attn, at, get_input, value_input)
    yield "exp(A softplus(v W_dt + b_dt)) == key_bias", lambda: (attn.key_bias(at("hook_v")), at("hook_key_bias"))

    def seen() -> tuple[Tensor, Tensor]:
        shown = at("hook_attn_scores") > float("-inf")
        bias = at("hook_key_bias").repeat_interleave(shown.shape[1] // attn.cfg.n_kv, 2).transpose(1, 2)[:, :, None]
        allowed = Context(shown.shape[2], shown.device).full_mask(attn.causal, attn.window)
        own, other = bias[..., None], bias[..., None, :]  # [... key_pos other_pos]
        is_later = torch.ones_like(allowed[0, 0], dtype=torch.bool).triu(1)
        before = ((other > own) | (other == own) & is_later) & allowed[..., None, :]
        return (allowed & (before.sum(-1) < attn.cfg.keep)).float(), shown.float()

    yield "the keys of largest bias, of equal ones the last, are seen", seen


@biased.register
def _(attn: ValueMaskedAttention, at: Sites, scores: Tensor) -> Tensor:
    """The scores plus the bias that each value gives to its key."""
    bias = at("hook_key_bias").repeat_interleave(scores.shape[1] // attn.cfg.n_kv, 2)
    return scores + bias.transpose(1, 2)[:, :, None]
