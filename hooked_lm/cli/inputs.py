"""What is typed: names of models, prompts, choices of layers, positions and heads. Mistakes are ValueErrors."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooked_lm.models.decoder import Decoder
    from hooked_lm.reports.circuit import Task

CONVERSATION = re.compile(r"@\S+\.json")
ONE_OR_RANGE = re.compile(r"(-?\d+)(?:-(-?\d+))?")


def integers(name: str, text: str) -> list[int]:
    """Integers and ranges with commas between them, a range with both of its ends; ValueError for anything else.

    >>> integers("layers", "0,-1"), integers("layers", "0-2,5")
    ([0, -1], [0, 1, 2, 5])
    """
    found: list[int] = []
    for part in text.split(","):
        match = ONE_OR_RANGE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{name} must be integers or ranges such as 0-2, with ',' between them; got {text!r}")
        start = int(match[1])
        end = start if match[2] is None else int(match[2])
        if end < start or start < 0 <= end:
            raise ValueError(f"{name}: the range {part.strip()!r} is empty, it goes from {start} up to {end}")
        found += range(start, end + 1)
    return found


def positions_of(text: str) -> Any:
    """Integers and ranges, or tokens of conversations: a name, the index in each such turn, or turn, role and part.

    >>> positions_of("0,-1"), positions_of("last_user"), positions_of("assistant:-1")
    ([0, -1], 'last_user', ('assistant', -1))
    >>> positions_of("turn=-1,part=content")
    {'turn': -1, 'part': 'content'}
    """
    from hooked_lm.hooks.token_labels import is_named

    if "=" in text:
        labels: dict[str, Any] = dict(named("positions", text.split(",")))
        turns = {key: integers("a turn", turn)[0] for key, turn in labels.items() if key == "turn"}
        return {**labels, **turns}
    name, _, index = text.partition(":")
    if not is_named(name):
        return integers("positions", text)
    return (name, integers("an index", index)[0]) if index else name


def which(name: str, text: str) -> object:
    """ "each", None for all together, indices and ranges, labels of heads, or positions by meaning.

    >>> which("heads", "L1H7, L2H0"), which("layers", "together"), which("layers", "0")
    (['L1H7', 'L2H0'], None, [0])
    >>> which("positions", "last_user"), which("positions", '["user", -1]')
    ('last_user', ('user', -1))
    """
    if text in ("each", "together"):
        return None if text == "together" else text
    if name == "positions":
        from hooked_lm.hooks.token_labels import is_named  # of a package that imports torch

        found = json.loads(text) if text[:1] in "[{" else text
        if is_named(found):
            return tuple(found) if isinstance(found, list) else found
    labels = [part.strip() for part in text.split(",")]
    return labels if name == "heads" and labels[0].startswith("L") else integers(name, text)


def named(name: str, given: list[str] | None) -> dict[str, str]:
    """What was given as name=value, by name.

    >>> named("option", ["components=mlps"])
    {'components': 'mlps'}
    """
    parts = [text.partition("=") for text in given or []]
    if wrong := ["".join(part) for part in parts if not all(part)]:
        raise ValueError(f"{name} must be name=value, got {wrong[0]!r}")
    return {key: value for key, _, value in parts}


def load(model: str, threads: int | None = None, **options: Any) -> Any:
    """The model of any class.

    The last bits of folded weights depend on the number of threads on a CPU; None: as many as torch takes.
    """
    from hooked_lm import pretrained
    from hooked_lm.shards import with_threads

    with with_threads(threads):
        return pretrained.from_pretrained(model, **options)


def without_weights(model: str) -> Any:
    """The decoder that a checkpoint's config describes, on the meta device: it has sites and no memory."""
    from dataclasses import replace

    from hooked_lm.compat.loading import get_pretrained_model_config
    from hooked_lm.pretrained import HookedTransformer

    return HookedTransformer(replace(get_pretrained_model_config(model), device="meta", init_weights=False))


def decoder(model: str, does: str) -> Any:
    """The model; raises ValueError if it is no decoder. `does` says what needs one."""
    from hooked_lm.models.decoder import Decoder

    loaded = load(model)
    if not isinstance(loaded, Decoder):
        raise ValueError(f"{does} needs a decoder, a HookedTransformer; {model} is a {type(loaded).__name__}")
    return loaded


