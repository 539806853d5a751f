"""The error of a wrong argument where other libraries raise another class."""


class ArgumentError(ValueError, IndexError, AssertionError, RuntimeError):
    """A wrong value, index or shape: one class for all that libraries with the same functions raise there.

    >>> from hooked_lm.errors import ArgumentError
    >>> issubclass(ArgumentError, ValueError), issubclass(ArgumentError, AssertionError)
    (True, True)
    """
