"""Saliency against plain autograd, its completeness, its files and what it refuses."""

import math
import re
import warnings
from pathlib import Path
from random import Random

import pytest
import torch

from hooked_lm import HookedTransformer, HookedVisionLanguage
from hooked_lm.analysis import Saliency, saliency
from hooked_lm.demo.shapes import pixels, random_question
from tests.close import assert_close, assert_near
from tests.families import ENCODER_DECODER_CASES
from tests.families._models import hooked
from tests.unchecked import unchecked

PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def plain(model: HookedTransformer, ids: torch.Tensor, target) -> tuple[torch.Tensor, torch.Tensor]:
    """The embeddings and the gradient of a target of the last logits, by autograd alone."""
    leaf = model.embed(ids).detach().requires_grad_()
    with torch.enable_grad():
        logits = model.run_with_hooks(ids, fwd_hooks=[("hook_embed", lambda value, hook: leaf)])
        [slope] = torch.autograd.grad(target(logits[0, -1]), leaf)
    return leaf.detach()[0], slope[0]


@pytest.mark.parametrize("of", ["probability", "log probability", "logit", "logit difference"])
def test_gradients_are_those_of_autograd(model, of) -> None:
    contrast = " John" if of == "logit difference" else None
    found = saliency(model, PROMPT, continuation=" Mary and", of=of, contrast=contrast)
    whole, start = model.to_tokens(PROMPT + " Mary and"), found.start
    assert found.generated == [" Mary", " and"]
    assert found.tokens == model.to_str_tokens(PROMPT + " Mary and")
    wrong = model.to_single_token(" John")
    for i, right in enumerate(whole[0, start:].tolist()):
        targets = {
            "probability": lambda last, right=right: last.softmax(-1)[right],
            "log probability": lambda last, right=right: last.log_softmax(-1)[right],
            "logit": lambda last, right=right: last[right],
            "logit difference": lambda last, right=right: last[right] - last[wrong],
        }
        values, slope = plain(model, whole[:, : start + i], targets[of])
        assert_close(found.signed[i, : start + i], (values * slope).sum(-1), scale=(values * slope).norm())
        assert_close(found.norm[i, : start + i], (values * slope).norm(dim=-1), scale=(values * slope).norm())
        assert found.signed[i, start + i :].isnan().all()
        assert found.norm[i, start + i :].isnan().all()
        last = model(whole[:, : start + i])[0, -1]
        assert_close(found.scores[i], targets[of](last), scale=last.abs().max())


