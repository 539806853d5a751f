"""Loading a model from tensors: all or nothing, and which memory is shared."""

import copy

import pytest
import torch
from torch import nn

from hooked_lm.weights import Row, export, load
from tests.weights.small import H, Model, N, rows, same, tensors


def test_parameters_are_views_unless_something_changes():
    model, source = Model(), tensors()
    load(model, source, rows())
    assert model.W_E.data_ptr() == source["t.wte.weight"].data_ptr()
    storages = {getattr(model.blocks[1], f"W_{x}").untyped_storage().data_ptr() for x in "QKV"}
    assert storages == {source["t.h.1.qkv"].data_ptr()}
    kept = {name: tensor.clone() for name, tensor in source.items()}
    load(model, source, rows(), copy=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert same(source, kept)


def test_conversion_keeps_the_order_of_the_strides_and_integers():
    model, source = Model(), tensors()
    model.blocks[0].scale = torch.zeros(1, dtype=torch.int64, device="meta")
    source["t.h.0.scale"] = torch.tensor([5])
    load(model, source, rows(), dtype=torch.float64)
    query = model.blocks[0].W_Q
    assert query.dtype == torch.float64
    assert model.blocks[0].scale.dtype == torch.int64
    assert query.stride() == (H, N * H, 1)
    assert query.untyped_storage().nbytes() == 8 * query.numel()
    load(model, source, rows(), device="meta")
    assert model.W_E.is_meta
    assert model.W_E.dtype == torch.float32


def test_parameters_stay_parameters_and_buffers_that_are_not_persistent_stay_unchanged():
    model = Model()
    before = model.blocks[0].cache
    load(model, tensors(), rows())
    assert isinstance(model.W_U, nn.Parameter)
    assert not model.W_U.requires_grad
    assert model.W_E.requires_grad
    assert not isinstance(model.blocks[0].scale, nn.Parameter)
    assert "blocks.0.scale" in model.state_dict()
    assert model.blocks[0].cache is before


def test_tied_weights_are_equal_but_independent():
    model, source = Model(), tensors()
    load(model, source, rows())
    assert torch.equal(model.W_U, model.W_E.T)
    with torch.no_grad():
        model.W_U.add_(1.0)
    assert torch.equal(model.W_E, source["t.wte.weight"])
    assert not torch.equal(model.W_U, model.W_E.T)
    with pytest.raises(ValueError, match="'W_U' no longer equals the weight that the checkpoint ties"):
        export(model, rows())


def test_a_tied_tensor_in_the_file_must_be_equal():
    model, source = Model(), tensors()
    source["lm_head.weight"] = source["t.wte.weight"]  # two names of the same memory, as in many pickles
    load(model, source, rows())
    assert model.W_U.data_ptr() != model.W_E.data_ptr()
    source["lm_head.weight"] = source["t.wte.weight"] + 1
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs from 't.wte.weight'"):
        load(Model(), source, rows())
    source.pop("t.wte.weight")
    with pytest.raises(ValueError, match=r"no tensor 't.wte.weight'"):
        load(Model(), source, rows())


def test_two_names_of_the_same_memory_become_two_parameters():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    one = torch.randn(3, 3)
    load(model, {"x": one, "y": one}, [Row("x", "a.weight"), Row("y", "b.weight")])
    assert model["a"].weight.data_ptr() == one.data_ptr() != model["b"].weight.data_ptr()


def test_names_with_or_without_the_prefix():
    bare = {name.removeprefix("t."): tensor for name, tensor in tensors().items()}
    bare["h.0.mask"] = torch.ones(1)
    model = Model()
    load(model, bare, rows(), prefix="t.", ignore=["t.h.*.mask"])
    assert torch.equal(model.W_E, bare["wte.weight"])
    with pytest.raises(ValueError, match=r"no tensor 't.wte.weight'"):
        load(model, {**bare, "t.h.1.scale": bare.pop("h.1.scale")}, rows(), prefix="t.", ignore=["*.mask"])


def fused_too_short(source):
    source["t.h.1.qkv"] = source["t.h.1.qkv"][:, :-1]


def transposed(source):
    source["t.wte.weight"] = source["t.wte.weight"].T


BAD = {
    "extra": (lambda t: t.update({"t.h.0.extra": torch.ones(1)}), "no row for the tensor 't.h.0.extra'"),
    "missing": (lambda t: t.pop("t.h.1.qkv"), "no tensor 't.h.1.qkv' for 'blocks.1.W_Q'"),
    "short": (fused_too_short, r"Row 't.h.1.qkv' -> .* expected \[6, 36\], got \[6, 35\]"),
    "transposed": (transposed, r"expected \[10, 6\], got \[6, 10\]"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_checkpoint_that_does_not_fit_changes_nothing(case):
    model, source = Model("cpu"), tensors()
    before, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    spoil, message = BAD[case]
    spoil(source)
    with pytest.raises(ValueError, match=message):
        load(model, source, rows())
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert same(model.state_dict(), values)


class Breaks(Row):
    """A row whose shapes fit, and that fails when its tensor is read."""

    def to_target(self, source, shape=None):
        raise OSError("the disk is gone")


@pytest.mark.parametrize("position", range(len(rows())))
def test_an_error_while_loading_changes_nothing(position):
    model, chosen = Model("cpu"), rows()
    before, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    row = chosen[position]
    chosen[position] = Breaks(row.source, row.target, row.pattern, take=row.take, tied=row.tied, **row.axes)
    with pytest.raises(OSError, match="disk"):
        load(model, tensors(), chosen)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert same(model.state_dict(), values)


def test_rows_that_do_not_fit_the_model_are_named():
    source = tensors()
    complete = rows()
    without_K = [row for row in complete if row.target != "blocks.0.W_K"]
    with pytest.raises(ValueError, match=r"(?s)no row for 'blocks.0.W_K'.*33% of 't.h.0.qkv' .* taken by no row"):
        load(Model(), source, without_K)
    with pytest.raises(ValueError, match=r"no row for 'blocks.0.W_K'"):
        export(Model("cpu"), without_K)
    with pytest.raises(ValueError, match=r"no 'blocks.0.W_KK' .did you mean 'blocks.0.W_K'"):
        load(
            Model(),
            source,
            [*without_K, Row("t.h.0.qkv", "blocks.0.W_KK", "m (x n h) -> n m h", x=3, take={"x": 1})],
        )
    with pytest.raises(ValueError, match="two rows fill 'W_E'"):
        load(Model(), source, [*complete, Row("t.wte.weight", "W_E")])
    with pytest.raises(ValueError, match=r"still has l: call expand"):
        load(Model(), source, [Row("t.h.{l}.scale", "blocks.{l}.scale")])
    twice = [row for row in complete if row.target != "W_U"] + [Row("t.wte.weight", "W_U", "v m -> m v")]
    with pytest.raises(ValueError, match="another row takes too"):
        load(Model(), source, twice)
    with pytest.raises(ValueError, match="another row takes too"):
        export(Model("cpu"), twice)


def test_integers_are_refused_for_floating_point_parameters() -> None:
    model = torch.nn.Linear(3, 2, bias=False, device="meta")
    with pytest.raises(ValueError, match=r"'w' is torch.int32, not floating point"):
        load(model, {"w": torch.zeros(2, 3, dtype=torch.int32)}, [Row("w", "weight")])


def test_own_dtype_keeps_the_dtype_of_the_model() -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(3, device="meta")) for name in ("narrow", "wide")})
    source = {"a": torch.rand(3), "b": torch.rand(3)}
    load(model, source, [Row("a", "narrow"), Row("b", "wide")], dtype=torch.bfloat16, own_dtype=["wide"])
    assert model["narrow"].dtype == torch.bfloat16
    assert torch.equal(model["wide"], source["b"])
