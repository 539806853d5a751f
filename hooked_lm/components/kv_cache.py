"""What a model remembers of the tokens it has already read, so that generation reads each token once: keys and values
of attention, and the states of state-space layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


class KeyValueCacheEntry:
    """One layer's keys (after rotary) and values, in buffers for at least `room` positions that grow by doubling.

    `past_keys` and `past_values` are views [batch, pos, kv_head, d_head] of what is filled.
    """

    def __init__(self, room: int = 64) -> None:
        self.room = room
        self.length = 0
        self.frozen = False
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

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
        """All keys and values, the new ones last; they are stored too, unless the entry is frozen.

        Where gradients are wanted nothing is stored in place: the result is a new tensor, and the entry keeps it.
        """
        if self.length == 0:  # whatever an abandoned run left
            self._keys = self._values = None
        past_keys, past_values = self.past_keys, self.past_values
        if past_keys is None or past_values is None:
            if self.frozen:
                return keys, values
            past_keys, past_values = keys[:, :0], values[:, :0]
        if past_keys.shape[0] != keys.shape[0]:
            raise ValueError(f"the cache holds {past_keys.shape[0]} rows, and the new tokens have {keys.shape[0]}")
        wants_grad = any(t.requires_grad for t in (past_keys, past_values, keys, values))
        if self.frozen or (torch.is_grad_enabled() and wants_grad):
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
        """What `restore` needs to undo later runs."""
        return self.length

    def restore(self, saved: Any) -> None:
        """Forget what was appended since."""
        self.length = saved

    def _with_room(self, buffer: Tensor | None, filled: Tensor, total: int) -> Tensor:
        """A buffer for `total` positions that begins with what is filled."""
        if buffer is not None and buffer.shape[1] >= total:
            return buffer
        n_pos = self.room if total <= self.room else 2 * total
        bigger = filled.new_empty(filled.shape[0], n_pos, *filled.shape[2:])
        bigger[:, : filled.shape[1]] = filled
        return bigger


class StateCacheEntry:
    """One state-space layer's memory: the last inputs of its convolution [batch, tap, channel], and its state.

    Both are as large after one token as after a thousand; a run replaces them.
    """

    def __init__(self) -> None:
        self.length = 0
        self.frozen = False
        self.window: Tensor | None = None
        self.state: Tensor | None = None

    def past(self, batch: int) -> tuple[Tensor | None, Tensor | None]:
        """Window and state after the tokens read so far; None before the first."""
        if self.length == 0:
            return None, None
        if self.state is not None and self.state.shape[0] != batch:
            raise ValueError(f"the cache holds {self.state.shape[0]} rows, and the new tokens have {batch}")
        return self.window, self.state

    def keep(self, window: Tensor, state: Tensor, n_new: int) -> None:
        """Window and state after `n_new` more tokens; left as they are if the entry is frozen."""
        if not self.frozen:
            # copies: what is kept may be a small view of what the whole run left
            self.window, self.state, self.length = window.clone(), state.clone(), self.length + n_new

    def saved(self) -> Any:
        """What `restore` needs to undo later runs."""
        return self.length, self.window, self.state

    def restore(self, saved: Any) -> None:
        """Be what the entry was then."""
        self.length, self.window, self.state = saved


Entry = KeyValueCacheEntry | StateCacheEntry


class KeyValueCache:
    """The entries of all layers, and which of the tokens read so far are real (not padding).

    An entry holds keys and values, or for a layer that asks for one a state. `room` is how many positions there is memory
    for from the beginning; it is no limit.

    >>> cache = KeyValueCache(n_layers=2)
    >>> len(cache), cache.length
    (2, 0)
    """

    def __init__(self, n_layers: int, room: int = 64) -> None:
        self.entries: list[Entry] = [KeyValueCacheEntry(room) for _ in range(n_layers)]
        self.previous_attention_mask: Tensor | None = None

    @classmethod
    def init_cache(cls, cfg: Any, device: Any = None, batch_size: int = 1) -> "KeyValueCache":
        """An empty cache for a model's config; device and batch size follow what is appended."""
        return cls(cfg.n_layers)

    @property
    def length(self) -> int:
        """How many positions have been read."""
        return self.entries[0].length if self.entries else 0

    @property
    def frozen(self) -> bool:
        return any(entry.frozen for entry in self.entries)

    def freeze(self) -> None:
        """From now on runs read the cache and leave it as it is."""
        for entry in self.entries:
            entry.frozen = True

    def unfreeze(self) -> None:
        """From now on runs append to the cache again."""
        for entry in self.entries:
            entry.frozen = False

    @contextmanager
    def appending(self, mask: Tensor | None) -> Iterator[None]:
        """A run that appends to all entries, after which `mask` says what is real; if it fails, nothing was appended."""
        before = [(entry, entry.saved()) for entry in self.entries]
        try:
            yield
        except BaseException:
            self.entries = [entry for entry, _ in before]
            for entry, saved in before:
                entry.restore(saved)
            raise
        self.remember_mask(mask)

    def append_attention_mask(self, attention_mask: Tensor) -> Tensor:
        """The mask [batch, pos] of everything read so far and of these new tokens; kept, unless the cache is frozen."""
        mask = self.full_mask(attention_mask.bool(), *attention_mask.shape)
        self.remember_mask(mask)
        return attention_mask if mask is None else mask.to(attention_mask.dtype)

    def full_mask(self, new: Tensor | None, batch: int, n_pos: int) -> Tensor | None:
        """Which of the past and the new tokens are real; None if none of them is padding.

        `new` marks the new tokens, or all tokens so far; None: all new ones are real.
        """
        past = self.previous_attention_mask
        if new is None and past is None:
            return None
        if new is not None and new.shape[1] == self.length + n_pos:
            return new
        known: Tensor = past if past is not None else new  # type: ignore[assignment]
        past = known.new_ones(batch, self.length) if past is None else past
        if past.shape[0] != batch:
            raise ValueError(f"the cache holds {past.shape[0]} rows, and the new tokens have {batch}")
        new = known.new_ones(batch, n_pos) if new is None else new
        return torch.cat([past.bool(), new.bool()], 1)

    def remember_mask(self, mask: Tensor | None) -> None:
        """Keep which of all tokens so far are real, unless the cache is frozen."""
        if not self.frozen:
            self.previous_attention_mask = mask

    def state(self, layer: int) -> StateCacheEntry:
        """The entry of a layer that remembers a state; it is made when the layer first asks for it.

        Raises ValueError if the layer has keys and values already.
        """
        entry = self.entries[layer]
        if not isinstance(entry, StateCacheEntry):
            if entry.length:
                raise ValueError(f"the cache holds keys and values for layer {layer}, which has a state instead")
            new = StateCacheEntry()
            new.frozen, self.entries[layer] = entry.frozen, new
            return new
        return entry

    def __getitem__(self, layer: int) -> KeyValueCacheEntry:
        """The keys and values of a layer; raises ValueError if it has a state instead."""
        entry = self.entries[layer]
        if not isinstance(entry, KeyValueCacheEntry):
            raise ValueError(f"the cache holds a state for layer {layer}, no keys and values; see cache.state({layer})")
        return entry

    def __len__(self) -> int:
        return len(self.entries)
