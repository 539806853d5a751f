"""Models and configs in the format of this library: what comes back is what was saved, and what cannot come back is refused."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import (
    HookedEncoder,
    HookedEncoderConfig,
    HookedEncoderDecoder,
    HookedTransformer,
    HookedTransformerConfig,
    HookedVisionEncoder,
    hub,
    pretrained,
)
from hooked_lm.hooks import Cache
from hooked_lm.models.config.stored import from_json, to_json
from hooked_lm.weights import slots
from tests.close import assert_close
from tests.core import CORE, CORE_KINDS, thinned
from tests.families import CASES, VISION_CASES
from tests.families._models import hooked
from tests.families._vision import hooked_any
from tests.models.toys import KINDS, toy, words

FIRST = {case.family: case for case in reversed(CASES)}  # one of each family
TOKENS = torch.tensor([[5, 3, 9, 2]])


def order(weight: Tensor) -> list[int]:
    """The axes from the slowest to the fastest in memory."""
    return sorted((a for a in range(weight.dim()) if weight.shape[a] > 1), key=lambda axis: -weight.stride(axis))


def assert_same(again: Any, model: Any) -> None:
    """The same class, config, weights and buffers, to the bit, and in the same order in memory."""
    assert type(again) is type(model)
    assert again.cfg == model.cfg
    assert again.cfg.tree == model.cfg.tree
    assert again.cfg._given.keys() == model.cfg._given.keys()
    ours, theirs = slots(again), slots(model)
    assert ours.keys() == theirs.keys()
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, slot in theirs.items():
        found = ours[name].tensor
        assert found.dtype == slot.tensor.dtype, name
        assert order(found) == order(slot.tensor), name
        assert torch.equal(found, slot.tensor), name
    buffers = dict(model.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in again.named_buffers())


def saved(model: Any, folder: Path) -> Any:
    model.save(folder)
    return type(model).load(folder, device="cpu")


@pytest.mark.parametrize("kind", thinned(KINDS, CORE_KINDS[:4]))
def test_models_built_from_a_config(kind: str, tmp_path: Path) -> None:
    model = toy(kind)
    assert_same(again := saved(model, tmp_path / "toy"), model)
    assert torch.equal(again(TOKENS), model(TOKENS))
    assert not again.training


@pytest.mark.parametrize(
    ("family", "dtype"),
    [*thinned([(name, torch.float32) for name in FIRST], [(name, torch.float32) for name in CORE]),
     *((name, torch.bfloat16) for name in CORE)],
)  # fmt: skip
def test_loaded_models(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = copy.deepcopy(hooked(FIRST[family])).to(dtype)
    assert_same(again := saved(model, tmp_path / "model"), model)
    assert again.hf_config == json.loads(json.dumps(model.hf_config))


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5"])
def test_what_comes_back_can_be_exported(family: str, tmp_path: Path) -> None:
    model = hooked(FIRST[family])
    ours, theirs = saved(model, tmp_path / "model").to_hf().state_dict(), model.to_hf().state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


SMALL: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "act_fn": "gelu"}
OF_TEXT = {**SMALL, "n_ctx": 8, "d_vocab": 12}


@pytest.mark.parametrize(
    ("cls", "cfg"),
    [
        (HookedTransformer, OF_TEXT),
        (HookedEncoder, OF_TEXT),
        (HookedEncoderDecoder, {**OF_TEXT, "act_fn": "relu", "decoder_start_token_id": 0}),
        (HookedVisionEncoder, {**SMALL, "image_size": 8, "patch_size": 4, "n_classes": 3}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_class(cls: Any, cfg: dict[str, Any], tmp_path: Path) -> None:
    model = cls({**cfg, "device": "cpu"})
    assert_same(saved(model, tmp_path / "model"), model)
    again = pretrained.from_pretrained_no_processing(tmp_path / "model", device="cpu")
    assert_same(again, model)


@pytest.mark.parametrize("name", ["llava", "clip"])
def test_models_of_images_and_text(name: str, tmp_path: Path) -> None:
    case = next(case for case in VISION_CASES if case.family == name)
    assert_same(saved(model := hooked_any(case), tmp_path / "model"), model)


def test_the_bundled_models(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained("demo", device="cpu")
    again = saved(model, tmp_path / "demo")
    assert_same(again, model)
    assert again.cfg.processed == model.cfg.processed != ()
    text = "The capital of France is"
    assert_close(again(text), model(text))  # the strides of folded weights are not those of a file
    assert again.to_string(again.to_tokens(text)) == model.to_string(model.to_tokens(text))
    assert_same(HookedTransformer.from_pretrained(tmp_path / "demo", device="cpu"), model)  # not folded twice


def test_a_trained_model_and_its_tokenizer(tmp_path: Path) -> None:
    model = toy("rotary", tokenizer=words()).requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters())
    model(TOKENS, return_type="loss").backward()
    optimizer.step()
    again = saved(model, tmp_path / "a" / "toy")
    assert_same(again, model)
    assert again.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    folded = pretrained.from_pretrained(tmp_path / "a" / "toy", device="cpu")
    assert "fold_ln" in folded.cfg.processed
    assert (folded(TOKENS).log_softmax(-1) - model(TOKENS).log_softmax(-1)).abs().max() < 1e-4


def test_options_of_loading(tmp_path: Path) -> None:
    model = toy("standard")
    model.save(tmp_path / "toy")
    load = pretrained.from_pretrained_no_processing
    short = load(
        tmp_path / "toy", first_n_layers=1, n_ctx=8, dtype="float64", default_padding_side="left", device="cpu"
    )
    assert (short.cfg.n_layers, short.cfg.n_ctx, short.cfg.dtype) == (1, 8, torch.float64)
    assert short.cfg.default_padding_side == "left"
    assert torch.equal(short.W_E, model.W_E.double())
    on_disk = load(tmp_path / "toy", device_map={"": "cpu", "blocks.1": "disk"})
    assert torch.equal(on_disk(TOKENS), model(TOKENS))
    mapped = HookedTransformer.load(tmp_path / "toy", mmap=True, device="cpu")
    assert torch.equal(mapped(TOKENS), model(TOKENS))
    for option in ({"checkpoint_index": 0}, {"attn_pdrop": 0.1}):
        with pytest.raises(ValueError, match="cannot be given"):
            load(tmp_path / "toy", **option)
    with pytest.raises(ValueError, match=r"not a HookedEncoder: load it with HookedTransformer.load"):
        HookedEncoder.load(tmp_path / "toy")


def test_several_dtypes(tmp_path: Path) -> None:
    model = toy("standard")
    model.blocks[1].mlp.to(torch.float64)
    assert_same(saved(model, tmp_path / "toy"), model)


@pytest.mark.slow
def test_saving_again_and_into_other_folders(tmp_path: Path) -> None:
    first, second = toy("standard"), toy("standard", seed=5)
    first.save(tmp_path / "toy")
    assert_same(saved(second, tmp_path / "toy"), second)
    mapped = HookedTransformer.load(tmp_path / "toy", mmap=True, device="cpu")
    mapped.save(tmp_path / "toy")  # into the files that it is a view of
    assert_same(HookedTransformer.load(tmp_path / "toy", device="cpu"), second)
    hf = HookedTransformer.from_pretrained_no_processing("demo", device="cpu")
    hf.save_pretrained(tmp_path / "hf")
    with pytest.raises(FileExistsError, match="HF format"):
        first.save(tmp_path / "hf")
    with pytest.raises(FileExistsError, match=r"model\.save wrote"):
        hf.save_pretrained(tmp_path / "toy")
    assert {path.name for path in tmp_path.iterdir()} == {"toy", "hf"}


def test_a_save_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy("standard")

    def fail(*args: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("hooked_lm.hub.native.write_safetensors", fail)
    with pytest.raises(OSError, match="no space left"):
        model.save(tmp_path / "new" / "toy")
    assert not list(tmp_path.iterdir())


def test_a_repository_of_the_hub(tmp_path: Path) -> None:
    """In the layout of the hub's cache, from which huggingface_hub serves files without a connection."""
    model = toy("rotary", tokenizer=words())
    repository = tmp_path / "cache" / "models--someone--toy"
    model.save(repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "local_files_only": True, "device": "cpu"}
    again = pretrained.from_pretrained_no_processing("someone/toy", **options)
    assert_same(again, model)
    assert again.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    folded = HookedTransformer.from_pretrained("someone/toy", **options)
    assert "fold_ln" in folded.cfg.processed
    with pytest.raises(ValueError, match="someone/other"):
        HookedTransformer.from_pretrained("someone/other", **options)


