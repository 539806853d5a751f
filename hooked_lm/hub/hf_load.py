"""Builds a model from a checkpoint in the format of transformers."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import prod
from types import ModuleType

import torch
from torch import Tensor

from hooked_lm.components.attention.multihead import AbstractAttention
from hooked_lm.components.attention.projection import make_contiguous
from hooked_lm.hub.composite import described, united
from hooked_lm.hub.config_checks import naming
from hooked_lm.hub.hf_checkpoint import HFCheckpoint
from hooked_lm.hub.logit_factors import left_out_by_transformers
from hooked_lm.hub.model_classes import Loaded, kept_part
from hooked_lm.hub.options import KEEP
from hooked_lm.hub.processor import give_processor
from hooked_lm.hub.quantized import Dequantized
from hooked_lm.models.base import BaseModel
from hooked_lm.models.config.flat_config import FlatConfig
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.placement import DevicePlan, place
from hooked_lm.models.text.tokenizer import Tokenizer
from hooked_lm.models.weights.quantized_weight import QuantizedWeight
from hooked_lm.weights import Row, expand, load, slots
from hooked_lm.weights.mapped import in_file

logger = logging.getLogger(__name__)


def load_hf(checkpoint: HFCheckpoint, class_of: Callable[[Tree], type[Loaded]]) -> Loaded:
    """Returns the model of a checkpoint with unchanged weights. `class_of` maps a tree to a model class."""
    options = checkpoint.options
    options.check_keep(checkpoint.quantization is not None, checkpoint.name)
    tensors = checkpoint.tensors()
    with naming(checkpoint.name):
        full = checkpoint.tree(tensors)
    model_class = class_of(full)
    tokenizer = checkpoint.find_tokenizer() if options.tokenizer is None else options.tokenizer
    with naming(checkpoint.name):
        cfg = checkpoint.flat_config(model_class.config_class, full, tensors)
        model = unfilled(model_class, cfg, tokenizer)
    one_device = DevicePlan({"": torch.device(options.device)})
    plan = one_device if options.placement is None else options.placement.plan(model)
    if options.quantize is not None and plan.offloaded:
        places = (
            f"{', '.join(plan.offloaded)} would be on the CPU or on disk between runs, as only ordinary weights can be"
        )
        raise ValueError(f"quantize={KEEP!r}: {places}; give all blocks devices that compute, or leave quantize= out")
    changes = options.rewritten and isinstance(model, Decoder)  # a change of a mapped weight would move it into memory

    def is_copied(name: str) -> bool:
        return options.hf_model is not None or (plan.is_on_disk(name) and (changes or not options.mmap))

    fill(model, tensors, checkpoint.family, full, plan, is_copied)
    model.cfg.tokenizer_name = cfg.tokenizer_name
    give_processor(model, checkpoint.find_processor)
    architectures = checkpoint.architectures if checkpoint.whole is None else []
    model.hf_config = checkpoint.config.to_dict() | {"architectures": architectures}
    if (packed := checkpoint.quantization) is not None:
        became, weights = f"its weights were dequantised to {model.cfg.dtype}", checkpoint.weights
        if isinstance(weights, Dequantized) and options.quantize is not None:
            became = _kept(model, weights)
        logger.warning("the checkpoint is quantised (%s): %s", packed, became)
    if (left_out := model.cfg.left_out) is not None:
        whole, kind = cfg.original_architecture, checkpoint.config.model_type
        more = f"; {reader}.from_pretrained loads all of it" if (reader := checkpoint.reader_of_all) else ""
        what = kept_part(model)
        logger.warning("loaded the %s (%s) of a %s; left out: %s%s", what, kind, whole, described(left_out), more)
    kind = checkpoint.whole_type
    if isinstance(full, DecoderConfig) and (factors := left_out_by_transformers(kind, full.unembed)):
        logger.warning(
            "the logits have %s, as those of the language model alone, which was trained with it; the class of a %s in "
            "transformers leaves it out",
            factors,
            kind,
        )
    return model


def _kept(model: BaseModel, weights: Dequantized) -> str:
    """Names the quantised weights of a model after its parameters; says how many there are, and which others were dequantised."""
    kept = {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedWeight)}
    n_kept = Counter[str]()
    for name, weight in kept.items():
        n_kept[weight.path] += weight.numel()
        weight.path = name
    others = [name for name in sorted(weights.looked_up) if n_kept[name] < prod(weights.shape(name))]
    names = ", ".join(united(dict.fromkeys(others, 1)))
    more = f"; {len(others)} others were dequantised to {model.cfg.dtype}: {names}" if others else ""
    return f"{len(kept)} weights stay in memory as they are there, and are dequantised at each use{more}"


def unfilled(model_class: type[Loaded], cfg: FlatConfig, tokenizer: Tokenizer | None) -> Loaded:
    """Builds the model without values for its weights. Raises ValueError for sizes that cannot be allocated."""
    try:
        return model_class(replace(cfg, tokenizer_name=None) if tokenizer is None else cfg, tokenizer=tokenizer)
    except (RuntimeError, OverflowError, MemoryError) as error:
        names = ("d_model", "n_heads", "d_head", "d_mlp", "d_vocab")
        sizes = ", ".join(f"{name}={getattr(cfg, name)}" for name in names)
        raise ValueError(f"the config describes weights that cannot be made ({sizes}): {error}") from error


def concrete_rows(module: ModuleType, tree: Tree, layers: Iterable[int]) -> list[Row]:
    """Returns a family's rows for these layers; those of encoder-decoders already state their layers."""
    return expand(module.rows(tree), l=list(layers))


