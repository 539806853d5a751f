"""Ways to stretch rotary position embeddings over longer contexts."""

import math
from dataclasses import dataclass

import torch

from hooked_lm.components.embeddings.rotary import Frequencies, Rotary, Scaling


class AnyLength:
    """A scaling with the same frequencies for texts of all lengths."""

    def length(self, n_pos: int) -> int:
        """A length with the same frequencies as `n_pos`."""
        return 0


@dataclass(frozen=True)
class LinearScaling(AnyLength):
    """Positions divided by a factor (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float

    def __call__(self, rotary: Rotary, n_pos: int) -> tuple[Frequencies, float]:
        return rotary.base_frequencies() / self.factor, 1.0


@dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with the length of the input once it is past the trained one ("dynamic NTK").

    Past it a key/value cache has keys with the angles of the lengths at which they were made, in transformers too: generation
    with a cache and without one differ.
    """

    factor: float
    trained_n_ctx: int

    def __call__(self, rotary: Rotary, n_pos: int) -> tuple[Frequencies, float]:
        stretch = self.factor * max(n_pos, self.trained_n_ctx) / self.trained_n_ctx - (self.factor - 1)
        return rotary.base_frequencies(rotary.theta * stretch ** (rotary.dim / (rotary.dim - 2))), 1.0

    def length(self, n_pos: int) -> int:
        """A length with the same frequencies as `n_pos`: all up to the trained one have the same."""
        return max(n_pos, self.trained_n_ctx)


@dataclass(frozen=True)
class Llama3Scaling(AnyLength):
    """Low frequencies divided by a factor, high ones kept, a ramp between (Dubey et al. 2024, arXiv:2407.21783)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_n_ctx: int

    def __call__(self, rotary: Rotary, n_pos: int) -> tuple[Frequencies, float]:
        base = rotary.base_frequencies()
        turns = self.trained_n_ctx * base / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return base * (kept + (1 - kept) / self.factor), 1.0


@dataclass(frozen=True)
class YarnScaling(AnyLength):
    """Interpolation by parts, and a temperature on the scores (Peng et al. 2023, arXiv:2309.00071)."""

    factor: float
    trained_n_ctx: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __call__(self, rotary: Rotary, n_pos: int) -> tuple[Frequencies, float]:
        low, high = self._pair_index(rotary, self.beta_fast), self._pair_index(rotary, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary.dim - 1)
        ramp = (torch.arange(rotary.dim // 2, dtype=torch.float32) - low) / ((high - low) or 1e-3)
        kept = 1 - ramp.clamp(0, 1)
        base = rotary.base_frequencies()
        return base * (kept + (1 - kept) / self.factor), self._temperature()

    def _pair_index(self, rotary: Rotary, turns: float) -> float:
        """The (fractional) index of the pair that makes this many rotations over the trained context."""
        return rotary.dim * math.log(self.trained_n_ctx / (turns * 2 * math.pi)) / (2 * math.log(rotary.theta))

    def temperature(self, weight: float = 1.0) -> float:
        """The factor by which queries and keys are multiplied."""
        return 1.0 if self.factor <= 1 else 0.1 * weight * math.log(self.factor) + 1.0

    def _temperature(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)
        return self.temperature()


@dataclass(frozen=True)
class LongRopeScaling:
    """A searched factor per frequency, with one set up to the trained length and one beyond it (Ding et al. 2024,
    arXiv:2402.13753). Beyond it the attention factor may be another one, too: `long_attention_factor`."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    trained_n_ctx: int
    attention_factor: float
    long_attention_factor: float | None = None  # None: `attention_factor`

    def __call__(self, rotary: Rotary, n_pos: int) -> tuple[Frequencies, float]:
        is_long = n_pos > self.trained_n_ctx
        factors = torch.tensor(self.long_factor if is_long else self.short_factor)
        long = self.attention_factor if self.long_attention_factor is None else self.long_attention_factor
        return rotary.base_frequencies() / factors, long if is_long else self.attention_factor

    def length(self, n_pos: int) -> int:
        """A length with the same frequencies as `n_pos`: there are those of short and of long texts."""
        return self.trained_n_ctx + (n_pos > self.trained_n_ctx)


@dataclass(frozen=True)
class ProportionalScaling(AnyLength):
    """Rotates only the fastest `share` of the pairs, with positions divided by a factor ("p-RoPE", Barbero et al. 2024,
    arXiv:2410.06205)."""

    share: float
    factor: float = 1.0

    def __call__(self, rotary: Rotary, n_pos: int) -> tuple[Frequencies, float]:
        base, n_rotated = rotary.base_frequencies(), int(self.share * rotary.dim // 2)
        return torch.where(torch.arange(len(base)) < n_rotated, base, 0.0) / self.factor, 1.0


@dataclass(frozen=True)
class Backward:
    """The reverse direction: every pair is rotated by the negative of its angle, which `scaling` may change."""

    scaling: Scaling | None = None

    def __call__(self, rotary: Rotary, n_pos: int) -> tuple[Frequencies, float]:
        if self.scaling is None:
            return -rotary.base_frequencies(), 1.0
        frequencies, temperature = self.scaling(rotary, n_pos)
        return -frequencies, temperature

    def length(self, n_pos: int) -> int:
        """A length with the same frequencies as `n_pos`."""
        return 0 if self.scaling is None else self.scaling.length(n_pos)
