"""The context of a batch of which some rows run through a part of a layer only."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from hooked_lm.components.context import Context, Tokens


class PartialContext(Context, ABC):
    """Says which rows run through a sublayer. Others enter it at a site, with their value there.

    A block asks it where `is_partial`. In any other context all rows run through all of the layer.
    """

    @abstractmethod
    def of_rows(
        self, passed: Callable[..., Tokens], resume_at: Callable[[str, Tensor], Tokens], *inputs: Tensor | None
    ) -> Tokens:
        """What a sublayer writes: `passed(*inputs)` for rows that run through it, `resume_at(site, value)` for the others."""

    @abstractmethod
    def kv_rows(self, x: Tensor) -> Tensor:
        """The rows whose keys and values are computed."""
