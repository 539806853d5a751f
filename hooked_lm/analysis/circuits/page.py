"""The sections of a page about a circuit, which reports share."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hooked_lm import viz
from hooked_lm.engine.pairs import Pairs
from hooked_lm.extras import lazy_import
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import conversations_in, transcript
from hooked_lm.results.scores import Scores

if TYPE_CHECKING:
    import pandas as pd
else:
    pd = lazy_import("pandas", "viz")

SHOWN_EDGES, SHOWN_PAIRS = 24, 20  # rows of the tables
MEANING = (
    "Faithfulness is the share of the difference between no edges and all edges that the circuit makes up (1: all of it); "
    "completeness is that of the model without the circuit (0: nothing is left). Bars and lines have 95% intervals if there are "
    "several pairs."
)


def circuit_section(view: viz.View, text: str, edges: "pd.DataFrame") -> viz.Section:
    """The figure, and the first edges of a table."""
    more = (
        f"The {SHOWN_EDGES} edges with the largest scores, of {len(edges):,} on a path."
        if len(edges) > SHOWN_EDGES
        else ""
    )
    return viz.Section("The circuit", *filter(None, [text]), view, *filter(None, [more]), edges.head(SHOWN_EDGES))


def faithfulness_section(*evaluations: Scores, text: str = "") -> viz.Section:
    """Faithfulness and completeness as figures and tables, each of one circuit or of several."""
    parts: list[Any] = [" ".join(filter(None, [MEANING, text]))]
    for found in evaluations:
        table = found.to_dataframe()
        parts += [found.plot(), table.dropna(axis="columns", how="all")]  # one pair of prompts has no intervals
    return viz.Section("How faithful it is", *parts)


def pairs_section(pairs: Pairs) -> viz.Section:
    """The prompts and answers."""
    n, some = len(pairs), pairs[:SHOWN_PAIRS]
    rows = [(pair.answers, pair.wrong_answers, pair.clean, pair.corrupted) for pair in some]
    table = pd.DataFrame(
        [[in_words(part) for part in row] for row in rows], columns=["answer", "not", "clean", "corrupted"]
    )
    return viz.Section(
        "The prompts", f"The first {len(some)} of {n:,} pairs." if n > len(some) else f"{n} pair{'s' * (n > 1)}.", table
    )


def in_words(part: object) -> str:
    """A prompt or an answer, one of several, or ids."""
    if (several := conversations_in(part.messages if isinstance(part, Chat) else part)) is not None:
        return " or ".join(map(transcript, several))
    if isinstance(part, Tensor):
        part = part.reshape(-1).tolist()
        return ", ".join(map(str, part))
    return " or ".join(map(in_words, part)) if isinstance(part, (list, tuple)) else "" if part is None else str(part)


def made_section(about: Mapping[str, Any], command: str = "") -> viz.Section:
    """The command that wrote a page, and the arguments and versions, without those that are None."""
    table = pd.DataFrame(
        [(name.replace("_", " "), _value(value)) for name, value in about.items() if value is not None],
        columns=["", "value"],
    )
    return viz.Section("How it was made", *filter(None, [command and f"`{command}`"]), table)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(part)}" for name, part in value.items())
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
