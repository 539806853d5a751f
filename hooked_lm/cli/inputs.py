"""What is typed: names of models, prompts, choices of layers, positions and heads. Mistakes are ValueErrors."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hooked_lm.models.decoder import Decoder

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


def which(name: str, text: str) -> object:
    """ "each", None for all together, indices and ranges, or labels of heads.

    >>> which("heads", "L1H7, L2H0"), which("layers", "together"), which("layers", "0")
    (['L1H7', 'L2H0'], None, [0])
    """
    if text in ("each", "together"):
        return None if text == "together" else text
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


def answers_of(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Right and wrong answers of texts such as " Mary, John"."""
    from hooked_lm.reports.circuit import answers_of as split

    return split(given)
