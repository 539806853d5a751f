"""Damage to files, drawn at random: each draw changes one file of a folder as disks, transfers and people do."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

Json = Any
OTHER: tuple[Json, ...] = (
    *(None, True, False, "", "x", [], {}, [[]], ["x", None], {"x": {}}, 0, 1, -1, 3, 2**31, 10**30, -(10**30)),
    *(0.5, -1e-5, 1e308, float("nan"), float("inf")),
)


def damage(folder: Path, other: Path, rng: Random) -> str:
    """Changes one file of a folder, and says how. `other` is a folder of another model or job with files of the same names."""
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    ways: list[Callable[[Path, Random], str]] = [as_bytes]
    if file.suffix == ".json":
        ways = [as_bytes, *[as_json] * 6]
    if file.suffix in (".safetensors", ".pth", ".bin"):
        ways = [as_bytes, as_tensors, as_tensors]
    if (twin := other / file.relative_to(folder)).is_file():
        ways.append(lambda file, rng: _copied(twin, file))
    return f"{file.name}: {rng.choice(ways)(file, rng)}"


def _copied(twin: Path, file: Path) -> str:
    shutil.copy(twin, file)
    return "that of another"


def as_bytes(file: Path, rng: Random) -> str:
    """The file is cut off, empty, other bytes, a folder, or gone."""
    content = file.read_bytes()
    cut = rng.randrange(max(1, len(content)))
    noise = rng.randbytes(max(8, len(content)))
    head = rng.randbytes(min(len(content), 64))
    results: dict[str, bytes] = {
        f"cut off after {cut} bytes": content[:cut],
        "empty": b"",
        "random bytes": noise,
        "random bytes at the start": head + content[len(head) :],
        "not UTF-8": b"\xff\xfe" + content,
        "bytes appended": content + b"\x00more",
        "zeros": bytes(len(content)),
    }
    how = rng.choice([*results, "a folder", "gone", "a link to nothing"])
    file.unlink()
    if how == "a folder":
        file.mkdir()
    elif how == "a link to nothing":
        file.symlink_to("nothing")
    elif how != "gone":
        file.write_bytes(results[how])
    return how


def as_json(file: Path, rng: Random) -> str:
    """One value of the JSON is gone, renamed or another; or all of it is."""
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return as_bytes(file, rng)
    places = list(_places(whole))
    if not places or rng.random() < 0.06:
        value = rng.choice([*OTHER, "deep"])
        text = "[" * 100_000 if value == "deep" else json.dumps(value)
        file.write_text(text, encoding="utf-8")
        return f"all of it {value!r}"
    holder, key = rng.choice(_shallow_first(places, rng))
    way = rng.choice(
        ["gone", "renamed", "other", "other", "other", "twice"] if isinstance(holder, dict) else ["gone", "other"]
    )
    before = holder[key]
    if way == "gone":
        del holder[key]
    elif way == "renamed":
        holder[f"{key}_x"] = holder.pop(key)
    elif way == "twice":
        holder[f"{key} "] = before
    else:
        holder[key] = _another(before, rng)
        way = f"{holder[key]!r}"[:80]
    file.write_text(json.dumps(whole), encoding="utf-8")
    return f"{key} = {str(before)[:60]}: {way}"


def _another(before: Json, rng: Random) -> Json:
    more = [str(before), [before], {"x": before}]
    if isinstance(before, (int, float)) and not isinstance(before, bool):
        more += [-before, before * 10**9, before + 1, before // 2, float(before)]
    if isinstance(before, list):
        more += [before[:-1], before + before, before[::-1]]
    if isinstance(before, str):
        more += [before.upper(), before[:-1], "../" + before, "/" + before, before + "\x00"]
    return rng.choice([*more, *more, *OTHER])


def _shallow_first(places: list[tuple[Json, Any]], rng: Random) -> list[tuple[Json, Any]]:
    """Half of the time those of the outermost level only: a vocabulary has more than all else."""
    outer = [place for place in places if place[0] is places[0][0]]
    return outer if rng.random() < 0.5 else places


def _places(value: Json) -> Iterator[tuple[Json, Any]]:
    """What holds each value, and by which key."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    inner = list(pairs)
    yield from ((value, key) for key, _ in inner)
    for _, part in inner:
        yield from _places(part)


def as_tensors(file: Path, rng: Random) -> str:
    """One tensor is gone, renamed, there twice, or of another shape or type; or the file holds something else."""
    try:
        tensors, header = _read(file)
        name = rng.choice(sorted(tensors))
    except Exception:
        return as_bytes(file, rng)
    tensor = tensors[name]
    changes: dict[str, Callable[[], Tensor]] = {
        "flat": tensor.flatten,
        "longer": lambda: torch.cat([tensor, tensor]) if tensor.ndim else tensor[None],
        "shorter": lambda: tensor[:-1] if tensor.ndim else tensor,
        "empty": lambda: tensor.flatten()[:0],
        "transposed": lambda: tensor.transpose(0, -1).contiguous() if tensor.ndim > 1 else tensor[None],
        "int8": lambda: tensor.to(torch.int8),
        "bool": lambda: tensor.to(torch.bool),
        "float64": lambda: tensor.double(),
        "a scalar": lambda: tensor.flatten()[0],
    }
    others = ["gone", "renamed", "one more"] + (
        ["no tensor", "a list"] if file.suffix != ".safetensors" else ["no header"]
    )
    how = rng.choice([*changes, *others])
    if how in changes:
        tensors[name] = changes[how]().clone()
    elif how in ("gone", "renamed"):
        value = tensors.pop(name)
        tensors |= {f"{name}_x": value} if how == "renamed" else {}
    elif how == "one more":
        tensors["one.more.weight"] = torch.ones(2, 3)
    elif how == "no tensor":
        tensors[name] = "text"
    _write(file, list(tensors.values()) if how == "a list" else tensors, {} if how == "no header" else header)
    return f"{name} {how}"


def _read(file: Path) -> tuple[dict[str, Any], dict[str, str]]:
    if file.suffix != ".safetensors":
        return dict(torch.load(file, weights_only=True)), {}
    with safe_open(str(file), framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata() or {})  # noqa: SIM118


def _write(file: Path, tensors: Any, header: dict[str, str]) -> None:
    file.unlink()
    if file.suffix == ".safetensors":
        save_file({name: value.contiguous().clone() for name, value in tensors.items()}, file, header or None)
    else:
        torch.save(tensors, file)
