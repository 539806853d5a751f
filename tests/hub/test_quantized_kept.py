"""`quantize="keep"`: weights that stay in memory as the checkpoint has them compute the same bits as dequantised ones."""

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig

from hooked_lm import HookedEncoder, HookedTransformer
from hooked_lm.hub.quantized.scaled import Mxfp4
from hooked_lm.models.weights.kept import Kept
from hooked_lm.models.weights.quantize import weight_bytes
from hooked_lm.models.weights.quantized_weight import QuantizedWeight
from hooked_lm.pretrained import from_pretrained
from hooked_lm.pretrained import from_pretrained_no_processing as load
from tests.close import assert_apart, assert_equal
from tests.families import CASES, reference
from tests.families._case import draw
from tests.hub.test_quantized import (
    LLAMA,
    TOKENS,
    WRITERS,
    in_float8,
    is_projection,
    rewritten,
    saved_in_bfloat16,
    set_config,
)
from tests.hub.test_tl_checkpoint import toy as tl_toy
from tests.hub.test_tl_checkpoint import write as write_tl
from tests.models.weights.test_quantize import REFUSED

FP8 = {"quant_method": "fp8", "weight_block_size": [4, 4]}


def write(folder: Path, name: str, family: str = "llama") -> Path:
    """A tiny checkpoint of a family, whose projections are quantised in one of the formats."""
    reference(LLAMA if family == "llama" else next(case for case in CASES if case.family == family)).save_pretrained(
        folder
    )
    method, options, writer = WRITERS[name]
    rewritten(folder, writer, quant_method=method, **options)
    return folder


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    return write(tmp_path / "fp8", "fp8")


def both(folder: Path, **options: Any) -> tuple[Any, Any]:
    """The model of a checkpoint with dequantised weights, and with weights that are kept."""
    return load(folder, **options), load(folder, quantize="keep", **options)


def packed(model: Any) -> dict[str, QuantizedWeight]:
    return {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedWeight)}


def assert_same_bits(plain: Any, kept: Any, tokens: Tensor = TOKENS) -> None:
    """Logits, and all sites, are equal bit for bit."""
    with torch.no_grad():
        assert_equal(kept(tokens), plain(tokens))
        expected = plain.run_with_cache(tokens, names_filter=lambda name: True)[1]
        found = kept.run_with_cache(tokens, names_filter=lambda name: True)[1]
    assert found.keys() == expected.keys()
    for site in expected:
        assert_equal(found[site], expected[site])


# ---- every format ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_the_values_of_every_format(name: str, tmp_path: Path):
    folder = write(tmp_path, name)
    in_file = load_file(folder / "model.safetensors")
    n_bytes = sum(t.nbytes for stored, t in in_file.items() if "_proj." in stored)
    for dtype in (torch.float32, torch.bfloat16):
        plain, kept = both(folder, dtype=dtype)
        assert_same_bits(plain, kept)
        assert_equal(kept(TOKENS), plain(TOKENS))  # with gradients
        weights = packed(kept)
        assert {*weights} == {n for n, _ in kept.named_parameters() if re.search(r"blocks\.\d\.\w+\.W_", n)}
        assert sum(weight.nbytes for weight in weights.values()) == n_bytes
        others = sum(p.nbytes for n, p in plain.named_parameters() if n not in weights)
        assert weight_bytes(kept) == n_bytes + others < weight_bytes(plain)
        for n, weight in plain.named_parameters():
            own = kept.get_parameter(n)
            assert (own.shape, own.stride(), own.dtype) == (weight.shape, weight.stride(), weight.dtype)
            assert_equal(own.plain() if n in weights else own, weight)


def test_what_is_kept_is_said(fp8: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "hooked_lm"):
        kept = load(fp8, quantize="keep")
    (said,) = [record.message for record in caplog.records if "quantised" in record.message]
    assert "(fp8 in blocks of 20 x 20; activations are not rounded" in said
    assert said.endswith("14 weights stay in memory as they are there, and are dequantised at each use")
    assert (kept.cfg.dequantized_from, kept.cfg.kept_quantized) == ("fp8 in blocks of 20 x 20", True)
    assert not load(fp8).cfg.kept_quantized
    assert "'blocks.1.mlp.W_in', shape=(32, 48), dtype=torch.float32, packed as ScaledFloat8" in repr(
        kept.blocks[1].mlp.W_in
    )


def test_a_code_in_memory_matters(fp8: Path):
    plain, kept = both(fp8)
    codes = kept.blocks[1].mlp.W_out.packed.raw[""].view(torch.uint8)
    codes[3, 5] ^= 0x80  # its sign
    assert_apart(kept(TOKENS), plain(TOKENS))
    assert_equal(load(fp8, quantize="keep")(TOKENS), plain(TOKENS))  # the file is as before


