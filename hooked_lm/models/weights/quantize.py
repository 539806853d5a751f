"""Weight-only quantisation of a model by torchao: `model.quantize("int8")`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hooked_lm.components.axes import Axes, axes_of
from hooked_lm.extras import quiet_torchao
from hooked_lm.models.weights.quantized_weight import QuantizedWeight
from hooked_lm.models.weights.weight_scope import refuse_open_scopes

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig

ROUTER = "W_router"  # which is never quantised
INT4_GROUPS = (128, 64, 32)
INT4_OUT = 16  # outputs that kernels pack together


@dataclass(frozen=True)
class Quantized:
    """What `quantize` did: the names of the quantised weights, and the bytes of all weights of the model.

    `left` are the weights of the blocks, but for routers, that were not quantised, with the reason.
    """

    names: tuple[str, ...]
    left: dict[str, str]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        sizes = f"{self.bytes_before / 2**20:.1f} MiB of weights -> {self.bytes_after / 2**20:.1f} MiB"
        reasons = [f"\nnot quantised: {name}: {reason}" for name, reason in self.left.items()]
        return f"{len(self.names)} weights quantised, {sizes}{''.join(reasons)}"


class QuantizeMethods:
    """`quantize` of a model."""

    def quantize(self, config: "str | AOBaseConfig" = "int8") -> Quantized:
        """Quantises the weights of the blocks in place, weight-only, with torchao (`pip install 'hooked-lm[quantization]'`).

        The weights of attention and MLPs, also of experts, become packed integers with scales. They keep name, shape and
        dtype. Embeddings, unembedding, routers, norms and biases stay as they are. Each weight is quantised by itself, so that
        only one at a time is in memory in both forms. This is a method of a model, and no option of `from_pretrained`, because
        weights are quantised last: after folding, and after any change of the weights by hand.

        Every site exists and can be edited, and gradients flow to activations, as in a model with the dequantised weights.
        Weights that are not multiplied as one matrix are dequantised where they are used, e.g. `model.W_O`, and `W_Q` with one
        input for each head. The weights cannot be changed, trained, folded, exported or saved.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> done = model.quantize("int8")
        >>> done.bytes_after < done.bytes_before, model.blocks[0].attn.W_Q.shape
        (True, torch.Size([8, 128, 16]))

        Args:
            config: "int8", one scale for each output; "int4", one scale and zero for each 128 inputs (64 or 32 if 128 does not
                divide their number), for models in bfloat16; or a weight-only config of torchao, such as
                `Int8WeightOnlyConfig(granularity=...)`.

        Raises ValueError if the model is quantised already, for configs that quantise activations, for "int4" in another dtype,
        and if no weight can be quantised; ImportError without torchao. All this is checked before any change.
        """
        assert isinstance(self, nn.Module)
        return quantize(self, config)


@quiet_torchao()
@torch.no_grad()
def quantize(model: nn.Module, config: "str | AOBaseConfig") -> Quantized:
    """Quantises the weights of a model in place; see `QuantizeMethods.quantize`."""
    refuse_open_scopes(model, "quantize()")
    refuse_quantized(model, "quantize()", "to quantise it in another way, load the model again")
    _check_config(config)
    plan, left = _planned(model, config)
    if not plan:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left.items()) or "it has no attention and no MLP"
        raise ValueError(f"no weight of this model can be quantised: {reasons}")
    before, names = weight_bytes(model), [*plan]
    for name in names:
        holders, axes, one = plan.pop(name)  # popped, so that the memory of each weight is freed before the next
        parameter = getattr(*holders[0])
        packed = _packed(axes.matrix(parameter), one)
        strided = axes.weight(torch.empty(packed.shape, dtype=packed.dtype, device="meta"), parameter.shape)
        weight = nn.Parameter(QuantizedWeight(packed, strided, name), requires_grad=False)
        for module, leaf in holders:
            module._parameters[leaf] = weight
    return Quantized(tuple(names), left, before, weight_bytes(model))


# Of one weight: the modules that hold it and its name there, its axes, and the config of torchao for it.
Planned = tuple[list[tuple[nn.Module, str]], Axes, "AOBaseConfig"]


def _planned(model: nn.Module, config: "str | AOBaseConfig") -> tuple[dict[str, Planned], dict[str, str]]:
    """The weights to quantise, by the first of their names, and the reasons why others are left."""
    plan: dict[str, Planned] = {}
    left: dict[str, str] = {}
    first_names: dict[int, str] = {}  # of parameters, which several modules may share
    in_blocks = _beginnings_of_blocks(model)
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None or not leaf.startswith("W_") or not path.startswith(in_blocks):
                continue
            name = first_names.setdefault(id(parameter), f"{path}.{leaf}")
            if leaf == ROUTER:
                continue
            if (axes := axes_of(module, leaf)) is None or axes.reason is not None:
                left[name] = "its module states no axes of it" if axes is None else str(axes.reason)
                continue
            getattr(module, leaf)  # a module that is split over processes refuses
            if name in plan:
                plan[name][0].append((module, leaf))
                continue
            matrix = axes.matrix(parameter)
            chosen = _config_named(config, matrix) if isinstance(config, str) else config
            reason = chosen if isinstance(chosen, str) else _obstacle(chosen, matrix)
            if isinstance(chosen, str) or reason is not None:
                left[name] = str(reason)
            else:
                plan[name] = ([(module, leaf)], axes, chosen)
    return plan, left


def _beginnings_of_blocks(model: nn.Module) -> tuple[str, ...]:
    """What the names of modules in blocks begin with, also in the towers of the model."""
    owners = [(f"{path}." if path else "", module) for path, module in model.named_modules()]
    return tuple(f"{path}{stack.blocks}." for path, module in owners for stack in getattr(module, "stacks", ()))


def _config_named(name: str, matrix: Tensor) -> "AOBaseConfig | str":
    """The config of torchao that "int8" or "int4" stands for, for a matrix [out, in]; or why it cannot be quantised."""
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig

    if name == "int8":
        return Int8WeightOnlyConfig(set_inductor_config=False)
    group = next((size for size in INT4_GROUPS if matrix.shape[1] % size == 0), None)
    if group is None:
        return f"its {matrix.shape[1]} inputs are no multiple of {INT4_GROUPS[-1]}, the smallest group of int4"
    if matrix.dtype != torch.bfloat16:  # a GPU has no other kernel, and that of a CPU is 100 times slower
        raise ValueError(
            f"quantize('int4') needs a model in bfloat16, and this one is in {matrix.dtype}: load it with dtype=torch.bfloat16, "
            "or call model.to(torch.bfloat16) before"
        )
    if matrix.device.type == "cpu":
        return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)
    return Int4WeightOnlyConfig(group, set_inductor_config=False, int4_packing_format="tile_packed_to_4d")


def _obstacle(config: "AOBaseConfig", matrix: Tensor) -> str | None:
    """Why a matrix [out, in] cannot be quantised by a config; None if it can."""
    d_out, d_in = matrix.shape
    granularity = getattr(config, "granularity", None)
    size = getattr(config, "group_size", None) or getattr(granularity, "group_size", None) or 1
    if d_in % size:
        return f"its {d_in} inputs are no multiple of group_size={size}"
    if type(config).__name__ == "PrototypeInt4WeightOnlyConfig" and d_out % INT4_OUT:
        return f"its {d_out} outputs are no multiple of {INT4_OUT}, which int4 on a CPU needs"
    return None


def _check_config(config: "str | AOBaseConfig") -> None:
    """Raises ImportError without torchao, and ValueError for what is no weight-only config."""
    try:
        from torchao.core.config import AOBaseConfig
    except ImportError as error:
        raise ImportError("quantize() needs torchao: pip install 'hooked-lm[quantization]'") from error
    is_weight_only = isinstance(config, AOBaseConfig) and "WeightOnly" in type(config).__name__
    if not is_weight_only and config not in ("int8", "int4"):
        raise ValueError(
            f"config={config!r}: expected 'int8', 'int4' or a weight-only config of torchao, such as Int8WeightOnlyConfig(). "
            "Configs that quantise activations too are not supported: a projection would round its input, and no site shows that"
        )


def _packed(matrix: Tensor, config: "AOBaseConfig") -> Tensor:
    """The matrix, packed by torchao."""
    from torchao.quantization import quantize_

    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix.detach().contiguous(), requires_grad=False)
    quantize_(linear, config)
    packed = linear.weight.detach()
    if type(packed) is Tensor:
        raise ValueError(f"torchao does not quantise a weight [{matrix.shape[0]}, {matrix.shape[1]}] by {config}")
    return packed


# ---- quantised models ----------------------------------------------------------------------------------------------


def _quantized_weights(model: nn.Module) -> list[tuple[nn.Module, str, QuantizedWeight]]:
    """The quantised weights, each with every module that holds it and its name there."""
    found = []
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            weight: Tensor | None = parameter
            if isinstance(weight, QuantizedWeight):
                found.append((module, leaf, weight))
    return found


def weight_bytes(model: nn.Module) -> int:
    """The memory of the parameters of a model in bytes."""
    return sum(p.nbytes for p in model.parameters())


def refuse_quantized(model: nn.Module, what: str, remedy: str) -> None:
    """Raises ValueError if the model has quantised weights."""
    if found := _quantized_weights(model):
        weight = found[0][2]
        raise ValueError(
            f"{what} is not for quantised weights, and {weight.path!r} is quantised: {weight.remedy(remedy)}"
        )


@contextmanager
def quantized_apart(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Removes the quantised weights of a model within the block, in which `convert` is applied to all others, and moves them.

    Raises ValueError for a conversion to another dtype.
    """
    found = _quantized_weights(model)
    moved: dict[int, nn.Parameter] = {}
    for _, _, weight in found:
        probe = convert(torch.empty(0, dtype=weight.dtype, device=weight.device))
        if probe.dtype != weight.dtype:
            raise ValueError(
                f"{weight.path!r} is quantised, and quantised weights have one dtype, here {weight.dtype}: load the model with "
                f"dtype={probe.dtype}, or convert it before it is quantised"
            )
        if probe.device != weight.device and id(weight) not in moved:
            moved[id(weight)] = nn.Parameter(weight.to_device(probe.device), requires_grad=False)
    for module, leaf, _ in found:
        module._parameters[leaf] = None
    try:
        yield
    finally:
        for module, leaf, weight in found:
            module._parameters[leaf] = moved.get(id(weight), weight)  # type: ignore[arg-type]
