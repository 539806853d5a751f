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

LONGER = 2  # times as long as in the conversation a rollout may be
Metric = Callable[[str], float | int]
Different = Callable[[str, str], bool]


@dataclass(frozen=True)
class Resampled:
    """Of the rollouts from before each sentence, and after the last: the answers, and whether the first sentence is another."""

    answers: tuple[tuple[str, ...], ...]
    differs: Bool[Tensor, "sentence rollout"]


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
    is_different: Different,
    progress: bool | None,
    options: Mapping[str, Any],
) -> Resampled:
    """`n` rollouts from before each sentence and from after the last, all drawn from one generator."""
    generator = torch.Generator(model.device).manual_seed(seed) if isinstance(seed, int) else seed
    answers, firsts = [], []
    starts = [*(sentence.start for sentence in sentences), sentences[-1].stop]
    for start in progress_bar("resampling", len(starts), progress, "sentences", starts):
        room = model.cfg.longest_input - start
        most = max_new_tokens or min(room, LONGER * (chat.shape[1] - start))
        rollouts = model.rollouts(chat[0, :start], n, most, seed=generator, progress=False, **options)
        answers.append(rollouts.of("content"))
        firsts.append([_first_of(thought, split) for thought in rollouts.of("thinking")])
    differs = [
        [is_different(sentence.text, new) for new in of_rollouts]
        for sentence, of_rollouts in zip(sentences, firsts, strict=False)  # after the last sentence none is replaced
    ]
    return Resampled(tuple(answers), torch.tensor(differs))


def _first_of(thought: str, split: Split) -> str:
    """The first sentence of a thought; "" of none."""
    return next((piece.strip() for piece in split(thought) if piece.strip()), "")
