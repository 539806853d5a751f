"""Rewrites of a decoder's weights that leave its predictions as they are and make its parts easier to compare.

Each rewrite works in place on what the modules are, one tensor at a time, in fp32 or better. The memory of a mapped
checkpoint is private to the process: what is edited becomes the process's own, the file stays as it was. What is done is
recorded in `cfg.processed` and done once only; where a rewrite would change the predictions it is left out, and the
log says so.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.block import MLPPart
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.embed import Unembed
from hooked_lm.components.layer_norm import LayerNorm
from hooked_lm.components.mlp import MLP, GatedMLP
from hooked_lm.components.norm import RMSNorm, norm_of, wide
from hooked_lm.components.verification import is_known, norm_readers, output_weights
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.hooks import HookPoint
from hooked_lm.models.weights.state import load_state, make_biases, sync_config

logger = logging.getLogger(__name__)

Rewrite = Callable[[Any], bool]
Reader = tuple[nn.Module, str, str]  # a module, and the names of its weight and bias


def _once(rewrite: Rewrite) -> Callable[[Any], None]:
    """The rewrite without gradients, recorded, and skipped if it is recorded already."""

    @wraps(rewrite)
    @torch.no_grad()
    def apply(model: Any) -> None:
        if rewrite.__name__ not in model.cfg.processed and rewrite(model):
            sync_config(model)
            model.cfg.processed = (*model.cfg.processed, rewrite.__name__)

    return apply


# ---- the rewrites ------------------------------------------------------------------------------------------


@_once
def fold_ln(model: Any) -> bool:
    """Move the weight and bias of each norm into the weights that read its output.

    `(x w + b) W + c` becomes `x (w W) + (b W + c)`. What follows a LayerNorm reads vectors of mean zero, so `w W`
    also loses its mean over the axis it reads. The norms keep neither weight nor bias ("LNPre", "RMSPre"); biases
    are made where there were none, and a tied unembedding gets a `W_U` of its own. Norms after a sublayer, and those
    of queries and keys, stay: nothing linear follows them alone. So does `ln1` of a shortformer model, whose position
    embeddings join between norm and weights.
    """
    done = False
    for block in model.blocks:
        for name, readers in norm_readers(block):
            if readers and not (name == "ln1" and model.cfg.tree.shortformer):
                done |= _fold_norm(getattr(block, name), readers)
        if isinstance(mlp := getattr(block, "mlp", None), (MLP, GatedMLP)) and mlp.cfg.mid_norm is not None:
            done |= _fold_norm(mlp.ln, [(mlp, "W_out", "b_out")])
    final = norm_of(model, "ln_final")
    if isinstance(final, (LayerNorm, RMSNorm)) and isinstance(model.unembed, Unembed):
        model.untie()
        done |= _fold_norm(final, [(model.unembed, "W_U", "b_U")])
    if model.cfg.tree.shortformer:
        logger.info("fold_ln: ln1 stays as it is, position embeddings are added behind it")
    if "fold_value_biases" in model.cfg.processed:  # the norms' biases have gone into new ones
        _move_value_biases(model)
    return done


@_once
def center_writing_weights(model: Any) -> bool:
    """Take the mean over d_model out of everything that is added to the stream.

    `W <- W - mean(W)` over the last axis of `W_E`, `W_pos`, `W_O`, `b_O`, `W_out` and `b_out`: no LayerNorm sees that
    mean. So it is right only if each reader of the stream is a LayerNorm; with an RMSNorm anywhere, or no norm,
    nothing is done. A sublayer with a norm after it does not write its own output, and keeps its weights.
    """
    blocks = list(model.blocks)
    norms = [[getattr(block, name) for name, _ in norm_readers(block)] for block in blocks]
    readers = [norm_of(model, "ln_final"), *(norm for of_block in norms for norm in of_block)]
    if not all(norms) or not all(isinstance(norm, LayerNorm) for norm in readers):
        logger.info("center_writing_weights: skipped, not everything reads the stream through a LayerNorm")
        return False
    if _replaced_points(model):
        logger.info(
            "center_writing_weights: skipped, %s is no hook point and may do anything", _replaced_points(model)[0]
        )
        return False
    model.untie()
    _center(*output_weights(model.embed))
    if model.cfg.tree.pos_embed is not None and not model.cfg.tree.shortformer:
        _center(*output_weights(model.pos_embed))
    for block in blocks:
        if isinstance(norm_of(block, "ln1_post"), nn.Identity):
            _center(*_writers(block.mixer if isinstance(block, MixerPart) else block.attn))
        if isinstance(block, MLPPart) and isinstance(norm_of(block, "ln2_post"), nn.Identity):
            _center(*_writers(block.mlp))
    return True


@_once
def center_unembed(model: Any) -> bool:
    """Take the mean over the vocabulary out of the logits: `W_U <- W_U - mean(W_U)`, and `b_U` the same.

    A softmax does not see what all logits share, so log-probabilities stay. A soft cap does: then nothing is done. A
    tied unembedding gets a `W_U` of its own.
    """
    if not isinstance(model.unembed, Unembed):
        logger.info("center_unembed: skipped, the unembedding was replaced")
        return False
    if model.unembed.cfg.soft_cap is not None:
        logger.info("center_unembed: skipped, the soft cap of the logits would see the difference")
        return False
    model.untie()
    _center(model.unembed.W_U, model.unembed.b_U)
    return True


@_once
def fold_value_biases(model: Any) -> bool:
    """Move value biases into the output bias: `b_O <- b_O + sum over heads of b_V W_O`, and `b_V` is zero.

    An attention pattern sums to one, so a head passes its value bias on whatever it attends to. Where it does not (with
    sinks), or where values or what is mixed are clipped or normalised, nothing is done.
    """
    if _replaced_points(model):
        logger.info("fold_value_biases: skipped, %s is no hook point and may do anything", _replaced_points(model)[0])
        return False
    return _move_value_biases(model)


@_once
def refactor_factored_attn_matrices(model: Any) -> bool:
    """Choose other factors of the same products `W_Q W_K^T` and `W_V W_O`, from their singular values.

    With `W_V W_O = U S V^T`: `W_V = U S` and `W_O = V^T`, whose rows are orthonormal, after the value biases are
    folded. With `[W_Q; b_Q] [W_K; b_K]^T = U S V^T`: `U sqrt(S)` and `V sqrt(S)`. Query heads that share keys and
    values are factored together. Raises ValueError where queries and keys, or values and outputs, meet through a
    rotation, a norm, clipping or a sink: their product is then no such matrix.
    """
    attentions = _attentions(model)
    if any(a.cfg.rotary is not None or a.cfg.qk_norm is not None or not a.is_linear_in_values for a in attentions):
        raise ValueError(
            "refactor_factored_attn_matrices needs scores that are a product of W_Q and W_K, and outputs that are one of "
            "W_V and W_O; this model turns, normalises or clips what is in between, or has sinks. Leave it out."
        )
    _move_value_biases(model)
    for attn in attentions:
        _refactor_values(attn)
        _refactor_queries(attn)
    return True


REWRITES = (
    fold_ln,
    center_writing_weights,
    center_unembed,
    fold_value_biases,
    refactor_factored_attn_matrices,
)


def process_weights(
    model: Any,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> None:
    """Apply the rewrites that are asked for, in this order, in place; see the function of each name.

    Log-probabilities stay as they are, and without `center_unembed` logits too.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained_no_processing("demo")
    >>> before = model("Mary went home").log_softmax(-1)
    >>> process_weights(model)
    >>> bool((model("Mary went home").log_softmax(-1) - before).abs().max() < 1e-3)
    True
    """
    wanted = (
        fold_ln,
        center_writing_weights,
        center_unembed,
        fold_value_biases,
        refactor_factored_attn_matrices,
    )
    for rewrite in compress(REWRITES, wanted):
        rewrite(model)


def _attentions(model: Any) -> list[Attention]:
    """The attentions whose weights are one matrix for each of queries, keys, values and outputs."""
    return [block.attn for block in model.blocks if isinstance(getattr(block, "attn", None), Attention)]


def _move_value_biases(model: Any) -> bool:
    """Value biases into output biases, wherever there are any."""
    done = False
    for attn in _attentions(model):
        if attn.is_linear_in_values and attn.b_V is not None:
            per_head = attn.b_V.repeat_interleave(attn.cfg.n_heads // attn.cfg.n_kv, 0)
            _add(attn, "b_O", torch.einsum("nh,nhm->m", _working(per_head), _working(attn.W_O)))
            attn.b_V.detach().zero_()
            done = True
    return done


def _refactor_values(attn: Any) -> None:
    n_kv, (d_head, d_model) = attn.cfg.n_kv, attn.W_O.shape[1:]
    outputs = _working(attn.W_O).view(n_kv, -1, d_head, d_model)
    together = outputs.transpose(1, 2).flatten(2)  # [kv_head, d_head, the group's d_models]
    U, S, V = FactoredMatrix(_working(attn.W_V), together).svd()
    _set(attn.W_V, U * S[:, None])
    _set(attn.W_O, V.mT.reshape(n_kv, d_head, -1, d_model).transpose(1, 2).flatten(0, 1))


def _refactor_queries(attn: Any) -> None:
    n_kv, d_head = attn.cfg.n_kv, attn.cfg.d_head
    queries, keys = _working(attn.W_Q), _working(attn.W_K)
    if attn.b_Q is not None:
        queries = torch.cat([queries, _working(attn.b_Q)[:, None]], 1)
        keys = torch.cat([keys, _working(attn.b_K)[:, None]], 1)
    rows = queries.shape[1]
    together = queries.reshape(n_kv, -1, d_head)  # [kv_head, the group's d_models, d_head]
    U, S, V = FactoredMatrix(together, keys.mT).svd()
    queries = (U * S.sqrt()[:, None]).reshape(-1, rows, d_head)
    keys = V * S.sqrt()[:, None]
    if attn.b_Q is not None:
        _set(attn.b_Q, queries[:, -1])
        _set(attn.b_K, keys[:, -1])
        queries, keys = queries[:, :-1], keys[:, :-1]
    _set(attn.W_Q, queries)
    _set(attn.W_K, keys)


# ---- parameters --------------------------------------------------------------------------------------------


def _working(weight: Tensor) -> Tensor:
    """The values in at least fp32, to compute with: the weight's own memory where it is that already."""
    return wide(weight.detach())


