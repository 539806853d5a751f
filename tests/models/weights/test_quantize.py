"""Models with quantised weights: all sites equal those of the same model with the dequantised weights as ordinary tensors."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, IntxWeightOnlyConfig
from torchao.quantization.granularity import PerGroup

from hooked_lm import HookedEncoderDecoder, HookedTransformer, patching, pretrained
from hooked_lm.models.weights import quantized_weight
from hooked_lm.models.weights.quantize import weight_bytes
from hooked_lm.models.weights.quantized_weight import QuantizedWeight
from tests.close import GRADIENT, assert_apart, assert_close
from tests.core import marks
from tests.families import CASES
from tests.families._case import reference
from tests.families._models import hooked
from tests.models.toys import ids, toy

WIDE = {"d_model": 64, "n_heads": 4, "n_layers": 2}  # int4 has groups of at least 32 inputs
INT4_BY_GROUPS = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))
INT4 = PrototypeInt4WeightOnlyConfig(group_size=32)  # what "int4" is in bfloat16
CONFIGS: dict[str, Any] = {"int8": "int8", "int4": INT4, "groups of 16": INT4_BY_GROUPS}


def mixture() -> Any:
    case = next(case for case in CASES if case.family == "mixtral")
    return pretrained.from_pretrained_no_processing("mixtral", hf_model=reference(case), device="cpu")


MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: toy("tied", **WIDE),
    "llama": lambda: toy("rotary", **WIDE),
    "mixtral": mixture,
}


def dequantized(model: Any) -> Any:
    """A copy of a quantised model with the dequantised weights as ordinary tensors."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for name, weight in module._parameters.items():
            if isinstance(weight, QuantizedWeight):
                module._parameters[name] = nn.Parameter(weight.plain().clone(), requires_grad=False)
    return plain


CORE = [("gpt2", "int8"), ("llama", "int4"), ("mixtral", "int8")]
ROWS = [
    pytest.param((name, config), id=f"{name}-{config}", marks=[] if (name, config) in CORE else pytest.mark.slow)
    for name in MODELS
    for config in CONFIGS
]


@pytest.fixture(scope="module", params=ROWS)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A quantised model, and the same with ordinary weights."""
    name, config = request.param
    model = MODELS[name]().requires_grad_(False)
    done = model.quantize(CONFIGS[config])
    if (name, config) != ("mixtral", "int4"):  # whose MLPs of 48 neurons have no group of int4
        assert not done.left
    return model, dequantized(model)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be dequantised."""

    def refuse(packed: Tensor) -> Tensor:
        raise AssertionError("a weight was dequantised")

    monkeypatch.setattr(quantized_weight, "dequantized", refuse)


# ---- runs ----------------------------------------------------------------------------------------------------------------


def test_logits_and_all_sites(pair: tuple[Any, Any]):
    model, plain = pair
    expected, of_plain = plain.run_with_cache(ids(), names_filter=lambda name: True)
    logits, cache = model.run_with_cache(ids(), names_filter=lambda name: True)
    assert_close(logits, expected)
    assert cache.keys() == of_plain.keys()
    for site in of_plain:
        assert_close(cache[site], of_plain[site], msg=site)


def test_runs_use_the_packed_kernels(pair: tuple[Any, Any], by_kernels: None):
    model, _ = pair
    assert model(ids()).isfinite().all()
    _, cache = model.run_with_cache(ids())
    assert cache["pattern", 1].isfinite().all()


def test_edits(pair: tuple[Any, Any]):
    hooks = [("blocks.0.attn.hook_z", lambda z, hook: z * 0.5), ("blocks.1.hook_mlp_out", lambda out, hook: out + 1)]
    edited, expected = (each.run_with_hooks(ids(), fwd_hooks=hooks) for each in pair)
    assert_close(edited, expected)
    assert_apart(edited, pair[0](ids()))


