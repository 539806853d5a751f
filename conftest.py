"""Holds for every test, of `tests/` and of the package's docstrings alike; hence at the top, above both."""

import inspect
import os
import random
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from beartype import BeartypeConf, beartype
from hypothesis import settings

# Every annotated call in the package is checked. It has to come before the package's first import. What has no shapes in its
# annotations is checked by beartype alone, in a tenth of the time: jaxtyping would open a table of sizes for it. But jaxtyping
# alone passes over the names in quotes that are there for type checkers only.
with_shapes = jaxtyping.jaxtyped
without = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def checked(*, typechecker: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(made: Any) -> Any:
        kinds = made.__annotations__.values() if inspect.isfunction(made) else ["of a class"]
        if not any(isinstance(kind, str) or "jaxtyping" in repr(kind) or "ForwardRef" in repr(kind) for kind in kinds):
            return without(made)
        return with_shapes(made, typechecker=typechecker)

    return decorate


jaxtyping.jaxtyped = checked
jaxtyping.install_import_hook("hooked_lm", "beartype.beartype")

os.environ["HF_HUB_OFFLINE"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; so do the processes that they start
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50, database=None)
settings.load_profile("ci" if "CI" in os.environ else "local")


@pytest.fixture(autouse=True)
def same_seeds_in_every_test() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what others draw from the global generator has to repeat, too)
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is `once_a_family`, the first config of a family runs always; its others are slow."""
    seen: dict[tuple[str, str], object] = {}
    for item in items:
        if item.get_closest_marker("once_a_family") is not None and isinstance(item, pytest.Function):
            case = item.callspec.params["case"]
            if seen.setdefault((item.nodeid.split("[")[0], case.family), case) is not case:
                item.add_marker("slow")


collect_ignore = [
    "tests/benchmarks/peer_sweeps.py",  # it runs with another project's Python
    "hooked_lm/compat/lent",  # a package under another name
]
if find_spec("sae_lens") is None:  # in the clients' environment alone: `make clients`
    collect_ignore += ["tests/clients", "tests/compat/against"]
