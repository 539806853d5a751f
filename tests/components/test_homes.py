"""Where a mechanism lives: the words of the field in `components`, the device of one family with that family."""

import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families.encoders.mobilebert.narrow import Bottleneck
from tests.test_floors import PACKAGE, imports, read

COMPONENTS, FAMILIES = "hooked_lm.components", "hooked_lm.families"
FEWEST, MOST = 75, 110  # files
# Components that one family alone uses, and why they are here.
OF_ONE_FAMILY = {
    "attention.differential": "differential attention, which papers study apart from any family",
    "blocks.one_sublayer": "models of attention alone, which a config of flat names describes",
    "embeddings.transformed_unembed": "what reads logits as sums asks whether the unembedding is linear",
    "ssm.lightning": "lightning attention, a linear attention that papers study apart from any family",
    "ssm.rg_lru": "the real-gated linear recurrent unit of Griffin, which papers study apart from any family",
    "vision.tower_context": "the context of every run of a vision tower",
}


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of the package that a module imports."""
    modules = read(PACKAGE)
    found = {name if name in modules else name.rpartition(".")[0] for name, _ in imports(module, *modules[module])}
    return frozenset(found & modules.keys())


def home(module: str) -> str:
    """The family that a module belongs to, `decoders.zamba2` of `decoders.zamba2.adapters`."""
    return ".".join(module.removeprefix(f"{FAMILIES}.").split(".")[:2])


def families_of(component: str) -> set[str]:
    """The families that import a component, also by way of other components and of what families share."""
    seen, new = set[str](), {component}
    while new:
        users = {module for module in read(PACKAGE) if imported(module) & new} - seen
        users = {module for module in users if module.startswith((COMPONENTS, FAMILIES))}
        users = {module for module in users if not module.startswith(f"{COMPONENTS}.verification")}
        seen |= users
        new = {module for module in users if module.startswith((COMPONENTS, f"{FAMILIES}._shared"))}
    return {home(module) for module in seen if not module.startswith((COMPONENTS, f"{FAMILIES}._shared"))}


def files() -> list[str]:
    return [name for name in read(PACKAGE) if name.startswith(COMPONENTS)]


def test_a_component_of_one_family_alone_is_a_word_of_the_field() -> None:
    """Else it belongs in the folder of that family: `families/encoders/mobilebert/narrow.py`."""
    mechanisms = [name for name in files() if not name.startswith(f"{COMPONENTS}.verification")]
    found = {name.removeprefix(f"{COMPONENTS}.") for name in mechanisms if len(families_of(name)) == 1}
    assert found == OF_ONE_FAMILY.keys()


def test_a_reader_finds_a_component() -> None:
    assert FEWEST <= len(files()) <= MOST


def test_who_uses_a_component() -> None:
    assert families_of(f"{COMPONENTS}.vision.tower_context") == {"vision_encoders.qwen2_5_vl_vision"}
    assert families_of(f"{COMPONENTS}.norms.scales") >= {"encoders.mobilebert", "vision_encoders.dinov2"}
    assert {"decoders.llama", "encoders.bert"} <= families_of(f"{COMPONENTS}.attention.steps")  # not directly


def test_identities_come_with_a_familys_classes() -> None:
    """Whichever module of the package is imported, its `__init__` is first, and imports them."""
    stated = [name for name in read(PACKAGE) if name.startswith(FAMILIES) and name.endswith(".identities")]
    assert len(stated) >= 20
    assert [name for name in stated if name not in imported(name.rpartition(".")[0])] == []


@pytest.mark.slow
def test_a_pickled_part_has_its_identities_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "part.pkl").write_bytes(pickle.dumps(Bottleneck.Config(8, LayerNorm.Config(4)).build()))
    script = "import pickle, sys\npart = pickle.load(open(sys.argv[1], 'rb'))\n"
    script += "from hooked_lm.components.verification import is_known\nassert is_known(part)"
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "part.pkl"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
