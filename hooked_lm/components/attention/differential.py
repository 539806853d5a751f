"""Differential attention (Ye et al. 2024, arXiv:2410.05258): the pattern of one head is subtracted from that of another."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import QUERY, Attention, Keys, Mixed, PerHead, Stream, Values
from hooked_lm.components.context import Context
from hooked_lm.components.norms.norm import Norm, norm_of, root_mean_square, upcast
from hooked_lm.hooks import HookPoint, is_listening

WIDE = (*QUERY[:-1], "d_value")
LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


class DifferenceNorm(Norm):
    """`z / scale * factor` of each head, where scale is the root mean square of the difference `z_1 - lam z_2` of its pair.

    The factor of the first head of a pair is `1 - lam_init`, that of the second `-lam (1 - lam_init)`: the sum over the pair is
    the normalised difference. `lam` is `exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lam_init`, of weights [d_head].
    """

    kind = "RMS"

    @dataclass(frozen=True)
    class Config(Norm.Config):
        weight: bool = False
        lam_init: float = 0.8

        def build(self, dims: tuple[str, ...] = WIDE) -> "DifferenceNorm":
            return DifferenceNorm(self)

    cfg: Config
    lambda_q1: Tensor
    lambda_k1: Tensor
    lambda_q2: Tensor
    lambda_k2: Tensor

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.cfg = cfg
        for name in LAMBDAS:
            self.register_parameter(name, nn.Parameter(torch.zeros(cfg.d_model // 2)))
        self.hook_scale, self.hook_normalized = HookPoint(*WIDE[:-1], "1"), HookPoint(*WIDE)

    def lam(self) -> Float[Tensor, ""]:
        """The factor of the second head of each pair, in at least fp32."""
        q1, k1, q2, k2 = (upcast(getattr(self, name)) for name in LAMBDAS)
        return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.cfg.lam_init

    def difference(self, z: Float[Tensor, "*batch head d_value"]) -> Float[Tensor, "*batch pair d_value"]:
        """`z_1 - lam z_2` of each pair, in at least fp32."""
        first, second = upcast(z).chunk(2, -2)
        return first - self.lam() * second

    def forward(self, x: Float[Tensor, "*batch head d_value"]) -> Float[Tensor, "*batch head d_value"]:
        scale = self.hook_scale(self.scale(x))
        return self.apply_weights(self.hook_normalized((upcast(x) / scale).to(x.dtype)))

    def scale(self, z: Float[Tensor, "*batch head d_value"]) -> Float[Tensor, "*batch head 1"]:
        """The divisor of each head: that of its pair."""
        of_pair = root_mean_square(self.difference(z), self.cfg.eps)
        return torch.cat([of_pair, of_pair], -2)

    def unhooked(self, x: Float[Tensor, "*batch head d_value"]) -> Float[Tensor, "*batch head d_value"]:
        """The same output without the hook points."""
        return self.apply_weights((upcast(x) / self.scale(x)).to(x.dtype))

    def apply_weights(self, normalized: Float[Tensor, "*batch head d_value"]) -> Float[Tensor, "*batch head d_value"]:
        """The output for a normalised value."""
        signs = torch.stack([self.lam().new_ones(()), -self.lam()]) * (1 - self.cfg.lam_init)
        return (upcast(normalized) * signs.repeat_interleave(normalized.shape[-2] // 2)[:, None]).to(normalized.dtype)

    def normalized_difference(self, z: Mixed) -> Float[Tensor, "batch pos pair d_value"]:
        """The sum of the outputs of each pair, by one fused kernel."""
        normed = F.rms_norm(self.difference(z), (self.cfg.d_model,), eps=self.cfg.eps)
        return (normed * (1 - self.cfg.lam_init)).to(z.dtype)


class DifferentialAttention(Attention):
    """`out = sum over pairs of norm(z_1 - lam z_2) W_O_pair`, where head i and head i + n_heads/2 are a pair.

    The heads of a pair have the same values, twice as wide as a key: `[v_j, v_(j + n_kv/2)]`. `W_O_pair` is
    [pair, d_value, d_model]; `W_O` repeats it for each head, [head, d_value, d_model], and cannot be changed in place.

    `hook_v` is as in other attention; `hook_z` has the values that each head mixes by its own pattern, [head, d_value]. `z_norm`
    divides them by the size of their pair's difference and multiplies those of second heads by `-lam` (see `DifferenceNorm`).
    So `hook_result` is what each head adds to the stream, and their sum is the output.
    """

    axes = {"W_O_pair": "[pair d_pair] d_model"}

    mixes_heads = True

    @dataclass(frozen=True)
    class Config(Attention.Config):
        """`z_norm` must be a `DifferenceNorm`, of vectors twice as wide as a head."""

        def build(self) -> "DifferentialAttention":
            return DifferentialAttention(self)

    W_O_pair: Tensor

    def __init__(self, cfg: Config) -> None:
        d_value = 2 * cfg.d_head
        if cfg.n_kv % 2:
            raise ValueError(f"differential attention needs an even number of key/value heads, not {cfg.n_kv}")
        if not isinstance(cfg.z_norm, DifferenceNorm.Config) or cfg.z_norm.d_model != d_value:
            raise ValueError(f"z_norm must be a DifferenceNorm of {d_value} features, not {cfg.z_norm}")
        super().__init__(cfg)
        del self._parameters["W_O"]
        self.W_O_pair = nn.Parameter(torch.empty(cfg.n_heads // 2, d_value, cfg.d_model))
        self.hook_z = HookPoint(*WIDE)

    @property
    def W_O(self) -> Float[Tensor, "head d_value d_model"]:  # type: ignore[override]
        """The output weight of each head: that of its pair."""
        return torch.cat([self.W_O_pair, self.W_O_pair])

    def paired(self, v: Keys) -> Values:
        """The values of both heads of each pair, from those of the key/value heads."""
        wide = torch.cat(v.chunk(2, 2), -1)
        return torch.cat([wide, wide], 2)

    def attended(self, q: PerHead, k: Keys, v: Keys, context: Context) -> tuple[Keys, Values, Context]:
        """The keys, and the values of both heads of each pair."""
        return k, self.paired(v), context

    def fused_output(self, z: Mixed) -> Stream | None:
        """The output by differences of pairs, unless something listens."""
        norm = norm_of(self, "z_norm")
        listened = isinstance(norm, DifferenceNorm) and is_listening(
            norm.hook_scale, norm.hook_normalized, self.hook_result
        )
        if not isinstance(norm, DifferenceNorm) or listened or not self.settings.fused:
            return None
        return F.linear(norm.normalized_difference(z).flatten(2), self.W_O_pair.flatten(0, 1).T, self.b_O)
