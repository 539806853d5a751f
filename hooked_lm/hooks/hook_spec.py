"""Parses hooks that users pass: `(site, function)` pairs, and objects with a `hook_point`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from hooked_lm.hooks.select import Site


@runtime_checkable
class HookWithSite(Protocol):
    """A hook object that names its site."""

    @property
    def hook_point(self) -> Any:
        """The site."""


HookList = Sequence[Any] | HookWithSite  # hooks, or one of them: a pair (site, function) or an object with a hook_point


class HookSpec(NamedTuple):
    """A parsed hook: `dir` is "fwd" (values) or "bwd" (gradients), `when` is "pre" (before all others) or "post"."""

    site: Site
    function: Callable[..., Any]
    dir: str
    when: str


def parse_hook(given: Any, dir: str = "fwd") -> HookSpec:
    """Parses a hook from a list of forward or backward hooks (`dir`).

    An object with `direction = "bwd"` is a backward hook in both lists. Raises TypeError for anything but a pair or an
    object with a `hook_point`, ValueError for an unknown `direction` or `when`.

    >>> parse_hook(("hook_embed", print))
    HookSpec(site='hook_embed', function=<built-in function print>, dir='fwd', when='post')
    """
    if hasattr(given, "hook_point"):
        layer = getattr(given, "layer", None)
        site, function = (given.hook_point if layer is None else (given.hook_point, layer)), given
    elif isinstance(given, (tuple, list)) and len(given) == 2:
        site, function = given
        if isinstance(function, str):
            raise TypeError(f"a hook is a pair (site, function), got the site {function!r} as the second of the two")
        if not callable(function):
            raise TypeError(
                f"a hook is a pair (site, function), got a {type(function).__name__} as the second of the two; a value is set by "
                "hooked_lm.at(site).set(value)"
            )
    else:
        raise TypeError(f"a hook is a pair (site, function) or an object with a hook_point, got {given!r}")
    own, when = _options_of(function)
    return HookSpec(site, function, "bwd" if own == "bwd" else dir, when)


def hook_list(given: HookList) -> Sequence[Any]:
    """The hooks of a list of hooks, or of a single hook.

    >>> len(hook_list(("z", print))), len(hook_list([("z", print), ("q", print)]))
    (1, 2)
    """
    return [given] if hasattr(given, "hook_point") or _is_pair(given) else given


def _is_pair(given: object) -> bool:
    """Whether this is a pair (site, function), and not a list of two hooks."""
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not callable(given[1]):
        return False
    return not hasattr(given[1], "hook_point") or not (hasattr(given[0], "hook_point") or _is_pair(given[0]))


def companions_of(entries: Sequence[HookSpec]) -> list[HookSpec]:
    """The hooks in the attributes `companions` of hook objects, without those that are in the list already."""
    given = [id(entry.function) for entry in entries]
    brought = [
        one
        for entry in entries
        if hasattr(entry.function, "hook_point")
        for one in getattr(entry.function, "companions", ())
    ]
    return [parse_hook(one) for one in brought if id(one) not in given]


def direction_and_when(function: object, dir: str | None) -> tuple[str, str]:
    """The direction ("fwd", "bwd" or "both") and `when` of a hook passed to `add_hook` with this `dir` (None: not given).

    Raises ValueError for a `dir` that would use a hook object for gradients on values.

    >>> direction_and_when(print, None), direction_and_when(print, "both")
    (('fwd', 'post'), ('both', 'post'))
    """
    own, when = _options_of(function)
    if own == "bwd" and dir not in (None, "bwd"):
        raise ValueError(
            f"dir={dir!r} contradicts the direction of {function!r}, which is 'bwd' (for gradients); "
            "omit dir, or change the object's direction"
        )
    return dir or own, when


def _options_of(function: object) -> tuple[str, str]:
    """The `direction` and `when` of a hook object; the defaults for any other function, whatever its attributes."""
    if not hasattr(function, "hook_point"):
        return "fwd", "post"
    own, when = getattr(function, "direction", "fwd"), getattr(function, "when", "post")
    _check("direction", own, ("fwd", "bwd"), function)
    _check("when", when, ("pre", "post"), function)
    return own, when


def _check(name: str, value: object, known: tuple[str, str], hook: object) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"the {name} of a hook object is {known[0]!r} or {known[1]!r}; that of {hook!r} is {value!r}")
