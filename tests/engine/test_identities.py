"""What identifies the inputs of a result: nothing resumes from a file of others, and nothing depends on what does not matter."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.engine.fingerprint import Digest, Unknown, modes
from hooked_lm.harvest import harvest
from hooked_lm.hooks import HookPoint
from hooked_lm.interventions import ZeroAblate
from hooked_lm.interventions.dictionaries import ActivationBatches, TopK, TrainingConfig, train_dictionary, train_on
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.studies import study_pairs
from tests.close import assert_apart, assert_close

SITE = "blocks.1.hook_resid_post"
NAMES = ["Mary", "John", "Tom", "Anna", "Paul", "Lisa"]
PAIR = {
    "clean": "Mary and John left, John",
    "corrupted": "Mary and John left, Mary",
    "answer": " Mary",
    "wrong_answer": " John",
}


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def corpus(n: int) -> list[str]:
    return [f"{NAMES[i % 6]} went to {NAMES[i // 6 % 6]}" for i in range(n)]


class Stream:
    """An iterable that can be read again."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)


# ---- harvests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["list", "dataset"])
def test_a_corpus_that_differs_in_one_document_is_another(model: HookedTransformer, tmp_path: Path, kind: str) -> None:
    """Also where no sample of 1,000 documents sees it."""
    texts = corpus(2500)
    other = [*texts[:3], "Anna gave it to Paul", *texts[4:]]
    if kind == "dataset":
        datasets = pytest.importorskip("datasets")
        texts, other = (datasets.Dataset.from_dict({"text": list(given)}) for given in (texts, other))
    settings: dict[str, Any] = {"max_documents": 2500, "documents_per_shard": 2500, "reduce": "last", "progress": False}
    first, second, again = (harvest(model, given, SITE, tmp_path, **settings) for given in (texts, other, texts))
    assert first.path == again.path
    assert first.path != second.path
    assert_apart(first[SITE][3], second[SITE][3])


def test_a_stream_that_goes_on_differently_is_refused(model: HookedTransformer, tmp_path: Path) -> None:
    texts = corpus(1300)
    settings: dict[str, Any] = {"documents_per_shard": 400, "reduce": "last", "progress": False}
    store = harvest(model, Stream(texts), SITE, tmp_path, **settings)
    assert harvest(model, Stream(texts), SITE, tmp_path, **settings).path == store.path
    other = [*texts[:1250], *texts[:50]]
    with pytest.raises(ValueError, match=r"shard 3 in .* was computed from other documents"):
        harvest(model, Stream(other), SITE, tmp_path, **settings)
    harvest(model, Stream(other), SITE, tmp_path, **settings, shard="0/2")  # not one of its shards


def test_modes_of_torch_belong_to_a_harvest(model: HookedTransformer, tmp_path: Path) -> None:
    plain = harvest(model, corpus(3), SITE, tmp_path, progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        cast = harvest(model, corpus(3), SITE, tmp_path, progress=False)
        assert modes() == {"autocast on cpu": "torch.bfloat16"}
    assert plain.path != cast.path
    assert_apart(plain[SITE][:], cast[SITE][:])
    assert modes() == {}


def test_the_last_call_of_a_tokenizer_does_not_belong_to_a_harvest(model: HookedTransformer, tmp_path: Path) -> None:
    first = harvest(model, corpus(3), SITE, tmp_path, progress=False)
    assert model.tokenizer is not None
    backend = model.tokenizer.backend_tokenizer
    backend.enable_padding(length=9)  # as a call with padding=True does
    backend.enable_truncation(9)
    assert harvest(model, corpus(3), SITE, tmp_path, progress=False).path == first.path


# ---- what is open in this process only -----------------------------------------------------------------------------------


def doubled(value: Tensor, hook: HookPoint) -> Tensor:
    return 2 * value


def harvested(model: HookedTransformer, folder: Path, n_workers: int, executor: str) -> Any:
    return harvest(model, corpus(3), SITE, folder, n_workers=n_workers, executor=executor, progress=False)


def studied(model: HookedTransformer, folder: Path, n_workers: int, executor: str) -> Any:
    return study_pairs(model, [PAIR], "sweep", folder, n_workers=n_workers, executor=executor, progress=False)


@pytest.mark.parametrize("run", [harvested, studied])
@pytest.mark.parametrize(("n_workers", "executor"), [(2, "processes"), (1, "ray")])
def test_workers_do_not_run_without_what_is_open_here(
    run: Callable[..., Any], n_workers: int, executor: str, model: HookedTransformer, tmp_path: Path
) -> None:
    """Workers have neither the hooks of a block nor autocast, so that they would compute something else."""
    with (
        model.hooks([(SITE, doubled)]),
        pytest.raises(ValueError, match=f"without the hooks at '{SITE}', which is open"),
    ):
        run(model, tmp_path, n_workers, executor)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="without autocast on cpu"):
        run(model, tmp_path, n_workers, executor)
    ablation = ZeroAblate(SITE)
    model.add_hook(SITE, ablation)
    try:
        with ablation.disabled(), pytest.raises(ValueError, match=f"a hook at '{SITE}' is disabled"):
            run(model, tmp_path, n_workers, executor)
    finally:
        model.reset_hooks()
    assert not list(tmp_path.iterdir()), "nothing was written"