# ---- runs ------------------------------------------------------------------------------------------------------------------


@pytest.mark.every_parameter
@pytest.mark.parametrize("name", ["fp8", "awq"])  # whose weights are matrices in memory [out, in] and [in, out]
def test_edits_and_gradients_of_activations(name: str, tmp_path: Path):
    sites = ["blocks.0.hook_resid_pre", "blocks.0.attn.hook_q", "blocks.0.attn.hook_z", "blocks.1.mlp.hook_post"]
    found = []
    for model in (models := both(write(tmp_path, name))):
        gradients: dict[str, Tensor] = {}

        def keep(gradient: Tensor, hook: Any, kept: dict[str, Tensor] = gradients) -> None:
            kept[hook.name] = gradient.clone()

        hooks = [("blocks.0.attn.hook_z", lambda z, hook: z * 0.5)]
        with model.hooks(fwd_hooks=hooks, bwd_hooks=[(site, keep) for site in sites]):
            logits = model(TOKENS)
            logits.log_softmax(-1)[:, -1, 3].sum().backward()
        found.append({"logits": logits.detach(), "W_E": model.W_E.grad, "ln": model.blocks[1].ln1.w.grad, **gradients})
    assert len(found[0]) == 7
    for site, expected in found[0].items():
        assert_equal(found[1][site], expected)
    assert_apart(found[1]["logits"], models[1](TOKENS).detach())


