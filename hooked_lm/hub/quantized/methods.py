"""Which formats a `quantization_config` means, by its `quant_method`. What is not understood is refused by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.hub.quantized.bitsandbytes import FourBits, Int8Rows
from hooked_lm.hub.quantized.format import Format
from hooked_lm.hub.quantized.packed import AWQ, GPTQ, PackedRows
from hooked_lm.hub.quantized.scaled import Mxfp4, ScaledFloat8, ScaledFloat8OfV4, ScaledRows

# Globs of fields without effect on the weights: which modules are quantised and in which groups, as the file shows; how they were
# found; how another library computes with them.
NO_EFFECT = (
    *("quant_method", "method", "modules_to_*", "ignored_layers", "ignore", "lm_head", "group_size", "q_group_size", "version"),
    *("activation_scheme", "activation_scale_ub", "fmt", "scale_fmt", "expert_dtype", "dequantize", "backend", "provider"),
    *("bnb_4bit_*", "llm_int8_*", "load_in_*", "meta", "global_compression_ratio", "kv_cache_scheme", "quantizer", "sym"),
    *("desc_act", "act_group_aware", "static_groups", "true_sequential", "damp_*", "mse", "dataset", "tokenizer", "model_*"),
    *("batch_size", "module_name_*", "block_name_*", "modules_in_*", "max_input_length", "cache_block_outputs"),
    *("*exllama*", "use_cuda_fp16", "do_fuse", "fuse_max_seq_len"),
)  # fmt: skip
OF_ACTIVATIONS = ("*.input_scale", "*.input_zero_point", "*.output_scale", "*.output_zero_point", "*.[kv]_scale")
NOT_ROUNDED = "activations are not rounded to 8 bits, as kernels for such weights do"


@dataclass(frozen=True)
class Quantization:
    """How the weights of a checkpoint are quantised: in words, as formats, and what else should be said of it.

    `unused` are globs of tensors that the weights do not depend on.
    """

    name: str
    formats: tuple[Format, ...]
    note: str = ""
    unused: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + (f"; {self.note}" if self.note else "")


def quantization(options: Mapping[str, object]) -> Quantization:
    """What a `quantization_config` means. Raises ValueError for a method, or a field, that is not understood.

    >>> print(quantization({"quant_method": "mxfp4"}))
    mxfp4
    >>> quantization({"quant_method": "gptq", "bits": 3})
    Traceback (most recent call last):
    ...
    ValueError: bits=3 of gptq is not supported; only 2, 4 and 8 are
    """
    given = HFConfig(options, {})
    in_bits = given.get("load_in_4bit") or given.get("load_in_8bit")  # how early versions of bitsandbytes say it
    method = given.get("quant_method") or ("bitsandbytes" if in_bits else "")
    if method not in METHODS:
        raise ValueError(f"quant_method={method!r} is not supported; supported are {', '.join(sorted(METHODS))}")
    found = METHODS[method](given)
    if unread := given.unread(NO_EFFECT):
        fields = ", ".join(f"{field}={value!r}" for field, value in unread.items())
        raise ValueError(f"fields of a quantization_config of {method} that are not supported: {fields}")
    return found


def _float8(given: HFConfig) -> Quantization:
    """The fp8 of DeepSeek, and mxfp8, whose scales are powers of two: the dtypes of the tensors show which."""
    block = _block(given.get("weight_block_size", [128, 128]))
    name = f"{given.quant_method} in blocks of {block[0]} x {block[1]}" if block else f"{given.quant_method}"
    return Quantization(name, (ScaledFloat8(block), ScaledFloat8OfV4(block)), NOT_ROUNDED, ("*activation_scale",))


def _mxfp4(given: HFConfig) -> Quantization:
    return Quantization("mxfp4", (Mxfp4(),))


def _bitsandbytes(given: HFConfig) -> Quantization:
    if given.get("load_in_8bit", given.get("_load_in_8bit")):
        return Quantization("bitsandbytes int8", (Int8Rows(),), NOT_ROUNDED)
    return Quantization(f"bitsandbytes {given.get('bnb_4bit_quant_type', 'fp4')}", (FourBits(),))


def _awq(given: HFConfig) -> Quantization:
    given.require(bits=4, w_bit=4, zero_point=True)
    _one_of(given, ("version", "format", "checkpoint_format"), ("gemm",))
    return Quantization("awq with 4 bits", (AWQ(),))


def _gptq(given: HFConfig) -> Quantization:
    layout = _one_of(given, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    given.require(pack_dtype="int32", is_marlin_format=False)
    bits = given.bits
    if bits not in (2, 4, 8):
        raise ValueError(f"bits={bits!r} of gptq is not supported; only 2, 4 and 8 are")
    return Quantization(f"gptq with {bits} bits", (GPTQ(bits, less=1 if layout == "gptq" else 0),))


def _fbgemm(given: HFConfig) -> Quantization:
    return Quantization("fbgemm_fp8", (ScaledRows(),), NOT_ROUNDED, ("*.input_scale_ub",))


def _compressed(given: HFConfig) -> Quantization:
    given.require(quantization_status="compressed")
    sparsity, groups = given.get("sparsity_config") or {}, given.config_groups.values()
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(f"sparsity_config={sparsity!r} of compressed-tensors is not supported")
    kinds = set[tuple[bool, str, tuple[int, int] | None]]()  # sorted: those with zeros are looked for first
    for group in groups:
        layout, weights = group.get("format") or given.format, group.get("weights") or {}
        if layout not in _LAYOUTS:
            raise ValueError(f"format={layout!r} of compressed-tensors is not supported; {', '.join(_LAYOUTS)} are")
        kinds.add((bool(weights.get("symmetric", True)), layout, _block(weights.get("block_structure"))))
    rounds = any(group.get("input_activations") for group in groups) or given.get("kv_cache_scheme")
    formats = tuple(_LAYOUTS[layout](block, symmetric) for symmetric, layout, block in sorted(kinds, key=str))
    name = f"compressed-tensors {' and '.join(sorted({layout for _, layout, _ in kinds}))}"
    return Quantization(name, formats, NOT_ROUNDED if rounds else "", OF_ACTIVATIONS)


def _block(sizes: object) -> tuple[int, int] | None:
    """The rows and columns of a block. Raises ValueError for what is none."""
    if sizes is None:
        return None
    if isinstance(sizes, list) and [*map(type, sizes)] == [int, int] and min(sizes) > 0:
        return sizes[0], sizes[1]
    raise ValueError(f"a block must have two sizes, such as [128, 128], got {sizes!r}")


def _one_of(given: HFConfig, fields: tuple[str, ...], supported: tuple[str, ...]) -> str:
    """The layout that one of these fields names, in lower case; the first one that is supported if there is none."""
    found = {field: str(value).lower() for field in fields if (value := given.get(field)) is not None}
    for field, layout in found.items():
        if layout not in supported:
            raise ValueError(f"{field}={layout!r} of {given.quant_method} is not supported; {', '.join(supported)} are")
    return next(iter(found.values()), supported[0])


_LAYOUTS: Mapping[str, Callable[[tuple[int, int] | None, bool], Format]] = {
    "pack-quantized": lambda block, symmetric: PackedRows(symmetric),
    **dict.fromkeys(("float-quantized", "int-quantized", "naive-quantized"), ScaledRows),
}
METHODS: Mapping[str, Callable[[HFConfig], Quantization]] = {
    "awq": _awq, "bitsandbytes": _bitsandbytes, "compressed-tensors": _compressed, "fbgemm_fp8": _fbgemm, "fp8": _float8,
    "gptq": _gptq, "mxfp4": _mxfp4, "mxfp8": _float8,
}  # fmt: skip
