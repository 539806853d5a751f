"""Every method of an `ActivationCache`, in both libraries, over a grid of arguments; where they differ, who is right."""

import itertools
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from originals import DECODERS, NOT_FOLDED, TOYS, assert_close, distance, hf_model, original, pair, transformer_lens
from torch import Tensor

import hooked_lm
from hooked_lm import pretrained
from tests.close import is_close

CAUSAL = [name for name in [*DECODERS, *TOYS] if name != "qwen2"]  # which is llama here, but for biases
ATTN_ONLY = [name for name in TOYS if name != "toy-solu"]
N_LAYERS, BATCH, POS, D_MODEL = 2, 2, 9, 32
ONE = torch.randn(D_MODEL, generator=torch.Generator().manual_seed(6))
SOME = torch.randn(D_MODEL, 3, generator=torch.Generator().manual_seed(7))
ENDS, PARTS, NO_YES = (None, 0, 1, 2), (None, -1, (1, 4)), (False, True)

GRID: dict[str, dict[str, tuple[Any, ...]]] = {
    "accumulated_resid": {
        "layer": (*ENDS, -1),
        "incl_mid": NO_YES,
        "apply_ln": NO_YES,
        "pos_slice": PARTS,
        "mlp_input": NO_YES,
    },
    "decompose_resid": {
        "layer": ENDS,
        "mlp_input": NO_YES,
        "mode": ("all", "mlp", "attn"),
        "apply_ln": NO_YES,
        "pos_slice": (None, (1, 4)),
        "incl_embeds": NO_YES,
    },
    "stack_head_results": {"layer": (-1, 1, 2), "incl_remainder": NO_YES, "pos_slice": PARTS, "apply_ln": NO_YES},
    "stack_neuron_results": {
        "layer": (-1, 1),
        "pos_slice": PARTS,
        "neuron_slice": (None, (0, 5)),
        "incl_remainder": NO_YES,
        "apply_ln": NO_YES,
        "project_output_onto": (None, SOME),
    },
    "get_full_resid_decomposition": {
        "layer": ENDS,
        "mlp_input": NO_YES,
        "expand_neurons": NO_YES,
        "apply_ln": NO_YES,
        "pos_slice": (-1,),
        "project_output_onto": (None, ONE, SOME),
    },
    "get_neuron_results": {
        "layer": (0, 1),
        "neuron_slice": (None, (0, 5), [1, 3]),
        "pos_slice": (*PARTS, 3, [0, 2]),
        "project_output_onto": (None, ONE, SOME),
    },
    "stack_activation": {
        "activation_name": ("z", "resid_pre", "pattern", "scale", "attn_out"),
        "layer": (-1, 1, 2),
        "sublayer_type": (None, "ln1", "attn"),
    },
}
LABELLED = [name for name in GRID if not name.startswith(("get_neuron", "stack_activation"))]
REFUSALS = (ValueError, KeyError, IndexError)


@cache
def caches(name: str) -> tuple[Any, Any]:
    """Of ours and theirs, of both rows."""
    with torch.no_grad():
        ours, theirs = (model.run_with_cache(*pair(name).inputs)[1] for model in pair(name).both)
    return ours, theirs


def combinations(method: str) -> Iterator[dict[str, Any]]:
    labels = {"return_labels": (True,)} if method in LABELLED else {}
    axes = {**GRID[method], **labels}
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def called(store: Any, method: str, options: dict[str, Any]) -> Any:
    """The result, or the exception."""
    try:
        with torch.no_grad():
            return getattr(store, method)(**options)
    except Exception as error:
        return error


def outcome(ours: Any, theirs: Any) -> str:
    if isinstance(ours, Exception):
        assert isinstance(ours, REFUSALS), repr(ours)
        return "both refuse" if isinstance(theirs, Exception) else "ours refuses"
    if isinstance(theirs, Exception):
        return "theirs fails"
    try:
        assert_close(ours, theirs)
    except AssertionError:
        return "differ"
    return "same"


