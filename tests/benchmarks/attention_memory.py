"""Peak memory of what reads attention over a long prompt, in a process of its own, against the whole patterns of its model."""

import json
import subprocess
import sys

from tests.benchmarks.timing import Figure

MIB = 1 << 20
N_LAYERS, N_HEADS, LENGTH = 2, 8, 8192
PROBE = """
import json, sys
from pathlib import Path
import torch
from hooked_lm import HookedTransformer
from hooked_lm.analysis import attention_statistics, head_scores

def resident(which):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which + ":")]
    return int(line.split()[1]) * 1024

what, n_layers, n_heads, length = sys.argv[1], *map(int, sys.argv[2:])
fields = {"n_layers": n_layers, "d_model": 128, "n_heads": n_heads, "d_head": 16, "d_vocab": 5000, "n_ctx": length}
caps = {"attn_scores_soft_cap": 20.0} if what == "capped" else {}
model = HookedTransformer({**fields, **caps, "act_fn": "gelu", "device": "cpu", "seed": 0}).eval()
tokens = torch.randint(5000, (1, length // 2)).repeat(1, 2)
run = {
    "rows": lambda: model.attention_rows(tokens),
    "scores": lambda: head_scores(model, tokens),
    "statistics": lambda: attention_statistics(model, tokens),
    "capped": lambda: model(tokens, stop_at_layer=n_layers),
}[what]
with torch.no_grad():
    model(tokens[:, :64])
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = resident("VmRSS")
    run()
print(json.dumps(resident("VmHWM") - before))
"""
MEASURED = {
    "rows": "the last rows of all patterns",
    "scores": "scores of heads",
    "statistics": "statistics of attention",
    "capped": "a run with a soft cap on the scores, for which there is no fused kernel",
}


def probe(what: str, length: int = LENGTH) -> int:
    """The bytes by which the peak of a fresh process exceeds its memory before."""
    arguments = map(str, (what, N_LAYERS, N_HEADS, length))
    run = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def attention_memory_figures() -> list[Figure]:
    """The peaks, against the bytes of the patterns of one layer."""
    one_layer = 4 * N_HEADS * LENGTH**2
    figures = []
    for name, what in MEASURED.items():
        peak = probe(name)
        detail = f"{peak / MIB:.0f} of {one_layer / MIB:.0f} MiB"
        figures.append(
            Figure(f"peak memory, {LENGTH} tokens: {what}", "patterns of a layer", peak / one_layer, 0.15, detail)
        )
    return figures
