"""The documents of a corpus, by number: texts, token ids or conversations, from memory, files, or a data set of Hugging Face."""

import glob
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor

from hooked_lm import hub_files
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import checked_messages
from hooked_lm.shards.plan import check_counts, check_integers

Conversation = Mapping[str, Any]  # "messages", and perhaps "tools"
Document = str | Sequence[int] | Conversation
STREAM = "stream"  # the kind of data whose documents are known only when they are read
COLUMNS = ("text", "input_ids", "tokens", "messages")  # the column of documents, if none is named
TOOLS = "tools"  # the column of what conversations can call, beside that of the messages
BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".csv": "csv"}
NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # of a data set on the hub
SAMPLE = 1000  # documents, evenly spaced: the sample by which a corpus is measured
AT_ONCE = 4096  # documents that are read together to identify a data set


@runtime_checkable
class Documents(Protocol):
    """A numbered sequence of documents that gives the same documents each time."""

    @property
    def n_documents(self) -> int | None:
        """The number of documents; None for a stream whose end is not known."""

    def between(self, start: int, end: int) -> list[tuple[int, Document]]:
        """The documents at these places, each with its number in the data set; fewer where a stream ends."""

    def about(self) -> dict[str, Any]:
        """What identifies the data set; of a stream its beginning, while the record of each shard identifies the rest."""


class Listed(ABC):
    """Documents of known number, that can be read in any order; shuffled if there is a seed."""

    def __init__(self, n_documents: int, seed: int | None, kind: str, **facts: str) -> None:
        self.kind, self.n_documents, self.seed, self.facts = kind, n_documents, seed, facts
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.order = None if seed is None else torch.randperm(n_documents, generator=generator)

    def between(self, start: int, end: int) -> list[tuple[int, Document]]:
        places = range(start, min(end, self.n_documents))
        numbers = list(places) if self.order is None else self.order[start:end].tolist()
        return list(zip(numbers, self._read(numbers), strict=True))

    @abstractmethod
    def _read(self, numbers: Sequence[int]) -> list[Document]:
        """The documents with these numbers."""

    def about(self) -> dict[str, Any]:
        pieces = (range(self.n_documents)[start : start + AT_ONCE] for start in range(0, self.n_documents, AT_ONCE))
        whole = digest(document for numbers in pieces for document in self._read(numbers))
        return {"kind": self.kind, "documents": self.n_documents, "seed": self.seed, "sha256": whole, **self.facts}


class InMemory(Listed):
    """The documents of a sequence."""

    def __init__(self, documents: Sequence[object], n_documents: int, seed: int | None) -> None:
        super().__init__(n_documents, seed, "list")
        self.documents = documents

    def _read(self, numbers: Sequence[int]) -> list[Document]:
        return [checked(self.documents[number], number) for number in numbers]


class InDataset(Listed):
    """The documents in a column of a `datasets.Dataset`."""

    def __init__(self, dataset: Any, column: str | None, n_documents: int, seed: int | None) -> None:
        self.column = column_of(dataset.column_names, column)
        self.dataset = dataset.select_columns([name for name in dataset.column_names if name in (self.column, TOOLS)])
        super().__init__(n_documents, seed, "dataset", column=self.column)

    def _read(self, numbers: Sequence[int]) -> list[Document]:
        if not len(numbers):
            return []
        columns = self.dataset[list(numbers)]
        rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
        return [checked(in_row(row, self.column), number) for number, row in zip(numbers, rows, strict=True)]


class Streamed:
    """The documents in a column of a `datasets.IterableDataset`, or of another iterable that can be read again."""

    def __init__(self, stream: Iterable[object], column: str | None, n_documents: int | None) -> None:
        self.stream, self.column, self.n_documents = stream, column, n_documents
        self.place = 0
        self.reader: Iterator[object] | None = None

    def between(self, start: int, end: int) -> list[tuple[int, Document]]:
        end = end if self.n_documents is None else min(end, self.n_documents)
        if self.reader is None or start != self.place:
            whole = self.stream.skip(start) if hasattr(self.stream, "skip") else _from(self.stream, start)
            self.reader = iter(whole)
        found = []
        for number, row in zip(range(start, end), self.reader, strict=False):
            found.append((number, checked(self._of(row), number)))
        self.place = start + len(found)
        return found

    def _of(self, row: object) -> object:
        if not isinstance(row, dict):
            return row
        self.column = column_of(list(row), self.column)
        return in_row(row, self.column)

    def about(self) -> dict[str, Any]:
        first = [document for _, document in self.between(0, SAMPLE)]
        self.reader = None
        return {"kind": STREAM, "documents": self.n_documents, "column": self.column, "sample": digest(first)}


def documents_of(
    source: object, column: str | None = None, max_documents: int | None = None, seed: int | None = None
) -> Documents:
    """The documents of a source; see `harvest` for what a source can be.

    Raises ValueError for an empty source and a column that does not exist, FileNotFoundError for a path without files,
    TypeError for another source, ImportError if the source needs the package `datasets` and it is missing.
    """
    check_counts(max_documents=max_documents)
    check_integers(seed=seed)
    if isinstance(source, (str, os.PathLike)):
        source = loaded(source)
    if isinstance(source, Tensor):
        source = source.tolist()
    if isinstance(source, Chat):
        source = source.messages
    if isinstance(source, Sequence):
        made: Documents = InMemory(source, _at_most(len(source), max_documents), seed)
    elif hasattr(source, "select_columns") and hasattr(source, "__len__"):
        made = InDataset(source, column, _at_most(len(source), max_documents), seed)
    elif hasattr(source, "__iter__") and not isinstance(source, (Iterator, dict)):
        if seed is not None:
            raise ValueError("a stream cannot be shuffled by a seed: leave seed out, or load the whole data set")
        made = Streamed(source, column, max_documents)
    else:
        raise TypeError(
            "the data must be a list of texts or conversations, token ids [document, pos], a path, the name of a data set or a "
            f"data set of Hugging Face; got a {type(source).__name__}"
        )
    if not made.between(0, 1):
        raise ValueError("the data set is empty: there is nothing to harvest")
    return made


