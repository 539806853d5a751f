"""Writing a checkpoint: all of it or nothing, one tensor at a time."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from hooked_lm import HookedTransformer, pretrained
from hooked_lm.hub import export
from hooked_lm.weights import open_checkpoint, write, write_safetensors
from hooked_lm.weights.write import DTYPES, Planned
from tests.families import CASES, reference
from tests.families._models import assert_same_tensors, hooked
from tests.models.toys import words

load = pretrained.from_pretrained_no_processing


@pytest.fixture
def model() -> HookedTransformer:
    return load("demo")


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, RuntimeError])
@pytest.mark.parametrize("step", ["weights", "tokenizer", "config"])
@pytest.mark.parametrize("exists", [False, True])
def test_nothing_is_left_of_what_failed(
    exists: bool, step: str, error: type[BaseException], model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a" / "b" / "model" if not exists else tmp_path / "model"
    if exists:
        model.save_pretrained(target)
        (target / "notes.txt").write_text("mine")
    before = files(target) if exists else None
    with torch.no_grad():
        model.W_E.add_(1.0)
    calls = []

    def fails(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        raise error("in the middle")

    if step == "weights":
        made, bytes_of = [], write._bytes
        monkeypatch.setattr(write, "_bytes", lambda *a: fails() if made else (made.append(1), bytes_of(*a))[1])
    elif step == "tokenizer":
        model.tokenizer = words()
        monkeypatch.setattr(type(model.tokenizer), "save_pretrained", fails)
    else:
        monkeypatch.setattr(PretrainedConfig, "save_pretrained", fails)
    with pytest.raises(error, match="in the middle"):
        model.save_pretrained(target)
    assert calls
    assert {path.name for path in tmp_path.iterdir()} == ({"model"} if exists else set())
    if exists:
        assert files(target) == before


def test_an_interrupt_while_files_are_moved(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all there, and the interrupt comes through."""
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.W_E.add_(1.0)
    replaced, original = [], Path.replace

    def interrupted(self: Path, target: Any) -> Any:
        replaced.append(self.name)
        original(self, target)
        if len(replaced) == 1:
            raise KeyboardInterrupt
        return target

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.save_pretrained(tmp_path / "model")
    assert replaced[-1] == "config.json"
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
    assert torch.equal(load(tmp_path / "model").W_E, model.W_E)


def test_over_the_checkpoint_that_it_maps(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "model")
    mapped = load(tmp_path / "link", dtype="auto")
    with torch.no_grad():
        mapped.W_E.mul_(2.0)
    mapped.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"
    assert torch.equal(load(tmp_path / "model").W_E, mapped.W_E)


def test_targets_that_are_no_directories(model: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(OSError, match="file"):
            model.save_pretrained(target)
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = (torch.arange(12) % 2).view(3, 4).to(dtype)
    tensors = {"turned": whole.T, "number": whole[1, 1], "empty": whole[:0], "byte": torch.ones(3, dtype=torch.uint8)}
    planned = {name: Planned(tuple(t.shape), t.dtype, lambda t=t: t) for name, t in tensors.items()}
    write_safetensors(planned, tmp_path / "model.safetensors")
    found = open_checkpoint(tmp_path)
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].double(), tensor.double())


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="complex64"):
        write_safetensors({"w": Planned((1,), torch.complex64, lambda: torch.zeros(1))}, tmp_path / "x")
    with pytest.raises(ValueError, match=r"'w': expected torch.float32 \[2\], got"):
        write_safetensors({"w": Planned((2,), torch.float32, lambda: torch.zeros(1))}, tmp_path / "x")


PEAK = """
import resource, sys, torch
from hooked_lm import pretrained
pretrained.from_pretrained_no_processing("demo").save_pretrained(sys.argv[2] + "-demo")  # imports
model = pretrained.from_pretrained_no_processing(sys.argv[1], dtype="auto")
for weight in model.parameters():
    weight.sum()  # pages of the map that count as the model's
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model.save_pretrained(sys.argv[2])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_memory_of_one_tensor(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=12, n_embd=512, n_head=8, vocab_size=64, n_positions=16)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "big")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "big"), str(tmp_path / "again")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=os.curdir)
    n_bytes = (tmp_path / "big" / "model.safetensors").stat().st_size
    assert int(done.stdout) < n_bytes / 4, "the copies of all tensors would be the whole model"


@pytest.mark.parametrize("name", ["youtu", "llama"])
def test_what_transformers_overwrites_while_it_builds_is_copied_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Youtu's row of the padding token, if the embedding is tied; here of LLaMA, too."""
    line = next(case for case in CASES if case.family == name)
    case = replace(line, name="padded", fields={**line.fields, "tie_word_embeddings": True, "pad_token_id": 5})
    model, theirs = hooked(case), reference(case)

    def overwrites(self: PreTrainedModel, module: nn.Module) -> None:
        PreTrainedModel._init_weights(self, module)
        if isinstance(module, nn.Embedding):
            module.weight.data[5] = 0.0

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", overwrites, raising=False)
    assert_same_tensors(model.to_hf().state_dict(), theirs.state_dict())
    monkeypatch.setattr(export, "_restore", lambda *_: None)  # the test can fail
    assert not model.to_hf().get_input_embeddings().weight[5].any()
    assert theirs.get_input_embeddings().weight[5].any()


def test_what_cannot_be_copied_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    line = next(case for case in CASES if case.family == "llama")
    monkeypatch.setattr(export, "_same", lambda tensor, planned: tensor.shape[0] != line.fields["vocab_size"])
    with pytest.raises(
        RuntimeError, match=r"overwrites .*model\.embed_tokens\.weight while it builds a LlamaForCausalLM"
    ):
        hooked(line).to_hf()
