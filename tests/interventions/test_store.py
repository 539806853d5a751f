"""A directory of runs: what was written comes back, whoever writes beside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hooked_lm.interventions.store import Run, Store

WRITER = """
import sys, torch
from pathlib import Path
from hooked_lm.interventions.store import Run, Store
store, shared, mine = Store(sys.argv[1]), Run(Path(sys.argv[2])), int(sys.argv[3])
own = store.start(who=mine)
for i in range(20):
    for run in (own, shared):
        run.add(f"site {mine}", {"value": torch.full((50,), float(100 * mine + i))}, prompts=["t" * 500], i=i)
"""


def test_runs_come_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "here")
    assert len(store) == 0
    run = store.start(data="mine", seed=3)
    value = torch.randn(2, 3).to(torch.bfloat16)
    run.add("a", {"value": value, "ids": torch.tensor([[1, 2]])}, prompts=["x", "y\nz"], note=[1, None])
    run.prompts = ["later"]
    run.add("b", {"value": value[:1]})
    run.add("a", {"value": value.T})  # not contiguous
    (again,) = Store(tmp_path / "here")
    assert (again.about["data"], again.about["seed"], again.about["torch"]) == ("mine", 3, str(torch.__version__))
    assert again.sites == ["a", "b"]
    assert [batch.prompts for batch in again] == [["x", "y\nz"], ["later"], ["later"]]
    assert next(iter(again)).about == {"note": [1, None]}
    first, second = again.read("a")
    assert first.dtype == torch.bfloat16
    assert first.equal(value)
    assert second.equal(value.T)
    assert repr(again) == f"Run({run.id!r}, 3 batches of 2 sites)"


def test_runs_are_listed_in_the_order_of_their_starts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    started = [store.start().id for _ in range(8)]  # in one second, which their names begin with
    assert [run.id for run in store] == started


def test_unknown_things_are_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = store.start()
    run.add("a", {"value": torch.ones(1)})
    with pytest.raises(KeyError, match="nothing of 'b'; its sites are a"):
        run.read("b")
    with pytest.raises(KeyError, match="no tensor 'ids'; it has value"):
        run.read("a", "ids")
    with pytest.raises(KeyError, match=f"no run 'x'.*{run.id}"):
        store["x"]
    with pytest.raises(KeyError, match="no run 'x'"):
        store.delete("x")
    with pytest.raises(TypeError):
        run.add("a", {"value": torch.ones(1)}, what=torch)
    with pytest.raises(TypeError):
        store.start(what=torch)
    assert len(run) == 1
    assert len(store) == 1
    assert len(list(run.path.glob("*.safetensors"))) == 1


def test_deleted_runs_are_gone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = store.start(n=1), store.start(n=2)
    batch = first.add("a", {"value": torch.ones(1)})
    store.delete(first.id)
    assert [run.id for run in store] == [second.id]
    assert [path.name for path in tmp_path.iterdir()] == [second.id]
    with pytest.raises(ValueError, match="was deleted"):
        first.add("a", {"value": torch.ones(1)})
    with pytest.raises(ValueError, match="its run was deleted"):
        batch.load()
    assert [path.name for path in tmp_path.iterdir()] == [second.id]


def test_a_writer_that_died_leaves_whole_batches(tmp_path: Path) -> None:
    run = Store(tmp_path).start()
    run.add("a", {"value": torch.ones(1)})
    index = run.path / "index.jsonl"
    whole = index.read_bytes()
    index.write_bytes(whole + whole[: len(whole) // 2])  # died within a line
    (run.path / "b.safetensors.1.unfinished").write_bytes(b"half")
    assert len(Store(tmp_path)[run.id]) == 1
    assert run.read("a")[0].item() == 1
    half_begun = tmp_path / "half"
    half_begun.mkdir()
    (half_begun / "run.json.unfinished").write_text("{")
    assert [found.id for found in Store(tmp_path)] == [run.id]


def test_after_a_torn_line_the_next_batch_is_read(tmp_path: Path) -> None:
    run = Store(tmp_path).start()
    run.add("a", {"value": torch.ones(1)})
    index = run.path / "index.jsonl"
    index.write_bytes(index.read_bytes() + b'{"file": "x')
    run.add("b", {"value": torch.full((1,), 2.0)})
    run.add("c", {"value": torch.full((1,), 3.0)})
    assert run.sites == ["a", "b", "c"]


@pytest.mark.slow
def test_processes_write_beside_each_other(tmp_path: Path) -> None:
    store = Store(tmp_path)
    shared = store.start(who="both")
    started = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(shared.path), str(i)]) for i in (1, 2)
    ]
    assert [process.wait(60) for process in started] == [0, 0]
    assert sorted(str(run.about["who"]) for run in store) == ["1", "2", "both"]
    for i in (1, 2):
        expected = [100.0 * i + j for j in range(20)]
        (own,) = [run for run in store if run.about["who"] == i]
        for run in (own, Run(shared.path)):
            assert [value[0].item() for value in run.read(f"site {i}")] == expected
    assert len(shared) == 40
    lines = (shared.path / "index.jsonl").read_text().splitlines()
    for line in filter(None, lines):  # one that is empty, where a writer came upon another in the midst of a line
        assert set(json.loads(line)) == {"file", "site", "texts", "about"}
