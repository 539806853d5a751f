"""Prefixes and prompts in chunks: time and peak memory against reading the whole prompt at once."""

import json
import math
import subprocess
import sys
from typing import Any

import torch

from hooked_lm import HookedTransformer
from tests.benchmarks.timing import Figure, compare

MIB = 1 << 20
LENGTHS, CHUNK, N_NEW = (512, 4096, 16384), 512, 16
N_SAMPLES, N_TOKENS, SIZE = 16, 8, "32MB"
FIELDS: dict[str, Any] = {
    "n_layers": 4, "d_model": 256, "n_heads": 4, "d_head": 64, "d_vocab": 1000, "n_ctx": 20000, "act_fn": "gelu",
    "positional_embedding_type": "rotary", "device": "cpu", "seed": 0,
}  # fmt: skip
PROBE = """
import json, sys
from pathlib import Path
import torch
from hooked_lm import HookedTransformer

def resident(which):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which + ":")]
    return int(line.split()[1]) * 1024

fields, length, options = map(json.loads, sys.argv[1:])
model = HookedTransformer(fields).eval()
tokens = torch.randint(1000, (1, length))
with torch.no_grad():
    model.run_with_cache(tokens[:, :64], names_filter="z3", return_type=None, **options)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = resident("VmRSS")
    model.run_with_cache(tokens, names_filter="z3", return_type=None, **options)
print(json.dumps(resident("VmHWM") - before))
"""


def peak(length: int, **options: int | str) -> int:
    """Bytes at the peak of a run that caches one site, beside the model, in a process of its own."""
    arguments = map(json.dumps, (FIELDS, length, options))
    run = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@torch.no_grad()
def figures_of(model: HookedTransformer, n: int) -> list[Figure]:
    """For one length: what follows a prefix against the whole prompt, and a run in chunks against one at once."""
    tokens, run = torch.randint(1000, (1, n + N_NEW)), {"names_filter": "z3", "return_type": None}
    after, pairs = model.prefix(tokens[:, :n], chunk=CHUNK) + tokens[:, n:], 3 if n > CHUNK else 15
    ours, theirs = peak(n, chunk=CHUNK), peak(n)
    detail = f"{ours / MIB:.0f} / {theirs / MIB:.0f} MiB"
    return [
        compare(
            f"{N_NEW} tokens after a prefix of {n}",
            lambda: model(after),
            "the whole prompt",
            lambda: model(tokens),
            0.5,
            pairs,
        ),
        compare(
            f"{n} tokens in chunks of {CHUNK}, one site",
            lambda: model.run_with_cache(tokens[:, :n], chunk=CHUNK, **run),
            "at once",
            lambda: model.run_with_cache(tokens[:, :n], **run),
            1.3,
            pairs,
        ),
        Figure(
            f"peak memory of {n} tokens in chunks", "at once", ours / theirs, 1.0 if n > CHUNK else math.inf, detail
        ),
    ]


@torch.no_grad()
def rollout_figure(model: HookedTransformer, n: int) -> Figure:
    """Samples of one prompt against as many copies of it."""
    tokens, how = torch.randint(1000, (1, n)), {"stop_at_eos": False}
    return compare(
        f"{N_SAMPLES} rollouts of {N_TOKENS} tokens after {n}",
        lambda: model.rollouts(tokens, N_SAMPLES, N_TOKENS, seed=0, progress=False, **how),
        "generate from copies of the prompt",
        lambda: model.generate(tokens.expand(N_SAMPLES, -1), N_TOKENS, seed=0, verbose=False, **how),
        0.5,
        3,
    )


def memory_figure(n: int) -> Figure:
    """Chunks of as many tokens as fit, beside keys, values and what is kept, against the memory that they were given."""
    of_vectors = n * FIELDS["d_model"] * 4
    n_kept = (2 * FIELDS["n_layers"] + 2) * of_vectors  # keys and values, and the site in pieces and as one tensor
    ours = peak(n, chunk=SIZE) - n_kept
    return Figure(
        f"memory of a pass, {n} tokens",
        f'chunk="{SIZE}"',
        ours / 32e6,
        1.25,  # of a process, which holds a little more than what is allocated
        f"{ours / MIB:.0f} MiB beside {n_kept / MIB:.0f} kept",
    )


def prefix_figures() -> list[Figure]:
    """Of each length, of rollouts, and of chunks by memory."""
    model = HookedTransformer(FIELDS).eval()
    of_lengths = [figure for n in LENGTHS for figure in figures_of(model, n)]
    return [*of_lengths, rollout_figure(model, LENGTHS[1]), *map(memory_figure, LENGTHS[1:])]
