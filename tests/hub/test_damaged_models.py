"""Folders of models with one damaged file: they load the same model, or are refused by an error that names the file or field.

A config of transformers, or of TransformerLens, may say another model without being damaged: what loads then is what transformers
loads. `DRAWS` more of each: `DRAWS=2000 pytest tests/hub/test_damaged_models.py`.
"""

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hooked_lm import HookedTransformer, pretrained
from tests.close import assert_close
from tests.damage import damage
from tests.hub.test_tl_checkpoint import toy as tl_toy
from tests.hub.test_tl_checkpoint import write
from tests.models.toys import toy, words

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
DRAWS = int(os.environ.get("DRAWS", "60"))
TOKENS = torch.tensor([[5, 3, 9, 2, 7]])
LLAMA: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


def own(folder: Path) -> None:
    model = toy("rotary", tokenizer=words())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    model.save(folder)


def llama(folder: Path) -> None:
    """In several files with an index."""
    config = LlamaConfig(vocab_size=50, max_position_embeddings=32, num_key_value_heads=2, rms_norm_eps=1e-4, **LLAMA)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=3, pad_token_id=0, bad_words_ids=[[4]])
    model.save_pretrained(folder, max_shard_size="6KB")
    words().save_pretrained(folder)


def gpt2(folder: Path) -> None:
    """In a pickle."""
    sizes: dict[str, Any] = {"n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, **sizes)).save_pretrained(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def tl(folder: Path) -> None:
    write(folder, tl_toy(int(torch.randint(99, ())), act_fn="gelu", d_mlp=40))


def lora(folder: Path) -> None:
    """With the model that it belongs to."""
    llama(folder / "base")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    peft.get_peft_model(LlamaForCausalLM.from_pretrained(folder / "base"), config).save_pretrained(folder / "lora")


Class = type[LlamaForCausalLM] | type[GPT2LMHeadModel] | None
MADE: dict[str, tuple[Callable[[Path], None], Class]] = {
    "own": (own, None), "llama": (llama, LlamaForCausalLM), "gpt2": (gpt2, GPT2LMHeadModel), "tl": (tl, None),
    "lora": (lora, LlamaForCausalLM),
}  # fmt: skip


def loaded(kind: str, folder: Path) -> HookedTransformer:
    if kind == "own":
        return HookedTransformer.load(folder, device="cpu")
    path = folder / "lora" if kind == "lora" else folder
    return pretrained.from_pretrained_no_processing(path, device="cpu")


def in_transformers(kind: str, cls: Class, folder: Path) -> Tensor:
    assert cls is not None
    model: Any = cls.from_pretrained(folder / "base" if kind == "lora" else folder, local_files_only=True)
    model = peft.PeftModel.from_pretrained(model, folder / "lora") if kind == "lora" else model
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def copied(kind: str, whole: Path, case: Path) -> None:
    shutil.rmtree(case.parent, ignore_errors=True)
    shutil.copytree(whole, case)
    if kind == "lora":
        config = case / "lora" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(case / "base")}))


def judged(kind: str, case: Path, how: str, expected: Tensor) -> str:
    """What is wrong with how a damaged folder loads; empty if nothing is."""
    try:
        with torch.no_grad():
            found = loaded(kind, case)(TOKENS)
    except ValueError as error:
        field = how.partition(": ")[2].partition(" = ")[0]
        return "" if str(case) in str(error) or field in str(error) else f"unnamed: {error}"
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    if is_close(found, expected):
        return ""
    cls = MADE[kind][1]
    return "" if cls is not None and is_close(found, in_transformers(kind, cls, case)) else "another model"


def is_close(found: Tensor, expected: Tensor) -> bool:
    try:
        assert_close(found, expected)
    except AssertionError:
        return False
    return True


# What says another model, and nothing of which shows that it is not the right one.
def is_another_model(kind: str, how: str) -> bool:
    ours = ("that of another", "unembed.b_U gone", "unembed.b_U renamed", "config.json: ")
    return (kind == "tl" and any(part in how for part in ours)) or "adapter_config.json: that of another" in how


