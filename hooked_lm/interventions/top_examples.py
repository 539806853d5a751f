"""The texts that most activate each neuron, head or direction of a site, over a data set processed batch by batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.norms.norm import upcast
from hooked_lm.extras import lazy_import
from hooked_lm.hooks import HookPoint
from hooked_lm.interventions.collector import pick_site
from hooked_lm.interventions.streaming import Streaming
from hooked_lm.interventions.top_positions import NewTokens, TopPositions
from hooked_lm.notebook_repr import Table, bytes_in_words
from hooked_lm.results import stored
from hooked_lm.results.tabular import Tabular

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

__all__ = ["Examples", "TopExamples"]


@dataclass(frozen=True, eq=False, repr=False)
class Examples(Tabular):
    """The top-activating examples of each feature of [*features], strongest first.

    `values` [*features, rank] are the activations; `texts` and `positions` [*features, rank] are the row in the data set and
    the token in the row. `tokens` [*features, rank, place] are the ids of the context: the example is in the middle, and -1
    means no token. `activations`, if requested, are the activations in the context; NaN where there is no token. If fewer
    examples were found than requested, the last ones have text -1 and value NaN.
    """

    values: Float[Tensor, "*features rank"]
    texts: Int[Tensor, "*features rank"]
    positions: Int[Tensor, "*features rank"]
    tokens: Int[Tensor, "*features rank place"]
    activations: Float[Tensor, "*features rank place"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __getitem__(self, feature: int | tuple[int, ...]) -> "Examples":
        """The examples of one feature (or head); IndexError if it is out of range."""
        return Examples(**{name: value[feature] for name, value in self.tensors().items()})

    def to_dataframe(self, words: Callable[[int], str] | Mapping[int, str] = str) -> "pd.DataFrame":
        """A row for each example: `feature` (`feature 0`, ... for several axes), `rank`, `value`, `text`, `position`, `token`,
        and `snippet`, the context with the token in brackets.

        `words` converts an id to text, e.g. `model.to_string`; by default ids are shown as numbers.
        """
        spell = words if callable(words) else words.__getitem__
        shape, context = self.values.shape, self.tokens.shape[-1] // 2
        axes = ["feature"] if len(shape) == 2 else [f"feature {i}" for i in range(len(shape) - 1)]
        rows = []
        for place in (self.texts >= 0).nonzero().tolist():
            at = tuple(place)
            spelled = [spell(token) if token >= 0 else "" for token in self.tokens[at].tolist()]
            gap = " " if words is str else ""
            before, after = gap.join(filter(None, spelled[:context])), gap.join(filter(None, spelled[context + 1 :]))
            numbers = (self.values[at].item(), self.texts[at].item(), self.positions[at].item())
            rows.append((*place, *numbers, spelled[context], f"{before}[{spelled[context]}]{after}"))
        return pd.DataFrame(rows, columns=[*axes, "rank", "value", "text", "position", "token", "snippet"])

    def save(self, path: str | Path) -> None:
        """Writes everything to one safetensors file; `load` restores it bit for bit."""
        stored.write(path, "hooked_lm.Examples", self.tensors(), {})

    @classmethod
    @stored.names_the_file
    def load(cls, path: str | Path) -> "Examples":
        """Reads a file that `save` wrote; ValueError for any other file."""
        return cls(**stored.read(path, "hooked_lm.Examples")[0])

    def __repr__(self) -> str:
        *features, k = self.values.shape
        return f"Examples({' x '.join(map(str, features)) or 'one feature'}, the {k} strongest)"


@dataclass(eq=False, repr=False)
class TopExamples(Streaming[TopPositions]):
    """The `k` positions of a data set where each feature of its sites is largest, in one pass and constant memory.

    Features are computed at each position:

    - neurons, the entries of the last axis: `TopExamples("post", 2)`; at ("z", 2) entries of each head;
    - heads, by the norm of their vectors: `TopExamples("z", 2, measure="norm")`;
    - directions, by the dot product: `TopExamples("resid_post", 2, directions=directions)`; at ("z", 2) for each head;
    - features of a dictionary: `TopExamples("mlp_out", 2, measure=sae.encode)`, or any other function.

    Ties keep the order of the data.

    The token ids are recorded by `inputs`, which is added to every forward pass with this object. Pass the padding mask to
    `batch(tokens, mask)` before the forward pass; for a wrapped module this also passes the ids. Texts are the rows of all
    batches, counted from 0; positions are columns of the row, including padding. In generation each token counts once, without
    the context after it.

    Args:
        measure: "entries", "norm", or a function of the values at a site [batch, pos, ...] that returns [batch, pos, *features].
        k, context: the number of examples for each feature, and the number of context tokens on each side.
        directions: [direction, width of the last axis].
        largest: False for the smallest.
        skip: how many real tokens at the start of each text are excluded, such as a BOS with large activations.
        activations: whether to keep the feature's activations in the context; in generation, those of the same step.
        one_per_text: keep the best position of each text alone; in generation, of each step.
        tokens: the site of the ids; "hook_decoder_tokens" for the decoder of an encoder-decoder.

    A queue of up to `k` candidates is merged into the results when it is full and before results are read; `n_bytes` includes
    it. A batch temporarily needs at most 16 MiB and twice `n_bytes`, in addition to the output of `measure`.

    Raises ValueError for sites that are not [batch, pos, ...], ids that are unknown or of another shape, directions of another
    width, values that are NaN.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> top = TopExamples("post", 1, k=2, context=3)
    >>> for text in [
    ...     "The capital of France is Paris",
    ...     "When Mary and John went to the store",
    ... ]:
    ...     _ = model.run_with_hooks(text, fwd_hooks=[top])
    >>> top.examples()[5].to_dataframe(model.to_string)[["rank", "text", "position"]].shape
    (2, 3)
    """

    k: int = field(default=20, kw_only=True)
    context: int = field(default=10, kw_only=True)
    measure: str | Callable[[Tensor], Tensor] = field(default="entries", kw_only=True)
    directions: Tensor | None = field(default=None, kw_only=True)
    largest: bool = field(default=True, kw_only=True)
    skip: int = field(default=0, kw_only=True)
    activations: bool = field(default=False, kw_only=True)
    one_per_text: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._only: Tensor | None = None
        for name, least in (("k", 1), ("context", 0), ("skip", 0)):
            if (number := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        if not callable(self.measure) and self.measure not in ("entries", "norm"):
            raise ValueError(f"measure must be 'entries', 'norm' or a function, got {self.measure!r}")
        if self.directions is not None and (self.directions.ndim != 2 or self.measure != "entries"):
            got = f"{list(self.directions.shape)} and measure={self.measure!r}"
            raise ValueError(f"directions are [direction, width], with measure='entries'; got {got}")

    def only(self, counts: Bool[Tensor, "batch pos"] | None) -> None:
        """Which tokens of the next batches may be examples, beside padding; None: all of them."""
        self._only = counts

    def found_shown(self) -> Table:
        """A row for each site that had values, with its features and the memory of its state."""
        states = self._states.items()
        rows = [
            (site, [*state.features], bytes_in_words(sum(t.nbytes for t in state.tensors))) for site, state in states
        ]
        return Table(("site", "features", "memory"), rows)

    def see(self, value: object, hook: HookPoint) -> None:
        name = hook.name or ""
        if not isinstance(value, Tensor) or value.ndim < 3 or hook.dims[:2] not in ((), ("batch", "pos")):
            got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"'{name}' {hook.dims} is {got}, and has no vector at each position of the text")
        texts = self.inputs.texts_of(value, name)
        with torch.no_grad():
            found = self._measured(value.detach()[:, -texts.n_new :], name)
        features = tuple(found.shape[2:])
        settings = self.k, self.context, self.largest, self.activations
        best = self._state(name, features, lambda: TopPositions(features, *settings, found))
        values = found.reshape(*found.shape[:2], prod(features))
        best_of_text = None if not self.one_per_text else "max" if self.largest else "min"
        if not best.add(NewTokens(values, texts, self.context, self.skip, best_of_text, self._only)):
            raise ValueError(f"'{name}' is NaN at some position of the texts from {texts.first} on")

    def _measured(self, value: Tensor, name: str) -> Tensor:
        """The activations of the features, [batch, pos, *features]."""
        if callable(self.measure):
            found = self.measure(value)
            if not isinstance(found, Tensor) or found.shape[:2] != value.shape[:2]:
                got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise ValueError(
                    f"measure must give [batch, pos, *features] for '{name}' {list(value.shape)}, got {got}"
                )
            return found
        if self.measure == "norm":
            return upcast(value).norm(dim=-1, keepdim=value.ndim == 3)
        if self.directions is None:
            return value
        if self.directions.shape[1] != value.shape[-1]:
            raise ValueError(
                f"the directions are {list(self.directions.shape)}, and the vectors at '{name}' have {value.shape[-1]} entries"
            )
        return upcast(value) @ self.directions.to(upcast(value)).T

    def examples(self, site: str | tuple[str, int] | None = None) -> Examples:
        """The examples of a site (None: the only one); KeyError if it had no values."""
        with self._lock:
            return Examples(**self._states[pick_site(site, self._states)].found())

    def write(self) -> None:
        """Writes the current examples of each site to the store; ValueError without one."""
        run = self.run
        for site in self.sites:
            run.add(site, self.examples(site).tensors(), detector=type(self).__name__)
