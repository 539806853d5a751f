"""Parameters that are views of one tensor: optimiser steps, copies, saved files, and `compact`."""

import copy
import io
import pickle

import torch
from torch import nn

from hooked_lm.weights import Row, compact, compact_model, expand, load
from tests.weights.small import Model, N, rows, same, tensors


def test_an_optimiser_step_writes_each_weight_once():
    mapped, plain = Model(), Model()
    source = tensors()
    load(mapped, source, rows())
    load(plain, source, rows(), copy=True)
    for model in (mapped, plain):
        model.W_U.requires_grad_(True)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
        sum((p**2).sum() for p in model.parameters()).backward()
        optimiser.step()
    assert same(mapped.state_dict(), plain.state_dict())


def saved_bytes(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return len(buffer.getvalue())


def test_copies_and_saves_of_fused_weights_store_each_element_once():
    big = torch.randn(64, 3 * N * 64)
    model = nn.ParameterDict({x: nn.Parameter(torch.empty(N, 64, 64, device="meta")) for x in "QKV"})
    load(model, {"qkv": big}, expand([Row("qkv", "{x}", "m (x n h) -> n m h", x="QKV")]))
    assert saved_bytes(model.state_dict()) < 1.1 * big.nbytes + 4000
    assert saved_bytes(copy.deepcopy(model)["Q"]) < 1.1 * big.nbytes / 3 + 4000
    assert saved_bytes(model["Q"]) > big.nbytes  # what compact is for
    one = compact(model["Q"])
    assert saved_bytes(one) < 1.1 * big.nbytes / 3 + 4000
    assert torch.equal(one, model["Q"])
    assert one.stride() == (64, N * 64, 1)
    assert compact(one) is one
    values, optimised = copy.deepcopy(model.state_dict()), list(model.parameters())
    compact_model(model)
    assert len(pickle.dumps(model)) < 1.1 * big.nbytes + 8000
    assert same(model.state_dict(), values)
    assert all(a is b for a, b in zip(model.parameters(), optimised, strict=True))
    model.share_memory()
    assert same(model.state_dict(), values)