def named(name: str, method: str, options: dict[str, Any]) -> tuple[str, ...]:
    """What may come out of a call: the difference that the tests below explain, or none."""
    layer, mlp_input = options.get("layer"), options.get("mlp_input", False)
    first = 0 if layer == 0 else N_LAYERS if layer in (None, -1) else layer
    if mlp_input and (name in ATTN_ONLY or first == N_LAYERS):
        return ("ours refuses", "both refuse")  # there is no such MLP
    if options.get("activation_name") in ("z", "pattern") and options["sublayer_type"] == "ln1":
        return ("ours refuses", "both refuse")  # these are no sites of a norm; theirs ignores the argument
    if mlp_input and name == "neox":
        return ("theirs fails", "both refuse", "same" if options.get("mode") == "mlp" else "differ")
    empty = (first == 0 and not mlp_input) or (options.get("mode") == "mlp" and (first == 0 or name in ATTN_ONLY))
    if method == "decompose_resid" and not options["incl_embeds"] and empty:
        return ("theirs fails",)  # there is nothing to stack
    if name == "toy-shortformer" and (options.get("incl_embeds") or method == "get_full_resid_decomposition"):
        return ("differ", "theirs fails")
    if name in ATTN_ONLY and method in ("stack_neuron_results", "get_neuron_results"):
        return ("theirs fails", "both refuse")
    if name in ATTN_ONLY and method == "get_full_resid_decomposition" and options["expand_neurons"] and first:
        return ("theirs fails",)
    if name == "gemma2" and ("head" in method or "neuron" in method or ("full" in method and (first or mlp_input))):
        return ("differ",)
    fused = options.get("expand_neurons") and options.get("apply_ln") and options.get("project_output_onto") is not None
    if method == "get_full_resid_decomposition" and mlp_input and first and fused and name != "mixtral":
        return ("differ",)
    return ("same", "both refuse")


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("method", GRID)
def test_every_combination(name: str, method: str):
    ours, theirs = caches(name)
    counts: Counter[str] = Counter()
    for options in combinations(method):
        found = outcome(called(ours, method, options), called(theirs, method, options))
        assert found in named(name, method, options), (found, options)
        counts[found] += 1
    assert counts.keys() - {"both refuse"} or (name, method) in NEVER, counts


# Mixtures have no neurons of their own, and these models no MLPs.
NEVER = {
    (name, method) for name in ("mixtral", *ATTN_ONLY) for method in ("get_neuron_results", "stack_neuron_results")
}


@pytest.mark.parametrize("method", GRID)
def test_combinations_of_a_single_row(method: str):
    """Without a batch axis."""
    ours, theirs = (store.apply_slice_to_batch_dim(1) for store in caches("gpt2"))
    found = Counter(
        outcome(called(ours, method, options), called(theirs, method, options))
        for options in combinations(method)
        if named("gpt2", method, options) == ("same", "both refuse")
    )
    assert found["same"] > 10
    assert found.keys() <= {"same", "both refuse"}


# ---- methods with arguments of their own -----------------------------------------------------------------------------


@cache
def folded_caches(name: str) -> tuple[Any, Any]:
    """Of models whose norms are folded into their weights."""
    if name in TOYS:
        models = [library.HookedTransformer(TOYS[name]) for library in (hooked_lm, transformer_lens)]
        for model in models:
            state = {key: value.clone() for key, value in pair(name).theirs.state_dict().items()}
            model.load_and_process_state_dict(state, **{**NOT_FOLDED, "fold_ln": True})
    else:
        ours = pretrained.from_pretrained_no_processing("tiny", hf_model=hf_model(name), fold_ln=True)
        models = [ours, original(name, fold_ln=True)]
    with torch.no_grad():
        ours, theirs = (model.run_with_cache(*pair(name).inputs)[1] for model in models)
    return ours, theirs


@pytest.mark.parametrize("name", [name for name in CAUSAL if name != "toy-shortformer"])  # it is not folded
def test_contributions_to_logits(name: str):
    """Theirs cannot have a token for each row and all positions."""
    ours, theirs = folded_caches(name)
    stack = theirs.decompose_resid()
    ids, pairs = torch.tensor([7, 12]), torch.arange(3, 3 + BATCH * POS).view(BATCH, POS)
    for options in (
        {"tokens": 7},
        {"tokens": torch.tensor(7)},
        {"tokens": pairs},
        {"tokens": pairs, "incorrect_tokens": pairs + 5},
        {"tokens": 7, "incorrect_tokens": 8, "pos_slice": (1, 4)},
        {"tokens": ids, "pos_slice": -1},
        {"tokens": ids, "incorrect_tokens": ids.flip(0), "pos_slice": 2},
        {"tokens": 7, "batch_slice": (0, 1), "pos_slice": -2},
        {"tokens": ids},
    ):
        if name == "toy-bare" and "batch_slice" in options:
            continue  # see the test of norms
        given = {"residual_stack": at_positions(stack, options.get("pos_slice")), **options}
        found = [called(store, "logit_attrs", given) for store in (ours, theirs)]
        expected = "theirs fails" if options.keys() == {"tokens"} and options["tokens"] is ids else "same"
        assert outcome(*found) == expected, (options, found)


