"""The texts that activate each neuron, head or direction of a site most, over a data set that passes batch by batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from hooked_lm.components.norm import wide
from hooked_lm.hooks import HookPoint
from hooked_lm.interventions.input_tokens import Texts
from hooked_lm.interventions.streaming import Streaming
from hooked_lm.results import stored

__all__ = ["Examples", "TopExamples"]

AT_ONCE = 1 << 19  # entries that are looked at at a time
RIVALS = 64  # of a feature that are ranked at a time


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


class _Best:
    """The best places so far of all features of a site, and what is written there.

    `values` [feature, rank] are sorted. What belongs to them stands in `kept`, [feature * slot, ...]: there nothing moves, and
    what is new takes the slot of what goes. `slots` [feature, rank] says which it is.
    """

    def __init__(
        self, features: tuple[int, ...], k: int, context: int, largest: bool, has_activations: bool, like: Tensor
    ) -> None:
        self.features, self.context, self.largest, size = features, context, largest, prod(features)
        dtype, width = torch.promote_types(like.dtype, torch.float32), 2 * context + 1
        self.values = torch.full((size, k), -torch.inf, dtype=dtype, device=like.device)
        self.slots = torch.arange(k, dtype=torch.int32, device=like.device).repeat(size, 1)
        self.kept = {name: self.slots.new_full((size * k,), -1) for name in ("texts", "positions")}
        self.kept["tokens"] = self.slots.new_full((size * k, width), -1)
        if has_activations:
            self.kept["activations"] = self.values.new_full((size * k, width), torch.nan)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.values, self.slots, *self.kept.values()]

    def add(self, values: Shaped[Tensor, "batch new feature"], texts: Texts, skip: int) -> bool:
        """Look at the new tokens of a batch; False if a value is NaN, and then nothing is changed."""
        batch = _Batch(values, texts, self.context)
        counted = (batch.real & (batch.real.cumsum(1) > skip))[:, -values.shape[1] :]
        flat, places = values.flatten(0, 1), counted.flatten().nonzero().flatten()
        parts = places.split(_at_once(flat.shape[1]))
        has_nan = len(flat) and bool(flat.sum().isnan())  # at a place that counts, in padding, or of infinities
        if has_nan and any(bool(flat.index_select(0, part).isnan().any()) for part in parts):
            return False
        for part in parts if len(places) else ():
            start, stop = int(part[0]), int(part[-1]) + 1
            some = flat[start:stop] if stop - start == len(part) else flat.index_select(0, part)
            self._compare(some if self.largest else -some, part, batch)
        return True

    def _compare(self, values: Shaped[Tensor, "place feature"], places: Int[Tensor, " place"], batch: "_Batch") -> None:
        """Take in what is more than the least that is kept; where that is much, half of the places after the other."""
        least = self.values[:, -1]
        which = (values.amax(0) > least).nonzero().flatten()  # few, once some batches were seen
        if not len(which):
            return
        has_all, k = 4 * len(which) > 3 * len(least), self.values.shape[1]
        which = torch.arange(len(least), device=which.device) if has_all else which
        some, bar = (values, least) if has_all else (values.index_select(1, which), least[which])
        is_more = some > bar
        if len(places) > RIVALS and int(is_more.count_nonzero()) > RIVALS * len(which) // 2:
            # Candidates first: what is below the k largest of these places cannot stay.
            is_more &= some >= some.topk(min(k, len(places)), 0, sorted=False).values.amin(0)
        found = is_more.flatten().nonzero().flatten()
        place, feature = found // len(which), found % len(which)
        n_new = feature.bincount(minlength=len(which))
        if len(places) > RIVALS and int(n_new.max()) > RIVALS:
            return self._compare_halves(values, places, batch)
        feature, order = feature.sort(stable=True)  # the new ones of each feature in the order of the data
        place = place[order]
        first = n_new.cumsum(0) - n_new
        rivals = self.values.new_full((len(which), int(n_new.max())), -torch.inf)
        nth = torch.arange(len(found), device=found.device) - first[feature]
        rivals[feature, nth] = some[place, feature].to(rivals.dtype)
        self._replace(which, rivals, first, places[place], batch)

    def _compare_halves(
        self, values: Shaped[Tensor, "place feature"], places: Int[Tensor, " place"], batch: "_Batch"
    ) -> None:
        for half in zip(values.tensor_split(2), places.tensor_split(2), strict=True):
            self._compare(*half, batch)

    def _replace(
        self,
        which: Int[Tensor, " some"],
        rivals: Float[Tensor, "some rival"],
        first: Int[Tensor, " some"],
        places: Int[Tensor, " found"],
        batch: "_Batch",
    ) -> None:
        """Rank old and new numbers; those of each feature are at the places from its `first` on."""
        k, old = self.values.shape[1], self.slots[which]
        # Of equal numbers the old ones are before the new, and these in the order of the data.
        best, order = torch.cat([self.values[which], rivals], 1).sort(dim=1, descending=True, stable=True)
        order, is_new = order[:, :k], order[:, :k] >= k
        slots = old.gather(1, torch.where(is_new, k - is_new.cumsum(1), order))
        self.values[which], self.slots[which] = best[:, :k], slots
        new = is_new.flatten().nonzero().flatten()
        to, chosen = (
            (each + start[:, None]).flatten()[new] for each, start in ((slots, which * k), (order, first - k))
        )
        for at, some in zip(
            *(each.split(_at_once(2 * self.context + 1)) for each in (to, places[chosen])), strict=True
        ):
            for name, found in batch.at(some, at // k, "activations" in self.kept).items():
                self.kept[name].index_copy_(0, at, found.to(self.kept[name].dtype))

    def examples(self) -> Examples:
        """What is kept, the best first."""
        size, k = self.values.shape
        at = (self.slots + k * torch.arange(size, device=self.slots.device)[:, None]).view(*self.features, k)
        texts, positions, tokens, *activations = (kept[at].cpu() for kept in self.kept.values())
        values = (self.values if self.largest else -self.values).view(at.shape).cpu().masked_fill(texts < 0, torch.nan)
        return Examples(values, texts.long(), positions.long(), tokens.long(), *activations)


def _at_once(width: int) -> int:
    return max(1, AT_ONCE // max(1, width))


class _Batch:
    """The values of new tokens, and around each of them the ids of the text, -1 where it has none."""

    def __init__(self, values: Shaped[Tensor, "batch new feature"], texts: Texts, context: int) -> None:
        self.values, self.first, self.start = values, texts.first, texts.ids.shape[1] - values.shape[1]
        self.real, width = texts.mask.to(values.device), 2 * context + 1
        ids = texts.ids.to(values.device, torch.int32).masked_fill(~self.real, -1)
        self.tokens = F.pad(ids, (context, context), value=-1).unfold(1, width, 1)[:, self.start :]
        self.around = torch.arange(-context, context + 1, device=values.device)

    def at(
        self, places: Int[Tensor, " some"], feature: Int[Tensor, " some"], has_activations: bool
    ) -> dict[str, Tensor]:
        """What is written at and around places, which are numbered through the new tokens, and how strong a feature is there."""
        n_new = self.values.shape[1]
        row, new = places // n_new, places % n_new
        tokens = self.tokens[row, new]
        found = {"texts": row + self.first, "positions": new + self.start, "tokens": tokens}
        if has_activations:
            around = new[:, None] + self.around
            near = around.clamp(0, n_new - 1)
            values = self.values[row[:, None], near, feature[:, None]]
            found["activations"] = values.where((around == near) & (tokens >= 0), torch.nan)
        return found


@dataclass(eq=False, repr=False)
class TopExamples(Streaming[_Best]):
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

    While a batch is looked at, at most 16 MiB and four times what is held come for a moment, beside what `measure` makes.

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
        best = self._state(name, features, lambda: _Best(features, *settings, found))
        if not best.add(found.reshape(*found.shape[:2], -1), texts, self.skip):
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
            return wide(value).norm(dim=-1, keepdim=value.ndim == 3)
        if self.directions is None:
            return value
        if self.directions.shape[1] != value.shape[-1]:
            raise ValueError(
                f"the directions are {list(self.directions.shape)}, and the vectors at '{name}' have {value.shape[-1]} entries"
            )
        return wide(value) @ self.directions.to(wide(value)).T

    def examples(self, site: str | None = None) -> Examples:
        """What was found at a site, at the only one if None. Raises KeyError if nothing was seen of it."""
        if site is None and len(self._states) == 1:
            site = self.sites[0]
        if site is None or site not in self._states:
            raise KeyError(f"say which site: there are {', '.join(self.sites) or 'none yet'}, got {site!r}")
        return self._states[site].examples()

    def write(self) -> None:
        """Write what was found by now at each site into the store. Raises ValueError without one."""
        run = self.run
        for site in self.sites:
            run.add(site, self.examples(site).tensors(), detector=type(self).__name__)
