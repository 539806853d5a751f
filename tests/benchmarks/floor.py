"""The arithmetic floor of a sweep: the FLOPs that no exact sweep can do without, at the rate of this machine's GEMM.

Every cell is a row that differs from the corrupted run from one layer and one position on, and whose metric reads the last
position. Counted are the products of matrices of those rows alone: the corrupted run itself, norms, softmax and the
unembedding of two tokens are left out. A multiplication and an addition are two FLOPs.
"""

from dataclasses import dataclass
from itertools import product

import torch

from tests.benchmarks.timing import seconds


@dataclass(frozen=True)
class Size:
    """The sizes of a decoder that its FLOPs depend on."""

    n_layers: int
    d_model: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_mlp: int
    gated: bool

    @property
    def keys_values(self) -> int:
        """Of one position: W_K and W_V."""
        return 2 * self.d_model * 2 * self.n_key_value_heads * self.d_head

    @property
    def head_out(self) -> int:
        """Of one position and head: its slice of W_O."""
        return 2 * self.d_head * self.d_model

    @property
    def mlp(self) -> int:
        """Of one position: the matrices into the neurons and the one out of them."""
        return 2 * self.d_model * self.d_mlp * (3 if self.gated else 2)

    def queries_on(self, positions: range) -> int:
        """What these positions compute in a block besides keys and values."""
        projections = 2 * self.d_model * self.n_heads * self.d_head + self.n_heads * self.head_out  # W_Q, W_O
        attention = sum(2 * 2 * self.n_heads * self.d_head * (p + 1) for p in positions)  # scores, mixing; keys 0 to p
        return len(positions) * (projections + self.mlp) + attention

    def through(self, layer: int, first: int, n_pos: int) -> int:
        """A row whose positions from `first` on all differ before `layer`, to the end of the stack."""
        whole, last = range(first, n_pos), range(n_pos - 1, n_pos)
        if layer >= self.n_layers:
            return 0  # only the unembedding is left
        middle = len(whole) * self.keys_values + self.queries_on(whole)
        final = len(whole) * self.keys_values + self.queries_on(last)  # keys of all, but only the last is read
        return (self.n_layers - 1 - layer) * middle + final

    def entering(self, layer: int, first: int, n_pos: int) -> int:
        """A row that differs before `layer` at the position `first` alone, to the end of the stack."""
        if layer >= self.n_layers:
            return 0
        read = range(n_pos - 1, n_pos) if layer == self.n_layers - 1 else range(first, n_pos)
        own = self.keys_values + self.queries_on(read)  # fresh keys and values: those of one position
        return own + self.through(layer + 1, first, n_pos)

    def attn_out(self, layer: int, first: int, n_pos: int) -> int:
        """A row whose attention output is patched at one position: the MLP there, then that one row enters the next layer."""
        if layer == self.n_layers - 1 and first < n_pos - 1:
            return 0  # nobody reads this position any more
        return self.mlp + self.entering(layer + 1, first, n_pos)

    def mlp_out(self, layer: int, first: int, n_pos: int) -> int:
        """A row whose MLP output is patched at one position: nothing in its own layer."""
        return self.entering(layer + 1, first, n_pos)

    def z(self, layer: int, first: int, n_pos: int) -> int:
        """A row in which one head's mixed values are patched from `first` on: its part of W_O, the MLP, whole layers."""
        n_read = 1 if layer == self.n_layers - 1 else n_pos - first
        return n_read * (self.head_out + self.mlp) + self.through(layer + 1, first, n_pos)


def incremental_flops(size: Size, sweep: str, n_prompts: int, n_pos: int, n_alike: int = 0) -> int:
    """The FLOPs of all cells of a sweep: "resid_pre", "block_every" [3 layer pos] or "attn_head_out_all_pos" [layer head].

    Where both prompts begin with the same `n_alike` tokens, nothing differs there.
    """
    if sweep == "attn_head_out_all_pos":
        return n_prompts * size.n_heads * sum(size.z(layer, n_alike, n_pos) for layer in range(size.n_layers))
    parts = {"resid_pre": (size.entering,), "block_every": (size.entering, size.attn_out, size.mlp_out)}[sweep]
    cells = product(range(size.n_layers), range(n_alike, n_pos))
    return n_prompts * sum(part(layer, first, n_pos) for layer, first in cells for part in parts)


def gemm_rate(d_model: int, d_mlp: int, rows: int = 512) -> float:
    """FLOP/s of fp32 products of a block's shapes: the best of five runs of each, into memory that is there already."""
    best = 0.0
    for d_in, d_out in ((d_model, d_model), (d_model, d_mlp), (d_mlp, d_model)):
        x, weight, out = torch.rand(rows, d_in), torch.rand(d_in, d_out), torch.empty(rows, d_out)
        fastest = min(seconds(lambda x=x, weight=weight, out=out: torch.mm(x, weight, out=out)) for _ in range(5))
        best = max(best, 2 * rows * d_in * d_out / fastest)
    return best
