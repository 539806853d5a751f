"""Rollouts from before each sentence of a thought: their first sentences, and the answers to which they lead."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.analysis.thoughts.sentences import Split, ThoughtSentence
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.progress import progress_bar

LONGER, MORE = 2, 100  # a rollout may be so many times as long as in the conversation, and so many tokens longer
Metric = Callable[[str], float | int]
Different = Callable[[str, str], bool]


@dataclass(frozen=True)
class Resampled:
    """Of the rollouts from before each sentence, and after the last: the answers, the first sentences, and which have ended."""

    answers: tuple[tuple[str, ...], ...]
    firsts: tuple[tuple[str, ...], ...]
    ended: Bool[Tensor, "before rollout"]


def other_words(sentence: str, new: str) -> bool:
    """Whether two sentences differ in more than spaces."""
    return sentence.split() != new.split()


def resample(
    model: Decoder,
    chat: Chat,
    sentences: Sequence[ThoughtSentence],
    n: int,
    max_new_tokens: int | None,
    seed: int | torch.Generator | None,
    split: Split,
    progress: bool | None,
    options: Mapping[str, Any],
) -> Resampled:
    """`n` rollouts from before each sentence and from after the last, all drawn from one generator."""
    generator = torch.Generator(model.device).manual_seed(seed) if isinstance(seed, int) else seed
    turn = chat.labels[0][sentences[0].start].turn
    end = 1 + max(i for i, label in enumerate(chat.labels[0]) if label.turn == turn)
    starts = [*(sentence.start for sentence in sentences), sentences[-1].stop]
    answers, firsts, ended = [], [], []
    for start in progress_bar("resampling", len(starts), progress, "sentences", starts if n else []):
        most = LONGER * (end - start) + MORE if max_new_tokens is None else max_new_tokens
        most = min(most, model.cfg.longest_input - start)
        drawn = model.rollouts(chat[0, :start], n, most, seed=generator, progress=False, **options)
        answers.append(drawn.of("content"))
        firsts.append(tuple(_first_of(thought, split) for thought in drawn.of("thinking")))
        ended.append(drawn.has_ended)
    if not n:
        none: tuple[tuple[str, ...], ...] = ((),) * len(starts)
        return Resampled(none, none, torch.zeros(len(starts), 0, dtype=torch.bool))
    return Resampled(tuple(answers), tuple(firsts), torch.stack(ended).cpu())


def _first_of(thought: str, split: Split) -> str:
    """The first sentence of a thought; "" of none."""
    return next((piece.strip() for piece in split(thought) if piece.strip()), "")
