"""Low-rank adapters of a layer to weights that it shares with others (Zamba2, Glorioso et al. 2024, arXiv:2411.15242)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import PerHead, project
from hooked_lm.components.mlp import AbstractGatedMLP, GatedMLP, Stream, hooked_input
from hooked_lm.families.decoders.zamba.wide import WideAttention


class Adapter(nn.Module):
    """The weights of adapters, which belong to one layer although the weights around them are shared."""

    shares_weights = False


class HeadAdapter(Adapter):
    """`x W_down W_up`; `W_down` is [d_model, rank], `W_up` [head, rank, d_head]."""

    axes = {"W_down": "[d_model] rank", "W_up": "head [rank] d_head"}

    def __init__(self, cfg: WideAttention.Config, rank: int) -> None:
        super().__init__()
        self.W_down = nn.Parameter(torch.empty(rank, cfg.d_model).T)
        self.W_up = nn.Parameter(torch.empty(cfg.n_heads, cfg.d_head, rank).mT)

    def forward(self, x: Float[Tensor, "batch pos *head d_model"]) -> PerHead:
        return project(F.linear(x, self.W_down.T), self.W_up, None)


class AdaptedAttention(WideAttention):
    """`WideAttention` with an adapter of each projection: `q = x W_Q + x q_adapter`, likewise keys and values."""

    @dataclass(frozen=True)
    class Config(WideAttention.Config):
        rank: int = 1

        @property
        def n_adapter_weights(self) -> int:
            """The number of entries of the matrices of adapters."""
            return 3 * self.rank * (self.d_model + self.n_heads * self.d_head)

        def build(self) -> "AdaptedAttention":
            return AdaptedAttention(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        if cfg.n_kv != cfg.n_heads:
            raise ValueError(
                f"adapted attention has as many key/value heads as heads, not {cfg.n_kv} and {cfg.n_heads}"
            )
        self.q_adapter, self.k_adapter, self.v_adapter = (HeadAdapter(cfg, cfg.rank) for _ in range(3))

    def adapted(self, projected: PerHead, x: Tensor, W: Tensor) -> PerHead:
        """The projection of x by W, plus the output of its adapter."""
        return projected + self.adapter_of(W)(x)

    def adapter_of(self, W: Tensor) -> HeadAdapter:
        """The adapter of `W_Q`, `W_K` or `W_V`."""
        return self.q_adapter if W is self.W_Q else self.k_adapter if W is self.W_K else self.v_adapter


class MLPAdapter(Adapter):
    """`x W_down W_gate` and `x W_down W_in`; `W_down` is [d_model, rank], the others [rank, d_mlp]."""

    axes = {"W_down": "[d_model] rank", "W_gate": "[rank] d_mlp", "W_in": "[rank] d_mlp"}

    def __init__(self, cfg: GatedMLP.Config, rank: int) -> None:
        super().__init__()
        self.W_down = nn.Parameter(torch.empty(rank, cfg.d_model).T)
        self.W_gate, self.W_in = (nn.Parameter(torch.empty(cfg.d_mlp, rank).T) for _ in range(2))

    def forward(self, x: Stream) -> tuple[Float[Tensor, "*batch d_mlp"], Float[Tensor, "*batch d_mlp"]]:
        low = F.linear(x, self.W_down.T)
        return F.linear(low, self.W_gate.T), F.linear(low, self.W_in.T)


class AdaptedGatedMLP(AbstractGatedMLP):
    """`GatedMLP` with an adapter that adds to `hook_pre` and `hook_pre_linear`."""

    @dataclass(frozen=True)
    class Config(GatedMLP.Config):
        rank: int = 1

        @property
        def n_adapter_weights(self) -> int:
            """The number of entries of the matrices of the adapter."""
            return self.rank * (self.d_model + 2 * self.d_mlp)

        def build(self) -> "AdaptedGatedMLP":
            return AdaptedGatedMLP(self)

    cfg: Config

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        self.adapter = MLPAdapter(cfg, cfg.rank)

    def forward(self, x: Stream) -> Stream:
        x = hooked_input(self, x)
        to_gate, to_linear = self.adapter(x)
        gate = self.act_fn(self.hook_pre(F.linear(x, self.W_gate.T, self.b_gate) + to_gate))
        linear = self.hook_pre_linear(F.linear(x, self.W_in.T, self.b_in) + to_linear)
        return self.hook_out(F.linear(self.hook_post(gate * linear), self.W_out.T, self.b_out))
