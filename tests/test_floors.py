"""The package's architecture, enforced: who may import whom, and how long a file or a function may be."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hooked_lm"

# The first name after `hooked_lm` -> its floor. Imports go down, or stay in their own folder.
FLOORS = {
    "errors": -2,  # classes of exceptions
    "files": -2,  # of the standard library alone
    "hub_files": -2,  # of the hub's cache
    "extras": -2,  # optional packages
    "callers": -3,  # who called the package
    "keywords": -3,  # the names of arguments
    "renamed": -2,  # former names of arguments
    "progress": -2,  # progress bars
    "notebook_repr": -2,  # what notebooks show, as strings
    "viz": -1,  # pictures of tensors, strings and tables
    "hooks": 0,
    "factored_matrix": 0,  # a value that needs torch alone, and that components and models hand out
    "components": 1,
    "results": 1,  # numbers with named axes
    "models": 2,
    "weights": 2,
    "families": 3,
    "utils": 3,
    "engine": 3,
    "parallel": 3,  # one model in several processes
    "interventions": 4,
    "patching": 5,
    "shards": 4,  # work that is cut into shards
    "hub": 4,
    "pretrained": 5,
    "analysis": 6,
    "harvest": 6,
    "studies": 7,
    "demo": 7,
    "planted": 7,  # models whose circuits are known
    "reports": 7,
    "compat": 7,
    "saved": 7,  # any saved result
    "cli": 8,
    "__main__": 9,
    "__init__": 9,
}
LOADING = {"families", "hub", "pretrained"}
STUDYING = {
    "results",
    "utils",
    "engine",
    "patching",
    "analysis",
    "interventions",
    "harvest",
    "shards",
    "studies",
}
MAY_IMPORT_TRANSFORMERS = {"hub", "demo"}

MAX_FILE_LINES, MAX_FUNCTION_LINES = 450, 60
MAX_BLOCK_TESTS = 7  # `isinstance` on classes of blocks outside of components: what a block has, it says in its wiring
MAX_MODEL_TESTS = 27  # `isinstance` on classes of models outside of `models/` and `compat/`: a model is asked instead
MAX_UNTYPED = 233  # parameters annotated Any, outside of compat; lower it with each that gets its type
MAX_OVERRIDING = 46  # classes that replace a method of a base class; lower it with each that gets a hook method instead

Import = tuple[str, int]  # the module imported, the line


@cache
def read(package: Path) -> dict[str, tuple[Path, ast.Module]]:
    """Dotted name -> file and syntax tree; `hooked_lm.hooks` stands for `hooked_lm/hooks/__init__.py`."""
    modules = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = (file, ast.parse(file.read_text(encoding="utf-8")))
    return modules


def imports(module: str, file: Path, node: ast.AST) -> Iterator[Import]:
    """Everything imported in `module`, absolute; `from a import b` gives both `a` and `a.b`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, child.lineno) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            drop = child.level - (file.name == "__init__.py")
            above = module.split(".")[: len(module.split(".")) - drop] if child.level else []
            base = ".".join([*above, *filter(None, [child.module])])
            yield from ((f"{base}.{alias.name}", child.lineno) for alias in child.names)
        else:
            yield from imports(module, file, child)


def top(module: str) -> str:
    """`hooked_lm.hooks.point` -> `hooks`: what the floors are given to."""
    return [*module.split("."), "__init__"][1]


def complaint(source: str, target: str) -> str | None:
    """Why the file or folder `source` must not import `target`; None if it may."""
    if unknown := {source, target} - FLOORS.keys():
        return f"{unknown.pop()} has no floor yet: give it one in tests/test_floors.py"
    if source == target or source == "__init__":
        return None
    if FLOORS[target] >= FLOORS[source]:
        return f"{source} (floor {FLOORS[source]}) imports {target} (floor {FLOORS[target]})"
    if {source, target} & LOADING and {source, target} & STUDYING:
        return f"{source} imports {target}: loading and studying know nothing of each other"
    return None


def violations(package: Path) -> list[str]:
    """Each import that breaks a rule, and the first cycle, in words."""
    modules, found, graph = read(package), [], {}
    for name, (file, tree) in modules.items():
        graph[name] = set()
        for imported, line in imports(name, file, tree):
            where, (root, *_) = f"{file.relative_to(package.parent)}:{line}", imported.split(".")
            if root == "transformers" and top(name) not in MAY_IMPORT_TRANSFORMERS:
                found.append(f"{where}: imports transformers")
            if root == package.name:
                target = imported if imported in modules else imported.rpartition(".")[0] or imported
                if why := complaint(top(name), top(target)):
                    found.append(f"{where}: {why}")
                if target != name:
                    graph[name].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("import cycle: " + " <- ".join(error.args[1]))
    return found


