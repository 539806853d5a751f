"""What was said of a site stays true of whatever is put into its place: its axes, and when it is computed."""

from collections.abc import Container, Mapping
from typing import NamedTuple

from torch import nn

from hooked_lm.hooks.point import HookPoint

SHARED = ("batch", "pos")


class Known(NamedTuple):
    """What the last point in a place said of itself, and the module that the place belongs to."""

    parent: nn.Module
    dims: tuple[str, ...]
    on_demand: bool
    grows: bool


class Name(str):
    """The dotted path that `setup` gave to a module; a name that is no such thing is the module's own, and stays."""

    __slots__ = ()


def give_name(module: nn.Module, name: str) -> None:
    """Let a module know its dotted path as `module.name`, unless it has a `name` that means something else."""
    if "name" not in module.__dict__ and hasattr(module, "name"):
        return
    if isinstance(module.__dict__.get("name", Name()), Name):
        module.__dict__["name"] = Name(name)


def inherit_metadata(
    modules: Mapping[str, nn.Module], before: Mapping[str, Known], points: Container[str]
) -> dict[str, Known]:
    """Tell points that came without dims what is known of their places; returns what is known from now on.

    `points` are the names at which points stood until now. Where one went straight into the place of another, it says itself
    whether it is computed on demand; where it came back after a module of another kind, such as a dictionary, it is as it was.
    The points inside of such a module see the same rows and positions.
    """
    known: dict[str, Known] = {}
    for name, module in modules.items():
        parent = modules.get(name.rpartition(".")[0], module)
        site = before.get(name)
        site = site if site is not None and site.parent is parent else None
        if isinstance(module, HookPoint):
            if site is not None and not module.dims:
                module.dims, module.grows = site.dims, site.grows
                module.on_demand |= site.on_demand and name not in points
            known[name] = Known(parent, module.dims, module.on_demand, module.grows)
        elif site is not None:
            known[name] = site
            for point in module.modules():
                if isinstance(point, HookPoint) and not point.dims and site.dims[:2] == SHARED:
                    point.dims, point.grows = SHARED, site.grows
    return known
