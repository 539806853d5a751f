"""Path patching equals the two runs written by hand."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from hooked_lm import HookedTransformer, HookedTransformerConfig, patching
from tests.close import assert_apart, assert_close
from tests.core import thinned

LAYERS, HEADS = 4, 4
ROTARY = {"positional_embedding_type": "rotary"}
MODELS = {
    "plain": {},
    "grouped": {"n_key_value_heads": 2, "normalization_type": "RMS", "gated_mlp": True, **ROTARY},
    "parallel": {"parallel_attn_mlp": True, **ROTARY},
}
RECEIVERS = [(2, 1, "q"), (3, 0, "v"), (-1, 2, "k")]


def build(kind: str) -> HookedTransformer:
    sizes = {"n_layers": LAYERS, "d_model": 16, "n_heads": HEADS, "n_ctx": 8, "d_vocab": 11, "act_fn": "gelu"}
    return HookedTransformer(HookedTransformerConfig(**{**sizes, "seed": 0, "initializer_range": 0.5, **MODELS[kind]}))


def prompts() -> tuple[Tensor, Tensor]:
    corrupted, clean = torch.randint(0, 11, (2, 3, 6), generator=torch.Generator().manual_seed(1))
    return corrupted, clean


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 3] - logits[:, -1, 5]


def put(values: dict[str, Tensor], head: int | None = None) -> Callable[..., Tensor]:
    """A hook that patches in the value of another run, for one head or all."""

    def hook_function(value: Tensor, hook) -> Tensor:
        if head is None:
            return values[hook.name]
        value[:, :, head] = values[hook.name][:, :, head]
        return value

    return hook_function


def sending(model: HookedTransformer, sender: tuple, freeze: str) -> list[tuple]:
    """The hooks of the first run: the sender's clean output, and the frozen outputs after it."""
    corrupted, clean = prompts()
    values, held = model.run_with_cache(clean)[1], model.run_with_cache(corrupted)[1]
    layer, part = sender
    is_mlp = part == "mlp"
    site = f"blocks.{layer}.{'hook_mlp_out' if is_mlp else 'attn.hook_z'}"
    hooks = [(site, put(values, None if is_mlp else part))]
    hooks += [(f"blocks.{later}.hook_attn_out", put(held)) for later in range(layer + 1, LAYERS)]
    if freeze == "all":
        hooks += [(f"blocks.{later}.hook_mlp_out", put(held)) for later in range(layer + is_mlp, LAYERS)]
    return hooks