def test_a_backward_pass_saves_packed_weights(tmp_path: Path):
    """What autograd saves of a weight is what the checkpoint has, whether or not it is a matrix in memory."""
    for name in ("fp8", "awq"):
        _, kept = both(write(tmp_path / name, name))
        saved: list[Tensor] = []

        def note(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            kept(TOKENS)
        shapes = {(48, 32), (32, 48)}  # of MLPs
        assert [t for t in saved if tuple(t.shape) in shapes and type(t) is Tensor] == []
        assert sum(isinstance(t, QuantizedWeight) for t in saved) == 14


def test_biases_get_gradients(tmp_path: Path):
    plain, kept = both(write(tmp_path, "int8", "gpt_neox"))
    for model in (plain, kept):
        model(TOKENS).log_softmax(-1)[:, -1, 3].sum().backward()
    for name in ("attn.b_O", "mlp.b_in", "mlp.b_out"):
        assert_equal(*(m.blocks[1].get_parameter(name).grad for m in (kept, plain)))


def test_generation_and_values_of_each_head(fp8: Path):
    plain, kept = both(fp8)
    options = {"max_new_tokens": 5, "do_sample": False, "verbose": False, "stop_at_eos": False}
    assert_equal(kept.generate(TOKENS, **options), plain.generate(TOKENS, **options))
    names = ["blocks.0.attn.hook_result", "blocks.1.hook_q_input"]
    for model in (plain, kept):
        model.set_use_split_qkv_input(True)
    caches = [model.run_with_cache(TOKENS, names_filter=names)[1] for model in (plain, kept)]
    for name in names:
        assert_equal(caches[1][name], caches[0][name])
    assert_equal(kept.W_O, plain.W_O)
    assert_equal(kept.OV[0].AB, plain.OV[0].AB)


# ---- architectures ---------------------------------------------------------------------------------------------------------

# the tensors, in all layers, that are dequantised when they are read; all others stay
DEQUANTISED = {
    "qwen3": r"",
    "qwen3_moe": r"",
    "deepseek_v3": r"",
    "phi3": r"",
    "falcon": r"",
    "gpt_neox": r"",
    "gpt2": r"",
    "qwen3_next": r"linear_attn\.in_proj_(ba|qkvz)\.weight",
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow if re.search("_moe|next|v3", name) else []) for name in DEQUANTISED],
)
def test_what_stays_in_each_architecture(family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Of experts, of fused tensors that are cut into rows or by heads, and of tensors [in, out]."""
    reference(next(case for case in CASES if case.family == family)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    quantised = [
        n for n, t in tensors.items() if t.ndim == 2 and "emb" not in n and not re.search("head|w[tp]e|gate.weight", n)
    ]
    for name in quantised:
        stored, _ = in_float8(tensors.pop(name), 4)
        tensors |= {name.removesuffix(".weight") + ending: tensor for ending, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    set_config(tmp_path, **FP8)
    with caplog.at_level(logging.WARNING, "hooked_lm"):
        plain, kept = both(tmp_path)
    assert_same_bits(plain, kept)
    n_bytes = {n: sum(tensors[n + end].nbytes for end in ("", "_scale_inv")) for n in quantised}
    expected = [n for n in quantised if DEQUANTISED[family] and re.search(DEQUANTISED[family], n)]
    in_memory = sum(weight.nbytes for weight in packed(kept).values())
    assert in_memory == sum(n for name, n in n_bytes.items() if name not in expected)
    (said,) = [record.message for record in caplog.records if "stay in memory" in record.message]
    assert (f"; {len(expected)} others were dequantised to torch.float32: model." in said) == bool(expected)
    assert expected or said.endswith("at each use")
    assert len({id(w.packed) for w in packed(kept).values()}) == len(quantised) - len(expected)


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    case = next(case for case in CASES if case.family == "gpt_oss")
    config = GptOssConfig(**{**case.fields, "hidden_size": 64, "intermediate_size": 96})
    saved_in_bfloat16(draw(AutoModelForCausalLM.from_config(config), seed=0), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        n_experts, n_in, n_out = tensors.pop(name).shape
        tensors[name + "_blocks"] = torch.randint(256, (n_experts, n_out, n_in // 32, 16), dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(120, 126, (n_experts, n_out, n_in // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    set_config(tmp_path, quant_method="mxfp4")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_of_one_tensor_are_dequantised_one_by_one(
    dtype: torch.dtype, gpt_oss: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, kept = both(gpt_oss, dtype=dtype)
    assert_same_bits(plain, kept)
    experts = [n for n, _ in kept.named_parameters() if re.search(r"experts\.\d+\.W_", n)]
    assert {*packed(kept)} == {*experts}
    in_file = load_file(gpt_oss / "model.safetensors")
    n_bytes = sum(tensor.nbytes for name, tensor in in_file.items() if re.search("_(blocks|scales)$", name))
    assert sum(weight.nbytes for weight in packed(kept).values()) == n_bytes
    shapes, value = set[tuple[int, ...]](), Mxfp4.value

    def noted(self: Mxfp4, raw: Any, wanted: torch.dtype) -> Tensor:
        shapes.add(tuple(raw["_blocks"].shape))
        return value(self, raw, wanted)

    monkeypatch.setattr(Mxfp4, "value", noted)
    kept(TOKENS)
    assert shapes == {(1, 192, 2, 16), (1, 64, 3, 16)}


@pytest.mark.slow
def test_an_encoder(tmp_path: Path):
    reference(next(case for case in CASES if case.family == "bert")).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [n for n in tensors if re.search(r"encoder\..*(query|key|value|dense)\.weight", n)]:
        stored, _ = in_float8(tensors.pop(name), 4)
        tensors |= {name.removesuffix(".weight") + ending: tensor for ending, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    set_config(tmp_path, **FP8)
    plain, kept = both(tmp_path, cls=HookedEncoder)
    assert len(packed(kept)) == 6 * kept.cfg.n_layers
    assert_same_bits(plain, kept)


# ---- weights ---------------------------------------------------------------------------------------------------------------


def test_copies_and_moves(tmp_path: Path):
    """Parts of a fused matrix share what the checkpoint has, also after a move."""
    plain, kept = both(write(tmp_path, "nf4", "phi3"))
    attn = copy.deepcopy(kept).to("meta").blocks[0].attn
    assert isinstance(attn.W_Q, QuantizedWeight)
    assert attn.W_Q.device.type == attn.W_Q.plain().device.type == "meta"
    assert attn.W_Q.packed is attn.W_K.packed is attn.W_V.packed
    assert kept.blocks[0].attn.W_Q.packed is kept.to("cpu").blocks[0].attn.W_Q.packed
    assert kept.estimate((2, 8), what="cache").cache.nbytes == plain.estimate((2, 8), what="cache").cache.nbytes
    assert_equal(copy.deepcopy(kept)(TOKENS), plain(TOKENS))


def test_weights_that_are_not_mapped(fp8: Path):
    kept = load(fp8, quantize="keep", mmap=False)
    expected = kept(TOKENS)
    with (fp8 / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (fp8 / "model.safetensors").stat().st_size)
    assert_equal(kept(TOKENS), expected)


def test_a_move_computes_nothing_and_another_dtype_gives_values(fp8: Path):
    W = load(fp8, quantize="keep").blocks[0].mlp.W_in
    for moved in (W.to("cpu"), W.to(torch.float32), W.to(device="cpu", dtype=torch.float32), W.to(torch.zeros(1))):
        assert isinstance(moved, QuantizedWeight)
    for values in (W.to(torch.float64), W.to("cpu", copy=True), W.double(), W + 0):
        assert type(values) is Tensor
        assert_equal(values.float(), W.plain())


def test_the_rows_that_a_view_needs():
    """Only these are computed, if each of the tensors has them."""
    computed = []

    def values(raw: Any) -> Tensor:
        computed.append(len(raw["codes"]))
        return raw["codes"] * raw["scales"]

    codes, scales = torch.randn(4, 5, 3), torch.randn(4, 5, 1)
    whole = codes * scales
    kept = Kept("test", values, {"codes": codes, "scales": scales}, (4, 5, 3), torch.float32)
    weight = QuantizedWeight(kept, torch.empty(4, 5, 3, device="meta"), "W")
    cuts: list[tuple[Callable[[Tensor], Tensor], int]] = [
        (lambda w: w, 4),
        (lambda w: w[2], 1),
        (lambda w: w[1:3, :, 1].T, 2),
        (lambda w: w.flatten(0, 1)[7:11], 2),
        (lambda w: w[3, 4, 2], 1),
        (lambda w: w[::3], 4),
    ]
    for cut, n_rows in cuts:
        part = cut(weight)
        assert isinstance(part, QuantizedWeight)
        assert_equal(part.plain(), cut(whole))
        assert computed.pop() == n_rows
    assert weight[2].nbytes == kept.nbytes // 4
    flat = Kept("test", values, {"codes": codes, "scales": torch.ones(3)}, (4, 5, 3), torch.float32)
    assert_equal(QuantizedWeight(flat, torch.empty(4, 5, 3, device="meta")[2], "W").plain(), codes[2])
    assert computed == [4]


# ---- refusals --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(write(tmp_path_factory.mktemp("fp8"), "fp8"), quantize="keep")


@pytest.mark.every_parameter
@pytest.mark.parametrize("what", REFUSED)
def test_what_quantised_models_refuse(what: str, kept_model: Any):
    """In the words of a model that `quantize()` packed, but for what to do instead."""
    model, expected = kept_model, kept_model(TOKENS)
    attempt, message = REFUSED[what]
    start = re.split(r"\.\*|: ", message)[0]
    with pytest.raises(ValueError, match=start.replace("Int8Tensor", "ScaledFloat8")) as refused:
        attempt(model)
    advice = (
        "load the model with dtype=torch.float16" if what == "dtype" else "load the checkpoint without quantize='keep'"
    )
    assert advice in str(refused.value)
    assert_equal(model(TOKENS), expected)


def test_it_cannot_be_saved(fp8: Path, tmp_path: Path):
    kept = load(fp8, quantize="keep")
    for save in (kept.save, kept.save_pretrained):
        with pytest.raises(
            ValueError, match=r"save.* not for quantised weights, .*load the checkpoint without quantize='keep'"
        ):
            save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_folding_is_refused_before_a_weight_is_read(fp8: Path):
    (fp8 / "model.safetensors").unlink()
    no_folding = r"cannot be folded: load with from_pretrained_no_processing, or with fold_ln=False, center_writing_weights=False"
    for options in ({}, {"fold_ln": False}, {"cls": HookedTransformer}):
        with pytest.raises(ValueError, match=no_folding):
            from_pretrained(fp8, quantize="keep", **options)
    with pytest.raises(ValueError, match="cannot be folded"):
        load(fp8, quantize="keep", refactor_factored_attn_matrices=True)


def test_without_folding_from_pretrained_keeps_weights(fp8: Path):
    off = dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False)
    assert len(packed(HookedTransformer.from_pretrained(fp8, quantize="keep", **off))) == 14


@pytest.mark.parametrize("value", ["int8", "fp8"])
def test_other_values_are_refused(value: str):
    with pytest.raises(
        ValueError, match=rf"quantize={value!r} is not supported, only 'keep'.* model\.quantize\('int8'\)"
    ):
        load("nowhere", quantize=value)


def test_a_checkpoint_that_is_not_quantised(tmp_path: Path):
    reference(LLAMA).save_pretrained(tmp_path / "hf")
    load(tmp_path / "hf").save(tmp_path / "native")
    write_tl(tmp_path / "tl", tl_toy(act_fn="gelu"))
    for folder in ("hf", "native", "tl"):
        with pytest.raises(
            ValueError, match=rf"quantize='keep': .*{folder}.* is not quantised.* model\.quantize\('int8'\)"
        ):
            load(tmp_path / folder, quantize="keep")
    with pytest.raises(ValueError, match=r"hf_model, a LlamaForCausalLM is not quantised"):
        load("tiny", hf_model=reference(LLAMA), quantize="keep")


def test_weights_that_rest_elsewhere(fp8: Path):
    with pytest.raises(ValueError, match=r"quantize='keep': blocks\.1 would be on the CPU or on disk between runs"):
        load(fp8, quantize="keep", device_map={"": "cpu", "blocks.1": "disk"})


def test_tensors_that_do_not_fit_are_refused_when_they_are_used(fp8: Path):
    tensors = load_file(fp8 / "model.safetensors")
    name = next(name for name in tensors if is_projection(name))
    tensors[name + "_scale_inv"] = torch.ones(7, 3)
    save_file(tensors, fp8 / "model.safetensors", metadata={"format": "pt"})
    kept = load(fp8, quantize="keep")
    with pytest.raises(ValueError, match=rf"the quantised weight '{re.escape(name)}': 7 x 3 scales do not fit"):
        kept(TOKENS)
