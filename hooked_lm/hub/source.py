"""Where a checkpoint is: a local directory, or a repository on the hub. Both give files by their paths, and a tokenizer."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from hooked_lm.families.short_names import BUNDLED_NAMES, SHORT_NAMES
from hooked_lm.hub.names import hub_id, local_folder, spelled
from hooked_lm.hub.processor import processor_in
from hooked_lm.hub_files import unreachable

TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.pth")


@dataclass(frozen=True)
class Directory:
    """A local directory; `name` is the name that the user gave for it."""

    name: str
    path: Path
    repository: str | None = None  # of which it is the copy in the cache

    def file(self, name: str) -> Path:
        """The path of a file, which may be missing."""
        return self.path / name

    def files(self) -> list[str]:
        """The relative paths of all files."""
        return _files_below(self.path)

    def folder(self, weights: bool = True) -> Path:
        """The directory. Raises ValueError if there is none."""
        self.check()
        return self.path

    def check(self) -> None:
        """Raises ValueError if there is no such folder."""
        if self.path.is_file():
            raise ValueError(f"{self.name!r} is a file: give the folder that it is in, {str(self.path.parent)!r}")
        if not self.path.is_dir():
            where = self.path.absolute()
            near = get_close_matches(where.name, _folders_in(where.parent), n=2)
            hint = f"; near it is {' and '.join(map(repr, near))}" if near else ""
            whole = "" if str(where) == self.name else f" ({where})"
            raise ValueError(f"no such folder: {self.name!r}{whole}{hint}")

    def tokenizer(self) -> Any:
        """The tokenizer in the directory; None if there is none."""
        return tokenizer_in(self.path, self.repository)

    def processor(self) -> tuple[Any, str | None]:
        """The processor in the directory, or None and why; see `processor_in`."""
        return processor_in(self.path)

    def at(self, revision: str | None) -> "Directory":
        """This directory: it has no revisions."""
        return self


@dataclass(frozen=True)
class Repository:
    """A repository on the hub; its files are downloaded into the hub's cache when they are needed."""

    name: str
    revision: str | None = None
    local_files_only: bool = False
    token: str | bool | None = None
    cache_dir: str | Path | None = None
    force_download: bool = False
    unreachable: str | None = None  # why the hub cannot be reached

    @property
    def repository(self) -> str:
        """The id of the repository."""
        return self.name

    def check(self) -> None:
        """Nothing: whether there is such a repository turns out with its first file."""

    @property
    def has_config(self) -> bool:
        """Whether the hub gives a `config.json`, which checkpoints in HF format have, and those of TransformerLens."""
        try:
            self.file("config.json")
        except ValueError:
            return False
        return True

    @cached_property
    def _answers(self) -> dict[str, Path | ValueError]:
        """The files that the hub gave, or why not: it is asked once for each."""
        return {}

    def file(self, name: str) -> Path:
        """The path of a file in the cache, after a download if needed. Raises ValueError if the hub does not give it."""
        if name not in self._answers:
            try:
                self._answers[name] = self._downloaded(name)
            except ValueError as error:
                self._answers[name] = error
        answer = self._answers[name]
        if isinstance(answer, ValueError):
            raise answer
        return answer

    def _downloaded(self, name: str) -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(self.name, name, **self._download))
        except (OSError, ValueError) as error:
            raise ValueError(f"the hub did not give {name} of {self.name!r}: {self.unreachable or error}") from error

    def files(self) -> list[str]:
        """The paths of all files of the repository; without a connection, of those in the cache."""
        if self.local_files_only:
            return _files_below(self.file("config.json").parent)
        from huggingface_hub import HfApi

        try:
            return list(HfApi(token=self.token).list_repo_files(self.name, revision=self.revision))
        except Exception as error:  # huggingface_hub raises errors of many kinds without a connection
            cached = _files_below(self.file("config.json").parent)
            if any(file.endswith((".pth", ".safetensors")) for file in cached):
                return cached
            raise ValueError(f"the hub did not list the files of {self.name!r}: {error}") from error

    def folder(self, weights: bool = True) -> Path:
        """The directory in the cache, after a download of configs, tokenizer and weights.

        Pickles are downloaded only if there are no safetensors. Raises ValueError if the hub does not give the repository.
        """
        from huggingface_hub import snapshot_download

        patterns = [*TEXT_FILES, *(["model*.safetensors"] if weights else [])]
        try:
            folder = Path(
                snapshot_download(self.name, allow_patterns=patterns, ignore_patterns="*/*", **self._download)
            )
            if weights and not list(folder.glob("model*.safetensors")):
                pickles = "pytorch_model*.bin"
                snapshot_download(self.name, allow_patterns=pickles, ignore_patterns="*/*", **self._download)
        except (OSError, ValueError) as error:
            if self.unreachable is not None:  # the name may well be right
                raise ValueError(
                    f"no such folder: {self.name!r}; and no repository of that name is in the cache of the hub, which "
                    f"cannot be reached: {self.unreachable}"
                ) from error
            near = get_close_matches(self.name.lower(), [*BUNDLED_NAMES, *SHORT_NAMES], n=3)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ValueError(
                f"there is no directory {self.name!r}, and the hub did not give a repository of that name: "
                f"{str(error).rstrip('.')}{hint}"
            ) from error
        return folder

    def tokenizer(self) -> Any:
        """The tokenizer of the repository; None if there is none, or no such repository."""
        try:
            folder = self.folder(weights=False)
        except ValueError:
            return None
        return tokenizer_in(folder, self.name)

    def processor(self) -> tuple[Any, str | None]:
        """The processor of the repository, or None and why; see `processor_in`."""
        try:
            return processor_in(self.folder(weights=False))
        except ValueError:
            return None, None

    def at(self, revision: str | None) -> "Repository":
        """The repository at a revision."""
        return replace(self, revision=revision)

    @property
    def _download(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in vars(self).items()
            if name not in ("name", "unreachable", "_answers") and value is not None
        }


