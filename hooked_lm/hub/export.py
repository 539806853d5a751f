"""From a HookedTransformer back to transformers' format."""

import copy
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooked_lm.families import family
from hooked_lm.hub.load import concrete_rows
from hooked_lm.models.decoder import HookedTransformer
from hooked_lm.weights import export, slots


def to_hf(model: HookedTransformer) -> Any:
    """A transformers model with exactly these weights, in memory of its own.

    Raises ValueError for a model whose weights were folded, and for one that came from no checkpoint.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    config, tensors = exported(model)
    hf_class = AutoModelForCausalLM._model_mapping[type(config)]
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        return hf_class.from_pretrained(None, config=config, state_dict=own, dtype=model.cfg.dtype).to(model.device)
    finally:
        if shows_bars:
            logging.enable_progress_bar()


def save_pretrained(model: HookedTransformer, path: str | os.PathLike[str]) -> None:
    """Write a model in HF format: `config.json`, `model.safetensors`, and the tokenizer's files if it has one.

    It may be written over the checkpoint that it was loaded from. Raises as `to_hf` does.
    """
    from safetensors.torch import save_file

    config, tensors = exported(model)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    unfinished = folder / "model.safetensors.unfinished"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished, metadata={"format": "pt"})
    os.replace(unfinished, folder / "model.safetensors")  # a file that is mapped must not be opened for writing
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(folder)


def exported(model: HookedTransformer) -> tuple[Any, dict[str, Tensor]]:
    """The HF config of a model, and its weights under their names on disk."""
    if model.hf_config is None:
        raise ValueError("this model was built from a config, not from a checkpoint: it belongs to no HF architecture")
    if processed := model.cfg.processed:
        raise ValueError(
            f"the weights of this model were rewritten ({', '.join(processed)}); load it with "
            "from_pretrained_no_processing to write it back"
        )
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model.hf_config["model_type"]].from_dict(copy.deepcopy(model.hf_config))
    module, n_layers, tied = family(config.model_type), len(model.blocks), model.cfg.tie_word_embeddings
    if config.num_hidden_layers != n_layers:
        config.num_hidden_layers = n_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:n_layers]
    config.tie_word_embeddings, config.dtype = tied, model.cfg.dtype
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    assert model.cfg.tree is not None
    tree = replace(model.cfg.tree, unembed=replace(model.cfg.tree.unembed, tied=tied))
    parameters = slots(model)
    rows = [row for row in concrete_rows(module, tree, range(n_layers)) if row.ours in parameters]
    return config, export(model, rows)
