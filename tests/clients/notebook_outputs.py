"""Compares what cells of notebooks leave: printed text with the numbers in it, results, and the numbers of figures."""

import base64
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from nbformat import NotebookNode

TOLERANCE = 1e-3  # relative; of figures, to the largest number
NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?")
# What belongs to one run or to one package, such as what TransformerLens prints when it loads a model.
PASSING = re.compile(
    r"0x[0-9a-f]+|id='\d+'|circuits-vis-[\w-]+|<(class|function|bound method) [^>]*>"
    r"|Loaded pretrained model.*|Moving model to device.*"
)


def differences(ours: list[NotebookNode], theirs: list[NotebookNode]) -> dict[int, str]:
    """Number of cell -> the first difference, of the cells that ran in both and left something else."""
    found = {}
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True), 1):
        if any(output.output_type == "error" for output in (*one.outputs, *other.outputs)):
            continue
        if what := difference(shown(one), shown(other)):
            found[number] = what
    return found


def shown(cell: NotebookNode) -> tuple[str, list[np.ndarray]]:
    """The text of a cell's outputs, and the arrays of its figures."""
    texts, arrays = [], []
    for output in cell.outputs:
        data = output.get("data", {})
        if output.output_type == "stream" and output.name == "stdout":
            texts.append(output.text)
        elif "application/json" in data:
            arrays += drawn(data["application/json"])
        elif text := data.get("text/html") or data.get("text/plain"):
            texts.append(text)
    return PASSING.sub("", "\n".join(texts)), arrays


def drawn(value: Any) -> Iterator[np.ndarray]:
    """The arrays of numbers in a figure's JSON."""
    if isinstance(value, dict) and {"dtype", "bdata"} <= value.keys():
        yield np.frombuffer(base64.b64decode(value["bdata"]), value["dtype"])
    elif isinstance(value, dict):
        for part in value.values():
            yield from drawn(part)
    elif isinstance(value, list) and value and all(isinstance(part, (int, float)) for part in value):
        yield np.array(value, dtype=float)
    elif isinstance(value, list):
        for part in value:
            yield from drawn(part)


def difference(ours: tuple[str, list[np.ndarray]], theirs: tuple[str, list[np.ndarray]]) -> str:
    """What differs first, in words; "" if nothing does but the last digits."""
    if len(ours[1]) != len(theirs[1]):
        return f"{len(ours[1])} arrays are drawn, not {len(theirs[1])}"
    figures = (drawn_apart(one, other) for one, other in zip(ours[1], theirs[1], strict=True))
    return next(filter(None, figures), "") or printed_apart(ours[0], theirs[0])


def drawn_apart(one: np.ndarray, other: np.ndarray) -> str:
    """What differs between two arrays of a figure."""
    if one.shape != other.shape:
        return f"an array of {one.size} numbers is drawn, not {other.size}"
    one, other = one.astype(float), other.astype(float)
    scale = max(1.0, float(np.nanmax(np.abs(other), initial=0)))
    far = (np.abs(one - other) > TOLERANCE * scale) | (np.isnan(one) != np.isnan(other))
    if not far.any():
        return ""
    first = int(far.argmax())
    return f"{int(far.sum())} of {one.size} numbers in a figure, such as {one[first]}, not {other[first]}"


def printed_apart(one: str, other: str) -> str:
    """What differs between two texts, numbers aside, or between their numbers."""
    words, their_words = (" ".join(NUMBER.sub("#", text).split()) for text in (one, other))
    if words != their_words:
        start = max(len(os.path.commonprefix([words, their_words])) - 30, 0)  # noqa: RUF071 - texts, not paths
        return f"...{words[start : start + 120]!r}, not ...{their_words[start : start + 120]!r}"
    for number, their_number in zip(NUMBER.findall(one), NUMBER.findall(other), strict=True):
        mine, theirs = float(number), float(their_number)
        if abs(mine - theirs) > TOLERANCE * max(1.0, abs(theirs)) + last_digit(their_number):
            return f"the number {number}, not {their_number}"
    return ""


def last_digit(number: str) -> float:
    """One unit of the last digit that is written, for a number that is not whole."""
    digits = re.match(r"[-+]?\d*\.(\d*)", number)
    return 1.01 * 10.0 ** -len(digits[1]) if digits else 0.0
