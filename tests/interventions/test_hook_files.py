"""Files of hook objects: whose classes they build, where later runs write, and files that somebody tampered with."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hooked_lm.hooks import HookPoint
from hooked_lm.interventions import Noise, Record, Scale, base, dictionaries
from hooked_lm.interventions import Patch as OurPatch
from hooked_lm.interventions.base import Controller, HookObject, Hooks
from hooked_lm.interventions.dictionaries import SAE
from tests.models.toys import ids, toy


@dataclass(eq=False, repr=False)
class Patch(Controller):
    """A user's class that has the name of one of ours."""

    source: Tensor | None = None

    def change(self, value: Any, hook: HookPoint) -> Any:
        raise AssertionError("not this one")


def twins() -> list[type[Controller]]:
    """Two classes of one bare name."""

    class First:
        @dataclass(eq=False, repr=False)
        class Twin(Controller):
            def change(self, value: Any, hook: HookPoint) -> Any:
                return value + 1

    class Second:
        @dataclass(eq=False, repr=False)
        class Twin(Controller):
            def change(self, value: Any, hook: HookPoint) -> Any:
                return value + 2

    return [First.Twin, Second.Twin]


def written(path: Path, objects: Any, tensors: dict[str, Tensor] | None = None, version: Any = 2) -> Path:
    """A file with a header of any kind; a str is taken as JSON."""
    header = {"format": base.FORMAT, "objects": objects if isinstance(objects, str) else json.dumps(objects)}
    if version is not None:
        header["version"] = json.dumps(version)
    save_file({"nothing": torch.zeros(1), **(tensors or {})}, path, header)
    return path


# ---- classes ---------------------------------------------------------------------------------------------------------


def test_a_class_of_a_user_is_known_with_its_module(tmp_path: Path) -> None:
    source = torch.ones(1, 3)
    Hooks([OurPatch("0", source=source), Patch("0", source=source)]).save(tmp_path / "hooks")
    ours, theirs = Hooks.load(tmp_path / "hooks")
    assert (type(ours), type(theirs)) == (OurPatch, Patch)
    assert ours.to_dict()["kind"] == "Patch"
    assert theirs.to_dict()["kind"] == f"{__name__}.Patch"
    assert type(HookObject.from_dict(ours.to_dict())) is OurPatch


def test_names_that_are_unknown_or_ambiguous_are_refused(tmp_path: Path) -> None:
    first, second = twins()
    Hooks([first("0"), second("0")]).save(tmp_path / "hooks")
    assert [type(one) for one in Hooks.load(tmp_path / "hooks")] == [first, second]
    with pytest.raises(ValueError, match=r"several classes are called 'Twin': .*First.Twin, .*Second.Twin"):
        HookObject.from_dict({"kind": "Twin", "hook_point": "0"})
    for unknown in ("elsewhere.Patch", "Ptach", None, ["Patch"], 3):
        with pytest.raises(ValueError, match=r"no class of hook objects is called .*Import its module"):
            Hooks.load(written(tmp_path / "unknown", [{"kind": unknown, "hook_point": "0"}]))


def test_files_of_the_first_version_load(tmp_path: Path) -> None:
    """They have bare names only, and tuples of a record were ranges."""
    record = {"kind": "Record", "hook_point": "z", "layer": 1, "positions": {"tuple": [0, 3]}, "heads": [0, 3]}
    [old] = Hooks.load(written(tmp_path / "old", [record], version=None))
    assert isinstance(old, Record)
    assert (old.positions, old.heads) == (slice(0, 3), [0, 3])
    [new] = Hooks.load(written(tmp_path / "new", [record]))
    assert isinstance(new, Record)
    assert new.positions == [0, 3]
    [user] = Hooks.load(written(tmp_path / "user", [{"kind": "Alone", "hook_point": "0"}], version=None))
    assert type(user) is Alone
    patch = [{"kind": "Patch", "hook_point": "0", "source": {"tensor": "nothing"}}]
    with pytest.raises(ValueError, match=r"several classes are called 'Patch': Patch, .*test_hook_files.Patch"):
        Hooks.load(written(tmp_path / "old", patch, version=None))
    assert type(Hooks.load(written(tmp_path / "new", patch))[0]) is OurPatch


