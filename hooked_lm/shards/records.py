"""Shards on disk: files that are written under a temporary name, and the records that make them valid."""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hooked_lm.files import replacing, unfinished_path

PIECE = 1 << 23  # bytes that are read at once for a checksum
PLAN = "plan.json"
INDEX = "index.json"  # a cache of the records, which may be deleted
SEAL = "record_sha256"  # of a record and the plan: a changed record is found, and one of another job
AGAIN = "delete it, and run the same call again"


def record_path(folder: Path, shard: int) -> Path:
    """The file of a shard's record; without it the shard does not exist."""
    return folder / f"shard-{shard:06d}.json"


def recorded(folder: Path) -> list[int]:
    """The shards with a record, in order. Warns of files with other names, such as a cloud folder's copies of conflicts."""
    named = {path.name: re.fullmatch(r"shard-(\d{6,})\.json", path.name) for path in folder.glob("shard-*.json")}
    if others := sorted(name for name, match in named.items() if match is None):
        warnings.warn(f"{folder} has files that are no shards: {', '.join(others)}. They are ignored", stacklevel=2)
    return sorted(int(match[1]) for match in named.values() if match is not None)


def commit(unfinished: Path, path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Makes a file that is written and its record valid, and returns the record, with the file's size and checksum.

    Several processes may commit the same shard: a file that is there is never replaced by other bytes, with a record or before
    it has one. Raises ValueError if the shard exists with other bytes.
    """
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    record = {**record, "file": path.name, "bytes": unfinished.stat().st_size, "sha256": checksum(unfinished)}
    record[SEAL] = seal(path.parent, record)
    final = path.with_suffix(".json")
    if not final.exists():
        _place(unfinished, path, record["sha256"])
        if write_record(final, record):
            return record
    unfinished.unlink(missing_ok=True)
    known = read_record(final, ("sha256",))
    _check_same(path, known["sha256"], record["sha256"])
    return known


def _place(unfinished: Path, path: Path, sha256: str) -> None:
    """Gives a file its name, unless other bytes have it."""
    try:
        os.link(unfinished, path)
    except FileExistsError:  # by another process, or by one that was killed before it wrote its record
        _check_same(path, checksum(path), sha256)
        os.replace(unfinished, path)
    except OSError:  # a file system without links: the last of two processes that write at once replaces the first
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)


def _check_same(path: Path, known: str, sha256: str) -> None:
    if known != sha256:
        raise ValueError(
            f"{path.stem} was written before with other bytes ({known[:12]}, now {sha256[:12]}): the machines or libraries that "
            "write here do not compute the same. The first is kept; to compute it anew, delete its file and its record"
        )


def write_record(path: Path, record: dict[str, Any]) -> bool:
    """Writes a record so that it is there as a whole or not at all, also after a loss of power; False if there was one."""
    unfinished = unfinished_path(path)
    with unfinished.open("w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(unfinished, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync_folder(path.parent)
    return True


def sync_folder(folder: Path) -> None:
    """Makes renamed files of a folder survive a loss of power."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def checksum(path: Path) -> str:
    """The sha256 of a file, as the command sha256sum prints it."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            whole.update(piece)
    return whole.hexdigest()


def seal(folder: Path, content: object) -> str:
    """A hash of what is written as JSON into the folder of a job, and of the plan of the job."""
    plan = folder / PLAN
    before = plan.read_bytes() if plan.is_file() else b""
    return hashlib.sha256(before + json.dumps(content).encode()).hexdigest()


def records(folder: Path, fields: Sequence[str]) -> dict[int, dict[str, Any]]:
    """Some fields of the record of each shard; from the cache, and from records that it lacks."""
    numbers = set(recorded(folder))
    cached = _cached(folder / INDEX, fields)
    found = {shard: cached[shard] for shard in numbers & cached.keys()}
    for shard in numbers - found.keys():
        record = read_record(record_path(folder, shard), fields)
        found[shard] = {name: record[name] for name in fields}
    found = dict(sorted(found.items()))
    if found != cached:
        try:
            with replacing(folder / INDEX) as unfinished:
                written = {str(shard): of for shard, of in found.items()}
                unfinished.write_text(json.dumps({"records": written, SEAL: seal(folder, written)}))
        except OSError:  # a folder that cannot be written
            pass
    return found


def read_record(path: Path, fields: Sequence[str]) -> dict[str, Any]:
    """A record. Raises ValueError for a damaged one: not JSON, without some of the fields, changed, or of another shard or job.

    Records of earlier versions have no seal: a change of these is not found.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, IsADirectoryError) as error:
        raise ValueError(f"{path} is damaged: {error}; {AGAIN}") from None
    missing = [name for name in fields if name not in record] if isinstance(record, dict) else fields
    if missing or not isinstance(record, dict):
        raise ValueError(f"{path} is damaged: it has no {', '.join(map(repr, missing))}; {AGAIN}")
    sealed = {name: value for name, value in record.items() if name != SEAL}
    if SEAL in record and record[SEAL] != seal(path.parent, sealed):
        raise ValueError(f"{path} is damaged: it was changed since it was written, or is of another job; {AGAIN}")
    if str(record.get("file", path.name)).partition(".")[0] != path.stem:
        raise ValueError(f"{path} is damaged: it is the record of {record['file']}; {AGAIN}")
    return record


def _cached(path: Path, fields: Sequence[str]) -> dict[int, dict[str, Any]]:
    """The records in the cache; none if it is missing, damaged, of another job or of other fields."""
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        if written[SEAL] != seal(path.parent, written["records"]):
            return {}
        found = {int(shard): {name: of[name] for name in fields} for shard, of in written["records"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return found
