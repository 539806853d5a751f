"""Top examples against a sort of the whole data set."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.reading.max_activating import max_activating_examples
from hooked_lm.interventions import top_positions
from hooked_lm.interventions.dictionaries import SAE
from hooked_lm.interventions.store import Store
from hooked_lm.interventions.top_examples import Examples, TopExamples
from tests.close import assert_close, assert_equal
from tests.interventions.held import held_bytes
from tests.interventions.test_detectors import KINDS, one
from tests.interventions.test_statistics import SPARE, shown


@pytest.fixture(scope="module")
def demo() -> Any:
    return HookedTransformer.from_pretrained("demo")


def sorted_by_hand(values: Tensor, real: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, texts and positions of the k largest of [text, pos, feature], each feature by itself."""
    flat = values.masked_fill(~real[..., None], -torch.inf).flatten(0, 1)
    order = flat.argsort(dim=0, descending=True, stable=True)[:k].T
    return flat.T.gather(1, order), order // values.shape[1], order % values.shape[1]


@pytest.mark.parametrize("kind", KINDS)
def test_top_examples_of_batches_are_those_of_all_data(kind: str) -> None:
    model, batches, site = one(kind)
    source = "hook_decoder_tokens" if kind == "encoder-decoder" else "hook_tokens"
    top, values = TopExamples(site, k=3, context=1, tokens=source), []
    ids = [torch.arange(8).view(2, 4) + 8 * i if kind == "wrapped" else batch[-1] for i, batch in enumerate(batches)]
    for tokens, batch in zip(ids, batches, strict=True):
        if kind == "wrapped":
            top.batch(tokens)
        hooks = [top] if kind == "wrapped" else [top.inputs, top]
        model.run_with_hooks(*batch, fwd_hooks=hooks)
        values.append(model.run_with_cache(*batch, names_filter=site)[1][site])
    data, tokens, found = torch.cat(values), torch.cat(ids), top.examples()
    expected, texts, positions = sorted_by_hand(data, torch.ones(data.shape[:2], dtype=torch.bool), 3)
    assert found.values.equal(expected)
    assert found.texts.equal(texts)  # after a ReLU many are equal: the first of them
    assert found.positions.equal(positions)
    for text, position, around in zip(
        found.texts.flatten(), found.positions.flatten(), found.tokens.flatten(0, 1), strict=True
    ):
        row = [-1, *tokens[text].tolist(), -1]
        assert around.tolist() == row[position : position + 3]


DRAW = torch.Generator().manual_seed(1)
DIRECTIONS = torch.randn(3, 128, generator=DRAW)
DICTIONARY = SAE.Config(d_in=128, d_sae=64).build().requires_grad_(False)
FEATURES: dict[str, Any] = {  # site, settings, what is measured, a feature, and how the search for one calls it
    "neurons": (("post", 1), {}, lambda v: v, (7,), {"neuron": 7}),
    "heads": (("z", 2), {"measure": "norm"}, lambda v: v.norm(dim=-1), (3,), {"heads": 3}),
    "entries of heads": (("z", 2), {}, lambda v: v, (3, 4), {"heads": "L2H3", "neuron": 4}),
    "directions": (("resid_post", 0), {"directions": DIRECTIONS}, lambda v: v @ DIRECTIONS.T, (2,), None),
    "directions of heads": (
        ("v", 1),
        {"directions": DIRECTIONS[:, :16]},
        lambda v: v @ DIRECTIONS[:, :16].T,
        (5, 2),
        None,
    ),
    "dictionary": (("mlp_out", 1), {"measure": DICTIONARY.encode}, DICTIONARY.encode, (11,), None),
    "norm": (("resid_post", 0), {"measure": "norm"}, lambda v: v.norm(dim=-1, keepdim=True), (0,), {}),
}


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("what", FEATURES)
def test_neurons_heads_directions_and_features_of_dictionaries(demo: Any, what: str, largest: bool) -> None:
    site, settings, measured, feature, theirs = FEATURES[what]
    data = torch.randint(5, 400, (20, 9), generator=torch.Generator().manual_seed(2))
    top = TopExamples(site, k=6, context=2, skip=1, largest=largest, activations=True, **settings)
    values = []
    for batch in data.split(8):
        demo.run_with_hooks(batch, fwd_hooks=[top.inputs, top])
        values.append(measured(demo.run_with_cache(batch)[1][site]))
    numbers, found = torch.cat(values), top.examples()
    assert found.values.shape == (*numbers.shape[2:], 6)
    real = torch.ones(20, 9).bool()
    real[:, 0] = False
    sign = 1 if largest else -1
    expected, texts, positions = sorted_by_hand(sign * numbers.flatten(2), real, 6)
    assert_close(found.values.view(-1, 6), sign * expected)
    for name, wanted in (("texts", texts), ("positions", positions)):
        same = getattr(found, name).view(-1, 6) == wanted
        assert same.float().mean() > 0.99  # a product of other shapes may round two that are nearly equal the other way
    assert found.activations is not None
    around = found.activations[feature]
    for i, (text, position) in enumerate(zip(found.texts[feature], found.positions[feature], strict=True)):
        for j, at in enumerate(range(int(position) - 2, int(position) + 3)):
            if 0 <= at < 9:
                assert_close(around[i, j], numbers[(text, at, *feature)], scale=numbers[(..., *feature)])
                assert found.tokens[feature][i, j] == data[text, at]
            else:
                assert around[i, j].isnan()
    if theirs is not None:
        same = max_activating_examples(demo, data, site=site, k=6, context=2, skip=1, largest=largest, **theirs)
        assert all(
            getattr(same, name).equal(getattr(found[feature], name)) for name in ("texts", "positions", "tokens")
        )
        assert_close(same.activations, around)