@contextmanager
def _edited(weight: Tensor) -> Iterator[Tensor]:
    """The same to edit in place; what is edited arrives in the weight."""
    work = _working(weight)
    yield work
    if work.dtype != weight.dtype:
        weight.detach().copy_(work)


def _set(weight: Tensor, value: Tensor) -> None:
    """Other values for a parameter, in its own memory, dtype and order of strides."""
    weight.detach().copy_(value)


def _fold_norm(norm: Any, readers: Iterable[Reader]) -> bool:
    """Fold a norm into its readers, whose weights are [..., in, out]; False if there is no norm."""
    if type(norm) not in (LayerNorm, RMSNorm):
        return False
    layer_norm: bool = isinstance(norm, LayerNorm)
    gain, shift = norm.gain(), norm.shift() if layer_norm else None
    for module, weight_name, bias_name in readers:
        with _edited(getattr(module, weight_name)) as weight:
            if shift is not None:
                _add(module, bias_name, shift.to(weight.dtype) @ weight)
            if gain is not None:
                weight *= gain[:, None]
            if layer_norm:
                weight -= weight.mean(-2, keepdim=True)
    for name in list(norm._parameters):
        delattr(norm, name)
    norm.cfg = replace(norm.cfg, weight=False, **({"bias": False} if layer_norm else {}))
    return True


