"""Weights written by hand."""

import pytest
import torch

from hooked_lm.planted import Blueprint
from tests.close import assert_equal


def draft() -> Blueprint:
    return Blueprint(["^", "a", "b", "c"], {"found": 4}, n_ctx=5, n_layers=2, n_heads=2, d_mlp=3)


def test_subspaces_do_not_overlap_and_hold_tokens_and_positions() -> None:
    found = draft()
    places = sorted(found.places.values(), key=lambda place: place.start)
    assert [place.stop for place in places[:-1]] == [place.start for place in places[1:]]
    assert places[-1].stop == found.model().cfg.d_model
    stream = found.model().run_with_cache(torch.tensor([[0, 3, 1]]))[1]["resid_pre", 0][0]
    assert stream[:, found.places["token"]].argmax(-1)[1:].tolist() == [3, 1]
    assert_equal(stream[:, found.places["position"]], torch.eye(3, 5))
    assert stream[:, found.places["start"]].flatten().tolist() == [1, 0, 0]
    assert not stream[0, found.places["token"]].any()


def test_a_head_finds_what_matches_and_rests_at_the_start_otherwise() -> None:
    found = draft()
    found.head((0, 1), query="token", key="token", value="token", output="found", relation=found.one_hots([("b", "a")]))
    _, cache = found.model().run_with_cache(torch.tensor([[0, 1, 3, 2, 3]]))
    assert cache["pattern", 0][0, 1].argmax(-1).tolist() == [0, 0, 0, 1, 0]
    written = cache["attn_out", 0][0, :, found.places["found"]]
    assert_equal(written[3], torch.eye(4)[1])
    assert not written[[0, 1, 2, 4]].any()


def test_bystanders_write_and_nothing_else_reads_them() -> None:
    found = draft()
    found.head((1, 0), query="position", key="position", value="token", output="found")
    found.logits({"found": torch.eye(4)})
    before = found.model()
    found.bystanders(seed=0)
    after, tokens = found.model(), torch.tensor([[0, 1, 3, 2]])
    assert_equal(after(tokens), before(tokens))
    one, other = (model.run_with_cache(tokens)[1]["resid_post", 1] for model in (before, after))
    scratch = found.places["scratch"]
    assert (one != other)[..., scratch].any()
    assert_equal(one[..., : scratch.start], other[..., : scratch.start])
    assert_equal(one[..., scratch.stop :], other[..., scratch.stop :])


def test_a_model_does_not_change_with_the_blueprint() -> None:
    found = draft()
    model = found.model()
    found.logits({"token": torch.eye(4)})
    assert not model.W_U.any()
    assert found.model().W_U.any()


def test_mistakes_are_named() -> None:
    found = draft()
    with pytest.raises(KeyError, match="there is no subspace 'fund'; there are 'one', 'start'"):
        found.size("fund")
    with pytest.raises(ValueError, match="layer 0 has 3 neurons, and 4 are written: make d_mlp larger"):
        found.neurons(0, {"token": torch.eye(4)}, {"found": torch.eye(4)})
    found.head((1, 1), query="token", key="token", value="token", output="found")
    with pytest.raises(ValueError, match="L1H1 is written already: choose another head"):
        found.head((1, 1), query="position", key="position", value="token", output="found")
    with pytest.raises(KeyError, match="there is no token 'z'; there are '\\^', 'a', 'b', 'c'"):
        found.token("z")
