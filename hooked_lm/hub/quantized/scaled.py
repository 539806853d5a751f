"""Numbers of 8 or 4 bits, each multiplied by the scale of its block, row, or matrix."""

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.hub.quantized.format import Format, Header, as_numbers, as_scales, look_up, spread
from hooked_lm.weights.shards import Headers

FP4_PAIRS = (torch.int8, torch.uint8)


class ScaledFloat8(Format):
    """`NAME` in 8-bit floating point, and `NAME_scale_inv`, a scale for each block (DeepSeek-AI 2024, arXiv:2412.19437).

    Integers hold two numbers of 4 bits each, as in the experts of DeepSeek-V4. Products are in float32, and rounded once.
    """

    parts, weight = ("_scale_inv", ""), ""

    def __init__(self, block: tuple[int, int] | None) -> None:
        self.block = block

    def header(self, raw: Headers, wanted: torch.dtype) -> Header:
        stored = self.parts[1]
        *rows, columns = raw.shape(stored)
        return (*rows, columns * (1 + (raw.dtype(stored) in FP4_PAIRS))), wanted

    def value(self, raw: Headers, wanted: torch.dtype) -> Float[Tensor, "..."]:
        scales, stored = (raw[name] for name in self.parts)
        _check_bits(stored)
        numbers = look_up(stored) if stored.dtype in FP4_PAIRS else as_numbers(stored, torch.float32)
        return numbers.mul_(spread(as_scales(scales), tuple(numbers.shape), self.block)).to(wanted)


class ScaledFloat8OfV4(ScaledFloat8):
    """The same with the names of DeepSeek-V4: `MODULE.weight` and `MODULE.scale`."""

    parts, weight = (".scale", ".weight"), ".weight"


class ScaledRows(Format):
    """`weight` of 8 bits, integers or not, and `weight_scale`, as in compressed-tensors and fbgemm.

    If they are not `symmetric`, there is a `weight_zero_point` too. Products are in the dtype of the scales.
    """

    parts: tuple[str, ...] = (".weight_scale", ".weight")

    def __init__(self, block: tuple[int, int] | None = None, symmetric: bool = True) -> None:
        self.block, self.symmetric = block, symmetric
        if not symmetric:
            self.parts = (*self.parts, ".weight_zero_point")

    def header(self, raw: Headers, wanted: torch.dtype) -> Header:
        return raw.shape(".weight"), raw.dtype(".weight_scale")

    def value(self, raw: Headers, wanted: torch.dtype) -> Float[Tensor, "..."]:
        stored, scales = raw[".weight"], raw[".weight_scale"]
        _check_bits(stored)
        numbers, shape = as_numbers(stored, scales.dtype), tuple(stored.shape)
        if not self.symmetric:
            numbers -= spread(raw[".weight_zero_point"].to(scales.dtype), shape, self.block)
        return numbers.mul_(spread(scales, shape, self.block))


class Mxfp4(Format):
    """MXFP4 (Rouhani et al. 2023, arXiv:2310.10537), as in gpt-oss: 4-bit numbers, and a power of two for each 32 of them.

    The weight [expert, in, out] is stored as `_blocks` [expert, out, block, 16], two numbers in a byte, and `_scales` without the
    last axis. Products are exact.
    """

    parts, weight = ("_blocks", "_scales"), ""

    def header(self, raw: Headers, wanted: torch.dtype) -> Header:
        n_experts, n_out, n_blocks, n_bytes = raw.shape("_blocks")
        return (n_experts, 2 * n_bytes * n_blocks, n_out), wanted

    def value(self, raw: Headers, wanted: torch.dtype) -> Float[Tensor, "expert in out"]:
        blocks, scales = raw["_blocks"], raw["_scales"]
        if blocks.shape[:-1] != scales.shape:
            raise ValueError(f"scales of shape {list(scales.shape)} do not fit blocks of shape {list(blocks.shape)}")
        weight = torch.empty(self.header(raw, wanted)[0], dtype=wanted, device=blocks.device)
        for expert, block, scale in zip(weight, blocks, scales, strict=True):  # all at once would take twice the memory
            expert.copy_((look_up(block) * as_scales(scale)[..., None]).flatten(1).T)
        return weight


def _check_bits(stored: Tensor) -> None:
    """Raises ValueError for numbers that need no scales."""
    if stored.itemsize != 1:
        raise ValueError(f"it has scales, but its numbers are {stored.dtype}, not of 8 bits")
