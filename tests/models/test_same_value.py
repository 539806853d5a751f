"""`mlp.hook_out`, an on-demand site, is read from `hook_mlp_out` in a bare cache if no norm or factor is between them."""

import pytest

from hooked_lm import HookedTransformer
from tests.close import assert_close
from tests.families import CASES
from tests.families._models import hooked, prompt
from tests.models.toys import ids, toy

OUT, ADDED = "blocks.2.mlp.hook_out", "blocks.2.hook_mlp_out"


def test_the_name_answers_in_a_bare_cache() -> None:
    model = HookedTransformer.from_pretrained("demo")
    _, cache = model.run_with_cache("The capital of France is")
    assert OUT not in list(cache)
    assert OUT in cache
    assert cache[OUT] is cache[ADDED] is cache["mlp.hook_out", 2] is cache["blocks.2.mlp.out.hook_out"]
    _, named = model.run_with_cache("The capital of France is", names_filter=OUT)
    assert_close(named[OUT], cache[OUT])
    assert list(named) == [OUT]
    with pytest.raises(KeyError, match=r"mlp\.hook_out"):
        model.run_with_cache("The capital of France is", names_filter="hook_embed")[1][OUT]


def test_so_does_its_gradient() -> None:
    model = HookedTransformer.from_pretrained("demo")
    _, cache = model.run_with_cache("The capital of France is", return_type="loss", incl_bwd=True)
    assert cache[OUT + "_grad"] is cache[ADDED + "_grad"]


def test_not_where_a_norm_stands_between() -> None:
    _, cache = toy("post_norm").run_with_cache(ids())
    assert ADDED in cache
    assert OUT not in cache
    with pytest.raises(KeyError, match="on demand"):
        cache[OUT]


@pytest.mark.parametrize("family", ["granite", "gemma2", "bert", "t5", "mixtral", "gpt_neox"])
def test_what_answers_is_the_value(family: str) -> None:
    """Also where a multiple is added: then it does not answer."""
    case = next(case for case in CASES if case.family == family)
    model, inputs = hooked(case), prompt(case)
    inputs = (inputs, inputs) if family == "t5" else (inputs,)
    _, bare = model.run_with_cache(*inputs)
    _, full = model.run_with_cache(*inputs, names_filter="*")
    sites = [name for name in full if name.endswith("mlp.hook_out")]
    assert sites
    answered = [site for site in sites if site in bare]
    assert bool(answered) is (family not in ("granite", "gemma2"))
    for site in answered:
        assert_close(bare[site], full[site])
