"""Match attention heads with an expected attention pattern: `detect_head` and its pattern builders."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.analysis.reading.head_kinds import (
    KINDS,
    Row,
    TargetRows,
    duplicate_token,
    induction,
    previous_token,
)
from hooked_lm.analysis.reading.heads import HeadRows, Pattern, check_model, head_counts, rows_of, see_patterns
from hooked_lm.engine.prompts import Prompts
from hooked_lm.errors import ArgumentError
from hooked_lm.models.decoder import Decoder

Detection = Float[Tensor, "query_pos key_pos"]
Tokens = Int[Tensor, "*one pos"]  # [1, pos] or [pos]
Heads = Sequence[tuple[int, int]] | Mapping[int, Sequence[int]]
HEAD_NAMES = ("previous_token_head", "duplicate_token_head", "induction_head")
ERROR_MEASURES = ("mul", "abs")


def get_previous_token_head_detection_pattern(tokens: Tokens) -> Detection:
    """The attention pattern with 1 from each token to the previous one.

    >>> get_previous_token_head_detection_pattern(torch.tensor([[5, 6, 5]]))
    tensor([[0., 0., 0.],
            [1., 0., 0.],
            [0., 1., 0.]])
    """
    return previous_token(_row(tokens)).float()


def get_duplicate_token_head_detection_pattern(tokens: Tokens) -> Detection:
    """The attention pattern with 1 from each token to its earlier occurrences.

    >>> get_duplicate_token_head_detection_pattern(torch.tensor([[5, 6, 5]])).nonzero()
    tensor([[2, 0]])
    """
    return duplicate_token(_row(tokens)).float()


def get_induction_head_detection_pattern(tokens: Tokens) -> Detection:
    """The attention pattern with 1 from each token to the tokens that follow its earlier occurrences.

    >>> get_induction_head_detection_pattern(torch.tensor([[5, 6, 5]])).nonzero()
    tensor([[2, 1]])
    """
    return induction(_row(tokens)).float()


TARGETS = {f"{name}_head": kind for name, kind in KINDS.items()}


def detect_head(
    model: Decoder,
    seq: Prompts,
    detection_pattern: str | Detection,
    heads: Heads | None = None,
    cache: Any = None,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    error_measure: str = "mul",
) -> Float[Tensor, "layer head"]:
    """The similarity of heads to an attention pattern, [layer, head]; 1 is a perfect match.

    Args:
        seq: one or more texts, ids [batch, pos] or [pos], or `VisionInputs`; scores are averaged over prompts.
        detection_pattern: "previous_token_head", "duplicate_token_head", "induction_head", or a lower triangle [pos, pos]: the
            expected attention from a query (row) to a key (column).
        heads: `[(layer, head), ...]` or `{layer: [head, ...]}`; None: all.
        cache: the cache of a run on these prompts, instead of a run.
        exclude_bos, exclude_current_token: ignore attention to the first token, or to the query's own token.
        error_measure: "mul": the fraction of the attention that goes to entries where the pattern is 1 (0 if all attention is
            ignored); "abs": 1 minus the sum of absolute differences, averaged over queries, which may be negative.

    Heads that are not in `heads` are -1. Layers without attention and heads that a layer lacks are NaN. Raises ValueError for
    a prompt of fewer than two tokens or more than n_ctx, for a pattern that is not a lower triangle of the prompt's
    length, and for unknown names; IndexError for a head that does not exist.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> scores = detect_head(
    ...     model, "When Mary and John left", "previous_token_head", exclude_bos=True
    ... )
    >>> scores.shape, bool(scores[0, 6] > 0.6)
    (torch.Size([4, 8]), True)
    """
    check_model(model)
    if error_measure not in ERROR_MEASURES:
        raise ArgumentError(f"error_measure must be one of {', '.join(ERROR_MEASURES)}, got {error_measure!r}")
    rows = rows_of(model, seq)
    expected = [_expected(detection_pattern, row) for row in rows]
    wanted = _wanted(model, heads)
    sums = torch.full((2, *wanted.shape, len(rows)), torch.nan)

    def see(layer: int, which: list[int], pattern: Pattern, queries: slice) -> None:
        detection = torch.stack([expected[i](queries) for i in which])[:, None].to(pattern)
        parts = _agreement(pattern, detection, queries.start, exclude_bos, exclude_current_token, error_measure)
        at = (slice(None), layer, slice(pattern.shape[1]), which)
        sums[at] = sums[at].nan_to_num() + parts.transpose(1, 2).cpu()

    layers = wanted.any(1).nonzero().flatten().tolist()
    if cache is None:
        see_patterns(model, rows, see, layers)
    else:
        for layer in layers:
            pattern = _cached(cache, layer, rows)
            see(layer, list(range(len(rows))), pattern, slice(0, pattern.shape[-1]))
    exists = torch.tensor([[head < n for head in range(wanted.shape[1])] for n in head_counts(model)])
    return _score(sums, error_measure).mean(-1).masked_fill(exists & ~wanted, -1.0)


def compute_head_attention_similarity_score(
    attention_pattern: Float[Tensor, "query_pos key_pos"],
    detection_pattern: Float[Tensor, "query_pos key_pos"],
    *,
    exclude_bos: bool,
    exclude_current_token: bool,
    error_measure: str,
) -> float:
    """The similarity of an attention pattern to another; see `detect_head`.

    >>> uniform = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> before = get_previous_token_head_detection_pattern(torch.tensor([3, 4]))
    >>> options = {"exclude_bos": False, "exclude_current_token": True}
    >>> compute_head_attention_similarity_score(
    ...     uniform, before, error_measure="mul", **options
    ... )
    1.0
    """
    if error_measure not in ERROR_MEASURES:
        raise ArgumentError(f"error_measure must be one of {', '.join(ERROR_MEASURES)}, got {error_measure!r}")
    detection = _checked_pattern(detection_pattern, attention_pattern.shape[0])
    sums = _agreement(attention_pattern, detection, 0, exclude_bos, exclude_current_token, error_measure)
    return float(_score(sums, error_measure))


def _agreement(
    attention: Float[Tensor, "*cell query_pos key_pos"],
    detection: Float[Tensor, "*#cell query_pos key_pos"],
    first: int,
    exclude_bos: bool,
    exclude_current_token: bool,
    error_measure: str,
) -> Float[Tensor, "2 *cell"]:
    """Two sums over rows of a pattern, from query `first` on, of which `_score` makes the similarity."""
    counts = torch.ones(attention.shape[-2:], dtype=torch.bool, device=attention.device)
    if exclude_bos:
        counts[:, 0] = False
    if exclude_current_token:
        counts.diagonal(first).fill_(False)
    is_difference = error_measure == "abs"
    part = (attention - detection).abs() if is_difference else attention * detection
    whole = torch.ones_like(attention[..., 0]) if is_difference else (attention * counts).sum(-1)
    return torch.stack([(part * counts).sum((-2, -1)), whole.sum(-1)])


def _score(sums: Float[Tensor, "2 *cell"], error_measure: str) -> Float[Tensor, "*cell"]:
    part, whole = sums
    return 1 - part / whole if error_measure == "abs" else part / whole.clamp(min=torch.finfo(sums.dtype).tiny)


def _row(tokens: Tokens) -> Row:
    if tokens.ndim > 1 and tokens.numel() != tokens.shape[-1]:
        raise ArgumentError(
            f"a detection pattern is that of one prompt, ids [1, pos] or [pos], got {tuple(tokens.shape)}"
        )
    return tokens.flatten()


def _expected(detection_pattern: str | Detection, row: Row) -> TargetRows | Callable[[slice], Detection]:
    """Rows of the expected attention pattern for a prompt."""
    if isinstance(detection_pattern, str):
        if detection_pattern not in TARGETS:
            raise ArgumentError(
                f"detection_pattern must be a tensor [pos, pos] or one of {', '.join(TARGETS)}, got {detection_pattern!r}"
            )
        return partial(TARGETS[detection_pattern], row)
    return _checked_pattern(detection_pattern, len(row)).__getitem__


def _checked_pattern(pattern: Tensor, n_pos: int) -> Detection:
    if tuple(pattern.shape) != (n_pos, n_pos):
        raise ArgumentError(
            f"detection_pattern is {tuple(pattern.shape)}; expected {(n_pos, n_pos)}, for the prompt's tokens"
        )
    if bool(pattern.triu(1).any()):
        raise ArgumentError(
            "detection_pattern must be a lower triangle: no query sees a later key; take pattern.tril()"
        )
    return pattern.float()


def _wanted(model: Decoder, heads: Heads | None) -> Bool[Tensor, "layer head"]:
    """A mask of the requested heads."""
    counts = head_counts(model)
    wanted = torch.zeros(len(counts), max(counts), dtype=torch.bool)
    if heads is None:
        pairs = [(layer, head) for layer, n in enumerate(counts) for head in range(n)]
    elif isinstance(heads, Mapping):
        pairs = [(layer, head) for layer, some in heads.items() for head in some]
    else:
        pairs = [(layer, head) for layer, head in heads]
    for layer, head in pairs:
        if not (-len(counts) <= layer < len(counts) and -counts[layer] <= head < counts[layer]):
            raise ArgumentError(f"there is no head {head} in layer {layer}: the layers have {counts} heads")
        wanted[layer, head % counts[layer]] = True
    return wanted


def _cached(cache: Any, layer: int, rows: HeadRows) -> Pattern:
    """A layer's patterns from a cache with or without a batch dimension."""
    pattern = cache["pattern", layer]
    pattern = pattern if pattern.ndim == 4 else pattern[None]
    lengths = [len(row) for row in rows]
    if len(pattern) != len(rows) or set(lengths) != {pattern.shape[-1]}:
        raise ArgumentError(
            f"the cache is of {len(pattern)} prompts of {pattern.shape[-1]} tokens, and the prompts have {lengths} tokens: "
            "give the cache of a run on these prompts, without padding, or none"
        )
    return pattern.detach().float()
