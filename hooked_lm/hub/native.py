"""Models in the format of this library: a folder with `hooked_lm.json`, `model.safetensors`, and a tokenizer if there is one.

`hooked_lm.json` holds the config (see `models.config.stored`), and seals of itself and of the other files (see `seals`), so that
a file of another model is not loaded for this one; the weights have the names and shapes of the model's state dict.
So a model of any architecture comes back as it was, also one that was built from a config, trained, or folded.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hooked_lm.files import OF_DAMAGE
from hooked_lm.hub import seals
from hooked_lm.hub.export import folder_of, moved_when_done
from hooked_lm.hub.hf_load import finish, unfilled
from hooked_lm.hub.model_classes import Loaded, Model, model_class
from hooked_lm.hub.options import Options, real_dtype, with_limits
from hooked_lm.hub.processor import give_processor, processor_in
from hooked_lm.hub.source import Directory, Source, tokenizer_in
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.flat_config import FlatConfig
from hooked_lm.models.config.read import Tree
from hooked_lm.models.placement import DevicePlan
from hooked_lm.models.weights.quantize import refuse_quantized
from hooked_lm.weights import Row, load, open_checkpoint, slots, write_safetensors
from hooked_lm.weights.mapped import in_file
from hooked_lm.weights.write import Planned

CONFIG, WEIGHTS = "hooked_lm.json", "model.safetensors"
SEALS = "sha256"  # of the content of CONFIG without them, and of the other files


@dataclass(frozen=True)
class NativeCheckpoint:
    """A folder that `save` wrote. `strides` has the order of the axes in memory of each weight that is not in C order.

    `sealed` has the hash of each file; it is empty for folders of earlier versions.
    """

    source: Directory
    cfg: Any
    hf_config: dict[str, Any] | None
    strides: dict[str, list[int]]
    sealed: dict[str, str]
    options: Options


def save(model: Model, path: str | os.PathLike[str]) -> None:
    """Writes a model to a folder from which `load_own` makes the same one.

    Files are first written to a temporary folder next to it and then moved: if writing fails, no new files remain. Hooks are
    not saved. Raises ValueError for a model that could not be built again from its config, and names what differs: parts that
    were replaced by other modules, quantised weights, components from outside of this package. Raises OSError if the path is not
    writable, or holds a checkpoint in HF format.
    """
    folder = folder_of(path)
    refuse_quantized(model, "save", "save the model before quantize()")
    described = model.cfg.to_json()
    _check_modules(model)
    if (folder / "config.json").is_file():
        raise FileExistsError(f"{folder} holds a checkpoint in HF format (config.json): choose another folder")
    weights = {name: slot.tensor for name, slot in slots(model).items()}
    orders = {name: _order(weight) for name, weight in weights.items()}
    written = {
        "config": described,
        "hf_config": model.hf_config,
        "strides": {name: order for name, order in orders.items() if order != sorted(order)},
    }
    planned = {name: Planned(tuple(w.shape), w.dtype, w.detach) for name, w in weights.items()}
    with moved_when_done(folder, last=CONFIG) as unfinished:
        write_safetensors(planned, unfinished / WEIGHTS)
        writer = getattr(model, "processor", None) or model.saved_tokenizer
        if writer is not None:
            writer.save_pretrained(unfinished)
        files = sorted(file for file in unfinished.iterdir() if file.is_file() and file.name != WEIGHTS)
        written[SEALS] = {
            CONFIG: seals.seal_of_json(written),
            WEIGHTS: seals.seal_of_weights(unfinished / WEIGHTS),
            **{file.name: seals.seal_of_file(file) for file in files},
        }
        (unfinished / CONFIG).write_text(json.dumps(written, indent=1), encoding="utf-8")


def find_own(source: Source, options: Options) -> NativeCheckpoint | None:
    """The checkpoint of a folder, or of a repository on the hub, in the format of `save`; None for any other source."""
    folder = _folder(source)
    if folder is None:
        return None
    file = folder.file(CONFIG)
    given = {"checkpoint_index": options.checkpoint_index, "checkpoint_value": options.checkpoint_value}
    given |= options.overrides
    if unknown := [name for name, value in given.items() if value is not None]:
        raise ValueError(f"{', '.join(unknown)} cannot be given for {source.name!r}, which model.save wrote")
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        sealed = dict(written.pop(SEALS, {}))
        if sealed and seals.seal_of_json(written) != sealed.get(CONFIG):
            raise ValueError(
                "its hash is another than when model.save wrote it; to change a model, load it, change it and save it"
            )
        cfg = FlatConfig.from_json(written["config"])
        strides = {name: _checked_order(name, order) for name, order in written["strides"].items()}
        hf_config = written["hf_config"]
    except (*OF_DAMAGE, OSError) as error:
        raise ValueError(f"{file} cannot be read, or was changed: {type(error).__name__}: {error}") from error
    return NativeCheckpoint(folder, cfg, hf_config, strides, sealed, options)


def _checked_order(name: str, order: object) -> list[int]:
    """The order of a weight's axes. Raises ValueError for what is none."""
    if not isinstance(order, list) or any(type(axis) is not int for axis in order) or {*order} != {*range(len(order))}:
        raise ValueError(f"strides of {name!r} must be an order of its axes, such as [0, 2, 1], got {order!r}")
    return order


