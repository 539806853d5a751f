"""Folders of harvests and studies with one damaged file: what is read of them is the same, or refused by the file's name.

`DRAWS` more of each: `DRAWS=2000 pytest tests/shards/test_damaged_jobs.py`.
"""

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

import hooked_lm
from hooked_lm.harvest import harvest
from hooked_lm.shards import Shards
from hooked_lm.studies import study_pairs
from tests import shown
from tests.damage import damage

pytestmark = pytest.mark.filterwarnings("ignore:in .* the answer is better on the corrupted prompt")
DRAWS = int(os.environ.get("DRAWS", "60"))
TEXTS = ["Mary", "John went to the store", "The capital of France is Paris", "Mary and John left, Mary", "On Monday"]
LEFT = [("John", "Mary"), ("Mary", "John"), ("Paul", "Mary")]
CACHES = ("index.json", "table.parquet", "table.sha256")  # are made anew, also through a link


def harvested(directory: Path, other: bool = False) -> Shards:
    sites, texts = (
        ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"],
        [f"{text} and" * other or text for text in TEXTS],
    )
    return harvest(shown.model(), texts, sites, directory, documents_per_shard=2, progress=False)


def studied(directory: Path, other: bool = False) -> Shards:
    made = [
        {
            "clean": f"{a} and {b} left, {a}",
            "corrupted": f"{a} and {b} left, {b}",
            "answer": f" {b}",
            "wrong_answer": f" {a}",
        }
        for a, b in LEFT[:: -1 if other else 1]
    ]
    options: dict[str, Any] = (
        {"positions": None, "layers": [0, 1]} if other else {"positions": None}
    )  # files of other sizes
    return study_pairs(shown.model(), made, "sweep", directory, options=options, pairs_per_shard=1, progress=False)


MADE: dict[str, Callable[..., Shards]] = {"harvest": harvested, "study": studied}


def views(store: Any) -> dict[str, Callable[[], object]]:
    """What is read of a folder, in parts."""
    found: dict[str, Callable[[], object]] = {"size": lambda: (len(store), store.shards, store.missing)}
    if hasattr(store, "sites"):
        columns = (*store.sites, "tokens", "documents", "positions", "is_special")
        found["values"] = lambda: [store[name][:].tolist() for name in columns]
        found["moments"] = lambda: [(store.mean(site).tolist(), store.variance(site).tolist()) for site in store.sites]
    else:
        found["frame"] = lambda: store.to_dataframe().to_dict()
        found["scores"] = lambda: (store.scores().values.tolist(), store.scores().axes, store.scores().about)
        found["table"] = lambda: store.gather().read_bytes()
    return found


def files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*") if path.name not in (*CACHES, "nothing"))


def refusal(act: Callable[[], object], case: Path) -> str | None:
    """What is wrong with the error of an act: "" if it names the folder; None if there is no error."""
    try:
        act()
    except (ValueError, OSError) as error:
        return "" if str(case) in str(error) else f"unnamed: {error}"
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    return None


def problems(open_store: Callable[[], Any], case: Path, expected: dict[str, str]) -> list[str]:
    """What is wrong with what is read of a damaged folder, however it is opened."""
    stores: list[Any] = []
    if (problem := refusal(lambda: stores.append(open_store()), case)) is not None:
        return [problem] if problem else []
    store, wrong = stores[0], []
    for part, view in views(store).items():
        values: list[str] = []
        problem = refusal(lambda view=view, values=values: values.append(str(view())), case)
        if problem is None and values[0] != expected[part] and not store.missing:
            problem = f"another: {values[0][:80]}"
        wrong += [f"{part}: {problem}"] if problem else []
    return wrong


@cache
def whole(kind: str, folder: Path) -> tuple[Path, dict[str, str]]:
    store = MADE[kind](folder)
    return store.path, {part: str(view()) for part, view in views(store).items()}


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.filterwarnings("ignore")  # of copies, and of shards that are missing
@pytest.mark.parametrize("kind", MADE)
def test_damaged_folders_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    path, expected = whole(kind, tmp_path / "whole")
    other, wrong = MADE[kind](tmp_path / "other", other=True), []
    for draw in range(DRAWS):
        for opened in ("loaded", "resumed"):
            shutil.rmtree(tmp_path / "case", ignore_errors=True)
            case = Path(shutil.copytree(path, tmp_path / "case" / path.name))
            how = damage(case, other.path, Random(f"{kind} {draw}"))
            before = files(tmp_path)
            act = (
                (lambda case=case: hooked_lm.load(case))
                if opened == "loaded"
                else lambda: MADE[kind](tmp_path / "case")
            )
            wrong += [f"draw {draw}, {opened}, {how}: {each}" for each in problems(act, case, expected)]
            if opened == "loaded" and files(tmp_path) != before:
                wrong.append(f"draw {draw}, {how}: left {set(files(tmp_path)) ^ set(before)}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])


# ---- one of each kind that was found ---------------------------------------------------------------------------------------


def test_a_record_of_another_job_is_refused(tmp_path: Path) -> None:
    """Its numbers were read as those of this one: only `verify` saw it."""
    store, other = harvested(tmp_path / "store"), harvested(tmp_path / "other", other=True)
    record, cached = store.path / "shard-000001.json", store.path / "index.json"
    before = record.read_bytes()
    shutil.copy(other.path / record.name, record)
    with pytest.raises(
        ValueError, match=r"shard-000001\.json is damaged: it was changed .* or is of another job; delete it"
    ):
        hooked_lm.load(store.path).mean("resid_post0")
    record.write_bytes(before)
    shutil.copy(other.path / "index.json", cached)
    assert len(hooked_lm.load(store.path)) == len(store)
    shutil.copy(store.path / "shard-000000.json", record)
    cached.unlink()
    with pytest.raises(
        ValueError, match=r"shard-000001\.json is damaged: it is the record of shard-000000\.safetensors"
    ):
        hooked_lm.load(store.path)


def test_a_record_of_an_earlier_version_has_no_hash(tmp_path: Path) -> None:
    store = harvested(tmp_path)
    record = store.path / "shard-000000.json"
    written = json.loads(record.read_text())
    del written["record_sha256"]
    record.write_text(json.dumps(written))
    (store.path / "index.json").unlink()
    again = hooked_lm.load(store.path)
    assert again.mean("resid_post0").tolist() == store.mean("resid_post0").tolist()
    written["sites"]["blocks.0.hook_resid_post"]["mean"].pop()
    record.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"shard-000000\.json is damaged: RuntimeError.*delete it"):
        hooked_lm.load(store.path).mean("resid_post0")


def test_a_shard_of_another_layout_is_refused(tmp_path: Path) -> None:
    store = harvested(tmp_path)
    file = store.path / "shard-000000.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"I32"', b'"F32"', 1))
    with pytest.raises(ValueError, match=r"shard-000000\.safetensors is damaged: its tensors have other names, types"):
        hooked_lm.load(store.path)["tokens"][:]


@pytest.mark.parametrize("damaged", [b"", b"PAR1"])
def test_a_damaged_table_is_made_anew(damaged: bytes, tmp_path: Path) -> None:
    table = hooked_lm.load(studied(tmp_path).path)
    before = table.gather().read_bytes()
    (table.path / "table.parquet").write_bytes(damaged)
    assert table.gather().read_bytes() == before
