"""The hooks of any object that has its points in a `hook_dict`."""

from abc import ABC
from collections.abc import Mapping

from hooked_lm.hooks import HookedRootModule, HookPoint, NamesFilter
from hooked_lm.hooks.hook import Hook
from hooked_lm.hooks.point import directions_of

__all__ = ["HookIntrospectionMixin"]


class HookIntrospectionMixin(ABC):
    """A base for classes with a `hook_dict`, which gives them `list_hooks`; every model of hooked_lm is an instance.

    >>> from hooked_lm.hooks import HookPoint
    >>> class Points(HookIntrospectionMixin):
    ...     hook_dict = {"a": HookPoint("batch"), "b": HookPoint("batch")}
    >>> handle = Points.hook_dict["a"].add_hook(lambda value, hook: None)
    >>> list(Points().list_hooks())
    ['a']
    """

    hook_dict: Mapping[str, HookPoint]

    def list_hooks(
        self, name_filter: NamesFilter = None, dir: str = "both", including_permanent: bool = True
    ) -> dict[str, list[Hook]]:
        """The hooks of each point that has any, by its name in `hook_dict`.

        `name_filter` is a name, a list of names, or a predicate; None: all. `dir` is "fwd", "bwd" or "both".
        """
        names = {name_filter} if isinstance(name_filter, str) else name_filter
        directions = directions_of(dir)
        found = {}
        for name, point in self.hook_dict.items():
            if names is None or (names(name) if callable(names) else name in names):
                found[name] = [
                    hook
                    for hook in (*point.fwd_hooks, *point.bwd_hooks)
                    if hook.dir in directions and (including_permanent or not hook.is_permanent)
                ]
        return {name: hooks for name, hooks in found.items() if hooks}


HookIntrospectionMixin.register(HookedRootModule)
