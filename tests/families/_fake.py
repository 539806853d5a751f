"""A model on a device that has no values, which tells what crosses between it and the host."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hooked_lm import HookedEncoder, HookedEncoderDecoder
from hooked_lm.components import constants
from hooked_lm.components.experts.moe import AbstractMoE
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.stack_context import EncoderDecoderCache
from hooked_lm.families.decoders.jetmoe.routed import RoutedAttention
from tests.unchecked import unchecked

DEVICE = "meta"  # stands for a GPU: reading a value of its tensors is an error
READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
BY_ZERO = {torch.ops.aten.remainder.Tensor}  # which zeros cannot show
FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}
BY_INDEX = {Tensor.__getitem__, Tensor.__setitem__}


class Crossings(TorchDispatchMode):
    """Records operations that read a tensor of the host for the device, or the reverse.

    A host's number (a tensor without dimensions) may be an argument of an operation on the device, which is launched with it, and
    constants may be copied when they are made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.is_constant = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if runs_on_zeros(func) and "device" not in kwargs and any(map(is_on_device, given)):
            out = replaced(func(*replaced(args, zeros_for), **replaced(kwargs, zeros_for)), empty_like)
        else:
            out = func(*args, **kwargs)
        made = tensors_in(out) if given else []
        numbers = [] if len(given) == 1 or "copy" in str(func) else [x for x in given if x.ndim == 0]
        sides = {x.device.type for x in given + made if not any(x is number for number in numbers)}
        if len(sides) > 1 and not self.is_constant:
            self.found.append(str(func))
        return out

    def constant(self, move: Any) -> Any:
        """The function that moves constants, unrecorded."""

        def moved(*args: Any) -> Any:
            self.is_constant = True
            try:
                return move(*args)
            finally:
                self.is_constant = False

        return moved


@cache
def runs_on_zeros(func: Any) -> bool:
    """Whether an operation may run on zeros of the host to learn the shape of its result.

    Without values PyTorch takes twenty times as long. Views and changes in place have to share memory, and what reads values
    has to fail.
    """
    shares = any(argument.alias_info is not None for argument in func._schema.arguments)
    return bool(func._schema.returns) and not shares and READS.isdisjoint(func.tags) and func not in BY_ZERO


def tensors_in(given: Any) -> list[Tensor]:
    """The tensors among arguments or results."""
    if isinstance(given, Tensor):
        return [given]
    parts = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else ()
    return [x for part in parts for x in tensors_in(part)]


def replaced(given: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Arguments or results with other tensors."""
    if isinstance(given, Tensor):
        return change(given)
    if isinstance(given, dict):
        return {name: replaced(part, change) for name, part in given.items()}
    return type(given)(replaced(part, change) for part in given) if type(given) in (list, tuple) else given


def zeros_for(x: Tensor) -> Tensor:
    """Zeros of the host in place of a tensor of the device."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).zero_() if is_on_device(x) else x


def empty_like(x: Tensor) -> Tensor:
    """A tensor of the device in place of one of the host."""
    empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    return nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty


def is_on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == DEVICE


class HostNumbers(TorchFunctionMode):
    """Records lists and numbers of the host that become tensors of the device, be it as indices.

    A GPU waits for their copy; on a device without values it is no operation that `Crossings` would see.
    """

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in FROM_NUMBERS and is_on_device(out):
            source = tree_leaves((args[1:] if func is Tensor.new_tensor else args, kwargs))
            self.found += [] if any(map(is_on_device, source)) else [func.__name__]
        elif func in BY_INDEX and is_on_device(args[0]):
            indices = args[1] if isinstance(args[1], tuple) else (args[1],)
            self.found += [f"{func.__name__} of a list" for x in indices if isinstance(x, (Sequence, np.ndarray))]
        return out


@contextmanager
def nothing_crosses() -> Iterator[None]:
    """Raises if the host reads a value of a tensor of the device, or a tensor is copied from the host or to it."""
    crossings = Crossings()
    constants_may = patch.object(constants, "_moved", crossings.constant(constants._moved))
    with constants_may, crossings, HostNumbers(crossings.found):
        yield
    assert not crossings.found, f"between host and device: {crossings.found}"


def on_device(model: nn.Module) -> Any:
    """A copy of the model on the device."""
    tensors = [*model.parameters(), *model.buffers()]
    theirs = copy.deepcopy(model, {id(x): empty_like(x) for x in tensors})
    theirs.cfg.device = DEVICE
    return theirs


def edited(x: Tensor, hook: Any) -> Tensor:
    return x * 2 if x.is_floating_point() else x


@torch.no_grad()
@unchecked()
def assert_nothing_crosses(model: nn.Module, n_prompt: int) -> None:
    """In a plain run, one with padding that is hooked everywhere and cached, and steps with a cache of keys and values.

    The host reads the tokens of each expert, and what hooks made of the states of a recurrence: what mixes experts is left out,
    and states are cached only.
    """
    fake = on_device(model)
    with ExitStack() as stack:
        stack.enter_context(patch.object(AbstractMoE, "mix", lambda self, x, weights, indices: x))
        stack.enter_context(patch.object(RoutedAttention, "computes_every_head", lambda self, x: True))
        stack.enter_context(nothing_crosses())
        ids = torch.zeros(2, n_prompt, dtype=torch.long, device=DEVICE)
        inputs = (ids, ids) if isinstance(model, HookedEncoderDecoder) else (ids,)
        fake(*inputs)
        with fake.hooks([(name, edited) for name in fake.all_points() if not name.endswith(".mixer.hook_state")]):
            fake.run_with_cache(*inputs, attention_mask=torch.ones_like(ids), names_filter=lambda name: True)
        if not isinstance(model, HookedEncoder):
            generate(fake, *inputs)


def generate(model: Any, *inputs: Tensor) -> None:
    """Steps with a cache, as in generation: the text but for its last token, which follows."""
    *source, ids = inputs
    cache = EncoderDecoderCache(model.cfg.n_decoder_layers) if source else KeyValueCache(model.cfg.n_layers)
    mask = {} if source else {"attention_mask": torch.ones_like(ids[:, :-1])}
    model(*source, ids[:, :-1], past_kv_cache=cache, **mask)
    model(*(None for _ in source), ids[:, -1:], past_kv_cache=cache)