def test_a_model_on_several_devices_and_in_another_dtype(tmp_path: Path) -> None:
    load = pretrained.from_pretrained_no_processing
    spread = load("demo", device_map={"": "cpu", "blocks.1": "disk"}, dtype="bfloat16")
    spread.save(tmp_path / "demo")
    again = HookedTransformer.load(tmp_path / "demo", device="cpu")
    assert again.cfg.dtype == torch.bfloat16
    for name, slot in slots(spread).items():
        assert torch.equal(slots(again)[name].tensor, slot.tensor), name
    wider = load(tmp_path / "demo", device="cpu", dtype="float32")
    assert torch.equal(wider.W_E, spread.W_E.float())


# ---- what is refused -------------------------------------------------------------------------------------------------


class Other(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_parts_that_were_replaced(tmp_path: Path) -> None:
    model = toy("standard")
    model.blocks[1].mlp = Other()
    with pytest.raises(ValueError, match=r"'blocks.1.mlp' is a Other.*torch.save"):
        model.save(tmp_path / "toy")
    assert not list(tmp_path.iterdir())


def test_an_own_model_names_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.save\(path\)"):
        toy("standard").save_pretrained(tmp_path / "toy")
    with pytest.raises(ValueError, match=r"model\.save\(path\)"):
        HookedTransformer.from_pretrained("demo").save_pretrained(tmp_path / "toy")


def test_folders_that_hold_no_saved_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        HookedTransformer.load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="load it with from_pretrained"):
        HookedTransformer.load(tmp_path)
    toy("standard").save(tmp_path / "toy")
    file = tmp_path / "toy" / "hooked_lm.json"
    written = json.loads(file.read_text())
    for broken in ("{", "[]", json.dumps(written | {"config": {**written["config"], "format": 2}})):
        file.write_text(broken)
        with pytest.raises(ValueError, match=r"hooked_lm\.json cannot be read"):
            HookedTransformer.load(tmp_path / "toy")