@pytest.mark.parametrize("name", ["gpt2", "llama", "toy-ln"])
def test_contributions_below_a_norm_with_a_weight(name: str):
    """Theirs leaves the final norm's weight out where it is not folded, and the contributions are not those to the logits."""
    ours, theirs = caches(name)
    with torch.no_grad():
        logits = pair(name).ours(*pair(name).inputs)
    model = pair(name).ours
    bias = 0.0 if name == "llama" else model.ln_final.b @ (model.W_U[:, 7] - model.W_U[:, 8])
    rest = (bias + model.b_U[7] - model.b_U[8]).detach()
    expected = logits[..., 7] - logits[..., 8] - rest
    found = [store.logit_attrs(store.decompose_resid(), 7, incorrect_tokens=8) for store in (ours, theirs)]
    assert sums_to(found[0].detach(), expected)
    assert not sums_to(found[1].detach(), expected)


def at_positions(stack: Tensor, part: Any) -> Tensor:
    """What methods want a stack to be that is given beside a slice of positions."""
    return stack if part is None else stack[..., part if isinstance(part, int) else slice(*part), :]


@pytest.mark.parametrize("name", CAUSAL)
def test_norms_of_stacks(name: str):
    ours, theirs = caches(name)
    stack = theirs.decompose_resid()
    places = [
        {"layer": layer, "mlp_input": mlp} for layer in (0, 1) for mlp in NO_YES if not (mlp and name in ATTN_ONLY)
    ]
    parts = [{"pos_slice": -1}, {"pos_slice": (1, 4), "layer": 1}]
    parts += [{"batch_slice": (0, 1)}] if name != "toy-bare" else []  # without a norm theirs returns all rows
    for options in ({}, {"layer": 2}, {"recompute_ln": True}, *places, *parts):
        given = {"residual_stack": at_positions(stack, options.get("pos_slice")), **options}
        found = [called(store, "apply_ln_to_stack", given) for store in (ours, theirs)]
        assert outcome(*found) == "same", (options, found)
    rows = [store.apply_slice_to_batch_dim(0) for store in (ours, theirs)]
    given = {"residual_stack": stack[:, 0], "has_batch_dim": False}
    assert outcome(*(called(store, "apply_ln_to_stack", given) for store in rows)) == "same"


def test_a_norm_of_each_component():
    """Of an inner layer, too, where theirs divides by the run's scale although it is asked not to."""
    ours, theirs = caches("gpt2")
    stack = theirs.decompose_resid(1)
    expected = pair("gpt2").theirs.blocks[1].ln1(stack.flatten(0, 1)).view_as(stack)
    assert_close(ours.apply_ln_to_stack(stack, 1, recompute_ln=True), expected)
    assert torch.equal(theirs.apply_ln_to_stack(stack, 1, recompute_ln=True), theirs.apply_ln_to_stack(stack, 1))


def test_caches_as_mappings():
    both = pair("gpt2")
    with torch.no_grad():
        ours, theirs = (model.run_with_cache(both.inputs[0][:1])[1] for model in both.both)
    for key in (("z", 1), ("resid_post", -1), ("pre", 0), ("k", 1, "a"), ("scale", 0, "ln1"), ("mlp_out", 1), "embed"):
        assert_close(ours[key], theirs[key], key)
    for key in (("pattern", 1), ("attn", 0), ("attn_scores", 0), ("scale",), "ln_final.hook_scale", "k1", "scale1ln2"):
        assert_close(ours[key], theirs[key], key)
    assert len(theirs) - len(ours) == 2  # those of the unembedding
    assert list(ours) == list(ours.keys()) == [name for name, _ in ours.items()]
    assert len(ours.values()) == len(ours)
    for key in ("blocks.7.hook_resid_pre", ("z", 9), "nothing"):
        for store in (ours, theirs):
            with pytest.raises((KeyError, IndexError)):
                store[key]
    for store in (ours, theirs):
        store.to("cpu")
        assert store.has_batch_dim
        store.remove_batch_dim()
        assert not store.has_batch_dim
        store.compute_head_results()
        store.toggle_autodiff(mode=False)
        assert not torch.is_grad_enabled()
        store.toggle_autodiff(mode=True)
        assert torch.is_grad_enabled()
    for name in ours:
        assert_close(ours[name], theirs[name], name)
    assert ours["result", 1].shape == (POS, 4, D_MODEL)


@pytest.mark.parametrize("part", [0, -1, (0, 1), [1, 0], None])
def test_rows_of_a_cache(part: Any):
    ours, theirs = (store.apply_slice_to_batch_dim(part) for store in caches("llama"))
    assert ours.has_batch_dim == theirs.has_batch_dim
    for name in ours:
        assert_close(ours[name], theirs[name], name)


# ---- who is right ----------------------------------------------------------------------------------------------------


def sums_to(stack: Tensor, stream: Tensor) -> bool:
    return is_close(stack.sum(0), stream)


