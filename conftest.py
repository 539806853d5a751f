"""Holds for every test, of `tests/` and of the package's docstrings alike; hence at the top, above both."""

import gc
import os
import random
from contextlib import ExitStack
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings

from annotation_checks import check_annotations_of

gc.disable()  # while modules are imported, nothing is garbage: see pytest_collection_finish
check_annotations_of("hooked_lm")  # before the package's first import

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
    parser.addoption("--rounding", type=int, metavar="SEED", help="round as no processor does: see tests/rounding.py")


def pytest_configure(config: pytest.Config) -> None:
    """Before modules are imported, which compute too."""
    if (seed := config.option.rounding) is not None:
        from tests.rounding import rounding

        stack = ExitStack()
        stack.enter_context(rounding(seed))
        config.add_cleanup(stack.close)


def pytest_report_header(config: pytest.Config) -> str:
    processor, options = torch.backends.cpu.get_cpu_capability(), config.option
    return f"{processor}, {torch.get_num_threads()} threads, shuffle {options.shuffle}, rounding {options.rounding}"


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
    items.sort(key=lambda item: case_of(item) is not None)  # short ones last: no worker waits for the other
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
