"""Where a model comes from: a directory, the hub, or a transformers object."""

import copy
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import Tensor

from hooked_lm.families import family
from hooked_lm.families._short_names import SHORT_NAMES
from hooked_lm.hub.plausible import check_values, read_json
from hooked_lm.weights import open_checkpoint

DEMO = Path(__file__).parents[1] / "demo" / "model"
TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
GENERATION_FACTS = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id")
DOWNLOAD_OPTIONS = ("token", "cache_dir", "force_download")


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a directory or an HF model object, with its HF config."""

    name: str
    folder: Path | None
    hf_model: Any
    config: Any

    def tensors(self, mmap: bool) -> Mapping[str, Tensor]:
        """The weights under their names on disk."""
        if self.hf_model is None:
            assert self.folder is not None
            return open_checkpoint(self.folder, mmap=mmap)
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.hf_model, self.hf_model.state_dict())

    def architectures(self) -> list[str]:
        """The transformers class that the weights are of."""
        if self.hf_model is not None:
            return [type(self.hf_model).__name__]
        return list(self.config.architectures or [])

    def generation_facts(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of these special tokens that the checkpoint's configs name; what is in `bad_words_ids` is suppressed."""
        given = {**self.config.to_dict(), **self._generation_config()}
        facts = {name: given[name] for name in GENERATION_FACTS if given.get(name) is not None}
        if banned := given.get("bad_words_ids"):
            facts["suppress_tokens"] = tuple(ids[0] for ids in banned if len(ids) == 1)
        wanted = set(names)
        return {name: value for name, value in facts.items() if name in wanted}

    def _generation_config(self) -> dict[str, Any]:
        if self.hf_model is not None:
            config = getattr(self.hf_model, "generation_config", None)
            return {} if config is None else {k: v for k, v in config.to_dict().items() if v is not None}
        file = (self.folder or Path()) / "generation_config.json"
        return read_json(file) if file.is_file() else {}


def short_names() -> dict[str, str]:
    """Short name -> hub id."""
    return dict(SHORT_NAMES)


def hub_id(model_name: str) -> str:
    return SHORT_NAMES.get(model_name.lower(), model_name)


def repository(name: str, revision: str | None, hf_kwargs: Mapping[str, Any], files: Iterable[str]) -> str:
    """The hub id of a name. One that the local cache holds as it is ("gpt2") goes before its organisation's.

    `files` are globs of which the cache must have one.
    """
    from huggingface_hub import try_to_load_from_cache

    known = hub_id(name)
    for bare in dict.fromkeys((name, known.rpartition("/")[2])) if known != name else ():
        cached = try_to_load_from_cache(bare, "config.json", cache_dir=hf_kwargs.get("cache_dir"), revision=revision)
        if isinstance(cached, str) and any(any(Path(cached).parent.glob(glob)) for glob in files):
            return bare
    return known


def spelled(model_name: str | os.PathLike[str]) -> str:
    """A name as it was given; that of a path is never one of the hub, nor a short one.

    >>> spelled("demo"), spelled(Path("demo"))
    ('demo', './demo')
    """
    name = str(model_name)
    return os.path.join(os.curdir, name) if isinstance(model_name, os.PathLike) and not _is_path(name) else name


def _is_path(name: str) -> bool:
    """Whether a name is spelled as a path: "./demo", "../demo", "~/demo", "/demo"."""
    first = re.split(r"[/\\]", name)[0]
    return os.path.isabs(name) or first in (os.curdir, os.pardir) or first.startswith("~")


def local_folder(model_name: str | os.PathLike[str]) -> Path | None:
    """The directory that a name means; None if it is for the hub.

    A path (also a string that is spelled as one) means the directory there, "demo" the bundled model. Another string means
    a directory of that name if there is one, but a short name ("gpt2") only one that holds a model.
    """
    name = spelled(model_name)
    if name == "demo":
        return DEMO
    folder = Path(name).expanduser()
    if _is_path(name):
        return folder
    is_meant = name and folder.is_dir() and (name.lower() not in SHORT_NAMES or (folder / "config.json").is_file())
    return folder if is_meant else None


def check_no_code(hf_kwargs: Mapping[str, Any]) -> None:
    if hf_kwargs.get("trust_remote_code"):
        raise ValueError("trust_remote_code=True is refused: code from a checkpoint is never run")


