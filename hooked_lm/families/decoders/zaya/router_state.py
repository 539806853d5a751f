"""A mixture of experts whose router reads the router of the layer before, and may skip all experts (ZAYA1, Anthony et al. 2025,
arXiv:2511.17127)."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.blocks.block import Copies
from hooked_lm.components.blocks.weighted import WeightedResidualBlock
from hooked_lm.components.blocks.wiring import Wiring
from hooked_lm.components.context import Context
from hooked_lm.components.experts.moe import AbstractMoE, MoE, Stream
from hooked_lm.components.mlp import hooked_input
from hooked_lm.components.norms.norm import RMSNorm, upcast
from hooked_lm.hooks import HookPoint, hook_if_listening

STATE = ("batch", "pos", "d_router")
NAME = "router state"

State = Float[Tensor, "batch pos d_router"]


class RouterStateMoE(AbstractMoE):
    """The router has a state `h = x W_down + b_down + prev * w_prev`, where prev is the state of the layer before, and the logits
    `gelu(gelu(norm(h) W_1 + b_1) W_2 + b_2) W_router`. After the experts it has `n_skip` choices without an output.

    `W_down` is [d_model, d_router], `W_1` and `W_2` are [d_router, d_router], `W_router` is [d_router, choice].

    Sites: `hook_prev_state` and `hook_router_state`; edits of the state reach the routers of later layers.
    """

    axes = {
        "W_down": "[d_model] d_router; it is part of the router",
        "W_1": "[d_router] d_router; it is part of the router",
        "W_2": "[d_router] d_router; it is part of the router",
        "W_router": "[d_router] choice",
    }

    @dataclass(frozen=True)
    class Config(MoE.Config):
        """Without `reads_previous` the state is that of this layer alone: in the first layer."""

        d_router: int = field(kw_only=True)
        eps: float = field(kw_only=True)
        reads_previous: bool = True
        n_skip: int = 1

        @property
        def n_choices(self) -> int:
            """The number of choices of the router."""
            return self.n_experts + self.n_skip

        def build(self) -> "RouterStateMoE":
            return RouterStateMoE(self)

    cfg: Config
    W_1: Tensor
    W_2: Tensor
    b_1: Tensor
    b_2: Tensor

    def __init__(self, cfg: Config) -> None:
        if cfg.router_bias or cfg.out_bias or cfg.out_scale != 1 or cfg.n_identity or cfg.shared is not None:
            raise ValueError(
                "a RouterStateMoE has no router_bias, out_bias, out_scale, n_identity or shared expert; "
                f"got {cfg.router_bias}, {cfg.out_bias}, {cfg.out_scale}, {cfg.n_identity}, {cfg.shared}"
            )
        super().__init__(cfg)
        d, parts = cfg.d_router, dict(self._modules)
        self._modules.clear()  # sites are listed in the order of computation
        self._modules["hook_in"] = parts.pop("hook_in")
        self.W_down, self.b_down = nn.Parameter(torch.empty(d, cfg.d_model).T), nn.Parameter(torch.zeros(d))
        if cfg.reads_previous:
            self.w_prev = nn.Parameter(torch.ones(d))
            self.hook_prev_state = HookPoint(*STATE)
        self.hook_router_state = HookPoint(*STATE)
        self.router_ln = RMSNorm.Config(d, cfg.eps).build(STATE)
        for name in ("1", "2"):
            self.register_parameter(f"W_{name}", nn.Parameter(torch.empty(d, d).T))
            self.register_parameter(f"b_{name}", nn.Parameter(torch.zeros(d)))
        self.W_router = nn.Parameter(torch.empty(cfg.n_choices, d).T)
        self._modules.update(parts)

    def forward(self, x: Stream, context: Context | None = None, layer: int = 0) -> Stream:
        """`layer` is the index of this layer: its state is kept in the context, and that of the layer before is read."""
        x = hooked_input(self, x)
        state = self.hook_router_state(self.state(x, self._previous(context, layer)))
        if context is not None:
            context.keep_rows(NAME, layer, state)
        weights, indices = self.choice(self.hook_router_logits(self.logits(self.router_ln(state))))
        weights, indices = self.hook_expert_weights(weights.to(x.dtype)), self.hook_expert_indices(indices)
        return self.hook_out(self.mix(x, weights, indices))

    def _previous(self, context: Context | None, layer: int) -> State | None:
        """The state of the layer before; ValueError if that did not run."""
        if not self.cfg.reads_previous:
            return None
        try:
            found = None if context is None else context.rows_of(NAME, layer - 1)
        except KeyError:
            found = None
        if found is None:
            raise ValueError(
                f"the router of layer {layer} reads the state of that of layer {layer - 1}, which did not run; "
                f"start at layer 0"
            )
        return self.hook_prev_state(found)

    def state(self, x: Stream, previous: State | None) -> State:
        """The state of this layer, from that of the layer before."""
        own = F.linear(x, self.W_down.T, self.b_down)
        return own if previous is None else own + previous * self.w_prev

    def logits(self, normed: State) -> Float[Tensor, "batch pos expert"]:
        """The logits of a state after its norm, in at least fp32."""
        hidden = F.gelu(F.linear(normed, self.W_1.T, self.b_1))
        hidden = F.gelu(F.linear(hidden, self.W_2.T, self.b_2))
        return F.linear(upcast(hidden), upcast(self.W_router).T)


class RouterStateBlock(WeightedResidualBlock):
    """The same with experts whose router reads that of the layer before (see `RouterStateMoE`).

    The stream may have a higher precision than the weights: the outputs of its norms are cast.
    """

    axes = dict.fromkeys(("b_attn", "b_mlp"), "d_model")

    @dataclass(frozen=True)
    class Config(WeightedResidualBlock.Config):
        mlp: RouterStateMoE.Config = field(kw_only=True)

        def build(self, layer: int) -> "RouterStateBlock":
            return RouterStateBlock(self, layer)

    cfg: Config

    def forward(self, resid: Stream, context: Context | None = None) -> Stream:
        context = context or Context(resid.shape[1], resid.device)
        resid = self.hook_resid_pre(resid)
        resid = self.hook_resid_mid(self.weighted("attn", resid) + self.attn_out(resid, context))
        return self.hook_resid_post(self.weighted("mlp", resid) + self.routed_out(resid, context))

    def wiring(self) -> Wiring:
        return replace(super().wiring(), by_hand="experts read the router of the layer before")

    def routed_out(self, resid: Stream, context: Context) -> Stream:
        """The output of the experts to the stream."""
        normalized = self.ln2(hook_if_listening(self.hook_mlp_in, resid)).to(self.w_mlp.dtype)
        return self.apply_mlp(normalized, context, self.layer)

    def attn_norm(self, copies: Copies, at_sites: bool = True) -> Copies:
        """The input of attention, for the stream or copies of it, in the dtype of its weights."""
        return super().attn_norm(copies, at_sites).to(self.w_attn.dtype)
