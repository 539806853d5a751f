"""Corpora from files, from data sets of Hugging Face, and streams."""

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest

from hooked_lm import HookedTransformer
from hooked_lm.harvest import harvest
from hooked_lm.harvest.documents import documents_of

TEXTS = [f"Mary gave {n} to John" for n in ("it", "that", "the ball", "them", "this", "a book", "something")]


def written(folder: Path, ending: str) -> Path:
    path = folder / f"corpus.{ending}"
    if ending == "jsonl":
        path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    elif ending == "txt":
        path.write_text("\n".join(TEXTS))
    else:
        datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(path)
    return path


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "txt"])
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = written(tmp_path, ending)
    for source in (path, str(path), str(tmp_path / f"*.{ending}")):
        assert documents_of(source).between(0, 100) == list(enumerate(TEXTS))


def test_an_iterable_is_read_from_any_place() -> None:
    class Again:
        def __iter__(self) -> Iterator[str]:
            return iter(TEXTS)

    documents, expected = documents_of(Again()), list(enumerate(TEXTS))
    for start, end in ((3, 5), (5, 6), (1, 3), (6, 9)):
        assert documents.between(start, end) == expected[start:end]


@pytest.mark.slow
def test_data_sets_and_streams_give_the_same_shards(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained("demo")
    whole = datasets.Dataset.from_dict({"text": TEXTS, "id": list(range(len(TEXTS)))})
    stores = [
        harvest(model, data, "blocks.0.hook_resid_post", tmp_path, documents_per_shard=3)
        for data in (TEXTS, whole, whole.to_iterable_dataset(), whole.to_iterable_dataset())
    ]
    assert len({store.path for store in stores}) == 3
    for store in stores:
        assert store.is_complete
        assert store.shards == [0, 1, 2]
        for path in store.path.glob("*.safetensors"):
            assert path.read_bytes() == (stores[0].path / path.name).read_bytes()
    part = harvest(model, whole.to_iterable_dataset(), "hook_embed", tmp_path, documents_per_shard=2, shard=(1, 2))
    assert part.shards == [1, 3]
    some = harvest(model, whole.to_iterable_dataset(), "hook_embed", tmp_path, documents_per_shard=2, max_documents=5)
    assert (some.shards, some["documents"][-1].item()) == ([0, 1, 2], 4)


def test_columns() -> None:
    tokens = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "text": ["a", "b"]})
    assert documents_of(tokens).between(0, 2) == [(0, "a"), (1, "b")]
    assert documents_of(tokens, column="input_ids").between(0, 2) == [(0, [1, 2]), (1, [3])]
    with pytest.raises(ValueError, match="there is no column 'txt': one of 'input_ids', 'text'"):
        documents_of(tokens, column="txt")
    with pytest.raises(ValueError, match="which column has the documents"):
        documents_of(datasets.Dataset.from_dict({"words": ["a"]}))
    with pytest.raises(ValueError, match="a stream cannot be shuffled"):
        documents_of(tokens.to_iterable_dataset(), seed=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", "", "the data set is empty: there is nothing in .*empty.jsonl"),
        ("empty.txt", "", "the data set is empty: there is nothing in .*empty.txt"),
        ("half.jsonl", '{"text": "a"}\n{"text": "b\n', "cannot read .*half.jsonl as json: JSON parse error"),
        ("lists.jsonl", '["a"]\n["b"]\n', "cannot read .*lists.jsonl as json"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, message: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        documents_of(tmp_path / name)


def test_a_text_is_not_the_name_of_a_data_set() -> None:
    with pytest.raises(ValueError, match="neither a path nor the name of a data set; give texts as a list"):
        documents_of("Mary gave it to John")


def test_arguments_of_a_harvest_that_would_keep_nothing(tmp_path: Path) -> None:
    model = HookedTransformer.from_pretrained("demo")
    with pytest.raises(ValueError, match="positions is empty"):
        harvest(model, TEXTS, "mlp_out0", tmp_path, positions=[])
    with pytest.raises(ValueError, match="dtype must be 'float32', 'bfloat16', 'float16' or 'int8', got 'float9'"):
        harvest(model, TEXTS, "mlp_out0", tmp_path, dtype="float9")
    assert not list(tmp_path.iterdir())
