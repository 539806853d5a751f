"""The MLP classes of TransformerLens."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.compat.parts.name import Flat, Part, Plan, PublicName, block_of, flat, to_dtype
from hooked_lm.components import mlp
from hooked_lm.components.experts import moe
from hooked_lm.components.experts.router import TopKRouter
from hooked_lm.hooks import HookPoint
from hooked_lm.models.config.flat import HookedTransformerConfig

GPT_OSS_ALPHA, GPT_OSS_LIMIT = moe.ClampedGatedMLP.Config.alpha, moe.ClampedGatedMLP.Config.limit
Stream = Float[Tensor, "batch pos d_model"]


def mlp_of(cfg: Flat, **changes: Any) -> Plan:
    """The MLP of a layer."""
    config = block_of(cfg, positional_embedding_type="none", attn_only=False, parallel_attn_mlp=False, **changes).mlp
    return {mlp.MLP.Config: mlp.MLP, mlp.GatedMLP.Config: mlp.GatedMLP, moe.MoE.Config: moe.MoE}[type(config)], config


def numbers_of_experts(cfg: Flat) -> tuple[int, int]:
    """The number of experts, and of experts per token."""
    names = flat(cfg)
    if names.num_experts is None:
        raise ValueError("a mixture of experts needs num_experts and experts_per_token")
    return names.num_experts, names.experts_per_token


class CanBeUsedAsMLP(nn.Module, metaclass=PublicName):
    """Any MLP of a block; the base class of custom MLPs, which have a width `d_mlp`."""

    def __init__(self, cfg: Flat) -> None:
        super().__init__()
        self.cfg = HookedTransformerConfig.unwrap(cfg)
        if self.cfg.d_mlp is None:
            raise ValueError("an MLP needs d_mlp")
        self.d_mlp = self.cfg.d_mlp

    @classmethod
    def plan(cls, cfg: Flat) -> Plan:
        return (CanBeUsedAsMLP,)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, (mlp.AbstractMLP, mlp.AbstractGatedMLP, moe.ClampedGatedMLP, moe.AbstractMoE))

    def forward(self, x: Stream) -> Stream:
        """Returns the input; overridden by subclasses."""
        return x

    def select_activation_function(self) -> None:
        """Sets `act_fn` from the config, and `hook_mid` and `ln` if a norm follows it."""
        names = flat(self.cfg, num_experts=None, experts_per_token=None, gated_mlp=False)
        _, config = mlp_of(vars(names) | {"tree": None})
        self.act_fn = config.build().act_fn
        if config.mid_norm is not None:
            self.hook_mid, self.ln = HookPoint("batch", "pos", "d_mlp"), config.mid_norm.build(mlp.HIDDEN)


class MLP(Part, mlp.MLP, metaclass=PublicName):
    """`act(x W_in + b_in) W_out + b_out`."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return mlp_of(cfg, gated_mlp=False, num_experts=None, experts_per_token=None)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, mlp.AbstractMLP)


class GatedMLP(Part, mlp.GatedMLP, metaclass=PublicName):
    """`(act(x W_gate) * (x W_in + b_in)) W_out + b_out`."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return mlp_of(cfg, gated_mlp=True, num_experts=None, experts_per_token=None)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, mlp.AbstractGatedMLP)


class GatedMLP4Bit(nn.Module, metaclass=PublicName):
    """A gated MLP of 4-bit weights, which is not built from a config: `model.quantize` makes one."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        raise ValueError(
            'no MLP is built with weights of 4 bits: build or load the model, then call model.quantize("int4")'
        )

    @staticmethod
    def is_one(module: Any) -> bool:
        return False


class MoEGatedMLP(Part, mlp.GatedMLP, metaclass=PublicName):
    """An expert: a gated MLP without biases."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        names = flat(cfg)
        return MoEGatedMLP, mlp.GatedMLP.Config(names.d_model, names.d_mlp, names.act_fn)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, mlp.AbstractGatedMLP) and hasattr(module, "hook_routed_positions")


class MoE(Part, moe.MoE, metaclass=PublicName):
    """A mixture of `cfg.num_experts` MLPs; each token is routed to `cfg.experts_per_token` of them."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        numbers_of_experts(cfg)
        return mlp_of(cfg, gated_mlp=True)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, moe.AbstractMoE)


class GptOssExpert(Part, moe.ClampedGatedMLP, metaclass=PublicName):
    """An expert of gpt-oss: gated, clamped, with biases."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        return moe.ClampedGatedMLP, moe.ClampedGatedMLP.Config(flat(cfg).d_model, flat(cfg).d_mlp)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, moe.ClampedGatedMLP)


class GptOssMoE(Part, moe.MoE, metaclass=PublicName):
    """The mixture of experts of gpt-oss."""

    @staticmethod
    def plan(cfg: Flat) -> Plan:
        n, top_k = numbers_of_experts(cfg)
        _, expert = GptOssExpert.plan(cfg)
        return moe.MoE, moe.MoE.Config(expert, n, top_k, TopKRouter(), router_bias=True)

    @staticmethod
    def is_one(module: Any) -> bool:
        return isinstance(module, moe.AbstractMoE) and isinstance(module.experts[0], moe.ClampedGatedMLP)


class MLPFactory:
    """The factory of the MLP that a flat config describes."""

    @staticmethod
    def create_mlp(cfg: Flat) -> nn.Module:
        kind, config = mlp_of(cfg)
        return to_dtype(kind(config), cfg)


class ActivationFunctionFactory:
    """The factory of the activation function that a flat config names."""

    @staticmethod
    def pick_activation_function(cfg: Flat) -> Any:
        _, config = MLP.plan(cfg)
        return config.build().act_fn
