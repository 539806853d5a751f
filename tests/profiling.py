"""What a run of the tests costs: the targets of the Makefile load it, `make test-profile` prints all of it.

CPU seconds of the process and of those that it started, so that other load on the machine hardly shows; and their ratio to a
yardstick, so that machines can be compared. Each test is charged with its fixtures, its call and its teardown; what a worker
spends besides, on imports, collection and messages, is charged to the worker. `--profile` prints tables by folder, by module, by
test function and by family, and writes every number to `build/test-profile.json`.
"""

import json
import os
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.yardstick import in_yardsticks, yardstick

OUT = Path("build/test-profile.json")
PHASES = ("setup", "call", "teardown")
ROWS = 25  # of the tables by module, test and family
seconds_of_tests: dict[str, dict[str, float]] = defaultdict(dict)  # by node id and phase; in the controller all of them
seconds_of_workers: list[dict[str, float]] = []
marks = {"configured": 0.0, "collected": 0.0}


def cpu_seconds() -> float:
    """The CPU seconds of this process and of those of its children that have ended."""
    return sum(os.times()[:4])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--profile", action="store_true", help="print where the CPU seconds go")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Measures the yardstick, of which workers need none, before `--rounding` slows kernels down."""
    marks["configured"] = cpu_seconds()
    if not hasattr(config, "workerinput"):
        marks["yardstick"] = yardstick()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    marks["collected"] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, Any]:
    """Charges a phase with what was used since the last one ended."""
    report = yield
    now = cpu_seconds()
    report.cpu_seconds = now - marks.get("last", marks["collected"])
    marks["last"] = now
    return report


def pytest_runtest_logreport(report: Any) -> None:
    """In the controller, of all workers; `cpu_seconds` travels with the report."""
    seconds_of_tests[report.nodeid][report.when] = report.cpu_seconds


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    used = {
        "imports": marks["configured"],
        "collection": marks["collected"] - marks["configured"],
        "all": cpu_seconds(),
    }
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu_seconds"] = used
    elif not session.config.getoption("numprocesses", None):
        seconds_of_workers.append(used)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    seconds_of_workers.append(node.workeroutput["cpu_seconds"])


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    everything, unit = sum(worker["all"] for worker in seconds_of_workers), marks["yardstick"]
    terminalreporter.write_line(in_yardsticks(everything, unit))
    if config.option.profile:
        for line in tables():
            terminalreporter.write_line(line)
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps({"workers": seconds_of_workers, "tests": seconds_of_tests, "yardstick": unit}))


def tables() -> Iterable[str]:
    """Where the seconds went."""
    for part in ("imports", "collection"):
        yield f"{sum(worker[part] for worker in seconds_of_workers):8.1f}  {part}, of {len(seconds_of_workers)} workers"
    for phase in PHASES:
        seconds = sum(phases.get(phase, 0) for phases in seconds_of_tests.values())
        yield f"{seconds:8.1f}  {phase} of {len(seconds_of_tests)} tests"
    tests = {name: sum(phases.values()) for name, phases in seconds_of_tests.items()}
    groups = {"folder": folder_of, "module": module_of, "test function": function_of, "family": family_of}
    for title, key in groups.items():
        yield f"\nby {title}: CPU seconds, tests"
        yield from table(tests, key)


def table(tests: dict[str, float], key: Callable[[str], str | None]) -> Iterable[str]:
    """The sums of the seconds of tests by a part of their names, the largest first."""
    groups: dict[str, list[float]] = defaultdict(list)
    for name, seconds in tests.items():
        if (group := key(name)) is not None:
            groups[group].append(seconds)
    rows = sorted(groups.items(), key=lambda row: -sum(row[1]))
    yield from (f"{sum(seconds):8.1f} {len(seconds):6}  {group}" for group, seconds in rows[:ROWS])
    if len(rows) > ROWS:
        rest = [x for _, seconds in rows[ROWS:] for x in seconds]
        yield f"{sum(rest):8.1f} {len(rest):6}  {len(rows) - ROWS} more"


def module_of(name: str) -> str:
    return name.split("::")[0]


def folder_of(name: str) -> str:
    parts = Path(module_of(name)).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def function_of(name: str) -> str:
    return name.split("[")[0]


def family_of(name: str) -> str | None:
    """The first parameter's text up to its first hyphen, in the modules of the table of architectures."""
    if not name.startswith("tests/families") or "[" not in name:
        return None
    return name.split("[")[1].removesuffix("]").split("-")[0].split("@")[0]
