"""Hook points for any `nn.Module`, with the methods of HookedRootModule and PyTorch's names of submodules."""

from collections.abc import Container, Sequence
from typing import Any

from torch import nn

from hooked_lm.hooks.hook_spec import HookList, hook_list, parse_hook
from hooked_lm.hooks.module import HookedRootModule
from hooked_lm.hooks.module_points import ModulePoint, calls_so_far, format_path, split_path
from hooked_lm.hooks.name_tree import NameTree
from hooked_lm.hooks.point import HookPoint
from hooked_lm.hooks.select import NamesFilter, Site, UnknownSite, select
from hooked_lm.notebook_repr import Table


class WrappedModule(HookedRootModule):
    """A module with hook points at the inputs and the output of each submodule; see `wrap`."""

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"wrap takes a torch.nn.Module, got {type(module).__name__}")
        super().__init__()
        self.module = module
        self.training = module.training
        self.setup()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if hasattr(self.__dict__.get("_modules", {}).get("module"), name):
                raise AttributeError(f"{error}; the wrapped module has it: .module.{name}") from None
            raise AttributeError(
                f"{error}: a wrapped module has hooks and caches, but no layers, tokens or logits, as sweeps, attribution and "
                "lenses need; these take a model of this library (from_pretrained)"
            ) from None

    def setup(self) -> None:
        """Finds the submodules. Call it again after replacing one; the hooks of the others are kept."""
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
                point.remove_all()

    def _restore(self, name: str, point: HookPoint | None) -> None:
        module = self.mod_dict.get(self._locate(name)[0])
        if isinstance(point, ModulePoint) and point.belongs_to(module):
            self._points[name] = point
        elif module is not None:
            self._point(name)

    def forward(self, *args: object, **kwargs: object) -> Any:
        before = calls_so_far.get()
        try:
            try:
                calls_so_far.set({})
                return self.module(*args, **kwargs)
            finally:
                calls_so_far.set(before)
        finally:  # an interrupt may skip the line above
            calls_so_far.set(before)

    def unwrap(self) -> nn.Module:
        """Removes all points and returns the original module."""
        for point in self._points.values():
            if isinstance(point, ModulePoint):
                point.remove_all()
        self._points, self._outputs, self._inputs_of, self.aliases = {}, {}, {}, {}
        self._registered = {}
        return self.module

    def repr_table(self) -> Table:
        """The submodules, whose inputs and outputs have points, with their classes."""
        return Table(("module", "class"), [(name, type(self.mod_dict[name]).__name__) for name in self._outputs])

    # ---- names -------------------------------------------------------------------------------------------------------

    def names(self, site: Site | None = None) -> list[str]:
        """The names that match a site; without an argument the names of all modules, which print as a tree.

        Globs and predicates match outputs; globs that end in ".input", and predicates that match no output, match inputs.
        Raises KeyError with the nearest names if nothing matches.
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
            base, path = split_path(site)
            if base in self._inputs_of:
                return [site]
            if base.endswith(".input"):
                modules = select(base.removesuffix(".input"), self._outputs, self.aliases, str)
                return [self._input_name(name) + format_path(path) for name in modules]
            if not path:
                raise
        return [name + format_path(path) for name in select(base, self._outputs, self.aliases, str)]

    def _input_name(self, module: str) -> str:
        """The name of a module's inputs; "input()" if the module has a submodule named "input"."""
        return f"{module}.input" if f"{module}.input" not in self.mod_dict else f"{module}.input()"

    def _locate(self, name: str) -> tuple[str, bool, tuple[int | str, ...]]:
        """The module of a site name, whether the name means its inputs, and the path to a tensor inside."""
        if name in self.mod_dict:
            return name, False, ()
        base, path = split_path(name)
        return self._inputs_of.get(base, base), base in self._inputs_of, path

    def points(self, site: Site) -> list[HookPoint]:
        """The points of `names(site)`; points at inputs and at paths are created on first use."""
        return [self._point(name) for name in self.names(site)]

    def _point(self, name: str) -> HookPoint:
        if name not in self._points:
            module, is_input, path = self._locate(name)
            make = ModulePoint.at_input if is_input else ModulePoint.at_output
            self._points[name] = make(self.mod_dict[module], name, path)
        return self._points[name]

    def points_for(self, site: Site, when: str = "post") -> list[HookPoint]:
        """The points for hooks on a site: those at the inputs of modules for "pre"."""
        names = self.names(site)
        if when == "pre":
            homes = [self._locate(name) for name in names]
            names = [self._input_name(module) + format_path(path) for module, _, path in homes]
        return [self._point(name) for name in names]

    # ---- running -----------------------------------------------------------------------------------------------------

    def run_with_hooks(
        self, *model_args: object, fwd_hooks: HookList = (), bwd_hooks: HookList = (), **options: Any
    ) -> Any:
        """Runs a forward pass with hooks, as on any HookedRootModule, and returns the module's output.

        Raises KeyError after the run if a hook's modules were not called.
        """
        reached = _ReachedSites()
        entries = [parse_hook(given) for given in (*hook_list(fwd_hooks), *hook_list(bwd_hooks))]
        named = [(entry.site, [p.name or "" for p in self.points_for(entry.site, entry.when)]) for entry in entries]
        with self.hooks([(name, reached) for _, names in named for name in names]):
            output = super().run_with_hooks(*model_args, fwd_hooks=fwd_hooks, bwd_hooks=bwd_hooks, **options)
        _check_reached(named, reached.names)
        return output

    def run_with_cache(self, *model_args: object, names_filter: NamesFilter = None, **options: Any) -> tuple[Any, Any]:
        """Runs a forward pass and returns (output, cache), as on any HookedRootModule.

        Without a filter the cache has the output of every module that was called. If a module is called several times,
        "name" is the first call, "name@1" the second. Raises KeyError after the run if the filter, or one of a list, matches
        only modules that were not called.
        """
        output, cache = super().run_with_cache(*model_args, names_filter=names_filter, **options)
        if names_filter is not None:
            sites = names_filter if isinstance(names_filter, (list, tuple)) else [names_filter]
            _check_reached([(site, self.names(site)) for site in sites], cache)
        return output, cache


class _ReachedSites:
    """A hook that records the sites at which it was called."""

    records = True

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def __call__(self, value: object, hook: HookPoint) -> None:
        self.names[hook.name or ""] = None


def _check_reached(named: Sequence[tuple[Site, list[str]]], reached: Container[str]) -> None:
    for site, names in named:
        if names and not any(name in reached for name in names):
            raise UnknownSite(f"{site!r} was not reached: this run did not call {', '.join(names[:3])}")


def wrap(module: nn.Module) -> WrappedModule:
    """Adds `run_with_cache`, `run_with_hooks`, `hooks` and `register` to any module; sites are the names of its submodules.

    A name means the output of a submodule, `name.input` its inputs. A hook object on `name` with `when="pre"` also gets the
    inputs. For a tuple, list, dict or dataclass of tensors a name means the first tensor; others have a path, such as
    `name[1]`, `name[last_hidden_state]`, `name[past][0]`, `name.input[mask]`. Paths of inputs begin with the position or the
    name of a parameter. `names()` prints all modules as a tree. Raises TypeError for anything but a module.

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
