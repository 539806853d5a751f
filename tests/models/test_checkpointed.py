"""Training under activation checkpointing: hooks hold for the recomputation of a model's blocks too."""

import copy
from functools import partial
from typing import Any

import pytest
from torch import nn
from torch.utils.checkpoint import checkpoint

from hooked_lm import HookedTransformer
from tests.close import GRADIENT, assert_close
from tests.models.toys import ids, toy

HOOKS: dict[str, list[Any]] = {
    "an MLP that is ablated": [("blocks.1.hook_mlp_out", lambda value, hook: 0 * value)],
    "attention in steps": [("blocks.*.attn.hook_pattern", lambda value, hook: value.masked_fill(value > 0.5, 0.0))],
    "norms in steps": [("blocks.*.ln1.hook_scale", lambda value, hook: 2 * value)],
    "sites on demand": [("blocks.*.attn.hook_result", lambda value, hook: value * 0.5)],
}


def checkpointed(model: HookedTransformer, use_reentrant: bool) -> HookedTransformer:
    """A copy that runs every block under activation checkpointing, as its user would have it."""
    twin = copy.deepcopy(model)

    def again(block: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        run = lambda x: type(block).forward(block, x, *args, **kwargs)  # noqa: E731
        return checkpoint(run, x, use_reentrant=use_reentrant)

    for block in twin.blocks:
        block.forward = partial(again, block)
    return twin


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
def test_gradients_of_a_model_whose_hooks_are_gone(hooks: list[Any], use_reentrant: bool) -> None:
    model = toy("standard").requires_grad_(True)
    twin = checkpointed(model, use_reentrant)
    for each in (model, twin):
        with each.hooks(hooks):
            loss = each(ids(), return_type="loss")
        loss.backward()
    for (name, weight), (_, again) in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert_close(again.grad, weight.grad, depth=GRADIENT, scale=model.embed.W_E.grad.abs().max(), msg=name)
    if "blocks.1.hook_mlp_out" in hooks[0]:
        assert twin.blocks[1].mlp.W_in.grad.abs().max() == 0
