"""The singular vectors of weight matrices in terms of tokens (Millidge and Black 2022, "The singular value
decompositions of transformer weight matrices are highly interpretable")."""

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.reading.neurons import (
    attention_of,
    head_weights,
    mlp_of,
    norm_before,
    seen_through,
    to_logits,
    token_strings,
    written,
)
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.errors import ArgumentError
from hooked_lm.extras import lazy_import
from hooked_lm.factored_matrix import FactoredMatrix
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.names import checked_index

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

VECTOR_TYPES = ("OV", "w_in", "w_gate", "w_out")


class SVDInterpreter:
    """Singular vectors of a model's weights in the residual stream, projected to the vocabulary by the unembedding.

    - "OV": the output directions of a head, the right singular vectors of its `W_V W_O`.
    - "w_in", and "w_gate" of a gated MLP: the input directions of the MLP, the right singular vectors of the transpose.
    - "w_out": the output directions of the MLP, the right singular vectors of `W_out`.

    Weights of norms before and after these matrices, and of the final norm, are included if they are not folded. The sign of a
    singular vector is arbitrary, so consider the tokens at both ends.

    >>> from hooked_lm import HookedTransformer
    >>> interpreter = SVDInterpreter(HookedTransformer.from_pretrained("demo"))
    >>> interpreter.get_singular_vectors(
    ...     "OV", layer_index=3, head_index=4, num_vectors=5
    ... ).shape
    torch.Size([1506, 1, 5])
    """

    def __init__(self, model: Decoder) -> None:
        self.model, self.cfg = model, model.cfg

    @torch.no_grad()
    def get_singular_vectors(
        self, vector_type: str, layer_index: int, num_vectors: int = 10, head_index: int | None = None
    ) -> Float[Tensor, "d_vocab 1 num_vectors"]:
        """The logit of each token for the first singular vectors; only "OV" needs `head_index`.

        Raises ValueError for an unknown type, a layer without such weights, or more vectors than the rank; IndexError for a layer
        or head that does not exist.
        """
        _, V = self._decomposed(vector_type, layer_index, num_vectors, head_index)
        return to_logits(self.model, V).T[:, None]

    @torch.no_grad()
    def top_tokens(
        self, vector_type: str, layer_index: int, num_vectors: int = 10, head_index: int | None = None, k: int = 10
    ) -> "pd.DataFrame":
        """The tokens with the largest and smallest logits of the first singular vectors: a row for each vector, sign and rank.

        Columns: vector, singular value, sign, rank, token, value (of the logit).

        >>> from hooked_lm import HookedTransformer
        >>> interpreter = SVDInterpreter(HookedTransformer.from_pretrained("demo"))
        >>> table = interpreter.top_tokens("w_out", layer_index=3, num_vectors=2, k=3)
        >>> len(table), table["singular value"].is_monotonic_decreasing
        (12, True)
        """
        S, V = self._decomposed(vector_type, layer_index, num_vectors, head_index)
        logits = to_logits(self.model, V)
        if not 1 <= k <= logits.shape[1]:
            raise ArgumentError(f"k must be from 1 to {logits.shape[1]}, the number of tokens, got {k}")
        rows = list[dict[str, Any]]()
        for vector, values in enumerate(logits):
            for sign, best in (("+", values.topk(k)), ("-", values.topk(k, largest=False))):
                for rank, token in enumerate(token_strings(self.model, best.indices)):
                    value = float(best.values[rank])
                    singular = {"vector": vector, "singular value": float(S[vector])}
                    rows.append({**singular, "sign": sign, "rank": rank, "token": token, "value": value})
        return pd.DataFrame(rows)

    def _decomposed(
        self, vector_type: str, layer: int, num_vectors: int, head: int | None
    ) -> tuple[Float[Tensor, " num_vectors"], Float[Tensor, "num_vectors d_model"]]:
        """The largest singular values, and their right singular vectors."""
        if vector_type not in VECTOR_TYPES:
            raise ArgumentError(f"vector_type must be one of {', '.join(VECTOR_TYPES)}, got {vector_type!r}")
        if vector_type == "OV":
            S, V = self._of_head(layer, head)
        else:
            _, S, Vh = torch.linalg.svd(self._of_mlp(vector_type, layer), full_matrices=False)
            V = Vh.T
        if not 1 <= num_vectors <= len(S):
            raise ArgumentError(f"num_vectors must be from 1 to {len(S)}, the rank of this matrix, got {num_vectors}")
        return S[:num_vectors], V.T[:num_vectors]

    def _of_head(self, layer: int, head: int | None) -> tuple[Tensor, Tensor]:
        layer, attn = attention_of(self.model, layer)
        if head is None:
            raise ArgumentError(f"vector_type 'OV' needs a head: give head_index, from 0 to {attn.cfg.n_heads - 1}")
        head = checked_index(head, attn.cfg.n_heads, "head")
        _, S, V = FactoredMatrix(*head_weights(self.model.blocks[layer], head)).svd()
        return S, V

    def _of_mlp(self, vector_type: str, layer: int) -> Float[Tensor, "d_mlp d_model"]:
        layer, mlp = mlp_of(self.model, layer)
        block = self.model.blocks[layer]
        if vector_type == "w_out":
            return written(norm_of(block, "ln2_post"), mlp.W_out)
        if vector_type == "w_gate" and not hasattr(mlp, "W_gate"):
            raise ArgumentError(f"the MLP of layer {layer} is not gated: it has no w_gate")
        return seen_through(norm_before(block, "mlp"), (mlp.W_in if vector_type == "w_in" else mlp.W_gate).T)