def _folder(source: Source) -> Directory | None:
    """The folder with the files that `save` wrote: a local one, or that of a repository in the cache of the hub."""
    if isinstance(source, Directory):
        return source if source.file(CONFIG).is_file() else None
    if source.has_config:
        return None
    try:
        source.file(CONFIG)
    except ValueError:
        return None
    return Directory(source.name, source.folder(), source.repository)


def load_own(checkpoint: NativeCheckpoint, class_of: Callable[[Tree], type[Loaded]]) -> Loaded:
    """Returns the model of a checkpoint with unchanged weights. `class_of` maps a tree to a model class."""
    options, source = checkpoint.options, checkpoint.source
    weights: Mapping[str, Tensor] = open_checkpoint(source.file(WEIGHTS), mmap=options.mmap)
    others = checkpoint.sealed.keys() - {CONFIG, WEIGHTS} if options.tokenizer is None else ()
    seals.check(checkpoint.sealed, source.path, [WEIGHTS, *sorted(others)])
    cfg = _limited(checkpoint.cfg, options)
    dtype = cfg.dtype if options.dtype == "auto" else real_dtype(options.dtype, weights)
    cfg = replace(cfg, device="meta", dtype=dtype, init_weights=False, tokenizer_name=None)
    given = tokenizer_in(source.path, source.repository) if options.tokenizer is None else options.tokenizer
    model = unfilled(class_of(cfg.tree), cfg, given)
    plan = DevicePlan({"": torch.device(options.device)})
    plan = plan if options.placement is None else options.placement.plan(model)
    parameters = slots(model)
    beyond = range(cfg.n_layers, checkpoint.cfg.n_layers)
    load(
        model,
        weights,
        [Row(name, name) for name in parameters],
        dtype=None if options.dtype == "auto" else dtype,
        device=plan.device_of,
        ignore=[f"blocks.{layer}.*" for layer in beyond],
        copy=lambda name: plan.is_on_disk(name) and (options.rewritten or not options.mmap),
        on_disk=plan.is_on_disk,
        own_dtype=[name for name, slot in parameters.items() if slot.tensor.dtype != dtype],
    )
    for name, slot in slots(model).items():
        if order := checkpoint.strides.get(name):
            if len(order) != slot.tensor.dim():
                raise ValueError(
                    f"{source.file(CONFIG)}: strides of {name!r} are {order}, but it has {slot.tensor.dim()} axes"
                )
            weight = slot.tensor.data.permute(order).contiguous()
            inverse = sorted(range(len(order)), key=order.__getitem__)
            slot.tensor.data = (in_file(weight) if plan.is_on_disk(name) else weight).permute(inverse)
    finish(model, plan)
    model.cfg.processed, model.cfg.tokenizer_name = checkpoint.cfg.processed, checkpoint.cfg.tokenizer_name
    model.cfg.init_weights = checkpoint.cfg.init_weights
    model.hf_config = checkpoint.hf_config
    give_processor(model, partial(processor_in, source.path))
    return model


def _limited(cfg: HookedTransformerConfig, options: Options) -> Any:
    """The config with the limits and defaults of the options."""
    prepend_bos, padding_side = options.default_prepend_bos, options.default_padding_side
    changes = {"default_prepend_bos": prepend_bos, "default_padding_side": padding_side}
    given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
    if options.first_n_layers is not None or options.n_ctx is not None:
        assert cfg.tree is not None
        given["tree"] = with_limits(cfg.tree, options)
    return replace(cfg, **given)


def _check_modules(model: Model) -> None:
    """Raises ValueError unless a model built from the config has the same modules, and weights of the same shapes."""
    cfg: Any = replace(model.cfg, device="meta", init_weights=False, tokenizer_name=None)
    twin = model_class(cfg.tree)(cfg)
    ours, theirs = ({path: type(m) for path, m in each.named_modules() if path} for each in (model, twin))
    shapes, expected = ({name: tuple(s.tensor.shape) for name, s in slots(each).items()} for each in (model, twin))
    differing = [
        *(f"'{path}' is a {kind.__name__}" for path, kind in ours.items() if theirs.get(path) is not kind),
        *(f"there is no '{path}'" for path in theirs.keys() - ours.keys()),
        *(f"'{name}' is {shape}" for name, shape in shapes.items() if expected.get(name) != shape),
        *(f"'{name}' is missing" for name in expected.keys() - shapes.keys()),
    ]
    if differing:
        raise ValueError(
            f"this model cannot be saved, because its config describes another: {'; '.join(differing[:5])}. Parts that were "
            "replaced or added need the code that makes them: torch.save(model.state_dict(), path), and build it again there"
        )


def _order(weight: Tensor) -> list[int]:
    """The axes of a weight from the slowest to the fastest in memory."""
    strides = weight.stride()
    return sorted(range(weight.dim()), key=lambda axis: (-strides[axis], axis))
