"""In every family of decoders the terms of a score sum to it, or its attention is refused by name."""

from itertools import groupby

import pytest

from hooked_lm.analysis import qk_attribution
from hooked_lm.components.blocks.wiring import has_part
from tests.close import GRADIENT, assert_close
from tests.core import thinned
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked, prompt

FIRST = [next(cases) for _, cases in groupby(DECODER_CASES, key=lambda case: case.family)]
QUICK = [case for case in FIRST if case.family in ("gemma2", "deepseek_v3")]
NO_SUM = "the sum of what sublayers|no stream is the sum of what sublayers"
CLIP = "clips its queries and keys"
OTHER = "in a way that is not known|adds something to its scores|does more than divide"
CLIPPED = ("olmo-full-clipped", "mpt-untied-clipped-scaled", "dbrx-grouped-clipped", "dbrx-full-not-renormalised-gelu")
REFUSED = {
    **dict.fromkeys((*CLIPPED, "olmoe-clipped-after-norms", "olmoe-loosely-clipped-biased"), CLIP),
    **dict.fromkeys(("axk2", "jetmoe", "doge", "zaya"), OTHER),
    **dict.fromkeys(("openai-gpt", "opt-post-norm-projected", "bloom-normed-residuals"), NO_SUM),
    **dict.fromkeys(("minimax-one-to-one-weighted", "minimax-one-expert-each-of-three-gelu-linear-rotary"), NO_SUM),
    **dict.fromkeys(("gemma3n_text", "hy_v4", "hy_v4_vl_text", "deepseek_v4"), NO_SUM),
}  # fmt: skip


def refusal(case: Case) -> str | None:
    return REFUSED.get(str(case)) or REFUSED.get(case.family)


@pytest.mark.every_parameter
@pytest.mark.parametrize("case", thinned(DECODER_CASES, keep=QUICK), ids=str)
def test_the_terms_of_each_family(case: Case):
    """Rotary on some features, grouped heads, latents, soft caps, norms of queries and keys, biases of positions, windows: all
    sum to the scores, or are refused by name. The first layer reads the embeddings, so only its attention decides there."""
    model = hooked(case)
    if not (layers := [i for i, block in enumerate(model.blocks) if has_part(block, "attn")]):
        return
    layer = layers[-1]
    n_heads = model.blocks[layer].attn.cfg.n_heads
    heads = [f"L{layer}H{head}" for head in sorted({1 % n_heads, n_heads - 1})]
    if (why := refusal(case)) is not None:
        with pytest.raises(ValueError, match=why):
            qk_attribution(model, prompt(case), heads, control=None)
        return
    for by in ("head", "layer"):
        found = qk_attribution(model, prompt(case), heads, by=by, control=None)
        assert found.scores is not None
        spread = max(
            float(found.values.square().nansum((1, 2)).sqrt().max()), float(found.scores.abs().nan_to_num().max())
        )
        assert_close(found.values.sum((1, 2)), found.scores, GRADIENT, scale=spread)


def test_what_is_refused_is_listed():
    """By line or by family, and nothing else."""
    known = {str(case) for case in DECODER_CASES} | {case.family for case in DECODER_CASES}
    assert set(REFUSED) <= known
