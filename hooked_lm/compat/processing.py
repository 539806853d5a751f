"""The functions of `weight_processing`: rewrites of state dicts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.models.weights import fold
from hooked_lm.models.weights.foreign_state_dict import TABLES, to_native_names
from hooked_lm.models.weights.state import load_state
from hooked_lm.pretrained import HookedTransformer

State = dict[str, Tensor]
PerHead = Float[Tensor, "head d_model d_head"]
Biases = Float[Tensor, "head d_head"]
Vector = Float[Tensor, " d_model"]
UNKNOWN = -1  # the d_vocab of a config without one


def rewritten(state_dict: State, cfg: Any, rewrite: Callable[[Any], None]) -> State:
    """A new state dict: the weights of a model with this config after a rewrite.

    A folded norm is the identity: its weights are ones and its biases zeros. Weights of parts that the model lacks are
    returned unchanged. Matrices may be absent if the rewrite neither changes nor reads them.
    """
    if not state_dict:
        raise ValueError("the state dict is empty: expected the weights of a model with this config")
    device = next(iter(state_dict.values())).device
    bare = {"init_weights": False, "processed": (), "tokenizer_name": None}
    model = HookedTransformer(replace(cfg, device=str(device), d_vocab=d_vocab_of(state_dict, cfg), **bare))
    parts = dict(model.named_modules())
    weights = {name: value for name, value in state_dict.items() if belongs(name, parts)}
    absent = load_part(model, weights)
    rewrite(model)
    check_unused(model, absent)
    state = {name: value for name, value in model.state_dict().items() if name not in absent} | identities(model)
    given_name = {name: name for name in state} | {name.replace("._", "."): name for name in state_dict}
    known = {name: value for name, value in state.items() if name in state_dict or not name.endswith(TABLES)}
    named = {given_name[name]: value.detach() for name, value in known.items()}
    folded = {name: value for name, value in weights.items() if name.rpartition(".")[2].lstrip("_").startswith("b_")}
    others = {name: value for name, value in state_dict.items() if name not in weights}
    return {name: torch.zeros_like(value) for name, value in folded.items()} | others | named


def d_vocab_of(state_dict: State, cfg: Any) -> int:
    """The size of the vocabulary: that of the config, or of the weights."""
    if cfg.d_vocab != UNKNOWN:
        return cfg.d_vocab
    if "embed.W_E" in state_dict:
        return len(state_dict["embed.W_E"])
    return state_dict["unembed.W_U"].shape[-1] if "unembed.W_U" in state_dict else UNKNOWN


def belongs(name: str, parts: dict[str, nn.Module]) -> bool:
    """Whether a model has the part of a weight, such as an MLP in that layer. An RMSNorm has no bias."""
    names = name.split(".")
    part = ".".join(names[: 3 if names[0] == "blocks" else 1])
    return part in parts and not (names[-1] == "b" and isinstance(parts.get(name.removesuffix(".b")), RMSNorm))


def load_part(model: Any, weights: State) -> dict[str, int]:
    """Loads weights into a model, and fills the matrices that are absent with NaN; the version of each of these."""
    given = to_native_names(model, weights)
    own = {name: value for name, value in model.state_dict().items() if name.rpartition(".")[2].startswith("W_")}
    filled = {name: torch.full_like(value, torch.nan) for name, value in own.items() if name not in given}
    load_state(model, given | filled)
    return {name: model.get_parameter(name)._version for name in filled}


def check_unused(model: nn.Module, absent: dict[str, int]) -> None:
    """Raises ValueError if a rewrite has changed an absent matrix, or read it into another weight."""
    changed = any(model.get_parameter(name)._version != version for name, version in absent.items())
    rest = [value for name, value in model.state_dict().items() if name not in absent and value.is_floating_point()]
    if changed or (absent and any(value.isnan().any() for value in rest)):
        raise ValueError(f"the rewrite needs weights that the state dict lacks; it has no {', '.join(absent)}")


def identities(model: Any) -> State:
    """The weights and biases of the norms that have none."""
    like, state = {"device": model.W_E.device, "dtype": model.W_E.dtype}, {}
    for name, module in model.named_modules():
        if isinstance(module, (LayerNorm, RMSNorm)) and not module.cfg.weight:
            state[f"{name}.w"] = torch.full(module.cfg.shape, 1 - module.cfg.offset, **like)
        if isinstance(module, LayerNorm) and not module.cfg.bias:
            state[f"{name}.b"] = torch.zeros(module.cfg.shape, **like)
    return state


class ProcessWeights:
    """Rewrites that do not change a model's predictions; see the function of each name in `hooked_lm.models.weights.fold`.

    The state dict is that of a model with the config; new biases are added to it. Raises the ValueErrors of
    `load_and_process_state_dict`. The functions of single tensors compute the steps for one layer's attention.
    """

    @staticmethod
    def fold_layer_norm(
        state_dict: State, cfg: Any, fold_biases: bool = True, center_weights: bool = True, adapter: None = None
    ) -> State:
        """Folds weights and biases of norms into the following weights; see `fold_ln` for the flags."""
        return rewritten(
            state_dict,
            cfg,
            lambda model: fold.fold_ln(model, fold_biases=fold_biases, center_weights=center_weights),
        )

    @staticmethod
    def fold_layer_norm_biases(
        wq_tensor: PerHead,
        wk_tensor: PerHead,
        wv_tensor: PerHead,
        bq_tensor: Biases | None,
        bk_tensor: Biases | None,
        bv_tensor: Biases | None,
        ln_bias: Vector,
    ) -> tuple[Biases, Biases, Biases]:
        """The biases of queries, keys and values after those of a norm have been folded into them: `b + ln_bias W`."""
        pairs = ((wq_tensor, bq_tensor), (wk_tensor, bk_tensor), (wv_tensor, bv_tensor))
        q, k, v = (ln_bias @ weight if bias is None else bias + ln_bias @ weight for weight, bias in pairs)
        return q, k, v

    @staticmethod
    def fold_layer_norm_weights(
        wq_tensor: PerHead, wk_tensor: PerHead, wv_tensor: PerHead, ln_weight: Vector
    ) -> tuple[PerHead, PerHead, PerHead]:
        """The weights of queries, keys and values after that of a norm has been folded into them.

        >>> import torch
        >>> W = torch.ones(1, 2, 3)
        >>> ProcessWeights.fold_layer_norm_weights(W, W, W, torch.tensor([2.0, 5.0]))[0].tolist()
        [[[2.0, 2.0, 2.0], [5.0, 5.0, 5.0]]]
        """
        q, k, v = (weight * ln_weight[:, None] for weight in (wq_tensor, wk_tensor, wv_tensor))
        return q, k, v

    @staticmethod
    def center_attention_weights(
        wq_tensor: PerHead, wk_tensor: PerHead, wv_tensor: PerHead
    ) -> tuple[PerHead, PerHead, PerHead]:
        """The weights of queries, keys and values minus their means over d_model."""
        q, k, v = (weight - weight.mean(-2, keepdim=True) for weight in (wq_tensor, wk_tensor, wv_tensor))
        return q, k, v

    @staticmethod
    def extract_attention_tensors_for_folding(
        state_dict: State, cfg: Any, layer: int, adapter: None = None
    ) -> dict[str, Tensor | None]:
        """The weights and biases of a layer's queries, keys and values ("wq" to "bv"), and of their norm (`ln1_w`, `ln1_b`)."""
        block, found = f"blocks.{layer}.", {}
        for leaf in ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V"):
            grouped = state_dict.get(f"{block}attn._{leaf}")
            found[leaf.replace("_", "").lower()] = state_dict.get(f"{block}attn.{leaf}") if grouped is None else grouped
        return found | {f"ln1_{leaf}": state_dict.get(f"{block}ln1.{leaf}") for leaf in "wb"}

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
