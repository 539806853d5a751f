"""Weights in both libraries: properties of models, factored matrices, and each way to fold."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from originals import (
    DECODERS,
    NAMES,
    NOT_FOLDED,
    TOYS,
    assert_close,
    distance,
    hf_model,
    original,
    pair,
    transformer_lens,
)
from torch import Tensor

import hooked_lm
from hooked_lm import pretrained
from tests.close import GRADIENT

CAUSAL = [*DECODERS, *TOYS]
ATTN_ONLY = [name for name in TOYS if name != "toy-solu"]
PROPERTIES = ["W_U", "b_U", "W_E", "W_pos", "W_E_pos", "W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O"]
PROPERTIES += ["W_in", "W_gate", "W_out", "b_in", "b_out"]


def theirs_or_none(model: Any, name: str) -> Any:
    """A property; None where the model has no such weights, or none that can be stacked, which theirs says in several ways."""
    try:
        return getattr(model, name)
    except (AttributeError, ValueError, NotImplementedError, TypeError):
        return None


@pytest.mark.parametrize("name", NAMES)
def test_properties(name: str):
    """Where one has none, the other has none. Gemma's embedding stays as the checkpoint has it, with its factor apart."""
    both, found = pair(name), 0
    for key in PROPERTIES:
        ours, theirs = getattr(both.ours, key, None), theirs_or_none(both.theirs, key)
        assert (ours is None) == (theirs is None), key
        if ours is not None:
            factor = both.ours.cfg.d_model**0.5 if (name, key) == ("gemma2", "W_E") else 1.0
            assert_close(ours * factor, theirs, key)
            found += 1
    assert found >= 10
    assert labels(both.ours) == labels(both.theirs)
    for circuit in ("QK", "OV"):
        assert_close(getattr(both.ours, circuit).AB, getattr(both.theirs, circuit).AB, circuit)


def labels(model: Any) -> list[str]:
    """A method of decoders, a property of the others."""
    return model.all_head_labels() if callable(model.all_head_labels) else model.all_head_labels


@pytest.mark.parametrize("name", CAUSAL)
def test_composition_scores(name: str):
    both = pair(name)
    for mode in "QKV":
        ours, theirs = (model.all_composition_scores(mode) for model in both.both)
        assert_close(ours, theirs, mode)
        assert ours[0, :, 1].min() > 0


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "gemma2"])
def test_accumulated_biases(name: str):
    """A parallel block's MLP reads what the block reads, so its attention's bias is not in it: theirs counts it. Without MLPs
    theirs fails unless it is told to leave them out."""
    both = pair(name)
    for layer, mlp_input in ((0, False), (0, True), (1, False), (1, True), (2, False)):
        for biases in (False, True):
            ours = both.ours.accumulated_bias(layer, mlp_input, include_mlp_biases=biases)
            if biases and layer and (name in ATTN_ONLY or name == "mixtral"):
                with pytest.raises(AttributeError):
                    both.theirs.accumulated_bias(layer, mlp_input, include_mlp_biases=biases)
                continue
            theirs = both.theirs.accumulated_bias(layer, mlp_input, include_mlp_biases=biases)
            too_much = both.ours.b_O[layer] if name == "neox" and mlp_input else 0.0
            assert_close(ours + too_much, theirs, (layer, mlp_input, biases))


# ---- factored matrices -----------------------------------------------------------------------------------------------


def factors(lead_a: tuple[int, ...], lead_b: tuple[int, ...]) -> list[Any]:
    """The same product in both libraries."""
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(*lead_a, 7, 3, generator=generator)
    b = torch.randn(*lead_b, 3, 6, generator=generator)
    return [library.FactoredMatrix(a, b) for library in (hooked_lm, transformer_lens)]


METHODS: dict[str, Any] = {
    "AB": lambda m: m.AB,
    "BA": lambda m: (m @ torch.eye(6, 7)).BA,
    "T": lambda m: m.T.AB,
    "S": lambda m: m.S,
    "svd": lambda m: torch.einsum("...ik,...k,...jk->...ij", *m.svd()),
    "U": lambda m: m.U.abs(),
    "V": lambda m: m.V.abs(),
    "Vh": lambda m: m.Vh.abs(),
    "norm": lambda m: m.norm(),
    "make_even": lambda m: m.make_even().AB,
    "make_even.A": lambda m: m.make_even().A.abs(),
    "make_even.B": lambda m: m.make_even().B.abs(),
    "collapse_l": lambda m: m.collapse_l().abs(),
    "collapse_r": lambda m: m.collapse_r().abs(),
    "get_corner": lambda m: m.get_corner(2),
    "unsqueeze": lambda m: m.unsqueeze(0).AB,
    "pair": lambda m: m.pair,
    "sizes": lambda m: (tuple(m.shape), m.ndim, m.ldim, m.mdim, m.rdim, m.has_leading_dims),
    "times a matrix": lambda m: (m @ torch.eye(6)[:, :2]).AB,
    "a matrix times": lambda m: (torch.eye(7)[:2] @ m).AB,
    "times a vector": lambda m: m @ torch.arange(6.0),
    "a vector times": lambda m: torch.arange(7.0) @ m,
    "times another": lambda m: (m @ m.T).AB,
    "times a wider one": lambda m: (m @ type(m)(torch.ones(6, 9), torch.ones(9, 2))).AB,
    "scaled": lambda m: (m * 2.5).AB,
    "scaled from the left": lambda m: (torch.tensor(2.5) * m).AB,
    "eigenvalues": lambda m: sorted_eigenvalues((m @ torch.eye(6, 7)).eigenvalues),
}


