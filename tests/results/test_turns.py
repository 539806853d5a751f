"""Results and caches of conversations: whose each position is, and means by turn, role and part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hooked_lm import analysis, patching
from hooked_lm.hooks.token_labels import PADDING, PARTS, ROLES, TokenLabel, common_label, reading, token_groups
from hooked_lm.models.text.chat import Chat
from hooked_lm.patching import SweepResult
from hooked_lm.results import Scores
from hooked_lm.results.turns import TURNS, stretches, turns_along
from tests.close import assert_apart, assert_close
from tests.models.text.chat_templates import turns
from tests.studies.test_conversations import RIGHT, WRONG, model

pytestmark = pytest.mark.filterwarnings("ignore::hooked_lm.engine.study.SwapWarning")

MESSAGES = turns("Say something", "Hello you", "What is b + 4?")
labels = st.builds(TokenLabel, st.integers(-1, 3), st.sampled_from(ROLES), st.sampled_from(PARTS))


def chat(last: str = "What is b + 4?") -> Chat:
    return model().chat([*MESSAGES[:2], {"role": "user", "content": last}], add_generation_prompt=True)


def swept(**options: Any) -> SweepResult:
    return patching.sweep(model(), chat("What is b + 7?"), chat(), answers=(RIGHT, WRONG), progress=False, **options)


@given(st.lists(labels | st.none(), max_size=12))
def test_stretches_give_back_the_labels(some: list[TokenLabel | None]):
    about = {TURNS: stretches(some)}
    assert turns_along(about, range(len(some))) == some
    assert turns_along(about, [f"{i}  a" for i in range(len(some))]) == some
    assert turns_along({}, range(len(some))) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(labels, min_size=1, max_size=12), st.sampled_from(["turn", "role", "part"]), st.integers(0, 2**16))
def test_means_by_anything_are_means_of_their_tokens(some: list[TokenLabel], by: str, seed: int):
    values = torch.randn(2, len(some), 3, generator=torch.Generator().manual_seed(seed))
    axes = {"layer": [0, 1], "position": list(range(len(some)))}
    found = Scores(values, axes, about={TURNS: stretches(some)}).mean_by(by)
    groups = token_groups(some, by)
    assert found.axes == {"layer": (0, 1), by: tuple(groups)}
    assert sorted(place for places in groups.values() for place in places) == [*range(len(some))]
    for name, places in groups.items():
        assert_close(found.select(**{by: name}).values, values[:, places].mean(1))
    assert TURNS not in found.about


def test_results_over_positions_know_the_turns(tmp_path: Path):
    clean, found = chat(), swept()
    assert turns_along(found.about, found.axes["position"]) == list(clean.labels[0])
    users = [found.axes["position"][i] for i in clean.positions("last_user")]
    means = found.mean_by("turn")
    assert means.axes["turn"] == ("template", "0 user", "1 assistant", "2 user")
    assert_close(means.select(turn="2 user").values, found.select(position=users).values.mean(1))
    assert_apart(means.select(turn="2 user").values, means.select(turn="template").values)
    assert torch.equal(means.corrupted, found.corrupted)
    found.save(tmp_path / "swept")
    assert torch.equal(SweepResult.load(tmp_path / "swept").mean_by("turn").values, means.values)
    part = swept(positions="last_user")
    assert_close(part.mean_by("role").select(role="user").values, means.select(turn="2 user").values)
    assert TURNS not in swept(by="head").about
    for other in (
        analysis.logit_lens(model(), chat()).scores,
        analysis.source_attribution(model(), chat(), RIGHT, WRONG),
        patching.ablate(model(), chat(), "positions", answers=(RIGHT, WRONG), progress=False),
    ):
        assert turns_along(other.about, other.axes["position"]) == list(clean.labels[0])
        assert "2 user" in other.mean_by("turn").axes["turn"]


def test_means_of_shares_are_no_shares():
    """The intervals of 0/1 values are not those of their means."""
    accuracy = analysis.metrics.accuracy(RIGHT)
    axes, about = {"position": [0, 1]}, {TURNS: [[0, 2, 0, "user", "content"]]}
    values = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    found = SweepResult(values, axes, torch.zeros(3), torch.ones(3), about=about)
    assert found.binary == [True]
    assert found.mean_by("turn").binary == [False]
    assert found.mean_by("turn").fingerprint == ""
    assert accuracy is not None


def test_rows_that_differ_have_no_turns_there():
    user, answer = TokenLabel(0, "user", "content"), TokenLabel(1, "assistant", "content")
    with reading([[user, user, answer], [user, answer, answer]]):
        scores = Scores(torch.zeros(3, 2), {"position": [0, 1, 2]})
    assert turns_along(scores.about, [0, 1, 2]) == [user, None, answer]
    with pytest.raises(ValueError, match="position 1 is not of the same turn in all prompts"):
        scores.mean_by("turn")
    assert scores.select(position=[0, 2]).mean_by("turn").axes == {"turn": ("0 user", "1 assistant")}


@pytest.mark.parametrize(
    ("axes", "by", "says"),
    [
        ({"layer": [0]}, "turn", r"need an axis 'position' of a conversation, which this result \(layer\) lacks"),
        ({"position": [0]}, "turn", r"which this result \(position\) has, of prompts without roles: give model.chat"),
    ],
)
def test_means_need_turns(axes: Any, by: str, says: str):
    with pytest.raises(ValueError, match=says):
        Scores(torch.zeros(1, 1), axes).mean_by(by)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="by must be one of 'turn', 'role', 'part', got 'turns'"):
        swept().mean_by("turns")


# ---- caches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["turn", "role", "part"])
def test_means_of_a_cache(by: str):
    _, cache = model().run_with_cache(chat())
    means, groups = cache.mean_by(by), token_groups(chat().labels[0], by)
    for name in ("blocks.1.hook_resid_post", "blocks.0.attn.hook_z", "blocks.1.attn.hook_q"):
        for i, places in enumerate(groups.values()):
            assert_close(means[name][:, i], cache[name][:, places].mean(1))
    pattern = means["pattern", 1]
    assert pattern.shape == (1, 2, len(groups), chat().shape[1])
    assert_close(pattern.sum(-1), torch.ones(pattern.shape[:-1]))
    assert "hook_tokens" not in means
    assert means.labels == [[common_label([chat().labels[0][i] for i in places]) for places in groups.values()]]
    alone = cache.apply_slice_to_batch_dim(0).mean_by(by)
    assert torch.equal(alone["resid_post", 1], means["resid_post", 1][0])


def test_means_of_rows_of_different_lengths():
    """Each row has its own tokens of a turn; padding is none of them."""
    longer = [MESSAGES[0], {**MESSAGES[1], "content": "Hello you, and more."}, MESSAGES[2]]
    both = model().chat([MESSAGES, longer], add_generation_prompt=True)
    assert PADDING in both.labels[0]
    _, cache = model().run_with_cache(both)
    means = cache.mean_by("turn")
    for row, messages in enumerate((MESSAGES, longer)):
        one = model().chat(messages, add_generation_prompt=True)
        _, alone = model().run_with_cache(one)
        assert_close(means["resid_post", 1][row], alone.mean_by("turn")["resid_post", 1][0])
    assert means.select(role="user")["resid_post", 1].shape[1] == 2
    _, cache = model().run_with_cache(model().chat([MESSAGES, MESSAGES[:1]], add_generation_prompt=True))
    with pytest.raises(
        ValueError, match="the rows have different turns: template, 0 user, 1 assistant, 2 user; and template, 0"
    ):
        cache.mean_by("turn")
    with pytest.raises(ValueError, match="means by turn: this cache is not of a conversation"):
        model().run_with_cache("Hi")[1].mean_by("turn")
