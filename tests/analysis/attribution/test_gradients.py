"""Gradients at sites, against finite differences; and that nothing of the model is touched."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedEncoder, HookedEncoderConfig, HookedTransformer, HookedTransformerConfig
from hooked_lm.analysis import metrics
from hooked_lm.analysis.attribution.gradients import Tape, freeze_weights, gradients
from tests.close import assert_close, assert_near
from tests.families import DECODER_CASES
from tests.families._models import hooked

CASES = {case.family: case for case in reversed(DECODER_CASES)}
SITES = ["blocks.0.hook_resid_pre", "blocks.1.hook_mlp_out", "blocks.0.attn.hook_z", "blocks.1.attn.hook_k"]


def small(**changes: object) -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_head": 4, "n_ctx": 8, "d_vocab": 20, "d_mlp": 32}
    return HookedTransformer(HookedTransformerConfig(**{**sizes, "act_fn": "gelu", "seed": 0, **changes}))


def tokens_of(model: HookedTransformer, batch: int = 2, n_pos: int = 6) -> Tensor:
    return torch.randint(3, model.cfg.d_vocab, (batch, n_pos), generator=torch.Generator().manual_seed(1))


def squares(logits: Tensor) -> Tensor:
    return logits[:, -1, :5].square().sum(-1)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gptj", "mixtral"])
def test_finite_differences(family: str) -> None:
    model = copy.deepcopy(hooked(CASES[family])).to(torch.float64)
    tokens = tokens_of(model)
    found = gradients(model, tokens, SITES, squares)
    assert_close(found.scores, squares(model(tokens)).detach())
    for site in SITES:
        direction = torch.randn(
            found.values[site].shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
        ends = [
            squares(
                model.run_with_hooks(tokens, fwd_hooks=[(site, lambda x, hook, step=s * 1e-5 * direction: x + step)])
            )
            for s in (1, -1)
        ]
        slope = ((ends[0] - ends[1]) / 2e-5).detach()
        along = (found.gradients[site] * direction).flatten(1).sum(1)
        assert_near(along, slope, 1e-5, because="a difference quotient, not a slope")
        assert slope.abs().max() > 1e-4


def test_rows_are_those_of_their_own_prompt() -> None:
    model = small()
    tokens, site = tokens_of(model), SITES[0]
    both = gradients(model, tokens, [site], squares).gradients[site]
    for row in (0, 1):
        alone = gradients(model, tokens[row : row + 1], [site], squares).gradients[site]
        assert_close(both[row : row + 1], alone)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(fails: bool) -> None:
    model = small()
    model.W_E.requires_grad_(False)
    asked = {name: weight.requires_grad for name, weight in model.named_parameters()}
    inside: list[dict[str, bool]] = []

    def metric(logits: Tensor) -> Tensor:
        inside.append({name: weight.requires_grad for name, weight in model.named_parameters()})
        if fails:
            raise RuntimeError("no")
        return squares(logits)

    if fails:
        with pytest.raises(RuntimeError, match="no"):
            gradients(model, tokens_of(model), SITES, metric)
    else:
        gradients(model, tokens_of(model), SITES, metric)
    assert inside
    assert all(each == asked for each in inside)
    assert asked == {name: weight.requires_grad for name, weight in model.named_parameters()}
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(point.is_listening for point in model.hook_points())
    assert not model.W_E.requires_grad


def test_under_no_grad_and_in_an_encoder() -> None:
    cfg = {"n_layers": 1, "d_model": 8, "n_heads": 2, "d_head": 4, "n_ctx": 8, "d_vocab": 12, "d_mlp": 16}
    encoder = HookedEncoder(HookedEncoderConfig(**cfg, act_fn="gelu", seed=0))
    with torch.no_grad():
        found = gradients(encoder, tokens_of(small())[:, :5] % 12, ["blocks.0.attn.hook_z"], lambda x: x[:, 1, 3])
    assert found.gradients["blocks.0.attn.hook_z"].abs().max() > 0


def test_only_what_is_read_is_unembedded() -> None:
    model, seen = small(), []
    model.unembed.unhooked = lambda x: seen.append(x.shape)  # type: ignore[assignment,method-assign]
    gradients(model, tokens_of(model), [SITES[0]], metrics.logit_difference(3, 4))
    assert seen == []


def test_a_tape_is_played_again() -> None:
    model = small()
    tape = Tape(model, tokens_of(model), SITES, squares)
    first, second = tape.gradients(again=True), tape.gradients()
    assert all(torch.equal(first[site], second[site]) for site in SITES)


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (metrics.rank(3), "the metric rank has no gradient"),
        (lambda logits: logits.argmax(-1)[:, -1], "has no gradient"),
        (lambda logits: 3.0, "has no gradient"),
        (lambda logits: logits[:, -1, :3], "one number, or one for each of the 2 prompts"),
        (
            lambda logits: (logits[:, -1, 3] * 0).sqrt() * float("nan"),
            "the gradient at 'blocks.0.hook_resid_pre' is NaN",
        ),
    ],
)
def test_metrics_that_do_not_do(metric: Callable[[Tensor], object], says: str) -> None:
    model = small()
    with pytest.raises(ValueError, match=says):
        gradients(model, tokens_of(model), SITES, metric)


def test_sites_that_do_not_do() -> None:
    model = small()
    with pytest.raises(KeyError, match="hook_resid_pr"):
        gradients(model, tokens_of(model), ["blocks.0.hook_resid_prr"], squares)
    unread = Tape(model, tokens_of(model), [SITES[1]], lambda logits: model.W_E.square().sum() + logits[0, 0, 0] * 0)
    unread.scores = model.W_E.square().sum().reshape(1)
    with pytest.raises(ValueError, match=r"does not depend on .blocks\.1\.hook_mlp_out"):
        unread.gradients()


def test_weights_apart_by_itself() -> None:
    model = small()
    with freeze_weights(model):
        assert not (2 * model.blocks[0].attn.W_Q).requires_grad
        assert (2 * model.embed.W_E).requires_grad
        assert model.blocks[0].attn.W_Q.requires_grad
    assert (2 * model.blocks[0].attn.W_Q).requires_grad


def test_weights_have_graphs_again_behind_the_last_of_several_blocks() -> None:
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    first, second = freeze_weights(model), freeze_weights(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not model(torch.ones(2)).requires_grad
    second.__exit__(None, None, None)
    assert model(torch.ones(2)).requires_grad
    assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
