"""Which lines of the table earn their place: `python -m tests.families.cover`.

A line turns on options: a kind of value of a config field of a component, and a field of the HF config that is not at its
default. What a family makes of fields that other families have too, configs drawn at random show. A line stays if a test names
it, if it is the only one of its family, or if it turns on an option that no other line turns on that stays. Prints the lines
that could go, and what each line adds to the others.
"""

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING

from hooked_lm.families import supported
from tests.families import CASES, VISION_CASES
from tests.families._case import SIZES, Case, config_of, reference
from tests.families._models import hooked
from tests.families._vision import VisionCase, hooked_any

TESTS = Path(__file__).parents[1]
Option = tuple[str, str, str]  # class, field, kind of value


def options(case: Case) -> set[Option]:
    """Everything that a line turns on."""
    is_text = case.family in supported() and not isinstance(case, VisionCase)
    tree = (hooked if is_text else hooked_any)(case).cfg.tree
    return {*of_tree(tree), *of_fields(case)}


def of_tree(node: Any) -> Iterator[Option]:
    """Of a config tree."""
    if isinstance(node, (tuple, list)):
        for part in node:
            yield from of_tree(part)
    if not is_dataclass(node):
        return
    name = type(node).__qualname__
    for field in fields(node):
        value = getattr(node, field.name)
        yield from of_tree(value)
        if (kind := kind_of(value, field.default)) is not None:
            yield name, field.name, kind
    if hasattr(node, "n_heads") and hasattr(node, "n_key_value_heads"):
        yield name, "heads of keys", {1: "one", node.n_heads: "all"}.get(node.n_key_value_heads, "grouped")


def kind_of(value: object, default: object) -> str | None:
    """What tells values of a field apart; None where a field without default holds a size."""
    if value is None or isinstance(value, (bool, str, Enum)):
        return str(value)
    if isinstance(value, (int, float)):
        return None if default is MISSING else "default" if value == default else "another number"
    if isinstance(value, (tuple, list)):
        return f"several {'/'.join(sorted({type(part).__qualname__ for part in value}))}"
    return getattr(value, "__qualname__", type(value).__qualname__)


def of_fields(case: Case) -> Iterator[Option]:
    """Of the HF config: fields that the line sets to something else than their default, other than sizes."""
    values = config_of(reference(case)).to_dict()
    defaults = CONFIG_MAPPING[case.family]().to_dict() if case.family in CONFIG_MAPPING else {}
    for name in case.fields:
        value = values.get(name, case.fields[name])
        if isinstance(case.fields[name], dict) and name.endswith("_config"):
            yield from (("of transformers", part, "") for part in case.fields[name] if part not in SIZES)
        elif name not in SIZES and value != defaults.get(name, MISSING):
            yield "of transformers", name, ""


def named_in_tests(cases: Iterable[Case]) -> set[str]:
    """The lines whose names tests state."""
    texts = {
        node.value
        for file in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {str(case) for case in cases if str(case) in texts}


def cover(found: dict[str, set[Option]], named: set[str], family: Callable[[str], str]) -> list[str]:
    """The lines that stay: those that tests name, then greedily what adds most; of each family at least that of most options."""
    chosen = {name for name in found if name in named}
    missing = set[Option]().union(*found.values()).difference(*(found[name] for name in chosen))
    while missing:
        best = max(found, key=lambda name: len(found[name] & missing))
        chosen.add(best)
        missing -= found[best]
    absent = dict.fromkeys(map(family, found)).keys() - {family(name) for name in chosen}
    chosen |= {
        max((name for name in found if family(name) == each), key=lambda name: len(found[name])) for each in absent
    }
    return [name for name in found if name in chosen]


def main() -> None:
    cases = {str(case): case for case in [*CASES, *VISION_CASES]}
    found = {name: options(case) for name, case in cases.items()}
    named = named_in_tests(cases.values())
    kept = cover(found, named, lambda name: cases[name].family)
    print(f"{len(cases)} lines, of which tests name {len(named)}; {len(kept)} stay")
    for name in found:
        others = set[Option]().union(*(found[other] for other in kept if other != name))
        adds = sorted(" ".join(option) for option in found[name] - others)
        print(
            f"{'stays' if name in kept else 'goes '} {name}: {'; '.join(adds) or ('named' if name in named else '-')}"
        )


if __name__ == "__main__":
    main()
