"""Damaged files of every type: they load, or they are refused by a ValueError that names the file."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import hooked_lm
from hooked_lm import patching
from hooked_lm.harvest import harvest
from tests import shown
from tests.close import assert_close

Content = tuple[dict[str, Tensor], dict[str, str]]
TEXT, CORRUPTED = "The capital of France is", "The capital of Spain is"
OTHER: tuple[Any, ...] = (None, [], {}, "x", -1, 1e9, [[]], ["x", None], {"x": {}})
MADE: dict[str, Callable[[], Any]] = {
    **{name: result.make for name, result in shown.RESULTS.items()},
    "SweepResult": lambda: patching.sweep(
        shown.model(), CORRUPTED, TEXT, metric=lambda logits: logits[:, -1, 3], progress=False
    ),
    **{name: shown.SHOWN[name] for name in ("SAE", "Normalized", "Hooks", "Cache")},
    "Alignment": lambda: shown.SHOWN["Alignment"]().hardened(),
}


def content(file: Path) -> Content:
    with safe_open(str(file), framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata())  # noqa: SIM118


def damaged(tensors: dict[str, Tensor], header: dict[str, str]) -> Iterator[tuple[str, Content]]:
    """The content without a part of it, and with other parts."""
    for name, tensor in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != name}
        yield f"without the tensor {name}", (rest, header)
        changes = {
            "longer": torch.cat([tensor, tensor]) if tensor.ndim else tensor[None],
            "of words": tensor.to(torch.int8),
        }
        changes |= {"flat": tensor.flatten(), "empty": tensor.flatten()[:0]}
        for how, value in changes.items():
            yield f"{name} {how}", ({**rest, name: value}, header)
    for key, value in header.items():
        if key == "format":
            continue
        yield f"without {key}", (tensors, {name: of for name, of in header.items() if name != key})
        for other in OTHER:
            yield f"{key} = {other}", (tensors, {**header, key: json.dumps(other)})
        for name, inner in json.loads(value).items() if value.startswith("{") else ():
            less = {other: of for other, of in json.loads(value).items() if other != name}
            yield f"{key} without {name}", (tensors, {**header, key: json.dumps(less)})
            for other in OTHER:
                if type(other) is not type(inner):
                    yield f"{key}.{name} = {other}", (tensors, {**header, key: json.dumps({**less, name: other})})


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_damaged_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    MADE[name]().save(tmp_path / "whole")
    whole, wrong, refused = content(tmp_path / "whole"), [], 0
    for how, (tensors, header) in damaged(*whole):
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, tmp_path / "file", header)
        try:
            hooked_lm.load(tmp_path / "file")
        except ValueError as error:
            refused += 1
            if str(tmp_path / "file") not in str(error):
                wrong.append(f"{how}: {error}")
        except Exception as error:  # which the promise does not name
            wrong.append(f"{how}: {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])
    assert refused


def test_a_file_without_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    """An optional one, too: the header names them all."""
    MADE["SweepResult"]().save(tmp_path / "whole")
    tensors, header = content(tmp_path / "whole")
    for name in tensors:
        rest = {other: value for other, value in tensors.items() if other != name}
        save_file(rest, tmp_path / "file", header)
        with pytest.raises(ValueError, match=r"file is damaged: it has the tensors"):
            hooked_lm.load(tmp_path / "file")


# ---- folders ---------------------------------------------------------------------------------------------------------------


def test_copies_of_conflicts_in_a_folder_are_ignored_with_a_warning(tmp_path: Path) -> None:
    store = harvest(shown.model(), ["Mary", "John went"], "blocks.0.hook_resid_post", tmp_path, progress=False)
    shutil.copy(store.path / "shard-000000.json", store.path / "shard-000000 (1).json")
    with pytest.warns(UserWarning, match=r"files that are no shards: shard-000000 \(1\)\.json. They are ignored"):
        again = hooked_lm.load(store.path)
    assert again.shards == store.shards


def test_what_a_store_gives_is_not_the_file(tmp_path: Path) -> None:
    store = harvest(shown.model(), ["Mary", "John went"], "blocks.0.hook_resid_post", tmp_path, progress=False)
    before = store["resid_post0"][:].clone()
    for which in (slice(None), slice(1, 3), [0, 1], 0):
        store["resid_post0"][which].zero_()
        assert_close(store["resid_post0"][:], before)