def check_text(model: "Decoder", prompt: str, does: str) -> list[str]:
    """The tokens of a text as strings; raises ValueError if it has none, or the model no tokenizer. `does` is what needs one."""
    if getattr(model, "tokenizer", None) is None:
        raise ValueError(f"{does} reads texts, and this model has no tokenizer: token ids are for Python alone")
    if not prompt or not (words := list(map(str, model.to_str_tokens(prompt)))):
        raise ValueError("the prompt has no tokens: give some text")
    return words


def check_readable(path: str | Path, what: str) -> None:
    """Raises FileNotFoundError for a file that is not there, before the work. `what` says what it should hold."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"cannot read {path}: there is no such file; it should hold {what}")


def options_of(path: str | Path) -> dict[str, Any]:
    """The mapping in a JSON file. Raises FileNotFoundError without one, ValueError for a file with anything else."""
    check_readable(path, "a JSON object with options of the chat template")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object with options of the chat template; got {str(found)[:60]!r}")
    return found


def check_writable(*paths: Path | None) -> None:
    """Raises OSError with the reason for a file that cannot be written, before the work."""
    from hooked_lm.files import writable

    for path in paths:
        if path is not None:
            writable(path)


def check_writable_folder(path: str) -> None:
    """Raises OSError with the reason for a folder that cannot be made, before the work."""
    from hooked_lm.files import writable_folder

    writable_folder(path)


def conversation_or_text(prompt: str) -> str | dict[str, Any]:
    """The conversation in the file that a prompt such as "@chat.json" names: {"messages": [...]} and options of the template. Any
    other prompt is unchanged. Raises ValueError for a file with something else."""
    if not CONVERSATION.fullmatch(prompt):
        return prompt
    path = Path(prompt[1:])
    check_readable(path, "a list of messages, dicts with 'role' and 'content'")
    given = json.loads(path.read_text(encoding="utf-8"))
    options = {"messages": given} if isinstance(given, list) else given
    if not isinstance(options, dict) or "messages" not in options:
        raise ValueError(f"{path} must hold a list of messages, or a mapping with 'messages'; got {str(given)[:60]!r}")
    return options


# ---- pairs of prompts ------------------------------------------------------------------------------------------------


def check_one_source(
    clean: Sequence[str] | None, corrupted: Sequence[str] | None, answers: Sequence[str] | None, pairs: str | None
) -> None:
    """Raises ValueError unless pairs are typed, all parts of them, or are those of a file."""
    if pairs is not None and (clean or corrupted or answers):
        raise ValueError("--pairs replaces --clean, --corrupted and --answers: give one or the other")
    if pairs is None and not (clean and corrupted and answers):
        raise ValueError("give --clean, --corrupted and --answers for a pair of prompts, or --pairs for a file of them")


def typed_task(clean: Sequence[str] | None, corrupted: Sequence[str] | None, answers: Sequence[str] | None) -> "Task":
    """Pairs that were typed, texts or files with conversations, with answers such as " Mary, John"; raises ValueError for unequal
    numbers."""
    from hooked_lm.reports.circuit import Task, answers_of

    parts: list[list[Any]] = [list(part or ()) for part in (clean, corrupted, answers)]
    if len({*map(len, parts)}) > 1:
        n_clean, n_corrupted, n_answers = map(len, parts)
        raise ValueError(
            f"give as many --clean, --corrupted and --answers; got {n_clean}, {n_corrupted} and {n_answers}"
        )
    prompts: list[list[Any]] = [[conversation_or_text(prompt) for prompt in part] for part in parts[:2]]
    return Task(prompts[0], prompts[1], *answers_of(parts[2]))


@contextmanager
def columns_named_by_options() -> Iterator[None]:
    """Errors for columns that are missing say which options name them."""
    from hooked_lm.studies.pairs import MissingColumns

    try:
        yield
    except MissingColumns as error:
        fix = " ".join(f"--column {part}=NAME" for part in error.parts)
        raise ValueError(f"{str(error).partition('; ')[0]}; give {fix}") from None


def task_of_file(model: "Decoder", pairs: str, column: list[str] | None, max_pairs: int | None) -> "Task":
    """The pairs of a file or data set, all of which are run together."""
    from hooked_lm.reports.circuit import Task
    from hooked_lm.studies.pairs import text_columns

    with columns_named_by_options():
        return Task(**text_columns(model, pairs, named("column", column), max_pairs))
