"""Methods and arguments of TransformerLens 3.9.0 that single programs use."""

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hooked_lm import HookedEncoder, HookedTransformer, HookedTransformerConfig, compat
from hooked_lm.analysis.reading.head_detector import detect_head
from hooked_lm.analysis.reading.svd_interpreter import SVDInterpreter
from hooked_lm.compat import devices
from hooked_lm.compat.activations import XIELU
from hooked_lm.compat.conversions import BaseTensorConversion
from hooked_lm.compat.introspection import HookIntrospectionMixin
from hooked_lm.compat.parts import AbstractAttention, GatedMLP
from hooked_lm.compat.processing import ProcessWeights
from hooked_lm.compat.tensors import logits_to_df
from hooked_lm.components.kv_cache import KeyValueCache, KeyValueCacheEntry
from hooked_lm.hooks import HookPoint, Slice
from hooked_lm.models.generation.sampling import sample_logits
from hooked_lm.models.loss import lm_cross_entropy_loss
from tests.close import assert_apart, assert_close
from tests.models.toys import N_CTX, ids, toy
from tests.unchecked import unchecked

SIZES: dict[str, Any] = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 8, "d_vocab": 9, "act_fn": "gelu"}


@pytest.fixture
def shim() -> Iterator[Any]:
    compat.install()
    yield importlib.import_module
    compat.uninstall()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1), (2,), (1, 3), (2, 3)])
def test_directions_of_tokens(shape: tuple[int, ...]) -> None:
    """Of a single token, in any shape, one direction."""
    model = HookedTransformer(SIZES)
    tokens = torch.randint(9, shape)
    directions = model.tokens_to_residual_directions(tokens)
    assert directions.shape == (8,) if tokens.numel() == 1 else (*shape, 8)
    assert torch.equal(directions.reshape(-1, 8), model.W_U.T[tokens.flatten()])


# ---- configs ---------------------------------------------------------------------------------------------------------


def test_fields_without_effect_are_accepted_at_their_default() -> None:
    cfg = HookedTransformerConfig(**SIZES, load_in_4bit=False, use_logn_attn=False, quantization_method=None)
    assert cfg.load_in_4bit is False
    assert HookedTransformerConfig.from_dict({**SIZES, "load_in_4bit": False}).load_in_4bit is False
    for name, value in {"load_in_4bit": True, "use_logn_attn": True, "quantization_method": "bitsandbytes"}.items():
        for make in (HookedTransformerConfig, lambda **given: HookedTransformerConfig.from_dict(given)):
            with pytest.raises(ValueError, match=name):
                make(**SIZES, **{name: value})
    with pytest.raises(TypeError, match="load_in_5bit"):
        HookedTransformerConfig(**SIZES, load_in_5bit=False)


@pytest.mark.parametrize(("act_fn", "is_one"), [("solu_ln", True), ("solu", False), ("gelu", False), (None, False)])
def test_activations_with_a_norm(act_fn: str | None, is_one: bool) -> None:
    cfg = HookedTransformerConfig(**{**SIZES, "act_fn": act_fn, "attn_only": act_fn is None})
    assert cfg.is_layer_norm_activation() is is_one


@pytest.mark.parametrize("kind", ["standard", "rotary"])
def test_more_positions_than_the_model_has(kind: str) -> None:
    """Programs that cut or pad text set `n_ctx` for a moment; the model reads no more than before."""
    model, texts = toy(kind), ids(batch=1, n_pos=N_CTX + 4)
    model.cfg.n_ctx = N_CTX + 8
    assert model(texts[:, :N_CTX]).shape == (1, N_CTX, 50)
    for run in (
        model,
        model.run_with_cache,
        lambda tokens: model.generate(tokens, max_new_tokens=1, verbose=False),
        lambda tokens: model.generate(tokens[:, :N_CTX], max_new_tokens=2, verbose=False, do_sample=False),
    ):
        with pytest.raises(ValueError, match=f"n_ctx.*{N_CTX}"):
            run(texts)
    cache = KeyValueCache(n_layers=3)
    model(texts[:, :N_CTX], past_kv_cache=cache)
    with pytest.raises(ValueError, match=f"n_ctx of {N_CTX}"):
        model(texts[:, :1], past_kv_cache=cache)
    model.cfg.n_ctx = N_CTX
    assert model.cfg.longest_input == N_CTX


