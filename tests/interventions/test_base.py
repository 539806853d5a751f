"""What all hook objects share: on and off, descriptions, files, errors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hooked_lm.hooks import HookPoint, wrap
from hooked_lm.hooks.select import UnknownSite
from hooked_lm.interventions.base import Controller, Detector, HookObject, Hooks
from hooked_lm.interventions.detectors import NanGradientGuard, Record


@dataclass(eq=False, repr=False)
class Times(Controller):
    factor: float | Tensor = 2.0

    def change(self, value: Any, hook: HookPoint) -> Any:
        return value * self.factor


@dataclass(eq=False, repr=False)
class Meddler(Detector):
    """Writes into what it is shown, and returns something else."""

    def see(self, value: Any, hook: HookPoint) -> None:
        value.zero_()


class Sneak(Detector):
    """Writes past autograd's count of writes."""

    def see(self, value: Any, hook: HookPoint) -> None:
        value.data.zero_()


class Careless(Meddler):
    """Says that it never writes."""

    copies = False


def net() -> Any:
    return wrap(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity()))


X = torch.arange(1.0, 4.0)


def run(*hooks: Any) -> Tensor:
    return net().run_with_hooks(X, fwd_hooks=list(hooks))


def test_on_and_off() -> None:
    double = Times("0")
    assert run(double).equal(2 * X)
    double.disable()
    assert run(double).equal(X)
    double.enable()
    with double.disabled():
        assert run(double).equal(X)
    assert run(double).equal(2 * X)
    with pytest.raises(RuntimeError, match="inside"), double.disabled():
        raise RuntimeError("inside")
    assert run(double).equal(2 * X)
    double.disable()
    assert run(double).equal(X)
    double.enable()
    assert run(double).equal(2 * X)
    double.disable()
    with double.disabled():
        pass
    assert not double.is_enabled


def test_a_detector_is_off_too() -> None:
    record = Record("0")
    with record.disabled():
        run(record)
    assert record.values == {}
    run(record)
    assert record.stacked("0")[0].equal(X)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", [Meddler, Sneak])
def test_what_a_detector_writes_or_returns_changes_nothing(mode: Any, kind: type[Detector]) -> None:
    given, seen = X.clone(), Record("0")
    with mode():
        assert net().run_with_hooks(given, fwd_hooks=[kind("0"), seen, kind("0", when="pre")]).equal(X)
    assert given.equal(X)
    assert seen.stacked()[0].equal(X)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_detector_that_is_shown_the_value_itself_is_named_if_it_writes(mode: Any) -> None:
    with (
        mode(),
        pytest.raises(RuntimeError, match=r"Careless\('0'\) wrote into the value of '0', and detectors must not"),
    ):
        net().run_with_hooks(X.clone(), fwd_hooks=[Careless("0")])


def test_a_detector_of_gradients_changes_none() -> None:
    x = X.clone().requires_grad_()
    net().run_with_hooks(x, bwd_hooks=[Meddler("0"), Sneak("1")]).sum().backward()
    assert x.grad is not None
    assert x.grad.equal(torch.ones(3))


def test_several_on_one_slot_are_all_registered_in_order() -> None:
    model, hooks = (
        net(),
        [Record("0"), Times("0"), Record("0"), Times("0", factor=5.0), Times("0", factor=torch.ones(3))],
    )
    ids = [model.register(hook) for hook in hooks]
    assert list(model.registered().items()) == list(zip(ids, hooks, strict=True))
    assert [handle.user_hook for handle in model.list_hooks()["0"]] == hooks
    assert model(X).equal(10 * X)
    assert [hooks[0].stacked()[0].tolist(), hooks[2].stacked()[0].tolist()] == [X.tolist(), (2 * X).tolist()]  # type: ignore[attr-defined]
    model.unregister(ids[1])
    assert list(model.registered()) == [ids[0], *ids[2:]]
    assert model(X).equal(5 * X)
    for wrong, error in ((Times("7"), UnknownSite), (Times(["0", "7"]), UnknownSite), (("0", lambda: 0), TypeError)):
        with pytest.raises(error):
            model.register(wrong)
        assert list(model.registered()) == [ids[0], *ids[2:]]
    for number in (ids[0], *ids[2:]):
        model.unregister(number)
    assert (model.list_hooks(), model.registered()) == ({}, {})
    assert model(X).equal(X)


