"""A harvest that is killed, run twice, or meets a damaged file or a full disk."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.harvest import ActivationStore, harvest
from hooked_lm.harvest.shard_file import ShardFile, shard_path
from hooked_lm.shards.records import record_path

SITE = "blocks.0.hook_mlp_out"
TEXTS = ["Mary gave it to John", "John went home", "Mary and John", "Then Mary went to the house"]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def run(model: HookedTransformer, directory: Path, **options: object) -> ActivationStore:
    return harvest(model, TEXTS, SITE, directory, documents_per_shard=1, progress=False, **options)


@pytest.mark.slow
def test_thirty_kills(tmp_path: Path) -> None:
    script = Path(__file__).with_name("kills.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    log = [re.fullmatch(r"kill \d+: (\d+) shards before, (\d+) after", line) for line in lines[:-1]]
    assert len(log) == 30
    assert all(line is not None and int(line[1]) <= int(line[2]) for line in log)
    assert len({line[2] for line in log if line is not None}) > 5  # they came at different moments
    assert lines[-1].endswith("all bytes equal")


def test_a_second_call_computes_what_is_missing_alone(model: HookedTransformer, tmp_path: Path) -> None:
    store = run(model, tmp_path)
    times = {shard: shard_path(store.path, shard).stat().st_mtime_ns for shard in store.shards}
    record_path(store.path, 2).unlink()
    assert ActivationStore(store.path).missing == [2]
    again = run(model, tmp_path)
    assert again.is_complete
    changed = [shard for shard in again.shards if shard_path(store.path, shard).stat().st_mtime_ns != times[shard]]
    assert changed == [2]


def test_parts_together_are_the_whole(model: HookedTransformer, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "whole")
    first = run(model, tmp_path / "parts", shard=(1, 3))
    assert (first.shards, first.missing) == ([1], [0, 2, 3])
    for i in (0, 2):
        parts = run(model, tmp_path / "parts", shard=(i, 3))
    assert parts.is_complete
    for path in whole.path.glob("shard-*"):
        assert path.read_bytes() == (parts.path / path.name).read_bytes()
    first = run(model, tmp_path / "text", shard="1/3")
    assert first.shards == [1]
    with pytest.warns(UserWarning, match=r"not complete: the 1 shards that it has .* 3 are missing"):
        first.verify()


def test_a_shard_that_is_written_twice_must_have_the_same_bytes(tmp_path: Path) -> None:
    def write(value: float) -> dict[str, object]:
        file = ShardFile(tmp_path, 0, {"x": (torch.float32, [3])})
        file.write("x", 0, torch.full((3,), value))
        return file.commit({"tokens": 3})

    assert write(1.0) == write(1.0)
    with pytest.raises(ValueError, match="written before with other bytes"):
        write(2.0)
    assert not list(tmp_path.glob("*unfinished*"))


def test_other_weights_are_another_harvest(model: HookedTransformer, tmp_path: Path) -> None:
    first = run(model, tmp_path)
    other = HookedTransformer.from_pretrained("demo")
    with torch.no_grad():
        other.blocks[0].mlp.W_out[0, 0] += 1
    assert run(other, tmp_path).path != first.path
    (first.path / "plan.json").write_text(
        (first.path / "plan.json").read_text().replace('"batch_size": 32', '"batch_size": 3')
    )
    with pytest.raises(ValueError, match=r"plan.json was changed"):
        ActivationStore(first.path)


def test_damage_is_found(model: HookedTransformer, tmp_path: Path) -> None:
    store = run(model, tmp_path)
    with shard_path(store.path, 1).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(ValueError, match=r"1 of 4 shards .* shard-000001.safetensors has other content"):
        ActivationStore(store.path).verify()
    os.truncate(shard_path(store.path, 2), 100)
    with pytest.raises(ValueError, match=r"shard-000002.safetensors is damaged: it should have \d+ bytes"):
        ActivationStore(store.path)[SITE][:]
    record_path(store.path, 3).write_text("{")
    (store.path / "index.json").unlink()
    with pytest.raises(ValueError, match=r"shard-000003.json is damaged"):
        ActivationStore(store.path)
    with pytest.raises(FileNotFoundError, match=rf"not the folder of a harvest; .*: {store.path.name}$"):
        ActivationStore(tmp_path)


def test_the_same_call_finds_files_that_are_short_or_missing(model: HookedTransformer, tmp_path: Path) -> None:
    store = run(model, tmp_path)
    content = shard_path(store.path, 3).read_bytes()
    os.truncate(shard_path(store.path, 2), 100)
    shard_path(store.path, 3).unlink()
    record_path(store.path, 0).unlink()
    with pytest.raises(
        ValueError, match=r"2 of 3 shards .*000002.safetensors has 100 bytes, not \d+; .*000003.* missing"
    ):
        run(model, tmp_path)
    assert not record_path(store.path, 0).exists()  # nothing was computed
    shard_path(store.path, 2).unlink()
    for shard in (2, 3):
        record_path(store.path, shard).unlink()
    again = run(model, tmp_path)
    again.verify()
    assert again.is_complete
    assert shard_path(store.path, 3).read_bytes() == content


@pytest.mark.parametrize("content", ["[1]", '{"0": 3}', '{"a": {}}', "{", '{"0": {"tokens": 3}}'])
def test_a_damaged_cache_of_records_is_made_again(model: HookedTransformer, tmp_path: Path, content: str) -> None:
    store = run(model, tmp_path)
    index = store.path / "index.json"
    known = index.read_text()
    index.write_text(content)
    assert len(ActivationStore(store.path)) == len(store)
    assert index.read_text() == known


def test_the_cache_of_records_does_not_depend_on_their_order(model: HookedTransformer, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "whole")
    for i in (2, 0, 1):
        parts = run(model, tmp_path / "parts", shard=(i, 3))
    assert (whole.path / "index.json").read_bytes() == (parts.path / "index.json").read_bytes()


@pytest.mark.parametrize("content", ["[]", "3", '{"tokens": 3}'])
def test_a_damaged_record_is_named(model: HookedTransformer, tmp_path: Path, content: str) -> None:
    store = run(model, tmp_path)
    record_path(store.path, 1).write_text(content)
    (store.path / "index.json").unlink()
    with pytest.raises(ValueError, match=r"shard-000001.json is damaged: it has no .*; delete it"):
        ActivationStore(store.path)


@pytest.mark.parametrize("content", ["[]", '{"format": "hooked_lm.harvest", "version": 1, "sites": {}}'])
def test_a_damaged_plan_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ValueError, match=r"plan.json (is damaged|was changed)"):
        ActivationStore(tmp_path)


def test_a_full_disk(model: HookedTransformer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve, calls = os.posix_fallocate, iter(range(9))

    def full_at_the_third(file: int, start: int, size: int) -> None:
        if next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full_at_the_third)
    with pytest.raises(OSError, match=r"no space for shard 2 of .* what is complete is kept"):
        run(model, tmp_path)
    [folder] = tmp_path.iterdir()
    assert ActivationStore(folder).shards == [0, 1]
    assert not list(folder.glob("*unfinished*"))
    assert run(model, tmp_path).is_complete


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained("demo")
    with torch.no_grad():
        model.blocks[0].mlp.b_out[:] = 1e5
    with pytest.raises(FloatingPointError, match=rf"'{SITE}' has values that are not finite in float16"):
        run(model, tmp_path, dtype=torch.float16)
    assert run(model, tmp_path, dtype=torch.bfloat16).is_complete


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": []}, "the data set is empty"),
        ({"documents": ["", ""]}, "none of the first 2 documents has a token"),
        ({"documents": [3.5]}, "document 0 must be a text, a list of token ids or a list of messages"),
        ({"sites": "blocks.0.hook_mlp_ou"}, "hook_mlp_out"),
        ({"sites": "blocks.0.attn.hook_pattern"}, r"\['batch', 'head', 'query_pos', 'key_pos'\]"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"n_workers": 0}, "n_workers must be at least 1"),
        ({"executor": "slurm"}, "executor must be one of"),
        ({"sites": []}, r"sites=\[\] name no site"),
        ({"positions": [50]}, r"positions=\[50\] keep no token of the first \d+ documents"),
        ({"positions": [50], "reduce": "mean"}, "keep no token"),
        ({"shard": (3, 3)}, r"shard must be \(i, n\) or 'i/n'.* got \(3, 3\)"),
        ({"shard": "3/3"}, "shard must be"),
        ({"reduce": "median"}, "reduce must be one of 'mean', 'max', 'last'"),
        ({"dtype": torch.float64}, "dtype must be one of"),
        ({"context": 10_000}, "context must be from 1 to"),
        ({"long": "drop"}, "long must be one of"),
        ({"positions": "last"}, "positions must be 'all', 'text' or indices"),
        ({"shard_size": "much"}, "shard_size must be a number of bytes"),
        ({"documents": "/nowhere/corpus.jsonl"}, "no file of .jsonl"),
    ],
)
def test_bad_input(model: HookedTransformer, tmp_path: Path, options: dict[str, object], message: str) -> None:
    given = {"documents": TEXTS, "sites": SITE, **options}
    with pytest.raises((ValueError, TypeError, LookupError, OSError), match=message):
        harvest(model, directory=tmp_path, **given)
    assert not list(tmp_path.iterdir())


def test_the_plan_says_what_was_kept(model: HookedTransformer, tmp_path: Path) -> None:
    plan = json.loads((run(model, tmp_path, positions=[0, -1]).path / "plan.json").read_text())
    assert plan["rows"] == {"context": model.cfg.n_ctx, "long": "truncate", "positions": [0, -1], "prepend_bos": True}
    assert plan["sites"] == {SITE: {"shape": [128], "dtype": "float32", "dims": ["d_model"]}}
