"""Holds for every test, of `tests/` and of the package's docstrings alike; hence at the top, above both."""

import gc
import inspect
import os
import random
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, wraps
from importlib.util import find_spec
from types import CellType, CodeType, FunctionType, SimpleNamespace
from typing import Any, get_type_hints

import jaxtyping
import numpy as np
import pytest
import torch
from beartype import BeartypeConf, beartype
from hypothesis import settings

# Every annotated call in the package is checked. It has to come before the package's first import. Beartype alone checks what
# has no shapes in its annotations, and the rest within a table of sizes: jaxtyping's own decorator would check each argument
# twice, and bind it in Python besides.
with_shapes = jaxtyping.jaxtyped
by_beartype = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))
inner: dict[CodeType, tuple[dict[str, Any], Any]] = {}  # annotations and checks of functions in functions


def checked(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(made: Any) -> Any:
        if is_dataclass(made) and "__init__" in vars(made):
            made.__init__ = in_a_table_of_sizes(made.__init__)
            return made
        if not inspect.isfunction(made) or inspect.isgeneratorfunction(made):
            return with_shapes(made, typechecker=typechecker)
        kinds = made.__annotations__.values()
        if not kinds or (jaxtyping.config.jaxtyping_disable and "<locals>" in made.__qualname__):
            return made
        if any(isinstance(kind, str) or "jaxtyping" in repr(kind) or "ForwardRef" in repr(kind) for kind in kinds):
            return in_a_table_of_sizes(made)
        return strict(made)

    return decorate


def in_a_table_of_sizes(made: Any) -> Any:
    """The function, whose calls are checked: the name of an axis has one size in all arguments and in what is returned."""
    checks, table, config = strict(made), with_shapes("context"), jaxtyping.config

    def call(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return made(*args, **kwargs)
        with table:
            return checks(*args, **kwargs)

    # fingerprints see through the wrappers of jaxtyping
    return wraps(made)(FunctionType(call.__code__, {"__name__": "jaxtyping"}, made.__name__, None, call.__closure__))


def strict(made: Any) -> Any:
    """The function with beartype's checks. A function in a function is made anew in each call, but its checks only once."""
    if "<locals>" not in made.__qualname__:
        return by_beartype(without_quotes(made, made.__closure__))
    kinds, checks = inner.get(made.__code__, (None, None))
    if kinds != made.__annotations__:
        checks = by_beartype(without_quotes(made, tuple(CellType() for _ in made.__closure__ or ())))
        inner[made.__code__] = made.__annotations__, checks
    fixed = {name: made if x is checks.__wrapped__ else x for name, x in (checks.__kwdefaults__ or {}).items()}
    if made not in fixed.values():  # there is nothing to check
        return made
    again = FunctionType(checks.__code__, checks.__globals__, made.__name__)
    again.__kwdefaults__ = fixed
    return wraps(made)(again)


def without_quotes(made: Any, closure: tuple[CellType, ...] | None) -> FunctionType:
    """A copy of the function, in whose annotations names in quotes are the types; or anything, if they are for type checkers."""
    copy = FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = made.__kwdefaults__, made.__qualname__
    copy.__annotations__ = {name: resolved(kind, made.__globals__) for name, kind in made.__annotations__.items()}
    return copy


def resolved(kind: Any, names: dict[str, Any]) -> Any:
    """The type that an annotation means."""
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"kind": kind}), names, include_extras=True)["kind"]
    except NameError:
        return Any


gc.disable()  # while modules are imported, nothing is garbage: see pytest_collection_finish
jaxtyping.jaxtyped = checked
jaxtyping.install_import_hook("hooked_lm", "beartype.beartype")

os.environ["HF_HUB_OFFLINE"] = "1"

# Workers share the cores, so each computes in one thread, as do the processes that it starts; or in as many as TEST_THREADS says.
if threads := os.environ.get("TEST_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else ""):
    torch.set_num_threads(int(threads))
    os.environ["OMP_NUM_THREADS"] = threads

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("ci" if "CI" in os.environ else "local")


@pytest.fixture(autouse=True)
def same_seeds_in_every_test() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what others draw from the global generator has to repeat, too)
    # on a CPU alone without a call of torch.manual_seed, which records for other devices from where it was called
    torch.manual_seed(0) if torch.accelerator.is_available() else torch.default_generator.manual_seed(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and tests in a file, in a random order")


def pytest_report_header(config: pytest.Config) -> str:
    return (
        f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads, shuffle {config.option.shuffle}"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thins the table of architectures for the fast suite: the first config of the families that stand for all, or of every
    family. Then shuffles, if asked to; tests of one model stay together, which is built once."""
    from tests.core import (
        CORE,
        IMAGES,
    )  # not before the tests themselves: the clients bring a package of that name, too

    seen: dict[tuple[str, str], object] = {}
    for item in items:
        case = case_of(item)
        if case is not None:
            first = seen.setdefault((item.nodeid.split("[")[0], case.family), case) is case
            if not first or not (case.family in (*CORE, *IMAGES) or item.get_closest_marker("every_family")):
                item.add_marker("slow")
    if (seed := config.option.shuffle) is not None:
        place = cache(lambda *names: random.Random(f"{seed} {names}").random())
        items.sort(key=lambda item: (place(item.path), place(item.path, str(case_of(item))), place(item.nodeid)))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not go through it again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()


def case_of(item: pytest.Item) -> Any:
    """The line of the table of architectures that a test is about."""
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return case if hasattr(case, "family") else None


collect_ignore = [
    "tests/benchmarks/peer_sweeps.py",  # it runs with another project's Python
    "hooked_lm/compat/shim",  # a package under another name
]
if find_spec("sae_lens") is None:  # in the clients' environment alone: `make clients`
    collect_ignore += ["tests/clients", "tests/compat/against"]
