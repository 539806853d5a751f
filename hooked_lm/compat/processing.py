"""The functions of `weight_processing`: rewrites of state dicts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.models.weights import fold
from hooked_lm.models.weights.foreign_state_dict import TABLES
from hooked_lm.models.weights.state import load_state
from hooked_lm.pretrained import HookedTransformer

State = dict[str, Tensor]
UNKNOWN = -1  # the d_vocab of a config without one


def rewritten(state_dict: State, cfg: Any, rewrite: Callable[[Any], None]) -> State:
    """A new state dict: the weights of a model with this config after a rewrite.

    A folded norm is the identity: its weights are ones and its biases zeros.
    """
    if not state_dict:
        raise ValueError("the state dict is empty: expected the weights of a model with this config")
    device = next(iter(state_dict.values())).device
    d_vocab = len(state_dict["embed.W_E"]) if cfg.d_vocab == UNKNOWN and "embed.W_E" in state_dict else cfg.d_vocab
    bare = {"init_weights": False, "processed": (), "tokenizer_name": None}
    model = HookedTransformer(replace(cfg, device=str(device), d_vocab=d_vocab, **bare))
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
    given_name = {name: name for name in state} | {name.replace("._", "."): name for name in state_dict}
    known = {name: value for name, value in state.items() if name in state_dict or not name.endswith(TABLES)}
    named = {given_name[name]: value.detach() for name, value in known.items()}
    absent = {name: value for name, value in state_dict.items() if name.rpartition(".")[2].lstrip("_").startswith("b_")}
    return {name: torch.zeros_like(value) for name, value in absent.items()} | named


class ProcessWeights:
    """Rewrites that do not change a model's predictions; see the function of each name in `hooked_lm.models.weights.fold`.

    The state dict is that of a model with the config; new biases are added to it. Raises the ValueErrors of
    `load_and_process_state_dict`.
    """

    @staticmethod
    def fold_layer_norm(
        state_dict: State, cfg: Any, fold_biases: bool = True, center_weights: bool = True, adapter: None = None
    ) -> State:
        """Folds weights and biases of norms into the following weights; both flags are for norms without biases and centring."""
        if not (fold_biases and center_weights) and cfg.normalization_type in ("LN", "LNPre"):
            raise ValueError("fold_biases and center_weights must be True: this is a LayerNorm")
        return rewritten(state_dict, cfg, fold.fold_ln)

    @staticmethod
    def center_writing_weights(state_dict: State, cfg: Any, adapter: None = None) -> State:
        """Subtracts the mean over d_model from all weights that write to the stream."""
        return rewritten(state_dict, cfg, fold.center_writing_weights)

    @staticmethod
    def center_unembed(state_dict: State, cfg: Any = None, adapter: None = None) -> State:
        """Subtracts the mean over the vocabulary from `W_U` and `b_U`.

        Without a config it is not known whether the model has a soft cap, after which its predictions would differ.
        """
        if cfg is None:
            unembed = {name: state_dict[name] for name in ("unembed.W_U", "unembed.b_U") if name in state_dict}
            return {**state_dict, **{name: value - value.mean(-1, keepdim=True) for name, value in unembed.items()}}
        return rewritten(state_dict, cfg, fold.center_unembed)

    @staticmethod
    def fold_value_biases(state_dict: State, cfg: Any, adapter: None = None) -> State:
        """Folds value biases into output biases."""
        return rewritten(state_dict, cfg, fold.fold_value_biases)

    @staticmethod
    def refactor_factored_attn_matrices(state_dict: State, cfg: Any, adapter: None = None) -> State:
        """Replaces the factors of QK and OV by others with the same products."""
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
        """Applies the selected rewrites."""

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