@pytest.mark.slow
@pytest.mark.every_parameter
@pytest.mark.filterwarnings("ignore")  # of transformers, about what is damaged
@pytest.mark.parametrize("kind", MADE)
def test_damaged_folders_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    for name in ("whole", "other"):
        MADE[kind][0](tmp_path / name)
    case, wrong = tmp_path / "case" / "model", []
    copied(kind, tmp_path / "whole", case)
    with torch.no_grad():
        expected = loaded(kind, case)(TOKENS)
    for draw in range(DRAWS):
        copied(kind, tmp_path / "whole", case)
        how = damage(case, tmp_path / "other", Random(f"{kind} {draw}"))
        before = files(tmp_path)
        problem = judged(kind, case, how, expected)
        if problem and not (problem == "another model" and is_another_model(kind, how)):
            wrong.append(f"draw {draw}, {how}: {problem}")
        if files(tmp_path) != before:
            wrong.append(f"draw {draw}, {how}: left {set(files(tmp_path)) ^ set(before)}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:20])


# ---- one of each kind that was found ---------------------------------------------------------------------------------------


def test_files_of_another_model_are_not_loaded_for_this_one(tmp_path: Path) -> None:
    for name in ("model", "other"):
        own(tmp_path / name)
    for file in ("model.safetensors", "hooked_lm.json"):
        shutil.copytree(tmp_path / "model", tmp_path / "case")
        shutil.copy(tmp_path / "other" / file, tmp_path / "case" / file)
        with pytest.raises(ValueError, match=r"case/model\.safetensors is not the file that model\.save wrote"):
            HookedTransformer.load(tmp_path / "case", device="cpu")
        shutil.rmtree(tmp_path / "case")


def test_a_changed_config_and_a_missing_tokenizer_are_refused(tmp_path: Path) -> None:
    own(tmp_path)
    whole = (tmp_path / "hooked_lm.json").read_text()
    (tmp_path / "hooked_lm.json").write_text(whole.replace('"model_name": "custom"', '"model_name": "another"'))
    assert (tmp_path / "hooked_lm.json").read_text() != whole
    with pytest.raises(ValueError, match=r"hooked_lm\.json cannot be read, or was changed.*its hash is another"):
        HookedTransformer.load(tmp_path, device="cpu")
    (tmp_path / "hooked_lm.json").write_text(whole)
    (tmp_path / "tokenizer.json").rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing: model\.save wrote it"):
        HookedTransformer.load(tmp_path, device="cpu")
    assert pretrained.from_pretrained_no_processing(tmp_path, device="cpu", tokenizer=words()).tokenizer is not None


def test_a_folder_of_an_earlier_version_has_no_hashes(tmp_path: Path) -> None:
    own(tmp_path)
    expected = HookedTransformer.load(tmp_path, device="cpu")(TOKENS)
    file = tmp_path / "hooked_lm.json"
    written = json.loads(file.read_text())
    del written["sha256"]
    file.write_text(json.dumps(written))
    assert_close(HookedTransformer.load(tmp_path, device="cpu")(TOKENS), expected)
    name = next(iter(written["strides"]))
    for order in ([0], [0, 0, 1], [0, 2, 1.0], "x", 3):
        file.write_text(json.dumps(written | {"strides": {name: order}}))
        with pytest.raises(ValueError, match=r"hooked_lm\.json.*strides of"):
            HookedTransformer.load(tmp_path, device="cpu")


@pytest.mark.slow
def test_weights_that_an_adapter_or_its_model_lacks_are_not_drawn(tmp_path: Path) -> None:
    """transformers and peft draw them at random, with a warning."""
    lora(tmp_path)
    for file, gone in ((tmp_path / "lora" / "adapter_model.safetensors", "lora_A"), (tmp_path / "base", "down_proj")):
        shards = [file] if file.is_file() else sorted(file.glob("*.safetensors"))
        shard = next(shard for shard in shards if any(gone in name for name in load_file(shard)))
        whole = load_file(shard)
        lost = next(name for name in whole if gone in name)
        save_file({name: value for name, value in whole.items() if name != lost}, shard, {"format": "pt"})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match=rf"could not be merged.*{lost}"):
                loaded("lora", tmp_path)
        save_file(whole, shard, {"format": "pt"})
    with torch.no_grad():
        assert_close(loaded("lora", tmp_path)(TOKENS), in_transformers("lora", LlamaForCausalLM, tmp_path))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "tokenizer_config.json",
            {"bos_token": 3},
            r"the tokenizer in .*cannot be loaded: TypeError.*tokenizer=\.\.\.",
        ),
        (
            "generation_config.json",
            {"bad_words_ids": -1},
            r"bad_words_ids=-1 in .*generation_config\.json must be lists",
        ),
        (
            "generation_config.json",
            {"eos_token_id": ["x"]},
            r"eos_token_id=\['x'\] in .*generation_config\.json must be",
        ),
        ("config.json", {"architectures": -1}, r"architectures=-1 in .*config\.json must be a list"),
        ("config.json", {"model_type": [[]]}, r"model_type=\[\[\]\] in .*config\.json must be the name"),
        ("config.json", {"hidden_act": "x"}, r"config\.json.*'x'"),
    ],
)
def test_fields_of_a_checkpoint_are_named(file: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    llama(tmp_path)
    (tmp_path / file).write_text(json.dumps(json.loads((tmp_path / file).read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        loaded("llama", tmp_path)
