"""What is no name of a checkpoint: adapters, objects, folders that do not exist; and a hub that cannot be reached."""

import inspect
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaConfig, LlamaForCausalLM

from hooked_lm import HookedTransformer, HookedTransformerConfig, pretrained
from hooked_lm.compat.loading import convert_hf_weights
from hooked_lm.hub import adapter, compare, verify
from hooked_lm.hub.load import checked_name
from tests.close import assert_apart, assert_close
from tests.models.toys import words

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft

TOKENS = torch.arange(14).view(2, 7)
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
load = pretrained.from_pretrained_no_processing


@pytest.fixture
def llama(tmp_path: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, max_position_embeddings=32, **SIZES)).eval()
    model.save_pretrained(tmp_path / "base")
    return LlamaForCausalLM.from_pretrained(tmp_path / "base")


def adapted(model: LlamaForCausalLM, folder: Path, task: str | None = "CAUSAL_LM") -> Any:
    """A LoRA of the model, written to a folder."""
    config = peft.LoraConfig(task_type=task, r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    found = peft.get_peft_model(model, config).eval()
    found.save_pretrained(folder)
    assert not (folder / "config.json").exists()
    return found


@pytest.mark.parametrize("task", ["CAUSAL_LM", None])  # peft takes any module without a task, and notes its class
def test_an_adapter_is_merged_into_its_model(llama: LlamaForCausalLM, tmp_path: Path, task: str | None) -> None:
    with torch.no_grad():
        before = llama(TOKENS).logits
        expected = adapted(llama, tmp_path / "lora", task)(TOKENS).logits
    model = load(tmp_path / "lora", device="cpu")
    assert_close(model(TOKENS), expected)
    assert_apart(model(TOKENS), before)
    assert (model.cfg.model_name, model.tokenizer) == ("lora", None)
    words().save_pretrained(tmp_path / "lora")
    assert load(tmp_path / "lora", device="cpu").tokenizer is not None


def test_an_adapter_is_compared_with_what_peft_merges(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted(llama, tmp_path / "lora")
    checked = verify(tmp_path / "lora", device="cpu")
    assert checked.ok
    assert "logits as in transformers" in [check.name for check in checked.checks]
    monkeypatch.setattr(compare, "load_hf", lambda *_: load(tmp_path / "base", device="cpu"))  # without the adapter
    assert "logits as in transformers" in verify(tmp_path / "lora", device="cpu").failed


def test_an_adapter_that_cannot_be_merged(
    llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted(llama, tmp_path / "lora")
    file = tmp_path / "lora" / adapter.CONFIG
    config = json.loads(file.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(adapter, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"is an adapter \(LORA\) of .*base', not a model: pip install peft"):
            load(tmp_path / "lora")
    file.write_text(json.dumps(config | {"base_model_name_or_path": "./nowhere"}))
    with pytest.raises(ValueError, match=r"an adapter .* of './nowhere', not a model.*no such folder"):
        load(tmp_path / "lora")
    file.write_text(json.dumps(config | {"task_type": None}))
    with pytest.raises(ValueError, match=r"task_type is None.*hf_model="):
        load(tmp_path / "lora")
    for nameless in ({}, config | {"base_model_name_or_path": None}):
        file.write_text(json.dumps(nameless))
        with pytest.raises(ValueError, match=r"does not say which model.*hf_model="):
            load(tmp_path / "lora")


def test_objects_that_are_no_names(llama: LlamaForCausalLM) -> None:
    own = HookedTransformerConfig(n_layers=1, d_model=8, n_heads=2, n_ctx=4, d_vocab=5, act_fn="relu")
    given: list[tuple[Any, str]] = [
        (llama, r"not a LlamaForCausalLM.*hf_model=model"),
        (llama.config, r"not a LlamaConfig.*hf_model="),
        (llama.state_dict(), r"load_state_dict"),
        (own, r"not a HookedTransformerConfig.*HookedTransformer\(cfg\)"),
        ({"n_layers": 2}, r"HookedTransformer\(cfg\)"),
        (HookedTransformer(own), r"a model of this library already"),
        (None, r"not a NoneType: give a hub id"),
        (3, r"not a int: give a hub id"),
    ]
    for wrong, message in given:
        with pytest.raises(TypeError, match=message):  # annotations are checked in tests, not in use
            checked_name(wrong)
    with pytest.raises(ValueError, match="name of the model is empty"):
        HookedTransformer.from_pretrained(" ")


def test_a_model_of_transformers_needs_no_name(llama: LlamaForCausalLM) -> None:
    ids = torch.tensor([[5, 3, 7]])
    for load in (HookedTransformer.from_pretrained_no_processing, pretrained.from_pretrained_no_processing):
        made = load(hf_model=llama)
        assert torch.equal(made(ids), load("tiny", hf_model=llama)(ids))
        assert made.cfg.model_name == Path(llama.config.name_or_path).name
    random = LlamaForCausalLM(LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=10))
    assert HookedTransformer.from_pretrained(hf_model=random).cfg.model_name == "LlamaForCausalLM"
    with pytest.raises(TypeError, match="not a NoneType: give a hub id, a folder"):
        HookedTransformer.from_pretrained()


def test_objects_that_are_no_models(llama: LlamaForCausalLM) -> None:
    """A mock has every attribute; it was read without end."""
    in_use = inspect.unwrap(pretrained.from_pretrained)  # without the annotations' checks, as users call it
    for wrong in (Mock(), object(), llama.config, llama.state_dict(), torch.nn.Linear(2, 2)):
        with pytest.raises(TypeError, match=f"hf_model must be a model of transformers.*got {type(wrong).__name__}"):
            in_use("gpt2", hf_model=wrong)
        with pytest.raises(TypeError, match="hf_model must be a model of transformers"):
            convert_hf_weights(wrong, SimpleNamespace(n_key_value_heads=None, n_layers=1, n_ctx=4))


def test_a_device_that_torch_does_not_know() -> None:
    with pytest.raises(ValueError, match="there is no device 'gpu9': give 'cpu', 'cuda'"):
        HookedTransformer.from_pretrained("demo", device="gpu9")


def test_folders_that_do_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-tiny").mkdir()
    (tmp_path / "file.pth").touch()
    names = ("./llama-tny", "/nowhere/at/all", "a/b/c", "~/nowhere-at-all", Path("nowhere"))
    for name in names:
        with pytest.raises(ValueError, match="no such folder"):
            HookedTransformer.from_pretrained(name)
    with pytest.raises(ValueError, match=r"near it is 'llama-tiny'"):
        HookedTransformer.from_pretrained("./llama-tny")
    with pytest.raises(ValueError, match=r"is a file: give the folder that it is in"):
        HookedTransformer.from_pretrained("./file.pth")


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(constants, "is_offline_mode", lambda: False)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    start = time.monotonic()
    for name in ("gpt2", "someone/model"):
        with pytest.raises(ValueError, match=r"no such folder.*cannot be reached: 127\.0\.0\.1:9: Connection refused"):
            load(name, cache_dir=tmp_path)
    assert time.monotonic() - start < 10  # the retries of huggingface_hub take 24 seconds for each
