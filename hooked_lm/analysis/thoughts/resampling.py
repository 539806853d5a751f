"""Rollouts from before each sentence of a thought: their first sentences, and the answers to which they lead."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from hooked_lm.analysis.thoughts.sentences import Split, ThoughtSentence
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat

Metric = Callable[[str], float | int]
Different = Callable[[str, str], bool]


@dataclass(frozen=True)
class Rollouts:
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
    seed: int | torch.Generator | None,
    split: Split,
    is_different: Different,
    options: Mapping[str, object],
) -> Rollouts:
    """`n` rollouts from before each sentence and from after the last, all drawn from one generator."""
    generator = torch.Generator(model.device).manual_seed(seed) if isinstance(seed, int) else seed
    turn, answers, differs = chat.labels[0][sentences[0].start].turn, [], []
    for start in (*(sentence.start for sentence in sentences), sentences[-1].stop):
        rollouts = model.rollouts(chat[0, :start], n, seed=generator, **options)
        firsts = [_first_sentence(one, turn, start, split) for one in rollouts.chats]
        answers.append(tuple(_answer(one, turn) for one in rollouts.chats))
        differs.append(firsts)
    return Rollouts(
        tuple(answers),
        torch.tensor(
            [
                [is_different(sentence.text, new) for new in firsts]
                for sentence, firsts in zip(sentences, differs, strict=False)
            ]
        ),
    )


def _answer(chat: Chat, turn: int) -> str:
    """The answer of a rollout; "" if it has none."""
    said = {"turn": turn, "part": "content"}
    has_one = any(label.turn == turn and label.part == "content" for label in chat.labels[0])
    return chat.of(said).strip() if has_one else ""


def _first_sentence(chat: Chat, turn: int, start: int, split: Split) -> str:
    """The first sentence that a rollout wrote from a position on; "" if the thought ended there."""
    new = [i for i, (of, _, part) in enumerate(chat.labels[0]) if i >= start and of == turn and part == "thinking"]
    if not new:
        return ""
    offsets = chat.offsets[0]
    text = chat.texts[0][offsets[new[0]][0] : offsets[new[-1]][1]]
    return next((piece.strip() for piece in split(text) if piece.strip()), "")
