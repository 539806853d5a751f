"""Attention whose keys and values come from an encoder's output (Vaswani et al. 2017, arXiv:1706.03762)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from hooked_lm.components.attention.multihead import QUERY, AbstractAttention, Stream, project
from hooked_lm.components.attention.projection import add_projections
from hooked_lm.components.context import KeysValues
from hooked_lm.components.stack_context import EncodedSource, StackContext
from hooked_lm.components.tl_call import cross_context
from hooked_lm.hooks import HookPoint

SOURCE_KEY = ("batch", "key_pos", "kv_head", "d_head")


class AbstractCrossAttention(AbstractAttention, ABC):
    """Attention to keys and values of a source; a kind says where it has them from."""

    axes = dict.fromkeys(("W_K", "W_V"), "kv_head [d_source] d_head")

    def __init__(self, cfg: "CrossAttention.Config") -> None:
        super().__init__()
        self.cfg = cfg
        add_projections(self, cfg, cfg.d_source or cfg.d_model)
        self.q_norm = self.k_norm = None  # attributes of the public interface
        self.hook_q, self.hook_k, self.hook_v = HookPoint(*QUERY), HookPoint(*SOURCE_KEY), HookPoint(*SOURCE_KEY)
        self.make_mixing(cfg.d_head)

    def __call__(self, query_input: Stream, *args: object, **kwargs: object) -> Stream:
        """Runs attention in a context, or for a source that is given as `key_input` (see `tl_call.cross_context`)."""
        if not isinstance(args[0] if args else kwargs.get("context"), StackContext):
            args, kwargs = (cross_context(query_input, *args, **kwargs), self.layer_id or 0), {}
        return super().__call__(query_input, *args, **kwargs)

    def forward(self, query_input: Stream, context: StackContext, layer: int = 0) -> Stream:
        """`query_input` is the normalised stream; `layer` is the index of this layer in the cache of the source."""
        q = self.hook_q(project(query_input, self.W_Q, self.b_Q))
        k, v = self.source_kv(context, layer)
        return self.output(self.mix(q, k, v, context.source_context))

    @abstractmethod
    def source_kv(self, context: StackContext, layer: int) -> KeysValues:
        """The keys and values of the context's source."""


class CrossAttention(AbstractCrossAttention):
    """`z = softmax(q k^T * scale + mask) v` with queries from the stream, and keys and values from the source.

    `W_Q` is [head, d_model, d_head], `W_K` and `W_V` [kv_head, d_source, d_head], `W_O` [head, d_head, d_model]; a bias may be
    None. `hook_k` and `hook_v` are [batch, key_pos, kv_head, d_head], over the positions of the source.
    """

    @dataclass(frozen=True)
    class Config(AbstractAttention.Config):
        d_model: int
        n_heads: int
        d_head: int
        n_key_value_heads: int | None = None
        scale: float | None = None  # of the scores; None: d_head ** -0.5
        qkv_bias: bool = False
        out_bias: bool = False
        soft_cap: float | None = None
        d_source: int | None = None  # the width of the encoder's output; None: d_model
        causal, rotary = False, None

        def build(self) -> AbstractCrossAttention:
            return CrossAttention(self)

    def source_kv(self, context: StackContext, layer: int) -> KeysValues:
        """The keys and values of the context's source."""
        assert context.source is not None, "cross attention without an encoder's output"
        source = context.source
        k, v = source.keys_values(layer, lambda: self.keys_values(source))
        self.keep(k, v, context, layer)
        return k, v

    def keep(self, k: Tensor, v: Tensor, context: StackContext, layer: int) -> None:
        """Keeps keys and values for others that use them."""

    def keys_values(self, source: EncodedSource) -> KeysValues:
        """The keys and values of the source, at their sites."""
        k = self.hook_k(project(source.resid, self.W_K, self.b_K))
        return k, self.hook_v(project(source.resid, self.W_V, self.b_V))
