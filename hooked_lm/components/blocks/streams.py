"""What all blocks between several residual streams have; `components/streams.py` has the ends of such a model."""

from abc import abstractmethod

from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.blocks.block import Block
from hooked_lm.components.streams import Stream, Wide

Streams = Float[Tensor, "batch pos stream d_model"]


class StreamsBlock(Block):
    """A layer that reads and writes several streams."""

    @abstractmethod
    def attn_stream(self, resid: Wide | Stream) -> Stream:
        """The stream that attention reads, from what enters the layer."""
