"""HookedRootModule: a network with named hook points, and the methods that run it with hooks."""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.hooks import scope
from hooked_lm.hooks.cache import Cache
from hooked_lm.hooks.hook import Hook
from hooked_lm.hooks.hook_spec import HookList, HookSpec, companions_of, direction_and_when, hook_list, parse_hook
from hooked_lm.hooks.listed import ListedHooks, ShownSites
from hooked_lm.hooks.module_points import ModulePoint
from hooked_lm.hooks.name_tree import NameTree
from hooked_lm.hooks.padding import masks_of_run
from hooked_lm.hooks.point import HookPoint, directions_of, install_all, unnamed
from hooked_lm.hooks.properties import Properties
from hooked_lm.hooks.recorder import Recorder, copying_together
from hooked_lm.hooks.replaced_points import SiteMetadata, give_name, inherit_metadata
from hooked_lm.hooks.scope import Scope
from hooked_lm.hooks.select import NamesFilter, PointDict, Site, UnknownSite, select
from hooked_lm.hooks.slice import Slice, SliceInput
from hooked_lm.hooks.values import backward_from

_ids = itertools.count(1)


class HookedRootModule(ShownSites, Properties):
    """A network with HookPoints; call `setup()` at the end of `__init__`.

    A hook is a pair `(site, fn)`, or a callable object with a `hook_point` and the optional attributes `layer`, `direction`
    ("fwd", or "bwd" for gradients) and `when` ("pre" runs before all "post" hooks of a point). A site is a name, a glob
    ("blocks.*.attn.hook_z"), a predicate on names, or a list of these. With "pre" it may also name modules ("blocks.*.mlp");
    it gets their first input. Hooks of `hooks(...)` run in this thread or task, in the block; of `register`, until `unregister`.

    >>> import torch
    >>> class Net(HookedRootModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.hook_in = HookPoint("batch", "pos")
    ...         self.setup()
    ...
    ...     def forward(self, x):
    ...         return 2 * self.hook_in(x)
    >>> Net().run_with_hooks(torch.ones(1, 2), fwd_hooks=("hook_in", lambda x, hook: x + 1))
    tensor([[4., 4.]])
    """

    # Defaults before `setup()`, and for subclasses that define `hook_dict` and skip `__init__`; never changed in place.
    mod_dict: Mapping[str, nn.Module] = MappingProxyType({})
    aliases: Mapping[str, str] = MappingProxyType({})
    _site_metadata: Mapping[str, SiteMetadata] = MappingProxyType({})
    _input_points: Mapping[str, ModulePoint] = MappingProxyType({})
    _registered: Mapping[int, tuple[Any, list[Hook]]] = MappingProxyType({})
    _level_added = 0

    # ---- names ---------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Finds the modules and names the hook points; call it again after replacing a module.

        A point without dims gets the dims of the point that it replaces, also if another module was there in between.
        """
        modules = dict(self.named_modules())
        self._site_metadata = inherit_metadata(modules, self._site_metadata, self.all_points())
        self.mod_dict = {name: module for name, module in modules.items() if name}
        self._points = {name: module for name, module in self.mod_dict.items() if isinstance(module, HookPoint)}
        self.aliases = self.find_aliases(self._points)
        for name, module in self.mod_dict.items():
            if isinstance(module, HookPoint):
                module.name = name
            else:
                give_name(module, name)
        before = self._input_points
        self._input_points = {name: point for name, point in before.items() if point.belongs_to(modules.get(name))}
        for name, inputs in before.items():
            if name not in self._input_points:
                inputs.remove_all()

    @property
    def hook_dict(self) -> MutableMapping[str, HookPoint]:
        """The hook points by name, in order. Iteration shows those of a bare run; lookup and `all_points` all of them."""
        return PointDict(self.__dict__.setdefault("_points", {}), self.aliases, self.in_bare_cache)

    @hook_dict.setter
    def hook_dict(self, points: dict[str, HookPoint]) -> None:
        self._points = points

    def all_points(self) -> dict[str, HookPoint]:
        """The hook points by name, in order of computation, including those on demand."""
        own = type(self).hook_dict is HookedRootModule.hook_dict
        shown: Any = self.__dict__.setdefault("_points", {}) if own else self.hook_dict
        return shown if own else shown.points if isinstance(shown, PointDict) else dict(shown)

    def find_aliases(self, names: Collection[str]) -> dict[str, str]:
        """The aliases of sites, by alias; none in this class."""
        return {}

    def hook_points(self) -> Iterator[HookPoint]:
        """The hook points, in order of computation, then those that hooks on inputs of modules created."""
        return iter([*self.all_points().values(), *self._input_points.values()])

    def site_name(self, site: object) -> str:
        """The full name of a short name such as ("z", 5); this class has no short names."""
        return str(site)

    def names(self, site: Site | None = None) -> list[str]:
        """The names of the points that match a site; KeyError, with the nearest, if there are none. None: all, as a tree."""
        points = self.all_points()
        if site is None:
            return NameTree(points, {name: " ".join(point.dims) for name, point in points.items()})
        if isinstance(site, str) and site in points:
            return [site]
        return select(site, points, self.aliases, self.site_name, self.predicate_groups(points))

    def predicate_groups(self, points: Mapping[str, HookPoint]) -> list[set[str]]:
        """Groups of names to which a predicate is applied before all others: the sites of a bare run."""
        return [{name for name, point in points.items() if self.in_bare_cache(point)}]

    def points(self, site: Site) -> list[HookPoint]:
        """The points that match a site, as in `names`."""
        points = self.all_points()
        return [points[name] for name in self.names(site)]

    def points_for(self, site: Site, when: str = "post") -> list[HookPoint]:
        """The points for hooks on a site; for "pre", if the site names modules, the points at their inputs."""
        try:
            return self.points(site)
        except UnknownSite:
            if when == "post":
                raise
            modules = {name: None for name, m in self.mod_dict.items() if name and not isinstance(m, HookPoint)}
            try:
                named = select(site, modules, {}, str)
            except UnknownSite:
                named = []
            if not named:
                raise
        return [self._input(name) for name in named]

    def _input(self, name: str) -> HookPoint:
        if name not in self._input_points:
            self._keep_input(name, ModulePoint.at_input(self.mod_dict[name], f"{name}.input"))
        return self._input_points[name]

    @scope.synchronized
    def _keep_input(self, name: str, point: ModulePoint) -> None:
        self._input_points = {name: point, **self._input_points}

    def in_bare_cache(self, point: HookPoint) -> bool:
        """Whether a cache without a filter keeps this point."""
        return not point.on_demand

    # ---- running under hooks -------------------------------------------------------------------------------

    def hooks(
        self,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Scope:
        """A context manager inside which these hooks, or this one, are active.

        Backward hooks are attached in the forward pass, so they also run in a `backward()` after the block. With
        `reset_hooks_end=False` the hooks stay, in all threads, until `reset_hooks`. `clear_contexts` clears every `ctx`.
        """
        return Scope(self, fwd_hooks, bwd_hooks, not reset_hooks_end, clear_contexts)

    def plan_hooks(
        self, hooks: HookList, dir: str, level: int | None, is_permanent: bool = False
    ) -> list[tuple[HookPoint, Hook]]:
        """Handles for a list of hooks, each with its point; none is installed yet. Raises for invalid hooks."""
        plan, entries = [], [parse_hook(given, dir) for given in hook_list(hooks)]
        for site, function, direction, when in [*filter(self._is_installable, companions_of(entries)), *entries]:
            for point in self.points_for(site, when):
                self.check_hooks_to_add(point, point.name or "", function, direction)
                plan.append((point, point.make_hook(function, direction, is_permanent, level, when=when)))
        return plan

    def _is_installable(self, companion: HookSpec) -> bool:
        """Whether a companion of a hook object has a site in this model, and is not active already."""
        try:
            points = self.points_for(companion.site, companion.when)
        except UnknownSite:
            return False
        return not any(hook.user_hook is companion.function for point in points for hook in point.active_hooks())

    def run_with_hooks(
        self,
        *model_args: object,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: object,
    ) -> Any:
        """Runs a forward pass with these hooks and returns the model's output."""
        block = self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts)
        return block.run(lambda: self(*model_args, **model_kwargs))

    def run_with_cache(
        self,
        *model_args: object,
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Slice | SliceInput = None,
        return_cache_object: bool = True,
        fwd_hooks: HookList = (),
        bwd_hooks: HookList = (),
        **model_kwargs: object,
    ) -> tuple[Any, Any]:
        """Runs a forward pass and returns (output, cache) with the values at the sites that `names_filter` selects.

        Without a filter all sites except those on demand are cached, as `fwd_hooks` and `bwd_hooks` leave them. `incl_bwd` also
        calls `backward()` on the output, which must be a scalar, and caches gradients as `<name>_grad`. `pos_slice` selects
        positions; `device` is the device of the cache. With `return_cache_object=False` the cache is a dict.
        """
        cache, fwd, bwd = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, pos_slice=pos_slice)

        def run() -> Any:
            output = self(*model_args, **model_kwargs)
            if incl_bwd:
                backward_from(output)
            return output

        hooks = ([*hook_list(fwd_hooks), *fwd], [*hook_list(bwd_hooks), *bwd])
        with copying_together(fwd, bwd), masks_of_run() as masks:
            output = self.hooks(*hooks, reset_hooks_end, clear_contexts).run(run)
        made = self.make_cache(cache, not remove_batch_dim)
        made.keep_masks(masks, pos_slice)
        return output, (made if return_cache_object else cache)

    def make_cache(self, cache_dict: dict[str, Tensor], has_batch_dim: bool) -> Cache:
        """The object that `run_with_cache` returns."""
        return Cache(cache_dict, has_batch_dim, {name: point.dims for name, point in self.all_points().items()})

    # ---- caching hooks -------------------------------------------------------------------------------------

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Slice | SliceInput = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, Recorder]], list[tuple[str, Recorder]]]:
        """An empty cache, and the forward and backward hooks that fill it."""
        cache = {} if cache is None else cache
        if names_filter is None:
            names = [name for name, point in self.all_points().items() if self.in_bare_cache(point)]
        else:
            names = self.names(names_filter)
        forward = Recorder(cache, device, remove_batch_dim, pos_slice)
        backward = Recorder(cache, device, remove_batch_dim, pos_slice, suffix="_grad")
        return cache, [(n, forward) for n in names], [(n, backward) for n in names if incl_bwd]

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Caches the values of every later run in a dict, until `reset_hooks`; returns the dict."""
        cache, fwd, bwd = self.get_caching_hooks(names_filter, incl_bwd, device, remove_batch_dim, cache)
        install_all(self.plan_hooks(fwd, "fwd", None) + self.plan_hooks(bwd, "bwd", None))
        return cache

    def cache_all(
        self,
        cache: dict[str, Tensor] | None,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
    ) -> dict[str, Tensor]:
        """`add_caching_hooks` for all sites of a bare run, into the given dict."""
        return self.add_caching_hooks(None, incl_bwd, device, remove_batch_dim, cache)

    def cache_some(
        self,
        cache: dict[str, Tensor] | None,
        names: NamesFilter,
        incl_bwd: bool = False,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
    ) -> dict[str, Tensor]:
        """`add_caching_hooks` for some sites, into the given dict."""
        return self.add_caching_hooks(names, incl_bwd, device, remove_batch_dim, cache)

    # ---- hooks without a scope -----------------------------------------------------------------------------

    def add_hook(
        self,
        name: Site,
        hook: Callable[..., object],
        dir: str | None = None,
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Adds a hook to every point that matches a site, for all threads, until it is reset.

        `dir` is "fwd" (the default), "bwd" or "both". For a hook object its `direction` and `when` apply; a contradicting
        `dir` raises ValueError.
        """
        direction, when = direction_and_when(hook, dir)
        points = self.points_for(name, when)
        for point in points:
            self.check_hooks_to_add(point, point.name or "", hook, direction, is_permanent, prepend)
        options = (is_permanent, level, prepend, None, when)
        install_all([(p, p.make_hook(hook, each, *options)) for p in points for each in directions_of(direction)])

    def check_and_add_hook(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: Callable[..., object],
        dir: str | None = None,
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Adds a hook to one point after `check_hooks_to_add`."""
        direction, _ = direction_and_when(hook, dir)
        self.check_hooks_to_add(hook_point, hook_point_name, hook, direction, is_permanent, prepend)
        hook_point.add_hook(hook, dir, is_permanent, level, prepend)

    def add_perma_hook(self, name: Site, hook: Callable[..., object], dir: str | None = None) -> None:
        """Adds a hook that survives resets."""
        self.add_hook(name, hook, dir, is_permanent=True)

    def register(self, hook: object) -> int:
        """Adds a hook, an object or a pair, for all threads and through all resets; returns its id for `unregister`.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> hook_id = model.register(("blocks.0.hook_mlp_out", lambda value, hook: 0 * value))
        >>> list(model.registered()) == [hook_id]
        True
        >>> model.unregister(hook_id)
        """
        plan, hook_id = self.plan_hooks([hook], "fwd", None, is_permanent=True), next(_ids)
        self._register(hook_id, hook, plan)
        return hook_id

    @scope.synchronized
    def _register(self, hook_id: int, hook: object, plan: list[tuple[HookPoint, Hook]]) -> None:
        handles = [handle for _, handle in plan]
        try:
            self._registered = {**self._registered, hook_id: (hook, handles)}
            install_all(plan)
        except BaseException:
            self._registered = {i: entry for i, entry in self._registered.items() if i != hook_id}
            raise

    @scope.synchronized
    def unregister(self, hook_id: int) -> None:
        """Removes the hook that was registered under this id; raises KeyError with the known ids."""
        known = self.registered()
        if hook_id not in known:
            ids = ", ".join(map(str, known)) or "none"
            raise UnknownSite(f"no hook is registered under {hook_id!r}; the ids are {ids}")
        for handle in self._registered[hook_id][1]:
            handle.remove()
        self._registered = {i: entry for i, entry in self._registered.items() if i != hook_id}

    def registered(self) -> dict[int, Any]:
        """The registered hooks by id, in order of registration."""
        return {i: given for i, (given, handles) in self._registered.items() if any(h.is_active for h in handles)}

    def check_hooks_to_add(
        self,
        hook_point: HookPoint,
        hook_point_name: str,
        hook: Callable[..., object],
        dir: str = "fwd",
        is_permanent: bool = False,
        prepend: bool = False,
    ) -> None:
        """Called before a hook is added; a subclass may raise an error to refuse it."""

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: str = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes the hooks of this context, and (by default) clears every `ctx`."""
        self.remove_all_hook_fns(direction, including_permanent, level)
        if clear_contexts:
            self.clear_contexts()

    def remove_all_hook_fns(
        self, direction: str = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Removes the hooks of this context, of one direction or level; permanent ones only if requested."""
        for point in self.hook_points():
            point.remove_hooks(direction, including_permanent, level)
        self._forget_removed()

    @scope.synchronized
    def _forget_removed(self) -> None:
        self._registered = {i: self._registered[i] for i in self.registered()}

    def clear_contexts(self) -> None:
        """Clears the `ctx` of every point."""
        for point in self.hook_points():
            point.clear_context()

    def list_hooks(
        self, name_filter: NamesFilter = None, dir: str = "both", including_permanent: bool = True
    ) -> ListedHooks:
        """The hooks that are active in this context, by the name of their point; of some sites, or one direction."""
        directions, listed = directions_of(dir), ListedHooks()
        if callable(name_filter):  # a predicate also applies to on-demand points with hooks
            name_filter = [name for name, p in self.all_points().items() if p.active_hooks() and name_filter(name)]
        for point in self.hook_points() if name_filter is None else self.points(name_filter) if name_filter else ():
            for hook in point.active_hooks():
                if hook.dir in directions and (including_permanent or not hook.is_permanent):
                    listed.setdefault(point.name or "", []).append(hook)
        return listed

    def __repr__(self) -> str:
        with unnamed():  # so that equal blocks are printed once
            return super().__repr__()

    @property
    def context_level(self) -> int:
        """The number of open `with model.hooks(...)` blocks in this context; assignment changes the count."""
        return scope.depth(self) + self._level_added

    @context_level.setter
    def context_level(self, level: int) -> None:
        self._level_added = level - scope.depth(self)

    @property
    def is_caching(self) -> bool:
        """Whether a recorder is active in this context."""
        return any(hook.records for hooks in self.list_hooks().values() for hook in hooks)
