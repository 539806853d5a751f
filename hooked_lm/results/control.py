"""Controls: what the same method finds where there is nothing of the kind to find."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from hooked_lm.callers import warn_caller
from hooked_lm.viz.numbers import short

CONTROL = "control"  # in `about`
AS_WELL = 0.5  # the share of a number with which a control does about as well
UNTRAINED, SHUFFLED = "untrained twin", "shuffled answers"
RANDOM_EDGES, RANDOM_DIRECTION = "as many random edges", "random direction of the same norm"


class Control(NamedTuple):
    """A number that a method found, and that of the same method on a control.

    Args:
        name: the control, such as "untrained twin".
        measure: what the numbers are, such as "largest effect".
        own, other: the number of the result, and that of the control.
        does_as_well: whether the control finds about as much, so that the result need not be due to what the control lacks.
        lacks: what that is, such as "training".

    A result with a control has it in words in its repr and its figure, and warns once if the control does about as well.

    >>> Control("untrained twin", "significant cells", 25, 1, False, "training")
    control (untrained twin): significant cells 1, here 25
    """

    name: str
    measure: str
    own: float | int
    other: float | int
    does_as_well: bool
    lacks: str

    @classmethod
    def compared(cls, name: str, measure: str, own: float | int, other: float | int, lacks: str) -> "Control":
        """A control that does about as well with half of the number, or more, and wherever the number is not positive, or not a
        number: then nothing was found.

        >>> Control.compared("untrained twin", "largest effect", 0.5, 0.4, "training")
        control (untrained twin) does about as well: largest effect 0.4, here 0.5
        """
        has_more = own > 0 and other < AS_WELL * own  # False of NaN
        return cls(name, measure, own, other, not has_more, lacks)

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> "Control | None":
        """The control in the metadata of a result; None if it has none."""
        found = about.get(CONTROL)
        return cls(**found) if isinstance(found, Mapping) else None

    def about(self) -> dict[str, dict[str, Any]]:
        """The control as metadata of a result."""
        return {CONTROL: self._asdict()}

    def warn_if_as_well(self) -> None:
        """Warns if the control does about as well."""
        if self.does_as_well:
            warn_caller(
                f"the control ({self.name}) does about as well: {self.measure} {short(self.other)}, here {short(self.own)}. "
                f"So what was found need not be due to {self.lacks}"
            )

    def __repr__(self) -> str:
        verb = " does about as well" if self.does_as_well else ""
        return f"control ({self.name}){verb}: {self.measure} {short(self.other)}, here {short(self.own)}"


def sentence_of(control: Control | None) -> str:
    """A control as a sentence of a page; "" for none.

    >>> sentence_of(Control("untrained twin", "significant cells", 25, 1, False, "training"))
    'Control (untrained twin): significant cells 1, here 25.'
    """
    return "" if control is None else f"C{repr(control)[1:]}."