def test_gradients_of_activations(pair: tuple[Any, Any]):
    found = []
    for model in pair:
        gradients: dict[str, Tensor] = {}

        def keep(gradient: Tensor, hook: Any, kept: dict[str, Tensor] = gradients) -> None:
            kept[hook.name] = gradient.clone()

        start = model.embed(ids()).detach().requires_grad_()
        sites = ["blocks.0.hook_resid_pre", "blocks.0.attn.hook_z", "blocks.0.attn.hook_q", "blocks.1.hook_resid_mid"]
        with model.hooks(fwd_hooks=[("hook_embed", lambda x, hook, s=start: s)], bwd_hooks=[(s, keep) for s in sites]):
            model(ids()).log_softmax(-1)[:, -1, 3].sum().backward()
        found.append({"embed": start.grad, **gradients})
    assert len(found[0]) == 5
    assert_close(found[0], found[1], GRADIENT)


def test_generation(pair: tuple[Any, Any]):
    options = {"max_new_tokens": 6, "do_sample": False, "verbose": False, "stop_at_eos": False}
    tokens = [model.generate(ids(2, 5), **options) for model in pair]
    assert torch.equal(*tokens)


def test_a_sweep_of_the_residual_stream(pair: tuple[Any, Any]):
    clean, corrupted = ids(1, 7), ids(1, 7, seed=1)

    def metric(logits: Tensor) -> Tensor:
        return logits[:, -1, 3] - logits[:, -1, 4]

    model, plain = pair
    scores = []
    for each in (model, plain):
        _, cache = each.run_with_cache(clean)
        scores.append(patching.get_act_patch_resid_pre(each, corrupted, cache, metric))
    assert_close(*scores)


def test_values_of_each_head_and_split_inputs(pair: tuple[Any, Any]):
    names = ["blocks.0.attn.hook_result", "blocks.1.hook_q_input", "blocks.1.attn.hook_q"]
    caches = [model.run_with_cache(ids(), names_filter=names)[1] for model in pair]
    for name in names:
        assert_close(caches[0][name], caches[1][name], msg=name)


# ---- weights -------------------------------------------------------------------------------------------------------------


def test_names_shapes_and_views_of_weights(pair: tuple[Any, Any]):
    model, plain = pair
    own = {name: (p.shape, p.dtype, p.device) for name, p in model.named_parameters()}
    assert own == {name: (p.shape, p.dtype, p.device) for name, p in plain.named_parameters()}
    assert torch.equal(model.W_O, plain.W_O)
    assert torch.equal(model.W_Q, plain.W_Q)
    assert_close(model.OV[0].norm(), plain.OV[0].norm())
    assert_close(model.blocks[0].attn.W_K[0] @ torch.ones(model.cfg.d_head), plain.blocks[0].attn.W_K[0].sum(1))


def test_memory():
    model = HookedTransformer.from_pretrained("demo")
    before = weight_bytes(model)
    assert before == sum(p.nbytes for p in model.parameters())
    in_blocks = sum(p.nbytes for name, p in model.named_parameters() if name.rpartition(".")[2] in LINEAR)
    int4 = copy.deepcopy(model)
    done = model.quantize("int8")
    assert (done.bytes_before, done.bytes_after) == (before, weight_bytes(model))
    assert before - done.bytes_after > 0.7 * in_blocks  # of float32, int8 leaves a quarter, and the scales
    assert (
        done.bytes_after - int4.quantize(INT4).bytes_after > 0.05 * in_blocks
    )  # half a byte, scales and zeros by groups of 32
    assert str(done).startswith("24 weights quantised, ")


LINEAR = {"W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"}


@pytest.mark.parametrize("config", ["int8", "int4"])
def test_half_precision(config: str):
    model = HookedTransformer.from_pretrained("demo", dtype=torch.bfloat16)
    done = model.quantize(config)
    logits, expected = model("The capital of France"), dequantized(model)("The capital of France")
    assert logits.dtype == torch.bfloat16
    assert_close(logits, expected)
    assert done.bytes_after < done.bytes_before


