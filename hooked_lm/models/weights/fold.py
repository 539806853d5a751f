"""Rewrites of a decoder's weights that preserve its predictions and make its components easier to compare.

Each rewrite works in place, one tensor at a time, in fp32 or wider. A memory-mapped checkpoint file is not changed: its
pages are copied on write. `cfg.processed` records each rewrite, so that it is applied once. A rewrite that would change
the predictions is skipped, with a log message.
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

from hooked_lm.components import verification
from hooked_lm.components.attention.multihead import AbstractAttention, ProjectedAttention
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.components.embeddings.embed import Unembed
from hooked_lm.components.embeddings.transformed_unembed import TransformedUnembed
from hooked_lm.components.mlp import AbstractGatedMLP, AbstractMLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm, norm_of, upcast
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.hooks import HookedRootModule, HookPoint
from hooked_lm.models.weights.quantize import refuse_quantized
from hooked_lm.models.weights.state import load_state, make_biases, sync_config
from hooked_lm.models.weights.weight_scope import refuse_open_scopes

logger = logging.getLogger(__name__)

Rewrite = Callable[..., bool]
InputWeight = tuple[nn.Module, str, str]  # a module, and the names of its weight and bias


def _once(rewrite: Rewrite) -> Callable[..., None]:
    """Wraps a rewrite: no gradients, recorded in `cfg.processed`, skipped if recorded already."""

    @wraps(rewrite)
    @torch.no_grad()
    def apply(model: HookedRootModule, **options: bool) -> None:
        refuse_open_scopes(model, rewrite.__name__)
        refuse_quantized(
            model, rewrite.__name__, "fold the weights before quantize(), as from_pretrained does by default"
        )
        if rewrite.__name__ not in model.cfg.processed and rewrite(model, **options):
            sync_config(model)
            model.cfg.processed = (*model.cfg.processed, rewrite.__name__)

    return apply


# ---- the rewrites ------------------------------------------------------------------------------------------


@_once
def fold_ln(model: HookedRootModule, fold_biases: bool = True, center_weights: bool = True) -> bool:
    """Folds the weight and bias of each norm into the weights that read its output.

    `(x w + b) W + c` becomes `x (w W) + (b W + c)`. The output of a LayerNorm has mean zero, so `w W` is also centred over
    its input axis. The norms lose weight and bias ("LNPre", "RMSPre"); missing biases are created, and a tied unembedding
    is untied. Not folded: norms after a sublayer and those of queries and keys, which no linear map follows directly, and
    `ln1` of a shortformer model, where position embeddings are added after the norm.

    Without `fold_biases` the biases of LayerNorms stay in them, divided by their weights, which may then not be zero, and
    `w W` is not centred, as the output then has a mean. Without `center_weights` it is not centred either.
    """
    options = {"fold_biases": fold_biases, "center_weights": center_weights}
    done = False
    for block in model.blocks:
        for name, readers in verification.weights_after_norms(block):
            if readers and not (name == "ln1" and model.cfg.tree.shortformer):
                done |= _fold_norm(getattr(block, name), readers, **options)
        mlp = getattr(block, "mlp", None)
        if isinstance(mlp, (AbstractMLP, AbstractGatedMLP)) and mlp.cfg.mid_norm is not None:
            done |= _fold_norm(mlp.ln, [(mlp, "W_out", "b_out")], **options)
    final = norm_of(model, "ln_final")
    if isinstance(model.unembed, TransformedUnembed):
        logger.info("fold_ln: ln_final is not folded into W_U, because a transform is between them")
    elif isinstance(final, (LayerNorm, RMSNorm)) and isinstance(model.unembed, Unembed):
        model.untie()
        done |= _fold_norm(final, [(model.unembed, "W_U", "b_U")], **options)
    if model.cfg.tree.shortformer:
        logger.info("fold_ln: ln1 is not folded, because position embeddings are added after it")
    if "fold_value_biases" in model.cfg.processed:  # the norms' biases have been added to the value biases
        _move_value_biases(model)
    return done


@_once
def center_writing_weights(model: HookedRootModule) -> bool:
    """Subtracts the mean over d_model from everything that is added to the stream.

    `W <- W - mean(W)` over the last axis of `W_E`, `W_pos`, `W_O`, `b_O`, `W_out` and `b_out`. LayerNorm is invariant to
    this mean, so nothing is done unless every reader of the stream is a LayerNorm. The weights of a sublayer with a norm
    after it are unchanged, because its output is not added to the stream directly.
    """
    blocks = list(model.blocks)
    norms = [[getattr(block, name) for name, _ in verification.weights_after_norms(block)] for block in blocks]
    readers = [norm_of(model, "ln_final"), *(norm for of_block in norms for norm in of_block)]
    if not all(norms) or not all(isinstance(norm, LayerNorm) for norm in readers):
        logger.info("center_writing_weights: skipped, because not every reader of the stream is a LayerNorm")
        return False
    if _replaced_points(model):
        logger.info(
            "center_writing_weights: skipped, because %s was replaced by another module", _replaced_points(model)[0]
        )
        return False
    model.untie()
    _center(*verification.output_weights(model.embed))
    if model.cfg.tree.pos_embed is not None and not model.cfg.tree.shortformer:
        _center(*verification.output_weights(model.pos_embed))
    for block in blocks:
        if isinstance(norm_of(block, "ln1_post"), nn.Identity):
            for part in ("attn", "mixer"):
                if part in block._modules:
                    _center(*_output_weights(block._modules[part]))
        if has_part(block, "mlp") and isinstance(norm_of(block, "ln2_post"), nn.Identity):
            _center(*_output_weights(block.mlp))
    return True


@_once
def center_unembed(model: HookedRootModule) -> bool:
    """Subtracts the mean over the vocabulary from the logits: `W_U <- W_U - mean(W_U)`, and likewise `b_U`.

    Log-probabilities are invariant to a constant added to all logits. A soft cap is not: then nothing is done. A tied
    unembedding is untied.
    """
    if not isinstance(model.unembed, Unembed):
        logger.info("center_unembed: skipped, because the unembedding was replaced")
        return False
    if model.unembed.cfg.soft_cap is not None:
        logger.info("center_unembed: skipped, because the soft cap of the logits is not invariant to their mean")
        return False
    model.untie()
    _center(model.unembed.W_U, model.unembed.b_U)
    return True


@_once
def fold_value_biases(model: HookedRootModule) -> bool:
    """Folds value biases into the output bias: `b_O <- b_O + sum over heads of b_V W_O`, and `b_V <- 0`.

    Valid because an attention pattern sums to one. Nothing is done for attention with sinks, whose pattern does not, or
    with values or outputs that are clipped or normalised.
    """
    if _replaced_points(model):
        logger.info("fold_value_biases: skipped, because %s was replaced by another module", _replaced_points(model)[0])
        return False
    return _move_value_biases(model)


@_once
def refactor_factored_attn_matrices(model: HookedRootModule) -> bool:
    """Refactors the products `W_Q W_K^T` and `W_V W_O` by their singular value decompositions.

    With `W_V W_O = U S V^T`: `W_V = U S` and `W_O = V^T`, whose rows are orthonormal, after the value biases are
    folded. With `[W_Q; b_Q] [W_K; b_K]^T = U S V^T`: `U sqrt(S)` and `V sqrt(S)`. Query heads that share keys and
    values are factored together. Raises ValueError for attention with rotary positions, norms, clipping or a gate between the
    two factors, or with sinks.
    """
    attentions = _attentions(model)
    if any(a.cfg.rotary is not None or a.cfg.qk_norm is not None or not a.is_linear_in_values for a in attentions):
        raise ValueError(
            "refactor_factored_attn_matrices needs scores that depend only on W_Q W_K^T, and outputs that depend only on "
            "W_V W_O; this model rotates, normalises, clips or gates in between, or has sinks. Omit this option."
        )
    _move_value_biases(model)
    for attn in attentions:
        _refactor_values(attn)
        _refactor_queries(attn)
    return True


FOLDS = (
    fold_ln,
    center_writing_weights,
    center_unembed,
    fold_value_biases,
    refactor_factored_attn_matrices,
)


def process_weights(
    model: HookedRootModule,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> None:
    """Applies the selected rewrites in place, in this order; see the function of each name.

    Log-probabilities are unchanged; without `center_unembed` so are logits.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained_no_processing("demo")
    >>> before = model("Mary went home").log_softmax(-1)
    >>> process_weights(model)
    >>> bool((model("Mary went home").log_softmax(-1) - before).abs().max() < 1e-3)
    True
    """
    selected = (
        fold_ln,
        center_writing_weights,
        center_unembed,
        fold_value_biases,
        refactor_factored_attn_matrices,
    )
    for rewrite in compress(FOLDS, selected):
        rewrite(model)


def _attentions(model: HookedRootModule) -> list[ProjectedAttention]:
    """The attention modules with one weight each for queries, keys, values and outputs."""
    return [block.attn for block in model.blocks if isinstance(getattr(block, "attn", None), ProjectedAttention)]


def _move_value_biases(model: HookedRootModule) -> bool:
    """Adds value biases to output biases and zeroes them; whether there were any."""
    done = False
    for attn in _attentions(model):
        _, bias = attn.value_weights
        if attn.is_linear_in_values and attn.b_V is not None and bias is not None:
            per_head = bias.repeat_interleave(attn.cfg.n_heads // attn.cfg.n_kv, 0)
            _add(attn, "b_O", torch.einsum("nh,nhm->m", _working(per_head), _working(attn.W_O)))
            attn.b_V.detach().zero_()
            done = True
    return done


def _refactor_values(attn: AbstractAttention) -> None:
    n_kv, (d_head, d_model) = attn.cfg.n_kv, attn.W_O.shape[1:]
    outputs = _working(attn.W_O).view(n_kv, -1, d_head, d_model)
    grouped = outputs.transpose(1, 2).flatten(2)  # [kv_head, d_head, heads of the group x d_model]
    U, S, V = FactoredMatrix(_working(attn.W_V), grouped).svd()
    _set(attn.W_V, U * S[:, None])
    _set(attn.W_O, V.mT.reshape(n_kv, d_head, -1, d_model).transpose(1, 2).flatten(0, 1))


def _refactor_queries(attn: Any) -> None:
    n_kv, d_head = attn.cfg.n_kv, attn.cfg.d_head
    queries, keys = _working(attn.W_Q), _working(attn.W_K)
    if attn.b_Q is not None:
        queries = torch.cat([queries, _working(attn.b_Q)[:, None]], 1)
        keys = torch.cat([keys, _working(attn.b_K)[:, None]], 1)
    rows = queries.shape[1]
    grouped = queries.reshape(n_kv, -1, d_head)  # [kv_head, heads of the group x rows, d_head]
    U, S, V = FactoredMatrix(grouped, keys.mT).svd()
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
    """The values in fp32 or wider; shares memory with the weight if that is its dtype."""
    return upcast(weight.detach())


@contextmanager
def _edited(weight: Tensor) -> Iterator[Tensor]:
    """Yields the values in fp32 or wider to edit in place, and writes them back to the weight."""
    work = _working(weight)
    yield work
    if work.dtype != weight.dtype:
        weight.detach().copy_(work)


def _set(weight: Tensor, value: Tensor) -> None:
    """Copies values into a parameter, which keeps its memory, dtype and strides."""
    weight.detach().copy_(value)


def _fold_norm(norm: Any, readers: Iterable[InputWeight], fold_biases: bool, center_weights: bool) -> bool:
    """Folds a norm into the weights [..., in, out] that read it; False if there is no norm."""
    if type(norm) not in (LayerNorm, RMSNorm):
        return False
    layer_norm: bool = isinstance(norm, LayerNorm)
    gain, shift = norm.gain(), norm.shift() if layer_norm else None
    keeps_bias = shift is not None and not fold_biases
    for module, weight_name, bias_name in readers:
        with _edited(getattr(module, weight_name)) as weight:
            if shift is not None and fold_biases:
                _add(module, bias_name, shift.to(weight.dtype) @ weight)
            if gain is not None:
                weight *= gain[:, None]
            if layer_norm and center_weights and not keeps_bias:
                weight -= weight.mean(-2, keepdim=True)
    if keeps_bias and gain is not None:
        if not gain.all():
            raise ValueError("a norm has a weight of zero, so its bias has to be folded: leave fold_biases out")
        _set(norm.b, shift / gain)
    for name in [name for name in norm._parameters if name == "w" or not keeps_bias]:
        delattr(norm, name)
    norm.cfg = replace(norm.cfg, weight=False, **({"bias": keeps_bias} if layer_norm else {}))
    return True


def _replaced_points(model: nn.Module) -> list[str]:
    """The names of hook points that were replaced by other modules."""
    modules = model.named_modules()
    return [n for n, m in modules if n.rpartition(".")[2].startswith("hook_") and not isinstance(m, HookPoint)]


def _output_weights(module: nn.Module) -> list[Tensor]:
    return verification.output_weights(module) if verification.is_known(module) else []


def _center(*weights: Tensor | None) -> None:
    """Subtracts from each weight its mean over the last axis; skips None."""
    for weight in weights:
        if weight is not None:
            with _edited(weight) as values:
                values -= values.mean(-1, keepdim=True)


def _add(module: nn.Module, name: str, value: Tensor) -> None:
    """Adds a value to a bias, which is created if absent."""
    if getattr(module, name) is None:
        make_biases(module, name)
    bias = getattr(module, name)
    _set(bias, _working(bias) + value)


# ---- methods of a model ------------------------------------------------------------------------------------


class FoldMethods(HookedRootModule):
    """`process_weights_` and `load_and_process_state_dict` of a model."""

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Rewrites the weights in place, and folds value biases; see `hooked_lm.models.weights.fold.process_weights`.

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
        """Loads weights (also of other libraries) and rewrites them; see `load_state` and `process_weights`.

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
