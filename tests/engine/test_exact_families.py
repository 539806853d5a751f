"""In every causal family the engine equals one forward pass per cell at every site, up to rounding."""

import warnings
from itertools import groupby

import pytest
import torch
from torch import Tensor

from hooked_lm.components.experts.moe import AbstractMoE
from hooked_lm.engine.site_info import site_infos
from hooked_lm.patching import Edit, Experiment, Rewrite
from tests.close import GRADIENT, MODEL, assert_close, tolerance
from tests.core import thinned
from tests.engine.exactness import MIXED, Spy, compared, far, kind_of, prompts
from tests.engine.naive import naive
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked

EXACT = tolerance(1.0, 1.0)  # of the largest of the logits
ROUNDING = 1e-6  # of scores in single precision
LARGEST = 3  # times what a site holds is its new value, which enlarges the rounding of what follows
MATTERS = 1e-4  # an edit changes them by more
# the norm after a recurrence enlarges rounding, and a router then decides otherwise: compared in double precision only
ENLARGED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "xlstm")
FIRST = [next(cases) for _, cases in groupby(DECODER_CASES, key=lambda case: case.family)]
QUICK = [case for case in FIRST if case.family in ("gpt2", "llama")]
OTHERS = [case for case in DECODER_CASES if case not in FIRST]


@pytest.mark.parametrize("case", thinned(FIRST, keep=QUICK), ids=str)
def test_every_site_of_a_family(case: Case) -> None:
    """At one position, at all positions, in one head; and the edits change the logits."""
    in_double = case.family in ENLARGED
    found = compared(case, dtype=torch.float64 if in_double else torch.float32)
    over = {kind: of.difference for kind, of in found.items() if of.difference > (ROUNDING if in_double else EXACT)}
    assert not (in_double and over), over
    # other experts are chosen, after some rounding
    chooses = any(isinstance(module, AbstractMoE) for module in hooked(case).modules())
    assert chooses or all(difference < GRADIENT / MODEL * EXACT for difference in over.values()), over
    if over:  # values of other prompts can be large: it has to be rounding, then, of which double precision has none
        exact = compared(case, dtype=torch.float64)
        assert {kind: exact[kind].difference for kind in over if exact[kind].difference > ROUNDING} == {}
    assert {kind: of.effect for kind, of in found.items() if of.effect <= MATTERS} == {}
    assert found[MIXED].effect > 0.01
    assert set(found) == {*map(kind_of, site_infos(hooked(case))), MIXED}


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_configs_of_a_family(case: Case) -> None:
    """In double precision, where all that is left is the rounding of the scores: values of other prompts can be so large that
    the loop itself is off by more than that in single precision."""
    found = compared(case, OTHERS.index(case), thorough=False, dtype=torch.float64)
    assert {kind: of.difference for kind, of in found.items() if of.difference > ROUNDING} == {}
    assert sum(of.effect > MATTERS for of in found.values()) > 0.9 * len(found)


def test_every_family_is_covered() -> None:
    assert len({case.family for case in DECODER_CASES}) == len(FIRST) > 60


# ---- sites without a place -------------------------------------------------------------------------------------------

# a kind of site at which the effect of a change is not localised -> a family that has it
UNKNOWN = {
    "hook_tokens": "gpt2",
    "hook_embed": "llama",
    "hook_pos_embed": "gpt2",
    "embed.ln.hook_normalized": "bloom",
    "embed.ln.hook_scale": "bloom",
    "per_layer.hook_out": "gemma4_text",
    "per_layer.norm.hook_normalized": "gemma4_text",
    "blocks.3.attn.hook_rot_k": "gemma4_text",
    "blocks.4.attn.hook_v": "gemma4_text",
    "blocks.1.mlp.experts.0.hook_in": "mixtral",
    "blocks.0.mlp.experts.1.hook_pre": "mixtral",
    "blocks.0.mlp.experts.1.hook_post": "gpt_oss",
    "blocks.1.mlp.experts.2.hook_out": "olmoe",
}


def first_with(site: str) -> Case:
    return next(case for case in DECODER_CASES if case.family == UNKNOWN[site] and site in hooked(case).all_points())


class Unknown:
    """A case, edits of an unsupported site, and edits of others."""

    def __init__(self, site: str) -> None:
        case = first_with(site)
        self.model, (self.tokens, others) = hooked(case), prompts(case)
        self.dims = self.model.hook_dict[site].dims
        _, cache = self.model.run_with_cache(others, names_filter=[site, "blocks.0.hook_resid_pre"])
        stream = 2 * cache["blocks.0.hook_resid_pre"]
        self.known = [[Edit("blocks.0.hook_resid_pre", stream, (pos,))] for pos in range(3)]
        if self.dims[0] == "routed":  # tokens as they come: other prompts have others
            self.unknown = [[Edit(site, lambda x: 0.5 * x)], [Edit(site, torch.zeros(1, 1))], [Edit(site, torch.neg)]]
        else:
            value = (
                LARGEST * cache[site] if cache[site].is_floating_point() else cache[site]
            )  # positions are those of all prompts
            self.unknown = [[Edit(site, value, (pos,))] for pos in range(1, 4)]

    @torch.no_grad()
    def check(self, cells: list[list[Edit]], base: list[Edit], n_whole: int) -> None:
        """All logits, and one warning for this many cells."""
        spy = Spy()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            experiment = Experiment(self.model, self.tokens, [spy], base=base)
            assert_close(spy.seen, naive(self.model, self.tokens, base))
            for index, _ in experiment.run(cells, progress=False):
                expected = naive(self.model, self.tokens, cells[index], base)
                assert_close(spy.seen, expected, LARGEST * MODEL)
                assert far(expected, naive(self.model, self.tokens, base)) > MATTERS
        assert len(caught) == (n_whole > 0)
        assert experiment.cost.forwards == 1 + n_whole
        assert all(f"{n_whole} cells run as whole forward passes" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("site", UNKNOWN)
def test_unsupported_sites_run_as_whole_passes(site: str) -> None:
    there = Unknown(site)
    assert site not in site_infos(there.model)
    there.check([*there.known, *there.unknown, [*there.known[0], *there.unknown[1]]], [], 4)


@pytest.mark.parametrize("site", UNKNOWN)
def test_unsupported_edits_of_the_base_run(site: str) -> None:
    """Edits before the blocks are part of the streams of the base run; inside blocks each row would have to repeat them."""
    there = Unknown(site)
    there.check(there.known, there.unknown[0], len(there.known) if site.startswith("blocks.") else 0)


def test_a_function_of_a_whole_value_at_an_expert() -> None:
    there = Unknown("blocks.0.mlp.experts.1.hook_pre")
    site = "blocks.0.mlp.experts.{}.hook_post"
    there.check([[Rewrite(site.format(expert), lambda x: -x)] for expert in range(3)], [], 3)


def test_other_names_of_a_site() -> None:
    case = FIRST[0]
    model, (tokens, others) = hooked(case), prompts(case)
    value = model.run_with_cache(others)[1]["resid_pre", 1]

    def last(logits: Tensor) -> Tensor:
        return logits[:, -1, 3]

    def scores(site: str, base: str) -> list[Tensor]:
        cells = [[Edit(site, value, (pos,))] for pos in range(4)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            experiment = Experiment(model, tokens, [last], base=[Edit(base, value, (2,))])
            return [scores for _, scores in sorted(experiment.run(cells, progress=False))]

    plain = scores("blocks.1.hook_resid_pre", "blocks.1.hook_resid_pre")
    assert_close(scores("blocks.1.hook_in", "blocks.1.hook_in"), plain)
