"""What results with a table show in a notebook."""

from abc import ABC, abstractmethod
from typing import Any

__all__ = ["Tabular"]

FIRST_ROWS = 10


class Tabular(ABC):
    """A result with `to_dataframe`, of which a notebook shows one line of text and the first rows."""

    @abstractmethod
    def to_dataframe(self) -> Any:
        """The table of the result."""

    def _repr_html_(self) -> str:
        from hooked_lm.viz.tables import html_table, summary

        table = self.to_dataframe()
        rows = [[_as_text(cell) for cell in row] for row in table.head(FIRST_ROWS).itertuples(index=False)]
        more = f"<p>{len(table) - FIRST_ROWS:,} more rows: to_dataframe()</p>" if len(table) > FIRST_ROWS else ""
        return summary(repr(self), html_table([str(name) for name in table.columns], rows), more)


def _as_text(cell: object) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
