"""Attention of a block for tokens that run through a part of it, as in sweeps; `PreNormBlock` and the like run it whole."""

from collections.abc import Callable
from functools import partial

from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.partial_context import PartialContext
from hooked_lm.hooks import HookPoint

Stream = Float[Tensor, "batch pos d_model"]


class AttentionInPart:
    """What the half of a block with attention has besides what its forward runs: its keys alone, its output from a value inside
    it, and the kind of its norm under its public name."""

    attn: AbstractAttention
    layer: int
    hook_attn_out: HookPoint
    hook_resid_pre: HookPoint
    attn_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    attn_to_stream: Callable[[Tensor], Tensor]

    def attn_out_in_part(self, context: PartialContext, resid: Stream, shared: Stream | None) -> Stream:
        """The output of attention to the stream, for rows of which some enter in the middle."""
        return context.of_rows(partial(self._attended, context), self._attn_from, resid, shared)

    def _attended(self, context: PartialContext, resid: Stream, shared: Stream | None) -> Stream:
        query, key, value = self.attn_inputs(resid, shared, context)
        keys = context.kv_rows(key)
        values = keys if value is key else context.kv_rows(value)  # latent attention tests whether they are the same
        return self.attn_to_stream(self.attn(query, keys, values, context, self.layer))

    def _attn_from(self, site: str, value: Tensor) -> Stream:
        """The output of attention to the stream, from its value at a site: its own, or `attn.hook_z`."""
        if site == self.hook_attn_out.name:
            return self.hook_attn_out(value)
        return self.attn_to_stream(self.attn.output(self.attn.hook_z(value)))

    def make_keys(self, resid: Stream, context: PartialContext, shared: Stream | None = None) -> None:
        """Computes the keys and values of some tokens, and nothing else."""
        query, key, value = self.attn_inputs(self.attn_stream(resid) if shared is None else resid, shared, context)
        self.attn(query[:, :0], key, value, context, self.layer)

    def attn_stream(self, resid: Stream) -> Stream:
        """The stream that attention reads, from what enters the layer."""
        return self.hook_resid_pre(resid)

    @property
    def normalization_type(self) -> str | None:
        """The kind of its first norm, as in a flat config: "LN", "LNPre", "RMS", "RMSPre"; None for others."""
        return getattr(self.ln1, "normalization_type", None)  # type: ignore[attr-defined]
