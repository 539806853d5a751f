"""Holds for every test, of `tests/` and of the package's docstrings alike; hence at the top, above both."""

import gc
import os
import random
from contextlib import ExitStack
from datetime import date
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

if os.environ.get("TEST_DEVICE") != "cuda":  # else models would load on a GPU, where one failure ends the process
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import pytest
import torch
from hypothesis import settings

from annotation_checks import check_annotations_of

FAMILIES = Path(__file__).parent / "tests" / "families"

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
    parser.addoption("--part", metavar="I/N", help="of the slow tests run those whose names fall into part I of N")
    parser.addoption("--rounding", type=int, metavar="SEED", help="round as no processor does: see tests/rounding.py")
    today = int(date.today().strftime("%Y%m%d"))
    parser.addoption(
        "--seed", type=int, default=today, help="of the random configs of families; the day's, if not given"
    )
    parser.addoption("--draws", type=int, default=0, help="how many configs to draw of every family, from this seed on")


def pytest_configure(config: pytest.Config) -> None:
    """Before modules are imported, which compute too."""
    if (seed := config.option.rounding) is not None:
        from tests.rounding import rounding

        stack = ExitStack()
        stack.enter_context(rounding(seed))
        config.add_cleanup(stack.close)


def pytest_report_header(config: pytest.Config) -> list[str]:
    processor, options = torch.backends.cpu.get_cpu_capability(), config.option
    return [
        f"{processor}, {torch.get_num_threads()} threads, shuffle {options.shuffle}, rounding {options.rounding}",
        f"part {options.part} of the slow tests, seed {options.seed} (pytest --seed {options.seed} repeats the random configs)",
    ]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast suite does not import modules about single families, which have no fast test."""
    is_test = collection_path.parent == FAMILIES and collection_path.name.startswith("test_")
    is_left_out = is_test and config.option.markexpr == "not slow" and "EACH_CASE" not in collection_path.read_text()
    return is_left_out or None  # None: as other plugins say


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thins the fast suite. Then shuffles, if asked to; tests of one model stay together, which is built once."""
    seen: set[str] = set()
    for item in items:
        if item.get_closest_marker("slow") is None and not is_fast(item, seen):
            item.add_marker("slow")
    if (part := config.option.part) is not None:
        index, n = map(int, part.split("/"))
        assert index in range(n), f"--part {part}: the first number must be from 0 to {n - 1}"
        others = {item for item in items if item.get_closest_marker("slow") and crc32(unit_of(item)) % n != index}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    items.sort(key=lambda item: case_of(item) is not None)  # short ones last: no worker waits for the other
    if (seed := config.option.shuffle) is not None:
        place = cache(lambda *names: random.Random(f"{seed} {names}").random())
        items.sort(key=lambda item: (place(item.path), place(item.path, str(case_of(item))), place(item.nodeid)))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not go through it again and again."""
    gc.enable()
    gc.collect()
    gc.freeze()


def is_fast(item: pytest.Item, seen: set[str]) -> bool:
    """Whether a test that is not marked slow belongs to the fast suite; `seen` are the functions of those before.

    Of the table of architectures the first line of the families that stand for all; nothing else about single families, and no
    example of a docstring; of any other test the first parameters, unless it is marked `every_parameter`.
    """
    from tests.core import CORE, IMAGES  # not before the tests: the clients bring a package of that name, too

    case, function = case_of(item), item.nodeid.split("[")[0]
    if isinstance(item, pytest.DoctestItem) or (case is None and FAMILIES in item.path.parents):
        return False
    key = f"{function} {case.family}" if case is not None else function
    is_first = key not in seen
    seen.add(key)
    if case is not None:
        return is_first and case.family in (*CORE, *IMAGES)
    return is_first or item.get_closest_marker("every_parameter") is not None


def unit_of(item: pytest.Item) -> bytes:
    """The name of what a test shares its models with: of a line of the table of architectures all tests are in one part."""
    case = case_of(item)
    return (item.nodeid if case is None else str(case)).encode()


def case_of(item: pytest.Item) -> Any:
    """The line of the table of architectures that a test is about."""
    case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
    return case if hasattr(case, "family") else None


collect_ignore = [
    "tests/benchmarks/peer_sweeps.py",  # it runs with another project's Python
    "hooked_lm/compat/shim",  # a package under another name
]
if "TEST_DEVICE" not in os.environ:
    collect_ignore += ["tests/gpu"]  # `make test-gpu`
if find_spec("sae_lens") is None:  # in the clients' environment alone: `make clients`
    collect_ignore += ["tests/clients", "tests/compat/against"]
