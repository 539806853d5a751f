"""The verbs on networks that know nothing of hooks."""

import copy
import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.hooks import HookPoint, wrap
from tests.close import GRADIENT, assert_close
from tests.hooks.nets import assert_no_hook_left


class Pair(NamedTuple):
    value: Tensor
    extra: str


class Pool(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, where = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
        return values, where


class Named(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x + 1, "kept")


class Extras(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"x": x}


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU(inplace=True))
        self.pool, self.named, self.extras = Pool(), Named(), Extras()
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        pooled, where = self.pool(self.conv(image))
        assert where.dtype == torch.long
        named = self.named(pooled)
        assert named.extra == "kept"
        return self.head(self.extras(named.value)["x"].flatten(1))


def cnn() -> CNN:
    torch.manual_seed(2)
    return CNN().eval()


IMAGE = torch.linspace(-1, 1, 32).view(2, 1, 4, 4)
CACHED = ["conv.0", "conv.1", "conv.2", "conv", "pool", "named", "extras", "head"]


def test_cache_of_a_cnn() -> None:
    net, plain = wrap(cnn()), cnn()
    out, cache = net.run_with_cache(IMAGE)
    assert torch.equal(out, plain(IMAGE))
    assert list(cache) == CACHED
    assert torch.equal(cache["conv.1"], plain.conv[:2](IMAGE))
    assert (cache["conv.1"] < 0).any()  # the ReLU works in place, on a copy
    assert torch.equal(cache["conv"], plain.conv(IMAGE))
    assert torch.equal(cache["named"], cache["pool"] + 1)
    assert torch.equal(cache["head"], out)
    assert torch.equal(net(IMAGE), plain(IMAGE))


def test_hooks_by_dotted_names() -> None:
    net, plain, gradients = wrap(cnn()), cnn(), {}
    out = net.run_with_hooks(
        IMAGE,
        fwd_hooks=[("pool", lambda value, hook: 0 * value), ("conv.?", lambda value, hook: None)],
        bwd_hooks=[("named", lambda gradient, hook: gradients.update({hook.name: gradient}))],
    )
    assert torch.equal(out, plain.head(torch.ones(2, 8)))
    out.sum().backward()
    expected = plain.head.weight.sum(0).expand(2, 8).reshape(2, 2, 2, 2)
    assert_close(gradients["named"], expected, depth=GRADIENT)
    assert_no_hook_left(net)
    with pytest.raises(KeyError, match=r"'conv\.\*' exists for numbers 0 to 2"):
        net.run_with_hooks(IMAGE, fwd_hooks=[("conv.9", lambda value, hook: None)])


def test_gradients_of_a_wrapped_net() -> None:
    net = wrap(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.Linear(2, 1)))
    x = torch.tensor([[1.0, -2.0]])
    _, cache = net.run_with_cache(x, incl_bwd=True)
    first, _, last = net.module
    assert_close(cache["1_grad"], last.weight, depth=GRADIENT)
    assert_close(cache["0_grad"], last.weight * (first(x) > 0), depth=GRADIENT)


def test_a_wrapped_module_trains_or_not_as_it_did() -> None:
    assert wrap(nn.ReLU()).training
    assert not wrap(nn.ReLU().eval()).training


def test_what_a_wrapped_module_lacks() -> None:
    """Sweeps and lenses ask for layers: the error says what they need, and where an attribute of the module is."""
    wrapped = wrap(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(
        AttributeError, match=r"no attribute 'stack_of': a wrapped module has hooks .* these take a model"
    ):
        _ = wrapped.stack_of
    wrapped.module.register_buffer("of_module", torch.ones(1))
    with pytest.raises(
        AttributeError, match=r"no attribute 'of_module'; the wrapped module has it: \.module\.of_module"
    ):
        _ = wrapped.of_module
    assert not hasattr(wrapped, "tokenizer")


def test_unwrap_gives_the_module_back() -> None:
    module = cnn()
    net = wrap(module)
    seen: list[str] = []
    net.add_hook("*", lambda value, hook: seen.append(hook.name))
    assert net.unwrap() is module
    module(IMAGE)
    assert seen == []
    assert not any(m._forward_hooks for m in module.modules())
    assert list(net.all_points()) == []


def test_setup_again_finds_a_replaced_module() -> None:
    net = wrap(cnn())
    net.module.head = nn.Sequential(nn.Linear(8, 5), nn.Tanh())
    net.setup()
    _, cache = net.run_with_cache(IMAGE)
    assert list(cache) == [*CACHED[:-1], "head.0", "head.1", "head"]
    assert cache["head"].shape == (2, 5)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_and_pickles_have_points_of_their_own(duplicate: Any) -> None:
    net = wrap(cnn())
    twin, seen = duplicate(net), []

    def note(value: Tensor, hook: HookPoint) -> None:
        seen.append(hook)

    twin.run_with_hooks(IMAGE, fwd_hooks=[("head", note)])
    assert seen == [twin.hook_dict["head"]]
    with net.hooks([("head", note)]):
        twin(IMAGE)
    assert len(seen) == 1
    twin.unwrap()
    assert torch.equal(twin.module(IMAGE), net(IMAGE))
    assert list(net.run_with_cache(IMAGE)[1]) == CACHED


def test_a_pair_in_the_wrong_order_is_refused() -> None:
    net = wrap(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="got the site '0' as the second of the two"):
        net.run_with_hooks(torch.ones(1, 2), fwd_hooks=[(lambda value, hook: value, "0")])
