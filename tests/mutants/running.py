"""Runs tests on mutants, each in a process of its own, forked from one that has imported what all tests need."""

import contextlib
import io
import os
import resource
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from typing import Any

import pytest
from hypothesis import Phase, settings

from tests.mutants.mutant import ROOT, Mutant, install

MAX_SECONDS = 300  # of CPU time: a fault may make a loop endless


@dataclass
class Outcome:
    """What became of the tests: those that failed, and what pytest printed."""

    failed: list[str] = field(default_factory=list)
    n_run: int = 0
    trouble: str = ""
    output: str = ""
    seconds: float = 0.0

    @property
    def noticed(self) -> bool:
        return bool(self.failed) and not self.trouble


@dataclass(eq=False)
class Chosen:
    """A plugin of pytest: keeps the tests that are named, and notes which fail."""

    tests: Sequence[str]
    outcome: Outcome

    def paths(self) -> list[str]:
        return sorted({str(ROOT / "tests" / name.partition("::")[0]) for name in self.tests})

    def keeps(self, item: pytest.Item) -> bool:
        parts = [name.partition("::") for name in self.tests]
        return any(item.path.is_relative_to(ROOT / "tests" / path) and word in item.name for path, _, word in parts)

    def pytest_configure(self) -> None:
        phases = [Phase.explicit, Phase.generate]  # a first example will do, which need not be small
        settings.register_profile("mutants", settings.get_profile("ci"), phases=phases)
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if self.keeps(item)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcome.n_run += report.when == "call"
        if report.failed:
            self.outcome.failed.append(report.nodeid)


def outcomes(
    mutants: Iterable[Mutant | None], tests: Sequence[str], select: str, jobs: int
) -> Iterator[tuple[Mutant | None, Outcome]]:
    """What the tests that are named, or else those of each mutant, say of it; None is the package without a fault."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.mutants.preload"])
    waiting, running = list(mutants), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop(0)
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=run, args=(mutant, tests or mutant.tests.split(), select, there))
            process.start()
            there.close()
            running[here] = mutant, process
        for pipe in connection.wait(list(running)):
            mutant, process = running.pop(pipe)
            try:
                yield mutant, pipe.recv()
            except EOFError:
                process.join()
                yield mutant, Outcome(trouble=f"the process ended with {process.exitcode}")


def run(mutant: Mutant | None, tests: Sequence[str], select: str, pipe: Any) -> None:
    """Runs the tests in this process, and sends the outcome."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    os.environ |= {"CI": "true", "TEST_THREADS": "1"}  # property-based tests draw the same examples in every run
    outcome, output = Outcome(), io.StringIO()
    chosen = Chosen(tests, outcome)
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options += ["-x"] if mutant else []
    options += ["-m", "not slow"] if select == "fast" else []
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if mutant is not None:
                install(mutant)
            code = pytest.main([*options, *chosen.paths()], plugins=[chosen])
            if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                outcome.trouble = f"pytest ended with {code!r}"
        except ValueError as error:
            outcome.trouble = str(error)
    outcome.output = output.getvalue()
    outcome.seconds = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    pipe.send(outcome)
