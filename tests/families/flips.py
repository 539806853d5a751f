"""Fields that a family does not read, flipped one at a time: those that move the logits of transformers have to be refused.

`python -m tests.families.flips NAME ...` lists the fields of families that are ignored.

`random_configs` changes what our side reads. Of all else a checkpoint is refused if it is not at its default, but for what the
families and the reader list in `NO_EFFECT`, or take for a repetition of another field: transformers decides whether it is.
"""

import copy
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch

from tests.close import is_close
from tests.families._answers import Answers, inputs, of_ours, of_transformers, ours
from tests.families._case import Case, reference
from tests.families._field_values import Place, another
from tests.families._vision import VisionCase
from tests.families.random_configs import Path, at, changed, class_at, families, fields_read, lines, whole_config

VALUES = 3  # drawn for each field
# What is not of the model, what counts in training only, tokens of generation, and what says how numbers are returned or stored.
NOT_OF_THE_MODEL = (
    *("architectures", "model_type", "*_model_type", "id2label", "label2id", "problem_type", "transformers_version"),
    *(
        "quantization_config",
        "*dtype",
        "_*",
        "*attn_implementation",
        "*dropout*",
        "*pdrop",
        "*drop_prob",
        "*_token_id*",
    ),
    *("return_dict", "output_*", "use_cache", "is_encoder_decoder", "*loss*", "initializer_*", "*_std", "classifier_*"),
)

# Fields that move the logits of transformers by something else than they mean, by family, and why.
EXPLAINED = {
    "rwkv.rescale_every": "transformers halves the stream in between: only the eps of norms counts more (rwkv.py)"
}


def ignored(name: str) -> list[str]:
    """The fields of a family that move what transformers answers, and that we neither follow nor refuse by their name."""
    found, seen = dict[str, None](), set[Path]()
    for line in lines(name):
        read = fields_read(line)
        config = whole_config(line).to_dict()
        for path in paths(config):
            if (
                path in read | seen
                or f"{name}.{'.'.join(path)}" in EXPLAINED
                or (isinstance(line, VisionCase) and len(path) > 1)
            ):
                continue
            seen.add(path)
            if any(is_ignored(line, path, value) for value in other_values(line, path, config)):
                found[".".join(path)] = None
    return list(found)


def paths(config: Mapping[Any, Any], of: Path = ()) -> Iterator[Path]:
    """The fields of a config and of those in it."""
    for name, value in config.items():
        if any(fnmatchcase(str(name), glob) for glob in NOT_OF_THE_MODEL):
            continue
        if isinstance(value, Mapping) and name != "rope_parameters":
            yield from paths(value, (*of, name))
        else:
            yield (*of, name)


def other_values(line: Case, path: Path, config: dict[str, Any]) -> list[Any]:
    """Other values of a field, the same ones in each run."""
    beside, generator = at(config, path[:-1]), random.Random(f"{line.family} {path}")
    now, place = beside.get(path[-1]), Place(class_at(whole_config(line), path), beside)
    drawn = [another(path[-1], now, place, generator) for _ in range(VALUES)]
    return [value for i, value in enumerate(drawn) if value != now and value not in drawn[:i]]


@torch.no_grad()
def is_ignored(line: Case, path: Path, value: Any) -> bool:
    """Whether this value changes what transformers answers, and we load it and answer something else, or refuse other things."""
    case = changed(replace(line, name="flipped"), {path: value})
    given = inputs(line)
    try:
        moves = not same(answers(case, reference(line), given), answers(line, reference(line), given))
    except Exception:  # transformers makes or runs no such model
        return False
    if not moves:
        return False
    try:
        model, given = ours(case), inputs(case)
        expected = of_transformers(case, copy.deepcopy(reference(case)), given)
        return not same(of_ours(case, model, given, expected), expected)
    except ValueError as error:
        return path[-1] not in str(error)


def answers(case: Case, weights_of: Any, given: dict[str, torch.Tensor]) -> Answers | None:
    """What transformers answers with these weights; None if its model has other ones."""
    model, weights = copy.deepcopy(reference(case)), weights_of.state_dict()
    own = model.state_dict()
    if own.keys() != weights.keys() or any(own[name].shape != weights[name].shape for name in own):
        of_transformers(case, model, given)  # which has to run
        return None
    model.load_state_dict(weights)
    return of_transformers(case, model, given)


def same(found: Answers | None, expected: Answers | None) -> bool:
    """Whether two answers are equal up to rounding."""
    if found is None or expected is None or found.keys() != expected.keys():
        return False
    return all(x.shape == expected[name].shape and is_close(x, expected[name]) for name, x in found.items())


if __name__ == "__main__":
    for name in sys.argv[1:] or families():
        print(f"{name}: {', '.join(ignored(name)) or 'no field is ignored'}", flush=True)