@pytest.mark.parametrize(("group", "at_once"), [(1, 1), (4, 60), (16, 1 << 19)])
@pytest.mark.parametrize("k", [1, 3, 20, 200])
def test_any_order_of_any_batches(k: int, group: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_positions, "GROUP", group)
    monkeypatch.setattr(top_positions, "AT_ONCE", at_once)
    draw = torch.Generator().manual_seed(k)
    data = torch.stack([
        torch.arange(120.0).view(20, 6),  # each more than all before
        -torch.arange(120.0).view(20, 6),
        torch.randint(0, 4, (20, 6), generator=draw).float(),  # many equal
        torch.zeros(20, 6),
        torch.randn(20, 6, generator=draw),
    ], -1)  # fmt: skip
    real, ids = torch.rand(20, 6, generator=draw) > 0.2, torch.arange(120).view(20, 6)
    top, n = TopExamples("0", k=k, context=1, activations=True), min(k, int(real.sum()))
    start = 0
    for size in (1, 13, 2, 4):
        rows = slice(start, start + size)
        top.batch(ids[rows], real[rows])
        shown(top, data[rows])
        start += size
    found, (values, texts, positions) = top.examples(), sorted_by_hand(data, real, k)
    assert found.values[:, :n].equal(values[:, :n])
    assert found.texts[:, :n].equal(texts[:, :n])
    assert found.positions[:, :n].equal(positions[:, :n])
    assert found.tokens[:, :n, 1].equal(ids[texts, positions][:, :n])
    assert found.activations is not None
    assert found.activations[:, :n, 1].equal(values[:, :n])
    is_there = found.tokens[:, :n] >= 0
    assert is_there.equal(~found.activations[:, :n].isnan())
    for tensor in (found.values[:, n:], found.activations[:, n:]):
        assert tensor.isnan().all()
    assert (found.texts[:, n:] == -1).all()


def ranked_by_hand(batches: list[tuple[Tensor, Tensor, Tensor]], top: TopExamples) -> list[list[tuple[Any, ...]]]:
    """For each feature value, text, position, tokens and activations of the best places: all of them, sorted by Python."""
    found: list[list[tuple[Any, ...]]] = [[] for _ in range(batches[0][0].shape[2])]
    n_texts = 0
    for values, ids, mask in batches:
        for row, real in enumerate(mask.tolist()):
            there = [position for position, is_real in enumerate(real) if is_real]
            for position in there[top.skip :]:
                near = range(position - top.context, position + top.context + 1)
                tokens = [int(ids[row, i]) if i in there else -1 for i in near]
                for feature, places in enumerate(found):
                    around = [float(values[row, i, feature]) if i in there else None for i in near]
                    value = float(values[row, position, feature])
                    places.append((value, n_texts + row, position, tokens, around))
        n_texts += len(ids)
    sign, unseen = (-1, -torch.inf) if top.largest else (1, torch.inf)
    return [
        sorted((place for place in places if place[0] != unseen), key=lambda place: sign * place[0])[: top.k]
        for places in found
    ]


