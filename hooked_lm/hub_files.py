"""Files and data sets of the hub, in its cache; and whether the hub can be reached."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

__all__ = ["dataset", "files", "snapshot", "unreachable"]

CONNECTION_SECONDS = 3
Option = str | bool | Path | None  # `revision`, `cache_dir`, `local_files_only`, `token`, `force_download`


def unreachable() -> str | None:
    """Why no connection to the hub can be made, found out within seconds; None if it can, or if that is unknown.

    huggingface_hub tries each request six times, for half a minute in all.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode() or getproxies():
        return None
    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=CONNECTION_SECONDS).close()
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"
    return None


def snapshot(repository: str, patterns: Sequence[str], **download: Option) -> Path:
    """The folder of a repository in the cache, after a download of the files that match a pattern.

    Without a connection it is what was downloaded before. `download` are arguments of `snapshot_download` of huggingface_hub,
    such as `revision`. Raises ValueError if the hub does not give the repository.
    """
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {**download}
    why = None if options.get("local_files_only") else unreachable()
    if why is not None:
        options["local_files_only"] = True
    try:
        return Path(snapshot_download(repository, allow_patterns=list(patterns), **options))
    except (OSError, ValueError) as error:
        raise ValueError(f"the hub did not give {', '.join(patterns)} of {repository!r}: {why or error}") from error


def files(repository: str, **download: Option) -> list[str]:
    """The paths of all files of a repository; without a connection, of those in the cache."""
    from huggingface_hub import HfApi

    if not download.get("local_files_only") and unreachable() is None:
        options: dict[str, Any] = {name: download.get(name) for name in ("token", "revision")}
        try:
            return list(HfApi().list_repo_files(repository, **options))
        except Exception:  # of many kinds without a connection; what is in the cache may do
            pass
    folder = snapshot(repository, ["README.md"], **download)
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def dataset(name: str, *parts: str | None, **options: object) -> Any:
    """The data set of a repository, by `datasets.load_dataset`; without a connection, what was downloaded before.

    Raises ConnectionError, with the reason, if that is nothing; ImportError if the package `datasets` is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise ImportError("data sets need the package datasets: pip install 'hooked-lm[corpus]'") from None
    if (why := unreachable()) is None:
        return datasets.load_dataset(name, *parts, **options)
    was_offline, datasets.config.HF_HUB_OFFLINE = (
        datasets.config.HF_HUB_OFFLINE,
        True,
    )  # else it tries for half a minute
    try:
        return datasets.load_dataset(name, *parts, **options)
    except ConnectionError as error:
        raise ConnectionError(
            f"the data set {name!r} is not in the cache of the hub, which cannot be reached: {why}"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline
