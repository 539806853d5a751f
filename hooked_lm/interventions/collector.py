"""Collectors: detectors that accumulate results in memory or in a store on disk."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from hooked_lm.hooks import HookPoint, UnknownSite
from hooked_lm.interventions.base import Detector, HookFile
from hooked_lm.interventions.per_thread import Lock
from hooked_lm.interventions.store import Run, Store
from hooked_lm.models.names import get_act_name

__all__ = ["Collector"]


def pick_site(site: str | tuple[str, int] | None, known: Collection[str]) -> str:
    """The full name of one of the known sites, from its name or a short name such as ("z", 1); None: the only one.

    Raises KeyError for any other site, and for None if there are several.

    >>> pick_site(("z", 1), ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z"])
    'blocks.1.attn.hook_z'
    """
    if site is None and len(known) == 1:
        return next(iter(known))
    name = get_act_name(*site) if isinstance(site, tuple) else site
    if name is None or name not in known:
        wanted = "several sites or none have values: give one" if name is None else f"there are no values of '{name}'"
        raise UnknownSite(f"{wanted}; there are values of {', '.join(known) or 'no site'}")
    return name


@dataclass(eq=False, repr=False)
class Collector(Detector):
    """A detector that can write its results to a `store`: a directory, or a `Run` that several detectors share.

    `see` gets the value itself, not a copy, and must neither change nor keep it. Several threads may share a collector; a lock
    serialises their calls.
    """

    store: str | Path | Run | None = field(default=None, kw_only=True)
    copies: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._run = self.store if isinstance(self.store, Run) else None
        self._lock = Lock()

    def __call__(self, value: object, hook: HookPoint) -> None:
        with self._lock:
            super().__call__(value, hook)

    @property
    def run(self) -> Run:
        """The run of the store that this detector writes to; ValueError without a store."""
        if self.store is None:
            raise ValueError(f"{self!r} has no store: give store=, a directory")
        if self._run is None:
            self._run = Store(str(self.store)).start(detector=type(self).__name__, hook_point=str(self.hook_point))
        return self._run

    def _setting(self, name: str, value: object) -> object:
        if name != "store" or value is None:
            return value
        return str(value.path.parent if isinstance(value, Run) else value)

    def _for_file(self, settings: dict[str, Any], file: HookFile) -> dict[str, Any]:
        """A store inside the folder of the file is saved as a relative path."""
        if self.store is None:
            return settings
        store = Path(settings["store"]).absolute()
        store = store.relative_to(file.folder) if store.is_relative_to(file.folder) else store
        return {**settings, "store": str(store)}

    @classmethod
    def settings_from_file(cls, settings: dict[str, Any], file: HookFile) -> dict[str, Any]:
        """The settings with the `store` of `load`, or else the file's store, which must be inside the folder of the file."""
        given = settings.get("store")
        if given is None:
            return settings
        store = Path(file.folder, given) if file.store is None else Path(file.store)
        is_inside = not Path(given).is_absolute() and store.resolve().is_relative_to(file.folder.resolve())
        if file.store is None and not is_inside:
            raise ValueError(
                f"it would write into {given!r}, outside the folder of the file: give load(path, store=...)"
            )
        return {**settings, "store": str(store)}

    def _write(self, site: str, tensors: Mapping[str, Tensor], **about: Any) -> None:
        if self.store is not None:
            self.run.add(site, tensors, detector=type(self).__name__, **about)
