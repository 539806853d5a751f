"""What a model of any class and that of transformers answer to the same input: text, images, or both."""

import copy
from typing import Any

import torch
from torch import Tensor

from hooked_lm.families import model_class, supported
from tests.close import assert_close
from tests.families import _encoders as encoders
from tests.families._case import Case, reference
from tests.families._models import (
    assert_same_gradients,
    assert_same_gradients_of,
    assert_same_logits,
    hooked,
)
from tests.families._vision import VisionCase, answer, hooked_any, is_pair, pair_inputs, scenes, written

Answers = dict[str, Tensor]
FIRST = 4  # ids below are of pad tokens, which have no position in some families
N_TARGET = 11


def kind(case: Case) -> str:
    """The class of ours that reads a case."""
    if isinstance(case, VisionCase):
        return "HookedVisionLanguage"
    if is_pair(case):
        return "HookedDualEncoder"
    return model_class(case.family) if case.family in supported() else "HookedVisionEncoder"


def ours(case: Case) -> Any:
    """The case's model as we load it."""
    return hooked(case) if case.family in supported() and not isinstance(case, VisionCase) else hooked_any(case)


def inputs(case: Case) -> dict[str, Tensor]:
    """Random tokens, images or both, as transformers takes them."""
    of, generator = kind(case), torch.Generator().manual_seed(1)
    if isinstance(case, VisionCase):
        given = written(case, scenes(case)["two"])
        return given | case.writer.more(given["input_ids"])
    if of == "HookedDualEncoder":
        return pair_inputs(case)
    if of == "HookedVisionEncoder":
        return ours(case).drawn_images(3, seed=1)
    model, shape = hooked(case), (3, case.n_prompt)
    if of == "HookedEncoder":
        tokens = encoders.prompt(case)
        return {"input_ids": tokens, **encoders.types(case, tokens)}
    first = FIRST if of == "HookedEncoderDecoder" else 0
    tokens = torch.randint(first, model.cfg.d_vocab, shape, generator=generator)
    if of == "HookedTransformer":
        return {"input_ids": tokens}
    target = torch.randint(first, model.cfg.d_vocab_out, (3, N_TARGET), generator=generator)
    return {"input_ids": tokens, "decoder_input_ids": target, **encoders.global_mask(case, tokens)}


def of_transformers(case: Case, model: Any, given: dict[str, Tensor]) -> Answers:
    """What transformers answers."""
    of = kind(case)
    if of == "HookedEncoder":
        return encoders.of_transformers(model, given["input_ids"], **without(given, "input_ids"))
    found = model(**given)
    if of == "HookedDualEncoder":
        return {"logits": found.logits_per_image}
    return {"logits": answer(found) if of == "HookedVisionEncoder" else found.logits}


def of_ours(case: Case, model: Any, given: dict[str, Tensor], like: Answers) -> Answers:
    """What our model answers, as far as transformers does."""
    of = kind(case)
    if of == "HookedEncoder":
        return encoders.ours(model, given["input_ids"], like, **without(given, "input_ids"))
    if of == "HookedEncoderDecoder":
        texts = (given["input_ids"], given["decoder_input_ids"])
        return {"logits": model(*texts, **without(given, "input_ids", "decoder_input_ids"))}
    if isinstance(case, VisionCase):
        given = without(given, *case.writer.more(given["input_ids"]))
    return {"logits": model(**given).view_as(like["logits"])}  # images of some towers are one row in transformers


def assert_same_answers(case: Case) -> None:
    """Both models answer the same, and with the same gradients."""
    if kind(case) == "HookedTransformer":
        assert_same_logits(case)
        assert_same_gradients(case)
        return
    given = inputs(case)
    plain = {"input_ids": given["input_ids"]} if kind(case) == "HookedEncoder" else given  # without types of tokens
    with torch.no_grad():
        for some in (plain, given):
            expected = of_transformers(case, copy.deepcopy(reference(case)), some)
            assert_close(of_ours(case, ours(case), some, expected), expected)

    def their_model(dtype: torch.dtype) -> Any:
        model = copy.deepcopy(reference(case)).to(dtype)
        backpropagate(of_transformers(case, model, in_dtype(given, dtype)))
        return model

    def our_model(dtype: torch.dtype) -> Any:
        model, like = copy.deepcopy(ours(case)).to(dtype), copy.deepcopy(reference(case)).to(dtype)
        with torch.no_grad():
            expected = of_transformers(case, like, in_dtype(given, dtype))
        backpropagate(of_ours(case, model, in_dtype(given, dtype), expected))
        return model

    assert_same_gradients_of(our_model, their_model)


def backpropagate(answers: Answers) -> None:
    """Of a random weighing of all numbers, the same for both models."""
    generator = torch.Generator().manual_seed(2)
    sums = [(x * torch.randn(x.shape, generator=generator)).sum() / len(x) for x in answers.values()]
    torch.stack(sums).sum().backward()


def in_dtype(given: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs with pixels of this dtype."""
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}


def without(given: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: x for name, x in given.items() if name not in names}
