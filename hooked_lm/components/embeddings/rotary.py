"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), without weights: layers with equal ones share its angles."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.constants import constant
from hooked_lm.components.embeddings.adjacent_pairs import rotated_pairs
from hooked_lm.components.norms.norm import upcast

Frequencies = Float[Tensor, " half"]


@runtime_checkable
class Scaling(Protocol):
    """A way to stretch a rotary embedding over longer contexts; see `rotary_scaling`."""

    def __call__(self, rotary: "Rotary", n_pos: int) -> tuple[Frequencies, float]:
        """The frequencies for a context of `n_pos`, and the factor of queries and keys."""

    def length(self, n_pos: int) -> int:
        """A length with the same frequencies as `n_pos`: one number for all that have the same."""


@dataclass(frozen=True)
class Rotary:
    """Rotates pairs of the first `dim` features of a head by an angle proportional to the position.

    A pair is feature i and i + dim/2, or with `adjacent_pairs` 2i and 2i + 1. `theta` is the base of the wavelengths.
    """

    dim: int
    theta: float = 10000.0
    adjacent_pairs: bool = False
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.dim % 2:
            raise ValueError(f"rotary_dim must be even, as rotary embeddings rotate pairs of features; got {self.dim}")

    def base_frequencies(self, theta: float | None = None) -> Frequencies:
        """Radians per position of each pair, before any scaling."""
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        return self.by_pair(1.0 / ((self.theta if theta is None else theta) ** exponents))

    def by_pair(self, frequencies: Frequencies) -> Frequencies:
        """The frequency of each pair, from a geometric sequence of as many."""
        return frequencies

    def angles(
        self, positions: Int[Tensor, "batch pos"], n_pos: int
    ) -> tuple[Float[Tensor, "batch pos 1 width"], Float[Tensor, "batch pos 1 width"]]:
        """Cosine and sine of every position, in fp32, as `rotate` takes them; scalings depend on the length `n_pos`."""
        length = 0 if self.scaling is None else self.scaling.length(n_pos)
        pairs, temperature = (
            self.frequencies(length) if positions.is_cpu else constant(positions, self.frequencies, length)
        )
        return self.cos_sin(positions[..., None, None].float() * pairs, temperature)

    def frequencies(self, n_pos: int) -> tuple[Frequencies, float]:
        """The frequencies for a context of `n_pos`, and the factor of queries and keys."""
        return (self.base_frequencies(), 1.0) if self.scaling is None else self.scaling(self, n_pos)

    def cos_sin(
        self, angle: Float[Tensor, "batch pos 1 half"], temperature: float = 1.0
    ) -> tuple[Float[Tensor, "batch pos 1 width"], Float[Tensor, "batch pos 1 width"]]:
        """Cosine and sine as `rotate` takes them: one number for each adjacent pair, else one for each feature, where the
        sines of the first half are negative."""
        cos, sin = angle.cos() * temperature, angle.sin() * temperature
        return (cos, sin) if self.adjacent_pairs else (torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))

    def rotate(
        self,
        x: Float[Tensor, "batch pos head d_head"],
        angles: tuple[Float[Tensor, "#batch pos 1 width"], Float[Tensor, "#batch pos 1 width"]],
    ) -> Float[Tensor, "batch pos head d_head"]:
        """The rotated vectors; features after the first `dim` stay as they are."""
        if self.dim < x.shape[-1]:
            return torch.cat([self.rotate(x[..., : self.dim], angles), x[..., self.dim :]], -1)
        if self.adjacent_pairs:
            return rotated_pairs(upcast(x), *angles).flatten(-2).to(x.dtype)
        rotated, (cos, sin) = self.precise(x), angles
        rotated = (rotated * cos.to(rotated.dtype)).addcmul_(rotated.roll(self.dim // 2, -1), sin.to(rotated.dtype))
        return rotated.to(x.dtype)

    def precise(self, x: Tensor) -> Tensor:
        """The vectors in the precision of the rotation: their own."""
        return x
