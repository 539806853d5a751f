"""Answers as token ids: one for all prompts, one for each prompt, or several for each."""

from collections.abc import Sequence
from reprlib import repr as shortened
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.models.text.methods import TextMethods

Answers = str | int | Sequence[str | int] | Sequence[Sequence[str | int]] | Tensor
Rows = Int[Tensor, "row token"]  # one row for all prompts, or one for each
OtherRows = Int[Tensor, "other_row other_token"]
NEST = "a list has one answer for each prompt; nest it, [[...]], for several answers of every prompt"


def answer_rows(answers: Answers, name: str = "answers", model: TextMethods | None = None) -> tuple[Rows, int | None]:
    """The ids of answers, and the number of prompts that they are given for (None: any number).

    - One string or id: the answer of every prompt.
    - A list or a tensor [batch]: one answer for each prompt.
    - A nested list or a tensor [batch, n]: several answers for each prompt. A single entry or row is that of every prompt.

    Strings need a model with a tokenizer. Raises ValueError for empty answers, rows of different lengths and strings that are
    not one token, IndexError for ids that no vocabulary has, TypeError for anything else. `name` is the argument in errors.

    >>> [answer_rows(some)[0].tolist() for some in (7, [7, 8], [[7, 8]])]
    [[[7]], [[7], [8]], [[7, 8]]]
    """
    if _has_strings(answers):
        if model is None:
            raise TypeError(
                f"{name}: {answers!r} needs a tokenizer: pass model=..., or ids (see model.to_single_token)"
            )
        answers = _ids(answers, name, model)
    if isinstance(answers, (list, tuple)) and len({len(row) for row in answers if isinstance(row, Sequence)}) > 1:
        raise ValueError(f"{name} must have as many entries for each prompt, got {answers!r}")
    ids = whole_numbers(answers, name)
    if (smallest := int(ids.min())) < 0:
        raise IndexError(f"{name}: {smallest} is not a token id")
    rows = ids.reshape(-1, 1) if ids.ndim < 2 else ids
    return rows, None if len(rows) == 1 else len(rows)


def answers_of_prompts(answers: Answers, n_prompts: int, name: str, model: Any) -> Int[Tensor, "prompt token"]:
    """The ids of the answers of each prompt, on the model's device; see `answer_rows`.

    Raises ValueError also for another number of prompts and for ids outside of the vocabulary.
    """
    rows, given = answer_rows(answers, name, model)
    if given not in (None, n_prompts):
        raise ValueError(f"{name} are given for {given} prompts, and there are {n_prompts}: {NEST}")
    model.tokens.check_ids(rows)
    return rows.expand(n_prompts, -1).to(model.device)


def right_and_wrong(
    answers: Answers, wrong_answers: Answers, model: TextMethods | None = None
) -> tuple[tuple[Rows, int | None], tuple[OtherRows, int | None]]:
    """The `answer_rows` of right and of wrong answers. Raises ValueError also for a prompt whose right and wrong answers are the
    same, and for other numbers of prompts.

    >>> right_and_wrong([7, 8], 9)[1][0].tolist()
    [[9]]
    """
    right, wrong = answer_rows(answers, "answers", model), answer_rows(wrong_answers, "wrong_answers", model)
    if None not in (right[1], wrong[1]) and right[1] != wrong[1]:
        raise ValueError(f"answers are given for {right[1]} prompts, wrong_answers for {wrong[1]}")
    one, other = right[0].sort(1).values, wrong[0].sort(1).values
    if one.shape[1] == other.shape[1] and len(same := (one == other).all(1).nonzero()):
        of_prompt = f" of prompt {int(same[0])}" if None not in (right[1], wrong[1]) else ""
        given = f"answers={shortened(answers)}, wrong_answers={shortened(wrong_answers)}"
        raise ValueError(
            f"the right and the wrong answers{of_prompt} are the same, give two different tokens; got {given}"
        )
    return right, wrong


def whole_numbers(given: Any, name: str) -> Int[Tensor, "..."]:
    """Integers on the CPU, with at most two axes; raises TypeError and ValueError for anything else."""
    try:
        numbers = given if isinstance(given, Tensor) else torch.tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be an int, a list of ints or a tensor, got {given!r}") from None
    if numbers.numel() == 0 or numbers.ndim > 2:
        raise ValueError(f"{name} must have one or two axes and not be empty, got shape {list(numbers.shape)}")
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers, got {str(numbers.dtype).removeprefix('torch.')}")
    return numbers.detach().long().cpu()


def first_words(answers: object, name: str, model: TextMethods) -> Any:
    """The ids of answers that begin a text, as after the generation prompt of a conversation, with the nesting of the answers.

    Words have no leading space there. Raises ValueError for strings that are not one token.
    """
    return _ids(answers, name, model, begins_text=True) if _has_strings(answers) else answers


def _has_strings(answers: Any) -> bool:
    return isinstance(answers, str) or (isinstance(answers, (list, tuple)) and any(map(_has_strings, answers)))


def _ids(answers: Any, name: str, model: TextMethods, begins_text: bool = False) -> Any:
    """Strings replaced by ids, in nested lists as in the answers."""
    if isinstance(answers, (list, tuple)) and any(isinstance(row, (list, tuple)) for row in answers):
        return type(answers)(_ids(row, name, model, begins_text) for row in answers)
    found = model.tokens.answer_ids(answers, name, begins_text).tolist()
    return type(answers)(found) if isinstance(answers, tuple) else found
