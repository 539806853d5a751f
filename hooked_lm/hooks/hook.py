"""Hook: the handle of a hook function at a hook point."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hooked_lm.hooks import scope
from hooked_lm.hooks.values import spec_of, takes_hook_keyword, wrong_return
from hooked_lm.notebook_repr import NotebookRepr, Table

HookFunction = Callable[..., Any]
"""A hook: `function(value, hook)` that returns the new value, or None to keep the value or what it wrote into it."""
_clock = itertools.count(1)


class Hook(NotebookRepr):
    """A hook function at one point, with its options.

    `user_hook` is the user's function, `is_permanent` says whether it survives resets, `context_level` is the depth of the
    `with` block at whose end it is removed (None: it stays until removed). Hooks with `when="pre"` run before all others.
    """

    answers_keywords = False

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
        self.shown_points = [point.under_name(name) for name in alias_names] if alias_names else [point]
        self.dir = dir
        self.when = when
        self.is_permanent = is_permanent
        self.context_level = level
        self.thread_or_task = scope.thread_or_task() if level is not None else None
        self.records = getattr(user_hook, "records", None) is True
        self.id = next(_clock)
        self.order = -self.id if prepend else self.id
        # the handles added in the same call; empty for a single handle, since a list of itself would keep it alive
        self.together: list[Hook] = []
        self._takes_keyword = self.records or takes_hook_keyword(user_hook)

    @property
    def hook(self) -> "Hook":
        """The handle itself: tools remove hooks by `point.fwd_hooks[0].hook.remove()`."""
        return self

    def __getattr__(self, name: str) -> str:
        """`__name__` is the repr of the hook function, by which tools recognise their hooks."""
        if name == "__name__":  # computed on access: the repr of a bound method contains that of the whole model
            return repr(self.user_hook)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    @property
    def is_active(self) -> bool:
        """Whether the hook is at its point; False after `remove` or a reset."""
        return self.point.holds(self)

    def hooks_dict_ref(self) -> dict[int, "Hook"]:
        """The hooks at the same point by `id`; as in PyTorch, `hook.id in hook.hooks_dict_ref()` until it is removed."""
        return self.point.hooks_by_id()

    def remove(self) -> None:
        """Removes this hook from its point, and those added in the same call, from any thread."""
        for hook in self.together or [self]:
            self.point.discard(hook)

    def __call__(self, value: Any, at: Any = None) -> Any:
        """Runs the function, once for each alias of the point, and returns the new value.

        `at` is the point to pass to the function if it currently has another name.
        """
        shown_points = self.shown_points if at is None or self.has_aliases else [at]
        if self.records:
            for point in shown_points:
                self.user_hook(value, hook=point)
            return value
        for point in shown_points:
            expected = spec_of(value)
            new = self.user_hook(value, hook=point) if self._takes_keyword else self.user_hook(value, point)
            if (
                self.dir == "bwd" and isinstance(new, tuple) and len(new) == 1
            ):  # PyTorch's backward hooks return a tuple
                new = new[0]
            value = value if new is None else new
            if expected is not None and spec_of(value) != expected:
                kind = "forward" if self.dir == "fwd" else "backward"
                raise wrong_return(f"a {kind} hook at '{point.name}'", value, *expected)
        return value

    @property
    def function_name(self) -> str:
        """The name of a function, the text of a hook object, or the class of any other callable."""
        if hasattr(self.user_hook, "hook_point"):
            return repr(self.user_hook)
        return getattr(self.user_hook, "__name__", type(self.user_hook).__name__)

    @property
    def options(self) -> str:
        """The options that differ from their defaults, in words."""
        stays = "permanent" if self.is_permanent else "until removed" if self.context_level is None else ""
        return ", ".join(filter(None, ["runs first" if self.when == "pre" else "", stays]))

    def repr_table(self) -> Table:
        """The function, its point and its options."""
        shown = {"hook": self.function_name, "site": self.point.name, "direction": self.dir, "options": self.options}
        return Table(("", "value"), [(name, value) for name, value in shown.items() if value])

    def __repr__(self) -> str:
        name = getattr(self.user_hook, "__name__", type(self.user_hook).__name__)
        return f"Hook({name}, {self.dir}, at={self.point.name!r})"
