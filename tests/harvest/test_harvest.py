"""A harvest against a loop of forward passes; what it keeps, in which type, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from hooked_lm import HookedEncoder, HookedTransformer
from hooked_lm.analysis import feature_report
from hooked_lm.harvest import harvest
from hooked_lm.interventions.dictionaries import TopK, TrainingConfig, evaluate_dictionary, train_dictionary, train_on
from tests.close import assert_close

SITES = ["blocks.0.hook_mlp_out", "blocks.1.attn.hook_z"]
TEXTS = [
    "Mary gave it to John",
    "John",
    "",
    "Then they went to the house and Mary gave the ball to John",
    "Mary and John",
]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def by_hand(model: HookedTransformer, texts: list[str], site: str, keep_bos: bool = True, context: int = 32) -> Tensor:
    found = []
    for text in filter(None, texts):
        tokens = model.to_tokens(text)[:, :context]
        found.append(model.run_with_cache(tokens, names_filter=site)[1][site][0][0 if keep_bos else 1 :])
    return torch.cat(found)


def close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    assert ours.shape == theirs.shape
    assert (ours.float() - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.every_parameter
@pytest.mark.parametrize("per_shard", [1, 2, 100])
def test_is_a_loop_of_forward_passes(model: HookedTransformer, tmp_path: Path, per_shard: int) -> None:
    store = harvest(model, TEXTS, SITES, tmp_path, documents_per_shard=per_shard, batch_size=2)
    for site in SITES:
        close(store[site][:], by_hand(model, TEXTS, site))
    lengths = [len(model.to_tokens(text)[0]) for text in TEXTS if text]
    assert store["documents"][:].tolist() == [n for n, of in zip([0, 1, 3, 4], lengths, strict=True) for _ in range(of)]
    assert store["positions"][:].tolist() == [pos for length in lengths for pos in range(length)]
    assert store["tokens"][:].tolist() == [int(t) for text in TEXTS if text for t in model.to_tokens(text)[0]]
    assert store["is_special"][:].tolist() == [pos == 0 for length in lengths for pos in range(length)]
    assert store.is_complete
    store.verify()


def test_the_store_is_indexed_as_a_tensor(model: HookedTransformer, tmp_path: Path) -> None:
    store = harvest(model, TEXTS, SITES, tmp_path, documents_per_shard=1)
    column, whole = store[SITES[1]], by_hand(model, TEXTS, SITES[1])
    assert column.shape == whole.shape
    assert column.dims == ("token", "head", "d_head")
    for which in (3, -1, slice(2, 9), slice(None), slice(20, 5), slice(9, None, 3), [5, 0, -2], torch.tensor([7, 7])):
        close(column[which], whole[which], 1e-5) if whole[which].numel() else column[which]
        assert column[which].shape == whole[which].shape
    close(store.mean(SITES[0]), by_hand(model, TEXTS, SITES[0]).double().mean(0))
    close(store.variance(SITES[0]), by_hand(model, TEXTS, SITES[0]).double().var(0, unbiased=False))
    with pytest.raises(IndexError, match="out of range"):
        column[1000]
    with pytest.raises(KeyError, match="hook_mlp_out"):
        store["blocks.0.hook_mlp_ou"]
    for wrong in (None, (0, 1), (slice(2), 0)):
        with pytest.raises(
            TypeError, match=r"indexed by tokens alone|violates type hint"
        ):  # one item of a tuple is checked
            column[wrong]


def test_a_column_is_indexed_before_it_is_computed_with(model: HookedTransformer, tmp_path: Path) -> None:
    column = harvest(model, TEXTS[:2], ("resid_post", 1), tmp_path)["resid_post", 1]
    dictionary = TopK(TopK.Config(d_in=model.cfg.d_model, d_sae=8, k=2))
    for use in (lambda given: given - dictionary.b_dec, lambda given: given @ dictionary.W_enc, torch.mean):
        with pytest.raises(ValueError, match=r"lies on disk: index it .*column\[:\] for all"):
            use(column)
    assert dictionary.encode(column[:]).shape == (len(column), 8)


def test_short_names_of_what_is_stored(model: HookedTransformer, tmp_path: Path) -> None:
    store = harvest(model, TEXTS, SITES, tmp_path)
    assert [store["mlp_out0"].name, store["z", 1].name] == SITES
    assert torch.equal(store.mean("mlp_out0"), store.mean(SITES[0]))
    assert repr(store["z1"]).startswith("Column('blocks.1.attn.hook_z': token ")
    assert "in 1 shard (complete)" in repr(store)
    for wrong in ("tokens", ("z", 0), "z2"):
        with pytest.raises(KeyError, match="no site"):
            store.mean(wrong)
    with pytest.raises(KeyError, match="no site 'tokens'"):
        store.stream("tokens")


@pytest.mark.every_parameter
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 4e-3), ("float16", 5e-4), ("int8", 5e-3)])
def test_types(model: HookedTransformer, tmp_path: Path, dtype: str, tolerance: float) -> None:
    store = harvest(model, TEXTS, SITES, tmp_path, dtype=dtype)
    assert harvest(model, TEXTS, SITES, tmp_path, dtype=getattr(torch, dtype)).path == store.path
    for site in SITES:
        close(store[site][:], by_hand(model, TEXTS, site), tolerance)
    assert store[SITES[0]].dtype == (torch.float32 if dtype == "int8" else getattr(torch, dtype))


def test_what_is_kept(model: HookedTransformer, tmp_path: Path) -> None:
    text = harvest(model, TEXTS, SITES, tmp_path, positions="text")
    close(text[SITES[0]][:], by_hand(model, TEXTS, SITES[0], keep_bos=False))
    last = harvest(model, TEXTS, SITES, tmp_path, positions=-1)
    rows = [by_hand(model, [text], SITES[0]) for text in TEXTS if text]
    close(last[SITES[0]][:], torch.stack([row[-1] for row in rows]))
    third = harvest(model, TEXTS, SITES, tmp_path, positions=[2])  # of rows that have it
    close(third[SITES[0]][:], torch.stack([row[2] for row in rows if len(row) > 2]))
    mean = harvest(model, TEXTS, SITES, tmp_path, reduce="mean", documents_per_shard=2)
    close(mean[SITES[0]][:], torch.stack([row.mean(0) for row in rows]))
    assert mean["documents"][:].tolist() == [0, 1, 3, 4]


def test_long_documents(model: HookedTransformer, tmp_path: Path) -> None:
    whole = harvest(model, TEXTS, SITES, tmp_path, context=6)
    close(whole[SITES[0]][:], by_hand(model, TEXTS, SITES[0], context=6))
    split = harvest(model, TEXTS, SITES, tmp_path, context=6, long="split", positions="text")
    bos = model.to_tokens("")[0, :1].tolist()
    assert split["tokens"][:].tolist() == [int(t) for text in TEXTS if text for t in model.to_tokens(text)[0][1:]]
    first = model.to_tokens(TEXTS[3])[0]
    second = torch.tensor([bos + first[6:11].tolist()])
    theirs = model.run_with_cache(second, names_filter=SITES[0])[1][SITES[0]][0][1:]
    at = (split["documents"][:] == 3).nonzero()[5:10, 0]
    close(split[SITES[0]][at], theirs)
    with pytest.raises(ValueError, match=r"document 0 has \d+ tokens, and the context 4"):
        harvest(model, TEXTS, SITES, tmp_path, context=4, long="error")


def test_files_can_be_read_with_safetensors_alone(model: HookedTransformer, tmp_path: Path) -> None:
    store = harvest(model, TEXTS, SITES, tmp_path, documents_per_shard=3, dtype=torch.bfloat16)
    tensors = [load_file(path) for path in sorted(store.path.glob("*.safetensors"))]
    close(torch.cat([part[SITES[1]] for part in tensors]), by_hand(model, TEXTS, SITES[1]), 4e-3)
    records = [json.loads(path.read_text()) for path in sorted(store.path.glob("shard-*.json"))]
    assert [record["documents"] for record in records] == [[0, 3], [3, 5]]
    assert [record["tokens"] for record in records] == [len(part["tokens"]) for part in tensors]
    plan = json.loads((store.path / "plan.json").read_text())
    assert plan["shards"] == [[0, 3], [3, 5]]


def test_token_ids_and_an_order(model: HookedTransformer, tmp_path: Path) -> None:
    ids = torch.randint(1, model.cfg.d_vocab, (7, 5), generator=torch.Generator().manual_seed(0))
    store = harvest(model, ids, SITES, tmp_path, seed=3, documents_per_shard=2)
    order = store["documents"][::5].tolist()
    assert sorted(order) == list(range(7))
    assert order != list(range(7))
    close(store[SITES[0]][:], model.run_with_cache(ids, names_filter=SITES)[1][SITES[0]][order].flatten(0, 1))


def test_an_encoder(tmp_path: Path) -> None:
    cfg = {
        "n_layers": 2,
        "d_model": 16,
        "n_heads": 2,
        "n_ctx": 16,
        "d_vocab": 12,
        "act_fn": "gelu",
        "d_mlp": 32,
        "seed": 0,
    }
    encoder = HookedEncoder(cfg)
    ids = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    store = harvest(encoder, ids, ("resid_post", 0), tmp_path, batch_size=3)
    theirs = [encoder.run_with_cache(torch.tensor([row]))[1]["blocks.0.hook_resid_post"][0] for row in ids]
    close(store["blocks.0.hook_resid_post"][:], torch.cat(theirs))


def test_a_shuffled_stream_gives_every_vector_once_in_an_epoch(model: HookedTransformer, tmp_path: Path) -> None:
    store = harvest(model, TEXTS * 4, SITES, tmp_path, documents_per_shard=3, seed=1)
    stream = store.stream(*SITES, buffer=8000, run=1500, seed=5)
    assert stream.runs_per_buffer > 1
    assert stream.buffers_per_epoch > 2

    def epoch(number: int) -> tuple[Tensor, Tensor]:
        first = number * stream.buffers_per_epoch
        filled = [stream.fill(i) for i in range(first, first + stream.buffers_per_epoch)]
        return torch.cat([read for read, _ in filled]), torch.cat([written for _, written in filled])

    def in_order(rows: Tensor) -> Tensor:
        return torch.stack(sorted(rows, key=lambda row: row.tolist()))

    (read, written), again = epoch(0), epoch(1)
    whole = torch.cat([store[site][:].flatten(1) for site in SITES], 1)
    assert torch.equal(in_order(torch.cat([read, written], 1)), in_order(whole))
    assert torch.equal(in_order(torch.cat(again, 1)), in_order(whole))
    assert not torch.equal(in_order(stream.fill(0)[0]), in_order(stream.fill(stream.buffers_per_epoch)[0])), (
        "other runs"
    )
    assert torch.equal(read[:3], stream.fill(0)[0][:3])


def test_a_dictionary_is_trained_from_a_store(model: HookedTransformer, tmp_path: Path) -> None:
    texts = [
        f"{first} gave the ball to {second}" for first in ("Mary", "John") for second in ("Mary", "John", "the man")
    ]
    store = harvest(model, texts * 4, SITES[0], tmp_path, documents_per_shard=5, positions="text")
    stream, cfg = store.stream(SITES[0], buffer="40kB"), TopK.Config(d_in=128, d_sae=32, k=4)
    settings = TrainingConfig(steps=30, vectors_per_step=32)
    whole = train_on(stream, cfg, settings)
    half = train_on(stream, cfg, settings, directory=tmp_path / "run", checkpoint_every=10)
    assert torch.equal(whole.losses.values, half.losses.values)
    assert float(whole.losses.values[-1]) < float(whole.losses.values[0])
    assert whole.sae.cfg.hook_point == half.sae.cfg.hook_point == store.site(SITES[0])
    assert feature_report(model, whole.sae, 3, texts[:2]).about["site"] == store.site(SITES[0])
    assert whole.figures is None
    assert "no figures: evaluate_dictionary(model, texts, trained.sae)" in repr(whole)
    assert evaluate_dictionary(model, texts[:2], whole.sae).select(figure="L0").mean == 4


def test_no_more_layers_run_than_the_sites_need(model: HookedTransformer, tmp_path: Path) -> None:
    ran: list[str] = []
    handles = [
        block.register_forward_hook(lambda *_, i=i: ran.append(f"block {i}")) for i, block in enumerate(model.blocks)
    ]
    handles.append(model.unembed.register_forward_hook(lambda *_: ran.append("unembed")))
    try:
        store = harvest(model, TEXTS, SITES[0], tmp_path)
        train_dictionary(
            model, TEXTS[:2] * 4, site=("mlp_out", 0), width=8, k=2, steps=2, vectors_per_step=4, held_out=0.0
        )
    finally:
        for handle in handles:
            handle.remove()
    assert store.is_complete
    assert set(ran) == {"block 0"}


def test_data_sets(model: HookedTransformer, tmp_path: Path) -> None:
    store = harvest(model, TEXTS, SITES, tmp_path, documents_per_shard=2, dtype=torch.bfloat16)
    tokens = store.to_datasets(SITES[1]).with_format("torch")
    assert len(tokens) == len(store)
    assert torch.equal(tokens[:][SITES[1]], store[SITES[1]][:].flatten(1).float())
    assert tokens[:]["documents"].tolist() == store["documents"][:].tolist()
    loader = DataLoader(store.to_torch_dataset(), batch_size=5)
    assert torch.equal(torch.cat([batch[SITES[0]] for batch in loader]), store[SITES[0]][:])
    rows = harvest(model, TEXTS, SITES, tmp_path, context=6)
    with pytest.warns(UserWarning, match="2 of 4 rows are shorter than 6 tokens"):
        whole = rows.to_datasets(schema="sae_lens").with_format("torch")
    assert whole[SITES[0]][:].shape == (2, 6, 128)
    assert_close(whole[1][SITES[1]], by_hand(model, TEXTS[3:4], SITES[1], context=6).flatten(1))
    assert whole[1]["token_ids"].tolist() == model.to_tokens(TEXTS[3])[0, :6].tolist()
