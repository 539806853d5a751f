"""A sweep stays within `max_memory`, and refuses a limit that is too small."""

import os
import resource
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.engine.budget import Budget
from hooked_lm.engine.edit import Cell
from hooked_lm.patching import Edit, Experiment, Rewrite
from tests.core import thinned
from tests.models.toys import ids, toy

BUDGET = 64 << 20
CONSTANT = 16 << 20  # plans, code that was not there before
VOCAB, HEADS = 4000, 8
Metric = Callable[[Tensor], Tensor]


def last(logits: Tensor) -> Tensor:
    return logits[:, -1, 3]


def everything(logits: Tensor) -> Tensor:
    return logits.mean((1, 2))


def both_ends(logits: Tensor) -> Tensor:
    return logits[:, 0].logsumexp(-1) + logits[:, -1, 3]


def edit(site: str, positions: tuple[int, ...] | None, rest: tuple = ()) -> Cell:
    return [Edit(site, torch.zeros([1] * (4 if "attn." in site else 3)), positions, rest)]


# what is exchanged, how often; positions, prompts; what is read
SWEEPS: dict[str, tuple[Callable[[int], Cell], int, int, int, Metric]] = {
    "the stream": (lambda i: edit("blocks.0.hook_resid_pre", (i % 128,)), 1000, 128, 2, last),
    "one token, all keys": (lambda i: edit("blocks.1.hook_mlp_out", (511,)), 3000, 512, 1, last),
    "one token, all keys, prompts": (lambda i: edit("blocks.1.hook_mlp_out", (127,)), 3000, 128, 4, last),
    "all logits": (lambda i: edit("blocks.0.hook_resid_pre", (0,)), 300, 128, 2, everything),
    "logits of both ends": (lambda i: edit("blocks.0.hook_resid_pre", (0,)), 300, 128, 2, both_ends),
    "patterns": (lambda i: edit("blocks.0.attn.hook_pattern", None, (i % HEADS,)), 300, 256, 1, last),
    "results": (lambda i: edit("blocks.0.attn.hook_result", (0,), (i % HEADS,)), 300, 128, 2, last),
    "whole forwards": (lambda i: [Rewrite("blocks.0.hook_resid_pre", torch.neg)], 100, 128, 2, last),
}


def growth(name: str) -> int:
    """Bytes that the process has grown by in a sweep, at most; after one cell, so that all code is there."""
    cell, n_cells, n_pos, batch, metric = SWEEPS[name]
    cfg = HookedTransformerConfig(
        n_layers=3, d_model=64, n_heads=HEADS, n_ctx=n_pos, d_vocab=VOCAB, act_fn="gelu", seed=0
    )
    model, tokens = HookedTransformer(cfg).requires_grad_(False), torch.randint(VOCAB, (batch, n_pos))
    warnings.simplefilter("ignore")
    list(Experiment(model, tokens, [metric]).run([cell(0)], progress=False))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in Experiment(model, tokens, [metric], max_memory=BUDGET).run(map(cell, range(n_cells)), progress=False):
        pass
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems count memory in other units")
@pytest.mark.parametrize("name", thinned(SWEEPS, keep=["patterns"]))
def test_a_sweep_stays_within_max_memory(name: str) -> None:
    code = f"import torch; torch.set_num_threads(1); from {__name__} import growth; print(growth({name!r}))"
    command = [sys.executable, "-c", code.replace(__name__, "tests.engine.test_budget")]
    at_once = {
        **os.environ,
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }  # what is freed goes back, so that what is in use is seen
    run = subprocess.run(command, cwd=Path(__file__).parents[2], env=at_once, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < BUDGET + CONSTANT, f"it grew by {int(run.stdout) / 2**20:.0f} MB"


@pytest.mark.parametrize("max_memory", [0, -1, True, 1.5, "much", "0 MB", "5 XB", "MB", None])
def test_invalid_sizes_are_refused(max_memory: object) -> None:
    with pytest.raises((ValueError, TypeError), match=r"max_memory"):
        Experiment(toy(), ids(2, 6), [last], max_memory=max_memory)


@pytest.mark.parametrize(
    ("given", "n_bytes"), [("512MB", 512 * 10**6), ("2 GiB", 2**31), ("0.5 kB", 500), ("70B", 70), (12, 12)]
)
def test_sizes_with_units(given: int | str, n_bytes: int) -> None:
    assert Budget.of(given, torch.device("cpu")).n_bytes == n_bytes


def test_too_little_for_one_cell() -> None:
    """The error names a sufficient size before any cell runs, and that size suffices."""
    model, tokens, calls = toy(), ids(2, 6), []

    def counted(logits: Tensor) -> Tensor:
        calls.append(1)
        return last(logits)

    cells = [edit("blocks.0.hook_resid_pre", (pos,)) for pos in range(6)]
    small = Experiment(model, tokens, [counted], max_memory=100)
    of_base_run = len(calls)  # two: what the metric reads, and what it makes of that
    with pytest.raises(ValueError, match=r"max_memory=100 bytes is too small.*one cell of 2 prompts about [\d,]+"):
        list(small.run(cells, progress=False))
    assert len(calls) == of_base_run
