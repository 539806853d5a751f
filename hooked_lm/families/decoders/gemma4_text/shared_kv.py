"""Attention to the keys and values of an earlier layer (Brandon et al. 2024, arXiv:2405.12981): only queries are computed."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import QUERY, AbstractAttention, PerHead, Stream, project
from hooked_lm.components.attention.projection import projection
from hooked_lm.components.context import Context, KeysValues
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.norms.norm import NormConfig, add_norm, norm_of
from hooked_lm.hooks import HookPoint, hook_if_listening

SOURCE_KV = ("batch", "key_pos", "kv_head", "d_head")


class SharedKVAttention(AbstractAttention):
    """`z = softmax(q k^T * scale + mask) v` with the keys (after rotary) and values of layer `kv_source_layer`.

    `hook_rot_k` and `hook_v` are that layer's keys and values, with past tokens. Edits of them affect this layer only.
    """

    computes_kv = False

    @dataclass(frozen=True)
    class Config(AbstractAttention.Config):
        d_model: int
        n_heads: int
        d_head: int
        kv_source_layer: int
        rotary: Rotary
        n_key_value_heads: int | None = None
        scale: float | None = None  # of the scores; None: d_head ** -0.5
        qkv_bias: bool = False
        out_bias: bool = False
        qk_norm: NormConfig | None = None
        window: int | None = None  # how many positions back a query attends to, itself included
        causal: bool = True

        def build(self) -> "SharedKVAttention":
            return SharedKVAttention(self)

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg, self.kv_source_layer = cfg, cfg.kv_source_layer
        self.W_Q = projection(cfg.n_heads, cfg.d_model, cfg.d_head)
        self.b_Q = nn.Parameter(torch.zeros(cfg.n_heads, cfg.d_head)) if cfg.qkv_bias else None
        self.hook_q = HookPoint(*QUERY)
        add_norm(self, "q_norm", cfg.qk_norm, QUERY)
        self.hook_rot_q, self.hook_rot_k, self.hook_v = HookPoint(*QUERY), HookPoint(*SOURCE_KV), HookPoint(*SOURCE_KV)
        self.make_mixing(cfg.d_head)

    def forward(
        self,
        query_input: Float[Tensor, "batch pos *head d_model"],
        key_input: Float[Tensor, "batch key_row *key_head d_model"] | None = None,
        value_input: Float[Tensor, "batch key_row *value_head d_model"] | None = None,
        context: Context | None = None,
        layer: int = 0,
    ) -> Stream:
        """`query_input` is the normalised stream, or one copy of it per head; the other two inputs are not used."""
        context = context or Context(query_input.shape[1], query_input.device)
        q = self.queries(query_input, context)
        k, v = self.source_kv(context, layer)
        return self.output(
            self.mix(q, hook_if_listening(self.hook_rot_k, k), hook_if_listening(self.hook_v, v), context, layer)
        )

    def queries(self, x: Float[Tensor, "batch pos *head d_model"], context: Context) -> PerHead:
        """Queries after their norm and rotary."""
        q = norm_of(self, "q_norm")(self.hook_q(project(x, self.W_Q, self.b_Q)))
        return self.hook_rot_q(self.cfg.rotary.rotate(q, context.query_angles(self.cfg.rotary)))

    def source_kv(self, context: Context, layer: int) -> KeysValues:
        """The keys and values of the source layer; ValueError if it did not run."""
        source = self.cfg.kv_source_layer
        keys_values = context.kv_of(source)
        if keys_values is None:
            raise ValueError(
                f"layer {layer} attends to the keys and values of layer {source}, which did not run; "
                f"start at layer {source} or an earlier one"
            )
        return keys_values
