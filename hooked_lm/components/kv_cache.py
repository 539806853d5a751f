"""Caches for generation: the keys and values of attention layers and the states of state-space layers, so that each token
is processed once."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.notebook_repr import NotebookRepr, Table


@runtime_checkable
class HeadSizes(Protocol):
    """What the config of a model says of keys and values."""

    n_heads: int
    n_key_value_heads: int | None
    d_head: int
    dtype: torch.dtype


class KeyValueCacheEntry:
    """One layer's keys (after rotary) and values, in buffers for at least `room` positions that grow by doubling.

    `past_keys` and `past_values` are views [batch, pos, kv_head, d_head] of the filled positions; given ones are not copied.
    Raises ValueError if only one of them is given, or for other numbers of rows and positions.
    """

    def __init__(
        self,
        room: int = 64,
        *,
        past_keys: Float[Tensor, "batch pos kv_head d_head"] | None = None,
        past_values: Float[Tensor, "batch past kv_head d_value"] | None = None,
        frozen: bool = False,
    ) -> None:
        if (past_keys is None) != (past_values is None):
            raise ValueError("past_keys and past_values go together")
        if past_keys is not None and past_values is not None and past_keys.shape[:3] != past_values.shape[:3]:
            raise ValueError(
                f"past_keys are {tuple(past_keys.shape)} and past_values {tuple(past_values.shape)}: rows, positions and heads "
                "must be equal"
            )
        self.room = room
        self.length = 0 if past_keys is None else past_keys.shape[1]
        self.frozen = frozen
        self._keys, self._values = past_keys, past_values

    @classmethod
    def init_cache_entry(
        cls, cfg: HeadSizes, device: torch.device | str | None = None, batch_size: int = 1
    ) -> "KeyValueCacheEntry":
        """An empty entry for a layer of a model's config, with keys and values [batch, 0, kv_head, d_head]."""
        entry, n_heads = cls(), cfg.n_key_value_heads or cfg.n_heads
        entry._keys = torch.empty(batch_size, 0, n_heads, cfg.d_head, device=device, dtype=cfg.dtype)
        entry._values = torch.empty_like(entry._keys)
        return entry

    @property
    def past_keys(self) -> Float[Tensor, "batch pos kv_head d_head"] | None:
        return None if self._keys is None else self._keys[:, : self.length]

    @property
    def past_values(self) -> Float[Tensor, "batch pos kv_head d_head"] | None:
        return None if self._values is None else self._values[:, : self.length]

    def append(
        self,
        keys: Float[Tensor, "batch new kv_head d_head"],
        values: Float[Tensor, "batch new kv_head d_value"],
    ) -> tuple[Float[Tensor, "batch pos kv_head d_head"], Float[Tensor, "batch pos kv_head d_value"]]:
        """Stores new keys and values, unless the entry is frozen; returns all of them, the new ones last.

        If gradients are needed the result is a new tensor, which replaces the buffer.
        """
        if self.length == 0:  # discards what an interrupted run stored
            self._keys = self._values = None
        past_keys, past_values = self.past_keys, self.past_values
        if past_keys is None or past_values is None:
            if self.frozen:
                return keys, values
            past_keys, past_values = keys[:, :0], values[:, :0]
        if past_keys.shape[0] != keys.shape[0]:
            raise ValueError(f"the cache has {past_keys.shape[0]} rows, the new tokens have {keys.shape[0]}")
        needs_grad = any(t.requires_grad for t in (past_keys, past_values, keys, values))
        if self.frozen or (torch.is_grad_enabled() and needs_grad):
            keys, values = torch.cat([past_keys, keys], 1), torch.cat([past_values, values], 1)
            if not self.frozen:
                self._keys, self._values, self.length = keys, values, keys.shape[1]
            return keys, values
        total = self.length + keys.shape[1]
        self._keys = self._with_room(self._keys, past_keys, total)
        self._values = self._with_room(self._values, past_values, total)
        self._keys[:, self.length : total] = keys
        self._values[:, self.length : total] = values
        self.length = total
        return self._keys[:, :total], self._values[:, :total]

    def saved(self) -> Any:
        """The state of this entry, for `restore`."""
        return self.length

    def restore(self, saved: Any) -> None:
        """Returns to a saved state."""
        self.length = saved

    def _with_room(self, buffer: Tensor | None, filled: Tensor, total: int) -> Tensor:
        """A buffer for at least `total` positions, starting with the filled ones."""
        if buffer is not None and buffer.shape[1] >= total:
            return buffer
        n_pos = self.room if total <= self.room else 2 * total
        bigger = filled.new_empty(filled.shape[0], n_pos, *filled.shape[2:])
        bigger[:, : filled.shape[1]] = filled
        return bigger