def test_detectors_and_controllers_share_a_site_in_order() -> None:
    before, after = Record("0"), Record("0")
    assert run(before, Times("0"), Times("0", factor=3.0), after).equal(6 * X)
    assert before.stacked()[0].equal(X)
    assert after.stacked()[0].equal(6 * X)


def test_descriptions_make_the_same_object() -> None:
    told = Times("0", factor=5.0).to_dict()
    assert told == {"kind": f"{__name__}.Times", "hook_point": "0", "layer": None, "when": "post", "factor": 5.0}
    assert run(HookObject.from_dict(told)).equal(5 * X)
    assert "kind" in told  # it was not used up
    assert repr(Times("z", 3, factor=5.0)) == "Times('z', 3, factor=5.0)"
    assert repr(Times("z", 3, when="pre")) == "Times('z', 3, when='pre')"
    assert "tensor[3]" in repr(Times("0", factor=X))


def test_files_keep_lists_bit_for_bit(tmp_path: Path) -> None:
    factor = torch.randn(3).to(torch.bfloat16)
    made = [
        Times("0", factor=factor),
        Record(("z", 5), positions=slice(0, 2), heads=(0, 2)),
        Record(["0", ("z", 1)], dtype="float16"),
    ]
    Hooks(made).save(tmp_path / "hooks.safetensors")
    times, record, several = Hooks.load(tmp_path / "hooks.safetensors")
    assert isinstance(times, Times)
    assert isinstance(record, Record)
    assert isinstance(several, Record)
    assert isinstance(times.factor, Tensor)
    assert times.factor.dtype == torch.bfloat16
    assert times.factor.equal(factor)
    assert (record.hook_point, record.positions, record.heads) == (("z", 5), slice(0, 2), [0, 2])
    assert (several.hook_point, several.dtype) == (["0", ("z", 1)], "float16")


def test_what_cannot_be_written_down_is_said(tmp_path: Path) -> None:
    record = Record(lambda name: name == "0")
    with pytest.raises(ValueError, match="hook_point is a function"):
        Hooks([record]).save(tmp_path / "hooks.safetensors")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=r"no class of hook objects is called 'Tmies'.*Times"):
        HookObject.from_dict({"kind": "Tmies"})
    with pytest.raises(ValueError, match="hook object 1: its factor is a float32, which a file cannot hold"):
        Hooks([Times("0"), Times("0", factor=np.float32(2))]).save(tmp_path / "hooks.safetensors")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "other").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Hooks.load(tmp_path / "other")


class Built(Times):
    """A user's class that is no dataclass of its settings."""

    def __init__(self, site: str, amount: float) -> None:
        super().__init__(site)
        self.amount = amount


def test_a_class_with_a_constructor_of_its_own_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"its fields differ in amount, factor, hook_point.*Make the class a dataclass"
    ):
        Hooks([Built("0", 2.0)]).save(tmp_path / "hooks.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_bad_targets() -> None:
    with pytest.raises(ValueError, match="Times needs a hook_point"):
        Times()
    with pytest.raises(ValueError, match="when must be 'pre' or 'post', got 'after'"):
        Times("0", when="after")
    model = net()
    with pytest.raises(UnknownSite, match="no hook point '7'"), model.hooks([Times("0"), Times("7")]):
        pass
    assert model.list_hooks() == {}
    assert model(X).equal(X)


def test_a_direction_goes_to_gradients() -> None:
    with net().hooks([NanGradientGuard("0")]) as model:
        loss = (model(X.clone().requires_grad_()) * torch.tensor([1.0, torch.inf, 1.0])).sum()
    with pytest.raises(ValueError, match=r"the gradient at '0' is inf at \[1\]"):
        loss.backward()


def test_a_list_of_hooks_takes_one_object_and_refuses_functions(tmp_path: Path) -> None:
    Hooks(Times("0")).save(tmp_path / "one")
    [loaded] = Hooks.load(tmp_path / "one")
    assert (type(loaded), loaded.hook_point) == (Times, "0")
    pairs = Hooks(Times("0"))
    pairs.append(("0", print))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"only hook objects can be saved, not \('0', <built-in"):
        pairs.save(tmp_path / "pair")
    assert not (tmp_path / "pair").exists()
