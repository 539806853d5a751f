"""What clients of the known interface rely on about caches, text, generation, losses and patching: arguments of all kinds."""

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from hooked_lm import ActivationCache, FactoredMatrix, HookedTransformer, patching
from hooked_lm.utils import Slice
from tests.close import assert_close, assert_near
from tests.models.toys import ids, padded, toy

TOKENS = ids(batch=2, n_pos=6)
ALL = slice(None)
SLICES: list[tuple[Any, Any]] = [
    (None, ALL), (2, slice(2, 3)), (-1, slice(-1, None)), ((1, 4), slice(1, 4)), ((-3, None), slice(-3, None)),
    ((None, None, 2), slice(None, None, 2)), ([0, 3, 5], [0, 3, 5]), (slice(2, 5), slice(2, 5)),
    (torch.tensor([1, 2]), [1, 2]), (Slice(3), slice(3, 4)), (Slice((0, 2)), slice(0, 2)),
]  # fmt: skip


@pytest.fixture(scope="module")
def model() -> HookedTransformer:
    return toy()


@pytest.fixture(scope="module")
def cache(model: HookedTransformer) -> ActivationCache:
    return model.run_with_cache(TOKENS)[1]


@pytest.fixture(scope="module")
def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


# ---- which sites, which positions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pos_slice", "index"), SLICES)
@pytest.mark.parametrize("kind", ["standard", "rotary", "parallel"])
def test_pos_slice_cuts_the_axis_of_positions(kind: str, pos_slice: Any, index: Any) -> None:
    """That of queries in patterns, that before the heads in keys; an int keeps its axis, a `Slice` of one does not."""
    model = toy(kind)
    _, whole = model.run_with_cache(TOKENS)
    _, cut = model.run_with_cache(TOKENS, pos_slice=pos_slice)
    assert list(cut) == list(whole)
    for name, value in whole.items():
        expected = value[:, :, index] if model.hook_dict[name].dims[2:3] == ("query_pos",) else value[:, index]
        if _is_int(pos_slice):
            expected = expected.squeeze(2 if model.hook_dict[name].dims[2:3] == ("query_pos",) else 1)
        assert_close(cut[name], expected)


