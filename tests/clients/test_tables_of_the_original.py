"""Tables of TransformerLens 3.9, read off its sources: names of models, which text begins with BOS; a mistake of its folding."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hooked_lm import compat
from hooked_lm.compat import loading
from hooked_lm.families import family, supported
from hooked_lm.families.short_names import SHORT_NAMES

ORIGINAL = Path(sys.prefix) / "transformer-lens-3.9.0" / "transformer_lens"
ADAPTERS = ORIGINAL / "model_bridge" / "supported_architectures"
# Architectures of the original whose `model_type` does not follow from the name.
MODEL_TYPES = {
    "MPTForCausalLM": "mpt",
    "PhiMoEForCausalLM": "phimoe",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
}


def table(name: str) -> Any:
    for file in ("supported_models.py", "loading_from_pretrained.py"):
        for node in ast.parse((ORIGINAL / file).read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise AssertionError(f"no {name}")


def test_every_name_of_a_model() -> None:
    official, aliases = table("OFFICIAL_MODEL_NAMES"), table("MODEL_ALIASES")
    assert len(official) > 200
    assert set(official) <= set(loading.OFFICIAL_MODEL_NAMES)
    for name in official:
        assert loading.get_official_model_name(name) == name
    for name, shorts in aliases.items():
        for short in shorts:
            assert loading.get_official_model_name(short) == name, short
            assert short.lower() in SHORT_NAMES or name in loading.UNSUPPORTED or short.lower() == name.lower(), short


def says_false(node: ast.AST) -> bool:
    """Whether something below assigns, or has an entry of, `default_prepend_bos` False."""
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            for key, value in zip(each.keys, each.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "default_prepend_bos":
                    return isinstance(value, ast.Constant) and value.value is False
        target = each.targets[0] if isinstance(each, ast.Assign) else None
        if isinstance(target, ast.Attribute) and target.attr == "default_prepend_bos":
            return isinstance(each.value, ast.Constant) and each.value.value is False
    return False


def of_the_loader() -> set[str]:
    """Architectures whose branch of the loader says so."""
    found, tree = set(), ast.parse((ORIGINAL / "loading_from_pretrained.py").read_text())
    for node in ast.walk(tree):
        named = node.test.comparators[0] if isinstance(node, ast.If) and isinstance(node.test, ast.Compare) else None
        if isinstance(named, ast.Constant) and any(says_false(statement) for statement in node.body):
            found.add(str(named.value))
    return found


def of_the_bridge() -> set[str]:
    """Architectures whose adapter, or a class that it is made from, says so."""
    classes: dict[str, tuple[list[str], bool]] = {}
    for file in ADAPTERS.glob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                classes[node.name] = bases, says_false(node)

    def without(name: str) -> bool:
        bases, own = classes.get(name, ([], False))
        return own or any(map(without, bases))

    return {name for name, adapter in adapters().items() if without(adapter)}


def adapters() -> dict[str, str]:
    """The adapter of each architecture that the bridge knows."""
    factory = ast.parse((ORIGINAL / "factories" / "architecture_adapter_factory.py").read_text())
    return {
        str(key.value): value.id
        for node in ast.walk(factory)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Name)
    }


def test_which_text_begins_without_bos() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401 -- fills the mapping
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    of_type = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    loader, bridge = of_the_loader(), of_the_bridge()
    assert {
        "BloomForCausalLM",
        "GPTNeoXForCausalLM",
        "PhiForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    } <= loader
    assert len(bridge) > 20
    there = {name for name in supported() if of_type.get(name) in loader | bridge}
    there |= {MODEL_TYPES[name] for name in (loader | bridge) & MODEL_TYPES.keys()}
    without = {name for name in supported() if not getattr(family(name), "PREPENDS_BOS", True)}
    # others have the tokenizer of a relative, as the language models of composites, which have no class of their own there
    known = loader | adapters().keys()
    assert {name for name in without if of_type.get(name) in known or name in MODEL_TYPES.values()} == there
    assert all(hasattr(family(name), "config") for name in there)


def moved_by_folding(path: Path) -> dict[str, float]:
    file = Path(__file__).with_name("fold_of_the_original.py")
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run([sys.executable, file], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def test_folding_into_square_weights() -> None:
    """There the norm's weights go along the wrong axis of a square `W_in` or `W_U`; here nothing moves."""
    there = moved_by_folding(ORIGINAL.parent)
    for case, largest in there.items():
        assert (largest > 0.1) == ("16" in case), case
    shim = Path(compat.__file__).parent / "shim"
    package = Path(compat.__file__).parents[2]
    here = moved_by_folding(Path(f"{shim}{os.pathsep}{package}"))
    assert here.keys() == there.keys()
    assert max(here.values()) < 1e-4
