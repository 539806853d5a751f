"""`make test-mutants`: faults in the package, one at a time, each of which the tests have to notice.

python -m tests.mutants [WORD ...]             mutants whose name or file contains one of the words; all, without one
python -m tests.mutants WORD --tests hooks     what other tests say of them; `tests/` itself is `.`
python -m tests.mutants --select all           with the slow tests
"""

import argparse
import sys
from collections.abc import Iterable

from tests.mutants.mutant import Mutant
from tests.mutants.running import Outcome, outcomes
from tests.mutants.table import MUTANTS


def main(arguments: list[str]) -> int:
    """The exit status: 1 if a mutant is not noticed, or if the tests fail without one."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Do the tests notice faults?")
    parser.add_argument("words", nargs="*", help="run the mutants whose name or file contains one of these words")
    parser.add_argument("--tests", nargs="*", default=[], help="tests to run instead of those in the table")
    parser.add_argument("--select", choices=["fast", "all"], default="fast", help="all: also the slow ones")
    parser.add_argument("--jobs", type=int, default=1, help="how many run side by side")
    options = parser.parse_args(arguments)
    words = options.words or [""]
    chosen = [mutant for mutant in MUTANTS if any(word in f"{mutant.file} {mutant.name}" for word in words)]
    if not chosen:
        parser.error(f"no mutant's name or file contains {' or '.join(map(repr, words))}")
    every = options.tests or sorted({name for mutant in chosen for name in mutant.tests.split()})
    [(_, control)] = outcomes([None], every, options.select, jobs=1)
    passed = f"{control.n_run} tests, {len(control.failed)} failed"
    print(f"without a fault: {passed}; {control.seconds:.0f} CPU seconds", flush=True)
    if control.trouble or control.failed:
        print(control.output)
        return 1
    return shown(outcomes(chosen, options.tests, options.select, options.jobs), control.seconds)


def shown(found: Iterable[tuple[Mutant, Outcome]], seconds: float = 0) -> int:
    """Prints a line for each mutant and then the sum; the exit status."""
    missed, total = [], 0
    for mutant, outcome in found:
        total, seconds = total + 1, seconds + outcome.seconds
        missing = outcome.trouble or f"NOT NOTICED by {outcome.n_run} tests"
        by = outcome.failed[0].removeprefix("tests/") if outcome.noticed else missing
        print(f"{mutant.file:40} {mutant.name:60} {outcome.seconds:5.1f} s  {by}", flush=True)
        if not outcome.noticed:
            missed.append(mutant)
            print(outcome.output, flush=True)
    print(f"{total - len(missed)} of {total} mutants are noticed; {seconds:.0f} CPU seconds")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
