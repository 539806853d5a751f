"""Files and data sets of the hub."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, hf_hub_download

from hooked_lm.compat.attributes import select_compatible_kwargs
from hooked_lm.hub.names import hub_id

__all__ = [
    "CACHE_DIR", "clear_huggingface_cache", "download_file_from_hf",
    "get_rotary_pct_from_config", "keep_single_column",
]  # fmt: skip

CACHE_DIR: str = constants.HF_HUB_CACHE
OF_THE_HUB = ("models--*", "datasets--*", "spaces--*", "kernels--*", ".locks", "version.txt", "CACHEDIR.TAG")


def download_file_from_hf(
    repo_name: str,
    file_name: str,
    subfolder: str = ".",
    cache_dir: str | None = None,
    force_is_torch: bool = False,
    **kwargs: Any,
) -> Any:
    """The content of a repository's file: tensors (".pth", or with `force_is_torch`), JSON, or for other files the path.

    Args:
        repo_name: a hub id, a short name of a model, or a local directory, from which nothing is copied.
        subfolder: the folder in the repository; "." is its root.
        cache_dir: the directory for downloads; None is the hub's cache.
        kwargs: for `huggingface_hub.hf_hub_download`, such as `revision`, `token` or `local_files_only`; others are
            ignored.

    Pickles may contain only tensors and plain containers; others are refused.
    """
    if Path(repo_name).is_dir():
        path = Path(repo_name, subfolder, file_name)
        if not path.is_file():
            raise FileNotFoundError(f"no {Path(subfolder, file_name)} in the directory {repo_name}")
    else:
        options = select_compatible_kwargs(kwargs, hf_hub_download)
        folder = None if subfolder == "." else subfolder
        found = hf_hub_download(hub_id(repo_name), file_name, subfolder=folder, cache_dir=cache_dir, **options)
        path = Path(found)
    if path.suffix == ".pth" or force_is_torch:
        return torch.load(path, map_location="cpu", weights_only=True)
    return json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else str(path)


def clear_huggingface_cache() -> None:
    """Deletes every downloaded model, dataset and space from the hub's cache (`CACHE_DIR`).

    Other files in that directory are kept.
    """
    for pattern in OF_THE_HUB:
        for path in Path(constants.HF_HUB_CACHE).glob(pattern):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)  # another process may delete it at the same time
            else:
                path.unlink(missing_ok=True)


def keep_single_column(dataset: Any, col_name: str) -> Any:
    """A dataset of the library `datasets` with only one of its columns."""
    others = [name for name in dataset.column_names if name != col_name]
    return dataset.remove_columns(others) if others else dataset


def get_rotary_pct_from_config(config: Any) -> float:
    """The share of a head's dimensions that rotate, from a transformers config (version 5 or older).

    >>> from types import SimpleNamespace
    >>> get_rotary_pct_from_config(
    ...     SimpleNamespace(rope_parameters={"partial_rotary_factor": 0.25})
    ... )
    0.25
    """
    old = getattr(config, "rotary_pct", None)
    new = getattr(config, "rope_parameters", None) or {}
    return old if old is not None else new.get("partial_rotary_factor", 1.0)
