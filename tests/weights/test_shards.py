"""Checkpoints on disk: they are mapped, never changed, and refused if they are damaged."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hooked_lm.weights import open_checkpoint, shards

REPOSITORY = Path(__file__).parents[2]


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_safetensors(path, header, body):
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return path


def sharded(folder, suffix="safetensors"):
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    parts = {
        f"{stem}-1.{suffix}": {"a": torch.ones(2), "b": torch.ones(3)},
        f"{stem}-2.{suffix}": {"c": torch.zeros(4)},
    }
    for name, tensors in parts.items():
        (save_file if suffix == "safetensors" else torch.save)(tensors, folder / name)
    index = folder / f"{stem}.{suffix}.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, part in parts.items() for name in part}}))
    return index


MEMORY = """
import sys, torch
from torch import nn
from hooked_lm.weights import Row, load, open_checkpoint, expand

def anonymous():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.W_E = nn.Parameter(torch.empty(4096, 1024))
            self.W_U = nn.Parameter(torch.empty(1024, 4096))
            for x in "QKV":
                setattr(self, f"W_{x}", nn.Parameter(torch.empty(16, 1024, 384)))

rows = expand([
    Row("wte", "W_E"), Row("head", "W_U", "v m -> m v", tied="wte"),
    Row("qkv", "W_{x}", "m (x n h) -> n m h", x="QKV"),
])
load(Model(), open_checkpoint(sys.argv[1]), rows)  # what torch allocates once
before, model = anonymous(), Model()
load(model, open_checkpoint(sys.argv[1], mmap=sys.argv[2] == "mmap"), rows)
with torch.no_grad():
    total = sum(p.sum().item() for p in model.parameters())
after = anonymous()
with torch.no_grad():
    for p in model.parameters():
        p[0] = 7.0
assert not torch.equal(model.W_E[1:], model.W_U.T[1:]) and total != 0
print(after - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux reports anonymous memory")
def test_loading_maps_the_file_and_edits_do_not_change_it(tmp_path):
    tensors = {"wte": torch.randn(4096, 1024), "qkv": torch.randn(1024, 3 * 16 * 384)}
    path, size = tmp_path / "model.safetensors", sum(tensor.nbytes for tensor in tensors.values())
    save_file(tensors, path)
    before = digest(path)
    used = {
        mode: int(
            subprocess.run(
                [sys.executable, "-c", MEMORY, str(path), mode],
                capture_output=True,
                text=True,
                check=True,
                cwd=REPOSITORY,
            ).stdout
        )
        for mode in ("mmap", "copy")
    }
    assert size > 90e6
    assert used["mmap"] < 0.05 * size
    assert used["copy"] > 0.9 * size
    assert digest(path) == before


def test_look_ups_are_writable_and_independent(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}, path)
    before, checkpoint = digest(path), open_checkpoint(path)
    first, second = checkpoint["a"], checkpoint["a"]
    first.zero_()
    assert second.sum() == checkpoint["a"].sum() == 15
    assert digest(path) == before
    assert first.untyped_storage().nbytes() == 24
    copied = open_checkpoint(path, mmap=False)["a"]
    assert torch.equal(copied, second)
    assert copied.data_ptr() != second.data_ptr()


def test_a_file_is_opened_again_for_a_second_look_up_only(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(shards, "safe_open", lambda path, **kw: opened.append(path) or safe_open(path, **kw))
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)  # the type checks of the tests look up "a" here
    opened.clear()
    assert "b" in checkpoint
    assert "c" not in checkpoint
    assert checkpoint.shape("b") == (3,)
    assert checkpoint["b"].sum() == 3
    assert opened == []
    assert checkpoint["b"].sum() == 3
    assert len(opened) == 1


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_shards_are_one_mapping(tmp_path, suffix):
    index = sharded(tmp_path, suffix)
    for path in (tmp_path, index):
        checkpoint = open_checkpoint(path)
        assert sorted(checkpoint) == ["a", "b", "c"]
        assert len(checkpoint) == 3
        assert checkpoint.shape("c") == (4,)
        assert checkpoint.dtype("c") == torch.float32
        assert checkpoint.file("c").name.endswith(f"2.{suffix}")
        assert torch.equal(checkpoint["b"], torch.ones(3))
    with pytest.raises(KeyError):
        checkpoint["d"]


