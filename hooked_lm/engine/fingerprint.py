"""A digest of everything that determines the results of a study, so that it does not resume from the file of another one.

Tensors are hashed by their bytes, functions by their code and everything that it refers to.
"""

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hooked_lm.engine.edit import Cell, Change, Edit
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.placement import is_mover
from hooked_lm.models.vision.inputs import Rows
from hooked_lm.models.weights.digest import tensor_digest
from hooked_lm.models.weights.weight_scope import scoped_values

PLAIN = (type(None), bool, int, float, complex, str, bytes, range, type(...), torch.dtype, torch.device, torch.Size)
AUTOCAST = ("cpu", "cuda", "mps")  # devices with a mode of their own
LAST_CALL = {"padding": None, "truncation": None}  # what a tokenizer keeps of it
WRAPPERS = ("jaxtyping", "beartype")  # packages whose wrappers only check annotations


class Unknown(TypeError):
    """An object whose contents cannot be hashed."""


class Digest:
    """Digests of values; each object is hashed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, bytes]] = {}  # keeps the values alive, so that ids are not reused

    def of(self, value: Any) -> bytes:
        """The digest of any value; raises Unknown, with the type, if it contains an object that cannot be hashed."""
        if isinstance(value, PLAIN):
            return _hashed(type(value).__name__, repr(value))
        if id(value) not in self._known:
            self._known[id(value)] = value, _hashed("met before", str(len(self._known)))  # for cyclic references
            self._known[id(value)] = value, _hashed(type(value).__qualname__, *self._parts(value))
        return self._known[id(value)][1]

    def _parts(self, value: Any) -> Iterator[bytes | str]:
        for kinds, parts in self._KINDS:
            if isinstance(value, kinds):
                return parts(self, value)
        return self._of_object(value)

    def _of_tensor(self, value: Tensor) -> Iterator[bytes | str]:
        yield from (str(value.dtype), str(tuple(value.shape)), tensor_digest(value))

    def _of_array(self, value: np.ndarray) -> Iterator[bytes | str]:
        if value.dtype.hasobject:
            yield from map(self.of, (value.shape, value.tolist()))
        else:
            yield from (str(value.dtype), str(value.shape), np.ascontiguousarray(value).tobytes())

    def _of_sequence(self, value: Sequence[Any]) -> Iterator[bytes | str]:
        yield from map(self.of, value)

    def _of_mapping(self, value: Mapping[Any, Any]) -> Iterator[bytes | str]:
        for key, item in value.items():
            yield from (self.of(key), self.of(item))

    def _of_set(self, value: set[Any] | frozenset[Any]) -> Iterator[bytes | str]:
        yield from sorted(map(self.of, value))

    def _of_module(self, value: ModuleType) -> Iterator[bytes | str]:
        """By its name and version, if it is installed. What a function may reach in another one cannot be known."""
        if not _is_installed(value.__name__):
            raise Unknown(f"the module '{value.__name__}', of which anything may be used,")
        yield _full_name_of_module(value)

    def _of_model(self, value: nn.Module) -> Iterator[bytes | str]:
        """By the classes of its modules, its parameters and buffers, its configuration and its hooks."""
        for name, part in value.named_modules():
            yield name
            yield self.of(type(part))
            if not isinstance(part, HookPoint):
                own = vars(part).items()
                yield self.of({name: of for name, of in own if isinstance(of, PLAIN) and not name.startswith("_")})
            for function in [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]:
                if not is_mover(function):  # results do not depend on devices
                    yield self.of(function)
        for name, tensor in [*value.named_parameters(), *value.named_buffers(), *scoped_values(value)]:
            yield from (name, self.of(tensor))
        cfg = getattr(value, "cfg", None)
        if dataclasses.is_dataclass(cfg):
            fields = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
            yield self.of({name: of for name, of in fields.items() if name != "device"})
        if isinstance(value, HookedRootModule):
            for name, hooks in value.list_hooks().items():
                yield name
                for hook in hooks:
                    is_on = getattr(hook.user_hook, "is_enabled", True)  # here: it may be switched off in a block
                    yield self.of((hook.dir, hook.when, is_on, hook.user_hook))

    def _of_function(self, value: FunctionType) -> Iterator[bytes | str]:
        while hasattr(value, "__wrapped__") and _root(value.__globals__.get("__name__")) in WRAPPERS:
            value = value.__wrapped__
        if _is_installed(value.__module__) and "<locals>" not in value.__qualname__:
            yield _full_name(value)
            return
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__, vars(value))
        yield from map(self.of, parts)
        names = set(_names(value.__code__))
        for name in sorted(names & set(value.__globals__)):
            reached = value.__globals__[name]
            yield name
            yield from self._reached(reached, names) if isinstance(reached, ModuleType) else [self.of(reached)]

    def _reached(
        self, module: ModuleType, names: set[str], above: tuple[ModuleType, ...] = ()
    ) -> Iterator[bytes | str]:
        """What a function with these names in its code reaches in a module: `scores` of `mymetrics.scores(x)`."""
        found = sorted(names & set(vars(module))) if not _is_installed(module.__name__) else []
        if not found:
            yield self.of(module)
        for name in found:
            inner = vars(module)[name]
            yield name
            if not isinstance(inner, ModuleType):
                yield self.of(inner)
            elif inner not in above:  # modules that import each other
                yield from self._reached(inner, names, (*above, module))

    def _of_code(self, value: CodeType) -> Iterator[bytes | str]:
        yield from (value.co_code, *map(self.of, (value.co_names, value.co_freevars, value.co_consts)))

    def _of_cell(self, value: CellType) -> Iterator[bytes | str]:
        try:
            yield self.of(value.cell_contents)
        except ValueError:  # an unbound variable
            yield "empty"

    def _of_method(self, value: MethodType) -> Iterator[bytes | str]:
        yield from map(self.of, (value.__func__, value.__self__))

    def _of_builtin(self, value: BuiltinFunctionType) -> Iterator[bytes | str]:
        owner = value.__self__
        yield from (_full_name(value), self.of(owner))

    def _of_class(self, value: type) -> Iterator[bytes | str]:
        yield _full_name(value)
        if not _is_installed(value.__module__):
            yield from map(self.of, value.__bases__)
            for name, member in sorted(vars(value).items()):
                if isinstance(member, FunctionType) or not name.startswith(("__", "_abc_")):
                    yield from (name, self.of(member))

    def _of_wrapper(self, value: Any) -> Iterator[bytes | str]:
        yield self.of(value.__func__)

    def _of_property(self, value: property) -> Iterator[bytes | str]:
        yield from map(self.of, (value.fget, value.fset))

    def _of_cached(self, value: "functools._lru_cache_wrapper[object]") -> Iterator[bytes | str]:
        """By the function whose results `functools.cache` keeps."""
        yield self.of(value.__wrapped__)

    def _of_partial(self, value: Any) -> Iterator[bytes | str]:
        yield from map(self.of, (value.func, value.args, value.keywords))

    def _of_object(self, value: Any) -> Iterator[bytes | str]:
        """By its reduced form for pickle."""
        yield self.of(type(value))
        try:
            reduced = value.__reduce_ex__(4)
        except TypeError:
            raise Unknown(f"a {_full_name(type(value))}") from None
        if isinstance(reduced, str):  # where to find it, not what it is
            if not _is_installed(getattr(value, "__module__", None)):
                raise Unknown(f"'{reduced}', a {_full_name(type(value))}")
            yield reduced
        else:
            for part in reduced:
                yield self.of(list(part) if isinstance(part, Iterator) else part)

    _KINDS: Sequence[tuple[Any, Callable[..., Iterator[bytes | str]]]] = (
        (Tensor, _of_tensor), (np.ndarray, _of_array), (nn.Module, _of_model), ((tuple, list), _of_sequence),
        (dict, _of_mapping), ((set, frozenset), _of_set), (ModuleType, _of_module), (FunctionType, _of_function),
        (CodeType, _of_code), (CellType, _of_cell), (MethodType, _of_method), (BuiltinFunctionType, _of_builtin),
        (type, _of_class), ((classmethod, staticmethod), _of_wrapper), (functools.partial, _of_partial),
        (property, _of_property), (type(functools.cache(len)), _of_cached),
    )  # fmt: skip


def fingerprint(
    model: HookedRootModule,
    runs: Sequence[Rows | None],
    metrics: Mapping[str, Any],
    cells: Iterable[tuple[Sequence[int], Cell]],
    about: Any,
) -> str:
    """The digest of a study: its model, the tokens of its runs, its metrics by name, its cells by grid index, and `about`.

    A metric that cannot be hashed is identified by its name. Raises ValueError if it has none, and for hooks and changes that
    cannot be hashed.
    """
    digest = Digest()
    parts = [*map(digest.of, (version("hooked-lm"), str(torch.__version__), modes(), about, list(runs)))]
    for name, metric in metrics.items():
        parts.append(digest.of(name))
        try:
            parts.append(digest.of(metric))
        except Unknown as error:
            if not name:
                raise ValueError(
                    f"a sweep with a resume_file must identify its metric, and this one holds {error}, whose "
                    "contents cannot be hashed: give the metric a name that identifies it, metric={'a name for it': metric}"
                ) from None
    try:
        parts.append(digest.of(model))
        for place, cell in cells:
            parts += [digest.of(tuple(place)), *(digest.of(part) for change in cell for part in _parts_of(change))]
    except Unknown as error:
        raise ValueError(
            f"a sweep with a resume_file must identify hooks and changes, and one of these holds {error}, whose "
            "contents cannot be hashed: run it without resume_file"
        ) from None
    return _hashed(*parts).hex()


def modes() -> dict[str, str]:
    """The settings of torch under which the same forward pass has other results: autocast, and float32 products in less."""
    on = [device for device in AUTOCAST if torch.is_autocast_enabled(device)]
    found = {f"autocast on {device}": str(torch.get_autocast_dtype(device)) for device in on}
    precision = torch.get_float32_matmul_precision()
    return found if precision == "highest" else {**found, "precision of float32 products": precision}


def tokenizer_digest(tokenizer: Any) -> str:
    """A hash of what a tokenizer does, but for the padding and truncation of its last call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    about = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str()) | LAST_CALL
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _parts_of(change: Change) -> tuple[Any, ...]:
    if isinstance(change, Edit):
        return change.site, change.positions, change.rest, change.rows, change.value
    return change.site, change.function


def _hashed(*parts: bytes | str) -> bytes:
    """One digest of several parts, each with its length, so that part boundaries matter."""
    digest = hashlib.sha256()
    for part in parts:
        part = part.encode() if isinstance(part, str) else part
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _full_name_of_module(value: ModuleType) -> str:
    """The name of an installed module, and the version of its package."""
    return f"{value.__name__} {getattr(sys.modules.get(_root(value.__name__)), '__version__', '')}"


def _full_name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"


def _names(code: CodeType) -> Iterator[str]:
    """The global names that a function, including nested functions, may refer to."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _is_installed(module: str | None) -> bool:
    """Whether a module belongs to Python, this package or an installed one, so that names identify its contents."""
    root = _root(module)
    if root == "__main__":  # also of a script that was installed
        return False
    if root in sys.stdlib_module_names or root in ("builtins", "hooked_lm"):
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
