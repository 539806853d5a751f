"""Time and memory of loading and importing, each in a process of its own."""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.benchmarks.timing import Figure

PROBE = """
import gc, json, sys, threading, time
import torch, transformers
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
from hooked_lm import HookedTransformer

def anonymous():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024

path, small, code, measured = sys.argv[1:]
for path_now in (small, path):   # the small model first: what loading needs once is then there
    peak = before = anonymous()
    done = measured == "seconds"  # reading the memory takes time
    def watch():
        global peak
        while not done:
            peak = max(peak, anonymous())
            time.sleep(0.002)
    watcher = threading.Thread(target=watch)
    watcher.start()
    gc.collect()   # of what the imports left: it falls due during either library's load, and takes longer than this
    start = time.perf_counter()
    model = eval(code, {**globals(), "path": path_now})
    seconds = time.perf_counter() - start
    done = True
    watcher.join()
print(json.dumps({"seconds": seconds, "after": anonymous() - before, "peak": peak - before}))
"""

HF = "AutoModelForCausalLM.from_pretrained(path)"
OURS = "HookedTransformer.from_pretrained_no_processing(path)"
FOLDED = "HookedTransformer.from_pretrained(path)"
HALF = "HookedTransformer.from_pretrained_no_processing(path, dtype=torch.bfloat16)"
COPIED = "HookedTransformer.from_pretrained_no_processing(path, mmap=False)"
KEPT = "HookedTransformer.from_pretrained_no_processing(path, dtype=torch.bfloat16, mmap=False, quantize='keep')"


def probe(path: Path, small: Path, code: str, measured: str) -> float:
    """Load in a fresh process: "seconds", or bytes of anonymous memory "after" it or at its "peak"."""
    command = [sys.executable, "-c", PROBE, str(path), str(small), code, measured]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])[measured]


def write_fp8(path: Path, d_model: int, n_layers: int) -> int:
    """Writes a Llama whose projections are in fp8, the rest in bf16; returns the bytes of its tensors."""
    sizes = {"hidden_size": d_model, "intermediate_size": 3 * d_model, "num_hidden_layers": n_layers, "vocab_size": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)).bfloat16().save_pretrained(
        path
    )
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = torch.ones([-(-size // 128) for size in tensors[name].shape])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    return sum(tensor.nbytes for tensor in tensors.values())


def cpu_seconds(*arguments: str) -> float:
    """What Python takes for these arguments, in one thread."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["OMP_NUM_THREADS"] = "1"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def loading_figures() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        path, small, sharded = Path(directory, "model"), Path(directory, "small"), Path(directory, "sharded")
        model = GPT2LMHeadModel(GPT2Config())
        model.save_pretrained(path)
        model.save_pretrained(sharded, max_shard_size="60MB")
        GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=50)).save_pretrained(small)
        size = Path(path, "model.safetensors").stat().st_size
        pairs = [[probe(path, small, code, "seconds") for code in (OURS, HF)] for _ in range(9)]
        ratio = statistics.median(ours / hf for ours, hf in pairs)
        mine, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        untied = size + 50257 * 768 * 4  # folding gives the unembedding a matrix of its own
        n_files = len(list(sharded.glob("*.safetensors")))
        memory = [
            ("load, file mapped: anonymous memory", path, OURS, "after", size, 0.1),
            ("load and fold: peak", path, FOLDED, "peak", untied, 1.15),
            ("load in bf16: peak", path, HALF, "peak", size // 2, 1.15),
            ("load with mmap=False: peak", path, COPIED, "peak", size, 1.15),
            (f"load {n_files} files in bf16: peak", sharded, HALF, "peak", size // 2, 1.15),
            (f"load {n_files} files with mmap=False: peak", sharded, COPIED, "peak", size, 1.15),
        ]
        figures = [Figure("load", "HF", ratio, 0.3, f"{mine * 1e3:.0f} / {theirs * 1e3:.0f} ms, 9 pairs")]
        for what, folder, code, key, bytes_of_model, bound in memory:
            used = probe(folder, small, code, key)
            detail = f"{used / 1e6:.0f} / {bytes_of_model / 1e6:.0f} MB"
            figures.append(Figure(what, "the model's bytes", used / bytes_of_model, bound, detail))
        return [*figures, kept_figure(Path(directory))]


def kept_figure(directory: Path) -> Figure:
    """The memory of a quantised checkpoint whose weights stay as they are, to the bytes of its tensors."""
    write_fp8(directory / "small-fp8", 128, 1)
    n_bytes = write_fp8(directory / "fp8", 1024, 8)
    used = probe(directory / "fp8", directory / "small-fp8", KEPT, "after")
    detail = f"{used / 1e6:.0f} / {n_bytes / 1e6:.0f} MB"
    return Figure('load fp8 with quantize="keep": memory', "the tensors' bytes", used / n_bytes, 1.15, detail)


def import_figures() -> list[Figure]:
    with tempfile.TemporaryDirectory() as directory:
        commands = (
            ("-c", "from hooked_lm import HookedTransformer"),
            ("-m", "hooked_lm", "demo", "--output", f"{directory}/demo.html"),
            ("-c", "import torch"),
        )
        for command in commands:
            cpu_seconds(*command)  # compiles, as the first run of an installed package does
        runs = [[cpu_seconds(*command) for command in commands] for _ in range(7)]
    model, demo, other = (statistics.median(column) for column in zip(*runs, strict=True))
    ratio = statistics.median(ours / torch_alone for ours, _, torch_alone in runs)
    share = statistics.median(ours / (2.5 * torch_alone + 2) for _, ours, torch_alone in runs)
    detail = f"{model:.2f} / {other:.2f} s of CPU time, 7 pairs"
    return [
        Figure("import HookedTransformer", "import torch", ratio, 1.3, detail),
        Figure("hooked-lm demo", "2.5 x import torch + 2 s", share, 1.0, f"{demo:.2f} s of CPU time, 7 pairs"),
    ]


def compile_figure() -> Figure:
    """Whether an unhooked model compiles into one graph; the ratio is the largest difference of logits to 1e-4."""
    from tests.benchmarks.running import models

    ours = models()[0]
    tokens = torch.randint(0, 50257, (1, 16))
    with torch.no_grad():
        difference = (torch.compile(ours, fullgraph=True)(tokens) - ours(tokens)).abs().max().item()
    return Figure(
        "torch.compile(fullgraph=True)", "eager, |dlogit| / 1e-4", difference / 1e-4, 1.0, f"{difference:.1e}"
    )
