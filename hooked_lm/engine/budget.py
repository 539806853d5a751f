"""The number of cells in one pass, limited by memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hooked_lm.engine.base_run import BaseRun
from hooked_lm.engine.metric_trace import TracedAccess
from hooked_lm.engine.schedule import CellSchedule
from hooked_lm.models.budget import bytes_of, memory_of, token_bytes

ENOUGH = 2048  # tokens in a pass; more do not increase the throughput of a CPU
ENOUGH_ON_GPU = 32768

__all__ = ["Budget", "batches", "bytes_of", "kv_bytes", "token_bytes"]


@dataclass(frozen=True)
class Budget:
    """The memory of a pass in bytes, and the largest useful number of tokens; `is_user_set`: the user chose the memory."""

    n_bytes: int
    n_tokens: int
    is_user_set: bool = False

    @classmethod
    def of(cls, max_memory: int | str, device: torch.device) -> "Budget":
        """The budget of a user's `max_memory` (see `bytes_of`). "auto" is 1 GiB on a CPU, half of the free memory on a GPU."""
        enough = ENOUGH if device.type == "cpu" else ENOUGH_ON_GPU
        if max_memory == "auto":
            return cls(memory_of(max_memory, device), enough)
        return cls(bytes_of(max_memory), enough, is_user_set=True)

    def cells_of_whole_forwards(self, model: nn.Module, shape: torch.Size) -> int:
        """The number of cells in one batch, for logits of this shape [batch, pos, d_vocab]; at least one."""
        n_tokens = shape[0] * shape[1]
        width = max(token_bytes(model), 4 * shape[-1])
        return max(1, min(self.n_tokens // n_tokens, self.n_bytes // (n_tokens * width)))


def batches(
    schedules: Sequence[CellSchedule], budget: Budget, base: BaseRun, reads: TracedAccess
) -> list[list[CellSchedule]]:
    """Groups schedules into passes that fit the budget; those of a pass have the same on-demand sites and similar first layers.

    Raises ValueError if a budget that the user set is too small for one schedule.
    """
    width = max(token_bytes(block) for block in base.model.blocks)
    n_kv_bytes = max((kv_bytes(keys_values) for keys_values in base.context.keys_values.values()), default=0)
    shows_scores = any(schedule.shows_scores for schedule in schedules)
    n_score_bytes = 16 * base.model.cfg.n_heads * base.n_pos if shows_scores else 0  # four fp32 copies of the scores
    d_vocab = base.logits.shape[-1] if reads.tokens is None else len(reads.tokens)
    available = budget.n_bytes - (base.n_bytes if budget.is_user_set else 0)
    passes: list[list[CellSchedule]] = []
    some: list[CellSchedule] = []
    size = tokens = 0
    for schedule in sorted(
        schedules, key=lambda schedule: (sorted(schedule.on_demand), schedule.first, schedule.spans[0].query_rows)
    ):
        own = schedule.n_tokens * base.n_prompts
        start, stop = schedule.spans[-1].query_rows
        n_bytes = own * (width + n_score_bytes) + n_kv_bytes + base.n_prompts * 4 * d_vocab * (stop - start)
        full = size + n_bytes > available or tokens + own > budget.n_tokens
        if n_bytes > available and budget.is_user_set:
            raise ValueError(
                f"max_memory={budget.n_bytes:,} bytes is too small: the base run needs {base.n_bytes:,}, "
                f"and one cell of {base.n_prompts} prompts about {n_bytes:,}"
            )
        if some and (full or schedule.on_demand != some[0].on_demand):
            passes.append(some)
            some, size, tokens = [], 0, 0
        some.append(schedule)
        size, tokens = size + n_bytes, tokens + own
    return [*passes, some] if some else passes


def kv_bytes(keys_values: tuple[Tensor, Tensor]) -> int:
    """Bytes of the keys and values of all positions, which each row needs regardless of its number of tokens."""
    return sum(some.numel() * some.element_size() for some in keys_values)
