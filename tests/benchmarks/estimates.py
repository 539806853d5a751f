"""Estimates of memory against the peak of the run, in a process of its own.

The estimate counts what tensors take. What the process holds is also a matter of the C library, which keeps freed memory: so the
resident peak is measured with `MALLOC_MMAP_THRESHOLD_`, which gives large blocks back at once.
"""

import json
import os
import subprocess
import sys

from tests.benchmarks.timing import Figure

PROBE = """
import json, sys, warnings
from pathlib import Path
import torch
from hooked_lm import HookedTransformer, analysis, patching
from tests.benchmarks.interventions import peak_bytes

def resident(which):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which + ":")]
    return int(line.split()[1]) * 1024

warnings.simplefilter("ignore")
kind, what, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
fields = {"n_layers": 4, "d_model": 256, "n_heads": 8, "d_head": 32, "d_vocab": 10000, "n_ctx": 8192, "act_fn": "gelu_new"}
if kind == "grouped":
    fields |= {"n_key_value_heads": 2, "gated_mlp": True, "act_fn": "silu", "d_mlp": 704, "rotary_dim": 32}
    fields |= {"positional_embedding_type": "rotary", "normalization_type": "RMS"}
model = HookedTransformer({**fields, "device": "cpu", "seed": 0}).eval()
rows = max(1, 2048 // n)
corrupted = torch.randint(10000, (rows, n), generator=torch.Generator().manual_seed(0))
clean = corrupted.clone()
clean[:, n // 2] = 7
answers = {"answers": ([1] * rows, [3] * rows), "by": "head", "progress": False}
prompts, options, run = {
    "forward": ((corrupted,), {}, model),
    "cache": ((corrupted,), {"names_filter": "*.hook_resid_post"}, model.run_with_cache),
    "generate": ((corrupted,), {"max_new_tokens": 4, "stop_at_eos": False, "verbose": False}, model.generate),
    "sweep": ((corrupted, clean), {**answers, "layers": [1, 2]}, lambda *p, **o: patching.sweep(model, *p, **o)),
    "attribution": ((corrupted, clean), {**answers, "check": False}, lambda *p, **o: analysis.attribute(model, *p, **o)),
}[what]
given = {name: value for name, value in options.items() if name not in ("progress", "verbose")}
with torch.set_grad_enabled(what == "attribution"):
    estimate = model.estimate(*prompts, what=what, **given).bytes
    model(corrupted[:1, :64])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = resident("VmRSS")
    run(*prompts, **options)
    process = resident("VmHWM") - before
    allocated = peak_bytes(lambda: run(*prompts, **options))
print(json.dumps([estimate, allocated, process]))
"""
RUNS = [
    *(
        (kind, what, 512)
        for kind in ("gpt2", "grouped")
        for what in ("forward", "cache", "generate", "sweep", "attribution")
    ),
    *(("grouped", what, 8000) for what in ("forward", "cache", "generate")),
]
MB = 1e6


def estimate_figures() -> list[Figure]:
    """How far the estimate and the peak are apart: the larger over the smaller, for what is allocated and for the process."""
    figures = []
    for kind, what, length in RUNS:
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
        command = [sys.executable, "-c", PROBE, kind, what, str(length)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        estimate, *peaks = json.loads(run.stdout.splitlines()[-1])
        for against, peak in zip(("allocated", "resident"), peaks, strict=True):
            ratio, detail = max(estimate / peak, peak / estimate), f"{estimate / MB:.0f} of {peak / MB:.0f} MB"
            figures.append(Figure(f"estimate of {what}, {kind}, {length} tokens", against, ratio, 1.15, detail))
    return figures
