"""Counts the cost of a sweep."""

from dataclasses import dataclass

from torch import nn

from hooked_lm.components.attention.multihead import Attend
from hooked_lm.components.moe import MoE
from hooked_lm.engine.context import PackedContext
from hooked_lm.engine.site_info import mixing


@dataclass(frozen=True)
class TokenCost:
    """Floating-point operations of one token in the products with a layer's weights: in a mixer with a state, for keys and
    values, and for the rest."""

    mixer: int
    keys: int
    rest: int


def token_cost(block: nn.Module) -> TokenCost:
    """The cost of a token in a block. Only the experts that the token is routed to count."""
    mixer = keys = rest = 0
    module, of_keys, of_mixer = mixing(block), set(), set()
    if isinstance(module, Attend):
        of_keys = {
            id(weight) for name, weight in module.named_parameters(recurse=False) if name in module.key_value_parts
        }
    elif module is not None:
        of_mixer = {id(weight) for weight in module.parameters()}
    mixtures = [module for module in block.modules() if isinstance(module, MoE)]
    shares = {id(p): moe.cfg.top_k / moe.cfg.n_experts for moe in mixtures for p in moe.experts.parameters()}
    for name, weight in block.named_parameters():
        if weight.ndim < 2 or name.split(".")[-1].startswith("b_"):  # biases of heads have two axes
            continue
        cost = int(2 * weight.numel() * shares.get(id(weight), 1.0))
        if id(weight) in of_mixer:
            mixer += cost
        elif id(weight) in of_keys:
            keys += cost
        else:
            rest += cost
    return TokenCost(mixer, keys, rest)


@dataclass
class Cost:
    """The number of whole forward passes, of tokens times layers, and of floating-point operations, and the time in seconds."""

    forwards: int = 0
    layer_rows: int = 0
    flops: int = 0
    seconds: float = 0.0

    def count(self, cost: TokenCost, context: PackedContext) -> None:
        """Adds the tokens of one layer."""
        n_tokens = context.key_packing.n_tokens + context.query_packing.n_tokens
        self.layer_rows += n_tokens
        self.flops += n_tokens * (cost.mixer + cost.keys) + context.query_packing.n_tokens * cost.rest

    def add(self, other: "Cost") -> None:
        """Adds another cost, without its seconds."""
        self.forwards += other.forwards
        self.layer_rows += other.layer_rows
        self.flops += other.flops
