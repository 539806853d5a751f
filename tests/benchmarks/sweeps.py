"""Patching sweeps against TransformerLens, which runs a whole forward pass for every cell, and against the arithmetic floor.

python -m tests.benchmarks sweeps [1x16 1x64 8x16 8x64]     (prompts x tokens; all of them without names)

Each version of TransformerLens lives in a process and an environment of its own (`peers`), holds the same random weights and is
asked in turn with ours. Where its whole sweep would take minutes it runs cells spread over layers and positions, and the seconds
of a cell are scaled up to the sweep: the details say what a cell costs in the lower and in the upper half of the layers.
Gradients are off, progress bars go to a file, the clean run is not timed, and 2 threads compute on either side.
"""

import contextlib
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hooked_lm import HookedTransformer, patching, pretrained
from tests.benchmarks.floor import Size, gemm_rate, incremental_flops
from tests.benchmarks.peers import ROOT, THREADS, Peer, spread
from tests.benchmarks.timing import Figure, seconds

GPT2, GROUPED = "GPT-2", "grouped-query"
OLD, NEW = "3.9.0", "4.3.0"
# How many times faster than each version.
ASKED = {
    (GPT2, "resid_pre"): {OLD: 30, NEW: 12},
    (GPT2, "attn_head_out_all_pos"): {OLD: 15, NEW: 7},
    (GPT2, "block_every"): {OLD: 30},
    (GROUPED, "resid_pre"): {OLD: 25},
}
TIMES_THE_FLOOR = 1.6
# (prompts, tokens) -> how often ours runs; the peers run before and after each of them.
ROUNDS = {(1, 16): 5, (1, 64): 3, (8, 16): 3, (8, 64): 1}
CELLS = 12  # that a peer runs at each of its turns
AGREE = 1e-4
ANSWERS = (11, 7)

# The functions of `patching` that make up each sweep; ours returns one table [*parts layer position_or_head].
PARTS = {
    "resid_pre": ("get_act_patch_resid_pre",),
    "attn_head_out_all_pos": ("get_act_patch_attn_head_out_all_pos",),
    "block_every": ("get_act_patch_resid_pre", "get_act_patch_attn_out", "get_act_patch_mlp_out"),
}
SITES = ("resid_pre", "z", "attn_out", "mlp_out")
FLAT = (
    *(
        "n_layers",
        "d_model",
        "n_ctx",
        "n_heads",
        "n_key_value_heads",
        "d_head",
        "d_mlp",
        "d_vocab",
        "act_fn",
        "gated_mlp",
    ),
    *("normalization_type", "eps", "final_rms", "positional_embedding_type", "rotary_dim", "rotary_base"),
)

BUDGET = 256 << 20  # bytes that a sweep may hold besides the model
MEMORY_PROBE = """
import ctypes, json, sys
import torch
from hooked_lm import HookedTransformer, patching, pretrained

directory, budget, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(threads)
torch.set_grad_enabled(False)

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

def metric(logits):
    return logits[0, -1, 1] - logits[0, -1, 2]

def sweep(model, n_pos):
    clean, corrupted = torch.randint(model.cfg.d_vocab, (2, 1, n_pos))
    patching.sweep(model, corrupted, clean, metric=metric, max_memory=budget, progress=False)

sweep(HookedTransformer.from_pretrained("demo"), 8)
model = pretrained.from_pretrained_no_processing(directory, mmap=False)
ctypes.CDLL(None).malloc_trim(0)  # what loading freed is not to be used again unseen
before = status("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak so far
sweep(model, 64)
print(json.dumps({"bytes": status("VmHWM:") - before}))
"""


# ---- models and prompts ----------------------------------------------------------------------------------------------


def checkpoint(kind: str, directory: Path, tiny: bool) -> HookedTransformer:
    """A random model that both sides load from the directory; of tiny ones the weights are large, so that tables vary."""
    torch.manual_seed(0)
    if kind == GPT2:
        sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": 50, "initializer_range": 0.2} if tiny else {}
        theirs = GPT2LMHeadModel(GPT2Config(n_positions=128, **sizes))
    else:
        sizes = {"num_hidden_layers": 12, "hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
        sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4}
        if tiny:
            sizes = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 50}
            sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
        theirs = LlamaForCausalLM(LlamaConfig(max_position_embeddings=128, **sizes))
    theirs.save_pretrained(directory)
    ours = pretrained.from_pretrained_no_processing(directory, mmap=False)
    torch.save({name: weight.contiguous() for name, weight in ours.state_dict().items()}, directory / "flat.pt")
    (directory / "flat.json").write_text(json.dumps({name: getattr(ours.cfg, name) for name in FLAT}))
    return ours


def size_of(model: HookedTransformer) -> Size:
    cfg = model.cfg
    assert cfg.d_mlp is not None
    n_key_value_heads = cfg.n_key_value_heads or cfg.n_heads
    return Size(cfg.n_layers, cfg.d_model, cfg.n_heads, n_key_value_heads, cfg.d_head, cfg.d_mlp, cfg.gated_mlp)