def test_every_expert_is_quantised():
    model = mixture()
    done = model.quantize()
    experts = [
        f"blocks.0.mlp.experts.{e}.W_{w}" for e in range(len(model.blocks[0].mlp.experts)) for w in ("in", "out")
    ]
    assert {*experts} <= {*done.names}
    assert "blocks.0.mlp.W_router" not in done.names


FIRST = {case.family: case for case in reversed(CASES)}


@pytest.mark.parametrize("family", [pytest.param(name, marks=marks(name)) for name in FIRST])
def test_every_matrix_of_a_block_is_quantised_or_left_with_a_reason(family: str):
    model = copy.deepcopy(hooked(FIRST[family]))
    of_blocks = re.compile(r"(.+\.)?(blocks|encoder|decoder)\.\d+\.(?!.*W_router).*\bW_\w+")
    matrices = {name for name, _ in model.named_parameters() if of_blocks.fullmatch(name)}
    if family == "squeezebert":  # whose matrices are all of groups
        with pytest.raises(ValueError, match="no weight of this model can be quantised") as refused:
            model.quantize("int8")
        assert all(f"{name}: it is block-diagonal" in str(refused.value) for name in matrices)
        return
    done = model.quantize("int8")
    assert matrices == {*done.names} | {*done.left}
    assert not {*done.names} & {*done.left}
    assert "its module states no axes of it" not in done.left.values()


DEQUANTISED = {"jetmoe": r"\.attn\.W_[QO]", "mimo_v2_flash": r"\.attn\.W_V"}  # of each expert, and times a factor


@pytest.mark.parametrize("family", [pytest.param(name, marks=marks(name)) for name in FIRST if name != "squeezebert"])
def test_what_is_packed_is_multiplied_packed(family: str, monkeypatch: pytest.MonkeyPatch):
    model = copy.deepcopy(hooked(FIRST[family]))
    model.quantize("int8")
    found, plain = set(), QuantizedWeight.plain

    def noted(weight: QuantizedWeight) -> Tensor:
        found.add(weight.path)
        return plain(weight)

    monkeypatch.setattr(QuantizedWeight, "plain", noted)
    tokens = ids(1, 9).clamp(min=3)
    model(tokens, tokens) if isinstance(model, HookedEncoderDecoder) else model(tokens)
    assert [name for name in found if not re.search(DEQUANTISED.get(family, "$^"), name)] == []
    assert bool(found) == (family in DEQUANTISED)


def test_a_weight_whose_module_does_not_state_its_axes():
    model = toy("rotary", **WIDE)
    model.blocks[0].mlp = type("Foreign", (nn.Module,), {})()
    model.blocks[0].mlp.W_in = nn.Parameter(torch.zeros(64, 8))
    done = model.quantize()
    assert done.left == {"blocks.0.mlp.W_in": "its module states no axes of it"}


def test_weights_that_do_not_fit_are_named():
    done = toy("standard", d_model=64, n_heads=4, d_head=8, d_mlp=72).to(torch.bfloat16).quantize("int4")
    assert {name for name in done.left if "blocks.0" in name} == {"blocks.0.mlp.W_in", "blocks.0.mlp.W_out"}
    assert "its 72 inputs are no multiple of 32" in done.left["blocks.0.mlp.W_out"]
    assert "its 72 outputs are no multiple of 16" in str(done)
    with pytest.raises(
        ValueError, match=r"no weight of this model can be quantised: blocks\.0\.attn\.W_Q: its 20 inputs"
    ):
        toy("standard", d_model=20, n_heads=1, d_mlp=20).quantize("int4")
    with pytest.raises(
        ValueError, match=r"quantize\('int4'\) needs a model in bfloat16, and this one is in torch\.float32"
    ):
        toy("standard", **WIDE).quantize("int4")


