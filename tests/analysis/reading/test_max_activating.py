"""The strongest positions of a data set are those that a sort of everything gives, whatever form the data have."""

from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.analysis.reading.max_activating import MaxActivating, max_activating_examples
from hooked_lm.demo.experiment import prompt_pairs
from hooked_lm.interventions.dictionaries import TopK
from tests.close import assert_close

TEXTS = [
    "The capital of France is Paris",
    "When Mary and John went to the store",
    "The",
    *(p.clean for p in prompt_pairs(9)),
]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture(scope="module")
def tokens(model: HookedTransformer) -> Tensor:
    return torch.randint(model.cfg.d_vocab, (30, 11), generator=torch.Generator().manual_seed(0))


DIRECTION = torch.randn(128, generator=torch.Generator().manual_seed(5))
WHAT: dict[str, tuple[dict[str, Any], Any]] = {
    "neuron": ({"site": ("post", 2), "neuron": 7}, lambda cache: cache["post", 2][..., 7]),
    "direction": (
        {"site": "blocks.1.hook_resid_post", "direction": DIRECTION},
        lambda cache: cache["resid_post", 1] @ DIRECTION,
    ),
    "heads": ({"site": ("z", 3), "heads": -2}, lambda cache: cache["z", 3][:, :, -2].norm(dim=-1)),
    "head direction": (
        {"site": ("v", 0), "heads": 1, "direction": DIRECTION[:16]},
        lambda cache: cache["v", 0][:, :, 1] @ DIRECTION[:16],
    ),
    "norm": ({"site": "hook_embed"}, lambda cache: cache["hook_embed"].norm(dim=-1)),
}


@pytest.mark.parametrize("largest", [True, False])
def test_each_text_has_one_example_if_that_is_asked_for(model: HookedTransformer, tokens: Tensor, largest: bool):
    options, measured = WHAT["neuron"]
    found = max_activating_examples(
        model, tokens, k=25, largest=largest, skip=2, one_per_text=True, batch_size=7, context=3, **options
    )
    with torch.no_grad():
        values = measured(model.run_with_cache(tokens)[1])[:, 2:]
    of_texts = values.amax(1) if largest else values.amin(1)
    assert_close(found.values, of_texts.sort(descending=largest).values[:25])
    assert len(set(found.texts.tolist())) == 25
    assert found.activations.isfinite().sum() == (found.tokens >= 0).sum(), "the context has its activations"
    few = max_activating_examples(model, tokens[:3], k=25, one_per_text=True, **options)
    assert len(few) == 3


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("what", WHAT)
def test_they_are_those_of_a_sort(model: HookedTransformer, tokens: Tensor, what: str, largest: bool):
    options, measured = WHAT[what]
    found = max_activating_examples(model, tokens, k=25, largest=largest, context=3, batch_size=7, **options)
    with torch.no_grad():
        values = measured(model.run_with_cache(tokens)[1])
    best = values.flatten().sort(descending=largest, stable=True)
    assert_close(found.values, best.values[:25])
    assert_close(values[found.texts, found.positions], found.values)
    assert len({*zip(found.texts.tolist(), found.positions.tolist(), strict=True)}) == 25
    for i, (row, pos) in enumerate(zip(found.texts.tolist(), found.positions.tolist(), strict=True)):
        for place in range(7):
            at = pos + place - 3
            if 0 <= at < 11:
                assert found.tokens[i, place] == tokens[row, at]
                assert_close(found.activations[i, place], float(values[row, at]), scale=values)
            else:
                assert found.tokens[i, place] == -1
                assert found.activations[i, place].isnan()


