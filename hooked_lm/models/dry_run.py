"""A dry run: the code of a run on tensors without values, which finds the memory that the run takes at its peak."""

import re
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from sys import _getframe
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from hooked_lm.components.readable import is_readable
from hooked_lm.errors import ArgumentError
from hooked_lm.hooks import HookPoint

aten, OF_FAKES = torch.ops.aten, FakeTensor.__torch_dispatch__
COMPUTED = 1 << 20  # entries of the largest tensors that are computed if they do not depend on weights
KEYS_AND_VALUES, SCORES = "keys and values", "attention scores"
FILES = {"hooked_lm.components.kv_cache": KEYS_AND_VALUES, "hooked_lm.components.masks": "attention masks"}
SUBLAYER = re.compile(r"((?:\w+\.)*?\w+\.\d+(?:\.\w+)?|\w+)")  # "blocks.3.attn" of "blocks.3.attn.hook_q"


class Allocation(NamedTuple):
    """Memory of a tensor: the part of the model that made it, and what it first held. `storage` identifies it."""

    storage: int
    part: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Memory:
    """The memory of one device: what is in use, and what was in use at the peak."""

    in_use: dict[int, Allocation] = field(default_factory=dict)
    now: int = 0
    peak: int = 0
    at_peak: tuple[Allocation, ...] = ()

    def add(self, made: Allocation) -> None:
        self.in_use[made.storage] = made
        self.now += made.nbytes

    def free(self, storage: int) -> None:
        self.note_peak()
        self.now -= self.in_use.pop(storage).nbytes

    def note_peak(self) -> None:
        """Called before memory is given back, and at the end."""
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, tuple(self.in_use.values())