@pytest.mark.parametrize(
    ("names_filter", "expected"),
    [
        ("blocks.0.attn.hook_z", ["blocks.0.attn.hook_z"]), ("z0", ["blocks.0.attn.hook_z"]),
        (["blocks.1.hook_resid_pre", "hook_embed"], ["hook_embed", "blocks.1.hook_resid_pre"]),
        (lambda name: name.endswith("pattern"), [f"blocks.{i}.attn.hook_pattern" for i in range(3)]),
        ("blocks.*.hook_mlp_out", [f"blocks.{i}.hook_mlp_out" for i in range(3)]),
        ("blocks.2.hook_out", ["blocks.2.hook_resid_post"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("as_object", [True, False])
def test_filters(model: HookedTransformer, names_filter: Any, expected: list[str], as_object: bool) -> None:
    logits, cache = model.run_with_cache(TOKENS, names_filter=names_filter, return_cache_object=as_object)
    assert list(cache) == expected
    assert isinstance(cache, ActivationCache if as_object else dict)
    assert_close(logits, model(TOKENS))


def test_a_batch_of_one_without_its_axis(model: HookedTransformer) -> None:
    _, cache = model.run_with_cache(TOKENS[:1], remove_batch_dim=True, device="cpu")
    _, with_batch = model.run_with_cache(TOKENS[:1])
    assert not cache.has_batch_dim
    assert all(torch.equal(value, with_batch[name][0]) for name, value in cache.items())
    assert_close(cache.accumulated_resid(), with_batch.accumulated_resid()[:, 0])
    expected = with_batch.logit_attrs(with_batch.decompose_resid(), tokens=3)[:, 0]
    assert_close(cache.logit_attrs(cache.decompose_resid(), tokens=3), expected)
    with pytest.raises(ValueError, match="batch"):
        model.run_with_cache(TOKENS, remove_batch_dim=True)


def test_gradients_in_a_cache(model: HookedTransformer) -> None:
    """Against finite differences; with a loss, and with what a metric of logits says by hand."""
    _, cache = model.run_with_cache(TOKENS, return_type="loss", incl_bwd=True, names_filter="blocks.1.hook_resid_pre")
    assert list(cache) == ["blocks.1.hook_resid_pre", "blocks.1.hook_resid_pre_grad"]
    direction = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    step, losses = 1e-2, []
    for sign in (1, -1):

        def move(value: Tensor, hook: Any, sign: int = sign) -> Tensor:
            return value + sign * step * direction

        losses.append(model.run_with_hooks(TOKENS, return_type="loss", fwd_hooks=[("resid_pre1", move)]))
    slope = (cache["blocks.1.hook_resid_pre_grad"] * direction).sum()
    assert_near(
        slope, (losses[0] - losses[1]) / (2 * step), 0.02, because="a difference quotient in float32, not a slope"
    )


def test_what_was_kept_stays(model: HookedTransformer) -> None:
    kept = model.add_caching_hooks("blocks.1.hook_resid_pre")
    edit = ("blocks.1.hook_resid_pre", lambda value, hook: value.zero_())
    _, cache = model.run_with_cache(TOKENS)
    before = cache["resid_pre", 1].clone()
    with model.hooks(fwd_hooks=[edit]):
        model(TOKENS)
    model.reset_hooks()
    assert_close(cache["resid_pre", 1], before)
    assert_close(kept["blocks.1.hook_resid_pre"], before)


# ---- methods of caches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [None, -1, 0, 1, 3])
@pytest.mark.parametrize(("pos_slice", "index"), SLICES)
@pytest.mark.parametrize("apply_ln", [False, True])
def test_the_stream_so_far(
    cache: ActivationCache, layer: int | None, pos_slice: Any, index: Any, apply_ln: bool
) -> None:
    """`layer` is the number of layers that are through: None and -1 are all of them, the last after its MLP."""
    stack, labels = cache.accumulated_resid(layer, apply_ln=apply_ln, pos_slice=pos_slice, return_labels=True)
    n = 3 if layer in (None, -1) else layer
    expected = [cache["resid_pre", i] for i in range(min(n + 1, 3))] + ([cache["resid_post", 2]] if n == 3 else [])
    assert len(stack) == len(labels) == len(expected)
    if not apply_ln:
        cut = torch.stack(expected)[:, :, index]
        assert_close(stack, cut[:, :, 0] if isinstance(pos_slice, int) or _is_int(pos_slice) else cut)


def _is_int(pos_slice: Any) -> bool:
    return isinstance(pos_slice, Slice) and pos_slice.mode == "int"


@pytest.mark.parametrize("mode", ["all", "mlp", "attn"])
@pytest.mark.parametrize("layer", [None, -1, 1, 2])
@pytest.mark.parametrize("incl_embeds", [True, False])
def test_the_parts_of_the_stream(cache: ActivationCache, mode: str, layer: int | None, incl_embeds: bool) -> None:
    stack, labels = cache.decompose_resid(layer, mode=mode, incl_embeds=incl_embeds, return_labels=True)
    n = 3 if layer in (None, -1) else layer
    parts = {"all": ["attn_out", "mlp_out"], "mlp": ["mlp_out"], "attn": ["attn_out"]}[mode]
    expected = [cache["embed"], cache["pos_embed"]] if incl_embeds else []
    expected += [cache[part, i] for i in range(n) for part in parts]
    assert_close(stack, torch.stack(expected))
    assert labels[:2] == ["embed", "pos_embed"] or not incl_embeds
    if mode == "all" and incl_embeds:
        assert_close(stack.sum(0), cache["resid_post", n - 1])


@pytest.mark.parametrize("as_tokens", [lambda: 3, lambda: torch.tensor([3, 7]), lambda: TOKENS])
def test_attributions_of_logits(model: HookedTransformer, cache: ActivationCache, as_tokens: Callable[[], Any]) -> None:
    tokens = as_tokens()
    against = torch.full_like(tokens, 5) if isinstance(tokens, Tensor) else 5
    attributions = cache.logit_attrs(cache.decompose_resid(), tokens=tokens, incorrect_tokens=against)
    normalized = (cache["resid_post", 2] - cache["resid_post", 2].mean(-1, keepdim=True)) / cache["ln_final.hook_scale"]
    columns = torch.as_tensor(tokens).expand(2, 6) if torch.as_tensor(tokens).ndim == 0 else None
    rows = columns if columns is not None else (tokens if tokens.ndim == 2 else tokens[:, None].expand(2, 6))
    direction = model.W_U.T[rows] - model.W_U.T[5]
    expected = ((normalized * model.ln_final.w) * direction).sum(-1)
    assert_close(attributions.sum(0), expected)


def test_heads_neurons_and_everything(model: HookedTransformer, cache: ActivationCache) -> None:
    heads = cache.stack_head_results(layer=-1, incl_remainder=True)
    assert_close(heads.sum(0), cache["resid_post", 2])
    full, labels = cache.get_full_resid_decomposition(expand_neurons=True, return_labels=True)
    assert_close(full.sum(0), cache["resid_post", 2])
    assert len(labels) == len(full)
    onto = model.W_U[:, 3]
    projected = cache.get_full_resid_decomposition(expand_neurons=False, project_output_onto=onto)
    assert_close(projected.sum(0), cache["resid_post", 2] @ onto)
    some = cache.get_neuron_results(1, neuron_slice=[0, 5], pos_slice=-1)
    assert_close(some, cache["post", 1][:, -1, [0, 5], None] * model.W_out[1][[0, 5]])
    assert torch.equal(cache.stack_activation("scale", sublayer_type="ln1")[2], cache["scale", 2, "ln1"])


@pytest.mark.parametrize("move_model", [False, True])
def test_a_cache_moves_with_its_model_or_alone(move_model: bool) -> None:
    model = toy()
    _, cache = model.run_with_cache(TOKENS)
    assert cache.to("meta", move_model=move_model) is cache
    assert {value.device.type for value in cache.values()} == {"meta"}
    assert model.cfg.device == ("meta" if move_model else "cpu")


# ---- factored matrices -----------------------------------------------------------------------------------------------


def test_every_operation_of_a_factored_matrix(model: HookedTransformer) -> None:
    OV = model.OV
    dense = model.W_V @ model.W_O
    assert OV.shape == dense.shape == (3, 4, 32, 32)
    assert (OV.ndim, OV.ldim, OV.rdim, OV.mdim, OV.has_leading_dims) == (4, 32, 32, 8, True)
    vector, matrix = torch.randn(32), torch.randn(32, 5)
    for found, expected in [
        (OV.AB, dense), (OV.T.AB, dense.mT), (OV @ vector, dense @ vector), (vector @ OV, vector @ dense),
        ((OV @ matrix).AB, dense @ matrix), ((matrix.T @ OV).AB, matrix.T @ dense), ((OV * 2.5).AB, dense * 2.5),
        ((2.5 * OV).AB, dense * 2.5), (OV[1, 2].AB, dense[1, 2]), (OV[:, 0].AB, dense[:, 0]),
        (OV[0, 0, 3:7].AB, dense[0, 0, 3:7]), (OV[0, 0, :, 2:4].AB, dense[0, 0, :, 2:4]),
        ((OV[0] @ OV[1]).AB, dense[0] @ dense[1]), (OV.norm(), dense.norm(dim=(-2, -1))),
        (OV.U * OV.S[..., None, :] @ OV.Vh.mT, dense), (OV.make_even().AB, dense),
        (OV.get_corner(2), dense[:2, :2, :2, :2]), (OV.unsqueeze(0).AB, dense[None]),
        (OV.collapse_l().mT @ OV.collapse_l(), dense.mT @ dense), (OV.collapse_r() @ OV.collapse_r().mT, dense @ dense.mT),
        (OV.BA, model.W_O @ model.W_V),
    ]:  # fmt: skip
        assert_close(found, expected)
    eigenvalues = OV[0, 0].eigenvalues
    assert_close(eigenvalues.sum().real, dense[0, 0].trace())
    A, B = OV.pair
    assert isinstance(OV, FactoredMatrix)
    assert torch.equal(A, OV.A)
    assert torch.equal(B, OV.B)


# ---- text ------------------------------------------------------------------------------------------------------------


def test_text_and_tokens(demo: HookedTransformer) -> None:
    bos = demo.tokenizer.bos_token_id
    with_bos, without = demo.to_tokens("When Mary"), demo.to_tokens("When Mary", prepend_bos=False)
    assert with_bos[0, 0] == bos
    assert torch.equal(with_bos[:, 1:], without)
    kinds: list[Any] = ["When Mary", with_bos, with_bos[0], with_bos[0].numpy(), with_bos[0].tolist()]
    assert len({tuple(demo.to_str_tokens(kind)) for kind in kinds[:4]}) == 1
    assert demo.to_str_tokens(["When Mary", "to"]) == [demo.to_str_tokens("When Mary"), demo.to_str_tokens("to")]
    assert "".join(demo.to_str_tokens("When Mary", prepend_bos=False)) == "When Mary"
    assert demo.to_string(without[0]) == "When Mary"
    assert demo.to_string(without) == ["When Mary"]
    single = demo.to_single_token(" Mary")
    assert demo.to_single_str_token(single) == " Mary"
    assert demo.get_token_position(" Mary", "When Mary") == with_bos.shape[1] - 1
    assert demo.get_token_position(single, with_bos) == with_bos.shape[1] - 1
    assert torch.equal(demo.tokens_to_residual_directions(" Mary"), demo.W_U[:, single])
    assert torch.equal(demo.tokens_to_residual_directions(with_bos[0]), demo.W_U.T[with_bos[0]])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("prepend_bos", [None, True, False])
def test_unequal_texts(demo: HookedTransformer, side: str, prepend_bos: bool | None) -> None:
    """Each row's logits are those that it has alone, on whichever side it is padded."""
    texts = ["When Mary and John went", "When Mary"]
    tokens = demo.to_tokens(texts, padding_side=side, prepend_bos=prepend_bos)
    logits = demo(texts, padding_side=side, prepend_bos=prepend_bos)
    alone = demo(texts[1], prepend_bos=prepend_bos)
    n = alone.shape[1]
    row = logits[1, -n:] if side == "left" else logits[1, :n]
    assert logits.shape[:2] == tokens.shape
    assert_close(row, alone[0])


# ---- generation and losses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["When Mary and John", ["When Mary and John", "When Mary"], "ids", "embeddings"])
@pytest.mark.parametrize("return_type", ["input", "str", "tokens", "embeds"])
def test_generation_returns_what_is_asked(demo: HookedTransformer, given: Any, return_type: str) -> None:
    tokens = demo.to_tokens("When Mary and John")
    prompt = {"ids": tokens, "embeddings": demo.embed(tokens)}.get(given, given) if isinstance(given, str) else given
    options = {"max_new_tokens": 3, "do_sample": False, "verbose": False, "stop_at_eos": False}
    expected = demo.generate(tokens, **options)
    out = demo.generate(prompt, return_type=return_type, padding_side="left", **options)
    if return_type == "input":
        return_type = {"ids": "tokens", "embeddings": "embeds"}.get(given, "str") if isinstance(given, str) else "str"
    if return_type == "str":
        first = out[0] if isinstance(out, list) else out
        assert first.endswith(demo.to_string(expected[0, 1:])) or demo.to_string(expected[0, -3:]) == first
    elif return_type == "tokens":
        assert torch.equal(out[:1, -3:], expected[:, -3:])
    else:
        assert_close(out[:1, -3:], demo.embed(expected)[:, -3:])


def test_rows_that_ended_are_filled(demo: HookedTransformer) -> None:
    tokens = demo.to_tokens(["When Mary and John went to the", "Then John"], padding_side="left")
    free = demo.generate(tokens, max_new_tokens=5, do_sample=False, verbose=False, stop_at_eos=False)
    stop = int(free[0, tokens.shape[1] + 1])  # what the first row says second ends it
    out = demo.generate(tokens, max_new_tokens=5, do_sample=False, verbose=False, eos_token_id=stop)
    ended = tokens.shape[1] + 2
    assert torch.equal(out[0, :ended], free[0, :ended])
    assert (out[0, ended:] == stop).all()


def test_losses_are_cross_entropies(model: HookedTransformer) -> None:
    rows, mask = padded([TOKENS[0], TOKENS[1][:4]], "right")
    logits, loss = model(rows, return_type="both", attention_mask=mask)
    each = torch.nn.functional.cross_entropy(logits[:, :-1].mT, rows[:, 1:], reduction="none")
    real = mask[:, 1:].bool()
    assert_close(loss, each[real].mean())
    per_token = model(rows, return_type="loss", loss_per_token=True, attention_mask=mask)
    assert_close(per_token[real], each[real])
    assert_close(model.loss_fn(logits, rows, per_token=True), each)
    assert model(rows, return_type=None) is None


# ---- patching --------------------------------------------------------------------------------------------------------


def test_patching_with_a_setter_and_cells_of_ones_own(model: HookedTransformer, cache: ActivationCache) -> None:
    corrupted = TOKENS.flip(0)

    def setter(corrupted_activation: Tensor, index: list[int], clean_activation: Tensor) -> Tensor:
        _, neuron = index
        corrupted_activation[..., neuron] = clean_activation[..., neuron]
        return corrupted_activation

    def metric(logits: Tensor) -> Tensor:
        return logits[0, -1, 3]

    cells = pd.DataFrame([(0, 3), (2, 1), (1, 7)], columns=["layer", "neuron"])
    with pytest.warns(UserWarning, match="whole forward passes"):
        found, returned = patching.generic_activation_patch(
            model, corrupted, cache, metric, setter, "post", index_df=cells, return_index_df=True
        )
    assert returned.equals(cells)
    for value, (layer, neuron) in zip(found, cells.itertuples(index=False), strict=True):

        def patch(act: Tensor, hook: Any, neuron: int = neuron) -> None:
            act[..., neuron] = cache[hook.name][..., neuron]

        expected = metric(model.run_with_hooks(corrupted, fwd_hooks=[(f"blocks.{layer}.mlp.hook_post", patch)]))
        assert_close(value, expected)
    grid, index_df = patching.generic_activation_patch(
        model, corrupted, cache, metric, patching.layer_pos_patch_setter, "resid_pre",
        index_axis_names=["layer", "pos"], return_index_df=True,
    )  # fmt: skip
    assert grid.shape in [(3, 6), (18,)]
    assert len(index_df) == 18
