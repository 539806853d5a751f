"""What full-tensor and local hooks cost in a model that is split over two processes of gloo."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.parallel import local, local_values, tensor_parallel
from tests.benchmarks.timing import Figure, compare

WORLD, PAIRS = 2, 15
FIELDS: dict[str, Any] = {
    "n_layers": 6, "d_model": 768, "n_heads": 12, "d_head": 64, "d_vocab": 5000, "n_ctx": 128, "act_fn": "gelu_new",
    "device": "cpu", "seed": 0,
}  # fmt: skip
SITES = "blocks.*.attn.hook_z"


def splitting_figures() -> list[Figure]:
    """Runs of 6 layers of width 768 with caches and hooks, against the run of the split model without them."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(measure, (folder,), nprocs=WORLD)
        return [Figure(**figure) for figure in json.loads(Path(folder, "figures.json").read_text())]


@torch.no_grad()
def measure(rank: int, folder: str) -> None:
    """One of the processes, with one thread: both run the same in turn, the first writes its figures."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(minutes=5))
    model = tensor_parallel(HookedTransformer(FIELDS).eval())
    tokens = torch.randint(FIELDS["d_vocab"], (2, 128), generator=torch.Generator().manual_seed(0))

    def halve(z: Tensor, hook: object) -> Tensor:
        return z / 2

    def cache() -> None:
        model.run_with_cache(tokens)

    def local_cache() -> None:
        with local_values():
            model.run_with_cache(tokens)

    runs: dict[str, Callable[[], object]] = {
        "cache of all sites, full tensors": cache,
        "cache of all sites, local": local_cache,
        "a full hook at every hook_z": lambda: model.run_with_hooks(tokens, fwd_hooks=[(SITES, halve)]),
        "a local hook at every hook_z": lambda: model.run_with_hooks(tokens, fwd_hooks=[local((SITES, halve))]),
    }
    found = [
        compare(what, run, "split run without", lambda: model(tokens), float("inf"), PAIRS)
        for what, run in runs.items()
    ]
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps([asdict(figure) for figure in found]))
    dist.destroy_process_group()
