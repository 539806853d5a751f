"""The block of a decoder whose self-attention and cross attention are one."""

from dataclasses import dataclass

from hooked_lm.components.attention.merged import MergedAttention
from hooked_lm.components.blocks.block import PreNormBlock


class MergedBlock(PreNormBlock):
    """A `PreNormBlock` with a `MergedAttention`, whose sites of the encoder's output are those of `cross_attn`, as elsewhere."""

    @dataclass(frozen=True)
    class Config(PreNormBlock.Config):
        def build(self, layer: int) -> "MergedBlock":
            return MergedBlock(self, layer)

    def make_attention(self) -> None:
        super().make_attention()
        assert isinstance(self.attn, MergedAttention), "a MergedBlock is built from a MergedAttention.Config"
        self.cross_attn = self.attn.source_half
