"""Helpers for tensors and matrices, and logits as a table."""

from typing import TYPE_CHECKING, Any, TypeVar

from jaxtyping import Float, Shaped
from torch import Tensor

from hooked_lm.extras import lazy_import
from hooked_lm.factored_matrix import FactoredMatrix

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

__all__ = [
    "check_structure", "filter_dict_by_prefix", "get_cumsum_along_dim", "get_matrix_corner", "is_lower_triangular",
    "is_square", "logits_to_df", "transpose",
]  # fmt: skip

Value = TypeVar("Value")


def transpose(tensor: Shaped[Tensor, "*batch a b"]) -> Shaped[Tensor, "*batch b a"]:
    """The tensor with its last two axes swapped."""
    return tensor.transpose(-1, -2)


def is_square(x: Tensor) -> bool:
    """Whether the tensor is one square matrix."""
    return x.ndim == 2 and x.shape[0] == x.shape[1]


def is_lower_triangular(x: Tensor) -> bool:
    """Whether the tensor is a square matrix with zeros above its diagonal."""
    return is_square(x) and x.equal(x.tril())


def get_cumsum_along_dim(tensor: Tensor, dim: int, reverse: bool = False) -> Tensor:
    """The cumulative sum along an axis; `reverse` starts at the end.

    >>> import torch
    >>> get_cumsum_along_dim(torch.tensor([1, 2, 3]), 0, reverse=True)
    tensor([6, 5, 3])
    """
    return tensor.flip(dim).cumsum(dim).flip(dim) if reverse else tensor.cumsum(dim)


def filter_dict_by_prefix(dictionary: dict[str, Value], prefix: str) -> dict[str, Value]:
    """The entries with a dotted prefix, which is removed from their names.

    >>> filter_dict_by_prefix({"blocks.1.attn.W_Q": 5, "blocks.10.attn.W_Q": 6}, "blocks.1")
    {'attn.W_Q': 5}
    """
    prefix = prefix.rstrip(".") + "."
    return {name.removeprefix(prefix): value for name, value in dictionary.items() if name.startswith(prefix)}


def get_matrix_corner(matrix: FactoredMatrix, n: int = 3) -> Tensor:
    """The first `n` entries of a product along every axis, without computing the others."""
    return matrix[(slice(n),) * matrix.ndim].AB


def check_structure(t1: Float[Tensor, "row col"], t2: Float[Tensor, "row col"], *, verbose: bool = False) -> None:
    """Prints whether two matrices increase and decrease at the same places along rows and columns.

    Prints "PASSED", or the rows and columns after which they differ; `verbose` adds where each of them decreases.
    """
    passed = True
    for kind, first, second in (("row", t1, t2), ("column", t1.T, t2.T)):
        falls = [matrix[:-1] >= matrix[1:] for matrix in (first, second)]
        differing = (falls[0] != falls[1]).any(1).nonzero()[:, 0].tolist()
        if differing:
            passed = False
            print(f"{kind} mismatch: {differing}")
        for place in differing if verbose else []:
            print(f"  {kind}s {place}, {place + 1}: {falls[0][place].tolist()} and {falls[1][place].tolist()}")
    if passed:
        print("PASSED")


def logits_to_df(logits: Float[Tensor, " d_vocab"], tokenizer: Any = None, top_k: int | None = None) -> "pd.DataFrame":
    """The logits of one position as a table, the most likely token first; probabilities are over the whole vocabulary.

    Columns: token_index, token_string (with a tokenizer), logit, log_prob (nats), probability. `top_k` limits the rows.

    >>> import torch
    >>> logits_to_df(torch.tensor([0.0, 2.0, 1.0]), top_k=2)["token_index"].tolist()
    [1, 2]

    Raises ValueError for logits of several positions.
    """
    if logits.ndim != 1:
        raise ValueError(
            f"expected the logits of one position, [d_vocab], got {list(logits.shape)}; index a position first"
        )
    logits = logits.detach().cpu()
    log_probs = logits.float().log_softmax(0)
    order = log_probs.argsort(descending=True, stable=True)[:top_k]
    columns: dict[str, list[Any]] = {"token_index": order.tolist()}
    if tokenizer is not None:
        columns["token_string"] = [tokenizer.decode([index]) for index in columns["token_index"]]
    columns["logit"] = logits.float()[order].tolist()
    columns["log_prob"] = log_probs[order].tolist()
    columns["probability"] = log_probs[order].exp().tolist()
    return pd.DataFrame(columns)
