"""The context of an encoder's layers, and of a decoder's layers that attend to an encoder's output."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.context import Context, KeysValues
from hooked_lm.components.kv_cache import KeyValueCache


class EncodedSource:
    """The output of an encoder; `real` marks its positions that are not padding, None: all.

    With `cache_kv` each decoder layer computes the keys and values of it once, for this and all later runs.
    """

    of_layers = ("_cached_kv",)  # as in a `Context`

    def __init__(
        self,
        resid: Float[Tensor, "batch key_pos d_model"],
        real: Bool[Tensor, "batch key_pos"] | None = None,
        cache_kv: bool = False,
    ) -> None:
        self.resid, self.real, self.cache_kv = resid, real, cache_kv
        self._cached_kv: dict[int, KeysValues] = {}

    def keys_values(self, layer: int, compute: Callable[[], KeysValues]) -> KeysValues:
        """The keys and values of a layer: cached ones, else those that `compute` returns."""
        if layer in self._cached_kv:
            return self._cached_kv[layer]
        keys_values = compute()
        if self.cache_kv:
            self._cached_kv[layer] = keys_values
        return keys_values


class SourceContext(Context):
    """The masks of cross attention: each of `n_pos` queries attends to all real positions of the source."""

    def __init__(self, n_pos: int, source: EncodedSource) -> None:
        super().__init__(n_pos, source.resid.device)
        self.n_key, self.real = source.resid.shape[1], source.real

    def known_mask(self, causal: bool, window: int | None) -> Bool[Tensor, "batch 1 1 key_pos"]:
        if self.real is None:
            return torch.ones(1, 1, 1, self.n_key, dtype=torch.bool, device=self.device)
        return self.real[:, None, None, :]


class StackContext(Context):
    """A context of `batch` rows.

    `score_bias` is added to the attention scores of all layers; `source` is the input of their cross attention; `extra_ids` are
    ids that the tokens have beside their types, by name; `global_tokens` are those of global attention, None: there are none.
    """

    def __init__(
        self,
        batch: int,
        n_pos: int,
        device: torch.device,
        real: Bool[Tensor, "batch key_pos"] | None = None,
        cache: KeyValueCache | None = None,
        source: EncodedSource | None = None,
    ) -> None:
        super().__init__(n_pos, device, real, cache)
        self.batch = batch
        self.score_bias: Float[Tensor, "#batch head query_pos key_pos"] | None = None
        self.source = source
        self.extra_ids: dict[str, Int[Tensor, "batch pos *each"]] = {}
        self.global_tokens: Bool[Tensor, "batch pos"] | None = None

    @property
    def source_context(self) -> SourceContext:
        """The masks of cross attention."""
        assert self.source is not None, "cross attention without an encoder's output"
        source = self.source
        return self.once("source context", lambda: SourceContext(self.n_pos, source))


class EncoderDecoderCache(KeyValueCache):
    """The keys and values of a decoder's past tokens, and the encoder's output."""

    def __init__(self, n_layers: int, room: int = 64) -> None:
        super().__init__(n_layers, room)
        self.source: EncodedSource | None = None

    @classmethod
    def init_cache(
        cls, cfg: Any, device: torch.device | str | None = None, batch_size: int = 1
    ) -> "EncoderDecoderCache":
        """An empty cache for a model's config; device and batch size are those of the first tokens."""
        return cls(cfg.n_decoder_layers)
