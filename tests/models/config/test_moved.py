"""Configs that were saved before components moved load, and name no other code than components."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from hooked_lm.models.config.moved import MOVED
from hooked_lm.models.config.stored import from_json, to_json

HERE = Path(__file__).parent
# Each component that a config could name before rare mechanisms moved to their families, and configs as they were written then,
# which hold those that have moved since.
NAMES = (HERE / "names_before_moves.txt").read_text().split()
SAVED = [json.loads(line) for line in (HERE / "saved_before_moves.jsonl").read_text().splitlines()]
# In no config of a model: blocks make the first two, runs the last.
NOT_SAVED = {
    "components.attention.ngram:PredictingAttention.Config",
    "components.attention.ngram:StreamCrossAttention.Config",
    "components.vision.image_features:ImageFeatures",
}


def row_of(name: str) -> str:
    """The key of a component's row in the table, if it has moved."""
    module, _, path = name.removeprefix("hooked_lm.").partition(":")
    of_class = f"{module}:{path.partition('.')[0]}"
    return of_class if of_class in MOVED else module


def named(saved: Any) -> set[str]:
    """The names of classes in a saved config."""
    if not isinstance(saved, (dict, list)):
        return set()
    own = {saved["class"]} if isinstance(saved, dict) and "class" in saved else set()
    return own.union(*map(named, saved.values() if isinstance(saved, dict) else saved))


def in_former_names(now: Any, then: Any) -> Any:
    """A saved config with the names of classes that another one has in the same places."""
    if isinstance(now, list):
        return [in_former_names(*pair) for pair in zip(now, then, strict=True)]
    if not isinstance(now, dict):
        return now
    return {key: then[key] if key == "class" else in_former_names(value, then[key]) for key, value in now.items()}


def test_each_former_name_means_a_component() -> None:
    for name in NAMES:
        with suppress(TypeError):  # a field is missing; a name that is not found is a ValueError
            assert type(from_json({"class": name})).__qualname__ == name.partition(":")[2]


def test_each_row_of_the_table_is_needed_and_right() -> None:
    assert [row for row in MOVED if row not in {row_of(name) for name in NAMES}] == []
    root = HERE.parents[2] / "hooked_lm"
    assert [
        new for new in MOVED.values() if not (root / f"{new.partition(':')[0].replace('.', '/')}.py").is_file()
    ] == []


def test_a_config_saved_before_loads() -> None:
    """With the same values."""
    for saved in SAVED:
        again = to_json(from_json(saved))
        assert in_former_names(again, saved) == saved
        assert named(again) != named(saved)


def test_of_each_component_that_moved_there_is_a_saved_config() -> None:
    moved = {name for name in NAMES if row_of(name) in MOVED}
    saved = set().union(*map(named, SAVED))
    assert {name.removeprefix("hooked_lm.") for name in moved - saved} == NOT_SAVED


@pytest.mark.every_parameter
@pytest.mark.parametrize(
    "name",
    [
        "hooked_lm.families.decoders.gpt2:config",
        "hooked_lm.families.decoders.zaya:DecoderConfig",  # imported there
        "hooked_lm.families:import_module",
        "hooked_lm.families..decoders.gpt2:config",
        "hooked_lm.components.attention.narrow:NarrowBlock.Config",
        "hooked_lm.hub.own:OwnCheckpoint",
        "os.path:join",
    ],
)
def test_another_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no component of this version"):
        from_json({"class": name})