def too_long(package: Path) -> list[str]:
    found = []
    for file, tree in read(package).values():
        lines = len(file.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{file.relative_to(package.parent)}: {lines} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    length -= node.body[0].end_lineno - node.body[0].lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{file.relative_to(package.parent)}:{node.lineno}: {node.name}, {length} lines")
    return found


def untyped(package: Path) -> list[str]:
    """The parameters that are annotated `Any`, as "function(parameter)"; `compat` has the signatures of another library."""
    found = []
    for name, (_, tree) in read(package).items():
        if name.startswith(f"{package.name}.compat"):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = [
                    *node.args.posonlyargs,
                    *node.args.args,
                    *node.args.kwonlyargs,
                    node.args.vararg,
                    node.args.kwarg,
                ]
                any_ = [each.arg for each in every if each and getattr(each.annotation, "id", None) == "Any"]
                found += [f"{name}.{node.name}({each})" for each in any_]
    return found


def test_imports_go_down_and_never_round() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.slow
def test_few_parameters_are_untyped() -> None:
    assert len(untyped(PACKAGE)) <= MAX_UNTYPED


Method = ast.FunctionDef | ast.AsyncFunctionDef


def is_hook(method: Method) -> bool:
    """Whether a method is there to be replaced: abstract, empty, or returning only a constant or its arguments."""
    if any("abstractmethod" in ast.unparse(each) for each in method.decorator_list):
        return True
    body = [each for each in method.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    if not body or isinstance(body[0], ast.Pass | ast.Raise):
        return True
    if not isinstance(body[0], ast.Return):
        return False
    given, found = {arg.arg for arg in method.args.args}, body[0].value
    parts = found.elts if isinstance(found, ast.Tuple | ast.List) else [found]
    return all(each is None or isinstance(each, ast.Constant) or getattr(each, "id", "") in given for each in parts)


def overriding(package: Path) -> list[str]:
    """The classes that replace a method of a base class of the package which is no hook, as "module.Class.method"."""
    classes = [
        (name, node)
        for name, (_, tree) in read(package).items()
        if not name.startswith(f"{package.name}.compat")
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    by_name = {node.name: node for _, node in reversed(classes) if node.name != "Config"}

    def methods(node: ast.ClassDef) -> dict[str, Method]:
        return {each.name: each for each in node.body if isinstance(each, Method) and not each.name.startswith("__")}

    def inherited(node: ast.ClassDef) -> dict[str, Method]:
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
        names = [ast.unparse(base).rpartition(".")[2] for base in bases]
        of_bases = [by_name[name] for name in names if name in by_name and by_name[name] is not node]
        return {
            name: method for base in reversed(of_bases) for name, method in (inherited(base) | methods(base)).items()
        }

    found = []
    for module, node in classes:
        theirs = inherited(node)
        replaced = [name for name in methods(node) if name in theirs and not is_hook(theirs[name])]
        found += [f"{module}.{node.name}.{replaced[0]}"] if replaced else []
    return found


@pytest.mark.slow
def test_few_classes_replace_methods() -> None:
    assert len(overriding(PACKAGE)) <= MAX_OVERRIDING, overriding(PACKAGE)


def block_tests(package: Path) -> list[str]:
    """Where the class of a block decides, outside of components and of the families' own, as "module:line"."""
    modules = read(package)
    inside = (f"{package.name}.components", f"{package.name}.families")
    blocks = {
        node.name
        for name, (_, tree) in modules.items()
        if name.startswith(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Block", "Part", "Start", "End"))
    }
    return [
        f"{name}:{node.lineno}"
        for name, (_, tree) in modules.items()
        if not name.startswith(inside)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass") and len(node.args) == 2
        # a config's class, `Block.Config`, is an attribute
        if blocks & set(re.findall(r"[\w.]+", ast.unparse(node.args[1])))
    ]


def model_classes(package: Path) -> set[str]:
    """The names of `BaseModel` and all classes derived from it, and of unions and tuples of such classes."""
    trees = [tree for _, tree in read(package).values()]
    bases = {
        node.name: set(re.findall(r"\w+", " ".join(map(ast.unparse, node.bases))))
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {"BaseModel"}
    while new := {name for name, above in bases.items() if above & found} - found:
        found |= new
    several = (ast.BinOp, ast.Tuple)
    return found | {
        ast.unparse(node.targets[0])
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, several)
        if (named := set(re.findall(r"\w+", ast.unparse(node.value)))) and named <= found
    }


def model_tests(package: Path) -> list[str]:
    """The calls of `isinstance` and `issubclass` with a class of models, or several, outside of the folders of models and of the
    other library's interface, as "module:line"."""
    models, apart = model_classes(package), (f"{package.name}.models", f"{package.name}.compat")
    return [
        f"{name}:{node.lineno}"
        for name, (_, tree) in read(package).items()
        if not name.startswith(apart)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass") and len(node.args) == 2
        if models & set(re.findall(r"[\w.]+", ast.unparse(node.args[1])))
    ]


def test_classes_of_models_decide_in_few_places() -> None:
    assert len(model_tests(PACKAGE)) <= MAX_MODEL_TESTS


def test_decisions_by_the_class_of_a_model_are_counted(tmp_path: Path) -> None:
    source = (
        "isinstance(m, Decoder)\nisinstance(m, (str, Vision))\nissubclass(m, Read)\nisinstance(m, Vision.Config)\n"
        "isinstance(m, Stack)"
    )
    classes = "class BaseModel: ...\nclass Decoder(BaseModel): ...\nclass Vision(Tower, Decoder): ...\nclass Stack: ..."
    files = {
        "models/a.py": classes,
        "models/b.py": source,
        "hub.py": f"Read = Decoder | Vision\nOther = 3 | 4\n{source}",
    }
    package = write(tmp_path / "hooked_lm", files)
    assert model_tests(package) == ["hooked_lm.hub:3", "hooked_lm.hub:4", "hooked_lm.hub:5"]


MADE_IN_CALLS = {  # three arguments of `type`, or a class statement inside of a function
    "hub.processor": "stand-ins for parts of a processor that a checkpoint lacks, of classes that it names",
    "parallel.moe": "a class for each kind of experts, once: `EXPERTS` keeps them",
}


def made_in_calls(package: Path) -> set[str]:
    """The modules that make classes when a function is called, without the name of the package."""
    return {
        name.removeprefix(f"{package.name}.")
        for name, (_, tree) in read(package).items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ClassDef)
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "type" and len(node.args) == 3)
    }


def test_classes_are_made_once() -> None:
    assert made_in_calls(PACKAGE) == MADE_IN_CALLS.keys()


def test_a_class_that_a_call_makes_is_found(tmp_path: Path) -> None:
    files = {
        "engine/a.py": "def f(x):\n    return type(x.__name__, (x,), {})",
        "engine/b.py": "def f():\n    class A: ...",
        "engine/c.py": "class A:\n    class Config: ...\ndef f(x):\n    return type(x)",
    }
    assert made_in_calls(write(tmp_path / "hooked_lm", files)) == {"engine.a", "engine.b"}


def test_classes_of_blocks_decide_in_few_places() -> None:
    assert len(block_tests(PACKAGE)) <= MAX_BLOCK_TESTS


def test_decisions_by_class_are_counted(tmp_path: Path) -> None:
    source = (
        "isinstance(b, Block)\nisinstance(b, (int, PostNormBlock))\nisinstance(b, Block.Config)\nisinstance(b, int)"
    )
    files = {"components/blocks/a.py": "class Block: ...\nclass PostNormBlock(Block): ...", "models/b.py": source}
    package = write(tmp_path / "hooked_lm", files | {"components/c.py": source})
    assert block_tests(package) == ["hooked_lm.models.b:1", "hooked_lm.models.b:2"]


@pytest.mark.slow
def test_files_and_functions_are_short() -> None:
    assert too_long(PACKAGE) == []


def write(package: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source, encoding="utf-8")
    return package


LEGAL = {
    "__init__.py": "from hooked_lm.models.decoder import HookedTransformer\nfrom .hub import from_pretrained",
    "hooks/__init__.py": "from .point import HookPoint",
    "hooks/point.py": "import torch",
    "models/decoder.py": "from hooked_lm.hooks import HookPoint",
    "hub.py": "import transformers\nfrom .models import decoder",
    "viz/heatmap.py": "import plotly",
    "cli.py": "from hooked_lm import hub\nfrom hooked_lm.viz import heatmap",
}


def test_a_legal_tree_is_left_in_peace(tmp_path: Path) -> None:
    assert violations(write(tmp_path / "hooked_lm", LEGAL)) == []


@pytest.mark.parametrize(
    ("file", "source", "reported"),
    [
        ("hooks/point.py", "import hooked_lm.models.decoder", "hooks (floor 0) imports models (floor 2)"),
        ("hooks/point.py", "from ..patching import sweep", "hooks (floor 0) imports patching (floor 5)"),
        ("hooks/__init__.py", "from ..patching import sweep", "hooks (floor 0) imports patching (floor 5)"),
        (
            "weights/rows.py",
            "from hooked_lm.models.decoder import X",
            "weights (floor 2) imports models (floor 2)",
        ),
        ("models/decoder.py", "from hooked_lm import hub", "models (floor 2) imports hub (floor 4)"),
        (
            "models/decoder.py",
            "def load():\n    from hooked_lm import hub",
            "models (floor 2) imports hub (floor 4)",
        ),
        (
            "models/fold.py",
            "def f():\n    import hooked_lm.patching.sweep",
            "models (floor 2) imports patching (floor 5)",
        ),
        ("models/fold.py", "from hooked_lm import HookedTransformer", "imports __init__ (floor 9)"),
        ("viz/page.py", "import hooked_lm.models.decoder", "viz (floor -1) imports models (floor 2)"),
        ("harvest/run.py", "import hooked_lm.families.gpt2", "know nothing of each other"),
        ("hub.py", "from hooked_lm import engine", "know nothing of each other"),
        (
            "viz/page.py",
            "def f():\n    from hooked_lm.results import scores",
            "viz (floor -1) imports results (floor 1)",
        ),
        ("patching.py", "from hooked_lm.analysis import lens", "patching (floor 5) imports analysis (floor 6)"),
        ("helpers.py", "import hooked_lm.hooks", "helpers has no floor yet"),
        ("families/gpt2.py", "from transformers import GPT2Config", "gpt2.py:1: imports transformers"),
        ("models/tokens.py", "def f():\n    import transformers.utils", "tokens.py:2: imports transformers"),
        ("hooks/point.py", "from . import module", "import cycle: hooked_lm.hooks."),
        (
            "hooks/point.py",
            "def f():\n    from hooked_lm.hooks import HookPoint",
            "import cycle: hooked_lm.hooks",
        ),
        ("viz/heatmap.py", "from hooked_lm.results import scores", "import cycle: hooked_lm."),
    ],
)
def test_a_violation_is_reported(tmp_path: Path, file: str, source: str, reported: str) -> None:
    extra = {
        "hooks/module.py": "from .point import HookPoint",
        "families/gpt2.py": "",
        "results/scores.py": "def plot():\n    from hooked_lm.viz import heatmap",
        "engine.py": "",
        "patching.py": "",
        file: source,
    }
    assert any(reported in line for line in violations(write(tmp_path / "hooked_lm", LEGAL | extra)))


def test_length_is_measured_without_the_docstring(tmp_path: Path) -> None:
    def function(lines: int) -> str:
        return 'def f():\n    """Says\n    much."""\n' + "    pass\n" * (lines - 1)

    package = write(tmp_path / "hooked_lm", {"a.py": function(60), "b.py": function(61), "c.py": "x = 1\n" * 451})
    assert too_long(package) == ["hooked_lm/b.py:1: f, 61 lines", "hooked_lm/c.py: 451 lines"]


def test_untyped_parameters_are_counted(tmp_path: Path) -> None:
    source = "def f(a: Any, *b: Any, c: int = 0, **d: Any): ...\ndef g(a, b: list[Any]): ..."
    package = write(tmp_path / "hooked_lm", {"a.py": source, "compat/b.py": source})
    assert untyped(package) == ["hooked_lm.a.f(a)", "hooked_lm.a.f(b)", "hooked_lm.a.f(d)"]


def test_methods_that_are_replaced_are_counted(tmp_path: Path) -> None:
    base = (
        "class Base:\n    def whole(self): return self.f()\n    def empty(self):\n        'Says.'\n"
        "    def same(self, x, y): return x, y\n    def constant(self): return False\n    def __repr__(self): return self.f()\n"
        "    @abstractmethod\n    def due(self): self.f()\n"
    )
    changes = ("whole", "empty", "same", "constant", "__repr__", "due", "new")
    kinds = "".join(f"class {name.title()}(Base):\n    def {name}(self): return self.g()\n" for name in changes)
    files = {
        "a.py": base,
        "b.py": f"{kinds}class Last(Empty):\n    def empty(self): return 1",
        "compat/c.py": kinds,
    }
    assert overriding(write(tmp_path / "hooked_lm", files)) == ["hooked_lm.b.Whole.whole", "hooked_lm.b.Last.empty"]
