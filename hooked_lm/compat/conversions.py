"""The base class of what `HookPoint.enable_reshape` takes."""

from collections.abc import Callable

from torch import Tensor

__all__ = ["BaseTensorConversion"]

Filter = Callable[[Tensor], Tensor]


class BaseTensorConversion:
    """A conversion of a value for hooks, and back; subclasses define `handle_conversion`, and `revert` to convert back.

    The filters are applied before and after `handle_conversion`.

    >>> import torch
    >>> from hooked_lm.hooks import HookPoint
    >>> class Doubled(BaseTensorConversion):
    ...     def handle_conversion(self, input_value, *full_context):
    ...         return 2 * input_value
    ...
    ...     def revert(self, input_value, *full_context):
    ...         return input_value / 2
    >>> point = HookPoint()
    >>> point.enable_reshape(Doubled())
    >>> hook = point.add_hook(lambda value, hook: value + 4)
    >>> point(torch.tensor(1.0))
    tensor(3.)
    """

    def __init__(self, input_filter: Filter | None = None, output_filter: Filter | None = None) -> None:
        self.input_filter, self.output_filter = input_filter, output_filter

    def convert(self, input_value: Tensor, *full_context: object) -> Tensor:
        """The value that hooks receive."""
        value = input_value if self.input_filter is None else self.input_filter(input_value)
        value = self.handle_conversion(value, *full_context)
        return value if self.output_filter is None else self.output_filter(value)

    def handle_conversion(self, input_value: Tensor, *full_context: object) -> Tensor:
        """The converted value."""
        raise NotImplementedError(f"{type(self).__name__} does not define handle_conversion")

    def revert(self, input_value: Tensor, *full_context: object) -> Tensor:
        """The value that goes on, from what hooks have made of the converted one: here unchanged."""
        return input_value
