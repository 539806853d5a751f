"""DeepSeek sparse attention (DeepSeek-AI 2025, arXiv:2512.02556): latent attention to the keys that an indexer chooses."""

from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.attention.indexer import SCORES, Indexer, among
from hooked_lm.components.attention.latent import AbstractLatentAttention, Latent, LatentAttention, LatentInputs
from hooked_lm.components.attention.multihead import Keys, Mixed, PerHead, Values
from hooked_lm.components.context import Context
from hooked_lm.hooks import HookPoint, is_listening

# All that one token contributes, as one vector: the rows of a cache, or of a sweep, then have keys and index keys together.
Packed = Float[Tensor, "batch _pos 1 _width"]


class SparseLatentAttention(AbstractLatentAttention):
    """Latent attention in which each query attends to the keys that `indexer` chooses, the same for all heads.

    The cached keys are [batch, pos, 1, width]: those of all heads, then the key of the indexer.
    """

    mixes_heads = True

    key_value_parts = (*LatentAttention.key_value_parts, *(f"indexer.{part}" for part in Indexer.key_parts))
    score_sites = (*LatentAttention.score_sites, "indexer.hook_index_scores", "indexer.hook_index_mask")

    @dataclass(frozen=True)
    class Config(LatentAttention.Config):
        indexer: Indexer.Config = field(kw_only=True)

        def build(self) -> "SparseLatentAttention":
            return SparseLatentAttention(self)

    cfg: Config

    def make_parts(self, d_value: int) -> None:
        self.indexer = self.cfg.indexer.build()

    def attend(self, q: PerHead, k: Keys, v: Values, inputs: LatentInputs, context: Context, layer: int) -> Mixed:
        """The mixed values, for the queries, keys and values of the new tokens."""
        rotary, latent = self.cfg.indexer.rotary, inputs.q_latent[..., : self.cfg.indexer.d_query]
        gate = self.gate(self.gate_input(inputs.query_input, inputs.q_latent))
        index_q, weights = self.indexer.queries(inputs.query_input, latent, context.query_angles(rotary))
        index_k = self.indexer.keys(inputs.key_input, context.key_angles(rotary))
        keys, values = context.update_kv(layer, packed(k, index_k), packed(v))
        mix = partial(self._mix_packed, layer, context)
        z = context.attend_rows(layer, mix, packed(q, index_q, weights), keys, values)
        (z,) = unpacked(z, (self.cfg.n_heads, self.cfg.d_value))
        return self.hook_z(z if gate is None else z * gate)

    def gate_input(self, query_input: Float[Tensor, "batch pos *head d_model"], q_latent: Latent) -> Tensor:
        """What the gate is a projection of, if there is one."""
        return query_input

    def _mix_packed(
        self, layer: int, whole: Context, queries: Packed, keys: Packed, values: Packed, context: Context
    ) -> Packed:
        """The mixed values of some rows of the context `whole`, which keeps the choice for later layers."""
        cfg, index = self.cfg, self.cfg.indexer
        per_head = (cfg.n_heads, cfg.d_head)
        q, index_q, weights = unpacked(queries, per_head, (index.n_heads, index.d_head), (index.n_heads,))
        k, index_k = unpacked(keys, per_head, (index.d_head,))
        (v,) = unpacked(values, (cfg.n_heads, cfg.d_value))
        chosen = self.indexer.mask(index_q, weights, index_k, context, self.causal, self.window)
        whole.keep_rows("chosen keys", layer, chosen)
        return packed(self.kernel()(q, k, v, among(chosen, context, q)))


class SharedIndexAttention(AbstractLatentAttention):
    """Latent attention to the keys that the indexer of layer `index_source_layer` chose (IndexCache 2026, arXiv:2603.12201).

    Edits of `hook_index_mask` affect this layer only.
    """

    mixes_heads = True

    score_sites = (*LatentAttention.score_sites, "hook_index_mask")

    @dataclass(frozen=True)
    class Config(LatentAttention.Config):
        index_source_layer: int = field(kw_only=True)

        def build(self) -> "SharedIndexAttention":
            return SharedIndexAttention(self)

    cfg: Config

    def make_parts(self, d_value: int) -> None:
        self.hook_index_mask = HookPoint(*SCORES)

    def attend(self, q: PerHead, k: Keys, v: Values, inputs: LatentInputs, context: Context, layer: int) -> Mixed:
        """The mixed values, for the queries, keys and values of the new tokens."""
        gate = self.gate(inputs.query_input)
        k, v = context.update_kv(layer, k, v)
        z = context.attend_rows(layer, partial(self._mix_chosen, layer, context), q, k, v)
        return self.hook_z(z if gate is None else z * gate)

    def _mix_chosen(self, layer: int, whole: Context, q: PerHead, k: Keys, v: Values, context: Context) -> Mixed:
        source = self.cfg.index_source_layer
        try:
            chosen = whole.rows_of("chosen keys", source)
        except KeyError:
            raise ValueError(
                f"layer {layer} attends to the keys that layer {source} chooses, which did not run; "
                f"start at layer {source} or an earlier one"
            ) from None
        if is_listening(self.hook_index_mask):
            every = context.full_mask(self.causal, self.window)[:, 0].expand(len(q), -1, -1)
            chosen = self.hook_index_mask((every if chosen is None else chosen).clone())
        return self.kernel()(q, k, v, among(chosen, context, q))


def packed(*parts: Tensor) -> Packed:
    """Parts of each token [batch, pos, ...] as one vector."""
    flat = [part.flatten(2) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat, -1))[:, :, None]


def unpacked(packed: Packed, *shapes: tuple[int, ...]) -> list[Tensor]:
    """The parts of a packed tensor, with these shapes of a token."""
    widths = [torch.Size(shape).numel() for shape in shapes]
    parts = packed[:, :, 0].split(widths, -1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]
