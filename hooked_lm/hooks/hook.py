"""Hook: the handle of a function on a hook point."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hooked_lm.hooks import scope
from hooked_lm.hooks.values import kind_of, misfit, takes_hook_keyword

HookFunction = Callable[..., Any]
_clock = itertools.count(1)


class Hook:
    """A function on one point, and how it was put there.

    `user_hook` is the function as given, `is_permanent` whether it survives resets, `context_level` the depth
    of `with` blocks at whose end it goes (None: it stays until removed). Those with `when="pre"` run before all others.
    """

    def __init__(
        self,
        user_hook: HookFunction,
        point: Any,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
        alias_names: Sequence[str] | None = None,
        when: str = "post",
    ) -> None:
        self.user_hook = user_hook
        self.point = point
        self.has_aliases = bool(alias_names)
        self.shown_points = [point.known_as(name) for name in alias_names] if alias_names else [point]
        self.dir = dir
        self.when = when
        self.is_permanent = is_permanent
        self.context_level = level
        self.runner = scope.runner() if level is not None else None
        self.records = getattr(user_hook, "records", None) is True
        self.id = next(_clock)
        self.order = -self.id if prepend else self.id
        # those added in the same call; a list that held this one alone would keep it alive
        self.together: list[Hook] = []
        self._takes_keyword = self.records or takes_hook_keyword(user_hook)

    @property
    def hook(self) -> "Hook":
        """The handle itself: `point.fwd_hooks[0].hook.remove()` is how tools take a hook away."""
        return self

    def __getattr__(self, name: str) -> str:
        """`__name__` says which function this is: tools look there for those of their own."""
        if name == "__name__":  # made when it is asked for, as the `repr` of a model's method is that of the model too
            return repr(self.user_hook)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def is_active(self) -> bool:
        """Whether it is still at its point, from which a reset may have taken it."""
        return self.point.holds(self)

    def hooks_dict_ref(self) -> dict[int, "Hook"]:
        """The hooks at the same point by `id`; `hook.id in hook.hooks_dict_ref()` while it is there, as in PyTorch."""
        return self.point.hooks_by_id()

    def remove(self) -> None:
        """Take this hook from its point, and those that were added together with it, whoever added them."""
        for hook in self.together or [self]:
            self.point.discard(hook)

    def __call__(self, value: Any, at: Any = None) -> Any:
        """Run the function, once for each name it knows the point by; None leaves the value as it is.

        A point that goes by another name for now is shown as it is `at` the moment.
        """
        shown_points = self.shown_points if at is None or self.has_aliases else [at]
        if self.records:
            for point in shown_points:
                self.user_hook(value, hook=point)
            return value
        for point in shown_points:
            expected = kind_of(value)
            new = self.user_hook(value, hook=point) if self._takes_keyword else self.user_hook(value, point)
            if self.dir == "bwd" and isinstance(new, tuple) and len(new) == 1:  # as PyTorch's own backward hooks answer
                new = new[0]
            value = value if new is None else new
            if expected is not None and kind_of(value) != expected:
                kind = "forward" if self.dir == "fwd" else "backward"
                raise misfit(f"a {kind} hook at '{point.name}'", value, *expected)
        return value

    def __repr__(self) -> str:
        name = getattr(self.user_hook, "__name__", type(self.user_hook).__name__)
        return f"Hook({name}, {self.dir}, at={self.point.name!r})"
