"""Config and weights of models that Tracr compiled from RASP programs (Lindner et al. 2023, arXiv:2301.05062).

The functions read only attributes of the compiled model (`params`, `model_config`, `residual_labels`, `output_encoder`):
Tracr and JAX need not be installed.
"""

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hooked_lm.models.config.flat import HookedTransformerConfig

__all__ = [
    "infer_tracr_output_label", "make_tracr_categorical_unembed", "make_tracr_transformer_bridge_config",
    "make_tracr_transformer_bridge_state_dict",
]  # fmt: skip


def infer_tracr_output_label(model: Any) -> str:
    """The output variable of a compiled program: the one whose values in the stream are those of the output.

    Raises ValueError if no variable, or more than one, has these values.
    """
    wanted = {str(value) for value in _outputs(model)}
    values = defaultdict[str, set[str]](set)
    for entry in model.residual_labels:
        label, has_value, value = entry.rpartition(":")
        if has_value:
            values[label].add(value)
    found = [label for label, its in values.items() if its == wanted]
    if len(found) != 1:
        raise ValueError(f"pass output_label=...: the variables with the values of the output are {found}")
    return found[0]


def make_tracr_categorical_unembed(
    model: Any, output_label: str | None = None, *, dtype: Any = np.float32
) -> np.ndarray:
    """An unembedding [d_model, d_vocab_out] with a one from each output direction in the stream to its logit."""
    label = infer_tracr_output_label(model) if output_label is None else output_label
    places, outputs = {name: i for i, name in enumerate(model.residual_labels)}, _outputs(model)
    if missing := [f"{label}:{value}" for value in outputs if f"{label}:{value}" not in places]:
        raise ValueError(f"the stream has no direction {', '.join(missing)}; it has {', '.join(places)}")
    unembed = np.zeros((len(places), len(outputs)), dtype=dtype)
    for value, logit in outputs.items():
        unembed[places[f"{label}:{value}"], int(logit)] = 1
    return unembed


def make_tracr_transformer_bridge_config(model: Any) -> HookedTransformerConfig:
    """The config for the weights of a compiled model."""
    cfg, (d_vocab, d_model) = model.model_config, np.shape(model.params["token_embed"]["embeddings"])
    return HookedTransformerConfig(
        n_layers=cfg.num_layers,
        d_model=d_model,
        d_head=cfg.key_size,
        n_heads=cfg.num_heads,
        n_ctx=len(model.params["pos_embed"]["embeddings"]),
        d_vocab=d_vocab,
        d_vocab_out=len(_outputs(model)),
        d_mlp=cfg.mlp_hidden_size,
        act_fn="relu",
        attention_dir="causal" if cfg.causal else "bidirectional",
        normalization_type="LN" if cfg.layer_norm else None,
    )


def make_tracr_transformer_bridge_state_dict(
    model: Any, output_label: str | None = None, *, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The weights of a compiled model as a state dict for the config of `make_tracr_transformer_bridge_config`.

    Raises ValueError for a model with norms, which Tracr does not compile.
    """
    cfg = model.model_config
    if cfg.layer_norm:
        raise ValueError("this model has norms, and Tracr compiles none: its weights have another meaning")

    def read(module: str, name: str) -> Tensor:
        return torch.tensor(np.asarray(model.params[module][name]), dtype=dtype)

    unembed = torch.tensor(make_tracr_categorical_unembed(model, output_label), dtype=dtype)
    found = {
        "embed.W_E": read("token_embed", "embeddings"),
        "pos_embed.W_pos": read("pos_embed", "embeddings"),
        "unembed.W_U": unembed,
        "unembed.b_U": unembed.new_zeros(unembed.shape[1]),
    }
    heads = (cfg.num_heads, cfg.key_size)
    for layer in range(cfg.num_layers):
        source, target = f"transformer/layer_{layer}", f"blocks.{layer}"
        for module, name in (("query", "Q"), ("key", "K"), ("value", "V")):
            weight = read(f"{source}/attn/{module}", "w").unflatten(1, heads)
            found[f"{target}.attn.W_{name}"] = weight.transpose(0, 1).contiguous()
            found[f"{target}.attn.b_{name}"] = read(f"{source}/attn/{module}", "b").view(heads)
        found[f"{target}.attn.W_O"] = read(f"{source}/attn/linear", "w").unflatten(0, heads)
        found[f"{target}.attn.b_O"] = read(f"{source}/attn/linear", "b")
        for module, name in (("linear_1", "in"), ("linear_2", "out")):
            found[f"{target}.mlp.W_{name}"] = read(f"{source}/mlp/{module}", "w")
            found[f"{target}.mlp.b_{name}"] = read(f"{source}/mlp/{module}", "b")
    return found


def _outputs(model: Any) -> dict[Any, int]:
    """The logit of each output value; raises ValueError for numerical outputs, which have no logits."""
    found = getattr(model.output_encoder, "encoding_map", None)
    if found is None:
        raise ValueError("the output is numerical: only a categorical output has logits")
    return dict(found)
