"""Checkpoints whose names are old."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hooked_lm.hub.renamed import Renamed
from hooked_lm.weights.shards import Checkpoint, open_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    save_file(
        {"old.a": torch.ones(2, 3), "old.b": torch.zeros(4, 3), "n": torch.tensor(7)}, tmp_path / "model.safetensors"
    )
    return open_checkpoint(tmp_path)


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are looked up, but for "n": checks of annotations look the first one up."""
    names: list[str] = []
    look_up = Checkpoint.__getitem__

    def noted(self: Any, name: str) -> torch.Tensor:
        names.extend({name} - {"n"})
        return look_up(self, name)

    monkeypatch.setattr(Checkpoint, "__getitem__", noted)
    return names


def test_shapes_and_dtypes_need_no_look_up(checkpoint: Checkpoint, looked_up: list[str]):
    tensors = Renamed(checkpoint, {"ab": ("old.a", "old.b"), "n": "n"})
    assert tensors.shape("ab") == (6, 3)
    assert tensors.shape("n") == ()
    assert tensors.dtype("n") == torch.int64
    assert "ab" in tensors
    assert "old.a" not in tensors
    assert looked_up == []
    assert tensors["ab"].shape == (6, 3)
    assert looked_up == ["old.a", "old.b"]
