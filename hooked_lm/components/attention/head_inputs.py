"""Per-head inputs of attention: copies of the stream, made only if something listens to them."""

from typing import Any

from einops import reduce
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.hooks import HookPoint, is_listening

INPUT_POINTS = ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input")

Stream = Float[Tensor, "batch pos d_model"]
Inputs = tuple[
    Float[Tensor, "batch pos *head d_model"],
    Float[Tensor, "batch pos *key_head d_model"],
    Float[Tensor, "batch pos *value_head d_model"],
]


def head_inputs(block: Any, resid: Stream, normalized: Stream | None, context: Context) -> Inputs:
    """The inputs for queries, keys and values of a block's attention: the normalised stream, or one copy of it per head.

    If a hook at `ln1` edits its value, or a flag turns the copies on, they pass `ln1` with its sites, which then have an axis of
    heads. Otherwise the sites have the one stream, and copies are normalised without them.
    """
    points = _points_with_copies(block, context)
    if not points:
        x = block.attn_norm(resid) if normalized is None else normalized
        return x, x, x
    at_sites = norm_shows_copies(block, context)
    if normalized is None and not at_sites:
        normalized = block.attn_norm(resid)
    n_heads, n_kv = _head_counts(block)
    queries = keys = resid
    if "hook_attn_in" in points:
        queries = block.hook_attn_in(_repeated(resid, n_heads))
        if n_kv == n_heads:
            keys = queries
        else:  # the input of a key/value head is the mean over its group of query heads
            keys = reduce(
                queries, "batch pos (kv_head group) d_model -> batch pos kv_head d_model", "mean", kv_head=n_kv
            )
    copies = {
        letter: getattr(block, f"hook_{letter}_input")(_repeated(x, n))
        for letter, x, n in (("q", queries, n_heads), ("k", keys, n_kv), ("v", keys, n_kv))
        if f"hook_{letter}_input" in points
    }
    normalized_streams = [] if normalized is None else [(resid, normalized)]  # a stream and its normalised value

    def after_norm(letter: str, x: Tensor) -> Tensor:
        """The normalised copy, or without one the normalised stream, computed once for all three inputs."""
        if letter in copies:
            return block.attn_norm(copies[letter], at_sites)
        if not any(stream is x for stream, _ in normalized_streams):
            normalized_streams.append((x, block.attn_norm(x, at_sites)))
        return next(value for stream, value in normalized_streams if stream is x)

    return after_norm("q", queries), after_norm("k", keys), after_norm("v", keys)


def norm_shows_copies(block: Any, context: Context | None) -> bool:
    """Whether copies of the stream pass `ln1` with its sites."""
    if context is not None and not context.norms_see_copies:
        return False
    by_flag = block.settings.attn_in or block.settings.split_qkv
    return by_flag or any(not isinstance(point, HookPoint) or point.is_edited for point in _norm_points(block))


def _points_with_copies(block: Any, context: Context) -> list[str]:
    """The points that copies pass: those with listeners, and those with their flag set if something listens at the norm."""
    flags = dict.fromkeys(INPUT_POINTS, block.settings.split_qkv) | {"hook_attn_in": block.settings.attn_in}
    by_flag = context.norms_see_copies and (not block.settings.fused or is_listening(*_norm_points(block)))
    return [
        name
        for name, flag in flags.items()
        if name in block._modules and (is_listening(getattr(block, name)) or (flag and by_flag))
    ]


def _norm_points(block: Any) -> list[nn.Module]:
    return [getattr(block.ln1, name) for name in ("hook_scale", "hook_normalized") if hasattr(block.ln1, name)]


def _head_counts(block: Any) -> tuple[int, int]:
    """The number of query heads and of key/value heads; for a foreign module those of the attention that it replaced."""
    if hasattr(block.attn, "n_kv"):
        return block.attn.cfg.n_heads, block.attn.n_kv
    return block.cfg.attn.n_heads, block.cfg.attn.n_kv


def _repeated(x: Tensor, n: int) -> Tensor:
    """A copy of a stream per head. Copies are cloned, since hooks may edit them in place."""
    return x.clone() if x.ndim == 4 else x[:, :, None].repeat(1, 1, n, 1)
