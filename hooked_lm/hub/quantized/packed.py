"""Integers of a few bits, packed into words of 32: AWQ, GPTQ, and "pack-quantized" of compressed-tensors.

A weight is (number - zero) * scale, with a zero and a scale for each output and group of inputs, in the dtype of the scales.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.hub.quantized.format import Format, Header, spread, unpack
from hooked_lm.weights.shards import Headers

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which of the eight numbers of a word belongs to an output


class AWQ(Format):
    """AWQ (Lin et al. 2023, arXiv:2306.00978) in the layout "gemm": `qweight` [in, out / 8], with outputs in the order of AWQ."""

    parts, transposed = (".qweight", ".scales", ".qzeros"), True

    def header(self, raw: Headers, wanted: torch.dtype) -> Header:
        n_in, n_words = raw.shape(".qweight")
        return (8 * n_words, n_in), raw.dtype(".scales")

    def value(self, raw: Headers, wanted: torch.dtype) -> Float[Tensor, "out in"]:
        numbers, zeros = (
            unpack(raw[name], 4).unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2) for name in (".qweight", ".qzeros")
        )
        shape, scales = tuple(numbers.shape), raw[".scales"]
        return ((numbers.to(scales.dtype) - spread(zeros, shape)) * spread(scales, shape)).T


class GPTQ(Format):
    """GPTQ (Frantar et al. 2022, arXiv:2210.17323): `qweight` [in / n, out], `qzeros` [group, out / n] and `scales` [group, out].

    `g_idx` has the group of each input. What is stored of a zero is `less` than it: 1 in the first version of the format, else 0.
    """

    parts = (".qweight", ".scales", ".qzeros", ".g_idx")

    def __init__(self, bits: int, less: int) -> None:
        self.bits, self.less = bits, less

    def header(self, raw: Headers, wanted: torch.dtype) -> Header:
        return (raw.shape(".qweight")[1], raw.shape(".g_idx")[0]), raw.dtype(".scales")

    def value(self, raw: Headers, wanted: torch.dtype) -> Float[Tensor, "out in"]:
        numbers, groups, scales = unpack(raw[".qweight"].T, self.bits), raw[".g_idx"].int(), raw[".scales"]
        if numbers.shape[1] != len(groups):
            raise ValueError(f"{list(raw['.qweight'].shape)} words of {self.bits} bits are not of {len(groups)} inputs")
        zeros = unpack(raw[".qzeros"], self.bits).to(scales.dtype) + self.less
        return (numbers.to(scales.dtype) - zeros[groups].T) * scales[groups].T


class PackedRows(Format):
    """`weight_packed` [out, in / n] of compressed-tensors, `weight_scale` [out, group], `weight_zero_point` [out / n, group].

    If they are `symmetric`, each zero is half of the range, and none is stored. `weight_shape` shows how many bits a number has.
    """

    parts: tuple[str, ...] = (".weight_packed", ".weight_scale", ".weight_shape")

    def __init__(self, symmetric: bool) -> None:
        self.symmetric = symmetric
        if not symmetric:
            self.parts = (*self.parts, ".weight_zero_point")

    def header(self, raw: Headers, wanted: torch.dtype) -> Header:
        return tuple(raw[".weight_shape"].tolist()), raw.dtype(".weight_scale")

    def value(self, raw: Headers, wanted: torch.dtype) -> Float[Tensor, "out in"]:
        (n_out, n_in), words, scales = raw[".weight_shape"].tolist(), raw[".weight_packed"], raw[".weight_scale"]
        bits, rest = divmod(32 * words.shape[1], n_in)
        if rest or bits not in (2, 4, 8):
            raise ValueError(f"{list(words.shape)} words hold no {n_out} x {n_in} numbers of 2, 4 or 8 bits")
        numbers, shape = unpack(words, bits).to(scales.dtype), (n_out, n_in)
        if self.symmetric:
            return (numbers - 2 ** (bits - 1)) * spread(scales, shape)
        zeros = unpack(raw[".weight_zero_point"].T, bits)[:, :n_out].T
        return (numbers - spread(zeros, shape)) * spread(scales, shape)