Source = Directory | Repository


def find(model_name: str | os.PathLike[str], files: Iterable[str] = ("*",), **download: Any) -> Source:
    """The directory or repository that a name means; `download` are fields of `Repository`.

    A repository that is cached without its organisation ("gpt2") takes precedence if it has a file that matches a glob of
    `files`.
    """
    name = spelled(model_name)
    folder = local_folder(name)
    if folder is not None or name.count("/") > 1:  # ids of the hub have at most one slash
        return Directory(name, Path(name).expanduser() if folder is None else folder)
    repository = Repository(_repository_id(name, files, **download), **download)
    if repository.local_files_only or (why := unreachable()) is None:
        return repository
    return replace(repository, local_files_only=True, unreachable=why)


def _folders_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []


def _repository_id(
    name: str,
    files: Iterable[str],
    cache_dir: str | Path | None = None,
    revision: str | None = None,
    **unused: object,
) -> str:
    from huggingface_hub import try_to_load_from_cache

    known = hub_id(name)
    for bare in dict.fromkeys((name, known.rpartition("/")[2])) if known != name else ():
        cached = try_to_load_from_cache(bare, "config.json", cache_dir, revision)
        if isinstance(cached, str) and any(any(Path(cached).parent.glob(glob)) for glob in files):
            return bare
    return known


def _files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory contains a tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def tokenizer_in(folder: Path, repository: str | None = None) -> Any:
    """The tokenizer in a directory; None if there is none. Raises ValueError for one that transformers cannot load.

    That of a repository on the hub, which is in a directory of the cache, has the repository's name, as in transformers.
    """
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ImportError:  # of a package that it needs, which the error names
        raise
    except Exception as error:  # tokenizers raises Exception itself, transformers whatever a damaged file leads to
        files = ", ".join(file for file in TOKENIZER_FILES if (folder / file).exists())
        raise ValueError(
            f"the tokenizer in {folder} ({files}) cannot be loaded: {type(error).__name__}: {error}; give another one with "
            "tokenizer=..."
        ) from error
    tokenizer.name_or_path = repository or tokenizer.name_or_path
    return tokenizer


def named_tokenizer(name: str) -> Any:
    """The tokenizer of a directory, a short name or a hub id. Raises ValueError if there is none."""
    found = find(name, TOKENIZER_FILES).tokenizer()
    if found is None:
        raise ValueError(f"there is no tokenizer in a directory {name!r}, and the hub gave none of that name")
    return found