def test_more_positions_than_an_encoder_has() -> None:
    model = HookedEncoder(SIZES)
    model.cfg.n_ctx = 20
    with pytest.raises(ValueError, match="n_ctx of 8"):
        model(torch.ones(1, 12).long())


def test_text_is_cut_to_the_positions_that_were_set() -> None:
    model = HookedTransformer.from_pretrained("demo")
    n_ctx, text = model.cfg.n_ctx, " Mary" * 400
    model.cfg.n_ctx = 300
    assert model.to_tokens(text).shape == (1, 300)
    with pytest.raises(ValueError, match=f"n_ctx of {n_ctx}"):
        model(model.to_tokens(text))
    model.cfg.n_ctx = n_ctx
    assert model.to_tokens(text).shape == (1, n_ctx)


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "rotary"])
def test_an_entry_of_a_cache(kind: str) -> None:
    model, tokens = toy(kind), ids(batch=3, n_pos=6)
    entry = KeyValueCacheEntry.init_cache_entry(model.cfg, "cpu", batch_size=3)
    heads = model.cfg.n_key_value_heads or model.cfg.n_heads
    for values in (entry.past_keys, entry.past_values):
        assert values is not None
        assert (values.shape, values.dtype) == ((3, 0, heads, model.cfg.d_head), model.cfg.dtype)
    cache = KeyValueCache(n_layers=model.cfg.n_layers)
    cache.entries = [KeyValueCacheEntry.init_cache_entry(model.cfg, batch_size=3) for _ in cache.entries]
    model(tokens[:, :4], past_kv_cache=cache)
    assert_close(model(tokens[:, 4:], past_kv_cache=cache), model(tokens)[:, 4:])


@pytest.mark.parametrize("normalization_type", ["LN", "LNPre"])
def test_a_gated_mlp_whose_activation_is_normalised(normalization_type: str) -> None:
    fields = {**SIZES, "gated_mlp": True, "act_fn": "solu_ln", "normalization_type": normalization_type}
    model = HookedTransformer(fields)
    assert (model.cfg.act_fn, model.cfg.gated_mlp) == ("solu_ln", True)
    assert any("mlp.ln.w" in name for name, _ in model.named_parameters()) is (normalization_type == "LN")
    _, cache = model.run_with_cache(ids(batch=1, n_pos=5) % 9)
    gate, linear = cache["pre", 0], cache["pre_linear", 0]
    assert_close(cache["blocks.0.mlp.hook_mid"], gate * gate.softmax(-1) * linear)
    model.verify()
    weights = {name: value for name, value in model.state_dict().items() if not name.endswith("b_gate")}
    with pytest.raises(ValueError, match="does not read W_in"):
        model.load_state_dict(weights)
    mlp = GatedMLP(fields)
    assert mlp.hook_mid is not None
    assert mlp.ln is not None


# ---- hooks -----------------------------------------------------------------------------------------------------------


class Transposed:
    """Positions first."""

    def convert(self, value: Tensor) -> Tensor:
        return value.transpose(0, 1)

    def revert(self, value: Tensor) -> Tensor:
        return value.transpose(0, 1)


def test_hooks_see_a_value_in_another_form() -> None:
    model, tokens = toy("standard"), ids(batch=2, n_pos=5)
    plain, point = model(tokens), model.blocks[1].hook_resid_pre
    point.enable_reshape(Transposed())
    assert torch.equal(model(tokens), plain)
    shapes: list[torch.Size] = []
    seen = [(point.name, lambda value, hook: shapes.append(value.shape))]
    assert_close(model.run_with_hooks(tokens, fwd_hooks=seen), plain)
    assert shapes == [(5, 2, 32)]
    assert model.run_with_cache(tokens)[1][point.name].shape == (5, 2, 32)

    def first(value: Tensor, hook: HookPoint) -> None:
        value[0] = 0

    edited = model.run_with_hooks(tokens, fwd_hooks=[(point.name, first)])
    point.enable_reshape()

    def first_position(value: Tensor, hook: HookPoint) -> None:
        value[:, 0] = 0

    assert_close(edited, model.run_with_hooks(tokens, fwd_hooks=[(point.name, first_position)]))
    assert not torch.equal(edited, plain)