@pytest.mark.parametrize("largest", [True, False])
def test_positions_where_a_feature_is_silent_are_left_out(model: HookedTransformer, tokens: Tensor, largest: bool):
    sae = TopK.Config(128, 64, k=2, hook_point="blocks.1.hook_resid_post").build(0)
    _, cache = model.run_with_cache(tokens, names_filter="blocks.1.hook_resid_post")
    with torch.no_grad():
        acts = sae.encode(cache["resid_post", 1])
    feature = int((acts > 0).flatten(0, 1).sum(0).argmax())
    found = max_activating_examples(model, tokens, sae=sae, feature=feature, k=5, largest=largest, context=2)
    values = acts[..., feature][acts[..., feature] > 0]
    assert len(values) < acts[..., 0].numel()
    assert_close(found.values, values.sort(descending=largest).values[:5])
    assert found.activations[found.tokens >= 0].isfinite().all()
    for i, (row, pos) in enumerate(zip(found.texts.tolist(), found.positions.tolist(), strict=True)):
        if pos:
            assert_close(found.activations[i, 1], acts[row, pos - 1, feature], scale=values)


def test_equal_numbers_come_in_the_order_of_the_data(model: HookedTransformer, tokens: Tensor):
    twice = torch.cat([tokens[:4], tokens[:4]])
    found = max_activating_examples(model, twice, site="hook_embed", neuron=5, k=6, batch_size=3)  # not computed
    pairs = [*zip(found.texts.tolist(), found.positions.tolist(), strict=True)]
    assert all(second == (first[0] + 4, first[1]) for first, second in zip(pairs[::2], pairs[1::2], strict=True))


def test_a_planted_direction_is_found(model: HookedTransformer, tokens: Tensor):
    planted = tokens.clone()
    planted[11, 6], planted[3, 2] = 42, 42
    planted[planted == 42] = 41
    planted[11, 6] = planted[3, 2] = 42
    direction = model.W_E[42].detach() / model.W_E[42].norm() ** 2
    others = model.W_E.detach() @ direction
    assert others.argmax() == 42
    found = max_activating_examples(model, planted, site="hook_embed", direction=direction, k=2)
    assert sorted(found.to_dataframe()[["text", "position"]].values.tolist()) == [[3, 2], [11, 6]]


def test_texts_of_any_length_and_iterators_are_read_alike(model: HookedTransformer):
    options: dict[str, Any] = {"site": ("post", 1), "neuron": 3, "k": 30, "context": 4}
    whole = max_activating_examples(model, TEXTS, batch_size=5, **options)

    def pieces() -> Iterator[Any]:
        yield TEXTS[:2]
        yield TEXTS[2]  # a text alone
        yield model.to_tokens(TEXTS[3])
        yield from ([text] for text in TEXTS[4:])

    for found in (
        max_activating_examples(model, pieces(), **options),
        max_activating_examples(model, tuple(TEXTS), **options),
    ):
        assert_close(found.values, whole.values)
        assert torch.equal(found.tokens, whole.tokens)
    rows = [model.to_tokens(text)[0] for text in TEXTS]
    assert whole.about["positions"] == sum(map(len, rows))  # no padding among them
    assert all(pos < len(rows[row]) for row, pos in zip(whole.texts.tolist(), whole.positions.tolist(), strict=True))
    alone = [model.run_with_cache(text)[1]["post", 1][0, :, 3] for text in TEXTS]
    assert_close(whole.values, torch.cat(alone).detach().sort(descending=True).values[:30])
    short = (whole.texts == 2).nonzero().flatten()
    assert bool((whole.tokens[short] >= 0).sum(1).le(2).all())  # a short text has no padding around it


def test_the_start_of_texts_can_be_left_out(model: HookedTransformer):
    with_bos = max_activating_examples(model, TEXTS, site=("resid_post", 0), k=5)
    without = max_activating_examples(model, TEXTS, site=("resid_post", 0), k=5, skip=1)
    assert 0 not in without.positions
    assert without.about["positions"] == with_bos.about["positions"] - len(TEXTS)
    assert bool((without.tokens == model.tokenizer.bos_token_id).any())  # it is shown all the same


