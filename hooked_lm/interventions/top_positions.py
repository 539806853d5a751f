"""The positions in a data set where each feature of a site is largest: sorted lists with queues of candidates."""

from functools import cached_property
from math import gcd, isnan, prod

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from hooked_lm.interventions.input_tokens import Texts

__all__ = ["NewTokens", "TopPositions"]

AT_ONCE = 1 << 19  # entries in one chunk
GROUP = 16  # places, at most, whose maximum is compared first


class NewTokens:
    """The values at the new tokens of a batch, which of them count, and the ids of their context (-1: no token).

    Places are rows of `flat` [place, feature]. Padding, the first `skip` real tokens of a text, and tokens that are not in `only`
    do not count. With `best`, "max" or "min", `flat` has one place of each text for each feature, and no search finds the others.
    """

    def __init__(
        self,
        values: Shaped[Tensor, "batch new feature"],
        texts: Texts,
        context: int,
        skip: int,
        best: str | None = None,
        only: Bool[Tensor, "batch pos"] | None = None,
    ) -> None:
        self.values, self.texts, self.context, self.n_new = values, texts, context, values.shape[1]
        self.flat, self.n_before = values.flatten(0, 1), texts.ids.shape[1] - self.n_new
        real = texts.mask & (texts.mask.cumsum(1) > skip) if skip else texts.mask
        real = real if only is None else real & only
        real = real[:, -self.n_new :].flatten()
        self.n_counted, self.counts = int(real.count_nonzero()), real.to(values.device)
        if best is not None:
            self.flat = self._best_of_texts(best).flatten(0, 1)

    @cached_property
    def tokens(self) -> Int[Tensor, "batch new around"]:
        ids = self.texts.ids.masked_fill(~self.texts.mask, -1).to(self.values.device)
        around = F.pad(ids, (self.context, self.context), value=-1).unfold(1, 2 * self.context + 1, 1)
        return around[:, self.n_before :]

    def _best_of_texts(self, best: str) -> Shaped[Tensor, "batch new feature"]:
        worst = -torch.inf if best == "max" else torch.inf
        counted = self.values.masked_fill(~self.counts.view(-1, self.n_new, 1), worst)
        place = counted.argmax(1, keepdim=True) if best == "max" else counted.argmin(1, keepdim=True)
        return torch.full_like(counted, worst).scatter(1, place, counted.gather(1, place))

    def has_nan(self, n_at_once: int) -> bool:
        """Whether a value that counts is NaN."""
        if not isnan(self.flat.sum()):  # the sum is also NaN for NaN in padding and for opposite infinities
            return False
        parts = zip(self.flat.split(n_at_once), self.counts.split(n_at_once), strict=True)
        return any(bool((part.isnan().any(1) & counts).any()) for part, counts in parts)

    def at(
        self, places: Int[Tensor, " some"], feature: Int[Tensor, " some"], has_activations: bool
    ) -> dict[str, Tensor]:
        """Texts, positions and context tokens of places, and a feature's activations in the context."""
        row, new = places // self.n_new, places % self.n_new
        tokens = self.tokens[row, new]
        found = {"texts": row + self.texts.first, "positions": new + self.n_before, "tokens": tokens}
        if has_activations:
            around = new[:, None] + torch.arange(-self.context, self.context + 1, device=new.device)
            near = around.clamp(0, self.n_new - 1)
            values = self.values[row[:, None], near, feature[:, None]]
            found["activations"] = values.where((around == near) & (tokens >= 0), torch.nan)
        return found


