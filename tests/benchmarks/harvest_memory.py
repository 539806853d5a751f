"""The memory of a harvest beside the model and a batch: at its peak, in a process of its own, for shards of several sizes."""

import json
import subprocess
import sys
import tempfile

from tests.benchmarks.timing import Figure

MIB = 1 << 20
SIZES = (64 * MIB, 256 * MIB)  # of a shard
LONG, CHUNK = 4096, 256  # tokens
PROBE = """
import json, sys
from pathlib import Path
import torch
from hooked_lm import HookedTransformer
from hooked_lm.harvest import harvest

def resident(which):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which + ":")]
    return int(line.split()[1]) * 1024

directory, shard_bytes, batch, context = sys.argv[1], *map(int, sys.argv[2:5])
options = json.loads(sys.argv[5])
fields = {"n_layers": 2, "d_model": 768, "n_heads": 12, "d_head": 64, "d_vocab": 1000, "n_ctx": context, "act_fn": "gelu"}
model = HookedTransformer({**fields, "device": "cpu", "seed": 0}).eval()
sites = ["hook_embed", "blocks.*.attn.hook_z", "blocks.*.hook_resid_post", "blocks.*.mlp.hook_post"]
row = 4 * context * (768 + 2 * (768 + 768 + 3072))  # bytes of a document
tokens = torch.randint(1000, (5 * shard_bytes // row // 2, context))  # two and a half shards
with torch.no_grad():
    model.run_with_cache(tokens[:batch, : options.get("chunk", context)], names_filter=sites, return_type=None)
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
before = resident("VmRSS")
store = harvest(model, tokens, sites, directory, shard_size=shard_bytes, batch_size=batch, progress=False, **options)
growth = resident("VmHWM") - before
whole = max(store.file_of(shard).stat().st_size for shard in store.shards)
print(json.dumps({"growth": growth, "shard": whole, "shards": len(store.shards), "batch": batch * row}))
"""


def probe(shard_bytes: int, batch: int = 8, context: int = 128, **options: object) -> dict[str, int]:
    """Harvests random rows in a fresh process: bytes of the growth at the peak, and of a shard's file."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = map(str, (directory, shard_bytes, batch, context, json.dumps(options)))
        run = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def memory_figures() -> list[Figure]:
    """The peak of harvests with shards of several sizes, against the bytes of two shards."""
    figures = []
    for size in SIZES:
        found = probe(size)
        growth, shard, batch = (found[name] / MIB for name in ("growth", "shard", "batch"))
        detail = f"{growth:.0f} MiB, {found['shards']} shards of {shard:.0f} MiB, a batch {batch:.0f} MiB"
        what = f"peak memory of a harvest, shards of {size // MIB} MiB"
        figures.append(Figure(what, "two shards", growth / (2 * shard), 1.0, detail))
    return [*figures, chunk_figure()]


def chunk_figure() -> Figure:
    """The peak for long documents of which the last vectors are kept, in chunks against at once."""
    ours, theirs = (
        probe(64 * MIB, 1, LONG, positions=-1, **options)["growth"] / MIB for options in ({"chunk": CHUNK}, {})
    )
    what, detail = f"peak memory, documents of {LONG:,} tokens, chunk={CHUNK}", f"{ours:.0f} / {theirs:.0f} MiB"
    return Figure(what, "at once", ours / theirs, 0.5, detail)
