"""bitsandbytes: 4-bit numbers by a table (NF4, Dettmers et al. 2023, arXiv:2305.14314), and LLM.int8() (arXiv:2208.07339).

A 4-bit weight is a list of bytes, each of which holds two places in a table, the higher bits first. A number is the entry of the
table times the largest magnitude of its block. With double quantisation the magnitudes are places in a table too, with blocks of
their own.
"""

import json
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from hooked_lm.hub.quantized.format import Format, Header, look_up
from hooked_lm.weights.shards import Headers

STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
STEP = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it


class FourBits(Format):
    """A weight `NAME` of 4-bit numbers. NF4 and FP4 differ in the table, which is in the file.

    Products are in float32, and rounded to the dtype that the weight had before.
    """

    parts, more, weight = (".absmax", "", ".quant_map"), (".nested_absmax", ".nested_quant_map", *STATES), ""

    def header(self, raw: Headers, wanted: torch.dtype) -> Header:
        state = _state(raw)
        return tuple(state["shape"]), getattr(torch, state["dtype"])

    def value(self, raw: Headers, wanted: torch.dtype) -> Float[Tensor, "..."]:
        state, magnitudes = _state(raw), raw[".absmax"]
        if "nested_offset" in state:
            nested = raw[".nested_quant_map"].float()[magnitudes.int()]
            magnitudes = (
                _times_blocks(nested, raw[".nested_absmax"], state["nested_blocksize"]) + state["nested_offset"]
            )
        numbers = look_up(raw[""].reshape(-1), raw[".quant_map"].float(), low_first=False)
        weight = _times_blocks(numbers[: prod(state["shape"])], magnitudes.float(), state["blocksize"])
        return weight.view(state["shape"]).to(getattr(torch, state["dtype"]))


class Int8Rows(Format):
    """`weight` of 8-bit integers, and `SCB`, the largest magnitude of each row."""

    parts, more = (".SCB", ".weight"), (".weight_format",)

    def header(self, raw: Headers, wanted: torch.dtype) -> Header:
        return raw.shape(".weight"), wanted

    def value(self, raw: Headers, wanted: torch.dtype) -> Float[Tensor, "out in"]:
        if ".weight_format" in raw and (order := raw[".weight_format"].item()) != 0:
            raise ValueError(f"its weight_format is {order}, an order for one kind of GPU; only 0, by rows, is read")
        return (raw[".weight"] * raw[".SCB"].float().view(-1, 1) * STEP).to(wanted)


def _state(raw: Headers) -> dict[str, Any]:
    """What the file says of a 4-bit weight, as JSON in bytes: its shape, dtype and sizes of blocks."""
    found = [name for name in STATES if name in raw]
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} of the tensors {' and '.join(STATES)}, and needs one")
    state = json.loads(bytes(raw[found[0]].tolist()))
    assert isinstance(state, dict)
    return state


def _times_blocks(numbers: Float[Tensor, " n"], scales: Shaped[Tensor, " blocks"], size: int) -> Float[Tensor, " n"]:
    """Each number times the scale of its block; the last block may be shorter."""
    return numbers * scales.repeat_interleave(size)[: len(numbers)]
