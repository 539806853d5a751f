"""Time mixing of RWKV-4 (Peng et al. 2023, arXiv:2305.13048): an average of all past values, weighted by keys and by age."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import RESIDUAL, upcast
from hooked_lm.components.ssm.convolution import Window
from hooked_lm.components.ssm.mixer import INNER, CachedMixer, Inner, Stream
from hooked_lm.components.ssm.scan import EditedStates, StateHistory, all_states, linear_scan, read_states
from hooked_lm.families.decoders.rwkv.token_shift import previous
from hooked_lm.hooks import HookPoint

NEVER = -1e30  # the logarithm of the weight of nothing; finite, so that differences of states are numbers

State = Float[Tensor, "batch d_inner 2"]
States = Float[Tensor, "batch pos d_inner 2"]
Real = Bool[Tensor, "batch pos"]


class WKV(CachedMixer):
    """In each channel y is the average of v at all tokens up to a position, with the weights `exp(k - age * exp(decay))`.

    The age of the token before is 0, and the weight of the token itself is `exp(k + bonus)`. The output is
    `(sigmoid(r) * y) W_out`. With the input x and that of the previous token p, `k = (mix_K x + (1 - mix_K) p) W_K`, and v and r
    likewise. `W_K`, `W_V` and `W_R` are [d_model, d_inner], `mix_K` and so on [d_model], `decay` and `bonus` [d_inner].

    Sites: `hook_prev`, the input of the previous token; `hook_k`, `hook_v`, `hook_r` before the sigmoid; on demand
    `hook_state`, after every position the average of v and the logarithm of the sum of its weights, as the next token sees
    them [d_inner, 2], whose edits change later states (see `scan.hooked_steps`); `hook_y`. The state and `hook_y` are in at
    least fp32.
    """

    axes = dict.fromkeys(("W_K", "W_V", "W_R"), "[d_model] d_inner")

    @dataclass(frozen=True)
    class Config:
        d_model: int
        d_inner: int

        @property
        def act_fn(self) -> str:
            """That of r."""
            return "sigmoid"

        @property
        def n_weights(self) -> int:
            """The number of entries of its matrices."""
            return 4 * self.d_model * self.d_inner

        def build(self) -> "WKV":
            return WKV(self)

    cfg: Config
    b_out = None

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        for name in "KVR":
            self.register_parameter(f"mix_{name}", nn.Parameter(torch.full((cfg.d_model,), 0.5)))
            self.register_parameter(f"W_{name}", nn.Parameter(torch.empty(cfg.d_inner, cfg.d_model).T))
        self.decay = nn.Parameter(torch.linspace(-5.0, 3.0, cfg.d_inner))
        self.bonus = nn.Parameter(torch.zeros(cfg.d_inner))
        self.W_out = nn.Parameter(torch.empty(cfg.d_model, cfg.d_inner).T)

        self.hook_in, self.hook_prev = HookPoint(*RESIDUAL, on_demand=True), HookPoint(*RESIDUAL)
        self.hook_k, self.hook_v, self.hook_r = HookPoint(*INNER), HookPoint(*INNER), HookPoint(*INNER)
        self.hook_state = HookPoint(*INNER, "2", on_demand=True)
        self.hook_y = HookPoint(*INNER)
        self.hook_out = HookPoint(*RESIDUAL, on_demand=True)

    def mixed(
        self, stream: Stream, context: Context, window: Window | None, state: State | None
    ) -> tuple[Stream, Window, State]:
        real = context.new_real()
        before, window = previous(stream, window, real)
        before = self.hook_prev(before)
        points = (("K", self.hook_k), ("V", self.hook_v), ("R", self.hook_r))
        k, v, r = (point(self.projected(stream, before, name)) for name, point in points)
        y, state = self.averages(upcast(k), upcast(v), state, real)
        return self.output(self.hook_y(y), r), window, state

    def projected(self, x: Stream, before: Stream, name: str) -> Inner:
        """k, v or r, from the inputs of each token and of the one before it."""
        share = getattr(self, f"mix_{name}")
        return F.linear(x * share + before * (1 - share), getattr(self, f"W_{name}").T)

    def output(self, y: Inner, r: Inner) -> Stream:
        """Gates the averages and projects them into the stream."""
        return F.linear((upcast(r).sigmoid() * y).to(r.dtype), self.W_out.T)

    # ---- the average -------------------------------------------------------------------------------------------------

    def averages(self, k: Inner, v: Inner, start: State | None, real: Real | None = None) -> tuple[Inner, State]:
        """y at every position and the last state; padding does not change the state."""
        if start is None:
            start = torch.stack([torch.zeros_like(k[:, 0]), torch.full_like(k[:, 0], NEVER)], -1)

        def read(states: States) -> Inner:
            return self.read(torch.cat([start[:, None], states[:, :-1]], 1), k, v)

        return read_states(
            self.hook_state,
            k.shape[1],
            lambda edits: self.states(k, v, start, real, edits),
            read,
            lambda: self.in_parallel(k, v, start, real),
        )

    def states(
        self, k: Inner, v: Inner, start: State, real: Real | None = None, edits: EditedStates | None = None
    ) -> StateHistory:
        """The state after every position, one position at a time; see `scan.all_states` for edits."""
        rate = upcast(self.decay).exp()

        def step(pos: int, state: State) -> State:
            mean, weight = state.unbind(-1)
            total = torch.logaddexp(weight - rate, k[:, pos])
            mean = mean * (weight - rate - total).exp() + v[:, pos] * (k[:, pos] - total).exp()
            after = torch.stack([mean, total], -1)
            return after if real is None else torch.where(real[:, pos, None, None], after, state)

        return all_states(step, start, k.shape[1], edits)

    def read(self, before: States, k: Inner, v: Inner) -> Inner:
        """y at every position, from the state before it."""
        mean, weight = before.unbind(-1)
        own = k + upcast(self.bonus)
        share = (own - weight).sigmoid()
        return mean * (1 - share) + v * share

    def in_parallel(self, k: Inner, v: Inner, start: State, real: Real | None = None) -> tuple[Inner, State]:
        """The results of `states` and `read`, by a scan of weighted sums and sums of weights.

        Both are kept divided by `exp(size)`, where size is about the logarithm of the largest weight: any will do that keeps
        the numbers in range.
        """
        rate, mean, weight = upcast(self.decay).exp(), *start.unbind(-1)
        is_real = torch.ones_like(k[:, :1, :1]) if real is None else real[..., None].to(k)
        ages = rate.detach() * is_real.expand(-1, k.shape[1], -1).cumsum(1)
        seen = k if real is None else k.masked_fill(~real[..., None], NEVER)
        size = torch.cat([weight[:, None], seen + ages], 1).detach().cummax(1).values
        size = torch.cat([size[:, :1], size[:, 1:] - ages], 1)
        decay = (size[:, :-1] - rate * is_real - size[:, 1:]).exp()
        entering = (seen - size[:, 1:]).exp() * is_real
        known = (weight - weight.detach()).exp() * (weight > NEVER / 2)  # 1, with the gradient of the weight
        first = torch.stack([mean, torch.ones_like(mean)], -1) * known[..., None]
        sums = linear_scan(decay[..., None], torch.stack([entering * v, entering], -1), first)

        earlier = torch.cat([first[:, None], sums[:, :-1]], 1)
        own = k + upcast(self.bonus)
        top = torch.maximum(size[:, :-1], own).detach()
        past, now = (size[:, :-1] - top).exp(), (own - top).exp()
        y = (earlier[..., 0] * past + v * now) / (earlier[..., 1] * past + now)
        total, weights = sums[:, -1].unbind(-1)
        last = torch.stack([total / weights.clamp(min=1e-30), size[:, -1] + weights.clamp(min=1e-30).log()], -1)
        return y, torch.where((weights > 0)[..., None], last, start)
