"""NameTree: a list of dotted names that prints as a tree."""

from collections.abc import Iterable, Mapping


class NameTree(list[str]):
    """A list of site names that prints as a tree, with optional notes.

    >>> NameTree(["conv", "conv.0", "head"], {"conv.0": "Conv2d"})
    conv
      0  Conv2d
    head
    """

    def __init__(self, names: Iterable[str], notes: Mapping[str, str] | None = None) -> None:
        super().__init__(names)
        self.notes = dict(notes or {})

    def __repr__(self) -> str:
        lines: list[str] = []
        above: list[str] = []
        for name in self:
            parts = name.split(".")
            same = next((i for i, (a, b) in enumerate(zip(above, parts, strict=False)) if a != b), len(above))
            new = range(min(same, len(parts) - 1), len(parts))
            lines += [f"{'  ' * depth}{parts[depth]}" for depth in new]
            if note := self.notes.get(name):
                lines[-1] += f"  {note}"
            above = parts
        return "\n".join(lines)

    __str__ = __repr__
