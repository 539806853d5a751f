"""Conversations as the data of max-activating examples, feature reports and lenses: which tokens count, and whose they are."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.analysis import MaxActivating, feature_report, features_table, max_activating_examples, train_tuned_lens
from hooked_lm.analysis.reading.corpus import Corpus
from hooked_lm.analysis.reading.feature_report import FeatureReport
from hooked_lm.harvest import harvest
from hooked_lm.interventions import dictionaries
from hooked_lm.models.text.chat import Chat
from tests.close import assert_close, assert_equal

TEMPLATE = "Read this.\n{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CORPUS = [
    [
        {"role": "user", "content": "Where is John?"},
        {"role": "assistant", "content": "John went to the store with Mary."},
    ],
    [{"role": "user", "content": "Mary was ill."}],
    [{"role": "user", "content": "Paris?"}, {"role": "assistant", "content": "The capital of France is Paris."}],
]
SITE = "blocks.1.hook_resid_post"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    found = HookedTransformer.from_pretrained("demo")
    found.tokenizer.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def chat(model: HookedTransformer) -> Chat:
    return model.chat(CORPUS)


def by_hand(model: HookedTransformer, positions: Any) -> list[tuple[float, int, int]]:
    """The value, the row and the position of each token that is chosen, largest first."""
    found = []
    for row, messages in enumerate(CORPUS):
        one = model.chat(messages)
        values = model.run_with_cache(one, names_filter=SITE)[1][SITE][0, :, 7]
        chosen = [i for i, label in enumerate(one.labels[0]) if positions in (None, label.role)]
        found += [(float(values[i]), row, i) for i in chosen]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("positions", [None, "assistant", "user"])
@pytest.mark.parametrize("batch_size", [2, 8])
def test_examples_of_a_role(model: HookedTransformer, chat: Chat, positions: Any, batch_size: int) -> None:
    found = max_activating_examples(
        model, chat, site=SITE, neuron=7, k=6, context=2, positions=positions, batch_size=batch_size
    )
    expected = by_hand(model, positions)
    assert found.about["positions"] == len(expected)
    assert_close(found.values, torch.tensor([value for value, _, _ in expected[:6]]))
    places = [*zip(found.texts.tolist(), found.positions.tolist(), strict=True)]
    values = {(row, position): value for value, row, position in expected}
    assert_close(found.values, torch.tensor([values[place] for place in places]))
    assert len({*places}) == 6
    for label, row, position in zip(found.labels, found.texts.tolist(), found.positions.tolist(), strict=True):
        assert label == model.chat(CORPUS[row]).labels[0][position]
    assert found.activations.isfinite().sum() > 6  # the context has those of all tokens


def test_examples_show_roles(model: HookedTransformer, chat: Chat, tmp_path: Path) -> None:
    found = max_activating_examples(model, chat, site=SITE, neuron=7, k=4, positions="assistant", one_per_text=True)
    assert sorted(found.texts.tolist()) == [0, 2]  # the other conversation has no answer
    table = found.to_dataframe()
    assert table[["turn", "role", "part"]].values.tolist() == [[1, "assistant", "content"]] * 2
    assert found.snippets()[0][0].endswith(" 1 assistant")
    found.save(tmp_path / "examples")
    assert MaxActivating.load(tmp_path / "examples").labels == found.labels
    texts = max_activating_examples(model, ["Mary went home"], site=SITE, neuron=7, k=1)
    assert texts.labels == ()
    assert "role" not in texts.to_dataframe()


def test_batches_of_conversations(model: HookedTransformer, chat: Chat) -> None:
    whole = max_activating_examples(model, chat, site=SITE, neuron=7, k=5)
    parts = max_activating_examples(model, [model.chat(messages) for messages in CORPUS], site=SITE, neuron=7, k=5)
    assert_close(parts.values, whole.values)
    assert (parts.labels, parts.positions.tolist()) == (whole.labels, whole.positions.tolist())


@pytest.mark.parametrize(
    ("prompts", "positions", "message"),
    [
        (["Mary"], "assistant", "positions='assistant': the texts have no roles"),
        (None, "tool", "no position to look at: 3 texts, positions 'tool'"),
        (None, "all", "positions are by what tokens are, such as 'assistant', got 'all'"),
        (None, {"turn": "x"}, "a turn is the index of a message"),
    ],
)
def test_positions_that_select_nothing(
    model: HookedTransformer, chat: Chat, prompts: Any, positions: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        max_activating_examples(model, prompts or chat, site=SITE, neuron=7, positions=positions)


def test_features_of_answers(model: HookedTransformer, chat: Chat, tmp_path: Path) -> None:
    sae = dictionaries.load("demo").to(model.device)
    table = features_table(model, sae, chat, ablate=1, positions="assistant")
    n = sum(label.role == "assistant" for row in chat.labels for label in row)
    assert table.about["positions"] == n
    feature = int(table.to_dataframe()["density"].idxmax())
    report = feature_report(model, sae, feature, chat, positions="assistant")
    assert report.n_positions == n
    assert_close(report.density, float(table.columns["density"][feature]))
    assert {label.role for label in report.examples.labels} == {"assistant"}
    whole = feature_report(model, sae, feature, chat)
    assert whole.n_positions > n
    report.save(tmp_path / "report")
    assert FeatureReport.load(tmp_path / "report").examples.labels == report.examples.labels
    assert "1 assistant" in report.plot().to_html()


def test_a_lens_of_conversations(model: HookedTransformer, chat: Chat) -> None:
    several = model.chat([messages for messages in CORPUS for _ in range(2)])
    found = train_tuned_lens(model, several, steps=2, layers=[1], batch_size=2)
    ids = [model.chat(messages).tokens[0] for messages in CORPUS for _ in range(2)]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    assert found.about["prompts"] + found.about["held_out"] == len(padded)
    alike = model.chat([CORPUS[0]] * 3)
    of_chats = train_tuned_lens(model, alike, steps=2, layers=[1])
    of_ids = train_tuned_lens(model, alike.tokens, steps=2, layers=[1])
    assert_equal(of_chats.A, of_ids.A)


def test_a_harvest_is_a_corpus(model: HookedTransformer, chat: Chat, tmp_path: Path) -> None:
    store = harvest(model, CORPUS, SITE, tmp_path, documents_per_shard=2)
    options: dict[str, Any] = {"site": ("resid_post", 1), "neuron": 7, "k": 9, "context": 2, "batch_size": 2}
    ran: list[int] = []
    handle = model.blocks[0].register_forward_hook(lambda *_: ran.append(1))
    stored = max_activating_examples(model, store, skip=2, **options)
    answers = max_activating_examples(model, store.select(role="assistant"), **options)
    handle.remove()
    assert not ran  # nothing is computed again
    for found, expected in (
        (stored, max_activating_examples(model, chat, skip=2, **options)),
        (answers, max_activating_examples(model, chat, positions="assistant", **options)),
    ):
        assert_close(found.values, expected.values)
        assert (found.labels, found.texts.tolist()) == (expected.labels, expected.texts.tolist())
        assert found.positions.tolist() == expected.positions.tolist()
    assert torch.equal(stored.tokens, max_activating_examples(model, chat, skip=2, **options).tokens)
    alone = harvest(model, CORPUS, SITE, tmp_path, positions=("user", -1), seed=4)
    of_ends = max_activating_examples(model, alone, **options)
    assert_close(of_ends.values, max_activating_examples(model, chat, positions=("user", -1), **options).values)
    for data, wrong, message in (
        (store, {"positions": "user"}, "selected by the store: store.select"),
        (store, {"site": "z1", "neuron": None, "heads": 0}, "no site 'blocks.1.attn.hook_z'"),
        (harvest(model, CORPUS, SITE, tmp_path, reduce="mean"), {}, "one vector of each row"),
    ):
        with pytest.raises((ValueError, KeyError), match=message):
            max_activating_examples(model, data, **{**options, **wrong})
    with pytest.raises(ValueError, match="here the model is run: give texts or conversations"):
        next(iter(Corpus(model, store, 2)))