def metric(logits: Tensor) -> Tensor:
    """The logit difference of two tokens at the last position, its mean over prompts if there are several."""
    right, wrong = ANSWERS
    if len(logits) == 1:
        return logits[0, -1, right] - logits[0, -1, wrong]
    return (logits[:, -1, right] - logits[:, -1, wrong]).mean()


@dataclass
class Task:
    """One sweep over one pair of prompts, as ours and as the peers run it."""

    model: HookedTransformer
    sweep: str
    n_prompts: int
    n_pos: int
    n_alike: int = 0  # tokens with which both prompts begin
    clean: Tensor = field(init=False)
    corrupted: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        self.clean, self.corrupted = torch.randint(self.model.cfg.d_vocab, (2, self.n_prompts, self.n_pos))
        self.corrupted[:, : self.n_alike] = self.clean[:, : self.n_alike]
        names = [f"blocks.*.{'attn.' if site == 'z' else ''}hook_{site}" for site in SITES]
        with torch.no_grad():
            _, self.cache = self.model.run_with_cache(self.clean, names_filter=names)

    @property
    def grid(self) -> tuple[int, int]:
        cfg = self.model.cfg
        return cfg.n_layers, cfg.n_heads if self.sweep == "attn_head_out_all_pos" else self.n_pos

    @property
    def n_cells(self) -> int:
        return len(PARTS[self.sweep]) * math.prod(self.grid)

    @property
    def flops(self) -> int:
        return incremental_flops(size_of(self.model), self.sweep, self.n_prompts, self.n_pos, self.n_alike)

    def ours(self) -> Tensor:
        """The table, [part layer position_or_head]."""
        sweep: Callable[..., Tensor] = getattr(patching, f"get_act_patch_{self.sweep}")
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):  # the progress bar
            return sweep(self.model, self.corrupted, self.cache, metric).view(-1, *self.grid)

    def theirs(self, peer: Peer, cells: dict[str, Any]) -> dict[str, Any]:
        prompts = {"clean": self.clean.tolist(), "corrupted": self.corrupted.tolist(), "answers": ANSWERS}
        return peer.ask("sweep", **prompts, cells=cells)