class DryRun(TorchDispatchMode):
    """Runs what is called within it on tensors without values, and counts their memory on each device.

    Whatever depends on a weight has a shape, a dtype and a device, and no values. What does not, such as ids, is computed, up to
    1,048,576 entries. A question about a value that does not exist is answered with 0 or False, and one how many values
    differ from 0 with all of them. Weights and tensors made before are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.memory: dict[torch.device, Memory] = defaultdict(Memory)
        self.layer_rows = 0  # tokens times layers that the blocks compute
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._weights = {t.untyped_storage()._cdata: t for t in (*model.parameters(), *model.buffers())}
        self._names = {id(module): name for name, module in model.named_modules()}
        stacks = [stack.blocks_of(model) for stack in getattr(model, "stacks", ())]
        self._blocks = {id(block): block for blocks in stacks for block in blocks}
        self._on_meta = any(weight.is_meta for weight in self._weights.values())
        self._modules = [""]  # the names of those that are running, the innermost last
        self._storages: dict[int, int] = {}  # the address of a storage -> its number; 0: not counted
        self._n_storages = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """The run; its warnings are those of values that do not exist, and are not shown."""
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            for handle in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(handle.remove)
            for block in self._blocks.values():
                if hasattr(block, "make_keys"):  # of tokens that go no further in the layer
                    block.make_keys = partial(self._make_keys, block.make_keys)
                    stack.callback(delattr, block, "make_keys")
            stack.enter_context(self)
            yield
        for memory in self.memory.values():
            memory.note_peak()

    def without_values(self, value: Tensor) -> Tensor:
        """A tensor of the same shape, dtype and device without values."""
        made = value if isinstance(value, FakeTensor) else self._fake.from_tensor(value)
        self._pass_over(made)
        return made

    def number_of(self, value: Tensor) -> int | None:
        """The number of the memory of a value that was made in this run."""
        return self._storages.get(value.untyped_storage()._cdata)

    # ---- operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(type(each).__torch_dispatch__ not in (Tensor.__torch_dispatch__, OF_FAKES) for each in given):
            return NotImplemented  # a packed weight, which computes by itself
        for each in given:
            self._pass_over(each)
        if any(not is_readable(each) or each.untyped_storage()._cdata in self._weights for each in given):
            args, kwargs = tree_map_only(Tensor, self.without_values, (args, kwargs))
            made = self._without_values(func, args, kwargs)
        else:
            made = self._computed(func, args, kwargs)
        self._count(made)
        return made

    def _without_values(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation on values that do not exist."""
        if func is aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is aten.bincount.default:
            return _even_counts(*args, **kwargs)
        with self._fake:
            if func is aten.nonzero.default:
                return torch.stack(_all_places(args[0]), 1)
            if func is aten.index.Tensor:
                args = args[0], [place for index in args[1] for place in _places(index)]
            try:
                return func(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                raise ArgumentError(
                    f"this run cannot be estimated: the size of what {func} returns depends on values that only a run computes"
                ) from None

    def _computed(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation on values that do not depend on weights; without values if it is large or random."""
        try:
            with self._fake:
                sized = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return func(*args, **kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random or any(t.numel() > COMPUTED for t in tree_leaves(sized) if isinstance(t, Tensor)):
            return sized
        return func(*args, **kwargs)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _count(self, made: object) -> None:
        """Counts memory that a result has and its arguments have not."""
        for value in tree_leaves(made):
            if not isinstance(value, Tensor) or (value.is_meta and not self._on_meta):  # a note of a shape
                continue
            if (storage := value.untyped_storage())._cdata not in self._storages:
                self._n_storages += 1
                self._number(storage, self._n_storages)
                new = self._n_storages, self._part(), storage.nbytes(), tuple(value.shape), value.dtype
                self.memory[value.device].add(Allocation(*new))
                weakref.finalize(storage, self.memory[value.device].free, self._n_storages).atexit = False

    def _pass_over(self, value: Tensor) -> None:
        """Does not count the memory of a tensor that was made before."""
        if (storage := value.untyped_storage())._cdata not in self._storages:
            self._number(storage, 0)

    def _number(self, storage: torch.UntypedStorage, number: int) -> None:
        self._storages[storage._cdata] = number
        weakref.finalize(storage, self._storages.pop, storage._cdata, None).atexit = False

    def _part(self) -> str:
        """The part of the model that now computes."""
        if torch._C._current_graph_task_id() != -1:
            return "gradients"
        frame = _getframe()
        while frame.f_back is not None and not _is_outside(frame.f_globals.get("__name__", "")):
            frame = frame.f_back
        if (file := frame.f_globals.get("__name__", "")) in FILES:
            return FILES[file]
        found = SUBLAYER.match(self._modules[-1])
        return "all layers" if found is None else re.sub(r"\.\d+", ".*", found[1])

    # ---- modules -----------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._modules.append(self._names.get(id(module), self._modules[-1]))
        if not inputs or not isinstance(value := inputs[0], Tensor):
            return
        if id(module) in self._blocks:
            self.layer_rows += value.shape[:-1].numel()
        if isinstance(module, HookPoint) and "key_pos" in module.dims:
            in_use = self.memory[value.device].in_use
            if (made := in_use.get(self.number_of(value) or 0)) is not None:
                in_use[made.storage] = made._replace(part=SCORES)

    def _make_keys(self, make: Callable[..., object], rows: Tensor, *others: object) -> object:
        self.layer_rows += rows.shape[:-1].numel()
        return make(rows, *others)

    def _leave(self, module: nn.Module, inputs: object, output: object) -> None:
        self._modules.pop()


def dry_run_now() -> DryRun | None:
    """The dry run that is on, if one is: what is made now may lack values, and must not be kept for other runs."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, DryRun) else None


def _is_outside(name: str) -> bool:
    """Whether this is the name of a file of the library, and not of this one."""
    return name.startswith("hooked_lm.") and name != __name__


def _places(index: Tensor | None) -> list[Tensor | None]:
    """An index of a tensor, and the numbers of all entries in place of a mask whose values do not exist."""
    return [index] if index is None or index.dtype is not torch.bool else [*_all_places(index)]


def _all_places(mask: Tensor) -> list[Tensor]:
    """What `nonzero` finds where nothing is 0, a tensor for each axis; at most so many are found."""
    return [mask.new_empty(mask.numel(), dtype=torch.long) for _ in range(mask.ndim)]


def _even_counts(values: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """How many values there are of each, as if all but 0 were as frequent: experts get as many tokens as the others.

    How many tokens an expert gets depends on values; how many all experts of a layer get does not. 0 counts wrong choices.
    """
    n, n_choices = values.numel(), minlength - 1
    return torch.tensor([0, *(n // n_choices + (i < n % n_choices) for i in range(n_choices))])