def test_components_behind_a_norm():
    """With a norm behind each sublayer theirs gives heads and neurons as they are before it, which do not sum to the stream; ours
    takes them through it, and they do."""
    ours, theirs = caches("gemma2")
    attention = ours["attn_out", 0] + ours["attn_out", 1]
    assert sums_to(ours.stack_head_results(), attention)
    assert not sums_to(theirs.stack_head_results(), attention)
    assert sums_to(ours.get_neuron_results(1).movedim(-2, 0), ours["mlp_out", 1])
    assert not sums_to(theirs.get_neuron_results(1).movedim(-2, 0), ours["mlp_out", 1])
    assert sums_to(ours.get_full_resid_decomposition(), ours["resid_post", -1])
    assert not sums_to(theirs.get_full_resid_decomposition(), ours["resid_post", -1])


def test_what_the_mlp_of_a_parallel_block_reads():
    """It reads what the block reads; theirs adds the block's own attention, or looks for a stream that is not there."""
    ours, theirs = caches("neox")
    for method in ("decompose_resid", "get_full_resid_decomposition"):
        assert sums_to(getattr(ours, method)(1, mlp_input=True), ours["resid_pre", 1])
        assert not sums_to(getattr(theirs, method)(1, mlp_input=True), ours["resid_pre", 1])
    assert_close(ours.accumulated_resid(1, mlp_input=True)[-1], ours["resid_pre", 1])
    with pytest.raises(KeyError):
        theirs.accumulated_resid(1, mlp_input=True)


def test_positions_of_a_shortformer():
    """They are added to what queries and keys read and never to the stream; theirs counts them among its components."""
    ours, theirs = caches("toy-shortformer")
    assert sums_to(ours.decompose_resid(), ours["resid_post", -1])
    assert not sums_to(theirs.decompose_resid(), ours["resid_post", -1])


def test_neurons_below_the_norm_of_an_mlp():
    """Normalised and then projected is the same as both at once; theirs takes the norm of attention for neurons in the second."""
    options = {"layer": 1, "mlp_input": True, "apply_ln": True}
    at_once = [store.get_full_resid_decomposition(**options, project_output_onto=SOME) for store in caches("gpt2")]
    ours, theirs = (store.get_full_resid_decomposition(**options) @ SOME for store in caches("gpt2"))
    assert_close(ours, theirs)
    assert_close(at_once[0], ours)
    assert distance(at_once[1], theirs) > 0.01


def test_one_neuron_projected():
    """Theirs loses the axis of a single neuron before it projects: it fails, or keeps an axis of one that projections drop."""
    ours, theirs = caches("gpt2")
    expected = ours.get_neuron_results(0, neuron_slice=3)
    assert_close(expected, theirs.get_neuron_results(0, neuron_slice=3))
    assert_close(ours.get_neuron_results(0, neuron_slice=3, project_output_onto=SOME), expected @ SOME)
    assert_close(ours.get_neuron_results(0, neuron_slice=3, project_output_onto=ONE), expected @ ONE)
    with pytest.raises(RuntimeError):
        theirs.get_neuron_results(0, neuron_slice=3, project_output_onto=SOME)
    assert theirs.get_neuron_results(0, neuron_slice=3, project_output_onto=ONE).shape == (BATCH, POS, 1)


def test_neurons_of_a_model_without_mlps():
    """There are none: ours gives an empty stack, theirs looks for them."""
    ours, theirs = caches("toy-ln")
    assert ours.stack_neuron_results(-1).shape == (0, BATCH, POS, D_MODEL)
    assert sums_to(ours.get_full_resid_decomposition(), ours["resid_post", -1])
    for method, layer in (("stack_neuron_results", -1), ("get_full_resid_decomposition", None)):
        with pytest.raises((KeyError, AttributeError)):
            getattr(theirs, method)(layer)


def test_the_cache_of_an_encoder():
    """What its layers write does not sum to the stream, which their norms stand in: theirs decomposes it all the same, ours
    says so."""
    both = pair("bert")
    (_, ours), (_, theirs) = (model.run_with_cache(*both.inputs) for model in both.both)
    for site in ("pattern", "z", "resid_pre", "mlp_out"):
        assert_close(ours.stack_activation(site), theirs.stack_activation(site), site)
    assert_close(ours.accumulated_resid(1), theirs.accumulated_resid(1), "accumulated_resid")
    parts = theirs.decompose_resid(1).sum(0)
    assert distance(parts, theirs["blocks.1.hook_resid_pre"]) > 0.1
    for method in ("decompose_resid", "stack_head_results"):
        with pytest.raises(ValueError, match="normalise the stream itself"):
            getattr(ours, method)(1)
