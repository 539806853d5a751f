"""What cross attention reads, and what the layers of an encoder or a decoder beside one share besides."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from hooked_lm.components.context import Context, KeysValues
from hooked_lm.components.kv_cache import KeyValueCache


class Source:
    """The output of an encoder, and which of its positions are real; None: all are.

    With `keeps` the keys and values that a decoder's layers make of it are made once and serve all later runs.
    """

    def __init__(
        self,
        resid: Float[Tensor, "batch key_pos d_model"],
        real: Bool[Tensor, "batch key_pos"] | None = None,
        keeps: bool = False,
    ) -> None:
        self.resid, self.real, self.keeps = resid, real, keeps
        self._kept: dict[int, KeysValues] = {}

    def keys_values(self, layer: int, make: Callable[[], KeysValues]) -> KeysValues:
        """What a layer makes of the source, or made of it before."""
        if layer in self._kept:
            return self._kept[layer]
        made = make()
        if self.keeps:
            self._kept[layer] = made
        return made


class SourceContext(Context):
    """The masks of `n_pos` queries that each see all real positions of a source."""

    def __init__(self, n_pos: int, source: Source) -> None:
        super().__init__(n_pos, source.resid.device)
        self.n_key, self.real = source.resid.shape[1], source.real

    def _full_mask(self, causal: bool, window: int | None) -> Bool[Tensor, "batch 1 query_pos key_pos"]:
        if self.real is None:
            return torch.ones(1, 1, self.n_pos, self.n_key, dtype=torch.bool, device=self.device)
        return self.real[:, None, None, :].expand(-1, 1, self.n_pos, -1)


class StackContext(Context):
    """The context of an encoder's or a decoder's layers over `batch` rows.

    `score_bias` is what the stack adds to the scores of all its layers, `source` what their cross attention reads.
    """

    def __init__(
        self,
        batch: int,
        n_pos: int,
        device: torch.device,
        real: Bool[Tensor, "batch key_pos"] | None = None,
        cache: KeyValueCache | None = None,
        source: Source | None = None,
    ) -> None:
        super().__init__(n_pos, device, real, cache)
        self.batch = batch
        self.score_bias: Float[Tensor, "#batch head query_pos key_pos"] | None = None
        self.source = source

    @property
    def over_source(self) -> SourceContext:
        """The masks of cross attention."""
        assert self.source is not None, "cross attention without an encoder's output"
        source = self.source
        return self.once("over source", lambda: SourceContext(self.n_pos, source))


class EncoderDecoderCache(KeyValueCache):
    """What a decoder remembers of the tokens it has read, and the source that it reads them beside."""

    def __init__(self, n_layers: int, room: int = 64) -> None:
        super().__init__(n_layers, room)
        self.source: Source | None = None

    @classmethod
    def init_cache(cls, cfg: Any, device: Any = None, batch_size: int = 1) -> "EncoderDecoderCache":
        """An empty cache for a model's config; device and batch size follow what is read."""
        return cls(cfg.n_decoder_layers)