class ContinuedEntry:
    """Keys and values that several rows share, as views expanded to `batch` rows, and those of the tokens after them."""

    def __init__(self, shared: "KeyValueCacheEntry | ContinuedEntry", batch: int, room: int) -> None:
        keys, values = _rows(shared.past_keys, batch), _rows(shared.past_values, batch)
        self.shared = KeyValueCacheEntry(past_keys=keys, past_values=values, frozen=True)
        self.new, self.frozen = KeyValueCacheEntry(room), False
        self.saved, self.restore = self.new.saved, self.new.restore

    @property
    def length(self) -> int:
        return self.shared.length + self.new.length

    @property
    def past_keys(self) -> Float[Tensor, "batch pos kv_head d_head"] | None:
        past = [x for x in (self.shared.past_keys, self.new.past_keys) if x is not None]
        return torch.cat(past, 1) if past else None

    @property
    def past_values(self) -> Float[Tensor, "batch pos kv_head d_value"] | None:
        past = [x for x in (self.shared.past_values, self.new.past_values) if x is not None]
        return torch.cat(past, 1) if past else None

    def append(
        self,
        keys: Float[Tensor, "batch new kv_head d_head"],
        values: Float[Tensor, "batch new kv_head d_value"],
    ) -> tuple[Float[Tensor, "batch pos kv_head d_head"], Float[Tensor, "batch pos kv_head d_value"]]:
        """Stores new keys and values, unless the entry is frozen; returns all of them, the new ones last."""
        self.new.frozen = self.frozen
        return self.shared.append(*self.new.append(keys, values))


def _rows(value: Tensor | None, batch: int) -> Tensor | None:
    """A view of a tensor with so many rows: all that it has, or its only one again and again."""
    return None if value is None else value.expand(batch, *value.shape[1:])


class StateCacheEntry:
    """One state-space layer's last convolution inputs [batch, tap, channel] and its state.

    Their size does not depend on the number of tokens; each run replaces them.
    """

    def __init__(self) -> None:
        self.length = 0
        self.frozen = False
        self.window: Tensor | None = None
        self.state: Tensor | None = None

    def past(self, batch: int) -> tuple[Tensor | None, Tensor | None]:
        """Window and state after all past tokens; None before the first."""
        if self.length == 0:
            return None, None
        if self.state is not None and self.state.shape[0] != batch:
            raise ValueError(f"the cache has {self.state.shape[0]} rows, the new tokens have {batch}")
        return self.window, self.state

    def keep(self, window: Tensor, state: Tensor, n_new: int) -> None:
        """Stores window and state after `n_new` more tokens, unless the entry is frozen."""
        if not self.frozen:
            # cloned, since they may be views of much larger tensors
            self.window, self.state, self.length = window.clone(), state.clone(), self.length + n_new

    def saved(self) -> Any:
        """The state of this entry, for `restore`."""
        return self.length, self.window, self.state

    def restore(self, saved: Any) -> None:
        """Returns to a saved state."""
        self.length, self.window, self.state = saved


Entry = KeyValueCacheEntry | ContinuedEntry | StateCacheEntry


