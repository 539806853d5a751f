"""Pairs of prompts: read from memory, files or data sets, and checked before anything runs."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.engine.answers import whole_numbers
from hooked_lm.engine.pairs import Pairs, aligned
from hooked_lm.engine.prompts import kind_of, tokens_of
from hooked_lm.extras import lazy_import
from hooked_lm.harvest.documents import loaded
from hooked_lm.hooks.token_labels import Labels, Named, select_positions
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import as_prompts, begins_text, conversations_in
from hooked_lm.models.text.methods import TextMethods

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

COLUMNS = ("clean", "corrupted", "answer", "wrong_answer")
SHOWN = 10  # pairs in an error

Row = Mapping[str, object]


class MissingColumns(ValueError):
    """The source of pairs lacks columns; `parts` are the parts of a pair that they should hold."""

    def __init__(self, message: str, parts: Sequence[str]) -> None:
        super().__init__(message)
        self.parts = list(parts)


@dataclass(frozen=True)
class Pair:
    """The ids of two prompts of one length, of the right answers, and of wrong ones (none if there is no such column); and both
    conversations, if the prompts are that."""

    clean: tuple[int, ...]
    corrupted: tuple[int, ...]
    answer: tuple[int, ...]
    wrong_answer: tuple[int, ...]
    chats: tuple[Chat, Chat] | None = None

    @property
    def sizes(self) -> tuple[object, ...]:
        """The numbers of tokens, answers and wrong answers, and the labels of the tokens: pairs that agree can run together."""
        return len(self.clean), len(self.answer), len(self.wrong_answer), self.labels

    @property
    def labels(self) -> tuple[Labels, ...]:
        """Of each conversation, what its tokens are."""
        return tuple(chat.labels[0] for chat in self.chats or ())


def pairs_of(
    model: TextMethods, source: object, columns: Mapping[str, str] | None = None, max_pairs: int | None = None
) -> list[Pair]:
    """The pairs of a source; see `study_pairs` for what a source can be.

    Raises ValueError for no pairs, for missing columns, and for pairs that cannot run, named by their numbers; FileNotFoundError
    for a path without files; TypeError for another source; ImportError if the package `datasets` is needed and missing.
    """
    rows, names = _read(source, columns, max_pairs)
    return _checked_rows(model, rows, names)


def text_columns(
    model: TextMethods, source: object, columns: Mapping[str, str] | None = None, max_pairs: int | None = None
) -> dict[str, list[Any]]:
    """The texts or messages of pairs that run together, with their answers, by the arguments of `Pairs`.

    Raises as `pairs_of`, also for a source without wrong answers; ValueError for prompts of different lengths, or no texts.
    """
    rows, names = _read(source, columns, max_pairs)
    if "wrong_answer" not in names:
        _names(rows[0], {"wrong_answer": "wrong_answer", **(columns or {})})  # raises
    lengths = Counter(len(pair.clean) for pair in _checked_rows(model, rows, names))
    if len(lengths) > 1:
        found = ", ".join(f"{n} of {length} tokens" for length, n in sorted(lengths.items()))
        raise ValueError(f"all pairs run together, so their prompts must have as many tokens each; there are {found}")
    parts = {name: [row[column] for row in rows] for name, column in names.items()}
    prompts = [part for name in ("clean", "corrupted") for part in parts[name]]
    if other := [part for part in prompts if not isinstance(part, str) and conversations_in(part) is None]:
        raise ValueError(f"the prompts must be texts or messages, which a page shows; got {kind_of(other[0])}")
    return {
        {"answer": "answers", "wrong_answer": "wrong_answers"}.get(name, name): part for name, part in parts.items()
    }


def _read(
    source: object, columns: Mapping[str, str] | None, max_pairs: int | None
) -> tuple[list[Row], Mapping[str, str]]:
    """The rows of a source, and the column of each part of a pair."""
    if max_pairs is not None and max_pairs < 1:
        raise ValueError(f"max_pairs must be at least 1, got {max_pairs}")
    if isinstance(source, (str, os.PathLike)):
        source = loaded(source)
    if isinstance(source, Pairs):
        source = _rows_of(source)
    if isinstance(source, pd.DataFrame):
        source = source.to_dict("records")
    if not isinstance(source, Iterable) or isinstance(source, (Mapping, Tensor)):
        raise TypeError(
            f"pairs must be a list of dicts, a data frame, a path or a data set of Hugging Face; got a {type(source).__name__}"
        )
    rows = list(islice(source, max_pairs))
    if not rows:
        raise ValueError("there are no pairs: the source is empty")
    return rows, _names(rows[0], columns or {})


def _checked_rows(model: TextMethods, rows: Sequence[Row], names: Mapping[str, str]) -> list[Pair]:
    pairs: list[Pair] = []
    wrong: list[str] = []
    for number, row in enumerate(rows):
        found = _pair_or_reason(model, row, names)
        if isinstance(found, Pair):
            pairs.append(found)
        else:
            wrong.append(f"pair {number}: {found}")
    kinds = [pair.chats is None for pair in pairs]
    if not wrong and len({*kinds}) > 1:
        wrong = [
            f"pair {kinds.index(not kinds[0])}: its prompts are "
            + ("text" if kinds[0] is False else "messages")
            + ", unlike those of pair 0"
        ]
    _refuse(wrong, len(rows))
    return pairs


def check_positions(pairs: Sequence[Pair], positions: Mapping[str, Named]) -> None:
    """Raises ValueError that names the pairs without such tokens, or with other positions in the clean than in the corrupted
    prompt. `positions` are arguments by name."""
    every = product(positions.items(), enumerate(pairs))
    reasons = [(number, _wrong_positions(pair, name, given)) for (name, given), (number, pair) in every]
    _refuse([f"pair {number}: {why}" for number, why in reasons if why], len(pairs))


def _wrong_positions(pair: Pair, name: str, given: Named) -> str:
    """What is wrong with positions in a pair, if anything is."""
    if pair.chats is None:
        return f"{name}={given!r} needs messages, and its prompts have no roles"
    try:
        clean, corrupted = (select_positions(labels, given) for labels in pair.labels)
    except (ValueError, IndexError) as error:
        return str(error)
    return (
        ""
        if clean == corrupted
        else f"{name}={given!r} are {clean} in its clean and {corrupted} in its corrupted prompt"
    )


def _refuse(wrong: Sequence[str], n: int) -> None:
    """Raises ValueError that says what is wrong with pairs, if anything is."""
    if wrong:
        more = f"\n... and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ValueError(f"{len(wrong)} of {n} pairs cannot run:\n" + "\n".join(wrong[:SHOWN]) + more)


def _rows_of(pairs: Pairs) -> list[Row]:
    """A row for each of the pairs; one answer of all is that of each."""
    parts = [dict(zip(COLUMNS, (of.clean, of.corrupted, of.answers, of.wrong_answers), strict=True)) for of in pairs]
    return [{name: _only(part) for name, part in row.items() if part is not None} for row in parts]


def _only(part: object) -> object:
    """The entry of a part of one pair; a string or an id is one."""
    if isinstance(part, Tensor):
        return part[0] if part.ndim and len(part) == 1 else part
    return part[0] if isinstance(part, (list, tuple)) and len(part) == 1 else part


def digest(pairs: Sequence[Pair]) -> str:
    """A hash of pairs."""
    ids = [[pair.clean, pair.corrupted, pair.answer, pair.wrong_answer, *pair.labels] for pair in pairs]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def _names(row: object, columns: Mapping[str, str]) -> dict[str, str]:
    """The column of each part of a pair; that of wrong answers may be missing."""
    if not isinstance(row, Mapping):
        raise TypeError(f"a pair must be a dict with {', '.join(map(repr, COLUMNS))}; got a {type(row).__name__}")
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise ValueError(f"columns names {', '.join(map(repr, COLUMNS))}; got {unknown[0]!r}")
    names = {name: columns.get(name, name) for name in COLUMNS}
    if missing := [name for name in COLUMNS if names[name] not in row and (name in columns or name != "wrong_answer")]:
        missing = [name for name in COLUMNS if names[name] not in row]
        lacking = " and ".join(repr(names[name]) for name in missing)
        given = ", ".join(f"{name!r}: ..." for name in missing)
        raise MissingColumns(
            f"the pairs have no column {lacking}, only {', '.join(map(repr, row))}; columns={{{given}}} names those to use",
            missing,
        )
    return {name: column for name, column in names.items() if column in row}


def _pair_or_reason(model: TextMethods, row: Row, names: Mapping[str, str]) -> Pair | str:
    try:
        return _pair(model, row, names)
    except (ValueError, TypeError, LookupError) as error:
        return str(error.args[0] if error.args else error)


def _pair(model: TextMethods, row: Row, names: Mapping[str, str]) -> Pair:
    if not isinstance(row, Mapping):
        raise TypeError(f"it is a {type(row).__name__}, not a dict")
    given = {name: row.get(column) for name, column in names.items()}
    if empty := [names[name] for name, value in given.items() if value is None]:
        raise ValueError(f"it has no {empty[0]!r}")
    chats = [_chat(model, given[name]) for name in ("clean", "corrupted")]
    prompts = [
        given[name] if chat is None else chat.tokens for chat, name in zip(chats, ("clean", "corrupted"), strict=True)
    ]
    clean, corrupted = (
        _prompt(model, prompt, names[name]) for prompt, name in zip(prompts, ("clean", "corrupted"), strict=True)
    )
    aligned(torch.tensor([corrupted]), torch.tensor([clean]), model)
    both = [chat for chat in chats if chat is not None]
    if len(both) == 1:
        raise ValueError("one of its prompts are messages, the other is not: give both as messages")
    at_start = bool(both) and begins_text(both[0], model.tokenizer)
    answer, wrong = (
        _answer(model, given[name], names[name], at_start) if name in given else ()
        for name in ("answer", "wrong_answer")
    )
    return Pair(clean, corrupted, answer, wrong, (both[0], both[1]) if both else None)


def _chat(model: TextMethods, prompt: object) -> Chat | None:
    """A conversation up to where the assistant answers; None for another prompt."""
    if (several := conversations_in(prompt)) is not None:
        prompt = as_prompts(model, several)
    if not isinstance(prompt, Chat):
        return None
    if len(prompt) != 1:
        raise ValueError(f"a prompt is one conversation, got {len(prompt)}")
    return prompt.to("cpu")


def _prompt(model: TextMethods, prompt: object, name: str) -> tuple[int, ...]:
    """The ids of a text, or of ids."""
    if isinstance(prompt, str):
        ids = tokens_of(model, prompt)[0]
    elif isinstance(prompt, (Sequence, Tensor)):
        ids = whole_numbers(prompt, name).reshape(-1)
    else:
        raise TypeError(f"{name} must be a text, a list of token ids or of messages, got {prompt!r}")
    if len(ids) > model.cfg.n_ctx:
        raise ValueError(f"{name} has {len(ids)} tokens, and the model reads {model.cfg.n_ctx}")
    return _checked(model, ids)


def _answer(model: TextMethods, answer: object, name: str, begins_text: bool) -> tuple[int, ...]:
    """The ids of an answer, or of several that are all right."""
    ids = model.tokens.answer_ids(answer, name, begins_text).reshape(-1).cpu()
    if not len(ids):
        raise ValueError(f"{name} is empty")
    if (smallest := int(ids.min())) < 0:
        raise ValueError(f"{name}: {smallest} is not a token id")
    return _checked(model, ids)


def _checked(model: TextMethods, ids: Int[Tensor, " n"]) -> tuple[int, ...]:
    model.tokens.check_ids(ids)
    return tuple(ids.tolist())