def test_one_file_takes_precedence_over_shards_and_safetensors_over_pickles(tmp_path):
    torch.save({"old": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    assert list(open_checkpoint(tmp_path)) == ["old"]
    sharded(tmp_path)
    assert sorted(open_checkpoint(tmp_path)) == ["a", "b", "c"]
    save_file({"whole": torch.ones(1)}, tmp_path / "model.safetensors")
    assert list(open_checkpoint(tmp_path)) == ["whole"]


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_of_tensors_load_and_do_not_change(tmp_path, zipped):
    path, whole = tmp_path / "weights.pt", torch.arange(6.0).view(2, 3)
    torch.save({"a": whole, "t": whole.T}, path, _use_new_zipfile_serialization=zipped)
    before, checkpoint = digest(path), open_checkpoint(path)
    tensor = checkpoint["a"]
    assert torch.equal(tensor, whole)
    assert torch.equal(checkpoint["t"], whole.T)
    tensor.zero_()
    assert digest(path) == before
    assert torch.equal(checkpoint["a"], whole)


class Evil:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_code_is_refused(tmp_path, monkeypatch, zipped):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        ValueError,
        match=r"pytorch_model.bin was refused: .* would run code when loaded \(it is loaded with weights_only=True",
    ):
        open_checkpoint(tmp_path)
    assert not Path("ran").exists()


def test_pickles_of_other_things_are_refused(tmp_path):
    torch.save({"a": torch.ones(1), "step": 3}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="'step' are not tensors"):
        open_checkpoint(tmp_path / "a.pt")
    torch.save([torch.ones(1)], tmp_path / "b.pt")
    with pytest.raises(ValueError, match="got a list"):
        open_checkpoint(tmp_path / "b.pt")
    for junk in (b"", b"not a pickle", (tmp_path / "a.pt").read_bytes()[:300]):
        (tmp_path / "c.bin").write_bytes(junk)
        with pytest.raises(ValueError, match=r"c.bin was refused"):
            open_checkpoint(tmp_path / "c.bin")


def test_damaged_safetensors_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    whole = path.read_bytes()
    for data in (whole[:-1], whole[:100], whole[:5], b"", whole + b"more", b"\xff" * 200):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"model.safetensors is truncated or not"):
            open_checkpoint(tmp_path)
    for header in (
        '{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F99","shape":[4],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
    ):
        write_safetensors(path, header, bytes(16))
        with pytest.raises(ValueError, match=r"model.safetensors is truncated or not"):
            open_checkpoint(tmp_path)


def test_unaligned_tensors_are_copied(tmp_path):
    byte = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    floats = {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}
    header = json.dumps({"a": byte, "b": floats})
    body = b"\x05" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    tensor = open_checkpoint(write_safetensors(tmp_path / "x.safetensors", header, body))["b"]
    assert tensor.tolist() == [1.5, -2.0]
    assert tensor.data_ptr() % 4 == 0


def test_a_wrong_index_is_refused(tmp_path):
    index = sharded(tmp_path)
    honest = json.loads(index.read_text())["weight_map"]

    def says(change, message):
        index.write_text(json.dumps({"weight_map": {**honest, **change}}))
        with pytest.raises(ValueError, match=message):
            open_checkpoint(tmp_path)

    says({"d": "model-1.safetensors"}, "model-1.safetensors holds 'd', but no shard has it")
    says({"a": "model-2.safetensors"}, "model-2.safetensors holds 'a', but it is in model-1.safetensors")
    says({"d": "model-3.safetensors"}, r"names the shard model-3.safetensors \(for 'd'\), which is missing")
    says({"d": "../model-1.safetensors"}, "outside the checkpoint's directory")
    says({"d": 5}, "not the index of a checkpoint")
    save_file({"c": torch.ones(1), "d": torch.ones(1)}, tmp_path / "model-1.safetensors")
    says({"d": "model-1.safetensors"}, "'c' is in two files")
    index.write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(ValueError, match="not the index of a checkpoint: duplicate names: a"):
        open_checkpoint(tmp_path)
    for text in ("{", "[]", "{}"):
        index.write_text(text)
        with pytest.raises(ValueError, match="not the index of a checkpoint"):
            open_checkpoint(tmp_path)


def test_nothing_to_open(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"expected one of model.safetensors, .*found notes.txt"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        open_checkpoint(tmp_path / "elsewhere")
