"""`doctor`: what is installed, on what it runs, and whether the bundled model answers."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.markup import escape

from hooked_lm.cli.command import Result, command
from hooked_lm.cli.output import say, show_table

BASE = ("hooked-lm", "torch", "transformers", "einops", "jaxtyping", "safetensors", "tqdm")
EXTRAS = {  # as in pyproject.toml
    "viz": ("plotly", "pandas"),
    "cli": ("typer", "rich"),
    "mcp": ("mcp",),
    "probes": ("scikit-learn",),
    "corpus": ("datasets",),
    "accelerate": ("accelerate",),
    "ray": ("ray",),
    "quantization": ("torchao",),
}


@command("hooked-lm doctor --json")
def doctor() -> Result:
    """Show what is installed and on what it runs.

    Versions, devices, memory, and the line that installs each optional part. The exit code is 1 if the bundled model fails.
    """
    import torch

    missing = {extra: [name for name in names if _version(name) is None] for extra, names in EXTRAS.items()}
    found: dict[str, object] = {
        "python": f"{platform.python_version()} at {sys.executable}",
        "system": f"{platform.system()} {platform.machine()}",
        "processors": f"{os.cpu_count()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        "memory": _memory(),
        "devices": _devices(),
        "hub cache": _hub_cache(),
        "bundled model": _answer(),
    }
    packages = [{"package": name, "version": _version(name) or "missing", "needed for": "everything"} for name in BASE]
    for extra, names in EXTRAS.items():
        packages += [
            {"package": name, "version": _version(name) or f"pip install 'hooked-lm[{extra}]'", "needed for": extra}
            for name in names
        ]
    for name, value in found.items():
        say(f"[bold]{name}[/]  {escape(', '.join(value) if isinstance(value, list) else str(value))}")
    show_table(packages)
    ok = found["bundled model"] == "answers as it should"
    return {
        "ok": ok,
        **{name.replace(" ", "_"): value for name, value in found.items()},
        "versions": {name: _version(name) for name in (*BASE, *(name for names in EXTRAS.values() for name in names))},
        "missing_extras": [extra for extra, names in missing.items() if names],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _memory() -> str:
    """Of this machine, where the system says it."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, ValueError, OSError):
        return "unknown"
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _devices() -> list[str]:
    """The first is where models are loaded by default."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        name, memory = torch.cuda.get_device_name(index), torch.cuda.get_device_properties(index).total_memory
        found.append(f"cuda:{index} {name}, {memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        found.append("mps")
    return [*found, "cpu"]


def _hub_cache() -> str:
    """Where downloaded checkpoints are, and how many."""
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    folder = Path(HF_HUB_CACHE)
    n_models = len(list(folder.glob("models--*"))) if folder.is_dir() else 0
    return f"{folder}, {n_models} models{', offline' if HF_HUB_OFFLINE else ''}"


def _answer() -> str:
    """Whether the bundled model loads and continues a prompt as it was trained to."""
    from hooked_lm.pretrained import HookedTransformer

    model = HookedTransformer.from_pretrained("demo", device="cpu")
    text = str(model.generate("The capital of France is", 1, do_sample=False, verbose=False))
    return "answers as it should" if text.endswith(" Paris") else f"answers {text!r}, which is wrong"
