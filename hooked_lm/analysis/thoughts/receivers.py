"""Receiver heads: heads whose later queries look at few sentences of a thought."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.analysis.reading.heads import HeadRows, head_counts, see_patterns
from hooked_lm.analysis.thoughts.sentences import ThoughtSentence
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat


def attention_between(
    model: Decoder, chat: Chat, sentences: Sequence[ThoughtSentence]
) -> Float[Tensor, "layer head sentence sentence"]:
    """The mean attention from the tokens of one sentence to each token of another, [layer, head, from, to].

    NaN for heads that a layer lacks. Patterns are read some rows at a time.
    """
    counts = head_counts(model)
    n, n_pos = len(sentences), chat.shape[1]
    member = torch.zeros(n, n_pos)
    for i, sentence in enumerate(sentences):
        member[i, sentence.start : sentence.stop] = 1 / (sentence.stop - sentence.start)
    found = torch.full((len(counts), max(counts), n, n), torch.nan)
    for layer, n_heads in enumerate(counts):
        found[layer, :n_heads] = 0.0

    def see(layer: int, which: list[int], pattern: Float[Tensor, "batch head query key"], queries: slice) -> None:
        weights = member.to(pattern.device)
        of_queries = weights[:, queries.start : queries.start + pattern.shape[-2]]
        found[layer, : counts[layer]] += (of_queries @ pattern[0] @ weights.T).cpu()

    see_patterns(model, HeadRows([chat.tokens[0].cpu()]), see)
    return found


def vertical_scores(
    attention: Float[Tensor, "layer head sentence sentence"], distance: int
) -> Float[Tensor, "layer head sentence"]:
    """The mean attention that each sentence receives from those at least `distance` sentences later; NaN if there are none."""
    n = attention.shape[-1]
    is_later = torch.ones(n, n, dtype=torch.bool).tril(-distance)
    return attention.where(is_later, 0.0).sum(-2) / is_later.sum(0)


def kurtosis(values: Float[Tensor, "layer head sentence"]) -> Float[Tensor, "layer head"]:
    """The excess kurtosis over sentences of those that have a value: 0 for normal numbers, large if few sentences stand out.

    NaN of fewer than four sentences, and of equal values.
    """
    known = values[..., ~values.isnan().flatten(0, -2).all(0)].double()
    if known.shape[-1] < 4:
        return torch.full(values.shape[:-1], torch.nan)
    centred = known - known.mean(-1, keepdim=True)
    return ((centred**4).mean(-1) / (centred**2).mean(-1) ** 2 - 3).float()
