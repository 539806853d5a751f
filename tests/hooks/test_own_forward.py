"""Points of other classes: hooks see what their own `forward` makes of a value, once, and its edits go on."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm.hooks import HookedRootModule, HookPoint


class Densified(HookPoint):
    """Gives hooks a dense tensor, and where PyTorch's list says that there are none, passes a sparse one."""

    def forward(self, value: Tensor) -> Tensor:
        return value.to_dense() if value.is_sparse and len(self._forward_hooks) > 0 else value


class Halved(HookPoint):
    def forward(self, value: Tensor) -> Tensor:
        return 0.5 * value


class HalvedAbove(HookPoint):
    def forward(self, value: Tensor) -> Tensor:
        return 0.5 * super().forward(value)


def halved_instance() -> HookPoint:
    point = HookPoint()
    before = point.forward
    point.forward = lambda value: 0.5 * before(value)  # type: ignore[method-assign]
    return point


KINDS = [Halved, HalvedAbove, halved_instance]


class Net(HookedRootModule):
    def __init__(self, point: HookPoint) -> None:
        super().__init__()
        self.hook_middle = point
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        return 3 * self.hook_middle(2 * x)


def plus_one(value: Tensor, hook: HookPoint) -> Tensor:
    return value + 1


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_stand_behind_a_forward_of_its_own(kind: Any) -> None:
    model, x = Net(kind()), torch.ones(2, requires_grad=True)
    assert model(x).tolist() == [3.0, 3.0]
    seen: list[list[float]] = []
    gradients: list[list[float]] = []
    watch = ("hook_middle", lambda value, hook: seen.append(value.tolist()))
    backward = ("hook_middle", lambda gradient, hook: gradients.append(gradient.tolist()))
    with model.hooks([watch, ("hook_middle", plus_one)], [backward]):
        out = model(x)
    assert seen == [[1.0, 1.0]]
    assert out.tolist() == [6.0, 6.0]
    out.sum().backward()
    assert gradients == [[3.0, 3.0]]
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]
    assert model.run_with_cache(x)[1]["hook_middle"].tolist() == [1.0, 1.0]
    assert model(x).tolist() == [3.0, 3.0]
    assert not model.hook_middle._forward_hooks


def test_a_forward_may_ask_whether_there_are_hooks() -> None:
    model = Net(Densified())
    x = torch.tensor([[0.0, 5.0]]).to_sparse()
    assert model.hook_middle(x).is_sparse
    shown: list[bool] = []

    def edit(value: Tensor, hook: HookPoint) -> None:
        shown.append(value.is_sparse)
        value[:, 0] = 7

    out = model.run_with_hooks(x, fwd_hooks=[("hook_middle", edit)])
    assert shown == [False]
    assert out.tolist() == [[21.0, 30.0]]
    assert model.hook_middle(x).is_sparse


def test_an_error_inside_leaves_no_mark() -> None:
    class Broken(HookPoint):
        def forward(self, value: Tensor) -> Tensor:
            raise ArithmeticError

    model = Net(Broken())
    with pytest.raises(ArithmeticError):
        model.run_with_hooks(torch.ones(1), fwd_hooks=[("hook_middle", plus_one)])
    assert not model.hook_middle._forward_hooks
    assert not model.hook_middle.has_hooks()


def test_other_threads_do_not_see_them() -> None:
    model, found = Net(Halved()), []
    with model.hooks([("hook_middle", plus_one)]):
        thread = threading.Thread(target=lambda: found.append(model(torch.ones(1)).item()))
        thread.start()
        thread.join()
        assert model(torch.ones(1)).item() == 6
    assert found == [3.0]


def test_pytorchs_hooks_run_too_and_first() -> None:
    model = Net(Halved())
    handle = model.hook_middle.register_forward_hook(lambda module, args, out: 10 * out)
    assert model(torch.ones(1)).item() == 30
    assert model.run_with_hooks(torch.ones(1), fwd_hooks=[("hook_middle", plus_one)]).item() == 33
    handle.remove()


def test_copies_and_other_names() -> None:
    model = Net(HalvedAbove())
    twin = copy.deepcopy(model)
    assert twin.run_with_hooks(torch.ones(1), fwd_hooks=[("hook_middle", plus_one)]).item() == 6
    names: list[str | None] = []
    model.hook_middle.add_hook(lambda value, hook: names.append(hook.name), alias_names=["a", "b"])
    assert model(torch.ones(1)).item() == 3
    assert names == ["a", "b"]
