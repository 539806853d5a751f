"""Modules that users put in the place of a hook point inherit the metadata of its site."""

from collections.abc import Container, Mapping
from typing import NamedTuple

from torch import nn

from hooked_lm.hooks.point import HookPoint

SHARED = ("batch", "pos")


class SiteMetadata(NamedTuple):
    """The metadata of the last point at a site, and the parent module of the site."""

    parent: nn.Module
    dims: tuple[str, ...]
    on_demand: bool
    grows: bool


class Name(str):
    """A dotted path that `setup` assigned to `module.name`; any other `name` belongs to the module and is kept."""

    __slots__ = ()


def give_name(module: nn.Module, name: str) -> None:
    """Sets `module.name` to the module's dotted path, unless the module defines `name`."""
    if "name" not in module.__dict__ and hasattr(module, "name"):
        return
    if isinstance(module.__dict__.get("name", Name()), Name):
        module.__dict__["name"] = Name(name)


def inherit_metadata(
    modules: Mapping[str, nn.Module], before: Mapping[str, SiteMetadata], points: Container[str]
) -> dict[str, SiteMetadata]:
    """Sets the metadata of points without dims from the previous points at their sites; returns the new metadata of all sites.

    `points` are the names of the points before the change. A point that directly replaces another keeps its own `on_demand`.
    A point that returns after a different module, such as a dictionary, is on demand if the site was. Points inside such a
    module get the axes batch and pos.
    """
    known: dict[str, SiteMetadata] = {}
    for name, module in modules.items():
        parent = modules.get(name.rpartition(".")[0], module)
        site = before.get(name)
        site = site if site is not None and site.parent is parent else None
        if isinstance(module, HookPoint):
            if site is not None and not module.dims:
                module.dims, module.grows = site.dims, site.grows
                module.on_demand |= site.on_demand and name not in points
            known[name] = SiteMetadata(parent, module.dims, module.on_demand, module.grows)
        elif site is not None:
            known[name] = site
            for point in module.modules():
                if isinstance(point, HookPoint) and not point.dims and site.dims[:2] == SHARED:
                    point.dims, point.grows = SHARED, site.grows
    return known