def test_a_word_without_its_space(model: HookedTransformer) -> None:
    """It warns where the token with the space is likelier; a contrast is refused, as other answers are."""
    with pytest.warns(UserWarning, match="'Mary and' has no leading space, .* did you mean ' Mary and'") as caught:
        found = saliency(model, PROMPT, continuation="Mary and")
    assert len(caught) == 1
    assert found.generated == ["Mary", " and"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saliency(model, model.to_tokens("")[:, :1], continuation="Mary")  # begins a text
        saliency(model, PROMPT, continuation="zyx")  # several tokens, with a space as well
    with pytest.raises(ValueError, match="contrast: 'John' has no leading space"):
        saliency(model, PROMPT, continuation=" Mary", of="logit difference", contrast="John")


def test_the_gradient_alone(model) -> None:
    found = saliency(model, PROMPT, continuation=" Mary", of="logit", method="gradient")
    right = model.to_single_token(" Mary")
    _, slope = plain(model, model.to_tokens(PROMPT), lambda last: last[right])
    assert_close(found.norm[0, :-1], slope.norm(dim=-1), scale=slope.norm())
    assert found.gap.isnan().all()


def test_integrated_gradients_sum_to_the_difference_from_the_baseline(model) -> None:
    how = {"continuation": " Mary", "of": "log probability", "method": "integrated gradients"}
    found = saliency(model, PROMPT, **how)
    assert_near(found.signed.nansum(-1), found.scores - found.baseline_scores, 1e-3, "the integral has 64 steps")
    mean = model.W_E.detach().mean(0)
    logits = model.run_with_hooks(PROMPT, fwd_hooks=[("hook_embed", lambda value, hook: mean.expand_as(value))])
    base = logits[0, -1].log_softmax(-1)[model.to_single_token(" Mary")]
    assert_close(found.baseline_scores[0], base.detach(), scale=logits.abs().max())
    few = saliency(model, PROMPT, **how, steps=4)
    assert few.gap.abs().max() > 10 * found.gap.abs().max()
    assert "completeness error at most" in repr(found)


def test_generated_tokens_are_the_most_likely(model) -> None:
    found = saliency(model, PROMPT, max_new_tokens=2)
    assert found.generated[0] == " Mary"
    assert_close(found.scores[0], model(PROMPT)[0, -1].softmax(-1).max())


def test_tables_figures_views_and_files(model, tmp_path: Path) -> None:
    found = saliency(model, PROMPT, continuation=" Mary and", of="logit difference", contrast=[" John", " the"])
    table = found.to_dataframe()
    assert len(table) == 15 + 16
    row = table.query("generated == ' and' and input_position == 15").iloc[0]
    assert row["input"] == " Mary"
    assert row["signed"] == found.signed[1, 15].item()
    assert len(found.plot().data[0].z) == 2
    assert "·and (16)" in found.view("norm").to_html()
    found.save(tmp_path / "found.safetensors")
    again = Saliency.load(tmp_path / "found.safetensors")
    assert repr(again) == repr(found)
    assert again.tokens == found.tokens
    assert torch.equal(again.signed.nan_to_num(), found.signed.nan_to_num())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "give max_new_tokens"),
        ({"max_new_tokens": 1, "continuation": " a"}, "give max_new_tokens"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"continuation": " a", "method": "magic"}, "method must be one of 'gradient'"),
        ({"continuation": " a", "of": "loss"}, "of must be one of"),
        ({"continuation": " a", "baseline": "noise"}, "baseline must be one of"),
        ({"continuation": " a", "of": "logit difference"}, "needs contrast"),
        ({"continuation": " a", "contrast": " John"}, "needs contrast"),
        ({"continuation": " Mary", "of": "logit difference", "contrast": [" a", " b"]}, "2 contrasts for 1 generated"),
        ({"continuation": " a", "steps": 0}, "at least 1"),
    ],
)
def test_what_is_refused(model, how, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        saliency(model, PROMPT, **how)


def test_several_prompts_are_refused(model) -> None:
    with pytest.raises(ValueError, match="one prompt at a time, got 2"):
        saliency(model, model.to_tokens(PROMPT).expand(2, -1), max_new_tokens=1)
    with unchecked(), pytest.raises(ValueError, match="one prompt at a time, got 2"):
        saliency(model, [PROMPT, "Another, longer or shorter"], max_new_tokens=1)
    assert math.isnan(saliency(model, PROMPT, max_new_tokens=1).signed[0, -1])


def test_an_encoder_decoder_is_refused_by_name() -> None:
    case = next(case for case in ENCODER_DECODER_CASES if case.family == "t5")
    with unchecked(), pytest.raises(TypeError, match="saliency supports models with one stack"):
        saliency(hooked(case), torch.ones(1, 3, dtype=torch.long), max_new_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gradient x input", "integrated gradients"])
def test_images_and_words_against_autograd(method) -> None:
    """Every token of the prompt counts, those of the image too; text alone has none."""
    model = HookedVisionLanguage.from_pretrained("demo-shapes")
    question = random_question(Random(0))
    prompt = model.prepare(question.text, pixels(question.picture)[None])
    found = saliency(model, prompt, continuation=" " + question.answer, of="logit", method=method, steps=512)
    start = prompt.tokens.shape[1]
    assert (found.start, len(found.tokens)) == (start, start + 1)
    assert found.scores[0] > model(prompt)[0, -1].detach().topk(2).values[1], "the model knows the answer"
    token = model.to_single_token(" " + question.answer)
    assert_close(found.scores[0], model(prompt)[0, -1, token].detach())
    if method == "integrated gradients":
        assert found.gap.abs() < 0.02 * (found.scores - found.baseline_scores).abs()
        return
    kept = {}

    def keep(value, hook):
        kept["x"] = value.detach().requires_grad_()
        return kept["x"]

    with torch.enable_grad():
        logits = model.run_with_hooks(prompt, fwd_hooks=[("hook_embed_merged", keep)])
        [slope] = torch.autograd.grad(logits[0, -1, token], kept["x"])
    expected = (kept["x"].detach() * slope)[0].sum(-1)
    assert_close(found.signed[0, :start], expected, scale=expected.norm())
    is_image = prompt.tokens[0] == model.tree.image_token
    assert found.norm[0, :start][is_image].sum() > 0
    assert saliency(model, prompt, max_new_tokens=1).generated == found.generated
    words = saliency(model, question.text.replace("<image> ", ""), max_new_tokens=1)
    assert words.norm[0, : words.start].isfinite().all()
