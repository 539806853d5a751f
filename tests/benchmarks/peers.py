"""TransformerLens in an environment of its own, and a process there that answers jobs.

The environments are made once, under `.bench/` in the repository's root, with this project's torch and constraints.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".bench"
WORKER = Path(__file__).with_name("peer_sweeps.py")
THREADS = 2


def environment(version: str) -> Path:
    """The Python of an environment with this version of transformer-lens, made if it is not there yet.

    torch comes first and by its exact version, so that both sides compute with the same build.
    """
    directory = CACHE / f"transformer-lens-{version}"
    python, ready = directory / "bin" / "python", directory / ".ready"
    torch_version = torch.__version__.split("+")[0]
    wanted = f"torch=={torch_version} transformer-lens=={version}"
    if not ready.exists() or ready.read_text() != wanted:
        print(f"making {directory.relative_to(ROOT)} with {wanted}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        for requirement in wanted.split():
            install = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), requirement]
            made = subprocess.run(install, capture_output=True, text=True)
            if made.returncode:
                raise RuntimeError(f"pip could not install {requirement} for the benchmark:\n{made.stderr}")
        ready.write_text(wanted)
    return python


def spread(n_layers: int, n_other: int, count: int, turn: int) -> list[tuple[int, int]]:
    """`count` cells of a grid, at most one a layer, even over both axes; other cells at another turn."""
    golden = 0.6180339887  # its multiples fill the unit interval evenly, wherever one stops
    return [
        ((i * n_layers // count + turn) % n_layers, int((i + turn * count + 0.5) * golden % 1 * n_other))
        for i in range(min(count, n_layers))
    ]


class Peer:
    """A worker process: jobs go in, answers come out. It computes only while a job is asked."""

    def __init__(self, version: str) -> None:
        self.version = version
        python = environment(version)
        self.log = CACHE / f"transformer-lens-{version}.log"
        settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(THREADS)}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(python), str(WORKER), str(THREADS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=CACHE,  # away from this project
                env={**os.environ, **settings},
            )

    def ask(self, job: str, **fields: Any) -> dict[str, Any]:
        """The answer to a job; RuntimeError with the end of the worker's log if it died of it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"job": job, **fields}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"transformer-lens {self.version} failed:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died, and `ask` has said so
            self.process.stdin.close()
        self.process.wait()
