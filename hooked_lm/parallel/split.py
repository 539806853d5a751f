"""Splits a model over the processes of torch.distributed, and gathers its weights."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hooked_lm.components.blocks.block import Block
from hooked_lm.hooks import HookPoint
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.weights.quantize import refuse_quantized
from hooked_lm.parallel import attention, mlp, moe
from hooked_lm.parallel.guard import SplitModule
from hooked_lm.parallel.points import SPLIT_AXES
from hooked_lm.parallel.ranks import Ranks

Model = TypeVar("Model", bound=Decoder)


class Kind(NamedTuple):
    """How modules of some classes are split."""

    obstacles: Callable[[Any, Ranks], Iterator[str]]
    split: Callable[[Any, Ranks], nn.Module]


KINDS: dict[type[nn.Module], Kind] = {
    **dict.fromkeys(attention.CLASSES, Kind(attention.obstacles, attention.split_attention)),
    **dict.fromkeys(mlp.CLASSES, Kind(mlp.obstacles, mlp.split_mlp)),
    **dict.fromkeys(moe.CLASSES, Kind(moe.obstacles, moe.split_moe)),
}


def tensor_parallel(model: Model, group: dist.ProcessGroup | None = None) -> Model:
    """Splits a model, in place, over the processes of a group: heads, neurons and experts; returns the model.

    Every process builds or loads the same model (on the CPU, where a checkpoint is memory-mapped and a rank reads only its
    part), splits it, then moves it to its device, and makes the same calls: runs, hooks and gradients are collective. Hooks and
    caches have full tensors on every rank; see `local` for a rank's part. Embeddings, norms, routers and state-space mixers are
    replicated.

    Raises RuntimeError outside of torch.distributed, TypeError for a model that is no decoder of text, ValueError if ranks have
    different weights or if components cannot be split, with their names and the reasons.
    """
    ranks = Ranks(group)
    if not isinstance(model, Decoder) or model.sites_of_images:
        raise TypeError(f"tensor_parallel splits decoders of text, and a {type(model).__name__} is none")
    if any(isinstance(module, SplitModule) for module in model.modules()):
        raise ValueError("this model is split already")
    if model.device_map is not None or model.offloaded is not None:
        raise ValueError("this model has a device_map; load it on one device, and split it there")
    refuse_quantized(model, "tensor_parallel", "split the weights as they were loaded")
    plan = [(name, module, KINDS[type(module)]) for name, module in _splittable(model)]
    problems = [f"{name}: {reason}" for name, module, kind in plan for reason in kind.obstacles(module, ranks)]
    problems += _unknown_components(model, [name for name, *_ in plan])
    if problems:
        raise ValueError(f"this model cannot be split over {ranks.size} ranks: " + "; ".join(problems))
    _check_same_weights(model, [name for name, *_ in plan], ranks)
    for name, module, kind in plan:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, kind.split(module, ranks))
    model.setup()
    model.cfg.processed = (*model.cfg.processed, "tensor_parallel")  # it cannot be exported
    return model


def _splittable(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The outermost modules of the classes in `KINDS`."""
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if type(module) in KINDS and not any(name.startswith(f"{outer}.") for outer, _ in found):
            found.append((name, module))
    return found


def _unknown_components(model: nn.Module, known: list[str]) -> list[str]:
    """The other components with an axis of heads or neurons. Inputs per head of a block are split where attention reads them."""
    problems = {}
    for name, point in model.named_modules():
        parent = name.rpartition(".")[0]
        if not isinstance(point, HookPoint) or any(name.startswith(f"{outer}.") for outer in known):
            continue
        component = model.get_submodule(parent)
        if any(axis in SPLIT_AXES for axis in point.dims) and not isinstance(component, Block):
            problems[parent] = f"{parent}: {type(component).__name__} cannot be split"
    return list(problems.values())


def _check_same_weights(model: nn.Module, split: list[str], ranks: Ranks) -> None:
    """Raises ValueError if weights that are not split differ between ranks."""
    outside = [w for name, w in model.named_parameters() if not any(name.startswith(f"{part}.") for part in split)]
    sums = torch.stack([weight.detach().double().sum() for weight in outside])
    lengths = ranks.gathered(torch.tensor([len(sums)], device=sums.device), 0)
    if len(set(lengths.tolist())) > 1 or not torch.equal(*torch.aminmax(ranks.gathered(sums[None], 0), dim=0)):
        raise ValueError("ranks have different weights: load the same checkpoint on each, or build with the same seed")


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a split model on every rank, as `load_state_dict` of the whole model takes them; all ranks call it."""
    gathers = {
        id(weight): gather
        for module in model.modules()
        if isinstance(module, SplitModule)
        for weight, gather in module.full_weights()
    }
    state = {}
    for name, module in model.named_modules():
        kept = {key: buffer for key, buffer in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, value in {**module._parameters, **kept}.items():
            if value is not None:
                gather = gathers.get(id(value))
                state[f"{name}.{key}" if name else key] = value.detach().clone() if gather is None else gather()
    return state
