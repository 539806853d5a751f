"""`hooked_lm.load`: objects of the types that their files name, and errors that name what else is there."""

import json
import re
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hooked_lm
from hooked_lm.hooks import Cache
from hooked_lm.interventions import Hooks, Scale, Statistics
from hooked_lm.interventions.dictionaries import Normalized
from hooked_lm.results import Scores, stored
from hooked_lm.saved import FOLDERS, LOADERS
from tests.shown import conversation, harvested, model, sae, scores

PACKAGE = Path(hooked_lm.__file__).parent
OTHER_LOADERS = [
    f"hooked_lm.interventions.dictionaries:{name}" for name in ("load_saelens", "load_dictionary_learning")
]
# Formats of files that are parts of something else.
PARTS = {
    "Batch": "a file of a Store",
    "dictionary_training": "a checkpoint, from which training resumes",
    "JacobianSums": "of a fit that resumes",
}


def formats_of_files() -> set[str]:
    """The formats that the package names, in constants and where it reads files."""
    lines = (line for file in PACKAGE.rglob("*.py") for line in file.read_text(encoding="utf-8").splitlines())
    named = (re.findall(r'"hooked_lm\.(\w+)"', line) for line in lines if "FORMAT" in line or "stored.read" in line)
    return {name for names in named for name in names}


def kinds_of(base: type) -> set[str]:
    return {base.__name__}.union(*(kinds_of(kind) for kind in base.__subclasses__()))


def test_every_type_has_a_loader() -> None:
    loaders = {name: resolve_name(where) for name, where in LOADERS.items()}  # imports all
    own = {kind for kind in kinds_of(Scores) if kind != "LayerProbes"}
    assert own <= loaders.keys()
    named = formats_of_files() - PARTS.keys() - {"harvest", "studies"}  # formats of folders
    assert {"Circuit", "TunedLens", "dictionary", "interventions"} <= named <= loaders.keys()
    assert all(format == resolve_name(kind).PLAN.FORMAT for format, kind in FOLDERS.items())


@pytest.mark.parametrize(
    "made",
    [
        sae(),
        Normalized(sae(), "layer_norm"),
        Hooks([Scale("z", 2, factor=0.5)]),
        Cache({"a": torch.ones(2)}),
        conversation(),
    ],
)
def test_what_is_no_result(made: Any, tmp_path: Path) -> None:
    made.save(tmp_path / "made")
    again = hooked_lm.load(tmp_path / "made")
    assert type(again) is type(made)
    assert repr(again) == repr(made)


def test_a_harvest() -> None:
    assert hooked_lm.load(harvested().path).plan == harvested().plan


def test_another_type_is_named(tmp_path: Path) -> None:
    scores().save(tmp_path / "scores")
    for kind, wanted in [(Statistics, "Statistics"), (Hooks, "interventions")]:
        with pytest.raises(ValueError, match=rf"scores holds type Scores, not {wanted}; hooked_lm\.load\(path\)"):
            kind.load(tmp_path / "scores")
    with pytest.raises(ValueError, match=r"scores is not a cache: it holds type Scores; hooked_lm\.load"):
        Cache.load(tmp_path / "scores")


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "weights", {"format": "pt"})
    (tmp_path / "text").write_text("no tensors here, but a text of some length")
    stored.write(tmp_path / "part", "hooked_lm.Batch", {}, {})
    with pytest.raises(ValueError, match=r"weights was not saved by this package"):
        hooked_lm.load(tmp_path / "weights")
    with pytest.raises(ValueError, match=r"text is not a safetensors file"):
        hooked_lm.load(tmp_path / "text")
    with pytest.raises(
        ValueError, match=r"part holds type Batch, which hooked_lm\.load cannot load; it loads Alignment"
    ):
        hooked_lm.load(tmp_path / "part")


@pytest.mark.every_parameter
@pytest.mark.parametrize("loader", ["hooked_lm.saved:load", *LOADERS.values(), *FOLDERS.values(), *OTHER_LOADERS])
def test_what_is_not_there_is_said_so(loader: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    whole = re.escape(f"nothing/here ({tmp_path}/nothing/here)")
    with pytest.raises(FileNotFoundError, match=f"^no such (file|folder): {whole}$"):
        resolve_name(loader)("nothing/here")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder without plan\.json"):
        hooked_lm.load(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"format": "another"}))
    with pytest.raises(
        ValueError, match=r"plan\.json has the format 'another'; hooked_lm\.load knows hooked_lm\.harvest"
    ):
        hooked_lm.load(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ValueError, match=r"plan\.json is damaged"):
        hooked_lm.load(tmp_path)
    model().save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"model holds a model: load it with HookedTransformer\.load"):
        hooked_lm.load(tmp_path / "model")