def loaded(source: str | os.PathLike[str]) -> Any:
    """The data set that a path or a name means; several files by a pattern such as "corpus/*.jsonl"."""
    path = Path(source)
    names = sorted(glob.glob(str(source), recursive=True)) if not path.is_dir() else sorted(map(str, path.rglob("*")))
    files = [name for name in names if Path(name).suffix in BUILDERS]
    is_saved = path.is_dir() and (path / "dataset_info.json").exists()
    if not files and not is_saved:
        if path.suffix in BUILDERS or path.exists() or str(source).startswith((".", "/", "~")):
            raise FileNotFoundError(f"no file of {', '.join(BUILDERS)} is at {source}")
        if not NAME.fullmatch(str(source)):
            raise ValueError(f"{str(source)!r} is neither a path nor the name of a data set; give texts as a list")
    try:
        import datasets
    except ImportError:
        raise ImportError(
            "files and named data sets need the package datasets: pip install 'hooked-lm[corpus]'"
        ) from None
    if files:
        if len(kinds := {Path(name).suffix for name in files}) > 1:
            raise ValueError(f"{source} has files of several kinds, {', '.join(sorted(kinds))}: name one of them")
        return _read(datasets, BUILDERS[kinds.pop()], files)
    if is_saved:
        return datasets.load_from_disk(str(path))
    return hub_files.dataset(str(source), split="train")


def _read(datasets: ModuleType, kind: str, files: list[str]) -> Any:
    """The data set in files of one kind; ValueError, with their names, for files that are empty or cannot be read."""
    names = ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
    if not any(os.path.getsize(file) for file in files):
        raise ValueError(f"the data set is empty: there is nothing in {names}")
    try:
        return datasets.load_dataset(kind, data_files=files, split="train")
    except (datasets.exceptions.DatasetGenerationError, StopIteration) as error:
        raise ValueError(f"cannot read {names} as {kind}: {error.__cause__ or error or 'no data'}") from error


def column_of(columns: Sequence[str], column: str | None) -> str:
    """The column of the documents. Raises ValueError for one that does not exist, and if none can be guessed."""
    wanted = [column] if column is not None else [name for name in COLUMNS if name in columns]
    if not wanted or wanted[0] not in columns:
        what = "which column has the documents? column=" if column is None else f"there is no column {column!r}: "
        raise ValueError(f"{what}one of {', '.join(map(repr, columns))}")
    return wanted[0]


def in_row(row: Mapping[str, Any], column: str) -> object:
    """The document in a row of a data set; a conversation with its tools, and without the nulls by which a table fills fields."""
    document = row[column]
    return _filled({"messages": document, TOOLS: row.get(TOOLS)}) if is_conversation(document) else document


def _filled(value: object) -> Any:
    """The same without the fields of dicts that are null, but for the content of a message."""
    if isinstance(value, Mapping):
        return {name: _filled(of) for name, of in value.items() if of is not None or name == "content"}
    return [_filled(each) for each in value] if isinstance(value, list) else value


def is_conversation(document: object) -> TypeGuard[Conversation | Sequence[Mapping[str, Any]]]:
    """Whether a document is a list of messages, or a dict with "messages"."""
    if isinstance(document, Mapping):
        return "messages" in document
    return isinstance(document, (list, tuple)) and bool(document) and isinstance(document[0], Mapping)


def checked(document: object, number: int) -> Document:
    """A text, a list of ids or a conversation; TypeError for anything else, and ValueError for messages that say nothing."""
    if isinstance(document, Tensor):
        document = document.tolist()
    if is_conversation(document):
        return _conversation(document, number)
    if isinstance(document, str) or (isinstance(document, Sequence) and all(isinstance(i, int) for i in document)):
        return document
    raise TypeError(
        f"document {number} must be a text, a list of token ids or a list of messages, got {str(document)[:40]!r} "
        f"({type(document).__name__})"
    )


def _conversation(document: Conversation | Sequence[Mapping[str, Any]], number: int) -> Conversation:
    """The conversation in a document, checked but for what its template says of it."""
    given = document if isinstance(document, Mapping) else {"messages": document}
    with named(number):
        tools = {TOOLS: given[TOOLS]} if given.get(TOOLS) else {}
        found = {"messages": list(checked_messages(given["messages"])), **tools}
        json.dumps(found)
    return found


@contextmanager
def named(number: int) -> Iterator[None]:
    """A block whose errors name the document."""
    try:
        yield
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"document {number}: {error}") from error


def digest(documents: Iterable[Document]) -> str:
    """A hash of documents."""
    whole = hashlib.sha256()
    for document in documents:
        whole.update(hashlib.sha256(_text(document).encode()).digest())
    return whole.hexdigest()


def _text(document: Document) -> str:
    """What identifies a document."""
    if isinstance(document, Mapping):
        return json.dumps(document, sort_keys=True)
    return repr(document if isinstance(document, str) else list(document))


def _at_most(n: int, most: int | None) -> int:
    return n if most is None else min(n, most)


def _from(iterable: Iterable[object], start: int) -> Iterator[object]:
    reader = iter(iterable)
    for _ in zip(range(start), reader, strict=False):
        pass
    return reader
