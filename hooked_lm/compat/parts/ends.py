"""The embedding and output classes of TransformerLens."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from hooked_lm.compat.parts.name import Flat, Part, Plan, PublicName, encoder_tree, flat
from hooked_lm.components import heads
from hooked_lm.components.embeddings import embed, encoder_embed, pos_embed
from hooked_lm.components.norms import layer_norm
from hooked_lm.models.config import build

Stream = Float[Tensor, "batch pos d_model"]


class Embed(Part, embed.Embed, metaclass=PublicName):
    """The token embedding."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        names = flat(cfg, n_layers=0, positional_embedding_type="none")
        return embed.Embed, build.decoder(names).embed

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, embed.Embed)


class PosEmbed(Part, pos_embed.PosEmbed, metaclass=PublicName):
    """The position embedding."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return pos_embed.PosEmbed, pos_embed.PosEmbed.Config(flat(cfg).n_ctx, flat(cfg).d_model)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, pos_embed.PosEmbed)


class TokenTypeEmbed(Part, encoder_embed.TokenTypeEmbed, metaclass=PublicName):
    """The embedding of two token types."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        n_types = getattr(flat(cfg), "n_token_types", 2)
        return encoder_embed.TokenTypeEmbed, encoder_embed.TokenTypeEmbed.Config(n_types, flat(cfg).d_model)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, encoder_embed.TokenTypeEmbed)


class BertEmbed(Part, encoder_embed.EncoderEmbed, metaclass=PublicName):
    """The embedding of an encoder."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return encoder_embed.EncoderEmbed, encoder_tree(cfg).embed

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, encoder_embed.EncoderEmbed)


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
    """The head for masked tokens, before the unembedding."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        names = flat(cfg)
        with_bias = layer_norm.LayerNorm.Config(names.d_model, names.eps)
        return heads.MLMHead, heads.MLMHead.Config(names.d_model, names.d_model, "gelu", with_bias)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, heads.MLMHead)


class BertNSPHead(Part, heads.NSPHead, metaclass=PublicName):
    """The head for next-sentence prediction."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return heads.NSPHead, heads.NSPHead.Config(flat(cfg).d_model)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, heads.NSPHead)


class BertPooler(Part, heads.Pooler, metaclass=PublicName):
    """The pooler."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return heads.Pooler, heads.Pooler.Config(flat(cfg).d_model)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, heads.Pooler)
