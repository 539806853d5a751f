"""Constants are made once for a device, not in each run, and have the same values on all."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hooked_lm.components.constants import constant, numbers
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.embeddings.rotary_scaling import Backward, DynamicScaling, LongRopeScaling, YarnScaling

SHORT, LONG = 8, 24  # lengths of texts, around the trained one
SCALINGS = (
    YarnScaling(2.0, 16),
    DynamicScaling(2.0, 16),
    LongRopeScaling((1.0, 1.5), (2.0, 3.0), 16, 1.0),
    Backward(LongRopeScaling((1.0, 1.5), (2.0, 3.0), 16, 1.0)),
)


def test_a_constant_is_made_once_for_each_device():
    made = []

    def make(n: int) -> tuple[Tensor, int]:
        made.append(n)
        return torch.arange(n), n

    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    for like in (here, there, here, there):
        made_of, n = constant(like, make, 3)
        assert (made_of.shape, made_of.device, n) == ((3,), like.device, 3)
    assert made == [3, 3]


def test_constants_of_two_modes_without_values_are_apart():
    kept = []
    for _ in range(2):
        with FakeTensorMode():
            like = torch.zeros(1, device="meta")
            kept.append(constant(like, torch.arange, 3) + like)
    assert kept[0].fake_mode is not kept[1].fake_mode


def test_a_constant_made_in_inference_mode_can_be_differentiated():
    x = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        constant(x, torch.arange, 3, 3.5)
    (constant(x, torch.arange, 3, 3.5) * x).sum().backward()
    assert x.grad is not None


def test_frequencies_of_all_lengths_with_one_number_are_equal():
    """So no run copies them that follows one of the same kind."""
    for scaling in SCALINGS:
        rotary = Rotary(4, scaling=scaling)
        for n_pos in (SHORT, SHORT + 1, LONG, LONG + 1):
            expected, temperature = scaling(rotary, n_pos)
            found, same = rotary.frequencies(scaling.length(n_pos))
            assert torch.equal(found, expected)
            assert same == temperature
        assert scaling.length(SHORT) == scaling.length(SHORT + 1)
    assert all(s.length(LONG) == s.length(LONG + 1) for s in SCALINGS if not isinstance(s, DynamicScaling))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * constant(x, numbers, (2.0, 3.0))


def test_an_exported_graph_holds_constants() -> None:
    """They are not made anew, nor copied from the host, where a CUDA graph could not be captured."""
    program = torch.export.export(Doubled(), (torch.ones(2),), strict=False)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert calls == ["aten.mul.Tensor"]
    assert torch.equal(program.module()(torch.ones(2)), torch.tensor([2.0, 3.0]))