def sorted_eigenvalues(values: Tensor) -> Tensor:
    """In an order of their own: by absolute value."""
    return values.abs().sort(-1).values


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("leads", [((), ()), ((2,), (2,)), ((2, 1), (1, 3))])
def test_factored_matrices(method: str, leads: tuple[tuple[int, ...], tuple[int, ...]]):
    ours, theirs = (METHODS[method](matrix) for matrix in factors(*leads))
    assert_close(ours, theirs, method)


INDICES: list[tuple[tuple[int, ...], Any]] = [
    *(((), index) for index in (2, -1, slice(2, 5), (2, 3), (slice(2, 5), -1), (slice(None), slice(1, 4)))),
    *(((2, 3), index) for index in (0, -1, slice(1), (0, 2), (None, 1), (0, 2, 3), (0, 2, 3, 4), (0, 2, 3, -1))),
    *(((2, 3), index) for index in ((0, slice(None), slice(2)), (1, 0, slice(None), slice(1, 4)))),
]


@pytest.mark.parametrize(("lead", "index"), INDICES)
def test_indices_of_factored_matrices(lead: tuple[int, ...], index: Any):
    """Single rows and columns stay as axes of one."""
    ours, theirs = (matrix[index] for matrix in factors(lead, lead))
    assert_close((tuple(ours.shape), ours.AB), (tuple(theirs.shape), theirs.AB), index)


@pytest.mark.parametrize("index", [(..., slice(2, 5), slice(None)), (..., slice(None), slice(1, 4))])
def test_an_ellipsis_among_the_indices(index: Any):
    """Theirs takes it for one axis, and fails or gives other entries where it stands for two or none."""
    for lead in ((), (2, 3)):
        ours, theirs = factors(lead, lead)
        assert_close(ours[index].AB, ours.AB[index])
        try:
            found = theirs[index].AB
        except (ValueError, AssertionError, RuntimeError, IndexError):
            continue
        assert distance(found, ours.AB[index]) > 0.1


def test_composition_of_heads():
    both = pair("gpt2")
    utils = (hooked_lm.utils, transformer_lens.utilities)
    for broadcast in (True, False):
        ours, theirs = (
            u.composition_scores(model.OV[0], model.QK[1], broadcast_dims=broadcast)
            for u, model in zip(utils, both.both, strict=True)
        )
        assert_close(ours, theirs, broadcast)


# ---- folding ---------------------------------------------------------------------------------------------------------

BUFFERS = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos", ".alibi")


@cache
def folded(name: str, option: str) -> tuple[Any, Any]:
    """Ours and theirs with one option on, and nothing else."""
    if name not in TOYS:
        return pretrained.from_pretrained_no_processing("tiny", hf_model=hf_model(name), **{option: True}), original(
            name, **{option: True}
        )
    state = {key: value.clone() for key, value in pair(name).theirs.state_dict().items()}
    models = [library.HookedTransformer(TOYS[name]) for library in (hooked_lm, transformer_lens)]
    for model in models:
        model.load_and_process_state_dict(dict(state), **{**NOT_FOLDED, option: True})
    return models[0], models[1]


def parameters(model: Any) -> dict[str, Tensor]:
    """Theirs in our names and layouts; tables are left out, and biases of zeros that only theirs has."""
    found = {}
    for key, value in model.state_dict().items():
        module, _, leaf = key.rpartition(".")
        if key.endswith(BUFFERS):
            continue
        if leaf == "weight":  # of experts and their router
            key, value = module.replace("mlp.W_gate", "mlp.W_router"), value.T
        found[key.replace("._", ".")] = value
    return found


SHORTFORMER = {("toy-shortformer", option) for option in ("fold_ln", "center_writing_weights")}
SOFT_CAPPED = {("gemma2", "center_unembed")}
SIMPLE = [option for option in NOT_FOLDED if option != "refactor_factored_attn_matrices"]
EACH = [(name, option) for name in CAUSAL for option in SIMPLE if (name, option) not in SHORTFORMER | SOFT_CAPPED]


