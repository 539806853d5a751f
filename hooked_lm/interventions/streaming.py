"""What detectors share that go through a data set batch by batch: the texts, and for each site what was found by now."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """What was found at a site, for each of [*features], in tensors whose sizes stay as they are."""

    features: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]: ...


Found = TypeVar("Found", bound=State)


@dataclass(eq=False, repr=False)
class Streaming(Collector, Generic[Found]):
    """A detector that is shown a data set batch by batch, and whose memory does not grow with it.

    `inputs` records the token ids that a run reads. It is added to every run of this detector, where the model has the site
    `tokens` ("hook_decoder_tokens" for the decoder of an encoder-decoder). Models receive the mask of padding separately: say
    it by `batch(tokens, mask)` before each run, which also says the ids of a wrapped module.
    """

    tokens: Site = field(default="hook_tokens", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inputs = InputTokens(self.tokens, most_calls=1)
        self.clear()

    @property
    def companions(self) -> tuple[InputTokens]:
        """The hook objects that every run of this one needs, before it."""
        return (self.inputs,)

    @property
    def is_enabled(self) -> bool:
        """Whether it takes part in runs of this thread or task."""
        return super().is_enabled

    @is_enabled.setter
    def is_enabled(self, is_on: bool) -> None:
        self._is_on = self.inputs.is_enabled = is_on

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Take no part in runs inside the block; texts of such runs are not counted."""
        with super().disabled(), self.inputs.disabled():
            yield

    def clear(self) -> None:
        """Forget everything, and count texts from 0 again."""
        self._states: dict[str, Found] = {}
        self.inputs.clear()

    def batch(self, tokens: Int[Tensor, "batch pos"], mask: Tensor | None = None) -> None:
        """Say which tokens the next run reads, and which are real."""
        self.inputs.batch(tokens, mask)

    def _state(self, site: str, features: tuple[int, ...], new: Callable[[], Found]) -> Found:
        """What was found at a site by now. Raises ValueError if it had other features."""
        if site not in self._states:
            self._states[site] = new()
        state = self._states[site]
        if state.features != features:
            raise ValueError(f"'{site}' has features {list(features)}, and those before had {list(state.features)}")
        return state

    @property
    def n_bytes(self) -> int:
        """What is held: it depends on the sites and settings alone, not on how much was seen.

        Beside it are the ids of one batch, `inputs.n_bytes`, and while a batch is looked at what the class says.
        """
        return sum(
            tensor.numel() * tensor.element_size() for state in self._states.values() for tensor in state.tensors
        )

    @property
    def sites(self) -> list[str]:
        """The sites that were seen."""
        return list(self._states)
