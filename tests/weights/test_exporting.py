"""Export: bit for bit, by the rows that loaded the model."""

import pytest
import torch
from torch import nn

from hooked_lm.weights import Row, export, load
from tests.weights.small import Model, rows, same, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_load_then_export_returns_every_bit(dtype):
    model, source = Model(), tensors(dtype)
    source["t.wte.weight"][0, :2] = torch.tensor([float("nan"), -0.0])
    load(model, source, rows())
    assert model.W_E.dtype == dtype
    assert model.W_E.device.type == "cpu"
    back = export(model, rows())
    assert back.keys() == source.keys()
    for name in source:
        assert torch.equal(back[name].view(torch.uint8), source[name].view(torch.uint8)), name
    assert torch.equal(export(model, rows(), write_tied=True)["lm_head.weight"][1:], source["t.wte.weight"][1:])


def test_a_wrong_row_exports_bit_for_bit_but_loads_other_weights():
    source, right, wrong = tensors(), Model(), Model()
    twisted = [
        Row(
            r.source,
            r.target,
            r.pattern and r.pattern.replace("(qkv n h)", "(n qkv h)"),
            take=r.take,
            tied=r.tied,
            **r.axes,
        )
        for r in rows()
    ]
    load(right, source, rows())
    load(wrong, source, twisted)
    assert same(export(wrong, twisted), source)
    assert not torch.equal(right.blocks[0].W_Q, wrong.blocks[0].W_Q)


def test_export_refuses_parts_of_different_dtypes():
    model = Model()
    load(model, tensors(), rows())
    model.blocks[0].W_K = nn.Parameter(model.blocks[0].W_K.double())
    with pytest.raises(ValueError, match=r"'t.h.0.qkv' have different dtypes"):
        export(model, rows())
