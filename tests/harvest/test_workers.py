"""The same bytes from one process, several, torchrun, a batch scheduler, and a Ray cluster that loses a worker."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from hooked_lm.cli import app
from hooked_lm.demo.corpus import training_text
from hooked_lm.shards import with_threads
from tests.rounding import undisturbed

SITES = ["blocks.0.hook_mlp_out", "blocks.1.hook_resid_post"]
COMMAND = Path(sys.executable).with_name("hooked-lm")
OPTIONS = [*(f"--site={site}" for site in SITES), "--documents-per-shard=4", "--threads=1", "--batch-size=3"]
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("harvest workers")]


def contents(directory: Path) -> dict[str, bytes]:
    [folder] = directory.iterdir()
    return {path.name: path.read_bytes() for path in [*sorted(folder.glob("shard-*")), folder / "plan.json"]}


def command(data: Path, directory: Path, *options: str, before: list[str] = []) -> str:  # noqa: B006 (not changed)
    arguments = ["harvest", "demo", str(data), str(directory), *OPTIONS, *options]
    if not before and "--workers=2" not in options:
        found = CliRunner().invoke(app, arguments)
        assert found.exit_code == 0, found.stderr
        return found.stdout
    run = [*before, str(COMMAND), *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def true_kernels() -> Iterator[None]:
    """Other processes do not round as `--rounding` does."""
    with undisturbed():
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.jsonl"
    texts = [training_text(Random(seed)) for seed in range(120)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = tmp_path_factory.mktemp("whole")
    with with_threads(2):  # torchrun gives its processes one
        assert "in 30 shards (complete)" in command(data, directory)
    found = contents(directory)
    assert len(found) == 61
    return found


def test_two_processes(data: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    command(data, tmp_path, "--workers=2")
    assert contents(tmp_path) == whole


def test_torchrun(data: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command(data, tmp_path, before=torchrun)
    assert contents(tmp_path) == whole


def test_parts_of_a_batch_scheduler(data: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    assert "20 shards missing" in command(data, tmp_path, "--shard=1/3")
    command(data, tmp_path, "--shard=0/2")  # another number of parts
    command(data, tmp_path)
    assert contents(tmp_path) == whole


def test_ray_loses_a_worker(data: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one_in_the_middle() -> None:
        deadline = time.monotonic() + 120
        while not killed and time.monotonic() < deadline:
            if 4 <= len(list(tmp_path.glob("*/shard-*.json"))) <= 20 and (working := workers()):
                os.kill(working[0], signal.SIGKILL)
                killed.append(working[0])
            time.sleep(0.01)

    watcher = threading.Thread(target=kill_one_in_the_middle)
    watcher.start()
    command(data, tmp_path, "--workers=2", "--executor=ray")
    watcher.join()
    assert killed
    assert contents(tmp_path) == whole


def workers() -> list[int]:
    """The processes of this machine in which Ray computes a shard."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "ray::Worker" in line]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--shard=2", "shard must be"),
        ("--shard=2/2", "shard must be"),
        ("--executor=slurm", "executor must be one of 'processes', 'ray'"),
    ],
)
def test_bad_options(data: Path, tmp_path: Path, option: str, message: str) -> None:
    found = CliRunner().invoke(app, ["harvest", "demo", str(data), str(tmp_path), *OPTIONS, option])
    assert found.exit_code == 2
    assert message in found.stderr
