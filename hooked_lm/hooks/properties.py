"""Properties of modules that say why they have no value."""

from typing import TYPE_CHECKING, Any

from torch import nn


class Properties(nn.Module):
    """A module in which an AttributeError raised inside a property keeps its message.

    Python asks `__getattr__` after such an error, and that of `nn.Module` raises another one, without the reason.
    """

    def __getattr__(self, name: str) -> Any:
        value = getattr(type(self), name, None)
        if isinstance(value, property) and value.fget is not None:
            return value.fget(self)
        return super().__getattr__(name)

    if TYPE_CHECKING:  # `nn.Module` declares tensors and modules alone

        def __setattr__(self, name: str, value: Any) -> None: ...
