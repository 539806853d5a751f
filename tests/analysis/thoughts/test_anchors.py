"""Thought anchors on the bundled reasoning model, whose sentences are known to matter or not, and their files and errors."""

import random
import re

import pytest
import torch
from torch import Tensor

import hooked_lm
from hooked_lm import HookedTransformer
from hooked_lm.analysis import ThoughtAnchors, thought_anchors
from hooked_lm.analysis.thoughts.sentences import sentences_of
from hooked_lm.analysis.thoughts.suppression import suppress
from hooked_lm.demo import steps
from hooked_lm.results.difference import difference
from tests.benchmarks.thoughts import auc
from tests.close import assert_equal

N = 40
ASKED = steps.Addition(347, (285, 136))


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo-steps")


@pytest.fixture(scope="module")
def found(model) -> ThoughtAnchors:
    return thought_anchors(model, model.chat(steps.solution([347, 136], ASKED).messages), n=N)


def test_what_matters_by_rollouts_is_what_was_planted(found):
    """The choice and the columns decide the answer, and remarks do not."""
    for sentence, known in zip(found.sentences, steps.solution([347, 136], ASKED).sentences, strict=True):
        assert sentence.text == known.text
    counterfactual = found.importance()
    for known, measured, n_different in zip(
        steps.solution([347, 136], ASKED).sentences, counterfactual, found.n_different, strict=True
    ):
        if known.kind == "remark":
            assert measured.low < 0 < measured.high
            assert abs(measured.mean) < 0.2
            assert n_different > 0.6 * N  # one of six remarks
        elif n_different:
            assert measured.low > 0
            assert measured.mean > 0.5
    assert 0.25 * N < found.n_different[0] < 0.75 * N  # one of two numbers
    assert all(found.n_different[i] < 0.3 * N for i in (2, 4, 6))  # one sum of ten is wrong


def test_a_choice_that_the_question_makes_does_not_matter(model):
    """Nothing else can be written there, so no rollout differs and nothing is measured."""
    found = thought_anchors(model, model.chat(steps.solution([347, 136]).messages), n=10)
    assert found.n_different[0] == 0
    assert torch.tensor(found.importance()[0]).isnan().all()
    assert "nan" not in repr(found)


def test_importance_is_the_difference_of_means(found):
    answer = steps.solution([347, 136], ASKED).answer
    assert found.answer == answer
    assert_equal(found.values, torch.tensor([[float(text == answer) for text in row] for row in found.answers]))
    for i in range(len(found.sentences)):
        kept, before = found.values[i + 1], found.values[i]
        assert found.importance("resampling")[i] == difference(kept, before)
        differs = torch.tensor([text != found.sentences[i].text for text in _firsts(found, i)])
        assert_equal(found.differs[i], differs)
        assert str(found.importance(level=0.9)[i]) == str(difference(kept, before[differs], 0.9))  # NaN is not NaN


def _firsts(found: ThoughtAnchors, i: int) -> list[str]:
    """The first sentences of the same rollouts, drawn again."""
    model = HookedTransformer.from_pretrained("demo-steps")
    chat = model.chat(steps.solution([347, 136], ASKED).messages)
    generator = torch.Generator().manual_seed(0)
    for sentence in found.sentences[: i + 1]:
        most = min(256 - sentence.start, 2 * (chat.shape[1] - sentence.start))
        drawn = model.rollouts(chat[0, : sentence.start], N, most, seed=generator)
    return [re.split(r"(?<=\.) ", text)[0] for text in drawn.of("thinking")]


