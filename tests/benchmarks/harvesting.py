"""Harvests: against the bare forward passes that they need, their memory, and shuffled against sequential reading."""

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from hooked_lm.harvest import ActivationStore
from hooked_lm.harvest.documents import documents_of
from hooked_lm.harvest.job import HarvestJob, job_of
from hooked_lm.harvest.rows import RowMaker
from tests.benchmarks.harvest_memory import memory_figures
from tests.benchmarks.running import models
from tests.benchmarks.timing import Figure, compare

SITE, STOP = "blocks.5.hook_resid_post", 6
ROWS, CONTEXT, BATCH = 32, 128, 8


@torch.no_grad()
def harvest_figures() -> list[Figure]:
    """One site and six of a random GPT-2-small-sized model, without the plan, which is made once; then reading."""
    ours = models()[0]
    tokens = torch.randint(0, 50257, (ROWS, CONTEXT), generator=torch.Generator().manual_seed(0))

    def bare() -> None:
        for batch in tokens.split(BATCH):
            ours(batch, stop_at_layer=STOP)

    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for what, sites, dtype in (
            ("one site, float32", SITE, torch.float32),
            ("one site, int8", SITE, torch.int8),
            ("six sites, float32", [f"blocks.{i}.hook_resid_post" for i in range(STOP)], torch.float32),
        ):
            job = job_of(
                ours, documents_of(tokens), sites, folder, RowMaker(ours, CONTEXT), dtype=dtype, reduce=None,
                batch_size=BATCH, shard_bytes=1 << 29, documents_per_shard=ROWS // 2,
            )  # fmt: skip
            figures.append(compare(f"harvest, {what}", partial(again, job), "forward to the layer", bare, 1 / 0.9, 9))
        return [*figures, *memory_figures(), *reading_figures(folder)]


def again(job: HarvestJob) -> None:
    """Computes all shards of a harvest anew."""
    for path in job.folder.glob("shard-*"):
        path.unlink()
    assert job.plan.n_shards is not None
    job.compute(range(job.plan.n_shards), progress=False)


def reading_figures(folder: str) -> list[Figure]:
    """Every vector of a store of 512 MiB once, in a shuffled order against its own."""
    from hooked_lm import HookedTransformer
    from hooked_lm.harvest import harvest

    model = HookedTransformer.from_pretrained("demo")
    tokens = torch.randint(0, model.cfg.d_vocab, (4096, 64), generator=torch.Generator().manual_seed(0))
    sites = ["hook_embed", "blocks.*.hook_resid_post", "blocks.0.hook_mlp_out"]
    store = harvest(model, tokens, sites, Path(folder) / "read", shard_size="64MiB", batch_size=256, progress=False)
    figures = []
    for state, forget in (("from the page cache", lambda store: None), ("cold", drop_from_page_cache)):
        shuffled, sequential = partial(read_shuffled, store, forget), partial(read_in_order, store, forget)
        what = f"shuffled reading {state}, {sum(of.nbytes for of in _columns(store)) / 2**20:.0f} MiB"
        figures.append(compare(what, shuffled, "sequential reading", sequential, 2.0, 5))
    return figures


def _columns(store: ActivationStore) -> list[torch.Tensor]:
    return [torch.empty(store[site].shape, dtype=store[site].dtype, device="meta") for site in store.sites]


def read_in_order(store: ActivationStore, forget: Callable[[ActivationStore], None]) -> None:
    """Reads every vector of each site in its order, 64 MB at once."""
    forget(store)
    for site in store.sites:
        for start in range(0, len(store), 1 << 17):
            store[site][start : start + (1 << 17)].flatten(1).clone()


def read_shuffled(store: ActivationStore, forget: Callable[[ActivationStore], None]) -> None:
    """Reads every vector of each site once, in a shuffled order."""
    forget(store)
    for site in store.sites:
        stream = store.stream(site, buffer="64MB")
        for number in range(stream.buffers_per_epoch):
            stream.fill(number)


def drop_from_page_cache(store: ActivationStore) -> None:
    """Makes the next reading of the store's files come from the disk."""
    store._maps.clear()
    for path in store.path.glob("*.safetensors"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
