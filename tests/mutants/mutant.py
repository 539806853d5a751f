"""A mutant: the package with one fault, which a test has to notice."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import SourceLoader
from pathlib import Path
from types import CodeType, FunctionType

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """A fault in words, where it is, and the tests that should notice it.

    `original` occurs once in `file`, a file of `hooked_lm`, in the body of a function, and becomes `replacement`. `tests` are
    names of files and folders of `tests`, with spaces between them; `hooks/test_scope.py::closed` are the tests of a file whose
    names contain a word.
    """

    name: str
    file: str
    original: str
    replacement: str
    tests: str

    @property
    def path(self) -> Path:
        return ROOT / "hooked_lm" / self.file

    @property
    def module(self) -> str:
        return ".".join(["hooked_lm", *Path(self.file).with_suffix("").parts]).removesuffix(".__init__")

    def sources(self) -> tuple[str, str]:
        """The file as it is, and with its fault."""
        text = self.path.read_text(encoding="utf-8")
        if (times := text.count(self.original)) != 1:
            raise ValueError(f"mutant '{self.name}': {self.original!r} occurs {times} times in {self.file}, not once")
        return text, text.replace(self.original, self.replacement)


def mutants(rows: dict[str, list[tuple[str, str, str, str]]]) -> list[Mutant]:
    """Mutants from a table by files: a row has the name, the tests, the original and the replacement."""
    return [
        Mutant(name, file, original, replacement, tests)
        for file, faults in rows.items()
        for name, tests, original, replacement in faults
    ]


def install(mutant: Mutant) -> None:
    """Gives the functions that contain the fault their new code, in this process, wherever they are wrapped or imported.

    Neither source nor bytecode is written. Raises ValueError if the fault is not in the body of a function.
    """
    loader = import_module(mutant.module).__loader__
    assert isinstance(loader, SourceLoader), "it also compiles the checks of annotations"
    sources, file = mutant.sources(), str(mutant.path)
    if len({around_functions(source) for source in sources}) > 1:
        raise ValueError(f"mutant '{mutant.name}': {mutant.original!r} is not in the body of a function")
    changed = dict(pairs(*(loader.source_to_code(source.encode(), file) for source in sources)))
    functions = [f for f in gc.get_objects() if type(f) is FunctionType and f.__code__.co_filename == file]
    for function in functions:
        function.__code__ = changed.get(function.__code__, function.__code__)


def around_functions(source: str) -> str:
    """What is left of a module without the bodies of its functions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    return ast.dump(tree)


def pairs(was: CodeType, now: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """The code of each class and function inside of the code of a module, before and after a change."""
    inside = ([each for each in code.co_consts if isinstance(each, CodeType)] for code in (was, now))
    for old, new in zip(*inside, strict=False):
        yield old, new
        yield from pairs(old, new)
