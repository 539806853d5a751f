"""Time and memory of attribution graphs against the length of the prompt: `python -m tests.benchmarks.graphs [LENGTH ...]`.

A model of the size of GPT-2 small with random weights; random transcoders of 4096 features, TopK with 32, and neurons. Each graph
in a fresh process: seconds, the peak by which its memory exceeds that before, and the largest error of its sums.
"""

import json
import subprocess
import sys

LENGTHS, NODES, MIB = (16, 64, 256), 500, 1 << 20
PROBE = """
import json, sys, time
from pathlib import Path
import torch
from hooked_lm import HookedTransformer
from hooked_lm.analysis import attribution_graph
from hooked_lm.interventions.dictionaries import TopK, TranscoderSet

def resident(which):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which + ":")]
    return int(line.split()[1]) * 1024

unit, length, nodes, memory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
sizes = {"n_layers": 12, "d_model": 768, "n_heads": 12, "d_head": 64, "d_mlp": 3072, "d_vocab": 5000, "n_ctx": 1024}
model = HookedTransformer({**sizes, "act_fn": "gelu_new", "normalization_type": "LN", "seed": 0}).eval()
found = None
if unit == "features":
    sites = [(f"blocks.{i}.hook_mlp_in", f"blocks.{i}.hook_mlp_out") for i in range(12)]
    found = TranscoderSet(
        TopK.Config(d_in=768, d_sae=4096, k=32, subtract_b_dec=False, hook_point=a, hook_point_out=b).build(i)
        for i, (a, b) in enumerate(sites)
    ).eval()
options = {"check": 0, "control": None, "progress": False}
attribution_graph(model, torch.arange(4)[None], found, max_nodes=4, **options)
tokens = torch.randint(5000, (1, length), generator=torch.Generator().manual_seed(0))
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
before, start = resident("VmRSS"), time.perf_counter()
graph = attribution_graph(model, tokens, found, max_nodes=nodes, max_memory=memory, **options)
seconds = time.perf_counter() - start
print(json.dumps([seconds, resident("VmHWM") - before, graph.completeness["sums"], len(graph.features)]))
"""


def probe(unit: str, length: int, nodes: int = NODES, memory: str = "2GiB") -> tuple[float, int, float, int] | None:
    """Seconds, bytes of the peak, the error of sums and the number of features of a graph; None if it is refused."""
    arguments = map(str, (unit, length, nodes, memory))
    run = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        return None
    seconds, peak, error, n = json.loads(run.stdout.splitlines()[-1])
    return seconds, peak, error, n


def main(lengths: list[int]) -> None:
    """Prints a row for each kind of node, length and memory."""
    print(f"nodes | tokens | max_memory | {NODES} nodes, s | peak, MiB | error of sums")
    for unit in ("features", "neurons"):
        for length in lengths or LENGTHS:
            for memory in ("2GiB", "512MiB"):
                found = probe(unit, length, memory=memory)
                if found is None:
                    print(unit, length, memory, "refused", sep=" | ", flush=True)
                    continue
                seconds, peak, error, _ = found
                print(
                    unit, length, memory, f"{seconds:.1f}", f"{peak / MIB:.0f}", f"{error:.0e}", sep=" | ", flush=True
                )


if __name__ == "__main__":
    main([int(length) for length in sys.argv[1:]])