def test_memory_is_that_of_a_batch(model: HookedTransformer, tokens: Tensor):
    seen = []

    def batches() -> Iterator[Tensor]:
        for batch in tokens.split(5):
            seen.append(len(batch))
            yield batch

    found = max_activating_examples(model, batches(), site="hook_embed", k=1, context=1)
    assert (len(seen), len(found)) == (6, 1)


def test_tables_pages_files(model: HookedTransformer, tmp_path: Path):
    found = max_activating_examples(model, TEXTS[:2], site=("z", 1), heads="L1H2", k=4, context=2, skip=1)
    table = found.to_dataframe()
    snippets = dict(zip(zip(table["text"], table["position"], strict=True), table["snippet"], strict=True))
    words = model.to_str_tokens(TEXTS[0])
    row, pos = table["text"].tolist()[0], table["position"].tolist()[0]
    words = model.to_str_tokens(TEXTS[row])
    around = "".join(words[max(0, pos - 2) : pos]), words[pos], "".join(words[pos + 1 : pos + 3])
    assert snippets[row, pos] == f"{around[0]}[{around[1]}]{around[2]}"
    page = found.view().body
    assert (page.count("<tr>"), page.count(" framed")) == (4, 4)
    assert found.view().body in unescape(found._repr_html_())
    assert found.plot().data[0].z.shape == (4, 5)
    found.save(tmp_path / "found.safetensors")
    again = MaxActivating.load(tmp_path / "found.safetensors")
    assert again.to_dataframe().equals(table)
    assert (again.about, repr(again)) == (found.about, repr(found))


def test_pages_escape_what_tokens_say():
    from hooked_lm.viz.token_views import snippets, token_grid

    assert "<script>" not in snippets([("<script>", ["<script>"], [1.0], 0)], "<script>").body
    with pytest.raises(ValueError, match="2 tokens for 1 values"):
        snippets([("first", ["a", "b"], [1.0], 0)])
    with pytest.raises(ValueError, match="do not fit"):
        token_grid(torch.zeros(1, 2), [["a"]])


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"site": ("post", 2), "neuron": 10**5}, IndexError, "neuron 100000 is out of range"),
        ({"site": ("z", 2), "heads": 8}, IndexError, "head 8 is out of range"),
        ({"site": ("z", 2)}, ValueError, "say which one, heads="),
        ({"site": ("post", 2), "heads": 0}, ValueError, "it has no heads"),
        ({"site": ("post", 2), "direction": torch.zeros(3)}, ValueError, r"direction is \[3\]"),
        ({"site": ("post", 2), "direction": torch.zeros(3), "neuron": 1}, ValueError, "not both"),
        ({"site": ("pattern", 2)}, ValueError, "has no vector at each position"),
        ({"site": "blocks.*.hook_resid_post"}, ValueError, "means 4 sites"),
        ({"site": ("poost", 2)}, KeyError, "poost"),
        ({"k": 0}, ValueError, "k must be at least 1"),
        ({"skip": 50}, ValueError, "no position to look at"),
        ({"prompts": []}, ValueError, "no position to look at"),
        ({"prompts": iter(())}, ValueError, "no position to look at"),
        ({"prompts": torch.zeros(0, 4, dtype=torch.long)}, ValueError, "no position to look at"),
        ({"prompts": torch.full((1, 4), 10**6)}, ValueError, "out of range"),
        ({"prompts": [torch.zeros(2, 3)]}, ValueError, "a batch is token ids"),
    ],
)
def test_what_is_wrong_is_said(model: HookedTransformer, options: dict[str, Any], error: type, said: str):
    with pytest.raises(error, match=said):
        max_activating_examples(model, **{"prompts": TEXTS[:2], "site": "hook_embed", **options})


def test_nan_is_named(model: HookedTransformer):
    def spoil(value: Tensor, hook: Any) -> Tensor:
        return value * float("nan")

    with model.hooks([("blocks.0.hook_mlp_out", spoil)]), pytest.raises(ValueError, match="hook_resid_post' is NaN"):
        max_activating_examples(model, TEXTS[:1], site=("resid_post", 0))
