from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hooked_lm.hooks import wrap
from hooked_lm.interventions.controllers import Scale
from hooked_lm.interventions.gradients import ClipGradient, RecordGradient, ScaleGradient
from tests.close import GRADIENT, assert_apart, assert_close
from tests.families import ENCODER_DECODER_CASES
from tests.families._models import hooked
from tests.models.toys import ids, toy

BATCH, POS = 2, 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def net() -> Any:
    torch.manual_seed(0)
    return wrap(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)))


def upstream(model: Any, x: Tensor, *hooks: Any) -> tuple[Tensor, Tensor]:
    """The gradient at the input and the value of the run."""
    x = x.clone().requires_grad_()
    with model.hooks(list(hooks)):
        loss = model(x).square().sum()
    loss.backward()
    return x.grad, loss.detach()


def at(model: Any, x: Tensor, site: str) -> Tensor:
    """The gradient of a site, by autograd and no hook of ours."""
    record = RecordGradient(site)
    upstream(model, x, record)
    return record.values[site][0]


def back(model: Any, gradient: Tensor, x: Tensor) -> Tensor:
    """A gradient at the first layer's output, carried to the input by hand."""
    return gradient @ model.module[0].weight


def test_recorded_gradients_are_those_of_autograd():
    model, x = net(), numbers(BATCH, POS, 3)
    middle = model.module[0](x).detach().requires_grad_()
    model.module[2](model.module[1](middle)).square().sum().backward()
    record = RecordGradient("0", most_calls=2, at_cap="oldest")
    for _ in range(3):
        upstream(model, x, record)
    upstream(model, 2 * x, record)
    assert [one.shape for one in record.values["0"]] == [middle.shape] * 2
    assert_close(record.values["0"][0], middle.grad, depth=GRADIENT)
    assert not torch.equal(record.values["0"][0], record.values["0"][1])
    record.values["0"][0].zero_()  # a copy: nobody else sees this
    assert_close(upstream(model, x)[0], back(model, middle.grad, x), depth=GRADIENT)
    record.clear()
    with record.disabled():
        upstream(model, x, record)
    assert record.values == {}
    with pytest.raises(ValueError, match="at least 0, got -1"):
        RecordGradient("0", most_calls=-1)


def test_the_gradient_alone_is_scaled():
    model, x = net(), numbers(BATCH, POS, 3)
    plain, value = upstream(model, x)
    for hook, factors in (
        (ScaleGradient("0", factor=-2), -2 * torch.ones(BATCH, POS, 5)),
        (ScaleGradient("0", factor=0, positions=[0, -1]), torch.tensor([0.0, 1, 1, 0])[:, None].expand(BATCH, POS, 5)),
        (ScaleGradient("0", factor=3, rows=1, features=2), torch.ones(BATCH, POS, 5)),
    ):
        factors = factors.clone()
        if hook.factor == 3:
            factors[1, :, 2] = 3
        found, same_value = upstream(model, x, hook)
        assert torch.equal(value, same_value)
        assert_close(found, back(model, at(model, x, "0") * factors, x))
        assert_apart(found, plain)
    assert torch.equal(upstream(model, x)[0], plain)


def test_clipping_by_value_and_by_length():
    model, x = net(), numbers(BATCH, POS, 3) * torch.tensor([0.05, 2.0])[:, None, None]
    gradient = at(model, x, "0")
    found, _ = upstream(model, x, ClipGradient("0", max_value=0.1))
    assert_close(found, back(model, gradient.clip(-0.1, 0.1), x), depth=GRADIENT)

    lengths = gradient.flatten(1).norm(dim=1)
    limit = float(lengths.mean())
    assert lengths.min() < limit < lengths.max()
    record = RecordGradient("0")
    found, _ = upstream(model, x, ClipGradient("0", max_norm=limit), record)
    clipped = record.values["0"][0]
    assert_close(clipped.flatten(1).norm(dim=1), lengths.clamp(max=limit))
    short, long = lengths.argmin(), lengths.argmax()
    assert torch.equal(clipped[short], gradient[short])  # bit for bit
    assert_close(clipped[long], gradient[long] * (limit / lengths[long]), depth=GRADIENT)
    assert_close(found, back(model, clipped, x))

    one, _ = upstream(model, x[long : long + 1], ClipGradient("0", max_norm=limit))
    assert_close(found[long : long + 1], one)  # a row in a batch is as it is alone
    record.clear()
    upstream(model, x, ClipGradient("0", max_norm=1e-3, positions=0), record)
    assert torch.equal(record.values["0"][0][:, 1:], gradient[:, 1:])
    assert record.values["0"][0][:, 0].norm(dim=-1).max() <= 1.001e-3
    for limits in ({}, {"max_norm": 0.0}, {"max_value": -1}):
        with pytest.raises(ValueError, match="above 0"):
            ClipGradient("0", **limits)


def test_no_gradient_at_all_is_clipped_without_nan():
    model, x = net(), numbers(BATCH, POS, 3)
    found, _ = upstream(model, x, ScaleGradient("2", factor=0), ClipGradient("0", max_norm=1.0))
    assert torch.equal(found, torch.zeros_like(found))


def test_values_and_gradients_share_a_site():
    model, x = net(), numbers(BATCH, POS, 3)
    found, value = upstream(model, x, Scale("0", factor=0.5), ScaleGradient("0", factor=4))
    by_hand = x.clone().requires_grad_()
    loss = model.module[2](torch.tanh(0.5 * model.module[0](by_hand))).square().sum()
    loss.backward()
    assert_close(value, loss.detach())
    assert_close(found, 4 * by_hand.grad, depth=GRADIENT)


def test_heads_of_a_decoder_and_either_list():
    model, tokens = toy("rotary"), ids(BATCH, POS)
    model.blocks[1].attn.W_V.requires_grad_(True)

    def run(**lists: Any) -> Tensor:
        with model.hooks(**lists):
            loss = model(tokens, return_type="loss")
        loss.backward()
        found, model.blocks[1].attn.W_V.grad = model.blocks[1].attn.W_V.grad, None
        return found

    stop = ScaleGradient("v", 1, factor=0, heads=1)
    plain, stopped = run(), run(fwd_hooks=[stop])
    assert torch.equal(stopped, run(bwd_hooks=[stop]))
    assert not stopped[1].any()
    assert_close(stopped[0], plain[0])
    assert plain[1].any()
    with pytest.raises(
        ValueError, match=r"heads=0, and 'blocks.1.hook_resid_post \[batch 2, pos 4, d_model 32\]' has no such"
    ):
        run(bwd_hooks=[ScaleGradient("resid_post", 1, factor=0, heads=0)])


def test_an_encoder_decoder():
    case = next(case for case in ENCODER_DECODER_CASES if case.family == "t5")
    model, tokens = hooked(case), ids(BATCH, POS) + 3
    embeds: list[Tensor] = []

    def leaf(value: Tensor, hook: Any) -> Tensor:
        embeds.append(value.detach().requires_grad_())
        return embeds[-1]

    for hook in (
        ScaleGradient("encoder.*.hook_resid_post", factor=1.0),
        ScaleGradient("encoder.resid_post", 0, factor=0.25),
    ):
        with model.hooks([("hook_embed", leaf), hook]):
            model(tokens, tokens + 1).square().sum().backward()
    assert_close(embeds[1].grad, 0.25 * embeds[0].grad, depth=GRADIENT)
    assert embeds[0].grad.any()
    model.zero_grad()
