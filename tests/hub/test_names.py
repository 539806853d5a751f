"""What a name means: a directory, a short name, the bundled model, a repository in the cache of the hub."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hooked_lm import HookedTransformer, pretrained
from hooked_lm.hub.names import checkpoint_step
from hooked_lm.hub.options import Options
from tests.families import CASES, reference
from tests.models.toys import words

GPT2 = next(case for case in CASES if str(case) == "gpt2-tied")
load = pretrained.from_pretrained_no_processing


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["demo", "gpt2", "pythia-70m", "gpt2-small"])
def test_a_path_is_the_users_own_directory(name: str, here: Path) -> None:
    reference(GPT2).save_pretrained(here / name)
    (here / "below").mkdir()
    for path in (
        Path(name),
        Path("./" + name),
        here / name,
        f"./{name}",
        str(here / name),
        f"below/../{name}",
        f"~/{name}",
    ):
        model = load(path)
        assert model.cfg.d_model == reference(GPT2).config.n_embd
        assert model.cfg.model_name == name
        with pytest.raises(ValueError, match="no checkpoints of"):
            load(path, checkpoint_index=0)  # its name says nothing of a training run


def test_a_short_name_that_is_a_directory(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model is always meant; another name means a directory of that name if a model is in it."""
    reference(GPT2).save_pretrained(here / "demo")
    assert load("demo").cfg.d_vocab != reference(GPT2).config.vocab_size
    reference(GPT2).save_pretrained(here / "gpt2")
    assert load("gpt2").cfg.d_model == reference(GPT2).config.n_embd
    (here / "pythia-70m").mkdir()
    (here / "pythia-70m" / "results.json").write_text("{}")
    with pytest.raises(ValueError, match="EleutherAI/pythia-70m"):
        load("pythia-70m", local_files_only=True)


@pytest.mark.parametrize(
    "name", [Path("nowhere"), Path("openai-community/gpt2"), "./nowhere", "~/nowhere", Path("demo")]
)
def test_a_path_is_never_looked_for_on_the_hub(name: Any, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ValueError, match="no such folder"):
        load(name)


def test_the_tokenizer_of_a_loaded_model_is_that_of_the_path(here: Path) -> None:
    bundled = load("demo")
    bundled.save_pretrained(here / "demo")
    assert load(Path("demo")).cfg.tokenizer_name == "./demo"
    assert isinstance(bundled, HookedTransformer)
    assert torch.equal(load(Path("demo")).W_E, bundled.W_E)


# ---- the cache of the hub --------------------------------------------------------------------------------------------


def cached(repository: str, cache: Path, width: int) -> None:
    """A checkpoint in the layout of the hub's cache."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    config = reference(GPT2).config.to_dict() | {"n_embd": width, "n_head": 2, "n_inner": None}
    GPT2LMHeadModel(GPT2Config(**config)).save_pretrained(folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")


def test_a_tokenizer_of_the_hub_has_the_name_of_its_repository(here: Path) -> None:
    cached("openai-community/gpt2", here / "cache", 8)
    words().save_pretrained(here / "cache" / "models--openai-community--gpt2" / "snapshots" / "abc")
    model = load("gpt2", cache_dir=str(here / "cache"), local_files_only=True)
    assert model.tokenizer.name_or_path == "openai-community/gpt2"
    model.save_pretrained(here / "saved")
    assert load(here / "saved").tokenizer.name_or_path == str(here / "saved")


def test_a_short_name_in_the_cache_goes_before_its_organisations(here: Path) -> None:
    options: dict[str, Any] = {"cache_dir": str(here / "cache"), "local_files_only": True}
    cached("openai-community/gpt2", here / "cache", 8)
    assert load("gpt2", **options).cfg.d_model == 8
    cached("gpt2", here / "cache", 16)
    for name in ("gpt2", "gpt2-small"):
        assert load(name, **options).cfg.d_model == 16
    assert load("openai-community/gpt2", **options).cfg.d_model == 8
    (here / "cache" / "models--gpt2" / "snapshots" / "abc" / "model.safetensors").unlink()
    assert load("gpt2", **options).cfg.d_model == 8  # of the other there is only a config


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, None)),
        ({"checkpoint_index": 0}, (0, "step0")),
        ({"checkpoint_index": 1}, (1, "step1")),
        ({"checkpoint_index": -1}, (143000, "step143000")),
        ({"checkpoint_value": 512}, (512, "step512")),
        ({"revision": "step8"}, (None, "step8")),
    ],
)
def test_a_checkpoint_of_a_training_run(given: dict[str, Any], expected: tuple[int | None, str | None]) -> None:
    assert checkpoint_step("pythia-70m", Options(**given)) == expected


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"checkpoint_index": 9999}, IndexError, "checkpoint_index 9999 is out of range"),
        ({"checkpoint_value": 500}, ValueError, r"no checkpoint at step 500; the nearest are \[512, 256\]"),
        ({"checkpoint_index": 1, "revision": "step8"}, ValueError, "give one of checkpoint_index"),
    ],
)
def test_a_checkpoint_that_there_is_not(given: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        checkpoint_step("pythia-70m", Options(**given))
