"""The plan of a job: everything that determines its files, written before anything is computed."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from hooked_lm.engine.fingerprint import Digest, modes, tokenizer_digest
from hooked_lm.files import OF_DAMAGE, made_folder, no_such, replacing
from hooked_lm.hooks import HookedRootModule
from hooked_lm.notebook_repr import NotebookRepr

FILE = "plan.json"
Own = TypeVar("Own", bound="Plan")


@dataclass(frozen=True, repr=False)
class Plan(NotebookRepr, ABC):
    """What a job computes: everything that determines its files.

    The items of the data are cut into shards by their places alone: each shard but the last has `items_per_shard` items.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    items_per_shard: int
    batch_size: int
    threads: int  # of each forward pass on a CPU
    versions: dict[str, str]
    KIND: ClassVar[str]  # of the job, in errors
    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    @property
    @abstractmethod
    def n_items(self) -> int | None:
        """The number of items; None for a stream whose end is not known."""

    @property
    def n_shards(self) -> int | None:
        """The number of shards; None for a stream whose end is not known."""
        return None if self.n_items is None else -(-self.n_items // self.items_per_shard)

    def __repr__(self) -> str:
        size = "a stream" if self.n_items is None else f"{self.n_items:,} items in {self.n_shards:,} shards"
        return f"{type(self).__name__}({self.KIND} with {self.model['name']}: {size})"

    def places(self, shard: int) -> tuple[int, int]:
        """The items of a shard, from the first place to before the second."""
        start = shard * self.items_per_shard
        end = start + self.items_per_shard
        return start, end if self.n_items is None else min(end, self.n_items)

    @property
    def facts(self) -> dict[str, Any]:
        """The content of the plan's file but for its hash."""
        n = self.n_shards
        shards = None if n is None else [list(self.places(shard)) for shard in range(n)]
        return {"format": self.FORMAT, "version": self.VERSION, **asdict(self), "shards": shards}

    @property
    def digest(self) -> str:
        """A hash of the plan."""
        return hashlib.sha256(json.dumps(self.facts).encode()).hexdigest()

    @property
    def text(self) -> str:
        """The content of the plan's file."""
        return json.dumps({**self.facts, "sha256": self.digest}, indent=1) + "\n"

    def folder(self, directory: str | os.PathLike[str]) -> Path:
        """The folder of this job in a directory: the model's name and a part of the plan's hash."""
        name = "".join(c if c.isalnum() or c in "-._" else "-" for c in Path(self.model["name"]).name or "model")
        return Path(directory) / f"{name[:60]}-{self.digest[:16]}"

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """The folder of this job, made with its plan if it does not exist."""
        folder = made_folder(self.folder(directory))
        if not (folder / FILE).exists():
            with replacing(folder / FILE) as unfinished:
                unfinished.write_bytes(self.text.encode())
                with unfinished.open("rb") as file:
                    os.fsync(file.fileno())
        elif (folder / FILE).read_bytes() != self.text.encode():
            raise ValueError(f"{folder / FILE} was changed: it is not the plan that the folder is named after")
        return folder

    @classmethod
    def read(cls: type[Own], folder: str | os.PathLike[str]) -> Own:
        """The plan in a folder. Raises FileNotFoundError without one, ValueError for a damaged one."""
        path = Path(folder) / FILE
        if not Path(folder).exists():
            raise no_such("folder", folder)
        if not path.exists():
            inside = sorted(each.parent.name for each in Path(folder).glob(f"*/{FILE}"))
            hint = f"; open one of the folders in it: {', '.join(inside[:10])}" if inside else ""
            raise FileNotFoundError(f"{folder} has no {FILE}: it is not the folder of a {cls.KIND}{hint}")
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, IsADirectoryError) as error:
            raise ValueError(f"{path} is damaged: it is not JSON ({error})") from None
        if not isinstance(read, dict):
            raise ValueError(f"{path} is damaged: it holds a {type(read).__name__}, not the fields of a plan")
        if (read.pop("format", None), read.pop("version", None)) != (cls.FORMAT, cls.VERSION):
            raise ValueError(f"{path} is not the plan of a {cls.KIND} in format {cls.FORMAT}, version {cls.VERSION}")
        digest, _ = read.pop("sha256", None), read.pop("shards", None)
        try:
            plan = cls(**read)
            found = plan.digest
        except OF_DAMAGE as error:
            raise ValueError(f"{path} was changed since it was written: {type(error).__name__}: {error}") from None
        if found != digest:
            raise ValueError(f"{path} was changed since it was written: its hash is {found[:12]}, not {digest}")
        return plan


def name_of(model: HookedRootModule) -> str:
    """The name of a model in plans."""
    return str(getattr(getattr(model, "cfg", None), "model_name", None) or type(model).__name__)


def facts_of_model(model: HookedRootModule) -> dict[str, Any]:
    """What a plan says of the model: its name, the hashes of its weights and of its tokenizer, where and how it computes."""
    tokenizer, parameter = getattr(model, "tokenizer", None), next(model.parameters())
    return {
        "name": name_of(model),
        "sha256": Digest().of(model).hex(),
        "tokenizer": None if tokenizer is None else tokenizer_digest(tokenizer),
        "device": parameter.device.type,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        **modes(),
    }


def versions(*packages: str) -> dict[str, str]:
    """The versions of this package, of torch and of further packages."""
    return {
        "hooked_lm": version("hooked-lm"),
        "torch": str(torch.__version__),
        **{name: version(name) for name in packages},
    }


def check_counts(**counts: object) -> None:
    """Raises TypeError for what is not an integer, ValueError for one below 1; None is a default."""
    check_integers(**counts)
    for name, number in counts.items():
        if isinstance(number, int) and number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")


def check_integers(**numbers: object) -> None:
    """Raises TypeError for what is neither an integer nor None."""
    for name, number in numbers.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise TypeError(f"{name} must be an integer, got {number!r} ({type(number).__name__})")