def find(
    model_name: str | os.PathLike[str],
    hf_model: Any,
    revision: str | None,
    local_files_only: bool,
    hf_kwargs: Mapping[str, Any],
    weights: bool = True,
) -> Source:
    """What a name, a directory or an HF model means; without `weights` only the small files are downloaded."""
    check_no_code(hf_kwargs)
    hf_kwargs = {name: value for name, value in hf_kwargs.items() if name != "trust_remote_code"}
    overrides = {name: value for name, value in hf_kwargs.items() if name not in DOWNLOAD_OPTIONS}
    if hf_model is not None:
        if overrides:
            raise ValueError(f"{', '.join(overrides)} cannot be given beside hf_model: it brings its own config")
        hf_model = _merged(hf_model)
        return Source(hub_id(spelled(model_name)), None, hf_model, hf_model.config)
    name, folder = spelled(model_name), local_folder(model_name)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{name!r} is no directory here")
    if folder is None:
        name = repository(
            name, revision, hf_kwargs, ("model*.safetensors", "pytorch_model*.bin") if weights else ("*",)
        )
        folder = _download(name, revision, local_files_only, hf_kwargs, weights)
    return Source(name, folder, None, _hf_config(folder, overrides))


def _hf_config(folder: Path, overrides: Mapping[str, Any]) -> Any:
    """The HF config of a directory, once it is known to be of a supported family."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"no config.json in {folder}: not a model in HF format")
    written = read_json(file)
    model_type = written.get("model_type")
    if model_type is None:
        raise ValueError(f"{file} names no model_type: it is not the config of a transformers model")
    family(str(model_type))
    check_values({**written, **overrides}, str(file))
    from transformers import AutoConfig

    try:
        config, unused = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, return_unused_kwargs=True, **overrides
        )
    except Exception as error:  # of many kinds, as each class checks its own fields
        raise ValueError(f"{file} is not the config of a {model_type}: {error}") from error
    if unused:
        raise ValueError(f"unknown options {', '.join(unused)}: neither ours nor fields of a {model_type} config")
    return config


def _download(
    name: str,
    revision: str | None,
    local_files_only: bool,
    hf_kwargs: Mapping[str, Any],
    weights: bool = True,
) -> Path:
    """The directory in the hub's cache that holds a model's files: safetensors, pickles only where there are none."""
    from huggingface_hub import snapshot_download

    options = {key: hf_kwargs[key] for key in DOWNLOAD_OPTIONS if key in hf_kwargs}
    options |= {"revision": revision, "local_files_only": local_files_only}
    patterns = [*TEXT_FILES, *(["model*.safetensors"] if weights else [])]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns="*/*", **options))
        if weights and not list(folder.glob("model*.safetensors")):
            snapshot_download(name, allow_patterns="pytorch_model*.bin", ignore_patterns="*/*", **options)
    except (OSError, ValueError) as error:
        near = get_close_matches(name.lower(), SHORT_NAMES, n=3)
        hint = f" (short names near it: {', '.join(near)})" if near else ""
        raise ValueError(f"{name!r} is no directory here, and the hub did not give it{hint}: {error}") from error
    return folder


def _merged(hf_model: Any) -> Any:
    """An HF model without adapters: those of a PEFT model are merged into a copy."""
    if not hasattr(hf_model, "peft_config"):
        return hf_model
    if not hasattr(hf_model, "merge_and_unload"):
        raise ValueError(f"the adapters of this {type(hf_model).__name__} cannot be merged into its weights")
    return copy.deepcopy(hf_model).merge_and_unload()


def named_tokenizer(name: str) -> Any:
    """The tokenizer of a directory, a short name or a hub id. Raises ValueError if there is none."""
    where = spelled(name) if local_folder(name) is not None else repository(name, None, {}, TOKENIZER_FILES)
    found = find_tokenizer(Source(where, None, None, None), None, False, {})
    if found is None:
        raise ValueError(f"no directory here is a tokenizer {name!r}, and the hub gave none")
    return found


def find_tokenizer(source: Source, revision: str | None, local_files_only: bool, hf_kwargs: Mapping[str, Any]) -> Any:
    """The tokenizer that lies beside the weights, or under an HF model's name; None if there is none."""
    folder = source.folder
    if folder is None:
        folder = local_folder(source.name)
        if folder is None:
            try:
                folder = _download(source.name, revision, local_files_only, hf_kwargs, weights=False)
            except ValueError:
                return None
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies in a directory."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


class _Renamed(Mapping[str, Tensor]):
    """Tensors under other names."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def in_present_names(tensors: Mapping[str, Tensor], renamed: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Tensors under the names that are written today; `renamed` says what (by regular expressions) old ones have become."""

    def today(name: str) -> str:
        for old, new in renamed.items():
            name = re.sub(old, new, name)
        return name

    names = {today(name): name for name in tensors}
    return tensors if all(new == old for new, old in names.items()) else _Renamed(tensors, names)
