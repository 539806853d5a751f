"""`groups` has one meaning in every function that patches, attributes or evaluates: a label for each prompt."""

from collections.abc import Callable

import pytest
import torch

from hooked_lm import HookedTransformer, HookedTransformerConfig, patching
from hooked_lm.analysis import (
    attribute,
    attribute_nodes,
    direct_logit_attribution,
    evaluate,
    metrics,
    patch_edges,
    source_attribution,
)
from hooked_lm.interventions import ZeroAblate
from hooked_lm.results import Scores

N_PROMPTS = 4
LABELS = ("store", "store", "school", "school")
METRIC = metrics.logit_difference(3, 5)


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_head": 8, "n_ctx": 8, "d_vocab": 20, "d_mlp": 32}
    return HookedTransformer(HookedTransformerConfig(**sizes, act_fn="gelu", seed=0))


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(20, (N_PROMPTS, 5), generator=torch.Generator().manual_seed(seed))


Function = Callable[..., Scores]
FUNCTIONS: dict[str, Function] = {
    "sweep": lambda model, **g: patching.sweep(model, tokens(), tokens(1), metric=METRIC, layers=[0], **g),
    "run_each": lambda model, **g: patching.run_each(model, tokens(), [ZeroAblate("z", 1)], metric=METRIC, **g),
    "ablate": lambda model, **g: patching.ablate(model, tokens(), metric=METRIC, **g),
    "attention_knockout": lambda model, **g: patching.attention_knockout(
        model, tokens(), {"one": (1, -1)}, metric=METRIC, **g
    ),
    "path_patch": lambda model, **g: patching.path_patch(model, tokens(), tokens(1), "logits", metric=METRIC, **g),
    "head_to_head": lambda model, **g: patching.head_to_head(model, tokens(), tokens(1), metric=METRIC, **g),
    "attribute": lambda model, **g: attribute(model, tokens(), tokens(1), metric=METRIC, sites="z", check=False, **g),
    "attribute_nodes": lambda model, **g: attribute_nodes(model, tokens(), tokens(1), metric=METRIC, check=2, **g)["z"],
    "patch_edges": lambda model, **g: patch_edges(model, tokens(), tokens(1), metric=METRIC, **g),
    "evaluate": lambda model, **g: evaluate(model, tokens(), METRIC, **g),
    "direct_logit_attribution": lambda model, **g: direct_logit_attribution(model, tokens(), 3, **g),
    "source_attribution": lambda model, **g: source_attribution(model, tokens(), 3, **g),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_groups_are_labels_of_prompts(name: str, model: HookedTransformer) -> None:
    found = FUNCTIONS[name](model, groups=list(LABELS))
    assert found.groups == LABELS
    assert FUNCTIONS[name](model).groups is None
    with pytest.raises(ValueError, match="groups has 3 labels, and there are 4 prompts: give the label of each prompt"):
        FUNCTIONS[name](model, groups=["a", "b", "c"])


def test_one_number_for_all_prompts_has_no_groups(model: HookedTransformer) -> None:
    with pytest.raises(ValueError, match="groups has 4 labels, and there is one number for all prompts"):
        patching.sweep(model, tokens(), tokens(1), metric=lambda logits: METRIC(logits).mean(), groups=LABELS)


def test_samples_of_noise_are_no_prompts(model: HookedTransformer) -> None:
    """Intervals of a causal trace count prompts, or their groups, and not the samples; those of one prompt count samples."""
    common = {"metric": METRIC, "sites": "resid_post", "n_samples": 3, "positions": [1]}
    found = patching.causal_trace(model, tokens(), [1], **common)
    assert found.groups == tuple(range(N_PROMPTS)) * 3
    assert patching.causal_trace(model, tokens(), [1], groups=LABELS, **common).groups == LABELS * 3
    one = patching.causal_trace(model, tokens()[:1], [1], **common)
    assert one.groups is None
    assert torch.stack(one.interval()).isfinite().all()


def test_an_interrupted_sweep_resumes_with_the_groups_of_the_call(model: HookedTransformer, tmp_path) -> None:
    common = {"metric": METRIC, "layers": [0], "resume_file": tmp_path / "sweep"}
    first = patching.sweep(model, tokens(), tokens(1), **common)
    again = patching.sweep(model, tokens(), tokens(1), groups=LABELS, **common)
    assert first.groups is None
    assert again.groups == LABELS
    assert torch.equal(first.values, again.values)