def as_lists(found: Examples) -> list[list[tuple[Any, ...]]]:
    """Examples as `ranked_by_hand` writes them."""
    places = []
    for feature in range(len(found.values)):
        columns = [value[feature].tolist() for value in found.tensors().values()]
        rows = [row for row in zip(*columns, strict=True) if row[1] >= 0]
        places.append([(*row[:4], [None if x != x else x for x in (row[4] if len(row) > 4 else [])]) for row in rows])
    return places


WHOLE = {"seed": (0, 10**6), "k": (1, 7), "context": (0, 2), "skip": (0, 2), "features": (1, 5), "levels": (-7, 50)}


@pytest.mark.slow
@limits(deadline=None)
@given(st.data())
def test_any_split_of_a_data_set_gives_what_a_sort_of_all_of_it_gives(data: st.DataObject) -> None:
    """With ties, infinities, padding, the first tokens skipped, in either direction, read at any time, in pieces of any size."""
    whole = {name: data.draw(st.integers(*ends), name) for name, ends in WHOLE.items()}
    flags = {name: data.draw(st.booleans(), name) for name in ("largest", "activations", "padded", "infinite")}
    chosen = {name: whole[name] for name in ("k", "context", "skip")}
    top = TopExamples("0", **chosen, largest=flags["largest"], activations=flags["activations"])
    draw, batches = torch.Generator().manual_seed(whole["seed"]), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top_positions, "GROUP", data.draw(st.sampled_from([1, 2, 16]), "group"))
        patch.setattr(top_positions, "AT_ONCE", data.draw(st.sampled_from([1, 40, 1 << 19]), "at once"))
        for n_rows, n_pos in data.draw(
            st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), min_size=1), "shapes"
        ):
            values = torch.randint(-whole["levels"], 9, (n_rows, n_pos, whole["features"]), generator=draw).float()
            if flags["infinite"]:
                values = torch.where(values.abs() == 4, values * torch.inf, values)
            ids = torch.randint(0, 99, (n_rows, n_pos), generator=draw)
            mask = torch.rand(n_rows, n_pos, generator=draw) > 0.3 * flags["padded"] - 1e-9
            batches.append((values, ids, mask))
            top.batch(ids, mask)
            shown(top, values)
            if data.draw(st.booleans(), "read"):
                top.examples()
        expected = ranked_by_hand(batches, top)
        found = as_lists(top.examples())
    assert found == [[(*place[:4], place[4] if top.activations else []) for place in places] for places in expected]


def half_seen(k: int = 20) -> tuple[TopExamples, Callable[[TopExamples], Examples]]:
    """One with candidates in its queue, and a function that shows it the rest of the data and reads it."""
    draw = torch.Generator().manual_seed(0)
    parts = [torch.randn(8, 4, 5, generator=draw) for _ in range(4)]

    def show(top: TopExamples, parts: list[Tensor]) -> TopExamples:
        for part in parts:
            top.batch(torch.arange(32).view(8, 4))
            shown(top, part)
        return top

    top = show(TopExamples("0", k=k, context=1, activations=True), parts[:2])
    assert top._states["0"].n_queued.any()
    return top, lambda top: show(top, parts[2:]).examples()


def assert_same(found: Examples, expected: Examples) -> None:
    for name, value in expected.tensors().items():
        assert_equal(found.tensors()[name], value)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda top: pickle.loads(pickle.dumps(top))])
def test_candidates_in_the_queue_go_with_a_copy(copied: Callable[[TopExamples], TopExamples]) -> None:
    top, rest = half_seen()
    again = copied(top)
    assert_same(again.examples(), top.examples())
    assert_same(rest(again), rest(top))


