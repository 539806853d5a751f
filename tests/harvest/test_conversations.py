"""Harvests of conversations: what each stored token is, which tokens are kept, and what is read back by it."""

import json
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from hooked_lm import HookedEncoder, HookedTransformer
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.harvest import ActivationStore, estimate_harvest, harvest
from hooked_lm.hooks.token_labels import TokenLabel, select_positions
from hooked_lm.interventions import Scale
from hooked_lm.models.text.chat import Chat
from hooked_lm.shards.records import record_path
from tests.close import assert_apart, assert_close, assert_equal
from tests.models.test_mixers import BLOCKS, built
from tests.models.toys import BOTH_WAYS, KINDS, toy

SITE = "blocks.1.hook_resid_post"
TEMPLATE = (
    "Read this.\n{% for t in tools or [] %}Tool: {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}\n{% endfor %}"
)
THOUGHT = {"role": "assistant", "content": "John has it.", "reasoning_content": "Mary gave it away."}
CORPUS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Who has the ball?"}, THOUGHT],
    [{"role": "user", "content": "Mary went home."}],
    [
        {"role": "user", "content": "Tell me."},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Go on."}, THOUGHT],
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"place": "text"}}}]


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    found = HookedTransformer.from_pretrained("demo")
    found.tokenizer.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def store(model: HookedTransformer, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    return harvest(model, CORPUS, SITE, tmp_path_factory.mktemp("whole"), documents_per_shard=3, batch_size=2)


def chats(model: HookedTransformer) -> list[Chat]:
    return [model.chat(messages) for messages in CORPUS]


def values(model: HookedTransformer, chat: Chat) -> torch.Tensor:
    return model.run_with_cache(chat, names_filter=SITE)[1][SITE][0]


def test_labels_are_beside_the_tokens(model: HookedTransformer, store: ActivationStore) -> None:
    each = chats(model)
    assert store["labels"][:] == [label for chat in each for label in chat.labels[0]]
    assert store["tokens"][:].tolist() == [token for chat in each for token in chat.tokens[0].tolist()]
    assert_close(store[SITE][:], torch.cat([values(model, chat) for chat in each]))
    assert store["labels"][5] == each[0].labels[0][5] == store[5:6]["labels"][0]
    assert store["n_turns"][:].tolist() == [
        len(messages) for messages, chat in zip(CORPUS, each, strict=True) for _ in chat.labels[0]
    ]
    assert {label.part for label in store.labels} == {"content", "thinking", "marker"}
    [record] = [json.loads(record_path(store.path, 1).read_text())]
    assert [TokenLabel(*label) for label in record["labels"]] == sorted({*each[3].labels[0]})


LABELS = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "template", "tool"]),
        "part": st.sampled_from(["content", "thinking", "marker"]),
        "turn": st.integers(-5, 3) | st.lists(st.integers(-3, 2), min_size=1, max_size=2),
    },
).filter(bool)


@settings(deadline=None, max_examples=60)
@given(labels=LABELS)
def test_a_store_selects_what_a_cache_does(
    model: HookedTransformer, store: ActivationStore, labels: dict[str, Any]
) -> None:
    numbers: list[int] = []
    start = 0
    for chat in chats(model):
        with suppress(ValueError):
            numbers += [start + position for position in chat.positions(labels)]
        start += len(chat.labels[0])
    if not numbers:
        with pytest.raises(ValueError, match=r"selects no token: these conversations have 0 system, 0 user"):
            store.select(**labels)
        return
    found = store.select(**labels)
    assert len(found) == len(numbers)
    assert_equal(found[SITE][:], store[SITE][numbers])
    assert_equal(found["documents"][-1], store["documents"][numbers[-1]])
    assert found["labels"][:] == store["labels"][numbers]
    assert_close(found.mean(SITE).float(), store[SITE][numbers].mean(0))


def test_no_negative_turn_is_the_template() -> None:
    labels = [TokenLabel(-1, "template", "marker"), TokenLabel(0, "user", "content")]
    with pytest.raises(ValueError, match="selects no token"):
        select_positions(labels, {"turn": -2})