def test_conversions_of_the_base_class() -> None:
    class Doubled(BaseTensorConversion):
        def handle_conversion(self, input_value: Tensor, *full_context: object) -> Tensor:
            return 2 * input_value

    point, seen = HookPoint(), []
    point.enable_reshape(Doubled(input_filter=lambda x: x + 1, output_filter=lambda x: x - 3))
    point.add_hook(lambda value, hook: seen.append(value.item()) or value + 10)
    assert point(torch.tensor(4.0)) == 17.0
    assert seen == [7.0]
    with pytest.raises(NotImplementedError, match="handle_conversion"):
        BaseTensorConversion().convert(torch.ones(1))


def test_gradients_in_another_form() -> None:
    point, x = HookPoint("batch", "pos"), torch.ones(2, 3, requires_grad=True)
    point.enable_reshape(Transposed())
    shapes: list[torch.Size] = []
    point.add_hook(lambda gradient, hook: shapes.append(gradient.shape), dir="bwd")
    (point(x) ** 2).sum().backward()
    assert shapes == [(3, 2)]
    assert x.grad is not None
    assert_close(x.grad, torch.full((2, 3), 2.0))


class Points(HookIntrospectionMixin):
    """No model, but some points by name."""

    def __init__(self) -> None:
        self.hook_dict = {name: HookPoint("batch") for name in ("a", "b", "c")}
        for dir, is_permanent in (("fwd", True), ("bwd", False)):
            self.hook_dict["a"].add_hook(lambda value, hook: None, dir=dir, is_permanent=is_permanent)
        self.hook_dict["b"].add_hook(lambda value, hook: None)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({}, {"a": 2, "b": 1}),
        ({"name_filter": "a"}, {"a": 2}),
        ({"name_filter": ["b", "c"]}, {"b": 1}),
        ({"name_filter": lambda name: name > "a"}, {"b": 1}),
        ({"dir": "bwd"}, {"a": 1}),
        ({"including_permanent": False, "dir": "fwd"}, {"b": 1}),
    ],
)
def test_hooks_of_a_class_that_has_only_points(given: dict[str, Any], names: dict[str, int]) -> None:
    assert {name: len(hooks) for name, hooks in Points().list_hooks(**given).items()} == names
    with pytest.raises(ValueError, match="dir"):
        Points().list_hooks(dir="sideways")


def test_who_has_hooks(shim: Any) -> None:
    mixin = shim("transformer_lens.hook_points").HookIntrospectionMixin
    assert mixin is HookIntrospectionMixin
    assert isinstance(toy("standard"), mixin)
    assert not isinstance(nn.Linear(1, 1), mixin)


# ---- parts and helpers -----------------------------------------------------------------------------------------------


def test_the_activation_in_a_model_is_an_instance_of_its_public_name() -> None:
    model = HookedTransformer({**SIZES, "act_fn": "xielu"})
    assert isinstance(model.blocks[0].mlp.act_fn, XIELU)
    assert isinstance(XIELU(), XIELU)
    assert not isinstance(nn.GELU(), XIELU)


def test_alibi_by_hand_is_that_of_a_model() -> None:
    model = toy("alibi")
    bias = AbstractAttention.create_alibi_bias(4, 6, "cpu")
    attn, (_, cache) = model.blocks[0].attn, model.run_with_cache(ids(1, 6))
    by_hand = attn.calculate_attention_scores(cache["q", 0], cache["k", 0]) + bias
    assert_close(attn.apply_causal_mask(by_hand), cache["attn_scores", 0])
    assert AbstractAttention.create_alibi_slope(3).tolist() == [[0, 0, 0], [-1, 0, 0], [-2, -1, 0]]


