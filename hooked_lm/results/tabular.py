"""What results with a table show in a notebook."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.notebook_repr import NotebookRepr, html_table
from hooked_lm.results.bootstrap import in_words
from hooked_lm.results.labels import Label, labels_at

__all__ = ["Tabular"]

FIRST_ROWS = 10


class Tabular(NotebookRepr, ABC):
    """A result with `to_dataframe`, of which a notebook shows one line of text and the first rows.

    Without pandas it shows the line, and says what to install for the table.
    """

    @abstractmethod
    def to_dataframe(self) -> Any:
        """The table of the result."""

    def _shown(self) -> Any:
        """The result whose table a notebook shows the beginning of."""
        return self

    def _repr_parts(self) -> list[str]:
        try:
            with in_words() as skewed:
                table = self._shown().to_dataframe()
            table = table.dropna(axis="columns", how="all")  # one prompt has no intervals
        except ImportError as error:
            return [f"<p>{escape(str(error))}</p>"]
        rows = [[as_text(cell) for cell in row] for row in table.head(FIRST_ROWS).itertuples(index=False)]
        more = f"<p>{len(table) - FIRST_ROWS:,} more rows: to_dataframe()</p>" if len(table) > FIRST_ROWS else ""
        words = "".join(f"<p>The {word}.</p>" for word in skewed)
        return [html_table([str(name) for name in table.columns], rows), words, more]


def table_of_largest(
    axes: Mapping[str, Sequence[Label]],
    found: Sequence[tuple[Int[Tensor, " cell"], Mapping[str, Float[Tensor, " cell"]]]],
) -> str:
    """A table, in HTML, of the cells with the largest numbers, by metric: their places in the grid, and columns of numbers."""
    metrics = [[one] for one in axes.get("metric", ())] or [[]]
    grid = [list(labels) for name, labels in axes.items() if name != "metric"]
    rows = [
        [*metric, *labels_at(grid, place), *map(as_text, values)]
        for metric, (places, numbers) in zip(metrics, found, strict=True)
        for place, *values in zip(places.tolist(), *(column.tolist() for column in numbers.values()), strict=True)
    ]
    return html_table([*axes, *(found[-1][1] if found else ())], rows)


def as_text(cell: object) -> str:
    """A cell of a table as text, with four digits of a number."""
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def with_values(**columns: Tensor) -> Mapping[str, Tensor]:
    """The columns of a table that have a value, such as intervals if there are several prompts."""
    return {name: column for name, column in columns.items() if not column.isnan().all()}


def in_summary(axis: str, labels: Sequence[Label]) -> str:
    """An axis in a summary: "layer 4", or the labels themselves of what was measured, as "circuit and complement"."""
    return " and ".join(map(str, labels)) if axis == "of" else f"{axis} {len(labels)}"