def test_a_hook_that_is_disabled_here_is_part_of_the_model(model: HookedTransformer) -> None:
    ablation = ZeroAblate(SITE)
    with model.hooks([(SITE, ablation)]):
        on = Digest().of(model)
        with ablation.disabled():
            off = Digest().of(model)
        assert Digest().of(model) == on != off


# ---- trainings and caches ------------------------------------------------------------------------------------------------


def changed(model: HookedTransformer) -> HookedTransformer:
    """A model of the same name and sizes with one other number."""
    other = HookedTransformer.from_pretrained("demo")
    with torch.no_grad():
        other.blocks[0].mlp.W_in[3, 5] += 0.01
    return other


def test_a_training_resumes_only_from_one_of_the_same_data(model: HookedTransformer, tmp_path: Path) -> None:
    def train(of: HookedTransformer, prompts: Any) -> Tensor:
        options: dict[str, Any] = {
            "steps": 3,
            "vectors_per_step": 16,
            "held_out": 0.0,
            "progress": False,
            "batch_size": 8,
        }
        return train_dictionary(of, prompts, site=SITE, width=20, k=3, directory=tmp_path, **options).sae.W_dec

    texts = corpus(20)
    found = train(model, texts)
    assert_close(train(HookedTransformer.from_pretrained("demo"), list(texts)), found)
    for other, prompts in ((model, [*texts[:-1], "Anna left"]), (changed(model), texts)):
        with pytest.raises(ValueError, match="is a checkpoint of another training: sha256"):
            train(other, prompts)


class Unnamed:
    """Vectors that say nothing of themselves."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def fill(self, number: int) -> tuple[Tensor, Tensor]:
        return self.vectors, self.vectors

    def about(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("kind", [ActivationBatches, Unnamed])
def test_a_training_resumes_only_from_one_of_the_same_vectors(kind: Callable[[Tensor], Any], tmp_path: Path) -> None:
    vectors = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    cfg, settings = TopK.Config(d_in=8, d_sae=16, k=2), TrainingConfig(steps=2, vectors_per_step=30)
    found = train_on(kind(vectors), cfg, settings, directory=tmp_path, progress=False)
    again = train_on(kind(vectors.clone()), cfg, settings, directory=tmp_path, progress=False)
    assert_close(again.sae.W_dec, found.sae.W_dec)
    with pytest.raises(ValueError, match="is a checkpoint of another training: sha256"):
        train_on(kind(vectors.roll(1, 1)), cfg, settings, directory=tmp_path, progress=False)


def test_a_cache_knows_the_weights_of_its_model(
    model: HookedTransformer, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    _, cache = model.run_with_cache("Mary went", names_filter=SITE)
    cache.save(tmp_path / "cache.safetensors")
    with model.hooks([(SITE, doubled)]):  # of the same weights
        ActivationCache.load(tmp_path / "cache.safetensors", model)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="was saved from another model: weights"):
        ActivationCache.load(tmp_path / "cache.safetensors", changed(model))


# ---- functions -----------------------------------------------------------------------------------------------------------

HELPERS = """
import functools
import {name}_more as more
FACTOR = {factor}
def score(logits):
    return FACTOR * logits[:, -1, 3] + unused * 0
def plain(logits):
    return logits[:, -1, 3]
unused = 0
kept = functools.lru_cache(maxsize=None)(lambda n: n + FACTOR)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Writes modules of somebody's project, and imports them anew."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(factor: float = 1.0, more: int = 1) -> Any:
        (tmp_path / "mine.py").write_text(HELPERS.format(name="mine", factor=factor))
        (tmp_path / "mine_more.py").write_text(f"import mine\ndef inner(x):\n    return x + {more}\n")
        importlib.invalidate_caches()
        for name in ("mine", "mine_more"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module("mine")

    return write


def through_a_module(mine: Any) -> list[Callable[..., Any]]:
    """Functions whose code reaches another one through a module."""
    scope: dict[str, Any] = {"mine": mine}
    exec("score = lambda l: mine.score(l)\ninner = lambda x: mine.more.inner(x)\nkept = lambda n: mine.kept(n)", scope)
    return [scope["score"], scope["inner"], scope["kept"]]


def test_functions_are_hashed_through_modules(write: Callable[..., Any]) -> None:
    """What they reach, and nothing else; also what `lru_cache` keeps, and through modules that import each other."""

    def found(**changes: Any) -> list[bytes]:
        return [Digest().of(function) for function in through_a_module(write(**changes))]

    score, inner, kept = found()
    assert found() == [score, inner, kept]
    of_factor, of_more = found(factor=2.0), found(more=2)
    assert (of_factor[0] != score, of_factor[1] == inner, of_factor[2] != kept) == (True, True, True)
    assert (of_more[0] == score, of_more[1] != inner, of_more[2] == kept) == (True, True, True)


def test_what_a_function_may_reach_in_a_module_is_unknown(write: Callable[..., Any]) -> None:
    mine, name = write(), "score"
    with pytest.raises(Unknown, match="the module 'mine', of which anything may be used"):
        Digest().of(lambda logits: getattr(mine, name)(logits))
    Digest().of(lambda logits: np.exp(logits))  # an installed one: by its name and version


@functools.lru_cache
def cached(n: int) -> int:
    return n + OFFSET


OFFSET = 1


def test_cached_functions_are_hashed_by_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Digest().of(cached)
    monkeypatch.setitem(globals(), "OFFSET", 2)
    assert Digest().of(cached) != first
