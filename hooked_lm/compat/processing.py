"""Rewrites of weights under the names of `weight_processing`: from a dictionary to a dictionary, by way of a model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hooked_lm.components.layer_norm import LayerNorm
from hooked_lm.components.norm import RMSNorm
from hooked_lm.models.weights import fold
from hooked_lm.models.weights.foreign_state_dict import TABLES
from hooked_lm.models.weights.state import load_state
from hooked_lm.pretrained import HookedTransformer

State = dict[str, Tensor]


def rewritten(state_dict: State, cfg: Any, rewrite: Callable[[Any], None]) -> State:
    """What a rewrite makes of the weights of a model with this config; the dictionary stays as it is.

    A norm that was folded is the identity: it still has its names, with ones and zeros.
    """
    device = next(iter(state_dict.values())).device
    model = HookedTransformer(replace(cfg, device=str(device), init_weights=False, processed=(), tokenizer_name=None))
    load_state(model, state_dict)
    rewrite(model)
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(module, (LayerNorm, RMSNorm)) and not module.cfg.weight:
            state[f"{name}.w"] = torch.full(
                module.cfg.shape, 1 - module.cfg.offset, device=device, dtype=model.W_E.dtype
            )
        if isinstance(module, LayerNorm) and not module.cfg.bias:
            state[f"{name}.b"] = torch.zeros(module.cfg.shape, device=device, dtype=model.W_E.dtype)
    theirs = {name: name for name in state} | {name.replace("._", "."): name for name in state_dict}
    known = {name: value for name, value in state.items() if name in state_dict or not name.endswith(TABLES)}
    named = {theirs[name]: value.detach() for name, value in known.items()}
    absent = {name: value for name, value in state_dict.items() if name.rpartition(".")[2].lstrip("_").startswith("b_")}
    return {name: torch.zeros_like(value) for name, value in absent.items()} | named


class ProcessWeights:
    """Rewrites that leave a model's predictions as they are; see the function of each name in `hooked_lm.models.weights.fold`.

    A dictionary means what it does in a model of the config; biases that are made on the way come with it. Raises
    ValueError where `load_and_process_state_dict` does.
    """

    @staticmethod
    def fold_layer_norm(
        state_dict: State, cfg: Any, fold_biases: bool = True, center_weights: bool = True, adapter: None = None
    ) -> State:
        """Weights and biases of norms into what reads them; both switches are for norms that have neither biases nor means."""
        if not (fold_biases and center_weights) and cfg.normalization_type in ("LN", "LNPre"):
            raise ValueError("a LayerNorm is folded whole: with its biases, and with the means taken out")
        return rewritten(state_dict, cfg, fold.fold_ln)

    @staticmethod
    def center_writing_weights(state_dict: State, cfg: Any, adapter: None = None) -> State:
        """The mean over d_model out of all that writes to the stream."""
        return rewritten(state_dict, cfg, fold.center_writing_weights)

    @staticmethod
    def center_unembed(state_dict: State, cfg: Any, adapter: None = None) -> State:
        """The mean over the vocabulary out of `W_U` and `b_U`."""
        return rewritten(state_dict, cfg, fold.center_unembed)

    @staticmethod
    def fold_value_biases(state_dict: State, cfg: Any, adapter: None = None) -> State:
        """Value biases into output biases."""
        return rewritten(state_dict, cfg, fold.fold_value_biases)

    @staticmethod
    def refactor_factored_attn_matrices(state_dict: State, cfg: Any, adapter: None = None) -> State:
        """Other factors of the same products."""
        return rewritten(state_dict, cfg, fold.refactor_factored_attn_matrices)

    @staticmethod
    def process_weights(
        state_dict: State,
        cfg: Any,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
        adapter: None = None,
    ) -> State:
        """Those of them that are asked for."""

        def rewrite(model: Any) -> None:
            fold.process_weights(
                model,
                fold_ln,
                center_writing_weights,
                center_unembed,
                fold_value_biases,
                refactor_factored_attn_matrices,
            )

        return rewritten(state_dict, cfg, rewrite)
