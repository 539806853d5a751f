"""What queries, keys and values read: the normalised stream, or a copy of it for each head."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.manner import Manner
from hooked_lm.components.norm import norm_unhooked
from hooked_lm.hooks import HookPoint, is_listening

Stream = Float[Tensor, "batch pos d_model"]
Inputs = tuple[
    Float[Tensor, "batch left *head d_model"],
    Float[Tensor, "batch key_row *key_head d_model"],
    Float[Tensor, "batch key_row *value_head d_model"],
]


class HeadInputs(nn.Module):
    """The inputs of a block's attention, and the points at which they are shown per head."""

    cfg: Any
    attn: Any
    ln1: nn.Module
    hook_attn_in: nn.Module
    hook_q_input: nn.Module
    hook_k_input: nn.Module
    hook_v_input: nn.Module
    makes_keys: bool
    manner = Manner()

    def attn_inputs(self, resid: Stream, shared: Stream | None, context: Context) -> Inputs:
        """The normalised stream for queries, keys and values; where something listens, one copy of it per head.

        Copies pass `ln1` with its sites, which then have an axis of heads, if a hook there does more than record, or a flag
        asks for the copies. Else the sites show the stream, once, and copies are normalised past them.
        """
        if not (
            self._copies("per_head", self.hook_attn_in, context)
            or any(self._apart(letter, context) for letter in "qkv")
        ):
            shared = self.read(resid) if shared is None else shared
            keys = context.key_rows(shared) if self.makes_keys else shared
            return context.query_rows(shared), keys, keys
        at_sites = self.norm_shows_copies(context)
        if shared is None and not at_sites:
            shared = self.read(resid)
        n_heads, n_kv = self._head_counts()
        queries = keys = resid
        if self._copies("per_head", self.hook_attn_in, context):
            queries = self.hook_attn_in(_repeated(resid, n_heads))
            # the keys and values of a group of heads read the mean of the group's copies
            keys = queries if n_kv == n_heads else queries.unflatten(2, (n_kv, -1)).mean(3)
        apart = {}  # what each reads a copy of its own of, before the norm
        if self._apart("q", context):
            apart["q"] = self.hook_q_input(_repeated(context.query_rows(queries), n_heads))
        if self.makes_keys and self._apart("k", context):
            apart["k"] = self.hook_k_input(_repeated(context.key_rows(keys), n_kv))
        if self.makes_keys and self._apart("v", context):
            apart["v"] = self.hook_v_input(_repeated(context.key_rows(keys), n_kv))
        made = [] if shared is None else [(resid, shared)]

        def normalized(letter: str, x: Tensor) -> Tensor:
            """What is copied, or else the stream, which passes the norm once for all who share it."""
            if letter in apart:
                return self.read(apart[letter], at_sites)
            if not any(stream is x for stream, _ in made):
                made.append((x, self.read(x, at_sites)))
            of_all = next(value for stream, value in made if stream is x)
            return (
                context.query_rows(of_all) if letter == "q" else context.key_rows(of_all) if self.makes_keys else of_all
            )

        return normalized("q", queries), normalized("k", keys), normalized("v", keys)

    def _apart(self, letter: str, context: Context) -> bool:
        """Whether queries, keys or values read a copy of their own per head."""
        point = getattr(self, f"hook_{letter}_input", None)
        return point is not None and self._copies("split", point, context)

    def _copies(self, flag: str, point: nn.Module, context: Context) -> bool:
        """Whether copies pass this point: something listens there, or its flag is set, and something listens at the norm."""
        if is_listening(point):
            return True
        if not getattr(self.manner, flag) or not context.norms_see_copies:
            return False
        return not self.manner.fused or is_listening(*self._norm_points())

    def norm_shows_copies(self, context: Context | None) -> bool:
        """Whether copies of the stream pass the sites of `ln1`."""
        if context is not None and not context.norms_see_copies:
            return False
        asked = self.manner.per_head or self.manner.split
        return asked or any(not isinstance(point, HookPoint) or point.is_edited for point in self._norm_points())

    def _norm_points(self) -> list[nn.Module]:
        return [getattr(self.ln1, name) for name in ("hook_scale", "hook_normalized") if hasattr(self.ln1, name)]

    def _head_counts(self) -> tuple[int, int]:
        """Heads of queries, and of keys; a foreign module has as many as what stood there."""
        if hasattr(self.attn, "n_kv"):
            return self.attn.cfg.n_heads, self.attn.n_kv
        return self.cfg.attn.n_heads, self.cfg.attn.n_kv

    def read(
        self, copies: Float[Tensor, "batch pos *head d_model"], at_sites: bool = True
    ) -> Float[Tensor, "batch pos *head d_model"]:
        """The stream, or copies of it, as attention reads them; perhaps past the sites of the norm."""
        return self.ln1(copies) if at_sites else norm_unhooked(self.ln1, copies)


def _repeated(x: Tensor, n: int) -> Tensor:
    """One private copy per head of a stream; a stream that is per head already is copied as it is."""
    return x.clone() if x.ndim == 4 else x[:, :, None].repeat(1, 1, n, 1)
