"""What is typed: names of models, prompts, choices of layers, positions and heads. Mistakes are ValueErrors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def integers(name: str, text: str) -> list[int]:
    """Integers with commas between them; ValueError for anything else.

    >>> integers("layers", "0,-1")
    [0, -1]
    """
    parts = text.split(",")
    if not all(part.strip().removeprefix("-").isdigit() for part in parts):
        raise ValueError(f"{name} must be integers with ',' between them, got {text!r}")
    return [int(part) for part in parts]


def which(name: str, text: str) -> object:
    """ "each", None for all together, indices, or labels of heads.

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


def load(model: str, **options: Any) -> Any:
    """The model of any class; raises ValueError for a name that is empty."""
    from hooked_lm import pretrained

    if not model:
        raise ValueError("the name of the model is empty: give a directory, a hub id, a short name or demo")
    return pretrained.from_pretrained(model, **options)


def decoder(model: str, does: str) -> Any:
    """The model; raises ValueError if it is no decoder. `does` says what needs one."""
    from hooked_lm.models.decoder import Decoder

    loaded = load(model)
    if not isinstance(loaded, Decoder):
        raise ValueError(f"{does} needs a decoder, a HookedTransformer; {model} is a {type(loaded).__name__}")
    return loaded


def check_prompt(model: Any, prompt: str, name: str = "the prompt") -> list[str]:
    """The tokens of a prompt as strings; raises ValueError if it has none."""
    if not prompt or not (words := list(map(str, model.to_str_tokens(prompt)))):
        raise ValueError(f"{name} has no tokens: give some text")
    return words


def check_writable(*paths: Path | None) -> None:
    """Raises OSError with the reason for a file that cannot be written, before the work."""
    from hooked_lm.files import writable

    for path in paths:
        if path is not None:
            writable(path)


def answers_of(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Right and wrong answers of texts such as " Mary, John"."""
    from hooked_lm.reports.circuit import answers_of as split

    return split(given)