def test_weights_of_four_bits_are_refused_when_they_are_built(shim: Any) -> None:
    parts = shim("transformer_lens.components.mlps.gated_mlp_4bit")
    assert not isinstance(GatedMLP({**SIZES, "d_mlp": 16}), parts.GatedMLP4Bit)
    with pytest.raises(ValueError, match=r'quantize\("int4"\)'):
        parts.GatedMLP4Bit(SIZES)
    of_gpt_oss = shim("transformer_lens.components.mlps.gpt_oss_moe")
    assert (of_gpt_oss.GPT_OSS_ALPHA, of_gpt_oss.GPT_OSS_LIMIT) == (1.702, 7.0)


def test_dtypes_of_quantised_models_stay() -> None:
    packed = nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn), requires_grad=False)
    model = nn.Module()
    model.weight, model.packed = nn.Parameter(torch.ones(2)), packed
    model.config = SimpleNamespace(quantization_config={"quant_method": "fp8"})
    devices.maybe_cast_floating_params(model, torch.bfloat16)
    assert model.weight.dtype == torch.float32
    model.config = {"quantization_config": None}
    devices.maybe_cast_floating_params(model, torch.bfloat16)
    assert (model.weight.dtype, model.packed.dtype) == (torch.bfloat16, torch.float8_e4m3fn)


def test_a_table_is_of_one_position() -> None:
    with unchecked(), pytest.raises(ValueError, match=r"one position, \[d_vocab\], got \[3, 4\]"):
        logits_to_df(torch.zeros(3, 4))


# ---- a cache of given keys and values --------------------------------------------------------------------------------


def test_entries_of_given_keys_and_values() -> None:
    """A run that continues them is a run that continues the cache they come from."""
    model, tokens = toy("rotary"), ids(2, 7)
    past, new = tokens[:, :4], tokens[:, 4:]
    made = KeyValueCache.init_cache(model.cfg, batch_size=2)
    model(past, past_kv_cache=made)
    entries = [
        KeyValueCacheEntry(past_keys=e.past_keys.clone(), past_values=e.past_values.clone()) for e in made.entries
    ]
    given = KeyValueCache(entries=entries, previous_attention_mask=torch.ones(2, 4))
    frozen = KeyValueCache(entries=[KeyValueCacheEntry(past_keys=entries[0].past_keys, past_values=entries[0].past_values)],
                           frozen=True)  # fmt: skip
    assert (given.length, frozen.frozen, given.frozen) == (4, True, False)
    assert_close(model(new, past_kv_cache=given), model(tokens)[:, 4:])
    assert given.length == 7
    keys = torch.zeros(2, 3, 4, 8)
    for wrong, message in [
        ({"past_keys": keys}, "go together"),
        ({"past_keys": keys, "past_values": keys[:, 1:]}, "must be equal"),
    ]:
        with pytest.raises(ValueError, match=message):
            KeyValueCacheEntry(**wrong)
    for sizes in ({}, {"n_layers": 1, "entries": []}):
        with pytest.raises(ValueError, match="either n_layers or the entries"):
            KeyValueCache(**sizes)


def test_masks_are_appended_before_any_keys() -> None:
    cache, first, second = KeyValueCache(1), torch.tensor([[0, 1], [1, 1]]), torch.ones(2, 3, dtype=torch.long)
    assert torch.equal(cache.append_attention_mask(first), first)
    assert torch.equal(cache.append_attention_mask(second), torch.cat([first, second], 1))


def test_positions_of_an_encoder_are_its_parameter() -> None:
    sizes = {**SIZES, "attention_dir": "bidirectional", "normalization_type": "LN"}
    encoder = HookedEncoder(sizes)
    assert encoder.W_pos is encoder.embed.pos_embed.W_pos


# ---- rewrites of state dicts, losses, slices -------------------------------------------------------------------------


def test_a_vocabulary_is_read_off_the_weights() -> None:
    """A config without one is enough to rewrite a state dict."""
    model = HookedTransformer({**SIZES, "normalization_type": "LN"})
    state = model.state_dict()
    bare = HookedTransformerConfig(**{**SIZES, "d_vocab": -1, "normalization_type": "LN"})
    found = ProcessWeights.center_writing_weights(state, bare)
    expected = ProcessWeights.center_writing_weights(state, model.cfg)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value)
    with pytest.raises(ValueError, match="the state dict is empty"):
        ProcessWeights.center_writing_weights({}, bare)