def test_copies_and_moves():
    model = toy("rotary", **WIDE)
    model.quantize()
    expected = model(ids())
    assert torch.equal(copy.deepcopy(model)(ids()), expected)
    assert torch.equal(model.to("cpu").cpu()(ids()), expected)
    moved = copy.deepcopy(model).to("meta")
    assert {p.device.type for p in moved.parameters()} == {"meta"}
    assert isinstance(moved.blocks[0].attn.W_Q, QuantizedWeight)
    assert (
        model.estimate((2, 8), what="cache").cache.nbytes
        == dequantized(model).estimate((2, 8), what="cache").cache.nbytes
    )


# ---- what is refused -----------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "again": (lambda m: m.quantize("int4"), r"quantize\(\) is not for quantised weights.*load the model again"),
    "fold": (
        lambda m: m.process_weights_(),
        r"fold_ln is not for quantised.*W_Q' is quantised: fold the weights before",
    ),
    "to_hf": (lambda m: m.to_hf(), r"to_hf and save_pretrained.*write the model before quantize"),
    "load": (lambda m: m.load_state_dict({}), r"load_state_dict is not for.*before quantize"),
    "load and process": (
        lambda m: m.load_and_process_state_dict({}),
        r"loading a state dict is not for.*before quantize",
    ),
    "init_weights": (lambda m: m.init_weights(), r"init_weights is not for"),
    "train": (
        lambda m: m.requires_grad_(True),
        r"'blocks\.0\.attn\.W_Q' is quantised \(Int8Tensor\).*changed or trained",
    ),
    "change": (lambda m: m.blocks[1].mlp.W_in.mul_(2), r"'blocks\.1\.mlp\.W_in' is quantised"),
    "assign": (lambda m: m.blocks[1].mlp.W_in.data.__setitem__(0, 2), r"'blocks\.1\.mlp\.W_in' is quantised"),
    "part": (lambda m: m.blocks[0].attn.W_O[3].zero_(), r"'blocks\.0\.attn\.W_O' is quantised"),
    "zeros": (lambda m: m.blocks[0].attn.W_O.mul_(0), r"'blocks\.0\.attn\.W_O' is quantised"),
    "fill": (lambda m: m.blocks[0].attn.W_O.fill_(False), r"'blocks\.0\.attn\.W_O' is quantised"),
    "out": (lambda m: torch.neg(m.W_E, out=m.blocks[0].mlp.W_in), r"'blocks\.0\.mlp\.W_in' is quantised"),
    "several": (lambda m: torch._foreach_zero_([m.blocks[0].mlp.W_in]), r"'blocks\.0\.mlp\.W_in' is quantised"),
    "init": (lambda m: nn.init.normal_(m.blocks[0].mlp.W_in), r"'blocks\.0\.mlp\.W_in' is quantised"),
    "in place": (lambda m: m.blocks[0].attn.W_O.__imul__(0), r"'blocks\.0\.attn\.W_O' is quantised"),
    "dtype": (lambda m: m.half(), r"have one dtype, here torch\.float32: load the model with dtype=torch\.float16"),
    "pickle": (lambda m: pickle.dumps(m.state_dict()), r"cannot be pickled or saved: keep the checkpoint"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_quantised_models_refuse(what: str):
    model = HookedTransformer.from_pretrained_no_processing("demo")
    model.quantize()
    expected = model("Mary")
    attempt, message = REFUSED[what]
    with pytest.raises(ValueError, match=message):
        attempt(model)
    assert torch.equal(model("Mary"), expected)


def test_freezing_a_quantised_model_changes_nothing():
    model = toy("rotary", **WIDE)
    model.quantize()
    model.requires_grad_(False).eval().zero_grad()
    model.blocks[0].mlp.W_in.grad = None
    model.blocks[0].mlp.W_in.requires_grad = False
    assert isinstance(model.blocks[0].mlp.W_in, QuantizedWeight)


def test_configs_that_are_no_weight_only_configs():
    model = toy("rotary", **WIDE)
    for config in ("int2", 8, Int8DynamicActivationInt8WeightConfig()):
        with pytest.raises(ValueError, match=r"config=.*: expected 'int8', 'int4' or a weight-only config of torchao"):
            model.quantize(config)
    assert not any(isinstance(p, QuantizedWeight) for p in model.parameters())


def test_without_torchao(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "torchao.core.config", None)
    with pytest.raises(ImportError, match=r"pip install 'hooked-lm\[quantization\]'"):
        toy().quantize()


def test_graphs_run_eagerly():
    model = toy("rotary", **WIDE)
    model.quantize()
    with pytest.warns(UserWarning, match="runs eagerly because of quantised weights"), torch.no_grad():
        assert torch.equal(model.compiled()(ids()), model(ids()))


# ---- a weight by itself ----------------------------------------------------------------------------------------------------


def weight(matrix: Tensor) -> QuantizedWeight:
    """[2 heads, d_model, 3] whose packed matrix is an ordinary tensor [6, d_model]."""
    return QuantizedWeight(matrix, matrix.to("meta").unflatten(0, (2, 3)).transpose(1, 2), "W")


def test_a_weight_is_a_view_of_its_matrix():
    matrix = torch.randn(6, 5)
    plain, W = matrix.unflatten(0, (2, 3)).transpose(1, 2), weight(matrix)
    assert (W.shape, W.stride(), W.dtype, W.nbytes) == (plain.shape, plain.stride(), plain.dtype, 120)
    assert W.transpose(1, 2).flatten(0, 1).is_matrix
    assert W.mT.reshape(6, 5).is_matrix
    assert rearrange(W, "n m h -> (n h) m").is_matrix
    assert type(W.flatten(1)) is Tensor
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda w: w.permute(2, 0, 1),
        lambda w: w.flatten(),
        lambda w: w.flatten(0, 1).T,
        lambda w: w[1],
        lambda w: w[:, None, 1:, ..., -1],
        lambda w: w[w > 0],
        lambda w: w.select(2, 1),
        lambda w: w[:, [0, 2]] * 2,
        lambda w: torch.einsum("nmh->mn", w),
        lambda w: torch.stack([w, w + 1]),
        lambda w: w.norm(dim=1),
        lambda w: w.double(),
        lambda w: w.repeat_interleave(2, 0),
        lambda w: torch.linalg.svdvals(w),
        lambda w: 1 - w,
    ]
    for function in functions:
        found, expected = function(W), function(plain)
        assert torch.equal(found.plain() if isinstance(found, QuantizedWeight) else found, expected)
        assert found.stride() == expected.stride()


