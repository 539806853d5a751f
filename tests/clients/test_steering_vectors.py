"""steering-vectors: it finds layers by the names of modules, reads them and writes into them with PyTorch's own hooks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from steering_vectors import (
    SteeringVector,
    SteeringVectorTrainingSample,
    ablation_operator,
    ablation_then_addition_operator,
    addition_operator,
    get_num_matching_layers,
    guess_and_enhance_layer_config,
    logistic_aggregator,
    mean_aggregator,
    pca_aggregator,
    record_activations,
    train_steering_vector,
)
from torch import Tensor

from hooked_lm import HookedTransformer
from hooked_lm.interventions import steering_vectors
from tests.close import assert_apart, assert_close
from tests.families import DECODER_CASES, Case
from tests.families._models import hooked, prompt

PEOPLE = [("Mary", "John"), ("Anna", "Tom"), ("Emma", "Paul"), ("Lucy", "Mark"), ("Kate", "James")]
TEXTS = ["{} was ill, so", "{} slept late because", "The next day, {} and a friend went home because"]
PAIRS = [tuple(text.format(name) for name in names) for names in PEOPLE for text in TEXTS]
NAMES = {"decoder_block": "blocks.{num}", "self_attn": "blocks.{num}.attn", "mlp": "blocks.{num}.mlp"}
SITES = {"decoder_block": "resid_post", "self_attn": "attn_out", "mlp": "mlp_out"}
FAMILIES = ["gpt2", "llama", "gpt_neox", "mixtral", "gemma2", "mamba"]


@pytest.fixture(scope="module")
def loaded() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


@pytest.fixture
def model(loaded: HookedTransformer) -> Iterator[HookedTransformer]:
    yield loaded
    assert not any(module._forward_hooks for module in loaded.modules()), "a hook was left behind"


def ids(model: HookedTransformer, text: str) -> Tensor:
    return torch.tensor([model.tokenizer(text).input_ids])


@pytest.fixture(scope="module")
def sides(loaded: HookedTransformer) -> dict[tuple[str, int], Tensor]:
    """(site, layer) -> what our own cache has at the last token, each text by itself: [side, pair, d_model]."""
    found: dict[tuple[str, int], list[Tensor]] = {}
    for side in zip(*PAIRS, strict=True):
        for text in side:
            with torch.no_grad():
                _, cache = loaded.run_with_cache(ids(loaded, text))
            for site in SITES.values():
                for layer in range(loaded.cfg.n_layers):
                    found.setdefault((site, layer), []).append(cache[site, layer][0, -1])
    return {name: torch.stack(values).unflatten(0, (2, len(PAIRS))) for name, values in found.items()}


def test_layers_are_found_by_their_names(model: HookedTransformer) -> None:
    assert guess_and_enhance_layer_config(model) == NAMES
    assert get_num_matching_layers(model, "blocks.{num}") == model.cfg.n_layers


@pytest.mark.parametrize("layer_type", NAMES)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_vector_is_trained_from_pairs(
    model: HookedTransformer, sides: dict[tuple[str, int], Tensor], layer_type: Any, batch_size: int
) -> None:
    """Texts of a batch differ in length: padding has to be left out by the mask that the tokenizer gives."""
    vector = train_steering_vector(model, model.tokenizer, PAIRS, layer_type=layer_type, batch_size=batch_size)
    assert list(vector.layer_activations) == list(range(model.cfg.n_layers))
    for layer, found in vector.layer_activations.items():
        up, down = sides[SITES[layer_type], layer]
        assert_close(found, (up - down).mean(0))
        assert_apart(found, (up - down)[0])


@pytest.mark.filterwarnings("ignore:Creating a tensor from a list of numpy:UserWarning:steering_vectors.aggregators")
def test_the_other_ways_to_a_direction(model: HookedTransformer, sides: dict[tuple[str, int], Tensor]) -> None:
    up, down = sides["resid_post", 1]
    pca = train_steering_vector(model, model.tokenizer, PAIRS, layers=[1], aggregator=pca_aggregator())
    _, _, axes = torch.linalg.svd(up - down)
    found = pca.layer_activations[1]
    assert_close(found.abs(), axes[0].abs())
    probe = train_steering_vector(model, model.tokenizer, PAIRS, layers=[1], aggregator=logistic_aggregator())
    assert ((up - down) @ probe.layer_activations[1] > 0).float().mean() > 0.9


def test_a_position_of_a_sample_is_read_there(model: HookedTransformer) -> None:
    up, down = PAIRS[0]
    sample = SteeringVectorTrainingSample(up, down, read_positive_token_index=1, read_negative_token_index=0)
    vector = train_steering_vector(model, model.tokenizer, [sample], layers=[2])
    _, ups = model.run_with_cache(ids(model, up))
    _, downs = model.run_with_cache(ids(model, down))
    expected = ups["resid_post", 2][0, 1] - downs["resid_post", 2][0, 0]
    assert_close(vector.layer_activations[2], expected)


@pytest.mark.parametrize("method", ["mean", "pca"])
def test_ours_finds_the_same_direction(model: HookedTransformer, method: str) -> None:
    """Ours holds some pairs out, theirs takes all: every pair is given twice, so that both learn from the same."""
    same = [(up, down) for up, down in PAIRS if ids(model, up).shape == ids(model, down).shape]
    assert len(same) > 5
    one = same[0], same[0], same[0], same[0]
    up, down = (torch.cat([ids(model, pair[side]) for pair in one]) for side in (0, 1))
    aggregator = {"mean": mean_aggregator, "pca": pca_aggregator}[method]()
    theirs = train_steering_vector(model, model.tokenizer, one, aggregator=aggregator).layer_activations
    ours = steering_vectors(model, up, down, method=method)
    for layer in ours.layers:
        found, expected = ours.direction(layer, unit=True), theirs[layer] / theirs[layer].norm()
        assert_close(found, expected)


@pytest.mark.parametrize("operator", [None, addition_operator, ablation_operator, ablation_then_addition_operator])
@pytest.mark.parametrize("first", [0, 2])
def test_it_is_applied(model: HookedTransformer, operator: Any, first: int) -> None:
    vector = train_steering_vector(model, model.tokenizer, PAIRS, layers=[1])
    direction = 2 * vector.layer_activations[1]
    tokens = ids(model, "Lucy went home because")
    plain = model(tokens)

    def by_hand(value: Tensor, hook: Any) -> Tensor:
        unit = direction / direction.norm()
        erased = (value @ unit)[..., None] * unit if operator not in (None, addition_operator) else 0.0
        added = direction if operator is not ablation_operator else 0.0
        changed = value.clone()
        changed[:, first:] = (value - erased + added)[:, first:]
        return changed

    with vector.apply(model, multiplier=2.0, operator=operator and operator(), min_token_index=first):
        steered = model(tokens)
    expected = model.run_with_hooks(tokens, fwd_hooks=[("blocks.1.hook_resid_post", by_hand)])
    assert_close(steered, expected)
    assert_apart(steered, plain)
    assert_close(model(tokens), plain)


def test_a_mask_of_tokens(model: HookedTransformer) -> None:
    vector = train_steering_vector(model, model.tokenizer, PAIRS, layers=[1])
    tokens = ids(model, "Lucy went home because")
    mask = torch.arange(tokens.shape[1]) % 2
    handle = vector.patch_activations(model, token_indices=mask)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    handle.remove()
    _, plain = model.run_with_cache(tokens)
    expected = mask[:, None] * vector.layer_activations[1]
    assert_close((cache["resid_pre", 2] - plain["resid_pre", 2])[0], expected)
    assert torch.equal(cache["resid_pre", 1], plain["resid_pre", 1])


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
def test_generation_is_steered(model: HookedTransformer, use_past_kv_cache: bool) -> None:
    vector = train_steering_vector(model, model.tokenizer, PAIRS, layers=[1])
    text, options = "Lucy went home because", {"do_sample": False, "verbose": False}
    plain = model.generate(text, 6, use_past_kv_cache=use_past_kv_cache, **options)
    with vector.apply(model, multiplier=-2.0):
        steered = model.generate(text, 6, use_past_kv_cache=use_past_kv_cache, **options)
    added = -2.0 * vector.layer_activations[1]
    with model.hooks([("blocks.1.hook_resid_post", lambda value, hook: value + added)]):
        expected = model.generate(text, 6, use_past_kv_cache=use_past_kv_cache, **options)
    assert steered == expected != plain
    assert " he " in steered


def test_a_vector_of_ours_in_their_class(model: HookedTransformer) -> None:
    women, men = (list(side) for side in zip(*PAIRS, strict=True))
    ours = steering_vectors(model, women, men, layers=[1, 2])
    theirs = SteeringVector(dict(ours.directions))
    tokens = model.to_tokens("Lucy went home because")
    expected = model.run_with_hooks(tokens, fwd_hooks=ours.hooks(-1.5, layers="each"))
    with theirs.apply(model, multiplier=-1.5):
        found = model(tokens)
    assert_close(found, expected)
    assert_apart(found, model(tokens))


def of_family(name: str) -> Case:
    return next(case for case in DECODER_CASES if case.family == name)


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_recorded(family: str) -> None:
    """On models of several kinds; the outputs of whole sublayers are what is added to the stream where no norm comes behind."""
    case = of_family(family)
    model, tokens = hooked(case), prompt(case)
    _, cache = model.run_with_cache(tokens)
    config = guess_and_enhance_layer_config(model)
    kinds = [kind for kind in SITES if kind in config]
    assert kinds[0] == "decoder_block"
    assert config[kinds[0]] == "blocks.{num}"
    for kind in kinds if family != "gemma2" else kinds[:1]:
        with record_activations(model, layer_type=kind) as found:
            model(input_ids=tokens)
        assert list(found) == list(range(model.cfg.n_layers))
        for layer, [value] in found.items():
            assert_close(value, cache[SITES[kind], layer])


def test_norms_need_to_be_named() -> None:
    """Their patterns know `ln_1` and `input_layernorm`; the layer's name is given, as for any model with names of its own."""
    model = hooked(of_family("gpt2"))
    tokens = prompt(of_family("gpt2"))
    unnamed = record_activations(model, layer_type="input_layernorm")
    with pytest.raises(ValueError, match="layer_type input_layernorm not provided"), unnamed:
        pass
    with record_activations(model, "input_layernorm", {"input_layernorm": "blocks.{num}.ln1"}) as found:
        _, cache = model.run_with_cache(tokens)
    norm = model.blocks[1].ln1
    assert_close(found[1][0], cache["normalized", 1, "ln1"] * norm.w + norm.b)


def test_in_a_cache_of_a_steered_run_values_are_those_that_the_run_had(model: HookedTransformer) -> None:
    """Their hook writes into the output of a block in place."""
    vector = SteeringVector({1: torch.full((model.cfg.d_model,), 0.5)})
    tokens = ids(model, "Lucy went home because")
    _, plain = model.run_with_cache(tokens)
    with vector.apply(model):
        _, cache = model.run_with_cache(tokens)
    assert_close(cache["resid_pre", 2], plain["resid_pre", 2] + 0.5)
