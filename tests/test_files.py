"""Files appear when they are whole, where they were meant to."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.files import made_folder, remove_leftovers, replacing, unfinished_path, writable, writable_folder
from hooked_lm.harvest import harvest
from hooked_lm.hooks import Cache
from hooked_lm.interventions import Store
from hooked_lm.interventions.dictionaries import ActivationBatches, TopK, TrainingConfig, save_saelens, train_on
from hooked_lm.results import Scores, stored
from hooked_lm.studies import study_pairs
from tests.models.toys import ids, toy


def write(path: Path, text: str = "new") -> None:
    with replacing(path) as unfinished:
        unfinished.write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_file_is_made_and_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a", "old")
    (tmp_path / "a").chmod(0o640)
    write(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "new"
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_a_failure_leaves_what_stood_there(tmp_path: Path, error: type[BaseException]) -> None:
    write(tmp_path / "a", "old")

    def fail() -> None:
        with replacing(tmp_path / "a") as unfinished:
            unfinished.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("there", [False, True], ids=["to nothing yet", "to a file"])
def test_a_link_stays_a_link(tmp_path: Path, there: bool) -> None:
    (tmp_path / "far").mkdir()
    if there:
        (tmp_path / "far" / "b").write_text("old")
    (tmp_path / "middle").symlink_to(tmp_path / "far" / "b")
    (tmp_path / "a").symlink_to("middle")
    write(tmp_path / "a")
    assert (tmp_path / "a").is_symlink()
    assert (tmp_path / "middle").is_symlink()
    assert (tmp_path / "far" / "b").read_text() == "new"
    assert names(tmp_path / "far") == ["b"]


def refused() -> dict[str, tuple[Callable[[Path], Any], type[OSError], str]]:
    def circle(path: Path) -> None:
        path.symlink_to(path.name)

    def read_only(path: Path) -> None:
        path.write_text("old")
        path.chmod(0o444)

    return {
        "a folder": (Path.mkdir, IsADirectoryError, "it is a folder"),
        "a link to a folder": (lambda path: path.symlink_to(path.parent), IsADirectoryError, "it is a folder"),
        "a link into nowhere": (lambda path: path.symlink_to("no/where"), FileNotFoundError, "there is no folder"),
        "links in a circle": (circle, OSError, "cannot write"),
        "a read-only file": (read_only, PermissionError, "the file is read-only"),
        "not a regular file": (lambda path: os.mkfifo(path), OSError, "not a regular file"),
    }


@pytest.mark.parametrize("name", refused())
def test_what_cannot_be_written_is_refused_before(tmp_path: Path, name: str) -> None:
    prepare, error, message = refused()[name]
    prepare(tmp_path / "a")
    before = names(tmp_path)
    for attempt in (writable, write):
        with pytest.raises(error, match=message):
            attempt(tmp_path / "a")
    assert names(tmp_path) == before


def test_a_folder_in_which_no_file_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said by the system call, because the superuser may write anywhere."""

    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(PermissionError, match=r"cannot write .*no file can be created in"):
        writable(tmp_path / "a")


def test_folders_are_made_or_refused_before(tmp_path: Path) -> None:
    assert writable_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert not (tmp_path / "a").exists()
    assert made_folder(tmp_path / "a" / "b").is_dir()
    assert names(tmp_path / "a") == ["b"]
    (tmp_path / "file").write_text("old")
    for attempt in (writable_folder, made_folder):
        with pytest.raises(NotADirectoryError, match=r"cannot write .*deep: .*file is no folder"):
            attempt(tmp_path / "file" / "deep")
        with pytest.raises(ValueError, match="whose path is empty"):
            attempt("")
    with pytest.raises(ValueError, match="whose path is empty"):
        writable("")


def test_folders_of_the_system_are_refused_by_every_writer(tmp_path: Path) -> None:
    if not Path("/proc").is_dir():
        pytest.skip("this system has no /proc")
    sae = TopK.Config(d_in=4, d_sae=8, k=2).build()
    writers: list[Callable[[str], Any]] = [
        lambda path: save_saelens(sae, path),
        lambda path: train_on(ActivationBatches(torch.randn(9, 4)), sae.cfg, TrainingConfig(1, 9), directory=path),
        lambda path: Store(path).start(),
        lambda path: study_pairs(HookedTransformer.from_pretrained("demo"), [], "sweep", path),
        lambda path: harvest(HookedTransformer.from_pretrained("demo"), ["a"], "resid_post", path),
    ]
    for write_to in writers:
        with pytest.raises(OSError, match=r"cannot write /proc/nothing.*: no file can be created in /proc"):
            write_to("/proc/nothing/here")


def test_a_full_disk_is_an_os_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with pytest.raises(OSError, match="cannot write"):
        stored.write("/dev/full", "some", {"a": torch.zeros(3)}, {})
    with pytest.raises(OSError, match="cannot write"):
        Cache({"a": torch.zeros(3)}).save("/dev/full")


def test_results_and_caches_go_through_links(tmp_path: Path) -> None:
    scores, link = Scores(torch.zeros(1, 2), {"layer": [0]}), tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    scores.save(link)
    assert link.is_symlink()
    assert Scores.load(tmp_path / "file").n_prompts == 2
    model = toy()
    _, cache = model.run_with_cache(ids(1, 3), names_filter="hook_embed")
    cache.save(link)
    assert link.is_symlink()
    assert list(type(cache).load(tmp_path / "file", model)) == ["hook_embed"]


@pytest.mark.parametrize("name", ["index.json", "plan.json", "shard-000000.safetensors", "no-suffix"])
def test_leftovers_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Those of processes that still run, and of other machines, are kept."""
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    with monkeypatch.context() as changed:
        changed.setattr(os, "getpid", lambda: killed.pid)
        unfinished_path(tmp_path / name).write_text("half")
        changed.setattr(socket, "gethostname", lambda: "another.machine")
        elsewhere = unfinished_path(tmp_path / name)
        elsewhere.write_text("half")
    running = unfinished_path(tmp_path / name)
    running.write_text("half")
    assert len(names(tmp_path)) == 3
    remove_leftovers(tmp_path)
    assert names(tmp_path) == sorted([elsewhere.name, running.name])
