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
from hooked_lm.interventions import ZeroAblate
from hooked_lm.results.difference import difference
from tests.benchmarks.thoughts import auc
from tests.close import assert_apart, assert_equal
from tests.models.text.chat_templates import QWEN3

N = 40
ASKED = steps.Addition(347, (285, 136))


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo-steps")


@pytest.fixture(scope="module")
def found(model) -> ThoughtAnchors:
    return thought_anchors(model, model.chat(steps.solution([347, 136], ASKED).messages), n=N)


@pytest.mark.slow
def test_what_matters_by_rollouts_is_what_was_planted(found):
    """The choice and the columns decide the answer, and remarks do not."""
    solution, n_columns = steps.solution([347, 136], ASKED), 0
    assert [one.text for one in found.sentences] == [one.text for one in solution.sentences]
    for known, measured, n_different in zip(solution.sentences, found.importance(), found.n_different, strict=True):
        if known.kind == "remark":
            assert measured.low < 0 < measured.high
            assert abs(measured.mean) < 0.2
            assert n_different > 0.6 * N  # one of six remarks
        elif n_different:
            assert measured.low > 0
            assert measured.mean > 0.5
            n_columns += known.kind == "column"
    assert n_columns >= 2
    assert 0.25 * N < found.n_different[0] < 0.75 * N  # one of two numbers
    assert all(found.n_different[i] < 0.3 * N for i in (2, 4, 6))  # one sum of ten is wrong
    assert "'0 I take 136.'" in repr(found) or ", write" in repr(found)


@pytest.mark.slow
def test_a_choice_that_the_question_makes_does_not_matter(model):
    """Nothing else can be written there, so no rollout differs and nothing is measured."""
    found = thought_anchors(model, model.chat(steps.solution([347, 136]).messages), n=10)
    assert found.n_different[0] == 0
    assert torch.tensor(found.importance()[0]).isnan().all()
    assert "nan" not in repr(found)


@pytest.mark.slow
def test_importance_is_the_difference_of_means(model, found):
    """With the first sentences of the same rollouts, drawn again."""
    chat, generator = model.chat(steps.solution([347, 136], ASKED).messages), torch.Generator().manual_seed(0)
    assert found.answer == steps.solution([347, 136], ASKED).answer
    assert_equal(found.values, torch.tensor([[float(text == found.answer) for text in row] for row in found.answers]))
    for i, sentence in enumerate(found.sentences):
        most = min(256 - sentence.start, 2 * (chat.shape[1] - sentence.start) + 100)
        drawn = model.rollouts(chat[0, : sentence.start], N, most, seed=generator)
        firsts = [re.split(r"(?<=\.) ", text)[0] for text in drawn.of("thinking")]
        differs = torch.tensor([text != sentence.text for text in firsts])
        kept, before = found.values[i + 1], found.values[i]
        assert drawn.of("content") == found.answers[i]
        assert found.firsts[i] == tuple(firsts)
        assert_equal(found.differs[i], differs)
        assert found.importance("resampling")[i] == difference(kept, before)
        assert str(found.importance(level=0.9)[i]) == str(difference(kept, before[differs], 0.9))  # NaN is not NaN


@pytest.mark.slow
def test_a_metric_of_ones_own_and_other_sentences(model):
    chat = model.chat(steps.solution([347, 136], ASKED).messages)

    def pairs(text: str) -> list[str]:
        return [piece for piece in re.split(r"(?= (?:Ones|Tens|Hundreds):)", text) if piece]

    own = {"metric": lambda text: len(text) / 4, "split": pairs, "is_different": lambda old, new: False, "seed": 3}
    found = thought_anchors(model, chat, n=6, batch_size=4, **own)
    assert [one.text.split(".")[1] for one in found.sentences] == [" Good"] * 4
    assert not found.differs.any()
    assert_equal(found.values, torch.tensor([[len(text) / 4 for text in row] for row in found.answers]))
    assert (found.about["seed"], found.about["split"].split(".")[-1]) == (3, "pairs")
    assert thought_anchors(model, chat, n=6, **own).answers == found.answers
    assert thought_anchors(model, chat, n=6, **{**own, "seed": 4}).answers != found.answers


