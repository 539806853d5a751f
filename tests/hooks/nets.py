"""Small networks that have nothing to do with language, for the tests of this folder."""

import torch
from torch import Tensor, nn

from hooked_lm.hooks import HookedRootModule, HookPoint, is_listening

BATCH, POS, D = 2, 3, 4
DIMS = ("batch", "pos", "d_model")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.hook_pre = HookPoint(*DIMS)
        self.hook_post = HookPoint(*DIMS)
        self.hook_square = HookPoint(*DIMS, on_demand=True)
        self.squares_computed = 0

    def forward(self, x: Tensor) -> Tensor:
        post = self.hook_post(torch.tanh(self.hook_pre(self.linear(x))))
        if is_listening(self.hook_square):
            self.squares_computed += 1
            self.hook_square(post**2)
        return x + post


class Net(HookedRootModule):
    """Two blocks; `hook_left` and `hook_right` see one and the same tensor; a scalar comes out for `loss=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_in = HookPoint(*DIMS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.hook_left = HookPoint(*DIMS)
        self.hook_right = HookPoint(*DIMS)
        self.hook_out = HookPoint(*DIMS)
        self.runs = 0
        self.setup()

    def forward(self, x: Tensor, loss: bool = False) -> Tensor:
        self.runs += 1
        x = self.hook_in(x)
        for block in self.blocks:
            x = block(x)
        out = self.hook_out(3 * self.hook_right(self.hook_left(x)))
        return (out**2).sum() if loss else out


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def some_input() -> Tensor:
    return torch.linspace(-1, 1, BATCH * POS * D).view(BATCH, POS, D)


def assert_no_hook_left(model: HookedRootModule) -> None:
    assert {name: point._hooks for name, point in model.all_points().items() if point._hooks} == {}
    assert not any(point.is_listening for point in model.hook_points())


SITES = [
    "hook_in",
    "blocks.0.hook_pre",
    "blocks.0.hook_post",
    "blocks.0.hook_square",
    "blocks.1.hook_pre",
    "blocks.1.hook_post",
    "blocks.1.hook_square",
    "hook_left",
    "hook_right",
    "hook_out",
]
BARE = [site for site in SITES if "square" not in site]
