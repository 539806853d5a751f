"""The verbs of HookedRootModule on a network that nobody rewrote, its modules named as PyTorch names them."""

from collections.abc import Container, Sequence
from typing import Any

from torch import nn

from hooked_lm.hooks.hook_spec import read_entry
from hooked_lm.hooks.module import HookedRootModule, HookList, NamesFilter
from hooked_lm.hooks.module_points import ModulePoint, calls_so_far, parsed, spelled
from hooked_lm.hooks.name_tree import NameTree
from hooked_lm.hooks.point import HookPoint
from hooked_lm.hooks.select import Site, UnknownSite, select


class WrappedModule(HookedRootModule):
    """Any module with hook points at the inputs and the output of each of its submodules; see `wrap`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.setup()

    def setup(self) -> None:
        """Find the submodules; call it again after replacing one. The hooks of those that stayed stay."""
        before = self.all_points()
        named = [(name, module) for name, module in self.module.named_modules(remove_duplicate=False) if name]
        self.mod_dict = {name: module for name, module in self.module.named_modules() if name}
        first = {id(module): name for name, module in self.mod_dict.items()}
        self.aliases = {name: first[id(module)] for name, module in named if name not in self.mod_dict}
        self._outputs = dict.fromkeys(self.mod_dict)
        self._inputs_of = {self._input_name(name): name for name in self._outputs}
        self._points = {}
        for name in [*self._outputs, *before]:
            if name not in self._points:
                self._restore(name, before.get(name))
        for name, point in before.items():
            if isinstance(point, ModulePoint) and self._points.get(name) is not point:
                point.leave()

    def _restore(self, name: str, point: HookPoint | None) -> None:
        module = self.mod_dict.get(self._home(name)[0])
        if isinstance(point, ModulePoint) and point.stands_on(module):
            self._points[name] = point
        elif module is not None:
            self._point(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        before = calls_so_far.get()
        try:
            try:
                calls_so_far.set({})
                return self.module(*args, **kwargs)
            finally:
                calls_so_far.set(before)
        finally:  # an interrupt may come before the line above
            calls_so_far.set(before)

    def unwrap(self) -> nn.Module:
        """Take the points out again; returns the module as it was."""
        for point in self._points.values():
            if isinstance(point, ModulePoint):
                point.leave()
        self._points, self._outputs, self._inputs_of, self.aliases = {}, {}, {}, {}
        self._registered = {}
        return self.module

    # ---- names -------------------------------------------------------------------------------------------------------

    def names(self, site: Site | None = None) -> list[str]:
        """The names that a site means; with no argument those of all modules, which print as a tree.

        A glob or predicate means outputs, unless it ends in ".input" or no output answers to it. Raises KeyError with
        near names if nothing does.
        """
        if site is None:
            return NameTree(self._outputs, {name: type(self.mod_dict[name]).__name__ for name in self._outputs})
        if isinstance(site, str):
            return [site] if site in self._points else self._names_of_string(site)
        if callable(site) and not any(map(site, self._outputs)):
            return select(site, self._inputs_of, {}, str)
        if callable(site):
            return select(site, self._outputs, self.aliases, str)
        return list(dict.fromkeys(name for part in site for name in self.names(part)))

    def _names_of_string(self, site: str) -> list[str]:
        try:
            return select(site, self._outputs, self.aliases, str)
        except UnknownSite:
            base, path = parsed(site)
            if base in self._inputs_of:
                return [site]
            if base.endswith(".input"):
                modules = select(base.removesuffix(".input"), self._outputs, self.aliases, str)
                return [self._input_name(name) + spelled(path) for name in modules]
            if not path:
                raise
        return [name + spelled(path) for name in select(base, self._outputs, self.aliases, str)]

    def _input_name(self, module: str) -> str:
        """What the inputs of a module are called; a submodule that is itself called so goes first."""
        return f"{module}.input" if f"{module}.input" not in self.mod_dict else f"{module}.input()"

    def _home(self, name: str) -> tuple[str, bool, tuple[int | str, ...]]:
        """The module that a name belongs to, whether it means its inputs, and the path to a part of them."""
        if name in self.mod_dict:
            return name, False, ()
        base, path = parsed(name)
        return self._inputs_of.get(base, base), base in self._inputs_of, path

    def points(self, site: Site) -> list[HookPoint]:
        """The points that a site means, as `names` gives them; those at inputs and at parts are made when first named."""
        return [self._point(name) for name in self.names(site)]

    def _point(self, name: str) -> HookPoint:
        if name not in self._points:
            module, is_input, path = self._home(name)
            make = ModulePoint.at_input if is_input else ModulePoint.at_output
            self._points[name] = make(self.mod_dict[module], name, path)
        return self._points[name]

    def points_for(self, site: Site, when: str = "post") -> list[HookPoint]:
        """Where hooks on a site stand: "pre" on a module means its inputs."""
        names = self.names(site)
        if when == "pre":
            homes = [self._home(name) for name in names]
            names = [self._input_name(module) + spelled(path) for module, _, path in homes]
        return [self._point(name) for name in names]

    # ---- running -----------------------------------------------------------------------------------------------------

    def run_with_hooks(
        self, *model_args: Any, fwd_hooks: HookList = (), bwd_hooks: HookList = (), **options: Any
    ) -> Any:
        """One forward pass under these hooks, as for any HookedRootModule; returns what the module returns.

        Raises KeyError after a run that called none of the modules that a hook is for.
        """
        reached = _Reached()
        entries = [read_entry(given) for given in (*fwd_hooks, *bwd_hooks)]
        asked = [(entry.site, [p.name or "" for p in self.points_for(entry.site, entry.when)]) for entry in entries]
        with self.hooks([(name, reached) for _, names in asked for name in names]):
            output = super().run_with_hooks(*model_args, fwd_hooks=fwd_hooks, bwd_hooks=bwd_hooks, **options)
        _check_reached(asked, reached.names)
        return output

    def run_with_cache(self, *model_args: Any, names_filter: NamesFilter = None, **options: Any) -> tuple[Any, Any]:
        """One forward pass, and what it left at the points that `names_filter` selects, as for any HookedRootModule.

        Without a filter that is the output of every module that was called. Of a module that is called several times
        "name" is the first call, "name@1" the second. Raises KeyError after a run that called none of the modules that
        the filter, or one of those in a list, is for.
        """
        output, cache = super().run_with_cache(*model_args, names_filter=names_filter, **options)
        if names_filter is not None:
            sites = names_filter if isinstance(names_filter, (list, tuple)) else [names_filter]
            _check_reached([(site, self.names(site)) for site in sites], cache)
        return output, cache


class _Reached:
    """A hook that notes where it was called."""

    records = True

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def __call__(self, value: Any, hook: HookPoint) -> None:
        self.names[hook.name or ""] = None


def _check_reached(asked: Sequence[tuple[Site, list[str]]], reached: Container[str]) -> None:
    for site, names in asked:
        if names and not any(name in reached for name in names):
            raise UnknownSite(f"{site!r} was not reached: this run did not call {', '.join(names[:3])}")


def wrap(module: nn.Module) -> WrappedModule:
    """Give any module `run_with_cache`, `run_with_hooks`, `hooks` and `register`; its dotted module names are the sites.

    A name means the output of that module, `name.input` its inputs, also for a hook object on `name` with `when="pre"`.
    What is not one tensor but a tuple, list, dict or dataclass of them shows its first; the others have a path, such as
    `name[1]`, `name[last_hidden_state]`, `name[past][0]`, `name.input[mask]`: inputs go by their place or by the name of
    the parameter, however they were given. `names()` prints all modules as a tree.

    >>> import torch
    >>> net = wrap(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()))
    >>> net.names()
    0  Linear
    1  ReLU
    >>> output, cache = net.run_with_cache(torch.ones(2, 3))
    >>> list(cache)
    ['0', '1']
    >>> list(net.run_with_cache(torch.ones(2, 3), names_filter=["0.input", "1"])[1])
    ['0.input', '1']
    """
    return WrappedModule(module)
