"""Scripts that compute by several workers: one that cannot be imported ends with an error, not in an endless wait."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from hooked_lm import HookedTransformer
from hooked_lm.harvest import harvest

def main() -> None:
    model = HookedTransformer.from_pretrained("demo")
    print(harvest(model, ["Mary gave it"] * 4, "z0", sys.argv[1], n_workers=2, documents_per_shard=1, progress=False))
"""
SECONDS = 200


def run(tmp_path: Path, script: str) -> "subprocess.CompletedProcess[str]":
    path = tmp_path / "script.py"
    path.write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(path), str(tmp_path / "out")]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment)


@pytest.mark.slow
@pytest.mark.xdist_group("harvest workers")
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    done = run(tmp_path, f"{SCRIPT}\nmain()\n")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: no worker process could start")
    assert "`if __name__ == '__main__':`" in last


@pytest.mark.slow
@pytest.mark.xdist_group("harvest workers")
def test_a_script_with_a_guard(tmp_path: Path) -> None:
    done = run(tmp_path, f'{SCRIPT}\nif __name__ == "__main__":\n    main()\n')
    assert done.returncode == 0, done.stderr[-3000:]
    assert "in 4 shards (complete)" in done.stdout
