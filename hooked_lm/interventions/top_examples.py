"""The texts that activate each neuron, head or direction of a site most, over a data set that passes batch by batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.norm import upcast
from hooked_lm.hooks import HookPoint
from hooked_lm.interventions.streaming import Streaming
from hooked_lm.interventions.top_positions import NewTokens, TopPositions
from hooked_lm.results import stored

__all__ = ["Examples", "TopExamples"]


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """For each feature of [*features] its strongest places, the strongest first.

    `values` [*features, rank] are how strong, `texts` and `positions` [*features, rank] say where: the row of the data set and
    the token in it. `tokens` [*features, rank, place] are the ids around: the example itself is in the middle, -1 where the text
    has no token. `activations`, if they were asked for, are how strong it is around; NaN where the text has no token. Where
    fewer places than asked were seen, the last have text -1 and NaN.
    """

    values: Float[Tensor, "*features rank"]
    texts: Int[Tensor, "*features rank"]
    positions: Int[Tensor, "*features rank"]
    tokens: Int[Tensor, "*features rank place"]
    activations: Float[Tensor, "*features rank place"] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Everything that there is, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def __getitem__(self, feature: int | tuple[int, ...]) -> "Examples":
        """Those of one feature (or head). Raises IndexError if it is out of range."""
        return Examples(**{name: value[feature] for name, value in self.tensors().items()})

    def to_dataframe(self, words: Callable[[int], str] | Mapping[int, str] = str) -> pd.DataFrame:
        """A row for each place: `feature` (`feature 0`, ... of several axes), `rank`, `value`, `text`, `position`, `token`, and
        the `snippet` with it in brackets.

        `words` says how an id is written, e.g. `model.to_string`; else ids are numbers.
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
        """Write everything to one safetensors file; `load` gives it back bit for bit."""
        stored.write(path, "hooked_lm.Examples", self.tensors(), {})

    @classmethod
    def load(cls, path: str | Path) -> "Examples":
        """Read what `save` wrote. Raises ValueError for any other file."""
        return cls(**stored.read(path, "hooked_lm.Examples")[0])

    def __repr__(self) -> str:
        *features, k = self.values.shape
        return f"Examples({' x '.join(map(str, features)) or 'one feature'}, the {k} strongest)"


@dataclass(eq=False, repr=False)
class TopExamples(Streaming[TopPositions]):
    """For each feature of its sites the `k` places of a data set where it is largest, in one pass, in memory of fixed size.

    Features are what is measured at each position:

    - neurons, the entries of the last axis: `TopExamples("post", 2)`; at ("z", 2) entries of each head;
    - heads, with `measure="norm"` by the length of their vectors: `TopExamples("z", 2, measure="norm")`;
    - directions, by the product with each: `TopExamples("resid_post", 2, directions=directions)`; at ("z", 2) for each head;
    - features of a dictionary: `TopExamples("mlp_out", 2, measure=sae.encode)`, or any other function.

    Of equal numbers those seen first stay, and come first.

    The ids are recorded by `inputs`, which every run of this object includes; say padding by `batch(tokens, mask)` before the
    run, and for a wrapped module the ids too. Rows of batches are the texts, counted from 0, and positions are columns of the
    row, padding included. In generation each token counts once, and the context after it is not known yet.

    Args:
        measure: "entries", "norm", or a function of the values at a site [batch, pos, ...] that gives [batch, pos, *features].
        k, context: how many places for each feature, and how many tokens of each side are kept.
        directions: [direction, width of the last axis].
        largest: False for the smallest.
        skip: how many real tokens at the start of each text are left out, such as a BOS on which everything is strong.
        activations: whether the numbers of the feature around each place are kept, too; in generation those of the same step.
        tokens: the site of the ids; "hook_decoder_tokens" for the decoder of an encoder-decoder.

    As many candidates as are kept wait in a queue, which is ranked when it is full and before anything is read; `n_bytes` counts
    it. While a batch is looked at, at most 16 MiB and twice what is held come for a moment, beside what `measure` makes.

    Raises ValueError for sites that are not [batch, pos, ...], ids that are not known or of another shape, directions of
    another width, values that are NaN.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> top = TopExamples("post", 1, k=2, context=3)
    >>> for text in ["The capital of France is Paris", "When Mary and John went to the store"]:
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

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("k", 1), ("context", 0), ("skip", 0)):
            if (number := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        if not callable(self.measure) and self.measure not in ("entries", "norm"):
            raise ValueError(f"measure must be 'entries', 'norm' or a function, got {self.measure!r}")
        if self.directions is not None and (self.directions.ndim != 2 or self.measure != "entries"):
            got = f"{list(self.directions.shape)} and measure={self.measure!r}"
            raise ValueError(f"directions are [direction, width], with measure='entries'; got {got}")

    def see(self, value: Any, hook: HookPoint) -> None:
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
        if not best.add(NewTokens(values, texts, self.context, self.skip)):
            raise ValueError(f"'{name}' is NaN at some position of the texts from {texts.first} on")

    def _measured(self, value: Tensor, name: str) -> Tensor:
        """How strong each feature is, [batch, pos, *features]."""
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

    def examples(self, site: str | None = None) -> Examples:
        """What was found at a site, at the only one if None. Raises KeyError if nothing was seen of it."""
        if site is None and len(self._states) == 1:
            site = self.sites[0]
        if site is None or site not in self._states:
            raise KeyError(f"say which site: there are {', '.join(self.sites) or 'none yet'}, got {site!r}")
        with self._lock:
            return Examples(**self._states[site].found())

    def write(self) -> None:
        """Write what was found by now at each site into the store. Raises ValueError without one."""
        run = self.run
        for site in self.sites:
            run.add(site, self.examples(site).tensors(), detector=type(self).__name__)