def _replaced_points(model: nn.Module) -> list[str]:
    """The places of hook points where somebody put another module."""
    modules = model.named_modules()
    return [n for n, m in modules if n.rpartition(".")[2].startswith("hook_") and not isinstance(m, HookPoint)]


def _writers(module: nn.Module) -> list[Tensor]:
    return output_weights(module) if is_known(module) else []


def _center(*weights: Tensor | None) -> None:
    """Take the mean over the last axis out of each; None is passed over."""
    for weight in weights:
        if weight is not None:
            with _edited(weight) as values:
                values -= values.mean(-1, keepdim=True)


def _add(module: Any, name: str, value: Tensor) -> None:
    """Add to a bias, which is made if there is none."""
    if getattr(module, name) is None:
        make_biases(module, name)
    bias = getattr(module, name)
    _set(bias, _working(bias) + value)


# ---- methods of a model ------------------------------------------------------------------------------------


class FoldMethods:
    """`process_weights_` and `load_and_process_state_dict` of a model."""

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Rewrite the weights in place, value biases included; see `hooked_lm.models.weights.fold.process_weights`.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained_no_processing("demo")
        >>> model.process_weights_()
        >>> "fold_ln" in model.cfg.processed
        True
        """
        process_weights(
            self,
            fold_ln,
            center_writing_weights,
            center_unembed,
            refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        )

    def load_and_process_state_dict(
        self,
        state_dict: dict[str, Tensor],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Load weights, also those that were saved elsewhere, and rewrite them; see `load_state`, `process_weights`.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained_no_processing("demo")
        >>> model.load_and_process_state_dict(model.state_dict(), fold_ln=False)
        >>> "fold_ln" in model.cfg.processed
        False
        """
        load_state(self, state_dict)
        process_weights(
            self,
            fold_ln,
            center_writing_weights,
            center_unembed,
            fold_value_biases,
            refactor_factored_attn_matrices,
        )