# ---- one sweep -------------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """What a peer was asked in one task, and what it answered."""

    peer: Peer
    task: Task
    cells: list[tuple[int, int, int]] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    turns: list[float] = field(default_factory=list)  # seconds a cell

    def turn(self) -> None:
        """Some cells of each part of the sweep, others at every turn."""
        parts = PARTS[self.task.sweep]
        cells = {
            name: spread(*self.task.grid, CELLS // len(parts), len(self.turns) * len(parts) + i)
            for i, name in enumerate(parts)
        }
        answer = self.task.theirs(self.peer, cells)
        self.cells += [(i, *cell) for i, name in enumerate(parts) for cell in cells[name]]
        self.values += answer["values"]
        self.seconds += answer["seconds"]
        self.turns.append(statistics.mean(answer["seconds"]))

    def scaled(self, round_: int) -> float:
        """Seconds of the whole sweep, from the turns before and after a round of ours."""
        return self.task.n_cells * statistics.mean(self.turns[round_ : round_ + 2])

    def difference(self, table: Tensor) -> float:
        """The largest difference from ours, relative to the spread of our table."""
        at = torch.tensor(self.cells).T.unbind()
        spread_of_ours = (table.max() - table.min()).item()
        return (table[at] - torch.tensor(self.values)).abs().max().item() / spread_of_ours

    def detail(self) -> str:
        half = self.task.grid[0] // 2
        lower, upper = (
            statistics.median(
                s for s, (_, layer, _) in zip(self.seconds, self.cells, strict=True) if (layer >= half) == up
            )
            for up in (False, True)
        )
        return (
            f"{len(self.cells)} of {self.task.n_cells} cells, scaled; "
            f"a cell {lower * 1e3:.0f} ms in layers 0-{half - 1}, {upper * 1e3:.0f} ms above"
        )


def task_figures(kind: str, task: Task, peers: dict[str, Peer]) -> Iterator[Figure]:
    """Peers, ours, peers, ours, ..., peers: the ratios are of each of ours to the peers around it."""
    asked = ASKED[kind, task.sweep]
    sides = {version: Side(peers[version], task) for version in asked}
    for side in sides.values():
        side.task.theirs(side.peer, {PARTS[task.sweep][0]: [[0, 0]]})  # to warm up
    rounds = ROUNDS[task.n_prompts, task.n_pos]
    if rounds > 1:
        task.ours()
    ours, rates, table = [], [], torch.zeros(())

    def others() -> None:
        rates.append(gemm_rate(task.model.cfg.d_model, size_of(task.model).d_mlp))
        for side in sides.values():
            side.turn()

    def run() -> None:
        nonlocal table
        table = task.ours()

    others()
    for _ in range(rounds):
        gc.collect()
        ours.append(seconds(run))
        others()

    mine = statistics.median(ours)
    alike = f", first {task.n_alike} alike" if task.n_alike else ""
    what = f"{kind} {task.sweep} {task.n_prompts}x{task.n_pos}{alike}"
    for version, side in sides.items():
        ratio = statistics.median(own / side.scaled(i) for i, own in enumerate(ours))
        theirs = statistics.median(side.scaled(i) for i in range(rounds))
        times = f"{1 / ratio:.1f}x faster: {mine:.2f} / {theirs:.1f} s"
        detail = f"{times}; {side.detail()}; differs by {side.difference(table):.0e} of the range"
        yield Figure(what, f"TL {version}", ratio, 1 / asked[version], detail)
    floors = [task.flops / statistics.mean(rates[i : i + 2]) for i in range(rounds)]
    ratio = statistics.median(own / least for own, least in zip(ours, floors, strict=True))
    rate = statistics.median(rates)
    detail = f"{mine:.2f} / {statistics.median(floors):.2f} s: {task.flops / 1e9:.0f} GFLOP at {rate / 1e9:.0f} GFLOP/s"
    yield Figure(what, "arithmetic floor", ratio, TIMES_THE_FLOOR, detail)


def whole_figures(kind: str, task: Task, peers: dict[str, Peer]) -> Iterator[Figure]:
    """Whether scaling cells up is fair: what a peer takes for its whole sweep, against what its cells say."""
    for version in ASKED[kind, task.sweep]:
        side = Side(peers[version], task)
        side.turn()
        whole = sum(task.theirs(peers[version], {f"get_act_patch_{task.sweep}": None})["seconds"])
        side.turn()
        scaled = side.scaled(0)
        yield Figure(
            f"{kind} {task.sweep} {task.n_prompts}x{task.n_pos}, scaled",
            f"TL {version}, whole sweep",
            scaled / whole,
            1.15,
            f"{scaled:.1f} / {whole:.1f} s",
        )


# ---- all -------------------------------------------------------------------------------------------------------------


def agreement_figures(peers: dict[str, Peer]) -> Iterator[Figure]:
    """The same weights give the same tables: the largest difference of any cell, of tiny models."""
    for kind in (GPT2, GROUPED):
        with tempfile.TemporaryDirectory() as directory:
            model = checkpoint(kind, Path(directory), tiny=True)
            for peer in peers.values():
                peer.ask("load", directory=directory)
            for sweep in PARTS:
                task = Task(model, sweep, 2, 5)
                table = task.ours().flatten()
                for version, peer in peers.items():
                    values = task.theirs(peer, {f"get_act_patch_{sweep}": None})["values"]
                    difference = (table - torch.tensor(values)).abs().max().item()
                    detail = f"{difference:.1e}; cells from {table.min():.2f} to {table.max():.2f}"
                    what = f"tiny {kind} {sweep}, largest |difference| / {AGREE:.0e}"
                    yield Figure(what, f"TL {version}", difference / AGREE, 1.0, detail)


def memory_figure(kind: str, directory: Path) -> Figure:
    """The most memory that a sweep holds at once, beyond the model and what a first tiny sweep leaves."""
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_PROBE, str(directory), str(BUDGET), str(THREADS)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if run.returncode:
        raise RuntimeError(f"the sweep in a process of its own failed:\n{run.stderr[-3000:]}")
    used = json.loads(run.stdout.splitlines()[-1])
    asked = f"a budget of {BUDGET / 1e6:.0f} MB"
    return Figure(f"{kind} resid_pre 1x64: peak", asked, used["bytes"] / BUDGET, 1.0, f"{used['bytes'] / 1e6:.0f} MB")


def sweep_tables(names: list[str]) -> Iterator[tuple[str, list[Figure]]]:
    """Titles and figures, of the sizes that are named or of all; a table comes when it is measured."""
    sizes = [size for size in ROUNDS if not names or f"{size[0]}x{size[1]}" in names]
    if len(sizes) < len(names):
        raise ValueError(f"unknown size in {names}; there are {', '.join(f'{a}x{b}' for a, b in ROUNDS)}")
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    peers = {version: Peer(version) for version in (OLD, NEW)}
    try:
        yield "Sweeps: the tables agree, tiny models", list(agreement_figures(peers))
        for kind in (GPT2, GROUPED):
            with tempfile.TemporaryDirectory() as directory:
                model = checkpoint(kind, Path(directory), tiny=False)
                for peer in peers.values():
                    peer.ask("load", directory=directory)
                if kind == GPT2:
                    yield "Sweeps: memory", [memory_figure(kind, Path(directory))]
            if kind == GPT2:
                task = Task(model, "resid_pre", 1, 16)
                yield "Sweeps: cells scaled up, against a whole sweep", list(whole_figures(kind, task, peers))
            for size in sizes:
                # prompts without anything in common, and, as they mostly are, such as differ from the middle on
                sweeps = [(sweep, n_alike) for n_alike in (0, size[1] // 2) for of, sweep in ASKED if of == kind]
                tasks = [Task(model, sweep, *size, n_alike) for sweep, n_alike in sweeps]
                figures = [figure for task in tasks for figure in task_figures(kind, task, peers)]
                yield f"Sweeps: {kind}, {size[0]} x {size[1]} tokens, fp32, {THREADS} threads", figures
    finally:
        for peer in peers.values():
            peer.close()
        torch.set_num_threads(threads)
