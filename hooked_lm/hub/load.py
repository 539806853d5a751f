"""Loads checkpoints in the format of transformers, of TransformerLens, or of this library."""

import os
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hooked_lm.families import model_class, model_classes
from hooked_lm.hub.adapter import find_adapter, from_adapter
from hooked_lm.hub.hf_checkpoint import from_model, from_source, read_json
from hooked_lm.hub.hf_load import load_hf
from hooked_lm.hub.model_classes import Loaded
from hooked_lm.hub.native import find_own, load_own
from hooked_lm.hub.options import Options
from hooked_lm.hub.source import TOKENIZER_FILES, WEIGHT_FILES, find
from hooked_lm.hub.tl_checkpoint import find_tl, load_tl
from hooked_lm.hub.unsupported import missing
from hooked_lm.models.base import BaseModel
from hooked_lm.models.config.flat_config import FlatConfig
from hooked_lm.models.config.read import Tree


def load(model_name: str | os.PathLike[str], options: Options, class_of: Callable[[Tree], type[Loaded]]) -> Loaded:
    """Returns the model of a checkpoint with unchanged weights. `class_of` maps a tree to a model class."""
    if options.hf_model is not None:
        source = find(model_name, TOKENIZER_FILES, **options.download)
        return load_hf(from_model(source, options), class_of)
    source = find(model_name, WEIGHT_FILES, **options.download)
    source.check()
    if (own := find_own(source, options)) is not None:
        options.check_keep(False, model_name)
        return load_own(own, class_of)
    if (tl_checkpoint := find_tl(source, options)) is not None:
        options.check_keep(False, model_name)
        return load_tl(tl_checkpoint, class_of)
    if (folder := find_adapter(source)) is not None:
        return load_hf(from_adapter(source, folder, options), class_of)
    return load_hf(from_source(source, options), class_of)


def described(model_name: str | os.PathLike[str], class_of: Callable[[Tree], type]) -> dict[str, Any]:
    """What the config of a checkpoint says: whether it `loads`, its `model_type`, and its `classes` or the `reason`.

    `dequantized_from` says how the weights are quantised, if they are. The files of weights are not read. `class_of` maps a tree
    to a model class. Raises as `load` for a checkpoint that cannot be found.
    """
    source, options = find(checked_name(model_name), WEIGHT_FILES), Options()
    if (own := find_own(source, options)) is not None:
        return {"loads": True, "classes": [class_of(own.cfg.tree).__name__]}
    if find_tl(source, options) is not None:
        return {"loads": True, "classes": ["HookedTransformer"]}
    if find_adapter(source) is not None:
        raise ValueError(f"{source.name!r} is an adapter: ask for the model that it belongs to")
    file = source.folder(False) / "config.json"
    kind = str(read_json(file).get("model_type")) if file.is_file() else ""
    if (reason := missing().get(kind)) is not None:
        return {"loads": False, "model_type": kind, "reason": reason}
    try:
        checkpoint = from_source(source, options, weights=False)
    except ValueError as error:
        return {"loads": False, "model_type": kind, "reason": str(error)}
    config, packed = checkpoint.config, checkpoint.quantization
    names = model_classes().get(kind) or [model_class(config.model_type)]
    found = {"loads": True, "model_type": kind, "classes": names}
    return found | ({"dequantized_from": str(packed)} if packed is not None else {})


def checked_name(name: object, hf_model: object = None) -> str | os.PathLike[str]:
    """The name of a model; None is that of `hf_model`. Raises TypeError for anything else, and says which call it is for."""
    if name is None and hf_model is not None:
        return str(getattr(getattr(hf_model, "config", None), "name_or_path", "") or type(hf_model).__name__)
    if isinstance(name, (str, os.PathLike)):
        if not str(name).strip():
            raise ValueError(
                "the name of the model is empty: give a hub id, a folder, a short name such as 'gpt2', or 'demo'"
            )
        return name
    kind = type(name).__name__
    if isinstance(name, BaseModel):
        use = "it is a model of this library already; copy.deepcopy(model) copies it"
    elif isinstance(name, nn.Module):
        use = "pass a transformers model as hf_model=: from_pretrained(hf_model=model)"
    elif isinstance(name, FlatConfig):
        use = "build a new model from a config: HookedTransformer(cfg)"
    elif hasattr(name, "model_type") and hasattr(name, "to_dict"):
        use = (
            "a config of transformers has no weights: build AutoModelForCausalLM.from_config(config), pass that as hf_model=, "
            "or save the weights beside it and give the folder"
        )
    elif isinstance(name, Mapping) and any(isinstance(value, Tensor) for value in name.values()):
        use = "load a state dict into a model: model = HookedTransformer(cfg), then model.load_state_dict(state_dict)"
    elif isinstance(name, Mapping):
        use = "build a new model from a config: HookedTransformer(cfg)"
    else:
        use = "give a hub id, a folder, a short name such as 'gpt2', or 'demo'"
    raise TypeError(f"from_pretrained takes the name of a checkpoint, not a {kind}: {use}")