def test_what_was_seen_in_inference_mode_is_read_and_added_to_outside() -> None:
    with torch.inference_mode():
        top, rest = half_seen()
    assert_same(rest(top), rest(half_seen()[0]))


def test_examples_are_read_while_another_thread_runs() -> None:
    top, rest = half_seen(k=1)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(lambda: [rest(top) for _ in range(20)])
        while not running.done():
            found = top.examples()
            assert found.values.equal(found.activations[..., 1])  # type: ignore[index]
    again, rest = half_seen(k=1)
    assert_same(top.examples(), [rest(again) for _ in range(20)][-1])


def test_a_nan_changes_nothing() -> None:
    top, _ = half_seen()
    before = top.examples()
    values = torch.full((8, 4, 5), 9.0)
    values[7, 3, 4] = torch.nan
    top.batch(torch.arange(32).view(8, 4))
    with pytest.raises(ValueError, match="is NaN at some position"):
        shown(top, values)
    assert_same(top.examples(), before)
    mask = torch.ones(8, 4)
    mask[7, 3] = 0
    top.batch(torch.arange(32).view(8, 4), mask)
    assert shown(top, values).examples().values[:, 0].tolist() == [9.0] * 5  # NaN in padding is not looked at


def test_half_precision_is_measured_in_full() -> None:
    value, direction = torch.randn(4, 5, 64).bfloat16(), torch.randn(1, 64)
    for settings, exact in (
        ({"directions": direction}, value.double() @ direction.double().T),
        ({"measure": "norm"}, value.double().norm(dim=-1, keepdim=True)),
        ({}, value.double()),
    ):
        top = TopExamples("0", k=4, context=0, **settings)
        top.batch(torch.arange(20).view(4, 5))
        found = shown(top, value).examples()
        expected, texts, _ = sorted_by_hand(exact, torch.ones(4, 5).bool(), 4)
        assert found.values.dtype == torch.float32
        assert_close(found.values, expected, dtype=torch.float32)
        assert found.texts.equal(texts)


def test_of_equal_numbers_the_first_batch_stays() -> None:
    top = TopExamples("0", k=2, context=0)
    for i in range(3):
        top.batch(torch.tensor([[i]]))
        shown(top, torch.ones(1, 1, 4))
    assert top.examples().texts.tolist() == [[0, 1]] * 4


def test_few_places_and_padding() -> None:
    top = TopExamples("0", k=3, context=1, skip=1)
    top.batch(torch.tensor([[0, 5, 6, 7], [8, 9, 1, 0]]), torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]]))
    shown(top, torch.tensor([[9.0, 8, 1, 2], [7, 3, 9, 9]])[..., None])
    found = top.examples()
    assert found.values[0].tolist() == [3, 2, 1]
    assert found.texts[0].tolist() == [1, 0, 0]
    assert found.tokens[0].tolist() == [[8, 9, -1], [6, 7, -1], [5, 6, 7]]
    short = TopExamples("0", k=5, context=0)
    short.batch(torch.tensor([[4, 5]]))
    shown(short, torch.tensor([[[1.0], [2.0]]]))
    assert short.examples().texts.tolist() == [[0, 0, -1, -1, -1]]
    assert short.examples().values[0, 2:].isnan().all()
    table = short.examples().to_dataframe({4: "a", 5: "b"})
    assert table[["feature", "rank", "value", "text", "position", "token"]].to_numpy().tolist() == [
        [0, 0, 2.0, 0, 1, "b"], [0, 1, 1.0, 0, 0, "a"],
    ]  # fmt: skip


@pytest.mark.parametrize("activations", [False, True])
def test_memory_of_top_examples_is_what_is_declared(activations: bool) -> None:
    top = TopExamples("0", k=4, context=2, activations=activations)
    draw = torch.Generator().manual_seed(0)
    for n in (1, 50, 200):
        top.batch(torch.arange(n * 3).view(n, 3))
        shown(top, torch.randn(n, 3, 6, generator=draw))
        assert top.n_bytes == 6 * 4 * 2 * (4 + 8 + 4 + 5 * 4 + 5 * 4 * activations) + 6 * 4  # as many wait in the queue
        assert top.inputs.n_bytes == n * 3 * (8 + 1)
        assert held_bytes(top) == top.n_bytes + top.inputs.n_bytes
    assert len(top.inputs.ids) == 1


