"""Several functions at one point: what each is shown, and what an edit in place reaches."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from hooked_lm import HookPoint
from hooked_lm.hooks import HookedRootModule


class Net(HookedRootModule):
    def __init__(self) -> None:
        super().__init__()
        self.hook_x = HookPoint("batch", "d")
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.hook_x(x)


def keeper(kept: list[Tensor]) -> Any:
    def keep(value: Tensor, hook: HookPoint) -> None:
        kept.append(value)

    return keep


def zero(value: Tensor, hook: HookPoint) -> None:
    value.zero_()


def test_a_gradient_at_one_function_reaches_what_another_makes_of_the_value() -> None:
    """A tool keeps a value in one hook, puts it back into the graph elsewhere, and asks for gradients in another hook."""
    net, kept, gradients = Net(), [], []
    x = torch.ones(2, 3, requires_grad=True)
    with net.hooks(fwd_hooks=[("hook_x", keeper(kept)), ("hook_x", keeper(kept))]):
        net(x)
    first, second = kept
    second.register_hook(gradients.append)
    (3 * first).sum().backward()
    assert len(gradients) == 1
    assert torch.equal(gradients[0], torch.full((2, 3), 3.0))
    assert torch.equal(x.grad, torch.full((2, 3), 3.0))


def test_an_edit_in_place_reaches_what_follows_and_no_record() -> None:
    net, x, kept = Net(), torch.ones(2, 3), []
    records, caching, _ = net.get_caching_hooks()
    with net.hooks(fwd_hooks=[("hook_x", keeper(kept)), *caching, ("hook_x", zero), ("hook_x", keeper(kept))]):
        out, cache = net.run_with_cache(x)
    assert torch.equal(out, torch.zeros(2, 3))
    assert torch.equal(x, torch.ones(2, 3))
    assert torch.equal(records["hook_x"], torch.ones(2, 3))
    assert torch.equal(kept[0], torch.ones(2, 3))
    assert torch.equal(kept[1], torch.zeros(2, 3))
    assert torch.equal(cache["hook_x"], torch.zeros(2, 3)), "recorded last"


def test_an_answer_is_not_edited_by_the_next_function() -> None:
    """A patch answers with a tensor of the user's, often a cache's."""
    net, stored = Net(), torch.full((2, 3), 5.0)
    for answer in (stored, stored[:]):
        with net.hooks(fwd_hooks=[("hook_x", lambda value, hook, answer=answer: answer), ("hook_x", zero)]):
            assert torch.equal(net(torch.ones(2, 3)), torch.zeros(2, 3))
        assert torch.equal(stored, torch.full((2, 3), 5.0))


def test_a_handle_says_which_function_it_holds() -> None:
    """Tools look for their own functions by name, partial ones too, among those of a point."""
    net = Net()

    def mine(value: Tensor, hook: HookPoint, factor: float = 1.0) -> None:
        pass

    net.add_hook("hook_x", zero)
    net.add_hook("hook_x", partial(mine, factor=2.0), prepend=True)
    names = [handle.__name__ for handle in net.hook_dict["hook_x"].fwd_hooks[0].hooks_dict_ref().values()]
    assert ["mine" in names[0], "zero" in names[1]] == [True, True]
    assert type(net.hook_dict["hook_x"].fwd_hooks[0]).__name__ == "Hook"
