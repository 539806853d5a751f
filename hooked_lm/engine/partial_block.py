"""Runs a block on rows that need only some of its computation."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from hooked_lm.components.blocks.block import AttentionPart
from hooked_lm.components.blocks.hybrid import HybridBlock
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.blocks.streams import StreamsBlock
from hooked_lm.engine.context import PackedContext
from hooked_lm.engine.ragged_batch import pack


def make_keys(block: Any, resid: Tensor, context: PackedContext) -> None:
    """Runs a block for the keys and values of some tokens, or for the state of a mixer after them, and no further."""
    resid = block.attn_stream(resid) if isinstance(block, StreamsBlock) else block.hook_resid_pre(resid)
    shared = block.ln1(resid) if isinstance(block, HybridBlock) else None
    if isinstance(block, HybridBlock):
        block.mixer_out(resid, context, shared)
    elif isinstance(block, MixerPart):
        block.mixer_out(resid, context)
    if isinstance(block, AttentionPart):
        queries, keys, values = block.attn_inputs(resid, shared, context)
        block.attn(queries[:, :0], keys, values, context, block.layer)


class PartialBlock:
    """A block in which some rows enter after attention (or the mixer), at `z` or at its output, with the value of the base run
    (`values`, by site), and in which keys and values are computed for some rows only.

    Calling it runs the block's own forward pass on this object, in which only the output of attention is computed in another
    way.
    """

    def __init__(self, block: AttentionPart | MixerPart, context: PackedContext, values: Mapping[str, Tensor]) -> None:
        self.block, self.context, self.values = block, context, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.block, name)

    def __call__(self, resid: Tensor) -> Tensor:
        """The output of the block for all rows that leave it."""
        return type(self.block).forward(self, resid, self.context)  # this object in place of the block

    def attn_out(self, resid: Tensor, context: PackedContext, shared: Tensor | None = None) -> Tensor:
        """The output of attention, for all rows."""

        def attended() -> Tensor:
            block = self.block
            assert isinstance(block, AttentionPart), "a block with attention"
            inputs = block.attn_inputs(
                self._full_rows(resid), None if shared is None else self._full_rows(shared), context
            )
            queries, keys, values = inputs
            some = context.kv_rows(keys)
            of_values = (
                some if values is keys else context.kv_rows(values)
            )  # latent attention tests whether they are the same tensor
            return block.attn_to_stream(block.attn(queries, some, of_values, context, block.layer))

        return self._all_rows(attended)

    def mixer_out(self, resid: Tensor, context: PackedContext) -> Tensor:
        """The output of the mixer, for all rows."""
        block = self.block
        assert isinstance(block, MixerPart), "a block with a mixer"
        return self._all_rows(lambda: block.mixer_out(self._full_rows(resid), context))

    def _full_rows(self, x: Tensor) -> Tensor:
        """The rows that run through attention."""
        context = self.context
        if context.query_packing is context.output_packing:
            return x
        some = [run for run, cells in enumerate(context.runs) if not cells.spans.entry_site]
        return pack([context.output_packing.part(x, run) for run in some])

    def _all_rows(self, passed: Callable[[], Tensor]) -> Tensor:
        """The outputs of rows that pass attention, and of those that enter after it, in the order of the batch."""
        if self.context.query_packing is self.context.output_packing:
            return passed()
        outputs = {}
        for site, packing in self.context.packings.items():
            with self.context.using(packing):
                outputs[site] = packing, self._entering(site) if site else passed()
        by_run = [outputs[run.spans.entry_site] for run in self.context.runs]
        return pack([packing.part(output, run) for run, (packing, output) in enumerate(by_run)])

    def _entering(self, site: str) -> Tensor:
        """The outputs of the rows that enter at a site."""
        value, block = self.context.of_base(self.values[site]), self.block
        if isinstance(block, MixerPart):
            return block.hook_mixer_out(value)
        if site == block.hook_attn_out.name:
            return block.hook_attn_out(value)
        return block.attn_to_stream(block.attn.output(block.attn.hook_z(value)))
