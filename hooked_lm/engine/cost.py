"""Counts the cost of a sweep."""

from dataclasses import dataclass

from torch import nn

from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.experts.moe import AbstractMoE
from hooked_lm.engine.context import PackedContext
from hooked_lm.engine.site_info import mixing


@dataclass(frozen=True)
class TokenCost:
    """Floating-point operations of one token in the products with a layer's weights: for keys and values, in the rest of
    attention before `z` (or in all of a mixer with a state), for the output of attention, and in the rest of the block."""

    keys: int
    mixing: int
    output: int
    rest: int
    has_state: bool = False

    @property
    def total(self) -> int:
        """The operations of a token that passes the whole layer."""
        return self.keys + self.mixing + self.output + self.rest


def token_cost(block: nn.Module) -> TokenCost:
    """The cost of a token in a block. Only the experts that the token is routed to count."""
    costs = dict.fromkeys(("keys", "mixing", "output", "rest"), 0)
    modules = mixing(block)
    parts = {id(weight): "mixing" for module in modules for weight in module.parameters()}
    for attn in (module for module in modules if isinstance(module, AbstractAttention)):
        of_keys = [p for name, p in attn.named_parameters() if attn.makes_keys(name)]
        parts |= {id(weight): "keys" for weight in of_keys}
        parts |= {id(weight): "output" for name, weight in attn.named_parameters() if name.startswith("W_O")}
    mixtures = [module for module in block.modules() if isinstance(module, AbstractMoE)]
    shares = {id(p): moe.cfg.top_k / moe.cfg.n_experts for moe in mixtures for p in moe.experts.parameters()}
    for name, weight in block.named_parameters():
        if weight.ndim < 2 or name.split(".")[-1].startswith("b_"):  # biases of heads have two axes
            continue
        costs[parts.get(id(weight), "rest")] += int(2 * weight.numel() * shares.get(id(weight), 1.0))
    return TokenCost(**costs, has_state=any(not isinstance(module, AbstractAttention) for module in modules))


@dataclass
class Cost:
    """The number of whole forward passes, of tokens times layers, and of floating-point operations, and the time in seconds."""

    forwards: int = 0
    layer_rows: int = 0
    flops: int = 0
    seconds: float = 0.0

    def count(self, cost: TokenCost, context: PackedContext) -> None:
        """Adds the tokens of one layer."""
        n_early, n_keys, n_queries, n_outputs = (
            packing.n_tokens
            for packing in (context.key_packing, context.kv_packing, context.query_packing, context.output_packing)
        )
        n_from_z = sum(packing.n_tokens for site, packing in context.packings.items() if site.endswith(".hook_z"))
        self.layer_rows += n_early + n_outputs
        self.flops += (n_early + n_keys) * cost.keys + (n_queries + n_early * cost.has_state) * cost.mixing
        self.flops += (n_queries + n_from_z) * cost.output + n_outputs * cost.rest

    def add(self, other: "Cost") -> None:
        """Adds another cost, without its seconds."""
        self.forwards += other.forwards
        self.layer_rows += other.layer_rows
        self.flops += other.flops
