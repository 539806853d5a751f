"""From what a user writes for a site (a name, glob, list or predicate) to names of hook points."""

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, SupportsIndex

Site = str | tuple[Any, ...] | Sequence[Any] | Callable[[str], bool]


class UnknownSite(KeyError):
    """No hook point answers to a name; the message says which names are near."""

    def __str__(self) -> str:
        return str(self.args[0])


class PointDict(dict[str, Any]):
    """The hook points of a network by name, in order of computation; `points[alias]` answers to other names too.

    Its length, its keys and `in` know the names alone.

    >>> points = PointDict({"hook_embed": "a point"}, {"embed.hook_out": "hook_embed"})
    >>> points["embed.hook_out"], list(points), "embed.hook_out" in points
    ('a point', ['hook_embed'], False)
    """

    def __init__(self, points: Mapping[str, Any], aliases: Mapping[str, str]) -> None:
        super().__init__(points)
        self.aliases = aliases

    def __missing__(self, name: Any) -> Any:
        known = self.aliases.get(name)
        if known is None or known not in self:
            raise unknown(name, self)
        return self[known]


def is_shorthand(site: object) -> bool:
    """Whether this is a tuple such as `("z", 5)` or `("k", 5, "a")` rather than a sequence of sites."""
    return isinstance(site, tuple) and len(site) in (2, 3) and isinstance(site[1], (SupportsIndex, type(None)))


def select(
    site: Site,
    names: Mapping[str, object],
    aliases: Mapping[str, str],
    shorthand: Callable[[Any], str],
) -> list[str]:
    """The names that a site means, in the order of `names`.

    Aliases answer only where no name does. `shorthand` turns a short name or tuple into a full name. Raises
    UnknownSite for a name or glob that nothing answers to; a predicate or an empty list that selects nothing
    warns.

    >>> select("*.mlp", {"0.attn": 1, "0.mlp": 2}, {}, str)
    ['0.mlp']
    """
    found = _find(site, names, aliases, shorthand)
    if not found:
        warnings.warn(f"the filter {site!r} selects none of {len(names)} hook points", stacklevel=4)
    return [name for name in names if name in found]


def _find(
    site: Site, names: Mapping[str, object], aliases: Mapping[str, str], shorthand: Callable[[Any], str]
) -> set[str]:
    if is_shorthand(site):
        return {_exact(shorthand(site), names, aliases, shorthand)}
    if isinstance(site, str) and _is_glob(site):
        found = _matching(lambda name: fnmatchcase(name, site), names, aliases)
        if not found:
            raise unknown(site, names)
        return found
    if isinstance(site, str):
        return {_exact(site, names, aliases, shorthand)}
    if callable(site):
        return _matching(site, names, aliases)
    if not isinstance(site, Iterable):
        raise TypeError(f"a site is a name, glob, list or predicate, got {site!r}")
    return {name for part in site for name in _find(part, names, aliases, shorthand)}


def _exact(site: str, names: Mapping[str, object], aliases: Mapping[str, str], shorthand: Callable[[Any], str]) -> str:
    for name in (site, aliases.get(site, site), shorthand(site)):
        if name in names:
            return name
    raise unknown(site, names)


def _matching(test: Callable[[str], bool], names: Iterable[str], aliases: Mapping[str, str]) -> set[str]:
    found = {name for name in names if test(name)}
    return found or {name for alias, name in aliases.items() if test(alias)}


def _is_glob(site: str) -> bool:
    return any(c in site for c in "*?[")


def site_glob(name: str) -> str:
    """The glob that means this site in every layer.

    >>> site_glob("blocks.3.attn.hook_z")
    'blocks.*.attn.hook_z'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def unknown(site: str, names: Iterable[str]) -> UnknownSite:
    """The error for a site that nothing answers to, with the nearest three names; for a glob, three globs."""
    near = ", ".join(map(repr, nearest(site, dict.fromkeys(map(site_glob, names)) if _is_glob(site) else names)))
    return UnknownSite(f"no hook point '{site}'; did you mean {near or 'another module'}?")


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """The three of the names that look most like this one, the best first."""
    return difflib.get_close_matches(str(name), names, n=3, cutoff=0.0)
