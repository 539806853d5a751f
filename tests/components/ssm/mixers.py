"""What the tests of all state-space mixers share: small mixers with random weights, and the tests of each of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from hooked_lm.components.context import Context
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.hooks import HookedRootModule
from tests.close import GRADIENT, assert_apart, assert_close, assert_near


class Rooted(HookedRootModule):
    """A mixer whose points have names."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.setup()

    def forward(self, stream: Tensor, context: Context | None = None) -> Tensor:
        return self.mixer(stream, context)


def filled(mixer: nn.Module, seed: int = 0) -> Rooted:
    """The mixer with every weight random, biases too; in float64, as decays near 1 leave little of `1 - decay` in float32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in mixer.named_parameters():
            if "W_" in name:
                weight.normal_(std=0.5, generator=generator)
            else:
                weight.add_(0.4 * torch.randn(weight.shape, generator=generator))
    return Rooted(mixer.double())


def some(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def in_steps(model: Rooted, stream: Tensor, lengths: list[int]) -> tuple[Tensor, KeyValueCache]:
    """The output of consecutive pieces of these lengths, run with a cache, and the cache."""
    cache, outputs = KeyValueCache(1), []
    for piece in stream.split(lengths, 1):
        context = Context(piece.shape[1], stream.device, cache=cache)
        with cache.appending(None):
            outputs.append(model(piece, context))
    return torch.cat(outputs, 1), cache


class MixerTests:
    """The tests of every mixer, for a fixture `model`; `naive` is the mixer written as a plain loop."""

    naive: Callable[..., Tensor]
    state_pos = 5  # a position whose state changes the output at position 11

    def test_cached_is_full(self, model: Rooted) -> None:
        """Pieces of any lengths, also single tokens, have the output and the cached state of one run over all tokens."""
        stream = some(2, 90, 6)
        whole, memory = in_steps(model, stream, [90])
        assert_close(whole, model(stream))
        for lengths in ([1] * 90, [70, 1, 1, 18], [2, 3, 85]):
            found, cache = in_steps(model, stream, lengths)
            assert_close(found, whole)
            assert cache.length == 90
            assert_close(cache.state(0).window, memory.state(0).window)
            assert_close(cache.state(0).state, memory.state(0).state)

    def test_padding_does_not_change_real_tokens(self, model: Rooted) -> None:
        """Padding may be anywhere, also between real tokens, and does not change the cached state either."""
        real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 1, 1, 0, 1]]).bool()
        stream, more = some(3, 8, 6), some(3, 3, 6, seed=2)
        cache = KeyValueCache(1)
        first = model(stream, Context(8, stream.device, real, cache))
        both = torch.cat([real, torch.tensor([[1, 1, 1], [0, 1, 1], [1, 0, 1]]).bool()], 1)
        second = model(more, Context(3, stream.device, both, cache))
        together = torch.cat([first, second], 1)
        for row in range(3):
            alone = torch.cat([stream, more], 1)[row, both[row]]
            assert_close(together[row, both[row]], model(alone[None])[0])

    def test_states_can_be_edited(self, model: Rooted) -> None:
        """An edited state changes later positions and none before, like a run that starts from that state."""
        stream = some(2, 20, 6)

        def move(state: Tensor, hook: Any) -> Tensor:  # not only by a factor, which a norm would undo
            state[:, 9] = state[:, 9] * 0.5 + 0.2
            return state

        clean, edited = model(stream), model.run_with_hooks(stream, fwd_hooks=[("mixer.hook_state", move)])
        _, cache = in_steps(model, stream[:, :10], [10])
        entry = cache.state(0)
        entry.state = entry.state * 0.5 + 0.2
        after = model(stream[:, 10:], Context(10, stream.device, cache=cache))
        assert_close(edited[:, :9], clean[:, :9])
        assert_close(edited[:, 10:], after)
        assert ((edited - clean)[:, 9:11].abs().amax((0, 2)) > 1e-3).all()

    def test_all_states_can_be_set(self, model: Rooted) -> None:
        """The output depends on the edited states: with all states set to zero it is another."""
        stream, other = some(2, 20, 6), some(2, 20, 6, seed=5)
        _, theirs = model.run_with_cache(other, names_filter=["mixer.hook_state"])
        states = []
        hooks = [
            ("mixer.hook_state", lambda state, hook: theirs["mixer.hook_state"]),
            ("mixer.hook_state", lambda state, hook: states.append(state)),
        ]
        model.run_with_hooks(stream, fwd_hooks=hooks)
        assert torch.equal(states[0], theirs["mixer.hook_state"])
        zeros = model.run_with_hooks(stream, fwd_hooks=[("mixer.hook_state", lambda state, hook: state * 0)])
        again = model.run_with_hooks(stream, fwd_hooks=[("mixer.hook_state", lambda state, hook: state * 0)])
        assert torch.equal(zeros, again)
        assert_apart(zeros, model(stream))

    @pytest.mark.parametrize(
        "edit",
        [
            lambda state, hook: state * 0.5,
            lambda state, hook: state + 0.3,
            lambda state, hook: state.clamp(max=0.1),
            lambda state, hook: torch.full_like(state, 0.2),
        ],
        ids=["halved", "raised", "capped", "set"],
    )
    @torch.no_grad()
    def test_edits_add_up_as_token_by_token(self, model: Rooted, edit: Callable[..., Tensor]) -> None:
        """An edit of all states acts on what earlier edits left, in one run, in pieces and in single tokens with a cache."""
        stream, site = some(2, 12, 6), "mixer.hook_state"
        clean, kept = model.run_with_cache(stream, names_filter=[site])
        seen: list[Tensor] = []
        with model.hooks([(site, edit), (site, lambda state, hook: seen.append(state))]):
            edited, states = model(stream), seen[-1]
            seen.clear()
            single, _ = in_steps(model, stream, [1] * 12)
            assert len(seen) == 12
            assert_close(states, torch.cat(seen, 1), msg="what the last call of a later hook sees")
            pieces, _ = in_steps(model, stream, [4, 1, 7])
        assert_close(edited, single)
        assert_close(edited, pieces)
        assert_apart(edited, clean)
        if not torch.equal(edit(once := edit(kept[site], None), None), once):  # edits add up
            assert_apart(
                edited, model.run_with_hooks(stream, fwd_hooks=[(site, lambda state, hook: edit(kept[site], hook))])
            )

    def test_the_gradient_of_states_that_are_set(self, model: Rooted) -> None:
        """Is that of a run from the last of them, and a hook on the gradient runs once."""
        stream, site = some(2, 9, 6), "mixer.hook_state"
        value, seen = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), list[Tensor]()

        def put(state: Tensor, hook: Any) -> Tensor:
            return torch.cat([state[:, :3], value.expand_as(state[:, 3:5]), state[:, 5:]], 1)

        with model.hooks([(site, put)], bwd_hooks=[(site, lambda gradient, hook: seen.append(gradient.clone()))]):
            out = model(stream)[:, -1].sum()
        [slope] = torch.autograd.grad(out, [value])
        assert len(seen) == 1
        assert_close(seen[0][:, 3:5].sum(), slope, GRADIENT)
        with torch.no_grad():
            moved = []
            for step in (1e-4, -1e-4):
                value += step
                moved.append(model.run_with_hooks(stream, fwd_hooks=[(site, put)])[:, -1].sum())
                value -= step
        assert_near(slope, (moved[0] - moved[1]) / 2e-4, 1e-5, because="a difference quotient, not a slope")

    def test_edits_that_do_not_settle_are_refused(self, model: Rooted) -> None:
        stream, site, calls = some(2, 9, 6), "mixer.hook_state", []

        def once(state: Tensor, hook: Any) -> Tensor:
            calls.append(1)
            return state + 1 if len(calls) == 1 else state

        def more(state: Tensor, hook: Any) -> Tensor:
            calls.append(1)
            return state + len(calls)

        with torch.no_grad():
            for hook in (once, more):
                with pytest.raises(ValueError, match=r"edit of 'mixer\.hook_state' does not settle"):
                    model.run_with_hooks(stream, fwd_hooks=[(site, hook)])
        with pytest.raises(NotImplementedError, match="no gradient passes"):
            model.run_with_hooks(stream, fwd_hooks=[(site, lambda state, hook: state + 1)])

    def test_edits_without_values_are_refused(self, model: Rooted) -> None:
        """Whether other states follow from an edit is seen in values."""
        listen = [("mixer.hook_state", lambda state, hook: None)]
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            assert model(some(2, 9, 6)).shape == (2, 9, 6)
            with pytest.raises(NotImplementedError, match=r"edit of 'mixer\.hook_state' cannot be compiled"):
                model.run_with_hooks(some(2, 9, 6), fwd_hooks=listen)

    @torch.no_grad()
    def test_noise_is_drawn_once(self, model: Rooted) -> None:
        stream, site = some(2, 9, 6), "mixer.hook_state"
        noisy = [(site, lambda state, hook: state + 0.3 * torch.randn_like(state))]
        torch.manual_seed(1)
        found, then = model.run_with_hooks(stream, fwd_hooks=noisy), torch.randn(3)
        shape = model.run_with_cache(stream, names_filter=[site])[1][site].shape
        torch.manual_seed(1)
        noise, expected = torch.randn(shape, dtype=torch.float64), torch.randn(3)
        fixed = model.run_with_hooks(stream, fwd_hooks=[(site, lambda state, hook: state + 0.3 * noise)])
        assert torch.equal(found, fixed)
        assert torch.equal(then, expected)

    def test_readers_are_called_once(self, model: Rooted) -> None:
        seen: list[Tensor] = []
        for gradient in (True, False):
            with torch.set_grad_enabled(gradient):
                model.run_with_hooks(some(2, 9, 6), fwd_hooks=[("mixer.hook_state", lambda s, hook: seen.append(s))])
        assert len(seen) == 2

    def test_the_gradient_of_a_state_includes_later_positions(self, model: Rooted) -> None:
        """It is the difference quotient of the last output for small changes of the state."""
        stream, seen = some(1, 12, 6), {}

        def keep(gradient: Tensor, hook: Any) -> None:
            seen["gradient"] = gradient.clone()

        with model.hooks(bwd_hooks=[("mixer.hook_state", keep)]):
            model(stream)[:, -1].sum().backward()
        place = (0, self.state_pos, *(-1 for _ in seen["gradient"].shape[2:]))
        moved = []
        for step in (1e-4, -1e-4):

            def move(state: Tensor, hook: Any, step: float = step) -> Tensor:
                state[place] += step
                return state

            with torch.no_grad():
                moved.append(model.run_with_hooks(stream, fwd_hooks=[("mixer.hook_state", move)])[:, -1].sum())
        measured = (moved[0] - moved[1]) / 2e-4
        assert abs(measured) > 1e-7
        assert_near(seen["gradient"][place], measured, 1e-6, because="a difference quotient, not a slope")

    def test_listening_changes_nothing(self, model: Rooted) -> None:
        stream = some(2, 90, 6)
        seen = {}
        with model.hooks([(name, lambda value, hook: seen.update({hook.name: value})) for name in model.all_points()]):
            listened = model(stream)
        assert_close(listened, model(stream))
        assert list(seen) == list(model.all_points())
        with torch.no_grad():  # a gradient at the states takes them all
            unedited = model.run_with_hooks(stream, fwd_hooks=[("mixer.hook_state", lambda state, hook: state)])
            assert torch.equal(unedited, model(stream))

    def test_gradients(self, model: Rooted) -> None:
        """The gradient of every weight is that of a plain loop over positions."""
        stream = some(2, 21, 6)
        weights = dict(model.named_parameters())
        ours = torch.autograd.grad((model(stream) ** 2).sum(), list(weights.values()))
        theirs = torch.autograd.grad((self.naive(model.mixer, stream) ** 2).sum(), list(weights.values()))
        for name, a, b in zip(weights, ours, theirs, strict=True):
            assert_close(a, b, GRADIENT, msg=name)