def test_folders_that_a_save_or_a_copy_left_half_written(tmp_path: Path) -> None:
    for missing, message in (
        ("model.safetensors", "no checkpoint at .*model.safetensors"),
        (
            "hooked_lm.json",
            r"no hooked_lm\.json, which model\.save writes; model\.save writes it last: was it interrupted",
        ),
    ):
        toy("standard").save(tmp_path / missing)
        (tmp_path / missing / missing).unlink()
        with pytest.raises(ValueError, match=message):
            pretrained.from_pretrained(tmp_path / missing, device="cpu")
    toy("standard").save(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ValueError, match="truncated or not a safetensors file"):
        HookedTransformer.load(tmp_path / "cut")


def test_a_saved_model_is_no_checkpoint_to_verify(tmp_path: Path) -> None:
    toy("standard").save(tmp_path / "toy")
    with pytest.raises(ValueError, match=r"holds a model that model\.save wrote, and none in HF format.*model\.verify"):
        hub.verify(tmp_path / "toy")


def test_places_where_no_model_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FileExistsError, match=rf"{tmp_path}/file is a file"):
            toy("standard").save(path)
    with pytest.raises(OSError, match="cannot write a model to /proc/nothing/toy"):
        toy("standard").save("/proc/nothing/toy")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_path_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = HookedTransformer.from_pretrained("demo")
    for use in (model.save, model.save_pretrained, HookedTransformer.load):
        with pytest.raises(ValueError, match="the path of the model's folder is empty"):
            use("")
    assert not list(tmp_path.iterdir())


def test_files_that_are_no_config_and_no_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    for load in (HookedTransformerConfig.load, Cache.load):
        with pytest.raises(IsADirectoryError, match="is a folder"):
            load(tmp_path)
        with pytest.raises(FileNotFoundError, match="nothing"):
            load(tmp_path / "nothing")
        with pytest.raises(ValueError, match="is not a c"):
            load(tmp_path / "file")


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_configs(tmp_path: Path) -> None:
    cfg = HookedTransformerConfig(n_layers=2, d_model=16, n_heads=2, n_ctx=8, d_vocab=12, act_fn="gelu", seed=3)
    cfg.save(tmp_path / "cfg.json")
    again = HookedTransformerConfig.load(tmp_path / "cfg.json")
    assert again == cfg
    assert replace(again, d_model=32).d_mlp == replace(cfg, d_model=32).d_mlp == 128
    loaded = HookedTransformer.from_pretrained("demo").cfg
    loaded.save(tmp_path / "cfg.json")
    assert HookedTransformerConfig.load(tmp_path / "cfg.json") == loaded
    with pytest.raises(ValueError, match="is a HookedTransformerConfig, not a HookedEncoderConfig"):
        HookedEncoderConfig.load(tmp_path / "cfg.json")
    (tmp_path / "cfg.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a config that cfg\.save wrote"):
        HookedTransformerConfig.load(tmp_path / "cfg.json")
    with pytest.raises(FileNotFoundError, match="no folder"):
        cfg.save(tmp_path / "nowhere" / "cfg.json")


def test_values_that_have_no_json() -> None:
    value = (1, [2.5, None], {"a": (True,)}, frozenset({3}), torch.bfloat16)
    assert from_json(json.loads(json.dumps(to_json(value)))) == value
    with pytest.raises(ValueError, match=r"holds a builtins\.complex"):
        to_json((1, 2j))
    for name in ("os:system", "hooked_lm.files:replacing", "hooked_lm.models.config.tree:Any", "nothing"):
        with pytest.raises(ValueError, match="no component"):
            from_json({"class": name})