class KeyValueCache(NotebookRepr):
    """The keys and values of all layers (`entries`), the states of layers with a mixer (`states`), and the attention mask of all
    past tokens.

    A layer may have both. `room` is the number of positions in the first buffers, which grow. `entries` are those of the
    layers, in place of empty ones; `previous_attention_mask` is then the mask of their positions. All runs may stop before the
    layer `until`.

    >>> cache = KeyValueCache(n_layers=2)
    >>> len(cache), cache.length
    (2, 0)
    """

    def __init__(
        self,
        n_layers: int | None = None,
        room: int = 64,
        *,
        entries: Sequence[KeyValueCacheEntry | ContinuedEntry] | None = None,
        previous_attention_mask: Tensor | None = None,
        frozen: bool = False,
    ) -> None:
        if (n_layers is None) == (entries is None):
            raise ValueError("a cache needs either n_layers or the entries of its layers")
        self.entries: list[KeyValueCacheEntry | ContinuedEntry]
        self.entries = [KeyValueCacheEntry(room) for _ in range(n_layers or 0)] if entries is None else [*entries]
        self.states: dict[int, StateCacheEntry] = {}
        self.until: int | None = None
        self.previous_attention_mask = previous_attention_mask
        # number of tokens -> what the images among them add to the positions of later text, [batch]
        self.position_shifts: dict[int, Tensor] = {}
        if frozen:
            self.freeze()

    @classmethod
    def init_cache(cls, cfg: Any, device: torch.device | str | None = None, batch_size: int = 1) -> "KeyValueCache":
        """An empty cache for a model's config; device and batch size are those of the first tokens."""
        return cls(cfg.n_layers)

    def continued(self, batch: int, room: int = 64) -> "KeyValueCache":
        """A cache that begins with these tokens, in which others may follow, at first `room` of them; this cache does not change.

        Its rows are those of this cache, or its only one again and again, of which nothing is copied.
        """
        cache = KeyValueCache(entries=[], previous_attention_mask=_rows(self.previous_attention_mask, batch))
        for entry in self.entries:
            is_same = entry.past_keys is None or len(entry.past_keys) == batch
            own = (
                KeyValueCacheEntry(room, past_keys=entry.past_keys, past_values=entry.past_values) if is_same else None
            )
            cache.entries.append(own or ContinuedEntry(entry, batch, max(1, room - entry.length)))
        for layer, state in self.states.items():
            cache.state(layer).restore((state.length, _rows(state.window, batch), _rows(state.state, batch)))
        cache.position_shifts = {n: shift.expand(batch) for n, shift in self.position_shifts.items()}
        return cache

    def first(self, n: int) -> "KeyValueCache":
        """A frozen cache of the first tokens, of which nothing is copied; ValueError for states, which are of all tokens."""
        if self.states:
            raise ValueError(
                f"layer {min(self.states)} has a state, which is that after all {self.length} tokens: read the first {n} anew"
            )
        mask, entries = self.previous_attention_mask, []
        for entry in self.entries:
            keys, values = (x if x is None else x[:, :n] for x in (entry.past_keys, entry.past_values))
            entries.append(KeyValueCacheEntry(past_keys=keys, past_values=values))
        return KeyValueCache(
            entries=entries, previous_attention_mask=mask if mask is None else mask[:, :n], frozen=True
        )

    def _all(self) -> list[Entry]:
        return [*self.entries, *self.states.values()]

    @property
    def length(self) -> int:
        """The number of past positions."""
        return max((entry.length for entry in self._all()), default=0)  # a layer may have no entry that is used

    @property
    def frozen(self) -> bool:
        return any(entry.frozen for entry in self._all())

    def freeze(self) -> None:
        """Makes later runs read the cache without appending to it."""
        for entry in self._all():
            entry.frozen = True

    def unfreeze(self) -> None:
        """Makes later runs append to the cache again."""
        for entry in self._all():
            entry.frozen = False

    @contextmanager
    def appending(self, mask: Tensor | None) -> Iterator[None]:
        """Wraps a run that appends to all entries, and stores `mask` after it; if the run raises, the cache is unchanged."""
        states, before = dict(self.states), [(entry, entry.saved()) for entry in self._all()]
        try:
            yield
        except BaseException:
            self.states = states
            for entry, saved in before:
                entry.restore(saved)
            raise
        self.store_mask(mask)

    def append_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """Appends the mask [batch, pos] of new tokens to that of past ones, unless the cache is frozen, and returns both."""
        mask = self._appended(attention_mask.bool(), *attention_mask.shape)
        self.store_mask(mask)
        return mask.to(attention_mask.dtype)

    def full_mask(self, new: Tensor | None, batch: int, n_pos: int) -> Tensor | None:
        """The mask of past and new tokens; None if there is no padding.

        `new` is the mask of the new tokens or of all tokens; None: the new tokens have no padding.
        """
        past = self.previous_attention_mask
        if new is None and past is None:
            return None
        if new is not None and new.shape[1] == self.length + n_pos:
            return new
        return self._appended(new, batch, n_pos)

    def _appended(self, new: Tensor | None, batch: int, n_pos: int) -> Tensor:
        """The stored mask, followed by that of the new tokens; one of them is not None."""
        past = self.previous_attention_mask
        known: Tensor = past if past is not None else new  # type: ignore[assignment]
        past = known.new_ones(batch, self.length) if past is None else past
        if past.shape[0] != batch:
            raise ValueError(f"the cache has {past.shape[0]} rows, the new tokens have {batch}")
        new = known.new_ones(batch, n_pos) if new is None else new
        return torch.cat([past.bool(), new.bool().to(past.device)], 1)

    def store_mask(self, mask: Tensor | None) -> None:
        """Stores the mask of all tokens, unless the cache is frozen."""
        if not self.frozen:
            self.previous_attention_mask = mask

    def state(self, layer: int) -> StateCacheEntry:
        """The state of a layer, created at its first use."""
        if layer not in self.states:
            self.states[layer] = entry = StateCacheEntry()
            entry.frozen = self.frozen
        return self.states[layer]

    def __getitem__(self, layer: int) -> KeyValueCacheEntry | ContinuedEntry:
        """The keys and values of a layer."""
        return self.entries[layer]

    def __len__(self) -> int:
        return len(self.entries)

    def repr_table(self) -> Table:
        """The shape of the keys of each layer, [batch, pos, kv_head, d_head]."""
        keys = [(i, entry.past_keys) for i, entry in enumerate(self.entries)]
        return Table(("layer", "keys"), [(i, "none" if k is None else [*k.shape]) for i, k in keys])

    def __repr__(self) -> str:
        return f"KeyValueCache({len(self)} layers, {self.length} positions{', frozen' if self.frozen else ''})"


HookedTransformerKeyValueCache = KeyValueCache
"""The name of `KeyValueCache` in the HookedTransformer interface: the keys and values of tokens that were read before."""
