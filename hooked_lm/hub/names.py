"""Resolves model names to directories or hub repositories, and training steps to revisions."""

import fnmatch
import os
import re
from pathlib import Path

from hooked_lm.families.short_names import BUNDLED_NAMES, CHECKPOINTS, SHORT_NAMES
from hooked_lm.hub.options import Options

BUNDLED = Path(__file__).parents[1] / "demo"
FOLDERS = ("model", "shapes_model", "steps_model", "sparse_model")
DEMOS = {name: BUNDLED / folder for name, folder in zip(BUNDLED_NAMES, FOLDERS, strict=True)}


def short_names() -> dict[str, str]:
    """A dict from short names to hub ids."""
    return dict(SHORT_NAMES)


def hub_id(model_name: str) -> str:
    """The hub id of a short name; other names are returned unchanged."""
    return SHORT_NAMES.get(model_name.lower(), model_name)


def spelled(model_name: str | os.PathLike[str]) -> str:
    """The name as a string; a Path becomes one that cannot be mistaken for a hub id or a short name.

    >>> spelled("demo"), spelled(Path("demo"))
    ('demo', './demo')
    """
    name = str(model_name)
    return os.path.join(os.curdir, name) if isinstance(model_name, os.PathLike) and not _is_path(name) else name


def _is_path(name: str) -> bool:
    """Whether a name is a path, such as "./demo", "../demo", "~/demo" or "/demo"."""
    first = re.split(r"[/\\]", name)[0]
    return os.path.isabs(name) or first in (os.curdir, os.pardir) or first.startswith("~")


def local_folder(name: str) -> Path | None:
    """The local directory of a name; None if the name refers to the hub.

    "demo", "demo-shapes", "demo-steps" and "demo-sparse" are the bundled models, and a path such as "./gpt2" is always local. Any
    other name refers to a local directory, or a file, which is refused, if one exists; for a short name ("gpt2") that directory
    must contain a `config.json`.
    """
    if name in DEMOS:
        return DEMOS[name]
    folder = Path(name).expanduser()
    if _is_path(name):
        return folder
    is_meant = name and folder.exists() and (name.lower() not in SHORT_NAMES or (folder / "config.json").is_file())
    return folder if is_meant else None


def published_steps(model_name: str) -> tuple[str, tuple[int, ...]]:
    """The pattern of revision names ("step{}") and the saved steps of a model. Raises ValueError if none are known."""
    for glob, run in CHECKPOINTS.items():
        if fnmatch.fnmatchcase(hub_id(model_name), glob):
            return run
    raise ValueError(
        f"no checkpoints of {model_name!r} are known, only those of {', '.join(CHECKPOINTS)}. "
        "revision=... selects any revision of a repository"
    )


def checkpoint_step(name: str, options: Options) -> tuple[int | None, str | None]:
    """The training step of `checkpoint_index` or `checkpoint_value` (None without either), and its revision."""
    index, value, revision = options.checkpoint_index, options.checkpoint_value, options.revision
    if index is None and value is None:
        return None, revision
    if (index is not None) + (value is not None) + (revision is not None) > 1:
        raise ValueError("give one of checkpoint_index, checkpoint_value and revision, not several")
    pattern, steps = published_steps(name)
    if index is not None:
        if not -len(steps) <= index < len(steps):
            raise IndexError(f"checkpoint_index {index} is out of range: there are {len(steps)}")
        value = steps[index]
    assert value is not None
    if value not in steps:
        near = sorted(steps, key=lambda step: abs(step - value))[:2]
        raise ValueError(f"no checkpoint at step {value}; the nearest are {near}")
    return value, pattern.format(value)
