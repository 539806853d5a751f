"""Context: what all layers of one forward pass share, computed once: positions, masks and rotary angles."""

from collections.abc import Callable, Hashable
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

from hooked_lm.components.embeddings.axis_rotary import AxisRotary
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.masks import Mask, Masks, Scores

T = TypeVar("T")
Tokens = Float[Tensor, "batch pos *features"]
Angles = tuple[Float[Tensor, "batch pos 1 width"], Float[Tensor, "batch pos 1 width"]]  # see Rotary.angles
KeysValues = tuple[Float[Tensor, "batch key_pos kv_head d_head"], Float[Tensor, "batch key_pos kv_head d_value"]]


class Context(Masks):
    """Positions and masks of one run over `n_pos` new tokens that follow `n_past` cached ones.

    `real` marks real tokens among past and new ones, [batch, key_pos]; None: there is no padding. Positions count
    real tokens only, so that padding does not change a row. `pos_embed` is what Shortformer models add to the inputs of queries
    and keys, `per_layer` the additional inputs of the layers in a model with per-layer embeddings. `axis_positions` are positions
    on the axes of an `AxisRotary`; None: on each axis they are `positions`. `added_mask` is added to the scores beside the mask.
    """

    is_partial = False  # whether some rows run through a part of a layer only
    norms_see_copies = True  # whether per-head copies of a stream may pass the sites of a norm
    of_layers: tuple[str, ...] = ("cache",)  # attributes with values of each layer, on the device of that layer

    def __init__(
        self,
        n_pos: int,
        device: torch.device,
        real: Bool[Tensor, "batch key_pos"] | None = None,
        cache: KeyValueCache | None = None,
    ) -> None:
        self.n_pos = n_pos
        self.n_past = cache.length if cache is not None else 0
        self.n_key = self.n_past + n_pos
        self.device, self.cache, self.real = device, cache, real
        self.pos_embed: Float[Tensor, "batch pos d_model"] | None = None
        self.key_positions = self._key_positions()
        self.positions: Int[Tensor, "batch pos"] = self.key_positions[:, self.n_past :]
        self.axis_positions: Int[Tensor, "axis batch pos"] | None = None
        self.per_layer: Num[Tensor, "batch pos layer d_per_layer"] | None = None
        self.added_mask: Scores | None = None
        self._shared: dict[Hashable, object] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, computed once per pass for each key."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]  # type: ignore[return-value]

    def _key_positions(self) -> Int[Tensor, "batch key_pos"]:
        if self.real is None:
            return torch.arange(self.n_key, device=self.device)[None]
        return (self.real.long().cumsum(1) - 1).clamp(min=0)

    def new_real(self) -> Bool[Tensor, "batch pos"] | None:
        """Which of the new tokens are real; None if all are."""
        return None if self.real is None else self.real[:, self.n_past :]

    # ---- where tokens mix --------------------------------------------------------------------------------------------

    def update_kv(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """All keys and values of a layer: those of earlier tokens, from the cache, and these."""
        return (keys, values) if self.cache is None else self.cache[layer].append(keys, values)

    def keep_kv(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keeps the keys and values of a layer for later layers."""
        self._shared["keys and values", layer] = keys, values

    def kv_of(self, kv_source_layer: int) -> KeysValues | None:
        """The keys and values that a layer kept; None if it did not run."""
        return self._shared.get(("keys and values", kv_source_layer))  # type: ignore[return-value]

    def keep_rows(self, name: str, layer: int, rows: Tensor | None) -> None:
        """Keeps a value of each token of a layer for later layers."""
        self._shared[name, layer] = rows

    def rows_of(self, name: str, layer: int) -> Tensor | None:
        """The value that a layer kept for each token; KeyError if it did not run."""
        return self._shared[name, layer]  # type: ignore[return-value]

    def attend_rows(
        self,
        layer: int,
        mix: Callable[[Tensor, Tensor, Tensor, "Context"], Tensor],
        queries: Float[Tensor, "batch pos head d_head"],
        keys: Float[Tensor, "batch key_pos kv_head d_key"],
        values: Float[Tensor, "batch key_pos kv_head d_value"],
    ) -> Float[Tensor, "batch pos head d_value"]:
        """The result of `mix` for the queries, keys and values of each row."""
        return mix(queries, keys, values, self)

    def scan(self, layer: int, mixer: Callable[[Tensor, "Context", int], Tensor], stream: Tokens) -> Tokens:
        """The result of a mixer with a state, each row starting from the state after its earlier tokens."""
        return mixer(stream, self, layer)

    def per_layer_input(self, layer: int) -> Num[Tensor, "batch pos d_per_layer"] | None:
        """The input of a layer from per-layer embeddings; None if there is none."""
        return None if self.per_layer is None else self.per_layer[:, :, layer]

    def query_angles(self, rotary: Rotary) -> Angles:
        """The angles of the queries, shared by the layers of one rotary embedding."""
        on_axes = self.axis_positions
        if on_axes is not None and isinstance(rotary, AxisRotary):
            return self.once(rotary, lambda: rotary.angles_on_axes(on_axes))
        return self.once(rotary, lambda: rotary.angles(self.positions, self.n_key))

    def key_angles(self, rotary: Rotary) -> Angles:
        """The angles of the keys of the new tokens."""
        return self.query_angles(rotary)

    # ---- masks -------------------------------------------------------------------------------------------------------

    def mask(self, causal: bool, window: int | None) -> Mask | Float[Tensor, "batch head query_pos key_pos"] | None:
        """Which keys a query may attend to, numbers with an `added_mask`; None: all, or with `causal` all up to itself."""
        if self.added_mask is not None:
            return self.additive_mask(causal, window, self.added_mask.dtype)
        windowed = window is not None and window < self.n_key
        square_or_row = self.whole is None and (not causal or self.n_pos in (1, self.n_key))
        if self.real is None and not windowed and square_or_row and not self.needs_mask:
            return None
        return self.full_mask(causal, window)

    @property
    def needs_mask(self) -> bool:
        """Whether more than padding, windows and the order of tokens decides which keys a query may attend to."""
        return False
