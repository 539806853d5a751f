"""Gradients of everything inside a random GPT-2-small-sized model, against Hugging Face's training step; circuits on the bundled
model against the clock.

python -m tests.benchmarks attribution
"""

import json
import subprocess
import sys
import time

import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis import attribute, attribute_edges, circuits, metrics
from hooked_lm.analysis.attribution.graph import Graph
from hooked_lm.demo import experiment
from tests.benchmarks.peers import ROOT, THREADS
from tests.benchmarks.running import models
from tests.benchmarks.timing import Figure, compare

SIZES = {(1, 16): (0.50, 15), (4, 128): (0.65, 5)}  # prompts, tokens -> what is asked of all nodes, pairs
NODES = ["resid_pre", "attn_out", "mlp_out"]
ACDC_SECONDS = 60.0

EDGES_PROBE = """
import ctypes, sys
import torch
from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis import attribute_edges, metrics
from hooked_lm.analysis.attribution.gradients import gradients
from hooked_lm.analysis.attribution.graph import Graph

what, batch, n_pos, threads = sys.argv[1], *map(int, sys.argv[2:5])
torch.set_num_threads(threads)
cfg = dict(n_layers=12, d_model=768, n_heads=12, d_head=64, d_mlp=3072, d_vocab=50257, n_ctx=1024, act_fn="gelu_new", seed=0)
model = HookedTransformer(HookedTransformerConfig(**cfg))
clean, corrupted = torch.randint(50257, (2, batch, n_pos), generator=torch.Generator().manual_seed(0))
metric = metrics.logit_difference(11, 7)
torch.set_grad_enabled(False)

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name):
            return int(line.split()[1]) * 1024

gradients(model, corrupted[:1, :4], ["blocks.0.hook_resid_pre"], metric)
ctypes.CDLL(None).malloc_trim(0)
before = status("VmRSS:")
open("/proc/self/clear_refs", "w").write("5")
if what == "edges":
    attribute_edges(model, corrupted, clean, metric=metric, check=False)
else:  # the textbook's way: what all writers write in both runs, and the gradients of all that is read, at once
    graph = Graph.of(model)
    read = gradients(model, corrupted, list(dict.fromkeys(node.site for node in graph.readers)), metric).gradients
    sites = list(dict.fromkeys(node.site for node in graph.writers))
    written = [model.run_with_cache(tokens, names_filter=sites, return_type=None)[1] for tokens in (clean, corrupted)]
    scores = torch.zeros(len(graph.writers), len(graph.readers))
    for i, writer in enumerate(graph.writers):
        difference = writer.of(written[0][writer.site]) - writer.of(written[1][writer.site])
        for j, reader in enumerate(graph.readers):
            if graph.is_edge[i, j]:
                scores[i, j] = (difference * reader.of(read[reader.site])).sum()
print(status("VmHWM:") - before)
"""


def attribution_figures() -> list[Figure]:
    """All nodes and all edges, in turn with Hugging Face's forward and backward pass."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        ours, theirs, _ = models()
        figures = [figure for size in SIZES for figure in _figures(ours, theirs, *size)]
        return [*figures, *(_memory_figure(*size) for size in SIZES), *_acdc_figures()]
    finally:
        torch.set_num_threads(threads)


def _figures(ours: HookedTransformer, theirs: torch.nn.Module, batch: int, n_pos: int) -> list[Figure]:
    clean, corrupted = torch.randint(ours.cfg.d_vocab, (2, batch, n_pos), generator=torch.Generator().manual_seed(0))
    metric = metrics.logit_difference(11, 7)
    _, cache = ours.run_with_cache(clean, names_filter=[(name, layer) for name in NODES for layer in range(12)])
    bound, pairs = SIZES[batch, n_pos]

    def step() -> None:
        logits = theirs(corrupted).logits
        (logits[:, -1, 11] - logits[:, -1, 7]).sum().backward()
        theirs.zero_grad()

    def nodes(source: object) -> object:
        common = {"metric": metric, "sites": NODES, "check": False}
        if isinstance(source, Tensor):
            return attribute(ours, corrupted, source, **common)
        return attribute(ours, corrupted, replace_with=source, **common)

    def edges() -> object:
        return attribute_edges(ours, corrupted, clean, metric=metric, check=False)

    size, against = f"{batch}x{n_pos}", "HF forward + backward, weights too"
    return [
        compare(f"all nodes {size}, values of the clean run given", lambda: nodes(cache), against, step, bound, pairs),
        compare(f"all nodes {size}, with the clean run", lambda: nodes(clean), against, step, bound, pairs),
        compare(f"all {Graph.of(ours).n_edges:,} edges {size}", edges, against, step, 2.0, pairs),
    ]


def _memory_figure(batch: int, n_pos: int) -> Figure:
    """What attributing to all edges holds, against the same with what all nodes write and read held at once."""

    def peak(what: str) -> int:
        command = [sys.executable, "-c", EDGES_PROBE, what, *map(str, (batch, n_pos, THREADS))]
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
        return int(json.loads(run.stdout.splitlines()[-1]))

    used, everything = peak("edges"), peak("all at once")
    detail = f"{used / 1e6:.0f} / {everything / 1e6:.0f} MB"
    return Figure(
        f"all edges {batch}x{n_pos}: memory", "all writers and readers at once", used / everything, 0.25, detail
    )


def _acdc_figures() -> list[Figure]:
    """ACDC on the bundled model's indirect objects."""
    model = HookedTransformer.from_pretrained("demo")
    pairs = experiment.prompt_pairs(8)
    right, wrong = (torch.tensor([model.to_single_token(t) for t in some]) for some in _answers(pairs))
    start = time.perf_counter()
    circuit = circuits.discover(
        model,
        [pair.corrupted for pair in pairs],
        [pair.clean for pair in pairs],
        metric=metrics.logit_difference(right, wrong),
        method="acdc",
        threshold=0.02,
    )
    taken = time.perf_counter() - start
    detail = f"{taken:.1f} s, {circuit.n_edges} of {circuit.graph.n_edges} edges kept"
    return [Figure("ACDC, bundled model, 8 pairs", f"{ACDC_SECONDS:.0f} s", taken / ACDC_SECONDS, 1.0, detail)]


def _answers(pairs: list[experiment.PromptPair]) -> tuple[list[str], list[str]]:
    return [pair.answer for pair in pairs], [pair.wrong_answer for pair in pairs]
