"""Shards that two processes commit at the same time: the first is kept, whoever writes the record."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hooked_lm.shards.plan import check_counts
from hooked_lm.shards.records import checksum, commit, record_path

NAMES = ("link", "replace")  # of the functions of os that give a file its name


def written(folder: Path, writer: str, content: bytes) -> Path:
    path = folder / f"shard-000000.{writer}.unfinished"
    path.write_bytes(content)
    return path


def before_the_first(monkeypatch: pytest.MonkeyPatch, other: Callable[[], object], skip: int = 0) -> None:
    """Lets another writer work just before this one gives a file its name, after `skip` times."""
    originals = {name: getattr(os, name) for name in NAMES}
    n_calls = 0

    def interrupted(name: str) -> Callable[..., None]:
        def call(*paths: Path) -> None:
            nonlocal n_calls
            n_calls += 1
            if n_calls == skip + 1:
                other()
            originals[name](*paths)

        return call

    for name in NAMES:
        monkeypatch.setattr(os, name, interrupted(name))


@pytest.mark.parametrize("skip", [0, 1], ids=["before the file", "before the record"])
@pytest.mark.parametrize("content", [b"first", b"other"])
def test_the_first_of_two_writers_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, skip: int
) -> None:
    """The other begins and ends while this one commits: it is first if this one has not named its file yet."""
    path, errors, records = tmp_path / "shard-000000.bin", [], []

    def write(writer: str, content: bytes) -> None:
        try:
            records.append(commit(written(tmp_path, writer, content), path, {"tokens": 3}))
        except ValueError as error:
            errors.append(f"{writer}: {error}")

    def another_process() -> None:
        with monkeypatch.context() as changed:
            changed.setattr(os, "getpid", lambda: 1)
            write("other", content)

    before_the_first(monkeypatch, another_process, skip)
    write("this", b"first")
    assert path.read_bytes() == (content if skip == 0 else b"first")
    record = json.loads(record_path(tmp_path, 0).read_text())
    assert record["sha256"] == checksum(path)
    assert all(each == record for each in records)
    if content == b"first":
        assert (len(records), errors) == (2, [])
    else:
        [error] = errors
        assert error.startswith("this" if skip == 0 else "other")
        assert "shard-000000 was written before with other bytes" in error
        assert "The first is kept" in error
    assert not list(tmp_path.glob("*unfinished*"))


def test_a_file_without_a_record_is_not_replaced_by_other_bytes(tmp_path: Path) -> None:
    """As after a process that was killed between the two."""
    path = tmp_path / "shard-000000.bin"
    path.write_bytes(b"first")
    with pytest.raises(ValueError, match="delete its file and its record"):
        commit(written(tmp_path, "a", b"other"), path, {})
    assert path.read_bytes() == b"first"
    assert not record_path(tmp_path, 0).exists()
    assert commit(written(tmp_path, "a", b"first"), path, {})["bytes"] == 5
    path.unlink()
    record_path(tmp_path, 0).unlink()
    assert commit(written(tmp_path, "a", b"other"), path, {})["sha256"] == checksum(path)
    assert not list(tmp_path.glob("*unfinished*"))


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Path) -> None:
        raise PermissionError("links are not permitted")

    monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "shard-000000.bin"
    record = commit(written(tmp_path, "a", b"first"), path, {"tokens": 3})
    assert record == json.loads(record_path(tmp_path, 0).read_text())
    with pytest.raises(ValueError, match="The first is kept"):
        commit(written(tmp_path, "a", b"other"), path, {"tokens": 3})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["shard-000000.bin", "shard-000000.json"]


@pytest.mark.parametrize("number", [2.5, "2", True])
def test_counts_are_integers(number: object) -> None:
    with pytest.raises(TypeError, match="batch_size must be an integer, got"):
        check_counts(threads=None, batch_size=number)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        check_counts(batch_size=0)
    check_counts(threads=None, batch_size=2)
