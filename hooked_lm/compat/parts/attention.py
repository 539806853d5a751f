"""The attention classes of TransformerLens."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.compat.parts.name import Flat, Part, Plan, PublicName, block_of, flat
from hooked_lm.components.attention import multihead
from hooked_lm.components.attention.cross import AbstractCrossAttention
from hooked_lm.components.attention.multihead import Attention as MultiHeadAttention
from hooked_lm.components.attention.multihead import ProjectedAttention
from hooked_lm.components.attention.position_bias import Alibi, SharedBias
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.models.config.flat import HookedEncoderDecoderConfig

Device = torch.device | str | None


def attention_of(cfg: Flat, attn_type: str, layer_id: int | None, **changes: Any) -> Plan:
    """Plans attention to all positions ("global") or within a window ("local")."""
    if attn_type not in ("global", "local"):
        raise ValueError(f"attn_type must be 'global' or 'local', got {attn_type!r}")
    local = {"use_local_attn": attn_type == "local", "attn_types": None}
    return MultiHeadAttention, block_of(cfg, layer_id or 0, attn_only=True, **local, **changes).attn


def is_shared(attn: Any) -> bool:
    """Whether groups of heads share keys and values."""
    return isinstance(attn, ProjectedAttention) and attn.cfg.n_kv != attn.cfg.n_heads


def has_relative_bias(attn: Any) -> bool:
    """Whether scores have a relative position bias, as in T5."""
    return isinstance(attn, ProjectedAttention) and isinstance(
        attn.cfg.position_bias, (SharedBias, RelativeBias.Config)
    )


class AbstractAttention(Part, MultiHeadAttention, metaclass=PublicName):
    """Any attention."""

    @staticmethod
    def plan(cfg: Flat, attn_type: str = "global", layer_id: int | None = None) -> Plan:
        return attention_of(cfg, attn_type, layer_id)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, multihead.AbstractAttention)

    @staticmethod
    def create_alibi_slope(n_ctx: int, device: Device = None) -> Float[Tensor, "query_pos key_pos"]:
        """Minus the distance of each key from a later query; 0 for later keys."""
        pos = torch.arange(n_ctx, dtype=torch.float32, device=device)
        return (pos - pos[:, None]).clamp(max=0)

    @staticmethod
    def create_alibi_multipliers(n_heads: int, device: Device = None) -> Float[Tensor, " head"]:
        """The slope of each head (Press et al. 2021, arXiv:2108.12409)."""
        return Alibi(n_heads).slopes().to(device)

    @staticmethod
    def create_alibi_bias(n_heads: int, n_ctx: int, device: Device = None) -> Float[Tensor, "head query_pos key_pos"]:
        """The bias of the scores of each head."""
        slopes = AbstractAttention.create_alibi_multipliers(n_heads, device)
        return slopes[:, None, None] * AbstractAttention.create_alibi_slope(n_ctx, device)


class Attention(AbstractAttention):
    """Multi-head attention: each head has keys and values."""

    @staticmethod
    def plan(cfg: Flat, attn_type: str = "global", layer_id: int | None = None) -> Plan:
        return attention_of(cfg, attn_type, layer_id, n_key_value_heads=None)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, ProjectedAttention) and not is_shared(module) and not has_relative_bias(module)


class GroupedQueryAttention(AbstractAttention):
    """Grouped-query attention with `cfg.n_key_value_heads` key/value heads."""

    @staticmethod
    def plan(cfg: Flat, attn_type: str = "global", layer_id: int | None = None) -> Plan:
        if flat(cfg).n_key_value_heads is None:
            raise ValueError("GroupedQueryAttention needs n_key_value_heads; use Attention without it")
        return attention_of(cfg, attn_type, layer_id)

    @staticmethod
    def is_one(module: Any) -> bool:
        return is_shared(module)


class T5Attention(AbstractAttention):
    """The attention of encoder-decoders; causal if `is_decoder`."""

    @staticmethod
    def plan(  # type: ignore[override]
        cfg: Flat,
        has_relative_attention_bias: bool = False,
        attn_type: str = "global",
        layer_id: int | None = None,
        is_decoder: bool = False,
    ) -> Plan:
        names: Any = HookedEncoderDecoderConfig.unwrap(cfg)
        bias = RelativeBias.Config(
            names.n_heads, names.relative_attention_num_buckets, names.relative_attention_max_distance, not is_decoder
        )
        return MultiHeadAttention, MultiHeadAttention.Config(
            names.d_model,
            names.n_heads,
            names.d_head,
            scale=1 / names.attn_scale if names.use_attn_scale else 1.0,
            position_bias=bias if has_relative_attention_bias else None,
            causal=is_decoder,
        )

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, AbstractCrossAttention) or has_relative_bias(module)
