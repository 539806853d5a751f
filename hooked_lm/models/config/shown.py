"""How configs are shown: the names that differ from their defaults."""

from dataclasses import MISSING, Field, fields
from textwrap import wrap
from typing import Any, cast

from hooked_lm.models.config.row import FlatField, table
from hooked_lm.notebook_repr import details, html_table, summary

__all__ = ["ShownConfig"]

FIRST = ("model_name", "n_layers", "d_model", "n_heads", "d_head", "d_mlp", "n_ctx", "d_vocab", "act_fn")
WIDTH = 100


class ShownConfig:
    """The part of a flat config that shows it."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The names that differ from their defaults, the sizes first, and the number of the others."""
        shown = [f"{name}={value!r}".replace(" ", "\0") for name, value in self._shown_values().items()]
        text = ", ".join([*shown, f"+{self._n_defaults()} at their defaults: cfg.to_dict()".replace(" ", "\0")])
        kind = type(self).__name__
        lines = wrap(f"{kind}({text})", WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        return "\n".join(lines).replace("\0", " ")

    def _repr_html_(self) -> str:
        rows = self._rows()
        columns = ("name", "value", "meaning")
        shown = [(name, value, rows[name].doc) for name, value in self._shown_values().items()]
        others = [
            (name, getattr(self, name), row.doc) for name, row in rows.items() if name not in dict(self._shown_values())
        ]
        more = details(f"{len(others)} at their defaults", html_table(columns, others))
        return summary(type(self).__name__, html_table(columns, shown), more)

    def _shown_values(self) -> dict[str, Any]:
        """The names that differ from their defaults, with their values; sizes that are in use are always among them."""
        rows, kind = self._rows(), getattr(self, "kind", None)
        defaults = {field.name: _default(field) for field in fields(cast(Any, self))}
        values = {name: getattr(self, name) for name, row in rows.items() if kind in row.kinds or row.is_fact}
        differing = [name for name, value in values.items() if defaults[name] is MISSING or value != defaults[name]]
        order = [name for name in FIRST if name in differing] + [name for name in differing if name not in FIRST]
        return {name: values[name] for name in order if values[name] is not None or name not in FIRST}

    def _n_defaults(self) -> int:
        return len(self._rows()) - len(self._shown_values())

    def _rows(self) -> dict[str, FlatField]:
        cls: Any = type(self)
        return table(cls).rows


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
