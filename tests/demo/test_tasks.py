"""The tasks of the bundled model as pairs: it does them, and the corrupted prompt has the other answer."""

import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.demo import corpus
from hooked_lm.demo import tasks as demo_tasks
from hooked_lm.demo.tasks import pairs, tasks

HALFWAY = {"greater_than"}  # whose wrong answers are as right after the corrupted prompt


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.mark.parametrize("task", corpus.TASKS)
def test_the_model_does_it_and_the_answer_flips(task: str, model: HookedTransformer) -> None:
    found = pairs(task, 24, model=model)
    difference = found.metric(model)
    with torch.no_grad():
        clean, corrupted = difference(model(found.clean)), difference(model(found.corrupted))
    assert (clean > 0).float().mean() >= 0.95
    if task in HALFWAY:
        assert clean.mean() > 2 * corrupted.mean().abs()
    else:
        assert (corrupted < 0).float().mean() >= 0.95
    assert model.to_tokens(found.clean).shape == model.to_tokens(found.corrupted).shape
    both = list(zip(found.clean, found.corrupted, strict=True))
    assert len(set(both)) == len(both)
    assert all(one != other for one, other in both)


def test_an_untrained_model_does_none(model: HookedTransformer) -> None:
    for task in tasks(model.untrained(), ["capitals", "pronouns"], n=16):
        metric = task.pairs.metric(task.model)
        with torch.no_grad():
            assert (
                metric(task.model(task.pairs.clean)).mean() - metric(task.model(task.pairs.corrupted)).mean()
            ).abs() < 1


def test_halves_and_seeds(model: HookedTransformer) -> None:
    [task] = tasks(model, ["agreement"], n=9)
    assert (len(task.pairs), len(task.held_out or ())) == (4, 5)
    assert pairs("agreement", 9, model=model).clean == [*task.pairs.clean, *task.held_out.clean]
    assert pairs("agreement", 9, 1, model).clean != pairs("agreement", 9, 0, model).clean


@pytest.mark.parametrize("name", corpus.TASKS)
def test_no_clean_prompt_is_searched_and_held_out(name: str, model: HookedTransformer) -> None:
    [task] = tasks(model, [name], n=24)
    assert task.held_out is not None
    clean = [*task.pairs.clean, *task.held_out.clean]
    assert len({*clean}) == len(clean) >= 20
    assert len(task.held_out) - len(task.pairs) in (0, 1)


def test_fewer_pairs_where_a_task_has_no_more(model: HookedTransformer) -> None:
    [task] = tasks(model, ["days"], n=200)
    assert task.held_out is not None
    assert 20 <= len(task.pairs) + len(task.held_out) < 200


def test_what_is_refused(model: HookedTransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError, match="there is no task 'capital': there are indirect_object"):
        pairs("capital", 2, model=model)
    monkeypatch.setattr(demo_tasks, "MOST_IDLE", 1)
    with pytest.raises(ValueError, match="has fewer than n=200 different pairs of one length: "):
        pairs("landmarks", 200, model=model)
    with pytest.raises(ValueError, match="two at least; got n=1"):
        tasks(model, n=1)
