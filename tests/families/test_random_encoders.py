"""Encoders and encoder-decoders of configs that nobody thought of, compared in all that they give and in gradients.

`HOOKED_LM_DRAWS=50 python -m pytest tests/families/test_random_encoders.py` draws more, from other seeds.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import tests.families.test_encoder_decoders as of_encoder_decoders
import tests.families.test_encoders as of_encoders
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families import family
from hooked_lm.families._shared.reader import HFConfig
from tests.core import marks, thinned
from tests.families import ENCODER_CASES, ENCODER_DECODER_CASES, Case
from tests.families._draw_encoders import drawn
from tests.families._models import hooked

CHECKS: dict[str, tuple[Callable[[Case], None], ...]] = {
    **dict.fromkeys(
        sorted({case.family for case in ENCODER_CASES}),
        (of_encoders.test_everything_that_it_gives, of_encoders.test_gradients),
    ),
    **dict.fromkeys(
        sorted({case.family for case in ENCODER_DECODER_CASES}),
        (of_encoder_decoders.test_logits, of_encoder_decoders.test_gradients),
    ),
}
FEW, MANY = 1, 4
EXTRA = range(1000, 1000 + int(os.environ.get("HOOKED_LM_DRAWS", "0")))
SEEDS = [*range(FEW), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(FEW, MANY)), *EXTRA]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CHECKS])
def test_a_config_drawn_at_random(name: str, seed: int):
    case = drawn(name, seed)
    try:
        for check in CHECKS[name]:
            check(case)
    except AssertionError as error:
        raise AssertionError(f"{case.auto} of {case.n_prompt} tokens, {case.fields}: {error}") from error


@pytest.mark.parametrize("name", ["deberta-v2", "t5"])
def test_draws_are_new_and_repeat(name: str):
    configs = [drawn(name, seed).fields for seed in range(4)]
    assert configs == [drawn(name, seed).fields for seed in range(4)]
    known = [case.fields for case in (*ENCODER_CASES, *ENCODER_DECODER_CASES) if case.family == name]
    assert all(config not in known and configs.count(config) == 1 for config in configs)


@pytest.mark.slow
def test_every_class_of_a_family_is_drawn():
    lines = {case.auto for case in ENCODER_CASES if case.family == "bert"}
    assert {drawn("bert", seed).auto for seed in range(30)} == lines


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("deberta-v2", {"relative_attention": False, "norm_rel_ebd": "layer_norm"}),
        ("bert", {"embedding_size": 12}),
        ("distilbert", {"embedding_size": 12}),
    ],
)
def test_what_draws_have_found_is_refused_by_name(name: str, fields: dict[str, Any]):
    """A norm that nothing passes, and a width of embeddings that transformers overlooks; both were errors in shapes."""
    line = next(case for case in ENCODER_CASES if case.family == name)
    with pytest.raises(ValueError, match=list(fields)[-1]):
        hooked(replace(line, name="refused", fields={**line.fields, **fields}))


# ---- the comparison can fail -----------------------------------------------------------------------------------------


def one_activation_of_heads(tree: Any) -> Any:
    """What overlooks ModernBERT's `classifier_activation`."""
    heads = {
        "mlm_head": tree.mlm_head and replace(tree.mlm_head, act_fn="gelu"),
        "pooler": tree.pooler and replace(tree.pooler, act_fn="gelu"),
    }
    if tree.token_classifier is not None:
        transform = replace(tree.token_classifier.transform, act_fn="gelu")
        heads["token_classifier"] = replace(tree.token_classifier, transform=transform)
    return replace(tree, **heads)


def one_eps(tree: Any) -> Any:
    """What overlooks T5's `layer_norm_epsilon`."""
    norm = RMSNorm.Config(tree.embed.d_model, 0.05)
    sides = {
        side: replace(
            stack,
            ln_final=norm,
            blocks=tuple(
                replace(block, **{name: norm for name in ("ln1", "ln2", "ln3") if hasattr(block, name)})
                for block in stack.blocks
            ),
        )
        for side, stack in (("encoder", tree.encoder), ("decoder", tree.decoder))
    }
    return replace(tree, **sides)


@pytest.mark.parametrize(
    ("name", "field", "misread"),
    thinned(
        [("modernbert", "classifier_activation", one_activation_of_heads), ("t5", "layer_norm_epsilon", one_eps)],
        keep=[("modernbert", "classifier_activation", one_activation_of_heads)],
    ),
)
def test_a_family_that_misreads_a_field_is_noticed(
    name: str, field: str, misread: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
):
    """The lines of the table, all of which have the same value, do not notice it; the draws do, and only by that field."""
    lines = [case for case in (*ENCODER_CASES, *ENCODER_DECODER_CASES) if case.family == name]
    assert len({case.fields.get(field) for case in lines}) == 1
    draws = [drawn(name, seed) for seed in range(12)]
    right, compare = family(name).config, CHECKS[name][0]

    def wrong(hf: HFConfig) -> Any:
        return misread(right(hf))

    def is_noticed(case: Case) -> bool:
        try:
            compare(case)
        except AssertionError as error:
            return "are not close" in str(error)  # the numbers, and nothing else
        return False

    hooked.cache_clear()
    monkeypatch.setattr(family(name), "config", wrong)
    noticed = [case.fields for case in draws if is_noticed(case)]
    hooked.cache_clear()
    assert noticed
    assert all(field in fields for fields in noticed)
