"""What users give as hooks: `(site, function)` pairs, and objects that carry their own site."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hooked_lm.hooks.select import Site


class Entry(NamedTuple):
    """A hook as given, taken apart: its site, what to call, on values or gradients, before all others or in turn."""

    site: Site
    function: Callable[..., Any]
    dir: str
    when: str


def read_entry(given: Any, dir: str = "fwd") -> Entry:
    """Take a hook apart, of a list for `dir`.

    An object that says `direction = "bwd"` goes to the gradient from either list, and so does everything in a list of
    backward hooks. Raises TypeError for what is neither a pair nor an object with a `hook_point`, ValueError for a
    `direction` or `when` that there is not.

    >>> read_entry(("hook_embed", print))
    Entry(site='hook_embed', function=<built-in function print>, dir='fwd', when='post')
    """
    if hasattr(given, "hook_point"):
        layer = getattr(given, "layer", None)
        site, function = (given.hook_point if layer is None else (given.hook_point, layer)), given
    elif isinstance(given, (tuple, list)) and len(given) == 2:
        site, function = given
    else:
        raise TypeError(f"a hook is a pair (site, function) or an object with a hook_point, got {given!r}")
    own, when = _asked_by(function)
    return Entry(site, function, "bwd" if own == "bwd" else dir, when)


def companions_of(entries: Sequence[Entry]) -> list[Entry]:
    """The hooks that the objects of a list bring along: those of an attribute `companions` that are not in the list."""
    given = [id(entry.function) for entry in entries]
    brought = [
        one
        for entry in entries
        if hasattr(entry.function, "hook_point")
        for one in getattr(entry.function, "companions", ())
    ]
    return [read_entry(one) for one in brought if id(one) not in given]


def add_options(function: Any, dir: str | None) -> tuple[str, str]:
    """The direction ("fwd", "bwd" or "both") and `when` of a hook that is added by hand, with `dir` as given (None: not given).

    Raises ValueError for a `dir` that sends a hook object for gradients to values.

    >>> add_options(print, None), add_options(print, "both")
    (('fwd', 'post'), ('both', 'post'))
    """
    own, when = _asked_by(function)
    if own == "bwd" and dir not in (None, "bwd"):
        raise ValueError(
            f"dir={dir!r} contradicts the direction of {function!r}, which is 'bwd': it is made for gradients; "
            "leave dir out, or change the object's direction"
        )
    return dir or own, when


def _asked_by(function: Any) -> tuple[str, str]:
    """The `direction` and `when` of a hook object; any other function has the defaults, whatever its attributes."""
    if not hasattr(function, "hook_point"):
        return "fwd", "post"
    own, when = getattr(function, "direction", "fwd"), getattr(function, "when", "post")
    _check("direction", own, ("fwd", "bwd"), function)
    _check("when", when, ("pre", "post"), function)
    return own, when


def _check(name: str, value: Any, known: tuple[str, str], hook: Any) -> None:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"the {name} of a hook object is {known[0]!r} or {known[1]!r}; that of {hook!r} is {value!r}")
