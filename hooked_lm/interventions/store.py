"""A directory of detector results: runs of batches, in safetensors files with an index in JSON."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from hooked_lm.files import made_folder, replacing
from hooked_lm.notebook_repr import NotebookRepr, Table, short_repr
from hooked_lm.results import stored

__all__ = ["Batch", "Run", "Store"]

FORMAT = "hooked_lm.Batch"
ABOUT, INDEX = "run.json", "index.jsonl"


@dataclass(frozen=True)
class Batch:
    """The result of one site in one call: its file and metadata. `load` reads the tensors."""

    path: Path
    site: str
    prompts: list[str] | None
    about: dict[str, Any]

    def load(self) -> dict[str, Tensor]:
        """The tensors, bit for bit; ValueError if the file is missing or not a batch."""
        if not self.path.exists():
            raise ValueError(f"{self.path} is gone: its run was deleted")
        return stored.read(self.path, FORMAT)[0]


@dataclass
class Run(NotebookRepr):
    """One run of detectors in a store. `add` writes a batch; iteration yields batches in the order of writing.

    A line is added to the index atomically, after its file is complete: readers see complete batches only, and several
    processes may write to one run.
    """

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] | None = None  # the default of new batches

    @property
    def id(self) -> str:
        """The key of the run in its store."""
        return self.path.name

    def add(
        self, site: str, tensors: Mapping[str, Tensor], prompts: Sequence[str] | None = None, **about: object
    ) -> Batch:
        """Writes the tensors of a site; `prompts` are the texts of its rows (default: the `prompts` of the run).

        Raises ValueError if the run was deleted, TypeError if `about` is not JSON serialisable.
        """
        if not self.path.is_dir():
            raise ValueError(f"the run {self.id} is not in {self.path.parent} any more: it was deleted")
        shown = list(prompts) if prompts is not None else self.prompts
        file = f"{uuid4().hex}.safetensors"
        line = json.dumps({"file": file, "site": site, "texts": shown, "about": about}) + "\n"
        on_cpu = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
        stored.write(self.path / file, FORMAT, on_cpu, {"site": site, "texts": shown, "about": about})
        _append(self.path / INDEX, line)
        return Batch(self.path / file, site, shown, about)

    def __iter__(self) -> Iterator[Batch]:
        for header in _lines(self.path / INDEX):
            yield Batch(self.path / header["file"], header["site"], header["texts"], header["about"])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def repr_table(self) -> Table:
        """A row for each batch: its site, texts and metadata."""
        rows = [(one.site, short_repr(one.prompts or ""), short_repr(one.about)) for one in self]
        return Table(("site", "texts", "about"), rows)

    @property
    def sites(self) -> list[str]:
        """The sites with batches, in the order of writing."""
        return list(dict.fromkeys(batch.site for batch in self))

    def read(self, site: str, name: str = "value") -> list[Tensor]:
        """The tensor `name` of each batch of a site; KeyError for an unknown site or name."""
        batches = [batch for batch in self if batch.site == site]
        if not batches:
            raise KeyError(
                f"the run {self.id} has nothing of '{site}'; its sites are {', '.join(self.sites) or 'none'}"
            )
        loaded = [batch.load() for batch in batches]
        if missing := next((found for found in loaded if name not in found), None):
            raise KeyError(f"'{site}' has no tensor {name!r}; it has {', '.join(missing)}")
        return [found[name] for found in loaded]

    def __repr__(self) -> str:
        return f"Run({self.id!r}, {len(self)} batches of {len(self.sites)} sites)"


class Store(NotebookRepr):
    """A persistent directory of detector runs: list, read and delete them.

    Several processes may use it at once: each run has a separate directory, files are written atomically, and runs are
    deleted atomically.

    >>> import tempfile, torch
    >>> store = Store(tempfile.mkdtemp())
    >>> run = store.start(data="two prompts")
    >>> _ = run.add(
    ...     "blocks.0.hook_resid_post", {"value": torch.ones(2, 3)}, prompts=["one", "two"]
    ... )
    >>> [(run.about["data"], run.sites) for run in store]
    [('two prompts', ['blocks.0.hook_resid_post'])]
    >>> store.delete(run.id)
    >>> len(store)
    0
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def start(self, **about: object) -> Run:
        """Starts a run; `about` is JSON-serialisable metadata. Versions and the time are added."""
        versions = {"hooked_lm": version("hooked-lm"), "torch": str(torch.__version__)}
        header = {**versions, **about, "started": time.time_ns()}
        text = json.dumps(header)
        path = made_folder(self.path / f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid4().hex[:12]}")
        with replacing(path / ABOUT) as unfinished:
            unfinished.write_text(text, encoding="utf-8")
        return Run(path, header)

    def runs(self) -> list[Run]:
        """The runs, oldest first."""
        found = [Run(file.parent, _json(file)) for file in self.path.glob(f"*/{ABOUT}") if _is_run(file.parent)]
        return sorted(found, key=lambda run: (run.about["started"], run.id))

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs())

    def __len__(self) -> int:
        return len(self.runs())

    def __getitem__(self, id: str) -> Run:
        """The run with this id; KeyError if there is none."""
        for run in self.runs():
            if run.id == id:
                return run
        raise KeyError(f"there is no run {id!r} in {self.path}; it has {', '.join(run.id for run in self) or 'none'}")

    def delete(self, id: str) -> None:
        """Deletes a run with all its files; KeyError if there is none."""
        run = self[id]
        doomed = run.path.with_name(f".{run.id}.deleted")
        run.path.rename(doomed)  # atomic, unlike the removal of the files
        shutil.rmtree(doomed)

    def repr_table(self) -> Table:
        """A row for each run, the oldest first."""
        rows = [(run.id, len(run), short_repr(", ".join(run.sites)), short_repr(run.about)) for run in self]
        return Table(("run", "batches", "sites", "about"), rows)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, {len(self)} runs)"


def _is_run(path: Path) -> bool:
    return not path.name.startswith(".")


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _append(file: Path, line: str) -> None:
    """Appends a line in one write (O_APPEND: at the current end of the file)."""
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        is_torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"  # another process died while writing a line
        os.write(descriptor, b"\n" * is_torn + line.encode())
    finally:
        os.close(descriptor)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of an index; a line that was cut off when its process died is skipped."""
    if not file.exists():
        return
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # an incomplete line
                continue