def test_linear_of_every_view_and_input():
    matrix, x = torch.randn(6, 5), torch.randn(2, 4, 5)
    W, bias = weight(matrix), torch.randn(6, requires_grad=True)
    of_matrix = W.transpose(1, 2).flatten(0, 1)
    linear = nn.functional.linear
    assert_close(linear(x, of_matrix, bias), linear(x, matrix, bias))
    assert_close(linear(torch.randn(3, 6).relu(), of_matrix.T).shape, torch.Size([3, 5]))
    assert linear(x[:, :0], of_matrix).shape == (2, 0, 6)
    (gradient,) = torch.autograd.grad(linear(x, of_matrix, bias).sum(), bias)
    assert_close(gradient, torch.full((6,), 8.0))
    (gradient,) = torch.autograd.grad(linear(x[0, 0], of_matrix, bias).sum(), bias)
    assert_close(gradient, torch.ones(6))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, of_matrix), linear(x, matrix))


def test_second_derivatives():
    matrix, x = torch.randn(6, 5), torch.randn(2, 5)
    found = [
        torch.autograd.functional.hessian(lambda v, w=w: nn.functional.linear(v, w).tanh().sum(), x)
        for w in (weight(matrix).transpose(1, 2).flatten(0, 1), matrix)
    ]
    assert_close(*found, GRADIENT)