def fill(
    model: BaseModel,
    tensors: Mapping[str, Tensor],
    module: ModuleType,
    full: Tree,
    plan: DevicePlan,
    is_copied: Callable[[str], bool],
) -> None:
    """Loads a checkpoint's weights into a model on the meta device, each to its place; `full` is the tree with all layers.

    `is_copied` says of a name whether the weight is copied even where it could be a view of the checkpoint.
    """
    n_layers, parameters = len(model.blocks), slots(model)
    rows = concrete_rows(module, full, range(n_layers))
    beyond = range(n_layers, len(full.blocks))
    left_out = (
        {row.source for row in concrete_rows(module, full, beyond) if row.target.startswith("blocks.")}
        if beyond
        else set()
    )
    tied = [row for row in rows if row.tied is not None and row.target not in parameters]
    for row in tied:
        _check_tied(tensors, row, module.PREFIX)
    load(
        model,
        tensors,
        [row for row in rows if row.target in parameters],
        dtype=model.cfg.dtype,
        device=plan.device_of,
        ignore=[*module.IGNORED, *left_out, *(row.source for row in tied)],
        prefix=module.PREFIX,
        copy=is_copied,
        on_disk=plan.is_on_disk,
        own_dtype=[name for name, slot in parameters.items() if slot.tensor.dtype != model.cfg.dtype],
    )
    finish(model, plan)


def finish(model: BaseModel, plan: DevicePlan) -> None:
    """Makes a loaded model ready: attention weights as matrices in memory, everything on the devices of the plan.

    Raises ValueError for weights without values.
    """
    for path, component in model.named_modules():
        if isinstance(component, AbstractAttention):
            make_contiguous(component, in_file if plan.is_on_disk(path) else None)
    stranded = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if stranded:
        raise ValueError(f"the checkpoint gives no values for {', '.join(stranded)} of {type(model).__name__}")
    place(model, plan)


def _check_tied(tensors: Mapping[str, Tensor], row: Row, prefix: str) -> None:
    """Raises ValueError if a tied weight is also in the file, with values that differ from the weight it is tied to."""
    assert row.tied is not None
    source = row.tied if row.tied in tensors else row.tied.removeprefix(prefix)
    if row.source in tensors and source in tensors and not torch.equal(tensors[row.source], tensors[source]):
        raise ValueError(f"{row.source!r} differs from {source!r}, but the config says that they are tied")
