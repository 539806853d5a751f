"""Checkpoints of quantised weights: against transformers where it dequantises on a CPU, else against the published formats.

The functions of `WRITERS` write a weight in a format, number by number, and say which values it then has.
"""

import copy
import gc
import json
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hooked_lm import HookedTransformer, hub
from hooked_lm.hub.quantized import METHODS, Dequantized, quantization
from hooked_lm.pretrained import from_pretrained_no_processing as load
from hooked_lm.weights import open_checkpoint
from hooked_lm.weights.shards import Headers
from tests.close import assert_apart, assert_close, assert_equal
from tests.families import CASES, reference
from tests.families._case import SIZES, draw
from tests.families._composite import composite

Written = tuple[dict[str, Tensor], Tensor]  # tensors by the endings of their names after that of the module; the values
LLAMA = next(case for case in CASES if str(case) == "llama-grouped")
TOKENS = torch.arange(14).view(2, 7)
BLOCK, GROUP = 20, 16  # blocks of 20 x 20 are cut off at the edges of the matrices here


# ---- formats, number by number -------------------------------------------------------------------------------------


def in_float8(weight: Tensor, block: int = BLOCK) -> Written:
    """8-bit floating point, with a scale for each block; the last ones of a row or column are smaller."""
    stored, values = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight, dtype=torch.float32)
    scales = torch.empty(-(-weight.shape[0] // block), -(-weight.shape[1] // block))
    for row, column in torch.cartesian_prod(*map(torch.arange, scales.shape)).tolist():
        at = slice(block * row, block * (row + 1)), slice(block * column, block * (column + 1))
        scales[row, column] = weight[at].float().abs().max() / 448
        stored[at] = (weight[at].float() / scales[row, column]).to(torch.float8_e4m3fn)
        values[at] = stored[at].float() * scales[row, column]
    return {".weight": stored, ".weight_scale_inv": scales}, values


def places(weight: Tensor, table: Tensor) -> Tensor:
    """The place of the nearest entry of a table."""
    return (weight[..., None] - table).abs().argmin(-1)


def in_4_bits(weight: Tensor, double: bool = False) -> Written:
    """A table of 16 numbers, times the largest magnitude of each 64 of them, which a second table may hold."""
    table = torch.tensor([-1.0, -0.7, -0.5, -0.4, -0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.25, 0.3, 0.4, 0.6, 0.7, 1])
    blocks = weight.float().view(-1, 64)
    largest, nested, state = blocks.abs().amax(1), {}, {"shape": [*weight.shape], "dtype": "float16", "blocksize": 64}
    absmax = largest
    if double:
        offset, of_largest = largest.mean().item(), torch.linspace(-1, 1, 256)
        most = torch.stack([part.abs().max() for part in (largest - offset).split(256)])
        of_block = most.repeat_interleave(256)[: len(largest)]
        absmax = places((largest - offset) / of_block, of_largest).to(torch.uint8)
        largest = of_largest[absmax.int()] * of_block + offset
        nested = {".weight.nested_absmax": most, ".weight.nested_quant_map": of_largest}
        state |= {"nested_blocksize": 256, "nested_offset": offset, "nested_dtype": "float32"}
    index = places(blocks / blocks.abs().amax(1, keepdim=True), table)
    pairs = index.flatten().view(-1, 2)
    stored = {
        ".weight": (16 * pairs[:, 0] + pairs[:, 1]).to(torch.uint8)[:, None],
        ".weight.absmax": absmax,
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }
    return stored | nested, (table[index] * largest[:, None]).view(weight.shape).half()


def in_8_bits(weight: Tensor) -> Written:
    """Integers, with the largest magnitude of each row."""
    largest = weight.float().abs().amax(1)
    stored = (weight.float() / largest[:, None] * 127).round().to(torch.int8)
    tensors = {".weight": stored, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, stored.float() * largest[:, None] * 7.874015718698502e-3


def packed(numbers: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Rows of numbers as words of 32 bits, of which the first has the lowest bits, or the one at `order[0]`."""
    per = 32 // bits
    words = []
    for row in numbers.tolist():
        of_word = [row[i : i + per] for i in range(0, len(row), per)]
        whole = [sum(part[k] << bits * i for i, k in enumerate(order or range(per))) for part in of_word]
        words.append([word - 2**32 if word >= 2**31 else word for word in whole])
    return torch.tensor(words, dtype=torch.int32)


def in_groups(weight: Tensor, bits: int, group: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [out, in], zeros and scales [out, group] in half precision, and the values; `group` has that of each input."""
    zeros, scales = (torch.empty(len(weight), int(group.max()) + 1, dtype=torch.float16) for _ in range(2))
    numbers, most = torch.empty_like(weight, dtype=torch.int64), 2**bits - 1
    for g in range(zeros.shape[1]):
        part = weight[:, group == g].float()
        scales[:, g] = (part.amax(1) - part.amin(1)) / most
        zeros[:, g] = (-part.amin(1) / scales[:, g]).round().clamp(1, most)
        numbers[:, group == g] = (part / scales[:, g, None] + zeros[:, g, None]).round().clamp(0, most).long()
    values = (numbers.half() - zeros[:, group]) * scales[:, group]
    return numbers, zeros.long(), scales, values


def of_neighbours(weight: Tensor) -> Tensor:
    return torch.arange(weight.shape[1]) // GROUP


def in_awq(weight: Tensor) -> Written:
    numbers, zeros, scales, values = in_groups(weight, 4, of_neighbours(weight))
    words = (packed(each.T, 4, (0, 2, 4, 6, 1, 3, 5, 7)) for each in (numbers, zeros))
    return dict(zip((".qweight", ".qzeros"), words, strict=True)) | {".scales": scales.T.contiguous()}, values


def in_gptq(weight: Tensor, bits: int = 4, less: int = 1) -> Written:
    """With the inputs of a group anywhere, as with act-order."""
    group = of_neighbours(weight)[torch.randperm(weight.shape[1])]
    numbers, zeros, scales, values = in_groups(weight, bits, group)
    words = {".qweight": packed(numbers, bits).T.contiguous(), ".qzeros": packed(zeros.T - less, bits)}
    return words | {".scales": scales.T.contiguous(), ".g_idx": group.int()}, values


def in_packed_rows(weight: Tensor, bits: int = 4, symmetric: bool = True) -> Written:
    numbers, zeros, scales, values = in_groups(weight, bits, of_neighbours(weight))
    if symmetric:
        values = (numbers.half() - 2 ** (bits - 1)) * scales[:, of_neighbours(weight)]
    tensors = {
        ".weight_packed": packed(numbers, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    return tensors | ({} if symmetric else {".weight_zero_point": packed(zeros.T, bits).T.contiguous()}), values


def in_scaled_rows(weight: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Written:
    scales = (weight.float().abs().amax(1, keepdim=True) / 100).bfloat16()
    stored = (weight.float() / scales.float()).to(dtype)
    return {".weight": stored, ".weight_scale": scales}, stored.bfloat16() * scales


def compressed(layout: str, symmetric: bool = True, **fields: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": symmetric}}}
    return {
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
        **fields,
    }


# quant_method, the other fields, how a weight is written
WRITERS: dict[str, tuple[str, dict[str, Any], Callable[[Tensor], Written]]] = {
    "fp8": ("fp8", {"weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}, in_float8),
    "nf4": ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, in_4_bits),
    "nf4 twice": ("bitsandbytes", {"bnb_4bit_use_double_quant": True}, lambda weight: in_4_bits(weight, double=True)),
    "int8": ("bitsandbytes", {"load_in_8bit": True, "llm_int8_threshold": 6.0}, in_8_bits),
    "awq": ("awq", {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, in_awq),
    "gptq": ("gptq", {"bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}, in_gptq),
    "gptq v2": ("gptq", {"bits": 4, "checkpoint_format": "gptq_v2"}, lambda weight: in_gptq(weight, less=0)),
    "gptq in 8 bits": ("gptq", {"bits": 8, "dynamic": {}}, lambda weight: in_gptq(weight, bits=8)),
    "gptq in 2 bits": ("gptq", {"bits": 2}, lambda weight: in_gptq(weight, bits=2)),
    "packed": ("compressed-tensors", compressed("pack-quantized", sparsity_config={"format": "dense"}), in_packed_rows),
    "packed with zeros": (
        "compressed-tensors",
        compressed("pack-quantized", symmetric=False),
        lambda weight: in_packed_rows(weight, 8, symmetric=False),
    ),
    "float": ("compressed-tensors", compressed("float-quantized"), in_scaled_rows),
    "int": ("compressed-tensors", compressed("int-quantized"), lambda weight: in_scaled_rows(weight, torch.int8)),
    "fbgemm": ("fbgemm_fp8", {"activation_scale_ub": 1200.0}, in_scaled_rows),
}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def is_projection(name: str) -> bool:
    return name.endswith(("proj.weight", "_mqa.weight", "_b_proj.weight"))


def rewritten(folder: Path, write: Callable[[Tensor], Written], where: str = "", **config: Any) -> dict[str, Tensor]:
    """Quantises the projections of a checkpoint in place; returns the values of all of its weights."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [*tensors]:
        values[name] = tensors[name]
        if is_projection(name) and where in name:
            stored, values[name] = write(tensors.pop(name))
            tensors |= {name.removesuffix(".weight") + ending: tensor for ending, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_config(folder, **config)
    return values


def set_config(folder: Path, **config: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    reference(LLAMA).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def quantised(llama: Path) -> Path:
    """A Llama in fp8."""
    method, options, write = WRITERS["fp8"]
    rewritten(llama, write, quant_method=method, **options)
    return llama


def same_weights(model: HookedTransformer, expected: Mapping[str, Tensor]) -> None:
    """The model, in the format of transformers, has these weights bit for bit, projections in its own dtype."""
    found = model.to_hf().state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert not is_projection(name) or found[name].dtype == model.cfg.dtype
        assert_equal(found[name], weight.to(found[name].dtype))


def dequantized(tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32, **options: Any) -> Dequantized:
    """The weights that tensors hold, by a `quantization_config`."""
    found = quantization(options)
    return Dequantized(tensors, found.formats, dtype, found.unused)


@pytest.mark.every_parameter
@pytest.mark.parametrize("name", WRITERS)
def test_weights_have_the_values_of_the_published_formats(name: str):
    method, options, write = WRITERS[name]
    stored, values = write(0.1 * torch.randn(32, 48))
    tensors = {"m" + ending: tensor for ending, tensor in stored.items()} | {"norm.weight": torch.ones(3)}
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantized(tensors, dtype, quant_method=method, **options)
        assert [*found] == ["norm.weight", "m.weight"]
        assert found.shape("m.weight") == found["m.weight"].shape
        assert found.dtype("m.weight") == found["m.weight"].dtype
        assert_equal(found["m.weight"].to(dtype), values.to(dtype))
        assert found["norm.weight"] is tensors["norm.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_model_of_each_method(name: str, llama: Path, caplog: pytest.LogCaptureFixture):
    method, options, write = WRITERS[name]
    values = rewritten(llama, write, quant_method=method, **options)
    for dtype in (torch.float32, torch.bfloat16):
        with caplog.at_level(logging.WARNING, "hooked_lm"):
            model = load(llama, dtype=dtype)
        same_weights(model, values)
        said = [record.message for record in caplog.records if "dequantised" in record.message]
        assert len(said) == 1
        assert method in said[0]
        assert str(dtype) in said[0]
        assert model.cfg.dequantized_from.startswith(method)
        caplog.clear()
    assert_apart(load(llama)(TOKENS), reference(LLAMA)(TOKENS).logits)  # it is another model than before


# ---- against transformers ----------------------------------------------------------------------------------------------


def as_in_transformers(folder: Path, dtype: torch.dtype) -> HookedTransformer:
    """The model of a folder, whose weights are bit for bit those that transformers dequantises."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager")
    model = load(folder, dtype=dtype)
    same_weights(model, {name: weight.detach() for name, weight in theirs.state_dict().items()})
    if dtype is torch.float32:  # in half precision, experts may be chosen by rounding
        assert_close(model(TOKENS), theirs.float()(TOKENS).logits)
    return model


def saved_in_bfloat16(model: Any, folder: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_fp8_as_in_transformers(family: str, dtype: torch.dtype, tmp_path: Path):
    saved_in_bfloat16(reference(next(case for case in CASES if case.family == family)), tmp_path)
    rewritten(tmp_path, lambda weight: in_float8(weight, 4), quant_method="fp8", weight_block_size=[4, 4])
    as_in_transformers(tmp_path, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_as_in_transformers(dtype: torch.dtype, tmp_path: Path):
    case = next(case for case in CASES if case.family == "gpt_oss")
    theirs = AutoModelForCausalLM.from_config(
        GptOssConfig(**{**case.fields, "hidden_size": 64, "intermediate_size": 96})
    )
    saved_in_bfloat16(draw(theirs, seed=0), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        n_experts, n_in, n_out = tensors.pop(name).shape
        tensors[name + "_blocks"] = torch.randint(256, (n_experts, n_out, n_in // 32, 16), dtype=torch.uint8)
        tensors[name + "_scales"] = torch.randint(120, 126, (n_experts, n_out, n_in // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    set_config(tmp_path, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    model = as_in_transformers(tmp_path, dtype)
    assert model.cfg.dequantized_from == "mxfp4"


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    "kind", ["a scale", "a scale for each row", "powers of two", "bytes", "experts", "4 bits", "of V4"]
)
def test_further_scales_of_fp8_as_in_transformers(kind: str):
    numbers = torch.randn(8, 64).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 130, (8, 2), dtype=torch.uint8)
    powers = exponents.view(torch.float8_e8m0fnu)
    stored, scales = {
        "a scale": (numbers, torch.tensor(0.3)),
        "a scale for each row": (numbers, torch.rand(8, 1)),
        "powers of two": (numbers, powers),
        "bytes": (numbers, exponents),
        "experts": (numbers.view(2, 4, 64), torch.rand(2, 2, 4)),
        "4 bits": (torch.randint(-128, 128, (8, 32), dtype=torch.int8), powers),
        "of V4": (numbers, powers),
    }[kind]
    names = ("m.weight", "m.scale") if kind == "of V4" else ("m.weight", "m.weight_scale_inv")
    tensors = dict(zip(names, (stored, scales), strict=True)) | {"m.activation_scale": torch.tensor(1.0)}
    for dtype in (torch.float32, torch.bfloat16):
        found = dequantized(tensors, dtype, quant_method="fp8", weight_block_size=None, activation_scheme="static")
        expected = Fp8Dequantize(None)._dequantize_one(stored, scales, dtype)
        assert [*found] == ["m.weight"]
        assert found.shape("m.weight") == expected.shape
        assert found.dtype("m.weight") == dtype
        assert_equal(found["m.weight"], expected)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_one_weight_after_the_other_is_read(quantised: Path):
    """A look-up reads the tensors of one weight, and nothing of it is kept."""

    class Recorded(Headers):
        def __init__(self, tensors: Headers):
            self.tensors, self.read = tensors, list[str]()

        def __getitem__(self, name: str) -> Tensor:
            self.read.append(name)
            return self.tensors[name]

        def __contains__(self, name: object) -> bool:
            return name in self.tensors

        def __iter__(self) -> Iterator[str]:
            return iter(self.tensors)

        def __len__(self) -> int:
            return len(self.tensors)

        def shape(self, name: str) -> tuple[int, ...]:
            return self.tensors.shape(name)

        def dtype(self, name: str) -> torch.dtype:
            return self.tensors.dtype(name)

    files = Recorded(open_checkpoint(quantised))
    method, options, _ = WRITERS["fp8"]
    found = dequantized(files, torch.bfloat16, quant_method=method, **options)
    assert not any(name.endswith("_inv") for name in found)
    assert {found.dtype(name) for name in found if is_projection(name)} == {torch.bfloat16}
    assert all(len(found.shape(name)) == 2 for name in found if is_projection(name))
    name = next(name for name in found if is_projection(name))
    for _ in range(2):
        files.read.clear()
        weight = weakref.ref(found[name])
        gc.collect()  # what checks annotations keeps the frames of calls
        assert weight() is None
        assert {*files.read} == {name, name + "_scale_inv"}


def test_modules_that_were_left_out_keep_their_weights(llama: Path):
    plain = load_file(llama / "model.safetensors")

    def only_of_mlps(weight: Tensor) -> Written:
        return in_float8(weight) if 48 in weight.shape else ({".weight": weight}, weight)

    left = ["lm_head", "model.layers.0.self_attn", "model.layers.1.self_attn"]
    values = rewritten(
        llama, only_of_mlps, quant_method="fp8", weight_block_size=[BLOCK] * 2, modules_to_not_convert=left
    )
    assert_equal(values["model.layers.0.self_attn.q_proj.weight"], plain["model.layers.0.self_attn.q_proj.weight"])
    same_weights(load(llama), values)


def test_the_dtype_of_the_config(quantised: Path):
    file = quantised / "config.json"
    for written, expected in (("float16", torch.float16), (None, torch.bfloat16)):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": written}))
        assert load(quantised, dtype="auto").cfg.dtype == expected


def test_the_language_model_of_a_quantised_composite(tmp_path: Path):
    """The config of the part may say it, as that of Kimi-K2.5 does."""
    fields = {**SIZES, "num_key_value_heads": 2, "model_type": "llama"}
    draw(composite("llava", fields), seed=0).save_pretrained(tmp_path)
    draw(composite("llava", fields), seed=0).save_pretrained(tmp_path / "plain")
    method, options, write = WRITERS["fp8"]
    values = rewritten(tmp_path, write, ".layers.", quant_method=method, **options)
    save_file(values, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    file.write_text(json.dumps(config))
    model = load(tmp_path)
    assert model.cfg.dequantized_from == "fp8 in blocks of 20 x 20"
    assert_equal(model(TOKENS), load(tmp_path / "plain")(TOKENS))


# ---- writing ---------------------------------------------------------------------------------------------------------


def test_what_is_written_says_where_it_comes_from(quantised: Path, tmp_path: Path):
    model = load(quantised)
    model.save(tmp_path / "native")
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["dequantized_from"] == "fp8 in blocks of 20 x 20"
    assert "quantization_config" not in config
    assert_close(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(TOKENS).logits, model(TOKENS))
    for again in (HookedTransformer.load(tmp_path / "native"), load(tmp_path / "hf")):
        assert again.cfg.dequantized_from == model.cfg.dequantized_from
        assert_equal(again(TOKENS), model(TOKENS))
    assert load("tiny", hf_model=reference(LLAMA)).cfg.dequantized_from is None


@pytest.mark.slow
def test_a_quantised_checkpoint_is_verified(llama: Path):
    rewritten(llama, lambda weight: in_float8(weight, 16), quant_method="fp8", weight_block_size=[16, 16])
    assert hub.verify(llama).ok


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quant_method": "hqq"},
            r"quant_method='hqq' is not supported; supported are awq, bitsandbytes",
        ),
        ({"bits": 4}, r"quant_method='' is not supported"),
        ({"quant_method": "fp8", "twist": 2}, r"of a quantization_config of fp8 that are not supported: twist=2"),
        ({"quant_method": "fp8", "weight_block_size": [0, 4]}, r"two sizes, such as \[128, 128\], got \[0, 4\]"),
        ({"quant_method": "gptq", "bits": 3}, r"bits=3 of gptq is not supported; only 2, 4 and 8"),
        ({"quant_method": "gptq"}, r"the config has no field 'bits'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"checkpoint_format='marlin' of gptq"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:lm_head": {}}}, r"dynamic="),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, r"version='gemv' of awq is not supported; gemm are"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, r"zero_point=False is not supported"),
        (
            {"quant_method": "compressed-tensors", **compressed("nvfp4-pack-quantized")},
            r"format='nvfp4-pack-quantized'",
        ),
        (
            {"quant_method": "compressed-tensors", **compressed("pack-quantized", transform_config={"a": 1})},
            r"transform_config=",
        ),
        (
            {"quant_method": "compressed-tensors", **compressed("pack-quantized", sparsity_config={"format": "2:4"})},
            r"sparsity_config=",
        ),
    ],
)
def test_what_is_not_understood_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        quantization(options)


@pytest.mark.parametrize(
    "options", [{"quant_method": "hqq"}, {"quant_method": "compressed-tensors", "config_groups": 3}]
)
def test_it_is_refused_before_a_weight_is_read(options: dict[str, Any], llama: Path):
    set_config(llama, **options)
    (llama / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"quantization_config in .*config\.json: .*original checkpoint.* pass hf_model=model"
    ):
        load(llama)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_a_part_of_a_weight_that_is_missing_is_named(name: str, llama: Path):
    method, options, write = WRITERS[name]
    rewritten(llama, write, quant_method=method, **options)
    tensors = load_file(llama / "model.safetensors")
    stem = "model.layers.1.mlp.up_proj"
    endings = {each.removeprefix(stem) for each in tensors if each.startswith(stem)} - {
        ".weight_format",
        ".weight_zero_point",
    }
    for ending in endings:
        some = {each: tensor for each, tensor in tensors.items() if each != stem + ending}
        save_file(some, llama / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=stem):
            load(llama)


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (
            {"weight": torch.ones(8, 8).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(3, 2)},
            {"quant_method": "fp8", "weight_block_size": [4, 4]},
            r"3 x 2 scales do not fit a weight of 8 x 8, and the config says blocks of 4 x 4",
        ),
        (
            {"weight": torch.ones(8, 8), "weight_scale_inv": torch.ones(2, 2)},
            {"quant_method": "fp8"},
            r"its numbers are torch.float32, not of 8 bits",
        ),
        (
            {"weight": torch.ones(4, 4, dtype=torch.int8), "SCB": torch.ones(4), "weight_format": torch.tensor(2)},
            {"quant_method": "bitsandbytes", "load_in_8bit": True},
            r"its weight_format is 2, .* only 0, by rows",
        ),
        (
            {
                "weight": torch.ones(8, dtype=torch.uint8),
                "weight.absmax": torch.ones(1),
                "weight.quant_map": torch.ones(16),
            },
            {"quant_method": "bitsandbytes"},
            r"0 of the tensors \.quant_state",
        ),
        (
            {
                "qweight": torch.ones(4, 8, dtype=torch.int32),
                "qzeros": torch.ones(1, 1, dtype=torch.int32),
                "scales": torch.ones(1, 8),
                "g_idx": torch.zeros(30, dtype=torch.int32),
            },
            {"quant_method": "gptq", "bits": 4},
            r"words of 4 bits are not of 30 inputs",
        ),
        (
            {
                "weight_packed": torch.ones(4, 3, dtype=torch.int32),
                "weight_scale": torch.ones(4, 1),
                "weight_shape": torch.tensor([4, 32]),
            },
            {"quant_method": "compressed-tensors", **compressed("pack-quantized")},
            r"hold no 4 x 32 numbers of 2, 4 or 8 bits",
        ),
        (
            {
                "w_blocks": torch.ones(2, 4, 1, 16, dtype=torch.uint8),
                "w_scales": torch.ones(2, 3, 1, dtype=torch.uint8),
            },
            {"quant_method": "mxfp4"},
            r"scales of shape \[2, 3, 1\] do not fit blocks of shape \[2, 4, 1, 16\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_each_other(tensors: dict[str, Tensor], options: dict[str, Any], message: str):
    found = dequantized({f"m.{name}": tensor for name, tensor in tensors.items()}, **options)
    (name,) = found
    with pytest.raises(ValueError, match=rf"the quantised weight '{name}': .*{message}"):
        found[name]


def test_every_method_is_tried():
    assert {method for method, _, _ in WRITERS.values()} | {"mxfp4", "mxfp8"} == {*METHODS}
