"""Every public name of TransformerLens 3.9, read from its sources, is in the shim or listed here with the reason why not."""

import ast
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformer_lens

ORIGINAL = Path(sys.prefix) / "transformer-lens-3.9.0" / "transformer_lens"

# Modules, with all that is in them.
LEFT_OUT = {
    "HookedAudioEncoder": "there are no models of sound here",
    "pretrained.weight_conversions.hubert": "there are no models of sound here",
    "benchmarks": "measures its own parts against each other",
    "conversion_utils": "machinery of its bridge, but for the base class of conversions, which points take",
    "factories.architecture_adapter_factory": "machinery of its bridge",
    "lit": "a plugin of another tool",
    "model_bridge": "its bridge; the names that clients use of it are tested in a file of their own",
    "remote_module_loading": "runs code from checkpoints",
    "tools": "its own list of models that were tried",
    "pretrained.weight_conversions.nanogpt": "checkpoints that are no transformers models",
    "pretrained.weight_conversions.qwen": "a model whose code comes with its checkpoint, which is never run",
}
NAMES_LEFT_OUT = {
    "T": "a type variable of annotations",
    "logger": "a module's own log",
    "convert_nanogpt_weights": "checkpoints that are no transformers models",
    "convert_qwen_weights": "a model whose code comes with its checkpoint, which is never run",
    "convert_hubert_weights": "there are no models of sound here",
    "HookedAudioEncoder": "there are no models of sound here",
    "INVALID_HEAD_NAME_ERR": "the text of an error that is worded otherwise here",
    "CACHE_WITH_SEQ_LIST_ERR": "the text of an error that is worded otherwise here",
    "SEQ_LEN_ERR": "the text of an error that is worded otherwise here",
    "DET_PAT_NOT_SQUARE_ERR": "the text of an error that is worded otherwise here",
    "ArchitectureAdapter": "machinery of its bridge",
    "BaseTensorConversion": "machinery of its bridge",
    "conversion_utils": "machinery of its bridge",
    "tools": "its own list of models that were tried",
    "lit": "a plugin of another tool",
    "het_safe_view": "reads configs of transformers, which families do here",
    "quantization_method": "weights are quantised after loading here, and can be read",
    "unreadable_weight_reason": "weights are quantised after loading here, and can be read",
    "require_readable_weight": "weights are quantised after loading here, and can be read",
}
TESTED_ELSEWHERE = ("utilities", "utils", "evals", "train")


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name inside the package -> file, without what is left out."""
    for file in sorted(ORIGINAL.rglob("*.py")):
        parts = file.relative_to(ORIGINAL).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not name.startswith((*LEFT_OUT, *TESTED_ELSEWHERE)):
            yield name, file


def assigned(node: ast.stmt) -> list[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def imported(node: ast.stmt) -> list[str]:
    """The names that a statement takes from elsewhere in the package: programs import them from here too."""
    if isinstance(node, ast.Try):
        return [name for inner in node.body for name in imported(inner)]
    if not isinstance(node, ast.ImportFrom) or not (node.level or (node.module or "").startswith("transformer_lens")):
        return []
    return [alias.asname or alias.name for alias in node.names]


def public_names(file: Path) -> set[str]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    names = {name for node in body for name in (*assigned(node), *imported(node))}
    return {name for name in names if not name.startswith("_") and name != "*"}


def missing(name: str, file: Path) -> set[str]:
    shim = importlib.import_module(f"transformer_lens.{name}".rstrip("."))
    return {public for public in public_names(file) if not hasattr(shim, public)}


@pytest.mark.parametrize(("name", "file"), list(modules()), ids=[name or "transformer_lens" for name, _ in modules()])
def test_every_name_is_shim(name: str, file: Path) -> None:
    assert missing(name, file) <= NAMES_LEFT_OUT.keys()


def test_the_lists_are_true() -> None:
    """What is listed as left out exists in the original, and not in the shim."""
    assert len(list(modules())) > 70
    left = set().union(*(missing(name, file) for name, file in modules()))
    assert left == NAMES_LEFT_OUT.keys()
    for name in LEFT_OUT:
        path = ORIGINAL.joinpath(*name.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), name
        if name not in ("model_bridge", "conversion_utils"):  # of which there are parts
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(f"transformer_lens.{name}")


def test_one_function_converts_what_theirs_do_family_by_family() -> None:
    """Equal bit for bit. Theirs gives RMS norms of Phi-3 a bias of zeros; ours adds zeros for other absent biases."""
    script = Path(__file__).with_name("converters.py")
    done = subprocess.run([sys.executable, script, ORIGINAL.parent], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    families = json.loads(done.stdout.splitlines()[-1])
    assert len(families) >= 16
    for family, found in families.items():
        assert found["different"] == found["ours alone"] == [], family
        assert found["theirs alone"] == (
            [f"blocks.{layer}.ln{which}.b" for layer in (0, 1) for which in (1, 2)] if family == "phi3" else []
        )
        assert len(found["equal"]) >= 20, family


def test_it_is_ours_that_was_tested() -> None:
    assert "hooked_lm" in str(transformer_lens.__file__)
    assert "HookedTransformer" in public_names(ORIGINAL / "__init__.py"), "the reader of names reads none"
