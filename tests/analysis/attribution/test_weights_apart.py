"""Attribution takes no gradient of a weight, and changes nothing of the model: another thread may train it meanwhile."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, analysis
from hooked_lm.analysis.attribution.gradients import Tape, freeze_weights
from hooked_lm.analysis.circuits.run import Runner
from tests.close import GRADIENT, assert_close
from tests.models.toys import ids, toy

CORRUPTED, CLEAN = ids(2, 5), ids(2, 5, seed=1)
SITE = "blocks.1.hook_resid_pre"


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3]


def trainable(**fields: Any) -> HookedTransformer:
    return toy(n_layers=2, **fields).requires_grad_(True)


def in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_another_thread_keeps_its_gradients() -> None:
    model = trainable()

    def step() -> list[Tensor]:
        return list(torch.autograd.grad(model(CLEAN).logsumexp(-1).mean(), list(model.parameters()), allow_unused=True))

    expected = step()
    with freeze_weights(model):
        assert all(weight.requires_grad for weight in model.parameters())
        meanwhile = in_a_thread(step)
        here = model(CLEAN)
    for found, true in zip(meanwhile, expected, strict=True):
        assert (found is None) == (true is None)
        assert true is None or torch.equal(found, true)
    with pytest.raises(RuntimeError, match=r"not have been used|does not require grad"):
        torch.autograd.grad(here.mean(), list(model.parameters()))


@pytest.mark.parametrize(
    "run",
    [
        lambda model, seen: analysis.attribute(model, CORRUPTED, CLEAN, metric=seen, check=False, progress=False),
        lambda model, seen: analysis.attribute_edges(model, CORRUPTED, CLEAN, metric=seen, check=False),
        lambda model, seen: Runner(model, CORRUPTED, CLEAN, seen).gradient(
            torch.full(Runner(model, CORRUPTED, CLEAN, seen).graph.is_edge.shape, 0.5)
        ),
    ],
    ids=["attribute", "attribute_edges", "circuits"],
)
def test_no_flag_is_flipped(run: Callable[..., Any]) -> None:
    """As the metric sees it, which runs in the midst of it."""
    model, seen = trainable(), list[bool]()
    model.blocks[0].attn.W_Q.requires_grad_(False)
    before = flags_of(model)

    def watching(logits: Tensor) -> Tensor:
        seen.append(in_a_thread(lambda: flags_of(model)) == before)
        return metric(logits)

    run(model, watching)
    assert seen
    assert all(seen)
    assert flags_of(model) == before
    assert all(weight.grad is None for weight in model.parameters())


def flags_of(model: HookedTransformer) -> dict[str, bool]:
    return {name: weight.requires_grad for name, weight in model.named_parameters()}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["standard", "tied", "rotary"])
def test_gradients_are_right_and_keep_nothing_of_weights(kind: str, frozen: bool) -> None:
    model = toy(kind, n_layers=2).requires_grad_(not frozen)
    kept: list[Tensor] = []

    def keep(value: Tensor, hook: Any) -> Tensor:
        kept.append(value.detach().requires_grad_())
        return kept[-1].clone()

    scores = metric(model.run_with_hooks(CORRUPTED, fwd_hooks=[(SITE, keep)]))
    [expected] = torch.autograd.grad(scores.sum(), [kept[-1]])
    tape = Tape(model, CORRUPTED, [SITE], metric)
    assert_close(tape.gradients()[SITE], expected, depth=GRADIENT)
    assert not any(id(weight) in leaves(tape.scores) for weight in model.parameters())


def leaves(value: Tensor) -> set[int]:
    """The tensors at which a graph ends."""
    found, left, seen = set[int](), [value.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        left += [other for other, _ in node.next_functions]
    return found
