"""Selects hook points by the sites that users pass: names, globs, lists and predicates."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, SupportsIndex, TypeVar

from hooked_lm.callers import warn_caller
from hooked_lm.keywords import nearest
from hooked_lm.notebook_repr import NotebookRepr, Table

WHEN = {True: "always", False: "on demand"}
Point = TypeVar("Point")
Site = str | tuple[Any, ...] | Sequence[Any] | Callable[[str], bool]
NamesFilter = Site | None
"""What `names_filter` takes: a name, a glob, a short name with a layer, a list of these, or a predicate; None: all sites."""


class UnknownSite(KeyError):
    """No hook point has a name; the message lists the nearest names."""

    def __str__(self) -> str:
        return str(self.args[0])


class PointDict(NotebookRepr, MutableMapping[str, Point]):
    """The hook points of a network by name, in order of computation.

    Iteration and length cover the points of a bare run: those on demand only if their flag is set. `[...]` and `in` cover all
    points, which are in the dict `points`. `[...]` also accepts aliases; `in` does not.

    >>> both = {"hook_embed": "a point", "hook_tokens": "another"}
    >>> points = PointDict(both, {"embed.hook_out": "hook_embed"}, is_on="a point".__eq__)
    >>> list(points), points["hook_tokens"], "hook_tokens" in points
    (['hook_embed'], 'another', True)
    >>> points["embed.hook_out"], "embed.hook_out" in points
    ('a point', False)
    """

    def __init__(self, points: dict[str, Point], aliases: Mapping[str, str], is_on: Callable[[Point], bool]) -> None:
        self.points, self.aliases, self.is_on = points, aliases, is_on

    def __getitem__(self, name: str) -> Point:
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

    def __setitem__(self, name: str, point: Point) -> None:
        self.points[name] = point

    def __delitem__(self, name: str) -> None:
        del self.points[name]

    def repr_table(self) -> Table:
        """The points with what they are."""
        points = self.points.items()
        return Table(
            ("site", "point", "in a cache"), [(name, point, WHEN[self.is_on(point)]) for name, point in points]
        )

    def _repr_line(self) -> str:
        """The class and the number of points of a bare run."""
        return f"{type(self).__name__}({len(self)} points)"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"


def is_shorthand(site: object) -> bool:
    """Whether a site is a tuple such as `("z", 5)` or `("k", 5, "a")`, not a sequence of sites."""
    return isinstance(site, tuple) and len(site) in (2, 3) and isinstance(site[1], (SupportsIndex, type(None)))


def select(
    site: Site,
    names: Mapping[str, object],
    aliases: Mapping[str, str],
    shorthand: Callable[[Any], str],
    groups: Sequence[Collection[str]] = (),
) -> list[str]:
    """The names that match a site, in the order of `names`.

    A predicate selects from the first of the `groups` in which it matches any name, or else from the remaining names. Aliases
    are used only if no name matches. `shorthand` converts a short name or tuple to a full name. Raises UnknownSite for a name
    or glob without a match. Warns if a predicate matches nothing, or for an empty list.

    >>> select("*.mlp", {"0.attn": 1, "0.mlp": 2}, {}, str)
    ['0.mlp']
    """
    found = _find(site, names, aliases, shorthand, groups)
    if not found:
        some = ", ".join(map(repr, list(dict.fromkeys(map(site_glob, names)))[:3]))
        hint = f"; their names are such as {some}" if some else ""
        warn_caller(f"the filter {site!r} selects none of {len(names)} hook points{hint}")
    return [name for name in names if name in found]


def _find(
    site: Site,
    names: Mapping[str, object],
    aliases: Mapping[str, str],
    shorthand: Callable[[Any], str],
    groups: Sequence[Collection[str]],
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
        found = next(filter(None, ({*filter(site, group)} for group in groups)), set())
        return found or _matching(site, [name for name in names if not any(name in group for group in groups)], aliases)
    if not isinstance(site, Iterable):
        raise TypeError(f"a site is a name, glob, list or predicate, got {site!r}")
    return {name for part in site for name in _find(part, names, aliases, shorthand, groups)}


def _exact(site: str, names: Mapping[str, object], aliases: Mapping[str, str], shorthand: Callable[[Any], str]) -> str:
    for name in (site, aliases.get(site, site), shorthand(site)):
        if name in names:
            return name
    raise _beyond(site, shorthand(site), names) or unknown(site, names)


def _matching(test: Callable[[str], bool], names: Iterable[str], aliases: Mapping[str, str]) -> set[str]:
    found = {name for name in names if test(name)}
    return found or {name for alias, name in aliases.items() if test(alias)}


def _is_glob(site: str) -> bool:
    return any(c in site for c in "*?[")


def site_glob(name: str) -> str:
    """The glob that matches a site in every layer.

    >>> site_glob("blocks.3.attn.hook_z")
    'blocks.*.attn.hook_z'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def unknown(site: str, names: Iterable[str]) -> UnknownSite:
    """The error for a site without a match, with the three nearest names, or globs for a glob."""
    return UnknownSite(f"no hook point '{site}'; {advice(site, names)}")


def advice(site: str, names: Iterable[str]) -> str:
    """The end of a message on a site without a match: to name its layer if that is all it lacks, or names that are near.

    >>> advice(
    ...     "z", ["blocks.0.attn.hook_z", "blocks.1.attn.hook_z", "blocks.1.hook_mlp_out"]
    ... )
    "name its layer, as in 'blocks.0.attn.hook_z'"
    >>> advice("blocks.0.hook_zz", ["blocks.0.hook_z"])
    "did you mean 'blocks.0.hook_z'?"
    """
    names = list(names)
    in_layers = [name for name in names if site_glob(name) != name and name.endswith((f".{site}", f".hook_{site}"))]
    if len({site_glob(name) for name in in_layers}) == 1:
        return f"name its layer, as in {in_layers[0]!r}"
    near = ", ".join(map(repr, nearest(site, dict.fromkeys(map(site_glob, names)) if _is_glob(site) else names)))
    return f"did you mean {near or 'another module'}?"


def _beyond(site: str, full: str, names: Iterable[str]) -> UnknownSite | None:
    """The error for a site whose layer is the only part that does not exist, with the layers that do."""
    glob = site_glob(full)
    numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name in names if site_glob(name) == glob]
    if not numbers or len(numbers[0]) != 1:
        return None
    layers = sorted(number for (number,) in numbers)
    in_a_row = layers == list(range(layers[0], layers[-1] + 1)) and len(layers) > 2
    which = f"{layers[0]} to {layers[-1]}" if in_a_row else ", ".join(map(str, layers))
    of = "layer" if glob.startswith("blocks.") else "number"
    return UnknownSite(f"no hook point '{site}': '{glob}' exists for {of}{'s' * (len(layers) > 1)} {which}")
