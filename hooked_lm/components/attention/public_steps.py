"""The steps of attention under their public names, for code that computes attention by hand."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from hooked_lm.components.embeddings.rotary import Rotary

Scores = Float[Tensor, "batch head query_pos key_pos"]
PerHead = Float[Tensor, "batch pos head d_head"]
STEPS = {
    "calculate_qkv_matrices": "hook_q, hook_k and hook_v",
    "calculate_attention_scores": "hook_attn_scores",
    "apply_causal_mask": "hook_attn_scores",
    "apply_rotary": "hook_rot_q and hook_rot_k",
    "calculate_sin_cos_rotary": "hook_rot_q and hook_rot_k",
    "rotate_every_two": "hook_rot_q and hook_rot_k",
    "calculate_z_scores": "hook_z",
}


class PublicSteps(nn.Module):
    """What a forward pass computes, step by step, on tensors that the caller has; no hook runs.

    A forward pass calls none of them, because it fuses steps. So a subclass that defines one anew raises TypeError, and an
    assignment to one raises AttributeError; both name the sites whose values can be edited instead.
    """

    cfg: Any
    scale: float
    window: int | None
    causal: bool

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in STEPS.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}: {_not_called(name)}")

    def __setattr__(self, name: str, value: object) -> None:
        if name in STEPS:
            raise AttributeError(_not_called(name))
        super().__setattr__(name, value)  # type: ignore[arg-type]

    def calculate_qkv_matrices(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch key_pos *kv_head d_model"],
        value_input: Float[Tensor, "batch key_pos *kv_head d_model"],
    ) -> tuple[PerHead, Float[Tensor, "batch key_pos kv_head d_head"], Float[Tensor, "batch key_pos kv_head d_value"]]:
        """The queries, keys and values of these inputs, before norms and rotary embedding."""
        attn: Any = self
        keys, values = (attn.W_K, attn.b_K), attn.value_weights
        return (
            attn._projected(query_input, attn.W_Q, attn.b_Q),
            attn._project_kv(key_input, *keys),
            attn._project_kv(value_input, *values),
        )

    def calculate_attention_scores(
        self, q: PerHead, k: Float[Tensor, "batch key_pos kv_head d_head"]
    ) -> Float[Tensor, "batch head query_pos key_pos"]:
        """The scaled products of queries and keys, with the soft cap, before the mask and biases of positions."""
        keys = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        scores = torch.einsum("bqnh,bknh->bnqk", q, keys) * self.scale
        cap = self.cfg.soft_cap
        return scores if cap is None else cap * (scores / cap).tanh()

    def apply_causal_mask(
        self,
        attn_scores: Scores,
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch key_pos"] | None = None,
    ) -> Scores:
        """The scores, with minus infinity where a query may not attend to a key: later keys, those outside the window of
        local attention, and those whose `attention_mask` is 0.

        Queries begin at position `past_kv_pos_offset` of the keys. Raises ValueError if they do not end at the last key.
        """
        n_query, n_key = attn_scores.shape[-2:]
        if n_query + past_kv_pos_offset != n_key:
            raise ValueError(
                f"{n_query} queries after {past_kv_pos_offset} earlier positions need {n_query + past_kv_pos_offset} keys, "
                f"got scores of {n_key}"
            )
        query = torch.arange(past_kv_pos_offset, n_key, device=attn_scores.device)[:, None]
        distance = query - torch.arange(n_key, device=attn_scores.device)
        allowed = distance >= 0
        if self.window is not None:
            allowed = allowed & (distance < self.window)
        if attention_mask is not None:
            allowed = allowed & attention_mask.to(attn_scores.device).bool()[:, None, None, :]
        return attn_scores.masked_fill(~allowed, -torch.inf)

    def calculate_z_scores(
        self, v: Float[Tensor, "batch key_pos kv_head d_value"], pattern: Scores
    ) -> Float[Tensor, "batch query_pos head d_value"]:
        """The values, mixed by the pattern."""
        values = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)
        return torch.einsum("bnqk,bknh->bqnh", pattern, values)

    # ---- rotary embedding --------------------------------------------------------------------------------------------

    def apply_rotary(
        self,
        x: PerHead,
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch key_pos"] | None = None,
    ) -> PerHead:
        """The rotated queries or keys of the positions that follow `past_kv_pos_offset` earlier ones.

        With an `attention_mask`, positions count its ones only. AttributeError without a rotary embedding.
        """
        rotary, n_key = rotary_of(self.cfg), past_kv_pos_offset + x.shape[1]
        positions = torch.arange(n_key, device=x.device)[None]
        if attention_mask is not None:
            positions = (attention_mask.to(x.device).long().cumsum(1) - 1).clamp(min=0)
        return rotary.rotate(x, rotary.angles(positions[:, past_kv_pos_offset:], n_key))

    def calculate_sin_cos_rotary(
        self, rotary_dim: int, n_ctx: int, base: float = 10000, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "pos rotary_dim"], Float[Tensor, "pos rotary_dim"]]:
        """The sines and cosines of each rotated feature, with the layer's scaling. AttributeError without a rotary embedding."""
        cos, sin = tables(replace(rotary_of(self.cfg), dim=rotary_dim, theta=float(base)), n_ctx)
        return sin.to(dtype), cos.to(dtype)

    def rotate_every_two(self, x: Float[Tensor, "*batch rotary_dim"]) -> Float[Tensor, "*batch rotary_dim"]:
        """Each pair (a, b) of features as (-b, a): what `apply_rotary` multiplies by the sine."""
        if rotary_of(self.cfg).adjacent_pairs:
            return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)


def rotary_of(cfg: object) -> Rotary:
    """The rotary embedding in a config of attention; AttributeError without one."""
    rotary = getattr(cfg, "rotary", None)
    if rotary is None:
        raise AttributeError("this attention has no rotary embedding")
    return rotary


def tables(rotary: Rotary, n_pos: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosine and sine for each rotated feature, [pos, rotary_dim], in fp32."""
    cos, sin = (angles[0, :, 0] for angles in rotary.angles(torch.arange(n_pos, device=device)[None], n_pos))
    if rotary.adjacent_pairs:
        return cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    return cos, sin[:, rotary.dim // 2 :].repeat(1, 2)


def _not_called(name: str) -> str:
    return f"a forward pass does not call {name}, which therefore cannot be replaced; edit {STEPS[name]} with hooks"