@dataclass(eq=False, repr=False)
class Alone(Controller):
    """A user's class whose name is nobody else's."""

    def change(self, value: Any, hook: HookPoint) -> Any:
        return value


# ---- where runs write ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_store_moves_with_the_folder_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    monkeypatch.chdir(here)
    Hooks([Record("z", 1, store="runs"), Record("z", 0, store=here / "deep" / "runs"), Record("z", 2)]).save(
        here / "hooks"
    )
    here.rename(there)
    monkeypatch.chdir(tmp_path)
    first, second, third = Hooks.load("there/hooks")
    assert [one.settings().get("store") for one in (first, second, third)] == [
        str(there / "runs"),
        str(there / "deep" / "runs"),
        None,
    ]
    toy("rotary").run_with_hooks(ids(1, 3), fwd_hooks=[first, second])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]
    assert len(list((there / "runs").iterdir())) == 1


@torch.no_grad()
def test_a_file_does_not_decide_where_runs_write(tmp_path: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (folder / "link").symlink_to(outside)
    Hooks([Record("z", 1, store=outside)]).save(folder / "hooks")
    for store in (str(outside), "../outside", "link/deep", "a/../../outside", str(folder / "inside")):
        file = written(folder / "tampered", [{"kind": "Record", "hook_point": "z", "layer": 1, "store": store}])
        for path in (file, folder / "hooks"):
            with pytest.raises(ValueError, match=r"outside the folder of the file: give load\(path, store=\.\.\.\)"):
                Hooks.load(path)
        [record] = Hooks.load(file, store=tmp_path / "chosen")
        toy("rotary").run_with_hooks(ids(1, 3), fwd_hooks=[record])
    assert len(list((tmp_path / "chosen").iterdir())) == 5
    assert not list(outside.iterdir())


# ---- tampered files --------------------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


SCALE = {"kind": "Scale", "hook_point": "z", "layer": 1, "factor": 2.0}
SETTINGS: list[dict[str, Any]] = [
    {"factor": "much"},
    {"factor": None},
    {"factor": True},
    {"factor": float("nan")},
    {"factor": float("inf")},
    {"factor": 10**400},
    {"factor": {"tensor": "none such"}},
    {"factor": {"tensor": ["nothing"]}},
    {"factor": {"tensor": "nothing", "tuple": []}},
    {"factor": {"code": "print(1)"}},
    {"factor": {}},
    {"factor": {"tensor": "bad"}},
    {"heads": 1.5},
    {"heads": "0"},
    {"heads": [0, None]},
    {"heads": {"slice": [0]}},
    {"heads": {"slice": [0, "b", None]}},
    {"heads": {"slice": [0, 2, 0]}},
    {"positions": "everywhere"},
    {"positions": {"mapping": []}},
    {"rest": 3},
    {"rest": [["a"]]},
    {"hook_point": 5},
    {"hook_point": ""},
    {"layer": "one"},
    {"layer": {"mapping": {"a": 1}}},
    {"when": 3},
    {"when": "later"},
    {"strange": 1},
    {"is_enabled": False},
    {"_is_on": False},
    {"factor": json.loads(nested(200))},
]
OTHERS: list[dict[str, Any]] = [
    {"kind": "Controller", "hook_point": "z"},
    {"kind": "Record", "hook_point": "z", "most_calls": "5"},
    {"kind": "Record", "hook_point": "z", "dtype": "float17"},
    {"kind": "Record", "hook_point": "z", "dtype": "nn"},
    {"kind": "Record", "hook_point": "z", "store": 5},
    {"kind": "Record", "hook_point": "z", "store": "\0"},
    {"kind": "TopExamples", "hook_point": "z", "k": "many"},
    {"kind": "TopExamples", "hook_point": "z", "directions": [[1.0]]},
    {"kind": "AddDirection", "hook_point": "z", "vector": {"tensor": "bad"}},
    {"kind": "AddDirection", "hook_point": "z", "vector": [1.0]},
    {"kind": "AddDirection", "hook_point": "z", "vector": {"tensor": "nothing"}, "schedule": [float("nan")]},
    {"kind": "ResampleAblate", "hook_point": "z", "seed": 10**30},
    {"kind": "Noise", "hook_point": "z", "std": float("nan")},
    {"kind": "Clamp", "hook_point": "z", "min": float("nan")},
    {"kind": "Patch", "hook_point": "z", "source": {"mapping": {"z": 3}}},
    {"kind": "Statistics", "hook_point": "z", "edges": ["a", "b"]},
]
BIG = 10**12
SAES: list[Any] = [
    None,
    3,
    {"kind": "standard"},
    {"kind": "odd", "d_in": 4, "d_sae": 6},
    {"kind": "standard", "d_in": BIG, "d_sae": BIG},
    {"kind": "standard", "d_in": "4", "d_sae": 6},
    {"kind": "standard", "d_in": 4, "d_sae": 6, "d_out": BIG},
    {"kind": "standard", "d_in": 4, "d_sae": 6, "strange": 1},
    {"kind": "topk", "d_in": 4, "d_sae": 6, "k": "few"},
]


@pytest.mark.parametrize(
    "tampered", [*({**SCALE, **some} for some in SETTINGS), *OTHERS], ids=lambda one: str(one)[:60]
)
def test_settings_of_a_tampered_file_are_refused_by_the_number_of_their_object(
    tampered: dict[str, Any], tmp_path: Path
) -> None:
    bad = {"bad": torch.tensor([1.0, torch.nan])}
    file = written(tmp_path / "file", [SCALE, tampered], bad)
    with pytest.raises(ValueError, match=r"file: object 1 cannot be read: "):
        Hooks.load(file)
    assert isinstance(Hooks.load(written(tmp_path / "file", [SCALE], bad))[0], Scale)  # the control


@pytest.mark.parametrize("described", SAES, ids=lambda one: str(one)[:60])
def test_a_dictionary_of_a_tampered_file_is_refused_before_it_is_built(described: Any, tmp_path: Path) -> None:
    sae = SAE.Config(d_in=4, d_sae=6).build()
    weights = {f"0.sae.{name}": weight.detach() for name, weight in sae.state_dict().items()}
    one = {"kind": "Dictionary", "hook_point": "z", **{key[2:]: {"tensor": key} for key in weights}}
    mapping = {"mapping": described} if isinstance(described, dict) else described
    with pytest.raises(ValueError, match="object 0 cannot be read: "):
        Hooks.load(written(tmp_path / "file", [{**one, "sae": mapping}], weights))
    good = {"mapping": {"kind": "standard", "d_in": 4, "d_sae": 6}}
    [loaded] = Hooks.load(written(tmp_path / "file", [{**one, "sae": good}], weights))
    assert isinstance(loaded, dictionaries.Dictionary)


@pytest.mark.parametrize("objects", ["no json", nested(100_000), "5", "[5]", '{"a": 1}', "null", "1" * 5000])
def test_a_header_that_is_no_list_of_objects(objects: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"file is damaged: "):
        Hooks.load(written(tmp_path / "file", objects))


def test_a_header_of_another_version(tmp_path: Path) -> None:
    for version in (3, 0, -1, "2", None, True, [2], 1.5):
        with pytest.raises(ValueError, match="of the format; this package reads versions 1 to 2"):
            Hooks.load(written(tmp_path / "file", [SCALE], version=[version] if version is None else version))


# ---- values ----------------------------------------------------------------------------------------------------------


def test_sparse_tensors_are_refused() -> None:
    sparse = torch.eye(4).to_sparse()
    for make in (
        lambda: Scale("z", 1, factor=sparse),
        lambda: OurPatch("z", 1, source=sparse),
        lambda: OurPatch("z", 1, source={"z": sparse}),
    ):
        with pytest.raises(
            ValueError, match=r"(factor|source) of .* is a sparse tensor .* give (factor|source).to_dense"
        ):
            make()
    with pytest.raises(ValueError, match="std of Noise must be finite, got inf"):
        Noise("z", 1, std=float("inf"))