def test_a_selection_is_selected_from_and_streamed(store: ActivationStore) -> None:
    thoughts = store.select(role="assistant").select(part="thinking")
    assert repr(thoughts).startswith(f"ActivationStore('{store.path}'): {len(thoughts)} of {len(store)} tokens")
    assert_equal(thoughts[SITE][:], store.select(role="assistant", part="thinking")[SITE][:])
    stream, whole = thoughts.stream(SITE, buffer="100MB"), store.stream(SITE)
    read, _ = stream.fill(0)
    assert_equal(
        torch.stack(sorted(read, key=torch.Tensor.tolist)),
        torch.stack(sorted(thoughts[SITE][:], key=torch.Tensor.tolist)),
    )
    assert stream.about() != whole.about()
    with pytest.raises(IndexError, match="out of range"):
        thoughts[SITE][len(thoughts)]


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    "positions",
    ["assistant", "thinking", "last_user", ("user", -1), {"turn": -1, "part": "content"}, ("content", 2), -1, "text"],
)
def test_positions_by_meaning_are_kept(model: HookedTransformer, tmp_path: Path, positions: Any) -> None:
    found = harvest(model, CORPUS, SITE, tmp_path, positions=positions, batch_size=3)
    expected = []
    for chat in chats(model):
        try:
            places = [len(chat.labels[0]) - 1] if positions == -1 else chat.positions(positions)
        except (ValueError, IndexError):
            places = [*range(len(chat.labels[0]))] if positions == "text" else []
        if positions == ("content", 2):
            turns: dict[int, list[int]] = {}
            for place in chat.positions("content"):
                turns.setdefault(chat.labels[0][place].turn, []).append(place)
            places = [several[2] for several in turns.values() if len(several) > 2]
        expected.append(values(model, chat)[places])
    assert_close(found[SITE][:], torch.cat(expected))
    assert "thinking" not in str(positions) or {label.part for label in found["labels"][:]} == {"thinking"}


def test_a_mean_of_each_answer(model: HookedTransformer, tmp_path: Path) -> None:
    found = harvest(model, CORPUS, SITE, tmp_path, positions="assistant", reduce="mean")
    expected = [
        values(model, chat)[chat.positions("assistant")].mean(0)
        for chat in chats(model)
        if "assistant" in str(chat.roles)
    ]
    assert_close(found[SITE][:], torch.stack(expected))
    assert found["documents"][:].tolist() == [0, 2, 3]


@pytest.mark.parametrize("long", ["split", "truncate"])
def test_long_conversations_keep_their_labels(model: HookedTransformer, tmp_path: Path, long: str) -> None:
    whole = harvest(model, CORPUS, SITE, tmp_path, context=12, long=long)
    users = harvest(model, CORPUS, SITE, tmp_path, context=12, long=long, positions="last_user")
    for number, chat in enumerate(chats(model)):
        labels, ids = chat.labels[0], chat.tokens[0].tolist()
        n = 12 if long == "truncate" else len(ids)
        here = (whole["documents"][:] == number).nonzero()[:, 0]
        assert whole["tokens"][here].tolist() == ids[:n]
        assert whole["labels"][here] == list(labels[:n])
        kept = [place for place in chat.positions("last_user") if place < n]
        there = (users["documents"][:] == number).nonzero()[:, 0]
        assert users["tokens"][there].tolist() == [ids[place] for place in kept]
        assert users["positions"][there].tolist() == [place % 12 for place in kept]
    with pytest.raises(ValueError, match=r"document 0 has \d+ tokens, and the context 12"):
        harvest(model, CORPUS, SITE, tmp_path, context=12, long="error")


