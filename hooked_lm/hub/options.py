"""The options of loading a checkpoint; unsupported ones raise ValueError."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.callers import warn_caller
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.embeddings.stored_rotary import RotaryTable
from hooked_lm.hub.device_map import Device, Placement, default_device
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.tree import DecoderConfig, EncoderConfig

DOWNLOAD_OPTIONS = ("token", "cache_dir", "force_download")
QUANTIZED_OPTIONS = ("quantization", "quantization_config", "load_in_8bit", "load_in_4bit")
QUANTIZED_TENSORS = (
    "torchao",
    "bitsandbytes",
    "quanto",
    "optimum",
)  # packages of tensors that hold integers and scales
QUANTIZE_LATER = (
    "weights are quantised after loading and folding: leave this out, and call model.quantize('int8') or 'int4'"
)
KEEP = "keep"
NOT_QUANTIZED = (
    "use the original checkpoint, and call model.quantize('int8') or 'int4'. If there is none, load this one with transformers "
    "as ordinary weights (model.dequantize() for bitsandbytes, dequantize=True in the configs of other methods), and pass "
    "hf_model=model"
)


@dataclass(frozen=True)
class Options:
    """The arguments of `from_pretrained` that control the loading of a checkpoint.

    `hf_kwargs` are download options and config fields to override. `reads_images` is the model class to load a checkpoint as, if
    that class reads images; None: of a composite, only the language model is loaded. Raises ValueError for `trust_remote_code`
    and for quantised weights.
    """

    hf_model: Any = None
    checkpoint_index: int | None = None
    checkpoint_value: int | None = None
    revision: str | None = None
    local_files_only: bool = False
    hf_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None
    device: torch.device | str = "cpu"
    placement: Placement | None = None  # on several devices
    dtype: torch.dtype | str = torch.float32
    first_n_layers: int | None = None
    n_ctx: int | None = None
    default_prepend_bos: bool | None = None
    default_padding_side: str | None = None
    mmap: bool = True
    rewritten: bool = False  # whether the weights of a decoder are changed after loading
    reads_images: str | None = None
    quantize: str | None = None  # "keep": quantised weights stay as the checkpoint has them

    def __post_init__(self) -> None:
        if self.hf_kwargs.get("trust_remote_code"):
            raise ValueError("trust_remote_code=True is refused: code from a checkpoint is never run")
        if asked := [name for name in QUANTIZED_OPTIONS if self.hf_kwargs.get(name)]:
            raise ValueError(f"{asked[0]}={self.hf_kwargs[asked[0]]!r} is not supported: {QUANTIZE_LATER}")
        if self.quantize not in (None, KEEP):
            only = f"only {KEEP!r}, for a checkpoint that is quantised already"
            raise ValueError(f"quantize={self.quantize!r} is not supported, {only}: {QUANTIZE_LATER}")
        if self.quantize is not None and self.rewritten:
            raise ValueError(
                f"quantize={KEEP!r} leaves the weights as the checkpoint has them, so they cannot be folded: load with "
                "from_pretrained_no_processing, or with fold_ln=False, center_writing_weights=False, center_unembed=False, "
                "fold_value_biases=False"
            )
        if isinstance(self.hf_model, nn.Module):
            for name, weight in self.hf_model.named_parameters():
                if type(weight).__module__.partition(".")[0] in QUANTIZED_TENSORS:
                    raise ValueError(
                        f"{name!r} of the given model is of type {type(weight).__name__}, which is quantised: load its "
                        f"checkpoint by name, without hf_model=, or {NOT_QUANTIZED}"
                    )

    def check_keep(self, is_quantized: bool, name: object) -> None:
        """Raises ValueError if quantised weights shall be kept, and the checkpoint has none."""
        if self.quantize is not None and not is_quantized:
            raise ValueError(f"quantize={KEEP!r}: {name} is not quantised. To quantise its weights, {QUANTIZE_LATER}")

    @property
    def download(self) -> dict[str, Any]:
        """The options of a download from the hub, for `find`."""
        more = {name: self.hf_kwargs[name] for name in DOWNLOAD_OPTIONS if name in self.hf_kwargs}
        return {"revision": self.revision, "local_files_only": self.local_files_only, **more}

    @property
    def overrides(self) -> dict[str, Any]:
        """The config fields in `hf_kwargs`, to override."""
        beside = (*DOWNLOAD_OPTIONS, "trust_remote_code")
        return {name: value for name, value in self.hf_kwargs.items() if name not in beside}


def one_device(
    device: Device | None, device_map: Device | Mapping[str, Device] | None = None, move_to_device: bool = True
) -> torch.device:
    """The device of these arguments, of which `device_map` names one; by default the first GPU, else the CPU.

    Raises ValueError for a name that torch does not know.
    """
    if isinstance(device_map, Mapping):
        device_map = next(iter(device_map.values()))
    if device_map is not None:
        if device is not None:
            raise ValueError(f"give device={device!r} or device_map={device_map!r}, not both")
        device = device_map
    if not move_to_device:
        return torch.device("cpu")
    try:
        return default_device() if device is None else torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"there is no device {device!r}: give 'cpu', 'cuda', 'cuda:1', 'mps' or another of torch"
        ) from None


def real_dtype(dtype: torch.dtype | str, tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The torch dtype; "auto" is that of the tensors. Raises ValueError for dtypes that are not floating point."""
    if dtype == "auto":
        return next((t.dtype for t in tensors.values() if t.is_floating_point()), torch.float32)
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating point type; e.g. 'float32', torch.bfloat16 or 'auto'")
    return found


def _is_rotary(block: object) -> bool:
    return getattr(getattr(block, "attn", None), "rotary", None) is not None


def with_limits(tree: Tree, options: Options) -> Tree:
    """The tree limited to the options' `first_n_layers` (decoders only) and with their `n_ctx`.

    Raises ValueError for limits that the checkpoint does not allow; warns if rotary positions exceed the trained length.
    """
    first_n_layers, n_ctx = options.first_n_layers, options.n_ctx
    if first_n_layers is not None:
        if not isinstance(tree, DecoderConfig):
            raise ValueError("first_n_layers is for decoders only")
        if not 1 <= first_n_layers <= len(tree.blocks):
            raise ValueError(f"first_n_layers={first_n_layers}: the checkpoint has {len(tree.blocks)} layers")
        tree = replace(tree, blocks=tree.blocks[:first_n_layers])
    if n_ctx is not None:
        if not isinstance(tree, (DecoderConfig, EncoderConfig)):
            raise ValueError(
                "n_ctx is for decoders and encoders of text, not for encoder-decoders and encoders of images"
            )
        positions = tree.embed.pos_embed or tree.rotary if isinstance(tree, EncoderConfig) else tree.pos_embed
        learned = positions.n_ctx if isinstance(positions, (PosEmbed.Config, RotaryTable.Config)) else None
        if n_ctx < 1 or (learned is not None and n_ctx > learned):
            rows = f" and embeddings for {learned} positions" if learned is not None else ""
            raise ValueError(f"n_ctx={n_ctx}: the checkpoint has n_ctx {tree.n_ctx}{rows}")
        if n_ctx > tree.n_ctx and any(_is_rotary(block) for block in tree.blocks):
            warn_caller(
                f"n_ctx={n_ctx}: the checkpoint has n_ctx {tree.n_ctx}, and predictions at later positions, which it was "
                "not trained on, may be poor"
            )
        tree = replace(tree, n_ctx=n_ctx)
    return tree
