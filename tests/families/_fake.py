"""A model on a device that has no values, which tells what crosses between it and the host."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hooked_lm import HookedEncoder, HookedEncoderDecoder
from hooked_lm.components import constants
from hooked_lm.components.attention.routed import RoutedAttention
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.stack_context import EncoderDecoderCache

DEVICE = "meta"  # stands for a GPU, of which PyTorch has no parts here


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
        out = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor) and given]
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


@contextmanager
def nothing_crosses(mode: FakeTensorMode) -> Iterator[None]:
    """Raises if the host reads a value of a tensor, or a tensor is copied from the host or to it."""
    crossings = Crossings()
    with mode, patch.object(constants, "_moved", crossings.constant(constants._moved)), crossings:
        yield
    assert not crossings.found, f"between host and device: {crossings.found}"


def on_device(model: nn.Module, mode: FakeTensorMode) -> Any:
    """A copy of the model on the device."""
    theirs = copy.deepcopy(model)
    made: dict[int, tuple[Tensor, Tensor]] = {}  # by id, with what has it, so that no other tensor gets it

    def fake(x: Tensor) -> Tensor:
        if id(x) not in made:
            empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
            made[id(x)] = x, nn.Parameter(empty, x.requires_grad) if isinstance(x, nn.Parameter) else empty
        return made[id(x)][1]

    with mode:
        for module in theirs.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: fake(x) for name, x in tensors.items() if x is not None})
    theirs.cfg.device = DEVICE
    return theirs


def edited(x: Tensor, hook: Any) -> Tensor:
    return x * 2 if x.is_floating_point() else x


@torch.no_grad()
def assert_nothing_crosses(model: nn.Module, n_prompt: int) -> None:
    """In a plain run, one with padding that is hooked everywhere and cached, and steps with a cache of keys and values.

    The tokens of each expert are a value that the host reads: what mixes experts is left out.
    """
    mode = FakeTensorMode()
    fake = on_device(model, mode)
    with ExitStack() as stack:
        stack.enter_context(patch.object(MoE, "mix", lambda self, x, weights, indices: x))
        stack.enter_context(patch.object(RoutedAttention, "computes_every_head", lambda self, x: True))
        stack.enter_context(nothing_crosses(mode))
        ids = torch.zeros(2, n_prompt, dtype=torch.long, device=DEVICE)
        inputs = (ids, ids) if isinstance(model, HookedEncoderDecoder) else (ids,)
        fake(*inputs)
        with fake.hooks([(name, edited) for name in fake.all_points()]):
            fake.run_with_cache(*inputs, attention_mask=torch.ones_like(ids))
        if not isinstance(model, HookedEncoder):
            generate(fake, *inputs)


def generate(model: Any, *inputs: Tensor) -> None:
    """Steps with a cache, as in generation: the text but for its last token, which follows."""
    *source, ids = inputs
    cache = EncoderDecoderCache(model.cfg.n_decoder_layers) if source else KeyValueCache(model.cfg.n_layers)
    mask = {} if source else {"attention_mask": torch.ones_like(ids[:, :-1])}
    model(*source, ids[:, :-1], past_kv_cache=cache, **mask)
    model(*(None for _ in source), ids[:, -1:], past_kv_cache=cache)
