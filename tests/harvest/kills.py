"""Kills a harvest 30 times at random moments, and compares its files with those of a harvest without interruption.

Prints a line for each kill: the shards with a record before and after it. A program of its own, because it forks.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from hooked_lm import HookedTransformer
from hooked_lm.demo.corpus import training_text
from hooked_lm.harvest import ActivationStore, harvest

N_KILLS = 30
SITES = ["blocks.0.hook_mlp_out", "blocks.1.attn.hook_z"]


def run(model: HookedTransformer, texts: list[str], directory: Path) -> ActivationStore:
    return harvest(model, texts, SITES, directory, documents_per_shard=4, batch_size=2, progress=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("shard-*"))}


def n_records(directory: Path) -> int:
    return len(list(directory.glob("*/shard-*.json")))


def wait(directory: Path, n: int) -> None:
    """Waits until a folder has a number of records: on a slow machine a time alone would kill every child too early."""
    while n_records(directory) < n:
        time.sleep(0.001)


def main(directory: Path) -> None:
    torch.set_num_threads(1)
    model = HookedTransformer.from_pretrained("demo")
    texts = [training_text(random.Random(seed)) for seed in range(160)]
    whole = run(model, texts, directory / "whole")
    rng, kills, rounds = random.Random(0), 0, 0
    while kills < N_KILLS:
        here = directory / f"killed-{rounds}"
        before = n_records(here)
        child = os.fork()
        if child == 0:
            run(model, texts, here)
            os._exit(0)
        wait(here, min(before + rng.randint(0, 9), len(whole.shards)))
        time.sleep(rng.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
            kills += 1
            print(f"kill {kills}: {before} shards before, {n_records(here)} after")
        if n_records(here) == len(whole.shards):
            rounds += 1
    for here in sorted(directory.glob("killed-*")):
        store = run(model, texts, here)
        store.verify()
        assert contents(store.path) == contents(whole.path), f"{here} has other bytes"
        assert not list(store.path.glob("*unfinished*"))
    print(f"{rounds + 1} harvests of {len(whole.shards)} shards: all bytes equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