@pytest.mark.parametrize("cached", [True, False])
def test_top_examples_of_generation(demo: Any, cached: bool) -> None:
    top, site = TopExamples("resid_post", 1, k=4, context=1, activations=True), "blocks.1.hook_resid_post"
    prompt, mask = torch.tensor([[9, 6, 7], [3, 5, 4]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    with demo.hooks([top.inputs, top]):
        tokens = demo.generate(prompt, 4, attention_mask=mask, use_past_kv_cache=cached, **SPARE)[:, :-1]
    real = torch.ones_like(tokens).bool()
    real[0, 0] = False
    cache = demo.run_with_cache(tokens, attention_mask=real.long(), names_filter=site)[1]
    values, texts, positions = sorted_by_hand(cache[site], real, 4)
    found = top.examples()
    assert_close(found.values, values)
    assert found.texts.equal(texts)
    assert found.positions.equal(positions)
    assert found.tokens[..., 1].equal(tokens[texts, positions])
    assert found.activations is not None
    assert found.activations[..., 1].equal(found.values)
    in_prompt = (found.positions < 3) & (found.tokens[..., 0] >= 0)  # later each step reads one token
    assert found.activations[..., 0].isfinite().equal(in_prompt)


@pytest.mark.parametrize("activations", [False, True])
def test_files_of_examples(demo: Any, tmp_path: Path, activations: bool) -> None:
    top = TopExamples("z", 1, k=2, context=1, activations=activations, store=tmp_path / "store")
    demo.run_with_hooks("When Mary and John", fwd_hooks=[top.inputs, top])
    found = top.examples()
    assert found.values.shape == (8, 16, 2)
    found.save(tmp_path / "file")
    top.write()
    (batch,) = next(iter(Store(tmp_path / "store")))
    for again in (Examples.load(tmp_path / "file"), Examples(**batch.load())):
        assert len(again.tensors()) == 4 + activations
        for name, value in found.tensors().items():
            assert_equal(again.tensors()[name], value)
    assert repr(found) == "Examples(8 x 16, the 2 strongest)"
    snippet = found[3, 4].to_dataframe(demo.to_string).snippet[0]
    assert "[" in snippet
    assert len(found.to_dataframe()) == 8 * 16 * 2


def test_what_top_examples_need(demo: Any) -> None:
    with pytest.raises(ValueError, match=r"the token ids are not known: run from the tokens on, or call batch"):
        shown(TopExamples("0"), torch.ones(1, 2, 3))
    for site in ("pattern", "attn_scores"):
        top = TopExamples(site, 1)
        with pytest.raises(ValueError, match="has no vector at each position"):
            demo.run_with_hooks("When", fwd_hooks=[top.inputs, top])
    wide = TopExamples("resid_post", 1, directions=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"directions are \[2, 5\], and the vectors at .* have 128 entries"):
        demo.run_with_hooks("When", fwd_hooks=[wide.inputs, wide])
    narrow = TopExamples("resid_post", 1, measure=lambda value: value[:, 0])
    with pytest.raises(ValueError, match=r"measure must give \[batch, pos, \*features\] for .* got \[1, 128\]"):
        demo.run_with_hooks("When", fwd_hooks=[narrow.inputs, narrow])
    with pytest.raises(ValueError, match="its measure is a function"):
        narrow.to_dict()
    for settings, said in (({"k": 0}, "k must be at least 1"), ({"measure": "size"}, "measure must be")):
        with pytest.raises(ValueError, match=said):
            TopExamples("post", 1, **settings)
    top = TopExamples("0", k=1, context=0)
    top.batch(torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="'0' is NaN at some position of the texts from 0 on"):
        shown(top, torch.tensor([[[1.0], [float("nan")]]]))
    with pytest.raises(KeyError, match="several sites or none have values: give one"):
        TopExamples("post", 1).examples()
