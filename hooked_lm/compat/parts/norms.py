"""The norm classes of TransformerLens."""

from typing import Any

from hooked_lm.compat.parts.name import Flat, Part, Plan, PublicName, flat
from hooked_lm.components.norms import layer_norm, norm


def has_weights(module: Any) -> bool:
    """Whether a norm has weights, which folding removes."""
    return any(True for _ in module.parameters())


class LayerNorm(Part, layer_norm.LayerNorm, metaclass=PublicName):
    """A LayerNorm with weight and bias; its width `length` is by default that of the stream."""

    @staticmethod
    def plan(cfg: Flat, length: int | None = None) -> Plan:
        return layer_norm.LayerNorm, layer_norm.LayerNorm.Config(length or flat(cfg).d_model, flat(cfg).eps)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, layer_norm.LayerNorm) and has_weights(module)


class LayerNormPre(Part, layer_norm.LayerNorm, metaclass=PublicName):
    """A LayerNorm without weight and bias."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return layer_norm.LayerNorm, layer_norm.LayerNorm.Config(
            flat(cfg).d_model, flat(cfg).eps, weight=False, bias=False
        )

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, layer_norm.LayerNorm) and not has_weights(module)


class RMSNorm(Part, norm.RMSNorm, metaclass=PublicName):
    """An RMSNorm with a weight."""

    @staticmethod
    def plan(cfg: Flat, length: int | None = None) -> Plan:
        return norm.RMSNorm, norm.RMSNorm.Config(length or flat(cfg).d_model, flat(cfg).eps)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, norm.RMSNorm) and has_weights(module)


class RMSNormPre(Part, norm.RMSNorm, metaclass=PublicName):
    """An RMSNorm without weight."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return norm.RMSNorm, norm.RMSNorm.Config(flat(cfg).d_model, flat(cfg).eps, weight=False)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, norm.RMSNorm) and not has_weights(module)
