"""From what a user writes for a site (a name, glob, list or predicate) to names of hook points."""

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, SupportsIndex

Site = str | tuple[Any, ...] | Sequence[Any] | Callable[[str], bool]


class UnknownSite(KeyError):
    """No hook point answers to a name; the message says which names are near."""

    def __str__(self) -> str:
        return str(self.args[0])


class PointDict(MutableMapping[str, Any]):
    """The hook points of a network by name, in order of computation; `points[alias]` answers to other names too.

    Iterating, and the length, show the points of a bare run: those that are computed on demand, only if they are switched on.
    `[...]` and `in` know all of them, whose dict is `points`. `in` knows no aliases.

    >>> both = {"hook_embed": "a point", "hook_tokens": "another"}
    >>> points = PointDict(both, {"embed.hook_out": "hook_embed"}, is_on="a point".__eq__)
    >>> list(points), points["hook_tokens"], "hook_tokens" in points
    (['hook_embed'], 'another', True)
    >>> points["embed.hook_out"], "embed.hook_out" in points
    ('a point', False)
    """

    def __init__(self, points: dict[str, Any], aliases: Mapping[str, str], is_on: Callable[[Any], bool]) -> None:
        self.points, self.aliases, self.is_on = points, aliases, is_on

    def __getitem__(self, name: str) -> Any:
        known = name if name in self.points else self.aliases.get(name, name)
        if known not in self.points:
            raise unknown(name, self.points)
        return self.points[known]

    def __contains__(self, name: object) -> bool:
        return name in self.points

    def __iter__(self) -> Iterator[str]:
        return (name for name, point in self.points.items() if self.is_on(point))

    def __len__(self) -> int:
        return sum(map(self.is_on, self.points.values()))

    def __setitem__(self, name: str, point: Any) -> None:
        self.points[name] = point

    def __delitem__(self, name: str) -> None:
        del self.points[name]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"


def is_shorthand(site: object) -> bool:
    """Whether this is a tuple such as `("z", 5)` or `("k", 5, "a")` rather than a sequence of sites."""
    return isinstance(site, tuple) and len(site) in (2, 3) and isinstance(site[1], (SupportsIndex, type(None)))


def select(
    site: Site,
    names: Mapping[str, object],
    aliases: Mapping[str, str],
    shorthand: Callable[[Any], str],
    first: Sequence[Collection[str]] = (),
) -> list[str]:
    """The names that a site means, in the order of `names`.

    A predicate selects from the `first` group of names in which it selects any, and from the other names if there is no such
    group. Aliases answer only where no name does. `shorthand` turns a short name or tuple into a full name. Raises
    UnknownSite for a name or glob that nothing answers to; a predicate or an empty list that selects nothing
    warns.

    >>> select("*.mlp", {"0.attn": 1, "0.mlp": 2}, {}, str)
    ['0.mlp']
    """
    found = _find(site, names, aliases, shorthand, first)
    if not found:
        warnings.warn(f"the filter {site!r} selects none of {len(names)} hook points", stacklevel=4)
    return [name for name in names if name in found]


def _find(
    site: Site,
    names: Mapping[str, object],
    aliases: Mapping[str, str],
    shorthand: Callable[[Any], str],
    first: Sequence[Collection[str]],
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
        found = next(filter(None, ({*filter(site, group)} for group in first)), set())
        return found or _matching(site, [name for name in names if not any(name in group for group in first)], aliases)
    if not isinstance(site, Iterable):
        raise TypeError(f"a site is a name, glob, list or predicate, got {site!r}")
    return {name for part in site for name in _find(part, names, aliases, shorthand, first)}


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
