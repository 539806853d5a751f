"""What stands before the layers and behind them, under its public names."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.compat.parts.name import Flat, Part, Plan, PublicName, encoder_tree, flat
from hooked_lm.components import embed, encoder_embed, heads, norm
from hooked_lm.components.source import StackContext
from hooked_lm.models.flat import build_tree

Stream = Float[Tensor, "batch pos d_model"]


class Embed(Part, embed.Embed, metaclass=PublicName):
    """The rows of `W_E`."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        names = flat(cfg, n_layers=0, positional_embedding_type="none")
        return embed.Embed, build_tree(names).embed

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, embed.Embed)


class PosEmbed(Part, embed.PosEmbed, metaclass=PublicName):
    """The rows of `W_pos`, for tokens: `forward` counts their positions itself.

    In a model of ours the positions are counted already: there `pos_embed` is called with them.
    """

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return PosEmbed, embed.PosEmbed.Config(flat(cfg).n_ctx, flat(cfg).d_model)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, embed.PosEmbed)

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch all_pos"] | None = None,
    ) -> Stream:
        """The vectors of positions from `past_kv_pos_offset` on; a mask of all tokens so far makes padding zero and uncounted."""
        n_pos = tokens.shape[1]
        if attention_mask is None:
            counted = torch.arange(n_pos, device=tokens.device) + past_kv_pos_offset
            return super().forward(counted.expand(tokens.shape[0], n_pos))
        real = attention_mask[:, past_kv_pos_offset : past_kv_pos_offset + n_pos].bool()
        counted = (attention_mask.long().cumsum(1) - 1).clamp(min=0)
        rows = super().forward(counted[:, past_kv_pos_offset : past_kv_pos_offset + n_pos])
        return rows.masked_fill(~real[..., None], 0.0)


class TokenTypeEmbed(Part, encoder_embed.TokenTypeEmbed, metaclass=PublicName):
    """A vector for each of two types of tokens."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        n_types = getattr(flat(cfg), "n_token_types", 2)
        return encoder_embed.TokenTypeEmbed, encoder_embed.TokenTypeEmbed.Config(n_types, flat(cfg).d_model)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, encoder_embed.TokenTypeEmbed)


class BertEmbed(Part, encoder_embed.EncoderEmbed, metaclass=PublicName):
    """The embedding of an encoder; called by itself it takes tokens and perhaps their types, none of them padding."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return BertEmbed, encoder_tree(cfg).embed

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, encoder_embed.EncoderEmbed)

    def forward(
        self,
        input_ids: Int[Tensor, "batch pos"],
        token_type_ids: Int[Tensor, "batch pos"] | None = None,
        context: StackContext | None = None,
    ) -> Stream:
        context = context or StackContext(len(input_ids), input_ids.shape[1], input_ids.device)
        return super().forward(input_ids, token_type_ids, context)


class Unembed(Part, embed.Unembed, metaclass=PublicName):
    """`x W_U + b_U`."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        names = flat(cfg)
        return embed.Unembed, embed.Unembed.Config(names.d_model, names.d_vocab_out, bias=True)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, embed.Unembed)


class BertMLMHead(Part, heads.MLMHead, metaclass=PublicName):
    """What prepares the stream for the unembedding of masked tokens."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        names = flat(cfg)
        layer_norm = norm.LayerNorm.Config(names.d_model, names.eps)
        return heads.MLMHead, heads.MLMHead.Config(names.d_model, names.d_model, "gelu", layer_norm)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, heads.MLMHead)


class BertNSPHead(Part, heads.NSPHead, metaclass=PublicName):
    """Whether one sentence follows another."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return heads.NSPHead, heads.NSPHead.Config(flat(cfg).d_model)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, heads.NSPHead)


class BertPooler(Part, heads.Pooler, metaclass=PublicName):
    """One vector of a text."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return heads.Pooler, heads.Pooler.Config(flat(cfg).d_model)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, heads.Pooler)
