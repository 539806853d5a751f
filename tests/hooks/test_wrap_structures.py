"""Wrapped networks whose modules take and give more than one tensor; proved against hooks of PyTorch."""

import copy
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hooked_lm.hooks import HookPoint, WrappedModule, wrap
from tests.close import GRADIENT, assert_close
from tests.hooks.test_objects import Affine, Keep


@dataclass
class Features:
    maps: Tensor
    size: int
    extra: dict[str, list[Tensor]]


class Down(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skip = self.act(self.conv(x))
        return F.avg_pool2d(skip, 2), skip


class Middle(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv, self.time = nn.Conv2d(n, n, 1), nn.Linear(1, n)

    def forward(self, x: Tensor, t: Tensor, *, gate: Tensor | None = None) -> Features:
        y = self.conv(x) + self.time(t)[:, :, None, None]
        return Features(y if gate is None else y * gate, y.shape[-1], {"parts": [x, y]})


class Up(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(n_in, n_out, 3, padding=1)

    def forward(self, x: Tensor, skip: Tensor) -> dict[str, Any]:
        return {"level": 1, "maps": self.conv(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))}


class UNet(nn.Module):
    """A small denoiser: an image and a time in, through a bottleneck and around it, an image out."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Down(1, 4), Middle(4), Up(8, 1)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        low, skip = self.down(x)
        middle = self.middle(low, t=t, gate=torch.full((1,), 2.0))
        assert middle.size == low.shape[-1]
        up = self.up(x=middle.maps, skip=skip)
        assert up["level"] == 1
        return up["maps"]


def unet() -> UNet:
    torch.manual_seed(4)
    return UNet()


IMAGE, TIME = torch.linspace(-1, 1, 32).view(2, 1, 4, 4), torch.tensor([[0.1], [0.7]])


def seen_by_torch(net: nn.Module, *args: Any) -> dict[str, tuple[Any, Any, Any]]:
    """Inputs, keyword inputs and output of every module, copied, by hooks of PyTorch."""
    found: dict[str, Any] = {}
    handles = []
    for name, module in net.named_modules():

        def before(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
            found[name] = copy.deepcopy((args, kwargs))

        def after(module: Any, args: Any, output: Any, name: str = name) -> None:
            found[name] = (*found[name], copy.deepcopy(output))

        handles += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
    with torch.no_grad():
        net(*args)
    for handle in handles:
        handle.remove()
    return found


def test_inputs_and_outputs_of_a_u_net() -> None:
    net, found = wrap(unet()), seen_by_torch(unet(), IMAGE, TIME)
    sites = {
        "down": found["down"][2][0],
        "down[1]": found["down"][2][1],
        "down.input": found["down"][0][0],
        "down.input[x]": found["down"][0][0],
        "down.act.input": found["down.act"][0][0],
        "middle": found["middle"][2].maps,
        "middle[maps]": found["middle"][2].maps,
        "middle[extra][parts][1]": found["middle"][2].extra["parts"][1],
        "middle.input": found["middle"][0][0],
        "middle.input[t]": found["middle"][1]["t"],
        "middle.input[1]": found["middle"][1]["t"],
        "middle.input[gate]": found["middle"][1]["gate"],
        "up": found["up"][2]["maps"],
        "up.input": found["up"][1]["x"],
        "up.input[skip]": found["up"][1]["skip"],
        "up.conv": found["up.conv"][2],
    }
    out, cache = net.run_with_cache(IMAGE, TIME, names_filter=list(sites))
    assert torch.equal(out, unet()(IMAGE, TIME))
    assert set(cache) == set(sites)
    for name, value in sites.items():
        assert torch.equal(cache[name], value), name
    assert (cache["down.act.input"] < 0).any(), "what the ReLU works on in place is a copy"
    _, bare = net.run_with_cache(IMAGE, TIME)
    assert list(bare) == [
        "down.conv", "down.act", "down", "middle.conv", "middle.time", "middle", "up.conv", "up",
    ]  # fmt: skip


SITES: dict[str, Callable[[UNet, Callable[[Tensor], Tensor]], Any]] = {
    "down[1]": lambda net, f: net.down.register_forward_hook(lambda m, a, out: (out[0], f(out[1]))),
    "up.input[skip]": lambda net, f: net.up.register_forward_pre_hook(
        lambda m, a, k: (a, {**k, "skip": f(k["skip"])}), with_kwargs=True
    ),
    "middle.input": lambda net, f: net.middle.register_forward_pre_hook(
        lambda m, a, k: ((f(a[0]),), k), with_kwargs=True
    ),
    "middle.input[gate]": lambda net, f: net.middle.register_forward_pre_hook(
        lambda m, a, k: (a, {**k, "gate": f(k["gate"])}), with_kwargs=True
    ),
    "middle": lambda net, f: net.middle.register_forward_hook(
        lambda m, a, out: Features(f(out.maps), out.size, out.extra)
    ),
    "up": lambda net, f: net.up.register_forward_hook(lambda m, a, out: {**out, "maps": f(out["maps"])}),
    "down.act": lambda net, f: net.down.act.register_forward_hook(lambda m, a, out: f(out)),
}


@pytest.mark.parametrize("site", SITES)
def test_replacing_a_part_is_what_a_hook_of_pytorch_does(site: str) -> None:
    net, plain = wrap(unet()), unet()
    SITES[site](plain, lambda value: 0.5 * value - 1)
    image, again = IMAGE.clone().requires_grad_(), IMAGE.clone().requires_grad_()
    out, expected = net.run_with_hooks(image, TIME, fwd_hooks=[Affine(site, 0.5, -1.0)]), plain(again, TIME)
    assert_close(out, expected)
    assert not torch.equal(out, unet()(IMAGE, TIME))
    out.square().sum().backward()
    expected.square().sum().backward()
    assert_close(image.grad, again.grad, depth=GRADIENT)
    for (name, ours), theirs in zip(net.module.named_parameters(), plain.parameters(), strict=True):
        assert_close(ours.grad, theirs.grad, depth=GRADIENT, msg=name)


@pytest.mark.parametrize("site", ["down[1]", "up.input[skip]", "middle", "middle.conv", "down.act"])
def test_gradients_are_those_of_autograd(site: str) -> None:
    net, plain, tensors = wrap(unet()), unet(), []

    def hold(value: Tensor) -> Tensor:
        value = value.view_as(value)
        value.retain_grad()
        tensors.append(value)
        return value

    if site == "middle.conv":
        plain.middle.conv.register_forward_hook(lambda m, a, out: hold(out))
    else:
        SITES[site](plain, hold)
    plain(IMAGE, TIME).square().sum().backward()
    keep = Keep(site, direction="bwd")
    with net.hooks([keep]):
        net(IMAGE, TIME).square().sum().backward()
    assert_close(keep.seen, [tensors[0].grad], depth=GRADIENT)


def test_early_means_the_inputs() -> None:
    net, keep = wrap(unet()), Keep("*.conv", when="pre")
    found = seen_by_torch(unet(), IMAGE, TIME)
    with net.hooks([keep, Affine("up[skip]", 0.0, when="pre")]), torch.no_grad():
        out = net(IMAGE, TIME)
    names = ["down.conv", "middle.conv"]
    assert_close(keep.seen[:2], [found[name][0][0] for name in names])
    plain = unet()
    SITES["up.input[skip]"](plain, lambda value: 0 * value)
    assert_close(out, plain(IMAGE, TIME))


def test_names_of_inputs_and_parts() -> None:
    net = wrap(unet())
    assert net.names("*.conv") == ["down.conv", "middle.conv", "up.conv"]
    assert net.names("*.conv.input") == ["down.conv.input", "middle.conv.input", "up.conv.input"]
    assert net.names("[du]*[1]") == ["down[1]", "down.conv[1]", "down.act[1]", "up[1]", "up.conv[1]"]
    assert net.names(["up", "up.input", "up"]) == ["up", "up.input"]
    assert net.names(lambda name: name.endswith("act")) == ["down.act"]
    assert net.names(lambda name: name.endswith("act.input")) == ["down.act.input"]
    before = list(net.names())
    net.points(["up.input", "down[1]"])
    assert list(net.names()) == before, "naming a part makes it no site of everything"
    assert net.names("*") == before
    assert set(net.run_with_cache(IMAGE, TIME, names_filter="*")[1]) == {*before} - {"never"}
    assert repr(net.names()).splitlines()[:3] == ["down  Down", "  conv  Conv2d", "  act  ReLU"]
    for wrong in ("down.covn", "down.covn.input", "down.covn[1]", "down[", "*.convs"):
        with pytest.raises(KeyError, match="no hook point"):
            net.names(wrong)


def test_what_was_not_there_is_named() -> None:
    net = wrap(unet())
    with pytest.raises(KeyError, match="'never' was not reached"):
        net.run_with_cache(IMAGE, TIME, names_filter=["up", "never"])
    with pytest.raises(KeyError, match="never"):
        net.run_with_hooks(IMAGE, TIME, fwd_hooks=[Keep("up"), Keep("never")])
    with pytest.raises(KeyError, match=r"never\.input"):
        net.run_with_hooks(IMAGE, TIME, bwd_hooks=[Keep("never", when="pre")])
    with pytest.raises(KeyError, match=r"'down\[2\]' is not a tensor in this run; the tensors are \[0\], \[1\]"):
        net.run_with_hooks(IMAGE, TIME, fwd_hooks=[Keep("down[2]")])
    with pytest.raises(KeyError, match=r"'middle\[size\]' is not a tensor .* \[maps\], \[extra\]\[parts\]\[0\]"):
        net.run_with_cache(IMAGE, TIME, names_filter="middle[size]")
    assert "never" not in net.run_with_cache(IMAGE, TIME)[1]
    assert_clean(net)


def assert_clean(net: WrappedModule) -> None:
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.module.modules())
    assert not any(point._hooks for point in net.hook_points())


# ---- the same module more than once ----------------------------------------------------------------------------------


class Twice(nn.Module):
    """One cell three times, under two names; the second call's result reaches the output by half."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(3, 3)
        self.same = self.cell

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.cell(x))
        second = torch.tanh(self.same(first))
        self.cell(x)  # of no use
        return first + 0.5 * second


def test_each_call_of_a_shared_module_has_a_name() -> None:
    torch.manual_seed(0)
    net, x = wrap(Twice()), torch.linspace(-1, 1, 6).view(2, 3)
    assert list(net.names()) == ["cell"]
    assert net.names("same") == ["cell"]
    first = net.module.cell(x).detach().requires_grad_()
    second = net.module.cell(torch.tanh(first))
    second.retain_grad()
    (torch.tanh(first) + 0.5 * torch.tanh(second)).sum().backward()
    _, cache = net.run_with_cache(x, names_filter="same")
    assert list(cache) == ["cell", "cell@1", "cell@2"]
    for name, value in zip(cache, (first, second, first), strict=True):
        assert_close(cache[name], value.detach())
    grads: dict[str, Tensor] = {}
    with net.hooks(bwd_hooks=[("cell", lambda gradient, hook: grads.update({hook.name: gradient}))]):
        net(x).sum().backward()
    assert_close(grads, {"cell@1": second.grad, "cell": first.grad}, depth=GRADIENT)
    again = net.run_with_cache(x, names_filter="cell")[1]
    assert list(again) == list(cache), "the next run counts from the start"

    def double_the_second(value: Tensor, hook: HookPoint) -> Tensor:
        return 2 * value if hook.name == "cell@1" else value

    out = net.run_with_hooks(x, fwd_hooks=[("cell", double_the_second)])
    assert_close(out, torch.tanh(first) + 0.5 * torch.tanh(2 * second))


# ---- leaving, copies, threads ----------------------------------------------------------------------------------------


def test_pytorchs_hooks_are_there_only_while_somebody_listens() -> None:
    module = unet()
    own = module.up.register_forward_hook(lambda m, a, out: None)
    net = wrap(module)
    kept = {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in module.named_modules()}
    with net.hooks([Keep("*"), Keep("*", when="pre"), Keep("down[1]")]):
        net(IMAGE, TIME)
        assert all(m._forward_hooks for name, m in module.named_modules() if name)
    hook_id = net.register(Affine("down", 0.0))
    net.register(Affine("up", 0.0, when="pre"))
    net.unregister(hook_id)
    assert net.unwrap() is module
    now = {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in module.named_modules()}
    assert now == kept
    assert net.registered() == {}
    own.remove()


def test_an_exception_in_a_hook_or_a_module_leaves_nothing() -> None:
    net = wrap(unet())

    def fails(value: Tensor, hook: HookPoint) -> None:
        raise RuntimeError(hook.name)

    for site in ("up", "up.input[skip]", "down[1]"):
        with pytest.raises(RuntimeError, match=r"up|down"):
            net.run_with_hooks(IMAGE, TIME, fwd_hooks=[Keep("*"), (site, fails)])
        assert_clean(net)
    with pytest.raises(RuntimeError):
        net.run_with_cache(IMAGE[:, :, :3], TIME.flatten(), names_filter="*")
    assert_clean(net)
    assert torch.equal(net(IMAGE, TIME), unet()(IMAGE, TIME))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_registered_hooks_travel(duplicate: Any) -> None:
    net = wrap(unet())
    ids = [net.register(Affine("down[1]", 2.0)), net.register(Affine("middle", 2.0, when="pre"))]
    expected, plain = net(IMAGE, TIME), unet()(IMAGE, TIME)
    twin = duplicate(net)
    assert torch.equal(twin(IMAGE, TIME), expected)
    net.unwrap()
    assert torch.equal(net.module(IMAGE, TIME), plain)
    assert torch.equal(twin(IMAGE, TIME), expected)
    for hook_id in ids:
        twin.unregister(hook_id)
    assert torch.equal(twin(IMAGE, TIME), plain)
    assert_clean(twin)


def test_threads_do_not_see_each_others_hooks() -> None:
    net, barrier, results = wrap(unet()), threading.Barrier(2), {}

    def run(scale: float) -> None:
        barrier.wait(10)
        for _ in range(20):
            results[scale] = net.run_with_hooks(IMAGE, TIME, fwd_hooks=[Affine("up.input[skip]", scale)])

    threads = [threading.Thread(target=run, args=(scale,)) for scale in (0.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for scale, out in results.items():
        plain = unet()
        SITES["up.input[skip]"](plain, lambda value, scale=scale: scale * value)
        assert_close(out, plain(IMAGE, TIME))
    assert len(results) == 2
    assert_clean(net)


def test_a_module_that_is_called_input() -> None:
    module = nn.ModuleDict({"outer": nn.Sequential()})
    module["outer"].add_module("input", nn.Linear(2, 2))
    net = wrap(nn.Sequential(module["outer"]))
    x = torch.ones(1, 2)
    assert net.names("0.input()[0]") == ["0.input()[0]"]
    keep, inputs = Keep("0.input"), Keep("0", when="pre")
    out = net.run_with_hooks(x, fwd_hooks=[keep, inputs])
    assert torch.equal(keep.seen[0], out)
    assert torch.equal(inputs.seen[0], x)
    assert list(net.run_with_cache(x, names_filter="0.input()")[1]) == ["0.input()"]


class Named(NamedTuple):
    first: int
    second: Tensor


class Odd(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return Named(len(args), args[0])


def test_odd_inputs_and_outputs() -> None:
    net = wrap(nn.ModuleDict({"odd": Odd(), "empty": nn.Module()}))
    net.module.forward = lambda *args, **kwargs: net.module["odd"](*args, **kwargs)  # type: ignore[method-assign]
    x = torch.ones(2)
    out = net.run_with_hooks(
        x, 3, k=(x, [x]), fwd_hooks=[Affine("odd[second]", 2.0), Affine("odd.input[k][1][0]", 5.0)]
    )
    assert out.first == 2
    assert torch.equal(out.second, 2 * x)
    assert torch.equal(x, torch.ones(2)), "the caller's list holds what it held"
    keep = Keep("odd.input")
    net.module.forward = lambda x: net.module["odd"](x, note="no tensor") if x is None else x  # type: ignore[method-assign]
    with pytest.raises(KeyError, match=r"'odd.input' was not reached"):
        net.run_with_hooks(None, fwd_hooks=[keep])
    assert net(None) == Named(1, None)
