"""Tables of hooks and of hook points, for notebooks and terminals."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from hooked_lm.hooks.hook import Hook
from hooked_lm.hooks.select import site_glob
from hooked_lm.notebook_repr import NotebookRepr, Table

__all__ = ["ListedHooks", "ShownSites", "bytes_by", "layers_in_words", "table_of_sites"]


class ListedHooks(NotebookRepr, dict[str, list[Hook]]):
    """Hooks by the name of their point; prints a line for each.

    >>> from hooked_lm.hooks import wrap
    >>> import torch
    >>> model = wrap(torch.nn.Sequential(torch.nn.ReLU()))
    >>> with model.hooks([("0", torch.neg)]):
    ...     model.list_hooks()
    0  fwd  neg
    """

    def __repr__(self) -> str:
        sites, *others = zip(*self.repr_table().rows, strict=True) if self else [()]
        wide = max(map(len, sites), default=0)
        lines = ["  ".join([f"{site:{wide}}", *filter(None, row)]) for site, *row in zip(sites, *others, strict=True)]
        return "\n".join(lines) or "no hooks"

    __str__ = __repr__

    def repr_table(self) -> Table:
        """A row for each hook: its site, direction, function, and what differs from the default."""
        rows = [(site, hook.dir, hook.function_name, hook.options) for site, hooks in self.items() for hook in hooks]
        return Table(("site", "direction", "hook", "options"), rows)


class ShownSites(NotebookRepr, nn.Module):
    """A network of which a notebook shows the sites."""

    all_points: Callable[[], dict[str, Any]]
    in_bare_cache: Callable[[Any], bool]

    def repr_table(self) -> Table:
        """The sites, those of several layers on one row."""
        return table_of_sites(self.all_points(), self.in_bare_cache)

    def _repr_line(self) -> str:
        """The class and the number of parameters."""
        return f"{type(self).__name__}({sum(weight.numel() for weight in self.parameters()):,} parameters)"


def table_of_sites(points: Mapping[str, Any], is_on: Callable[[Any], bool]) -> Table:
    """The sites with their axes, those of several layers on one row, and whether a bare cache has them."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for name, point in points.items():
        first, *rest = name.split(".")
        is_layer = bool(rest) and rest[0].isdigit()
        when = "always" if is_on(point) else "on demand"
        site = ".".join(rest[1:]) if is_layer else name
        key = (first if is_layer else "", site, " ".join(getattr(point, "dims", ())), when)
        groups.setdefault(key, []).extend([int(rest[0])] if is_layer else [])
    rows = [
        (".".join(filter(None, (stack, layers_in_words(layers), site))), axes, max(1, len(layers)), when)
        for (stack, site, axes, when), layers in groups.items()
    ]
    return Table(("site", "axes", "layers", "in a cache"), rows)


def layers_in_words(layers: Iterable[int]) -> str:
    """The layers of a group of sites: "{0-3}", "{0,2}", "1"; nothing for a site without a layer.

    >>> (
    ...     layers_in_words([0, 1, 2]),
    ...     layers_in_words([0, 2]),
    ...     layers_in_words([1]),
    ...     layers_in_words([]),
    ... )
    ('{0-2}', '{0,2}', '1', '')
    """
    found = list(layers)
    if len(found) < 2:
        return "".join(map(str, found))
    is_range = found == list(range(found[0], found[-1] + 1))
    return f"{{{found[0]}-{found[-1]}}}" if is_range else f"{{{','.join(map(str, found))}}}"


def bytes_by(values: Mapping[str, Tensor], by: str) -> dict[str, int]:
    """The bytes of a cache; see `Cache.memory_report`."""
    kinds: dict[str, Callable[[str, Tensor], str]] = {
        "site": lambda name, value: site_glob(name),
        "name": lambda name, value: name,
        "device": lambda name, value: str(value.device),
        "dtype": lambda name, value: str(value.dtype).removeprefix("torch."),
    }
    if by not in kinds:
        raise ValueError(f"by must be one of {', '.join(map(repr, kinds))}, got {by!r}")
    report: dict[str, int] = {}
    for name, value in values.items():
        kind = kinds[by](name, value)
        report[kind] = report.get(kind, 0) + value.numel() * value.element_size()
    return dict(sorted(report.items(), key=lambda item: -item[1]))
