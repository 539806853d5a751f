"""The step and the positions that hooks read during generation: `hook.step` and `hook.positions`."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm.hooks import HookPoint
from tests.close import assert_close
from tests.models.toys import ids, padded, toy, words

QUIET: dict[str, Any] = {"verbose": False, "stop_at_eos": False, "do_sample": False}
SITE = "blocks.1.hook_resid_post"


class Places:
    """A hook that notes step, positions, and how many positions the value has."""

    def __init__(self) -> None:
        self.seen: list[tuple[int | None, Any, int]] = []

    def __call__(self, value: Tensor, hook: HookPoint) -> None:
        positions = hook.positions
        self.seen.append((hook.step, None if positions is None else positions.tolist(), value.shape[1]))


def places(model: Any, site: str, *args: Any, **options: Any) -> list[tuple[int | None, Any, int]]:
    found = Places()
    with model.hooks([(site, found)]):
        model.generate(*args, **QUIET, **options)
    return found.seen


def test_with_the_cache_each_position_is_shown_once() -> None:
    seen = places(toy("rotary"), SITE, ids(2, 4), 3)
    assert seen == [(0, [0, 1, 2, 3], 4), (1, [4], 1), (2, [5], 1)]


def test_without_the_cache_everything_is_shown_again() -> None:
    seen = places(toy("rotary"), SITE, ids(2, 4), 3, use_past_kv_cache=False)
    assert seen == [(0, [0, 1, 2, 3], 4), (1, [0, 1, 2, 3, 4], 5), (2, [0, 1, 2, 3, 4, 5], 6)]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side: str) -> None:
    tokens, mask = padded([ids(1, n, seed=n)[0] for n in (4, 2)], side)
    seen = places(toy("standard"), SITE, tokens, 2, attention_mask=mask)
    assert seen == [(0, [[0, 1, 2, 3], [-1, -1, 0, 1]], 4), (1, [[4], [2]], 1)]


def test_positions_are_those_of_the_position_embedding() -> None:
    model = toy("standard")
    tokens, mask = padded([ids(1, n, seed=n)[0] for n in (5, 3)], "left")
    checked = []

    def check(value: Tensor, hook: HookPoint) -> None:
        positions = hook.positions
        assert positions is not None
        positions = positions.expand(value.shape[:2])
        expected = model.pos_embed.W_pos[positions.clamp(min=0)]
        assert_close(value[positions >= 0], expected[positions >= 0])
        checked.append(hook.step)

    for cached in (True, False):
        with model.hooks([("hook_pos_embed", check)]):
            model.generate(tokens, 3, attention_mask=mask, use_past_kv_cache=cached, **QUIET)
    assert checked == [0, 1, 2] * 2


def test_embeddings_and_texts_and_the_last_pass_of_a_cache() -> None:
    model = toy("standard", words())
    assert places(model, SITE, model.embed(ids(1, 3)), 2) == [(0, [0, 1, 2], 3), (1, [3], 1)]
    assert [step for step, _, _ in places(model, SITE, "w5 w9 w7", 2)] == [0, 1]
    assert [step for step, _, _ in places(model, SITE, ids(1, 3), 2, return_cache=True)] == [0, 1, 2]


def test_steering_one_position_is_the_same_with_the_cache_and_without() -> None:
    """The case that goes wrong by counting along the value: the vector then comes again at every cached step."""
    model, tokens, vector = toy("rotary"), ids(2, 5), torch.linspace(-40, 40, 32)

    def steer(value: Tensor, hook: HookPoint) -> Tensor:
        assert hook.positions is not None
        return value + vector * (hook.positions == 3)[..., None]

    def steer_the_last(value: Tensor, hook: HookPoint) -> Tensor:
        return torch.cat([value[:, :-1], value[:, -1:] + vector], 1)

    def steered(hook: Any, cached: bool) -> list[list[int]]:
        with model.hooks([(SITE, hook)]):
            out: list[list[int]] = model.generate(tokens, 8, use_past_kv_cache=cached, **QUIET).tolist()
        return out

    def by_hand() -> list[list[int]]:
        row = tokens
        for _ in range(8):
            with model.hooks(
                [(SITE, lambda value, hook: value.index_add(1, torch.tensor(3), vector.expand(2, 1, 32)))]
            ):
                row = torch.cat([row, model(row)[:, -1:].argmax(-1)], 1)
        return row.tolist()

    assert steered(steer, True) == steered(steer, False) == by_hand()
    assert steered(steer, True) != model.generate(tokens, 8, **QUIET).tolist()
    assert steered(steer_the_last, True) != steered(steer_the_last, False)


def test_outside_of_generation_nothing_is_said() -> None:
    model, found = toy("standard"), Places()
    with model.hooks([(SITE, found)]):
        model(ids(1, 3))
    assert found.seen == [(None, None, 3)]
    assert (model.hook_dict[SITE].step, model.hook_dict[SITE].positions) == (None, None)
    point = HookPoint("head", "d_model")  # no axis of positions
    positions = []
    with model.hooks([(SITE, lambda value, hook: positions.append(point.positions))]):
        model.generate(ids(1, 3), 1, **QUIET)
    assert positions == [None]


def test_a_failing_hook_and_an_unfinished_stream_leave_nothing() -> None:
    model = toy("standard")
    point = model.hook_dict[SITE]

    def fails(value: Tensor, hook: HookPoint) -> None:
        raise RuntimeError(f"at step {hook.step}")

    with pytest.raises(RuntimeError, match="at step 0"), model.hooks([(SITE, fails)]):
        model.generate(ids(1, 3), 2, **QUIET)
    assert point.step is None
    stream = model.generate_stream(ids(1, 3), 5, 1, verbose=False, stop_at_eos=False)
    next(stream)
    assert point.step is None, "between two pieces nothing is read"
    assert point.positions is None


def test_two_threads_know_their_own_places() -> None:
    model, results = toy("rotary"), {}
    barrier = threading.Barrier(2)

    def generate(n: int) -> None:
        found = Places()

        def wait(value: Tensor, hook: HookPoint) -> None:
            barrier.wait(10)  # both are inside a pass, every time

        with model.hooks([(SITE, wait), (SITE, found)]):
            model.generate(ids(1, n), 3, **QUIET)
        results[n] = found.seen

    threads = [threading.Thread(target=generate, args=(n,)) for n in (3, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[3] == [(0, [0, 1, 2], 3), (1, [3], 1), (2, [4], 1)]
    assert results[5] == [(0, [0, 1, 2, 3, 4], 5), (1, [5], 1), (2, [6], 1)]