@pytest.mark.slow
def test_rollouts_that_did_not_end_have_no_value(model):
    """Nor does a first sentence that was cut differ: what is planted stays what it is."""
    chat = model.chat(steps.solution([347, 136], ASKED).messages)
    with pytest.warns(
        UserWarning, match=r"of the rollouts did not come to the end of their answer.*more max_new_tokens"
    ):
        found = thought_anchors(model, chat, n=20, max_new_tokens=30)
    assert found.n_unfinished[:3] == [20, 20, 20]
    assert found.n_unfinished[-1] == 0
    assert found.n_different[:3] == [0, 0, 0]
    for i, measured in enumerate(found.importance()):
        if i % 2:
            assert torch.tensor(measured.mean).isnan() or measured.low < 0 < measured.high
    assert found.counts()["before 0"].to_dict()["(unfinished)"] == 20


@pytest.mark.slow
def test_no_rollouts_leave_the_other_two_measures(model, found):
    chat = model.chat(steps.solution([347, 136], ASKED).messages)
    fast = thought_anchors(model, chat, n=0, distance=2)
    assert_equal(fast.suppression, found.suppression)
    assert fast.vertical_attention[..., 4].isfinite().any()
    assert found.vertical_attention[..., 4].isnan().all()  # a distance of four
    assert torch.tensor([one.mean for one in fast.importance()]).isnan().all()
    assert repr(fast) == "ThoughtAnchors(8 sentences, 0 rollouts each)"
    assert len(fast.to_dataframe()) == 8


def test_only_the_answer_after_the_thought_counts(model):
    """Not content before it, nor another turn; hooks that act at roles act in all that runs."""
    [asked, said] = steps.solution([347, 136], ASKED).messages
    whole = thought_anchors(model, model.chat([asked, said]), n=0)
    before = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    content = f"Next. <think>\n{said['reasoning_content']}\n</think>\n\n{said['content']}"
    chat = model.chat([asked, {**said, "reasoning_content": None, "content": content}], chat_template=before)
    assert "Next." in chat.of({"turn": 1, "part": "content"})
    found = thought_anchors(model, chat, n=0)
    assert found.answer == "483"
    assert found.suppression[-1, 2] > 1
    again = model.chat([asked, said, {"role": "assistant", "content": "Done."}])
    assert thought_anchors(model, again, n=0).answer == "483"
    with model.hooks([ZeroAblate("z", 1, positions="thinking")]):
        hooked = thought_anchors(model, model.chat([asked, said]), n=0)
    assert_apart(hooked.suppression.nan_to_num(), whole.suppression.nan_to_num())


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


@pytest.mark.slow
def test_results_are_kept_and_shown(found, tmp_path):
    found.save(tmp_path / "anchors")
    again = hooked_lm.load(tmp_path / "anchors")
    for name in ("values", "differs", "suppression", "vertical_attention"):
        assert_equal(getattr(again, name), getattr(found, name))
    for name in ("sentences", "tokens", "answer", "answers", "firsts", "about"):
        assert getattr(again, name) == getattr(found, name)
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


@pytest.mark.slow
def test_what_cannot_be_measured_is_refused(model, found):
    messages = steps.solution([347, 136], ASKED).messages
    chat = model.chat(messages)
    with pytest.raises(ValueError, match="has a thought and no answer after it"):
        thought_anchors(model, chat[0, : sentences_of(chat)[-1].stop])
    with pytest.raises(ValueError, match="at least 2, or 0 for none, got 1"):
        thought_anchors(model, chat, n=1)
    with pytest.raises(ValueError, match="one conversation, got 2"):
        thought_anchors(model, model.chat([messages, messages]))
    with pytest.raises(ValueError, match="selects no token"):
        thought_anchors(model, model.chat(messages[:1]))
    with pytest.raises(TypeError, match=r"temprature.*did you mean.*temperature"):
        thought_anchors(model, chat, n=2, temprature=0.5)
    with pytest.raises(ValueError, match="kind must be 'counterfactual' or 'resampling', got 'both'"):
        found.importance("both")
    with pytest.raises(ValueError, match="invalid literal for int"):  # before any rollout
        thought_anchors(model, chat, n=10**6, metric=lambda text: int(text))
    call = {"function": {"name": "add", "arguments": {}}}
    asked, said = messages
    with pytest.raises(ValueError, match="turn 1 ends with a call of a tool"):
        thought_anchors(model, model.chat([asked, {**said, "tool_calls": [call]}], chat_template=QWEN3), n=0)


@pytest.mark.slow
def test_an_answer_that_no_rollout_gives_word_for_word_is_warned_of(model):
    [asked, said] = steps.solution([347, 136], ASKED).messages
    chat = model.chat([asked, {**said, "content": "The answer is 483."}])
    with pytest.warns(UserWarning, match="gives the answer of the conversation word for word.*give metric="):
        thought_anchors(model, chat, n=2)
