"""The soft cap of the logits is the model's, not the unembedding's: clients wrap the one and set the other."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedTransformer, HookPoint, patching
from hooked_lm.analysis.reading.lens import decode
from hooked_lm.hooks import is_listening
from tests.close import assert_close
from tests.models.toys import ids, toy

CAP = 2.0
TOKENS = ids(batch=2, n_pos=6)


def capped(x: Tensor) -> Tensor:
    return CAP * (x / CAP).tanh()


@pytest.fixture
def model() -> HookedTransformer:
    return toy(output_logits_soft_cap=CAP)


def before_cap(model: HookedTransformer) -> Tensor:
    normalized = model.ln_final(model(TOKENS, stop_at_layer=len(model.blocks)))
    return normalized @ model.W_U + model.b_U


def test_the_unembedding_gives_logits_before_the_cap(model: HookedTransformer) -> None:
    before = before_cap(model)
    assert before.abs().max() > 2 * CAP, "or the cap does nothing"
    normalized = model.ln_final(model(TOKENS, stop_at_layer=len(model.blocks)))
    assert_close(model.unembed(normalized), before)
    assert_close(model(TOKENS), capped(before))
    _, cache = model.run_with_cache(TOKENS, names_filter="unembed.hook_out")
    assert_close(cache["unembed.hook_out"], before)


class Around(nn.Module):
    """A foreign module around the unembedding, with its own point."""

    def __init__(self, unembed: nn.Module) -> None:
        super().__init__()
        self.inside, self.hook_post = unembed, HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_post(self.inside(x))


def test_around_a_wrapped_unembedding(model: HookedTransformer) -> None:
    """Its point sees what the model then caps."""
    before, logits = before_cap(model), model(TOKENS)
    model.unembed = Around(model.unembed)
    model.setup()
    found, cache = model.run_with_cache(TOKENS)
    assert_close(found, logits)
    assert_close(cache["unembed.hook_post"], before)
    model.unembed = nn.Linear(32, 50)
    assert model(TOKENS).abs().max() <= CAP


def test_the_field_is_read_at_each_run(model: HookedTransformer) -> None:
    """Tools take the cap off for a while."""
    before, logits = before_cap(model), model(TOKENS)
    model.cfg.output_logits_soft_cap = 0.0
    assert_close(model(TOKENS), before)
    model.cfg.output_logits_soft_cap = -1.0
    assert_close(model(TOKENS), before)
    model.cfg.output_logits_soft_cap = CAP
    assert torch.equal(model(TOKENS), logits)


def first(logits: Tensor) -> Tensor:
    return logits[:, -1, 3].mean()


def test_everything_that_runs_the_end_by_itself_caps(model: HookedTransformer) -> None:
    """Sweeps, with and without a hook at the unembedding, lenses and identities."""
    corrupted, (_, cache) = ids(batch=2, n_pos=6, seed=1), model.run_with_cache(TOKENS)
    found = patching.get_act_patch_resid_pre(model, corrupted, cache, first)
    for layer in range(model.cfg.n_layers):
        site = f"blocks.{layer}.hook_resid_pre"

        def patch(value: Tensor, hook: Any) -> None:
            value[:, 4] = cache[hook.name][:, 4]

        logits = model.run_with_hooks(corrupted, fwd_hooks=[(site, patch)])
        assert_close(found[layer, 4], first(logits), scale=logits)  # a mean or a difference of them
    assert_close(decode(model, cache["resid_post", -1][0]), model(TOKENS)[0])
    assert model.verify().ok
    assert not is_listening(model.unembed.hook_out)
