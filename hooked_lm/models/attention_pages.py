"""Pages of attention: all rows of short prompts, chosen rows, or an overview of long ones by blocks of positions."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices

if TYPE_CHECKING:
    from hooked_lm.viz.view import View

MOST_ROWS = 1024  # tokens of a prompt whose rows a page shows if none are chosen
MOST_BLOCKS = 256  # of positions, in an overview
Heads = str | int | Sequence[str | int] | None
Pattern = Float[Tensor, "head query_pos key_pos"]


class BlockMaxima:
    """A hook that keeps the largest weight of each block of queries and keys: layer -> [head, block, block].

    It sees patterns some rows at a time, so that memory does not grow with the square of a prompt's length.
    """

    records = True  # a read-only hook, which needs no copy of the value
    in_blocks = True

    def __init__(self, n_pos: int) -> None:
        self.size = -(-n_pos // MOST_BLOCKS)
        self.n_blocks = -(-n_pos // self.size)
        self.of_layers: dict[int, Float[Tensor, "head query_block key_block"]] = {}

    def query_columns(self, hook: HookPoint, shape: tuple[int, ...]) -> range:
        """All rows."""
        return range(shape[-2])

    def __call__(self, pattern: Float[Tensor, "1 head query_pos key_pos"], hook: HookPoint) -> None:
        self.add(hook.layer(), pattern[0], 0 if hook.columns is None else hook.columns.shown[0])

    def add(self, layer: int, rows: Pattern, first: int) -> None:
        """Adds rows of the pattern of a layer, from query `first` on."""
        padded = F.pad(rows.detach().float(), (0, self.n_blocks * self.size - rows.shape[-1]))
        of_keys = padded.unflatten(-1, (self.n_blocks, self.size)).amax(-1)
        if layer not in self.of_layers:
            self.of_layers[layer] = of_keys.new_zeros(len(rows), self.n_blocks, self.n_blocks)
        for block in range(first // self.size, (first + rows.shape[-2] - 1) // self.size + 1):
            start, found = block * self.size - first, self.of_layers[layer][:, block]
            torch.maximum(found, of_keys[:, max(start, 0) : start + self.size].amax(1), out=found)


def rows_page(
    patterns: Mapping[int, Pattern], tokens: Sequence[str], heads: Heads, query_positions: Indices = None
) -> "View":
    """A page of these rows of patterns: those of `query_positions`, or of all tokens if None."""
    from hooked_lm import viz

    if query_positions is None:
        return viz.attention(patterns, tokens, heads=heads)
    queries = indices_in("query_positions", plain_indices("query_positions", query_positions), len(tokens))
    return viz.attention(patterns, [f"{tokens[i]} ({i})" for i in queries], tokens, heads=heads)


def overview_page(maxima: BlockMaxima, tokens: Sequence[str], heads: Heads) -> "View":
    """A page of the largest weights of blocks of positions, under the numbers and the first tokens of each block."""
    from hooked_lm import viz

    starts = range(0, len(tokens), maxima.size)
    labels = [f"{start}: {''.join(tokens[start : start + 3])}…" for start in starts]
    note = (
        f"An overview of {len(tokens)} tokens: each cell is the largest weight of {maxima.size} queries and {maxima.size} keys, "
        "a block, named by the number of its first token. For the weights of single tokens give query_positions."
    )
    return viz.attention(maxima.of_layers, labels, heads=heads, note=note)