def test_a_metric_of_ones_own_and_other_sentences(model):
    chat = model.chat(steps.solution([347, 136], ASKED).messages)

    def pairs(text: str) -> list[str]:
        return [piece for piece in re.split(r"(?= (?:Ones|Tens|Hundreds):)", text) if piece]

    found = thought_anchors(
        model,
        chat,
        n=6,
        metric=lambda text: len(text) / 3,
        split=pairs,
        is_different=lambda old, new: False,
        batch_size=4,
    )
    assert [one.text.split(".")[1] for one in found.sentences] == [" Good"] * 4
    assert not found.differs.any()
    assert {round(3 * value) for value in found.values.flatten().tolist()} <= {
        len(text) for row in found.answers for text in row
    }


def test_suppression_finds_what_the_answer_is_put_together_from(model):
    """The columns, and not the choice, which is farther away: the order alone an untrained model has, too, but not the sizes."""
    twin = model.untrained(seed=0)
    scores: dict[str, list[Tensor]] = {"trained": [], "untrained": []}
    truth, rng = [], random.Random(3)
    for _ in range(4):
        addition = steps.random_addition(rng, held_out=True, has_choice=True)
        solution = steps.random_solution(addition, rng, error_rate=0.0)
        chat = model.chat(solution.messages)
        sentences = sentences_of(chat)
        said = chat.positions({"turn": 1, "part": "content"})
        later = [*(range(one.start, one.stop) for one in sentences), range(said[0], said[-1] + 1)]
        kinds = [one.kind for one in solution.sentences]
        of_answer = torch.tensor([kind != "remark" for kind in kinds])
        truth.append(solution.depends[-1][of_answer])
        for name, each in (("trained", model), ("untrained", twin)):
            scores[name].append(suppress(each, chat, sentences, later, 8)[-1][of_answer])
    trained, untrained = (torch.cat(scores[name]) for name in ("trained", "untrained"))
    assert auc((trained.tolist(), torch.cat(truth).tolist())) > 0.95
    assert trained[torch.cat(truth)].median() > 20 * untrained.median()
    assert (
        trained[~torch.cat(truth)].max() < 0.1 * untrained.min()
    )  # nothing at all, where there is noise without training


def test_results_are_kept_and_shown(found, tmp_path):
    found.save(tmp_path / "anchors")
    again = hooked_lm.load(tmp_path / "anchors")
    for name in ("values", "differs", "suppression", "received"):
        assert_equal(getattr(again, name), getattr(found, name))
    assert (again.sentences, again.tokens, again.answers, again.about) == (
        found.sentences,
        found.tokens,
        found.answers,
        found.about,
    )
    assert repr(again) == repr(found)
    table = found.to_dataframe()
    assert list(table["sentence"]) == [one.text for one in found.sentences]
    assert table["kept"].iloc[-1] == found.values[-1].mean().item()
    assert found.counts().sum().tolist() == [N] * (len(found.sentences) + 1)
    assert found.effects().select(later="answer", sentence=2).mean == found.suppression[-1, 2]
    assert len(found.plot().data[0].x) == len(found.sentences)
    assert "counterfactual" in found.view()._repr_html_()
    assert found.receiver_heads(3) == found.receiver_heads()[:3]
    assert "sentence" in found._repr_html_()


def test_what_cannot_be_measured_is_refused(model):
    messages = steps.solution([347, 136], ASKED).messages
    chat = model.chat(messages)
    with pytest.raises(ValueError, match="has a thought and no answer after it"):
        thought_anchors(model, chat[0, : sentences_of(chat)[-1].stop])
    with pytest.raises(ValueError, match="at least 2, got 1"):
        thought_anchors(model, chat, n=1)
    with pytest.raises(ValueError, match="one conversation, got 2"):
        thought_anchors(model, model.chat([messages, messages]))
    with pytest.raises(ValueError, match="selects no token"):
        thought_anchors(model, model.chat(messages[:1]))
    with pytest.raises(TypeError, match=r"temprature.*did you mean.*temperature"):
        thought_anchors(model, chat, n=2, temprature=0.5)
    with pytest.raises(ValueError, match="kind must be 'counterfactual' or 'resampling', got 'both'"):
        thought_anchors(model, chat, n=2).importance("both")