class TopPositions:
    """The k best places so far of each of [*features], with their texts, positions and tokens.

    `values` [feature, column] are sorted in the first k columns. The other k are a queue of values above the smallest sorted
    one, in the order of the data; `n_queued` [feature] is their number, and the rest is -inf. Queues are merged when one is
    full, and before results are read. The data of a value are in `kept` [feature * slot, ...], which is never reordered;
    `slots` [feature, column] is the slot of the value.
    """

    def __init__(
        self, features: tuple[int, ...], k: int, context: int, largest: bool, has_activations: bool, like: Tensor
    ) -> None:
        self.features, self.k, self.largest = features, k, largest
        size, dtype, width = prod(features), torch.promote_types(like.dtype, torch.float32), 2 * context + 1
        with torch.inference_mode(False):  # so that the tensors can be used in any mode later
            self.values = torch.full((size, 2 * k), -torch.inf, dtype=dtype, device=like.device)
            self.n_queued = torch.zeros(size, dtype=torch.int32, device=like.device)
            self.slots = torch.arange(2 * k, dtype=torch.int32, device=like.device).repeat(size, 1)
            self.kept = {name: self.slots.new_full((size * 2 * k,), -1) for name in ("texts", "positions")}
            self.kept["tokens"] = self.slots.new_full((size * 2 * k, width), -1)
            if has_activations:
                self.kept["activations"] = self.values.new_full((size * 2 * k, width), torch.nan)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.values, self.n_queued, self.slots, *self.kept.values()]

    @property
    def bar(self) -> Float[Tensor, " feature"]:
        """The smallest of the sorted values: only larger ones are candidates."""
        return self.values[:, self.k - 1]

    def add(self, batch: NewTokens) -> bool:
        """Adds the new tokens of a batch; returns False, without any change, if a value is NaN."""
        if not batch.n_counted or not len(self.values):
            return True
        n_at_once = max(1, AT_ONCE // (GROUP * len(self.values))) * GROUP
        if batch.has_nan(n_at_once):
            return False
        for i, part in enumerate(batch.flat.split(n_at_once)):
            self._search(batch, part if self.largest else -part, i * n_at_once)
        return True

    def _search(self, batch: NewTokens, values: Shaped[Tensor, "place feature"], start: int) -> None:
        """Queues the values above the bar at the places from `start` on.

        The maximum of each group of places is compared first: after some batches, few groups are above.
        """
        size, bar = gcd(len(values), GROUP), self.bar
        feature, group = (values.unflatten(0, (-1, size)).amax(1) > bar).T.nonzero().unbind(1)
        if 2 * size * len(group) > values.numel():
            return self._search_all(batch, values, start)
        place = size * group[:, None] + torch.arange(size, device=group.device)
        is_above = values[place, feature[:, None]] > bar[feature, None]
        if batch.n_counted < len(batch.counts):
            is_above &= batch.counts[start + place]
        at = is_above.flatten().nonzero().flatten()
        feature, place = feature[at // size], place.flatten()[at]
        self._queue(batch, values[place, feature], feature, start + place)

    def _search_all(self, batch: NewTokens, values: Shaped[Tensor, "place feature"], start: int) -> None:
        """`_search` for when most places are above the bar, as at the start: only the k largest are needed."""
        counts, many = batch.counts[start : start + len(values)], 2 * self.k * len(self.values)
        is_above = (values > self.bar) & counts[:, None]
        if int(is_above.count_nonzero()) > many:
            is_above &= values >= _kth_at_least(values[counts], self.k)
            if int(is_above.count_nonzero()) > many:  # many ties: those of the first half exclude the others
                half = len(values) // 2
                self._search(batch, values[:half], start)
                return self._search(batch, values[half:], start + half)
        feature, place = is_above.T.nonzero().unbind(1)
        self._queue(batch, values[place, feature], feature, start + place)

    def _queue(
        self,
        batch: NewTokens,
        value: Shaped[Tensor, " new"],
        feature: Int[Tensor, " new"],
        place: Int[Tensor, " new"],
    ) -> None:
        """Writes candidates to the queues, and merges these when one is full.

        Candidates are ordered by feature, then by the order of the data.
        """
        value = value.to(self.values.dtype)
        while len(value):
            n_new = feature.bincount(minlength=len(self.values))
            nth = torch.arange(len(value), device=value.device) - (n_new.cumsum(0) - n_new)[feature]
            column = self.k + self.n_queued[feature] + nth
            self.n_queued.add_(n_new).clamp_(max=self.k)
            fits = column < 2 * self.k
            if bool(fits.all()):
                return self._write(batch, value, feature, place, column)
            self._write(batch, *(each[fits] for each in (value, feature, place, column)))
            self._rank()
            rest = ~fits & (value > self.bar[feature])
            value, feature, place = value[rest], feature[rest], place[rest]

    def _write(
        self,
        batch: NewTokens,
        value: Float[Tensor, " new"],
        feature: Int[Tensor, " new"],
        place: Int[Tensor, " new"],
        column: Int[Tensor, " new"],
    ) -> None:
        self.values[feature, column] = value
        slots = 2 * self.k * feature + self.slots[feature, column]
        for name, found in batch.at(place, feature, "activations" in self.kept).items():
            self.kept[name].index_copy_(0, slots, found.to(self.kept[name].dtype))

    def _rank(self) -> None:
        """Merges the queued values into the sorted ones. Ties keep the order of the data."""
        which = self.n_queued.nonzero().flatten()
        values, order = self.values[which].sort(dim=1, descending=True, stable=True)
        values[:, self.k :] = -torch.inf
        self.values[which], self.slots[which] = values, self.slots[which].gather(1, order)
        self.n_queued.zero_()

    def found(self) -> dict[str, Tensor]:
        """The results, best first: values, texts, positions, tokens and activations [*features, rank, ...]."""
        self._rank()
        first = 2 * self.k * torch.arange(len(self.values), device=self.slots.device)
        at = (first[:, None] + self.slots[:, : self.k]).view(*self.features, self.k)
        kept = {name: kept[at].cpu() for name, kept in self.kept.items()}
        integers = {name: number.long() for name, number in kept.items() if not number.is_floating_point()}
        values = (self.values if self.largest else -self.values)[:, : self.k].reshape(at.shape).cpu()
        return {**kept, **integers, "values": values.masked_fill(kept["texts"] < 0, torch.nan)}


def _kth_at_least(values: Shaped[Tensor, "place feature"], k: int) -> Shaped[Tensor, " feature"]:
    """A lower bound of each feature's k-th largest value: the k-th largest group maximum, or the smallest maximum."""
    size = max(1, len(values) // (3 * k))
    maxima = values[: len(values) // size * size].unflatten(0, (-1, size)).amax(1)
    return maxima.topk(min(k, len(maxima)), 0, sorted=False).values.amin(0)
