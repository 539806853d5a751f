"""Base class of detectors that process a data set batch by batch, with a state for each site."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from hooked_lm.hooks.select import Site
from hooked_lm.interventions.collector import Collector
from hooked_lm.interventions.input_tokens import InputTokens

__all__ = ["Streaming"]


@runtime_checkable
class State(Protocol):
    """The state of a site, for each of [*features], in tensors of constant size."""

    features: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]: ...


Found = TypeVar("Found", bound=State)


@dataclass(eq=False, repr=False)
class Streaming(Collector, Generic[Found]):
    """A detector that processes a data set batch by batch, in constant memory.

    `inputs` records the input token ids. It is added to every forward pass with this detector if the model has the site
    `tokens` ("hook_decoder_tokens" for the decoder of an encoder-decoder). The padding mask is not part of the ids: pass it to
    `batch(tokens, mask)` before each forward pass; for a wrapped module this also passes the ids.
    """

    tokens: Site = field(default="hook_tokens", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inputs = InputTokens(self.tokens, most_calls=1)
        self.clear()

    @property
    def companions(self) -> tuple[InputTokens]:
        """The hook objects that must run before this one."""
        return (self.inputs,)

    def switched_with(self) -> tuple[InputTokens]:
        """The input tokens: while the detector is off, texts are not counted."""
        return (self.inputs,)

    def clear(self) -> None:
        """Deletes all results, and counts texts from 0 again."""
        self._states: dict[str, Found] = {}
        self.inputs.clear()

    def batch(self, tokens: Int[Tensor, "batch pos"], mask: Tensor | None = None) -> None:
        """Sets the tokens of the next forward pass, and which of them are real (not padding)."""
        self.inputs.batch(tokens, mask)

    def _state(self, site: str, features: tuple[int, ...], new: Callable[[], Found]) -> Found:
        """The state of a site, created by `new` if needed; ValueError if it has other features."""
        if site not in self._states:
            self._states[site] = new()
        state = self._states[site]
        if state.features != features:
            raise ValueError(f"'{site}' has features {list(features)}, and those before had {list(state.features)}")
        return state

    @property
    def n_bytes(self) -> int:
        """The memory of the states, which depends on the sites and settings alone, not on the amount of data.

        Not included: the ids of one batch (`inputs.n_bytes`), and temporary memory (see the class).
        """
        return sum(
            tensor.numel() * tensor.element_size() for state in self._states.values() for tensor in state.tensors
        )

    @property
    def sites(self) -> list[str]:
        """The sites that had values."""
        return list(self._states)
