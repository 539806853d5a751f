"""A reply keeps what the model read and wrote: the next one reads only what is new, and nothing that is stale."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.interventions import AddDirection
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.models.prefix import Prefix
from hooked_lm.models.text.chat import Chat
from tests.close import assert_close
from tests.models.generation.test_rollouts import THOUGHT, writes
from tests.models.test_mixers import BLOCKS, NORM, built
from tests.models.text.chat_templates import TEMPLATES, byte_level, turns
from tests.models.toys import ids, padded, toy

GREEDY: dict[str, Any] = {"do_sample": False, "verbose": False, "stop_at_eos": False}
FIRST, SECOND = "Hi.<|im_end|>", "five<|im_end|>"
VECTOR = torch.arange(16.0).double()


def talking(template: str = "chatml") -> HookedTransformer:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATES[template]
    sizes: dict[str, Any] = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "d_mlp": 32, "n_ctx": 256}
    cfg = HookedTransformerConfig(**sizes, d_vocab=len(tokenizer), act_fn="gelu", seed=1, dtype=torch.float64)
    return HookedTransformer(cfg, tokenizer=tokenizer).requires_grad_(False)


def answer(
    model: HookedTransformer, chat: Chat, text: str, hooks: Any = (), prefix: Prefix | None = None
) -> tuple[Chat, list[int]]:
    """The reply, where the model writes this text, and the number of tokens of each pass."""
    n, read = model.to_tokens(text, prepend_bos=False).shape[1], []

    def note(value: Tensor, hook: Any) -> None:
        read.append(value.shape[1])

    with model.hooks([("blocks.0.hook_resid_pre", note), ("unembed.hook_out", writes(text, model))]):
        return chat.reply(model, n, hooks, prefix, **GREEDY), read


def next_question(model: HookedTransformer, hooks: Any = (), text: str = FIRST) -> tuple[Chat, Chat]:
    """A first answer, and the conversation with the next question."""
    first, _ = answer(model, model.chat(turns("Hello user", system="Be kind.")), text, hooks)
    messages = [*first.messages[0], {"role": "user", "content": "What is 2 + 3?"}]
    return first, model.chat(messages, add_generation_prompt=True)


def assert_same(one: Chat, other: Chat) -> None:
    """The same answer, and the same keys and values of it."""
    assert one.messages == other.messages
    for ours, theirs in zip(one.prefix.keys_values.entries, other.prefix.keys_values.entries, strict=True):
        assert_close(ours.past_keys, theirs.past_keys)
        assert_close(ours.past_values, theirs.past_values)
    assert torch.equal(one.prefix.tokens, other.prefix.tokens)


# ---- the next reply --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "text"), [("chatml", FIRST), ("qwen3", THOUGHT + FIRST)])
def test_the_next_reply_reads_what_is_new(template: str, text: str) -> None:
    model = talking(template)
    first, asked = next_question(model, text=text)
    assert first.prefix.prompt.texts[0].endswith(text.removesuffix("<|im_end|>"))
    n = first.prefix.prompt.n_common(asked)
    assert (n == first.prefix.n_pos) == (template == "chatml")  # the other template drops former thoughts
    again, read = answer(model, asked, SECOND, prefix=first.prefix)
    alone, whole = answer(model, asked, SECOND)
    assert (read[0], whole[0]) == (asked.shape[1] - n, asked.shape[1])
    assert read[1:] == whole[1:]
    assert_same(again, alone)
    before = [entry.past_keys.clone() for entry in first.prefix.keys_values.entries]
    twice, _ = answer(
        model, asked, SECOND, prefix=again.prefix
    )  # of the same question: all but its last token is known
    assert_same(twice, alone)
    assert all(map(torch.equal, before, (entry.past_keys for entry in first.prefix.keys_values.entries)))


@pytest.mark.parametrize("positions", [None, "all", "assistant", "user", "content", 3, slice(2, None)], ids=str)
def test_under_the_same_hooks(positions: Any) -> None:
    model, hook = talking(), AddDirection("resid_post", 0, vector=VECTOR, positions=positions)
    first, asked = next_question(model, hook)
    again, read = answer(model, asked, SECOND, hook, first.prefix)
    alone, whole = answer(model, asked, SECOND, hook)
    assert read[0] < whole[0]
    assert_same(again, alone)
    with pytest.raises(ValueError, match="which is not active: reply under the same hooks, or without prefix"):
        answer(model, asked, SECOND, prefix=first.prefix)
    plain, _ = next_question(model)
    if positions != slice(2, None):
        with pytest.raises(ValueError, match="and this hook changes others"):
            answer(model, asked, SECOND, hook, plain.prefix)


@pytest.mark.parametrize("positions", ["generated", "prompt", "last_prompt", -1, "last_user", ("user", -1)], ids=str)
def test_what_hooks_did_where_a_prompt_ended_is_not_kept(positions: Any) -> None:
    model, hook = talking(), AddDirection("resid_post", 0, vector=VECTOR, positions=positions)
    first, _ = next_question(model, hook)
    assert first.prefix is None


def test_layers_with_states_read_again_what_is_not_all_of_the_prefix() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATES["chatml"]
    tree = DecoderConfig(
        256, Embed.Config(len(tokenizer), 12), BLOCKS["hybrid"], Unembed.Config(12, len(tokenizer)), ln_final=NORM
    )
    cfg = HookedTransformerConfig.from_tree(tree, device="cpu", seed=1, initializer_range=0.5)
    model = HookedTransformer(cfg, tokenizer=tokenizer).double().requires_grad_(False)
    first, asked = next_question(model)
    other = model.chat(turns("Hello there"), add_generation_prompt=True)
    for chat, n in ((asked, first.prefix.n_pos), (other, 0)):
        again, read = answer(model, chat, SECOND, prefix=first.prefix)
        alone, whole = answer(model, chat, SECOND)
        assert (read[0], whole[0]) == (chat.shape[1] - n, chat.shape[1])
        assert again.messages == alone.messages
        for layer, state in alone.prefix.keys_values.states.items():
            found = again.prefix.keys_values.states[layer].state
            assert_close(found.float(), state.state.float())  # mixers compute in fp32


def test_several_conversations_keep_nothing() -> None:
    model = talking()
    both = model.chat([turns("Hello user"), turns("What is 2 + 3?", "five", "And 3 + 2?")])
    reply = both.reply(model, 2, **GREEDY)
    assert len(reply) == 2
    assert reply.prefix is None
    first, _ = next_question(model)
    with pytest.raises(ValueError, match="a prefix is of one conversation, got 1 rows for 2 conversations"):
        both.reply(model, 2, prefix=first.prefix, **GREEDY)


def test_changed_weights_and_other_models_are_noticed() -> None:
    model = talking()
    first, asked = next_question(model)
    with pytest.raises(ValueError, match="computed by another model"):
        asked.reply(talking(), 2, prefix=first.prefix, **GREEDY)
    model.blocks[0].mlp.W_in *= 2
    with pytest.raises(ValueError, match="changed after this prefix was computed"):
        asked.reply(model, 2, prefix=first.prefix, **GREEDY)
    asked.reply(model, 2, **GREEDY)


def test_options_and_files(tmp_path: Any) -> None:
    model = talking()
    first, _ = next_question(model)
    first.save(tmp_path / "chat")
    assert Chat.load(tmp_path / "chat").prefix is None
    with pytest.raises(TypeError, match="prefix must be a Prefix, such as that of the last reply, got a Chat"):
        first.reply(model, 2, prefix=first)
    with pytest.raises(TypeError, match="reply has no argument 'temprature'; did you mean 'temperature'"):
        first.reply(model, 2, temprature=2)


# ---- the beginning of a prefix ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 9])
def test_the_first_tokens_of_a_prefix(n: int) -> None:
    model, tokens = toy("rotary"), ids(1, 10)
    longer, new = model.prefix(tokens), ids(3, 5, seed=2)
    cut = longer.first(n)
    assert_close(model(cut + new), model(model.prefix(tokens[:, :n]) + new))
    assert torch.equal(cut.tokens, tokens[:, :n])
    for ours, theirs in zip(cut.keys_values.entries, longer.keys_values.entries, strict=True):
        assert ours.past_keys.untyped_storage().data_ptr() == theirs.past_keys.untyped_storage().data_ptr()
    assert longer.first(10) is longer
    with pytest.raises(ValueError, match="the next token after the beginning of a prefix is unknown"):
        model.generate(cut, 2, verbose=False)


def test_beginnings_that_are_refused() -> None:
    model, tokens = toy("rotary"), ids(1, 10)
    for n in (0, 11, -1):
        with pytest.raises(ValueError, match="n is 1 to 10"):
            model.prefix(tokens).first(n)
    several, mask = padded([ids(1, 4)[0], ids(1, 3)[0]], "left")
    with pytest.raises(ValueError, match="one row of text"):
        model.prefix(several, attention_mask=mask).first(2)
    with pytest.raises(ValueError, match="has a state, which is that after all 6 tokens"):
        built("hybrid").prefix(ids(1, 6) % 20).first(3)
    talks = talking()
    grown = talks.prefix(talks.prefix(talks.chat(turns("Hello user"), add_generation_prompt=True)) + "five")
    with pytest.raises(ValueError, match="this prefix of a conversation has grown"):
        grown.first(3)
