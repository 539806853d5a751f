"""The size of a harvest that is said beforehand is the size of its files."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.cli import app
from hooked_lm.harvest import estimate_harvest, harvest
from tests.close import assert_near

TEXTS = ["Mary gave it to John", "John", "", "Then they went to the house and Mary gave the ball to John"]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"positions": "text", "dtype": "bfloat16"},
        {"reduce": "mean", "dtype": "int8"},
        {"context": 4, "long": "split", "positions": [-1]},
    ],
    ids=str,
)
def test_it_is_the_size_of_the_files(model: HookedTransformer, settings: dict, tmp_path: Path) -> None:
    sites = ["resid_post1", "blocks.0.attn.hook_z"]
    found = estimate_harvest(model, TEXTS, sites, batch_size=2, shard_size=4000, **settings)
    store = harvest(model, TEXTS, sites, tmp_path, batch_size=2, shard_size=4000, **settings)
    records = [store.path / f"shard-{i:06d}.safetensors" for i in range(store.plan.n_shards)]
    written = sum(file.stat().st_size - int.from_bytes(file.read_bytes()[:8], "little") - 8 for file in records)
    assert found.bytes == written
    assert found.vectors == len(store["tokens"][:])
    assert found.documents == 4
    assert found.tokens == round(store.plan.tokens_per_document * 4)
    assert set(found.bytes_by_site) == {*store.sites, "ids and positions"}
    assert found.shards >= 1
    assert found.hours == found.tokens / found.tokens_per_second / 3600
    assert f"{found.tokens:,} tokens" in repr(found)


def test_a_model_without_weights_has_a_size_and_no_time() -> None:
    cfg = HookedTransformerConfig(
        n_layers=2, d_model=64, n_heads=4, n_ctx=32, d_vocab=50, act_fn="gelu", device="meta", init_weights=False
    )
    found = estimate_harvest(HookedTransformer(cfg), 1000, ("resid_post", 1), tokens_per_document=40, dtype="bfloat16")
    assert (found.tokens, found.vectors, found.bytes) == (32_000, 32_000, 32_000 * (64 * 2 + 17))
    assert (found.hours, "not timed" in repr(found)) == (None, True)
    with pytest.raises(ValueError, match="give tokens_per_document="):
        estimate_harvest(HookedTransformer(cfg), 1000, ("resid_post", 1))


def test_a_stream_has_the_documents_that_are_asked_for(model: HookedTransformer) -> None:
    class Stream:
        def __iter__(self):
            return iter(TEXTS * 100)

    with pytest.raises(ValueError, match="give max_documents="):
        estimate_harvest(model, Stream(), "resid_post1")
    found = estimate_harvest(model, Stream(), "resid_post1", max_documents=400)
    whole = estimate_harvest(model, TEXTS * 100, "resid_post1")
    assert (found.documents, found.bytes) == (whole.documents, whole.bytes)


def test_the_sample_stands_for_the_rest(model: HookedTransformer) -> None:
    texts = TEXTS * 3000
    found = estimate_harvest(model, texts, "resid_post1")
    whole = sum(len(model.to_tokens(text)[0]) for text in TEXTS if text) * 3000
    assert_near(torch.tensor(float(found.tokens)), float(whole), 0.02 * whole, "a sample of 1,000 of 12,000 documents")


def test_the_command_shows_it_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=64).save_pretrained("config-only")  # fmt: skip

    def call(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["harvest", *arguments, "--site", "resid_post1"], env={"COLUMNS": "200"})
        assert done.exit_code == 0, done.output
        return done.output

    sizes = ("--plan", "sizes", "--tokens-per-document", "30")
    found = call("./config-only", "1000000", "out", *sizes, "--dtype", "float16")
    assert "1,000,000 documents, 30,000,000 tokens" in found
    assert f"{30_000_000 * 32 * 2}" in found
    assert "not timed" in found
    assert "tokens/s" in call("demo", "20", "out", "--plan", "time", "--tokens-per-document", "30")
    assert not Path("out").exists()
    wrong = CliRunner().invoke(app, ["harvest", "demo", "20", "out", "--site", "resid_post1", "--plan", "all"])
    assert (wrong.exit_code, "--plan must be sizes or time" in wrong.output) == (2, True)


@pytest.mark.slow
def test_documents_that_are_cut_are_named(model: HookedTransformer) -> None:
    n_ctx = model.cfg.n_ctx
    cut = estimate_harvest(model, 100, ("resid_post", 1), tokens_per_document=5 * n_ctx)
    assert (cut.share_cut, cut.tokens) == (1.0, 100 * n_ctx)
    assert "100% fill the context and are cut" in repr(cut)
    split = estimate_harvest(model, 100, ("resid_post", 1), tokens_per_document=5 * n_ctx, long="split")
    assert (split.share_cut, split.tokens) == (0.0, 500 * n_ctx)
    assert "cut" not in repr(split)