def test_an_unembedding_is_centred_without_a_config() -> None:
    model = toy()
    state = model.state_dict()
    found, expected = ProcessWeights.center_unembed(state), ProcessWeights.center_unembed(state, model.cfg)
    for name in ("unembed.W_U", "unembed.b_U"):
        assert_close(found[name], expected[name])
        assert_apart(found[name], state[name])
    assert found["embed.W_E"] is state["embed.W_E"]


def test_what_is_asserted_elsewhere_is_refused_by_an_assertion_error_too() -> None:
    model, tokens = toy(), ids(2, 5)
    with pytest.raises(AssertionError, match="text needs a tokenizer"):
        model.generate("text", max_new_tokens=1)
    with pytest.raises(AssertionError, match="eos_token_id"):
        model.generate(tokens, max_new_tokens=1, stop_at_eos=True)
    with pytest.raises(AssertionError, match="attention_mask"):
        lm_cross_entropy_loss(torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.long), torch.ones(2, 4))


def test_a_mask_of_another_shape_than_the_ids_is_refused() -> None:
    """It was broadcast: one mask was used for all rows, or one loss for all entries of a mask."""
    for wrong in (torch.ones(1, 5), torch.ones(5), torch.ones(2, 4)):
        with pytest.raises(ValueError, match=r"attention_mask is .*, and the ids are \(2, 5\)"):
            lm_cross_entropy_loss(torch.zeros(2, 5, 3), torch.zeros(2, 5, dtype=torch.long), wrong)


@pytest.mark.parametrize("one", [torch.tensor(1), np.array(1), np.int64(1), 1])
def test_one_index_removes_the_axis(one: Any) -> None:
    table = torch.arange(6).view(2, 3)
    assert Slice(one).apply(table).tolist() == [3, 4, 5]
    assert Slice.unwrap(one).apply(table).tolist() == [[3, 4, 5]]


MODEL = HookedTransformer(SIZES)
IDS = torch.arange(6)[None]
WRONG: dict[str, tuple[Any, type[Exception]]] = {
    "position": (lambda: MODEL.get_token_position(8, IDS), ValueError),
    "position in rows": (lambda: MODEL.get_token_position(1, IDS.repeat(2, 1)), ValueError),
    "position mode": (lambda: MODEL.get_token_position(1, IDS, mode="middle"), ValueError),
    "top_k": (lambda: sample_logits(torch.zeros(1, 4), top_k=0), ValueError),
    "top_p": (lambda: sample_logits(torch.zeros(1, 4), top_p=1.5), ValueError),
    "freq_penalty": (lambda: sample_logits(torch.zeros(1, 4), freq_penalty=1.0), ValueError),
    "short prompt": (lambda: detect_head(MODEL, IDS[:, :1], "induction_head"), ValueError),
    "long prompt": (lambda: detect_head(MODEL, IDS.repeat(1, 2), "induction_head"), ValueError),
    "pattern": (lambda: detect_head(MODEL, IDS, torch.ones(6, 6)), ValueError),
    "size of a pattern": (lambda: detect_head(MODEL, IDS, torch.eye(4)), ValueError),
    "batch": (lambda: MODEL.run_with_cache(IDS.repeat(2, 1))[1].remove_batch_dim(), ValueError),
    "layer": (lambda: SVDInterpreter(MODEL).get_singular_vectors("w_in", layer_index=2), IndexError),
    "head": (lambda: SVDInterpreter(MODEL).get_singular_vectors("OV", 0, head_index=8), IndexError),
    "no head": (lambda: SVDInterpreter(MODEL).get_singular_vectors("OV", 0), ValueError),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_raise_the_errors_of_both_packages(name: str) -> None:
    call, here = WRONG[name]
    for error in (here, AssertionError):
        with pytest.raises(error):
            call()