@pytest.mark.parametrize(("name", "option"), EACH)
def test_each_way_to_fold(name: str, option: str):
    """The same parameters and the same logits; centring the unembedding shifts the logits of a position by one number."""
    both, (ours, theirs) = pair(name), folded(name, option)
    own, their = parameters(ours), parameters(theirs)
    for key, value in their.items():
        if key not in own:
            assert not value.any(), f"{key} is missing"  # a bias that the family does not have
        elif name != "gemma2" or not key.endswith((".w", "embed.W_E")):
            assert_close(own[key], value, key)
    if (
        name == "gemma2"
    ):  # weights stay as the checkpoint has them: norms count from 1, the embedding has its factor apart
        assert_close(ours.W_E * ours.cfg.d_model**0.5, theirs.W_E)
        own = {k: v + 1 for k, v in own.items() if k.endswith("_post.w") or (k.endswith(".w") and option != "fold_ln")}
        for key, value in own.items():
            assert_close(value, their[key], key)
    with torch.no_grad():
        found, expected, before = (model(*both.inputs) for model in (ours, theirs, both.ours))
    assert_close(found, expected)
    if option == "center_unembed":
        assert_close(found.log_softmax(-1), before.log_softmax(-1))
        assert distance(found, before) > 0.1
    else:
        assert_close(found, before)


@pytest.mark.parametrize(("name", "option"), sorted(SHORTFORMER | SOFT_CAPPED))
def test_folding_that_would_change_the_model(name: str, option: str):
    """Their `load_and_process_state_dict` folds the norms of a shortformer past its positions, centres its position embedding,
    and centres the unembedding below a soft cap: what the model predicts changes. Ours leaves these as they are."""
    both, (ours, theirs) = pair(name), folded(name, option)
    with torch.no_grad():
        found, wrong, before = (m(*both.inputs).log_softmax(-1) for m in (ours, theirs, both.theirs))
    assert_close(found, before)
    assert distance(wrong, before) > 0.1


@pytest.mark.parametrize("name", ["gpt2", *TOYS])
def test_factors_made_even(name: str):
    """The same up to the sign of each direction, which a decomposition leaves open."""
    both, (ours, theirs) = pair(name), folded(name, "refactor_factored_attn_matrices")
    own, their = parameters(ours), parameters(theirs)
    for key, value in their.items():
        if key not in own:
            assert not value.any(), f"{key} is missing"
            continue
        is_free = key.rpartition(".")[2] in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K")
        assert_close(own[key].abs() if is_free else own[key], value.abs() if is_free else value, key, GRADIENT)
    for circuit in ("QK", "OV"):
        assert_close(getattr(ours, circuit).AB, getattr(theirs, circuit).AB, circuit)
    with torch.no_grad():
        assert_close(ours(*both.inputs), theirs(*both.inputs))
        assert_close(ours(*both.inputs), both.theirs(*both.inputs))


@pytest.mark.parametrize("name", ["neox", "llama"])
def test_rotary_queries_and_keys_are_not_refactored(name: str):
    """Both refuse."""
    with pytest.raises(AssertionError):
        original(name, refactor_factored_attn_matrices=True)
    with pytest.raises(ValueError, match="this model rotates"):
        pretrained.from_pretrained_no_processing("tiny", hf_model=hf_model(name), refactor_factored_attn_matrices=True)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_all_of_it(name: str):
    """As `from_pretrained` folds by default; and what Hugging Face's model predicts."""
    options = dict.fromkeys(SIMPLE, True) | ({"center_unembed": False} if name == "gemma2" else {})
    both, theirs = pair(name), original(name, **options)
    ours = pretrained.from_pretrained("tiny", hf_model=hf_model(name))
    with torch.no_grad():
        found, expected = ours(*both.inputs), theirs(*both.inputs)
        reference = F.log_softmax(hf_model(name)(*both.inputs).logits, -1)
    assert_close(found, expected)
    assert_close(found.log_softmax(-1), reference)
    assert ours.cfg.normalization_type == theirs.cfg.normalization_type


@pytest.mark.parametrize("name", [name for name in CAUSAL if name not in ("mixtral", "gemma2")])
def test_state_dicts_go_both_ways(name: str):
    """Theirs into ours and ours into theirs, where grouped keys are called `_W_K`; mixtures and Gemma's norms have layouts
    of their own."""
    both = pair(name)
    ours = hooked_lm.HookedTransformer(both.ours.cfg)
    ours.load_and_process_state_dict(both.theirs.state_dict(), **NOT_FOLDED)
    theirs = transformer_lens.HookedTransformer(both.theirs.cfg)
    own = dict(both.ours.state_dict())
    grouped = both.ours.cfg.n_key_value_heads is not None
    leaves = ("W_K", "W_V", "b_K", "b_V") if grouped else ()
    renamed = {k.replace("attn.", "attn._") if k.rpartition(".")[2] in leaves else k: v for k, v in own.items()}
    assert not theirs.load_state_dict(renamed, strict=False).unexpected_keys
    with torch.no_grad():
        assert_close(ours(*both.inputs), both.theirs(*both.inputs))
        assert_close(theirs(*both.inputs), both.ours(*both.inputs))