def receiving(model: HookedTransformer, receivers: list[tuple]) -> list[tuple[str, int | None]]:
    """The input sites of the receivers, each with its head."""
    places: list[tuple[str, int | None]] = []
    for layer, head, *kind in receivers:
        if head == "mlp":
            places.append((f"blocks.{layer}.hook_mlp_in", None))
            continue
        for name in kind or "qkv":
            group = HEADS // (model.cfg.n_key_value_heads or HEADS) if name in "kv" else 1
            places.append((f"blocks.{layer % LAYERS}.attn.hook_{name}", head // group))
    return places


@torch.no_grad()
def by_hand(model: HookedTransformer, sender: tuple, receivers: list[tuple] | None, freeze: str) -> Tensor:
    """The metric with these paths patched; None: the receivers are the logits."""
    corrupted, _ = prompts()
    first = sending(model, sender, freeze)
    if receivers is None:
        return metric(model.run_with_hooks(corrupted, fwd_hooks=first))
    heard: dict[str, Tensor] = {}

    def hear(value: Tensor, hook) -> None:
        heard[hook.name] = value

    places = receiving(model, receivers)
    model.run_with_hooks(corrupted, fwd_hooks=first + [(site, hear) for site, _ in places])
    return metric(model.run_with_hooks(corrupted, fwd_hooks=[(site, put(heard, head)) for site, head in places]))


@pytest.mark.parametrize("freeze", thinned(["attention", "all"], keep=["attention"]))
@pytest.mark.parametrize("kind", thinned(MODELS, keep=["grouped"]))
def test_paths_from_heads_are_the_runs_by_hand(kind: str, freeze: str):
    model, (corrupted, clean) = build(kind), prompts()
    result = patching.path_patch(model, corrupted, clean, RECEIVERS, metric=metric, freeze=freeze)
    assert list(result.axes) == ["layer", "head"]
    for layer, head in product(range(LAYERS), range(HEADS)):
        expected = by_hand(model, (layer, head), RECEIVERS, freeze)
        assert_close(result.values[layer, head], expected)
    changed = (result.mean - result.corrupted.mean()).abs()
    assert changed[:2].min() > 1e-4, "every early head is heard"
    assert_close(changed[3], 0.0, scale=result.corrupted, msg="nobody hears the last layer")
    if freeze == "attention":
        held = patching.path_patch(model, corrupted, clean, RECEIVERS, metric=metric, freeze="all")
        assert_apart(held.values, result.values, msg="MLPs pass something on")
        assert_close(held.values[1, 2], by_hand(model, (1, 2), RECEIVERS, "all"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", thinned(MODELS, keep=["grouped"]))
def test_paths_from_and_to_mlps(kind: str):
    model, (corrupted, clean) = build(kind), prompts()
    receivers = [(2, "mlp"), (3, 1)]
    senders = [(0, "mlp"), (1, 2), (1, "mlp")]
    result = patching.path_patch(model, corrupted, clean, receivers, senders, metric=metric)
    assert dict(result.axes) == {"sender": ("m0", "L1H2", "m1")}
    by_name = patching.path_patch(model, corrupted, clean, ["m2", "L3H1"], ["m0", "L1H2", "m1"], metric=metric)
    assert torch.equal(by_name.values, result.values)
    for index, sender in enumerate(senders):
        expected = by_hand(model, sender, receivers, "attention")
        assert_close(result.values[index], expected)
    everyone = patching.path_patch(model, corrupted, clean, receivers, "mlps", metric=metric)
    assert_close(everyone.values[[0, 1]], result.values[[0, 2]])


@pytest.mark.parametrize("freeze", thinned(["attention", "all"], keep=["attention"]))
def test_direct_effects_on_logits(freeze: str):
    model, (corrupted, clean) = build("plain"), prompts()
    result = patching.path_patch(model, corrupted, clean, "logits", metric=metric, freeze=freeze)
    for layer, head in product(range(LAYERS), range(HEADS)):
        expected = by_hand(model, (layer, head), None, freeze)
        assert_close(result.values[layer, head], expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", thinned(MODELS, keep=["grouped"]))
def test_all_pairs_of_heads(kind: str):
    model, (corrupted, clean) = build(kind), prompts()
    result = patching.head_to_head(model, corrupted, clean, metric=metric)
    n_kv = model.cfg.n_key_value_heads or HEADS
    for i, name in enumerate("qkv"):
        n_to = n_kv if name in "kv" else HEADS
        for layer, head, to_layer, to_head in [(0, 1, 2, 1), (1, 2, 3, 0), (2, 3, 3, 1), (0, 0, 1, 0)]:
            receiver = (to_layer, to_head * (HEADS // n_to), name)
            expected = by_hand(model, (layer, head), [receiver], "all")
            assert_close(result.values[i, layer, head, to_layer, to_head], expected)
        for layer, to_layer in product(range(LAYERS), range(LAYERS)):
            there = ~result.mean[i, layer, :, to_layer].isnan()
            assert bool(there[:, :n_to].all()) is (to_layer > layer)
            assert not there[:, n_to:].any()


def test_a_model_with_an_open_hook_takes_whole_forwards():
    model, (corrupted, clean) = build("plain"), prompts()
    expected = patching.path_patch(model, corrupted, clean, RECEIVERS, [(0, 1)], metric=metric)
    with model.hooks([("hook_embed", lambda value, hook: None)]), pytest.warns(UserWarning, match="a hook is open"):
        result = patching.path_patch(model, corrupted, clean, RECEIVERS, [(0, 1)], metric=metric)
    assert_close(result.values, expected.values)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"receivers": []}, ValueError, "receivers is empty"),
        ({"receivers": "heads"}, ValueError, "receivers must be 'logits' or a list"),
        ({"receivers": [(9, 0, "q")]}, IndexError, "layer 9 is out of range: there are 4"),
        ({"receivers": [(0, 7, "q")]}, IndexError, "head 7 is out of range: there are 4"),
        ({"receivers": [(0, 0, "z")]}, ValueError, "a head receives through q, k or v, got 'z'"),
        ({"senders": []}, ValueError, "senders is empty"),
        ({"senders": "neurons"}, ValueError, "senders must be 'heads', 'mlps' or a list"),
        (
            {"senders": ["1.2"]},
            ValueError,
            "'1.2' is neither a head such as 'L1H7' or 'L1H7<q>' nor an MLP such as 'm1'",
        ),
        ({"senders": [(0, 4)]}, IndexError, "head 4 is out of range"),
        ({"senders": [(0, "attn")]}, ValueError, "layer 0 has no output 'attn'"),
        ({"freeze": "mlps"}, ValueError, "freeze must be 'attention' or 'all'"),
    ],
)
def test_bad_input(arguments: dict, error: type[Exception], message: str):
    model, (corrupted, clean) = build("plain"), prompts()
    with pytest.raises(error, match=message):
        patching.path_patch(model, corrupted, clean, **{"receivers": RECEIVERS, "metric": metric, **arguments})


def test_prompts_of_different_shapes():
    model, (corrupted, clean) = build("plain"), prompts()
    with pytest.raises(
        ValueError, match=r"must have the same shape \(prompts, tokens\); they have \(3, 5\) and \(3, 6\)"
    ):
        patching.path_patch(model, corrupted, clean[:, :5], RECEIVERS, metric=metric)
