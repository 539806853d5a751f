"""Suppressed attention and receiver heads, against knockouts of the engine and plain loops over whole patterns."""

import pytest
import torch
from scipy import stats

from hooked_lm import HookedTransformer, patching
from hooked_lm.analysis.thoughts.receivers import attention_between, kurtosis, vertical_scores
from hooked_lm.analysis.thoughts.sentences import sentences_of
from hooked_lm.analysis.thoughts.suppression import suppress
from hooked_lm.hooks import UnknownSite
from tests.close import assert_apart, assert_close
from tests.families import DECODER_CASES
from tests.families._models import hooked
from tests.models.text.chat_templates import QWEN3

THOUGHT = "Mary left the store. Then John came.\nWho has a drink? Mary and John. So it is Mary. Yes."


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    model = HookedTransformer.from_pretrained("demo")
    model.tokenizer.chat_template = QWEN3
    return model


@pytest.fixture(scope="module")
def chat(model):
    said = {"role": "assistant", "reasoning_content": THOUGHT, "content": "It is Mary."}
    return model.chat([{"role": "user", "content": "Who left?"}, said])


def spans_of(chat) -> list[range]:
    said = chat.positions({"turn": 1, "part": "content"})
    return [*(range(one.start, one.stop) for one in sentences_of(chat)), range(said[0], said[-1] + 1)]


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_suppression_is_the_knockout_of_all_layers_and_heads(model, chat, batch_size):
    sentences, spans = sentences_of(chat), spans_of(chat)
    n = chat.shape[1]
    found = suppress(model, chat, sentences, spans, batch_size)
    base = model(chat).log_softmax(-1)

    def divergence(span):
        def measure(logits):
            parts = base.exp() * (base - logits.log_softmax(-1))
            return parts.sum(-1)[:, span.start : span.stop].mean(-1)

        return measure

    for i, sentence in enumerate(sentences):
        for j, span in enumerate(spans):
            before = range(max(span.start - 1, sentence.stop), span.stop - 1)
            if span.start < sentence.stop or not len(before):
                assert found[j, i].isnan()
                continue
            edge = {"to": (range(sentence.start, sentence.stop), range(sentence.stop, n))}
            edge = {name: ([*keys], [*queries]) for name, (keys, queries) in edge.items()}
            cut = patching.attention_knockout(model, chat, edge, metric=divergence(before), layers=None)
            assert_close(found[j, i], cut.values[0, 0], scale=1.0)
    assert_apart(found.nan_to_num(), torch.zeros_like(found))


def test_suppression_reaches_nothing_before_the_sentence(model, chat):
    sentences, spans = sentences_of(chat), spans_of(chat)
    found = suppress(model, chat, sentences, spans, 8)
    for i, one in enumerate(sentences):
        assert found[: i + 1, i].isnan().all()
        assert found[i + 1 :, i].isfinite().all() == all(
            len(span) > 1 or span.start > one.stop for span in spans[i + 1 :]
        )


def test_models_without_attention_are_refused(chat):
    model = hooked(next(case for case in DECODER_CASES if case.family == "mamba"))
    with pytest.raises(UnknownSite, match="no layer of this model has attention scores"):
        suppress(model, chat, sentences_of(chat), spans_of(chat), 8)


def test_attention_between_sentences_is_that_of_whole_patterns(model, chat):
    sentences = sentences_of(chat)
    found = attention_between(model, chat, sentences)
    _, cache = model.run_with_cache(chat)
    for layer in range(model.cfg.n_layers):
        for i, to in enumerate(sentences):
            for j, of in enumerate(sentences):
                part = cache["pattern", layer][0, :, to.start : to.stop, of.start : of.stop]
                assert_close(found[layer, :, i, j], part.mean((-1, -2)), scale=1.0)
    assert found.tril()[..., 1:, 0].gt(0).all()


@pytest.mark.parametrize("distance", [1, 2, 4])
def test_what_a_sentence_receives_is_the_mean_of_later_rows(distance):
    attention = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    found = vertical_scores(attention, distance)
    for sentence in range(6):
        later = attention[:, :, sentence + distance :, sentence]
        if not later.shape[-1]:
            assert found[..., sentence].isnan().all()
        else:
            assert_close(found[..., sentence], later.mean(-1))


def test_kurtosis_is_that_of_scipy():
    values = torch.rand(2, 3, 9, generator=torch.Generator().manual_seed(1))
    values[..., -2:] = torch.nan
    expected = stats.kurtosis(values[..., :-2].double().numpy(), axis=-1)
    assert_close(kurtosis(values), torch.from_numpy(expected).float())
    assert kurtosis(values[..., 4:]).isnan().all()  # of three sentences
