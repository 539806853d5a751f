"""Downloads the files of a hub repository, and loads tokenizers."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hooked_lm.hub.names import hub_id
from hooked_lm.hub.options import Options
from hooked_lm.hub.short_names import SHORT_NAMES

TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def read_json(file: Path) -> dict[str, Any]:
    """The fields of a `config.json`. Raises ValueError for a file that is not a JSON object."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{file} is not a model's config: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{file} is not a model's config: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{file} is not a model's config: it holds a {type(fields).__name__}")
    return fields


def repository(options: Options, files: Iterable[str]) -> str:
    """The hub id of a name. A repository cached without its organisation ("gpt2") takes precedence.

    A cached repository counts only if it has a file that matches one of the globs `files`.
    """
    from huggingface_hub import try_to_load_from_cache

    name, known = options.name, hub_id(options.name)
    where = {"cache_dir": options.download.get("cache_dir"), "revision": options.revision}
    for bare in dict.fromkeys((name, known.rpartition("/")[2])) if known != name else ():
        cached = try_to_load_from_cache(bare, "config.json", **where)
        if isinstance(cached, str) and any(any(Path(cached).parent.glob(glob)) for glob in files):
            return bare
    return known


def download(name: str, options: Options, weights: bool = True) -> Path:
    """Downloads a model and returns its directory in the hub's cache; pickles only if there are no safetensors."""
    from huggingface_hub import snapshot_download

    how = {"revision": options.revision, "local_files_only": options.local_files_only, **options.download}
    patterns = [*TEXT_FILES, *(["model*.safetensors"] if weights else [])]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns="*/*", **how))
        if weights and not list(folder.glob("model*.safetensors")):
            snapshot_download(name, allow_patterns="pytorch_model*.bin", ignore_patterns="*/*", **how)
    except (OSError, ValueError) as error:
        near = get_close_matches(name.lower(), SHORT_NAMES, n=3)
        hint = f" (short names near it: {', '.join(near)})" if near else ""
        raise ValueError(f"{name!r} is no directory here, and the hub did not give it{hint}: {error}") from error
    return folder


def has_tokenizer(folder: Path) -> bool:
    """Whether a directory contains a tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def tokenizer_in(folder: Path) -> Any:
    """The tokenizer in a directory; None if there is none."""
    if not has_tokenizer(folder):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def tokenizer_of(options: Options) -> Any:
    """The tokenizer of a directory, a short name or a hub id, also without a model; None if there is none."""
    folder = options.folder
    if folder is None:
        try:
            folder = download(repository(options, TOKENIZER_FILES), options, weights=False)
        except ValueError:
            return None
    return tokenizer_in(folder)


def named_tokenizer(name: str) -> Any:
    """The tokenizer of a directory, a short name or a hub id. Raises ValueError if there is none."""
    found = tokenizer_of(Options(name))
    if found is None:
        raise ValueError(f"no directory here is a tokenizer {name!r}, and the hub gave none")
    return found