def test_files_data_sets_and_chats(
    model: HookedTransformer, store: ActivationStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": i, "messages": messages}) + "\n" for i, messages in enumerate(CORPUS)))
    table = datasets.Dataset.from_dict({"messages": CORPUS})
    assert table[1]["messages"][0].get("reasoning_content", 0) is None  # a field that the message does not have
    options = {"documents_per_shard": 3, "batch_size": 2}
    for source in (path, table, table.to_iterable_dataset(), model.chat(CORPUS)):
        found = harvest(model, source, SITE, tmp_path / "out", **options)
        assert found["labels"][:] == store["labels"][:]
        assert_equal(found[SITE][:], store[SITE][:])
    with_tools = datasets.Dataset.from_dict({"messages": CORPUS[:1], "tools": [TOOLS]})
    found = harvest(model, with_tools, SITE, tmp_path / "out")
    assert found["tokens"][:].tolist() == model.chat(CORPUS[0], tools=TOOLS).tokens[0].tolist()
    assert len(found) > store["documents"][:].tolist().count(0)
    given = harvest(model, CORPUS[:1], SITE, tmp_path / "out", template_options={"tools": TOOLS})
    assert_equal(given[SITE][:], found[SITE][:])
    assert given.path != harvest(model, CORPUS[:1], SITE, tmp_path / "out").path


def test_shards_resume_and_are_exported(model: HookedTransformer, store: ActivationStore, tmp_path: Path) -> None:
    options = {"documents_per_shard": 3, "batch_size": 2}
    for shard in ("1/2", "0/2"):
        parts = harvest(model, CORPUS, SITE, tmp_path, shard=shard, **options)
    for path in store.path.glob("shard-*"):
        assert path.read_bytes() == (parts.path / path.name).read_bytes()
    record_path(parts.path, 0).unlink()
    again = harvest(model, CORPUS, SITE, tmp_path, **options)
    assert again["labels"][:] == store["labels"][:]
    again.verify()
    rows = store.to_datasets(SITE)
    assert [TokenLabel(**label) for label in rows["labels"]] == store["labels"][:]
    users = store.select(role="user")
    assert set(map(str, users.to_datasets(SITE).unique("documents"))) == {"0", "1", "2", "3"}
    batch = next(iter(DataLoader(store.to_torch_dataset(), batch_size=len(store))))
    assert [*batch["labels"].role] == [label.role for label in store["labels"][:]]
    assert batch["labels"].turn.tolist() == [label.turn for label in store["labels"][:]]
    other = harvest(model, CORPUS, SITE, tmp_path, seed=1, documents_per_shard=1)
    place = (other["documents"][:] == 2).nonzero()[:, 0]
    assert other["labels"][place] == list(chats(model)[2].labels[0])


def test_sizes_are_exact(model: HookedTransformer, store: ActivationStore) -> None:
    found = estimate_harvest(model, CORPUS, SITE)
    assert found.tokens == len(store)
    assert found.bytes == len(store) * store.plan.bytes_per_vector == len(store) * (4 * 128 + 25)


@pytest.mark.parametrize(
    ("corpus", "options", "message"),
    [
        ([*CORPUS, [{"role": "user", "content": " "}]], {}, r"document 4: message 0 \(user\) is empty"),
        ([*CORPUS, [{"role": "user"}], "text"], {}, r"document 4: message 0 \(user\) is empty"),
        ([*CORPUS, [{"from": "human", "value": "Hi"}]], {}, "document 4: message 0 must be a dict with 'role'"),
        ([*CORPUS, "text"], {}, "document 4 is a text, and the first is a conversation"),
        (["text", *CORPUS], {}, "document 1 is a conversation, and the first is a text"),
        (["text"], {"positions": "assistant"}, "positions='assistant': document 0 is a text, which has no roles"),
        (
            ["text"],
            {"template_options": {"tools": []}},
            "template_options are of conversations, and document 0 is a text",
        ),
        (CORPUS, {"prepend_bos": True}, "prepend_bos is of texts"),
        (CORPUS, {"positions": "tool"}, "positions='tool' keep no token of the first 4 documents"),
        (CORPUS, {"positions": {"turn": "x"}}, "a turn is the index of a message"),
        (CORPUS, {"positions": "asistant"}, "or of conversations one of system, developer, user"),
        (CORPUS, {"template_options": {"tools": [print]}}, "template_options are kept in the plan, as JSON"),
        (CORPUS, {"chunk": 0}, "chunk must be at least 1"),
        (CORPUS, {"chunk": "some"}, "chunk must be a number of bytes or a size such as '512MB', got 'some'"),
        (CORPUS, {"chunk": "1KB"}, "chunk='1KB' is too small: a token takes about"),
    ],
)
def test_bad_conversations(
    model: HookedTransformer, tmp_path: Path, corpus: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        harvest(model, corpus, SITE, tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_a_conversation_that_cannot_be_told_is_named(model: HookedTransformer, tmp_path: Path) -> None:
    shouting = "{% for m in messages %}{{ m.content | upper if 'Why' in m.content else m.content }}\n{% endfor %}"
    with pytest.raises(ValueError, match=r"document 2: what is of turn 2 \(user\) cannot be told from character"):
        harvest(model, CORPUS, SITE, tmp_path, template_options={"chat_template": shouting})
    assert not list(tmp_path.iterdir())


def test_texts_have_no_labels(model: HookedTransformer, tmp_path: Path) -> None:
    found = harvest(model, ["Mary went home"], SITE, tmp_path)
    assert found.labels == []
    with pytest.raises(KeyError, match="no site 'labels'"):
        found["labels"]
    with pytest.raises(ValueError, match="is no harvest of conversations, so that its tokens have no roles"):
        found.select(role="user")
    with pytest.raises(TypeError, match="no argument 'rol'; did you mean 'role'"):
        found.select(rol="user")


@pytest.mark.every_parameter
@pytest.mark.parametrize("options", [{}, {"positions": ("user", -1)}, {"reduce": "max"}, {"positions": "text"}])
def test_chunks_are_exact(model: HookedTransformer, tmp_path: Path, options: dict[str, Any]) -> None:
    whole = harvest(model, CORPUS, [SITE, "z0", "hook_embed"], tmp_path, **options)
    ran: list[int] = []
    handles = [block.register_forward_hook(lambda *_, i=i: ran.append(i)) for i, block in enumerate(model.blocks)]
    try:
        chunked = harvest(model, CORPUS, [SITE, "z0", "hook_embed"], tmp_path, chunk=5, **options)
    finally:
        for handle in handles:
            handle.remove()
    assert set(ran) == {0, 1}  # no more layers than the sites need
    assert len(ran) > 4
    assert chunked.plan.rows["chunk"] == 5
    for site in whole.sites:
        assert_close(chunked[site][:], whole[site][:])
    for name in whole.plan.columns:
        assert whole[name][:] == chunked[name][:] if name == "labels" else torch.equal(whole[name][:], chunked[name][:])


def test_hooks_know_the_roles(model: HookedTransformer, tmp_path: Path) -> None:
    plain = harvest(model, CORPUS, SITE, tmp_path)
    answers = [CORPUS[0], CORPUS[2], CORPUS[3]]
    hook = Scale("resid_mid", 0, factor=3.0, positions="assistant")
    model.add_hook("blocks.0.hook_resid_mid", hook)
    try:
        found = [harvest(model, answers, SITE, tmp_path, batch_size=2, chunk=chunk) for chunk in (None, 4)]
    finally:
        model.reset_hooks()
    for each in found:
        before = plain[SITE][[i for i, n in enumerate(plain["documents"][:].tolist()) if n != 1]]
        first = [i for i, label in enumerate(each["labels"][:]) if label == TokenLabel(0, "user", "content")]
        assert_close(each[SITE][first], before[first])
        thoughts = [i for i, label in enumerate(each["labels"][:]) if label.part == "thinking"]
        assert_apart(each[SITE][thoughts], before[thoughts])
    assert_close(found[1][SITE][:], found[0][SITE][:])


def test_no_warning_of_what_is_usual(model: HookedTransformer, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        harvest(model, CORPUS, SITE, tmp_path, chunk=3)


ROWS = [[1, 5, 3, 8, 2, 9, 4, 6, 11, 7, 3], [2, 7, 4], [6, 1, 9, 8, 3, 5, 2]]


@pytest.mark.parametrize("kind", [*KINDS, *BLOCKS])
def test_chunks_are_exact_in_every_kind_of_layer(tmp_path: Path, kind: str) -> None:
    """Keys, values and states are those of the layers that run alone, and shorter rows have their padding in front."""
    built_model = toy(kind) if kind in KINDS else built(kind)
    sites = [f"blocks.{layer}.hook_resid_post" for layer in range(min(2, len(built_model.blocks)))]
    sizes = (None, 1, 4, 30, "auto", "200KB")
    whole, *chunked = [harvest(built_model, ROWS, sites, tmp_path, chunk=chunk) for chunk in sizes]
    for each in chunked:
        assert torch.equal(each["tokens"][:], whole["tokens"][:])
        for site in sites:
            assert_close(each[site][:], whole[site][:])


def test_chunks_of_embeddings_alone(tmp_path: Path) -> None:
    whole, chunked = [harvest(toy("standard"), ROWS, "hook_pos_embed", tmp_path, chunk=chunk) for chunk in (None, 4)]
    assert torch.equal(chunked["hook_pos_embed"][:], whole["hook_pos_embed"][:])
    whole, chunked = [harvest(toy("standard"), ROWS, "ln_final.hook_normalized", tmp_path, chunk=n) for n in (None, 4)]
    assert_close(chunked["ln_final.hook_normalized"][:], whole["ln_final.hook_normalized"][:])


def test_what_cannot_be_read_in_chunks_is_refused(tmp_path: Path) -> None:
    sizes = {
        "n_layers": 1,
        "d_model": 16,
        "n_heads": 2,
        "n_ctx": 16,
        "d_vocab": 12,
        "act_fn": "gelu",
        "d_mlp": 32,
        "seed": 0,
    }
    with pytest.raises(ValueError, match="chunk= reads documents piece by piece"):
        harvest(HookedEncoder(sizes), ROWS, "resid_post0", tmp_path, chunk=4)
    with pytest.raises(ValueError, match="without past_kv_cache, a prefix or chunks"):
        harvest(toy(BOTH_WAYS), ROWS, "resid_post0", tmp_path, chunk=4)
    assert not list(tmp_path.iterdir())


def test_a_cache_of_the_first_layers_goes_with_a_run_of_them() -> None:
    first, cache = toy("rotary"), KeyValueCache(2)
    tokens = torch.tensor(ROWS[:1])
    found = [first(tokens[:, part], past_kv_cache=cache, stop_at_layer=2) for part in (slice(4), slice(4, None))]
    assert_close(torch.cat(found, 1), first(tokens, stop_at_layer=2))
    for wrong in ({}, {"stop_at_layer": 1}, {"start_at_layer": 1}):
        with pytest.raises(ValueError, match="key/value cache is for 2 layers, but the model has 3"):
            first(tokens, past_kv_cache=cache, **wrong)
    with pytest.raises(ValueError, match="half-filled"):
        first(tokens, past_kv_cache=KeyValueCache(3), stop_at_layer=2)
