"""Random legal configs of a family, from a seed.

A config starts as a line of the table. Fields of the family's other lines are mixed in, switches that our side reads are
flipped, numbers are changed. Whether the result is legal, transformers decides: it builds the model and runs it. A config
that we refuse by name is drawn again; one that we accept has to give the same numbers.
"""

import copy
import random
from dataclasses import replace
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from hooked_lm.components.blocks.per_layer import PerLayerEmbed
from hooked_lm.families import family
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.hub.hf_checkpoint import read_config
from tests.families import CASES
from tests.families._case import Case, config_of, reference
from tests.families._models import MODERATE

ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "ffn_activation", "afn", "dense_act_fn")
ACTIVATIONS = ("gelu", "gelu_new", "silu", "relu", "tanh")
NUMBERS = (
    "eps",
    "scale",
    "scaling",
    "multiplier",
    "theta",
    "softcap",
    "base",
)  # float fields with such a name may change
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
TRIES = 200


def drawn(model_type: str, seed: int) -> Case:
    """The config of this seed."""
    generator = random.Random(f"{model_type} {seed}")
    lines = [case for case in CASES if case.family == model_type]
    for _ in range(TRIES):
        line = generator.choice(lines)
        case = replace(line, name=f"drawn-{seed}", fields=mixed(line, lines, generator))
        if runs_in_transformers(case) and is_accepted(case):
            return case
    raise AssertionError(f"no legal config of {model_type} in {TRIES} draws: say more in tests/families/_draw.py")


def mixed(line: Case, lines: list[Case], generator: random.Random) -> dict[str, Any]:
    """The fields of a line, changed at random."""
    fields = dict(line.fields)
    for other in generator.sample(lines, len(lines)):
        for name in sorted({*other.fields, *fields}):
            if generator.random() < 0.15:
                if name in other.fields:
                    fields[name] = other.fields[name]
                else:
                    fields.pop(name)
    defaults = CONFIG_MAPPING[line.family](**copy.deepcopy(line.fields)).to_dict()
    for name in sorted(fields_read(line) & defaults.keys()):
        value = fields.get(name, defaults[name])
        if isinstance(value, bool) and generator.random() < 0.25:
            fields[name] = not value
        elif name in ACTIVATION_FIELDS and generator.random() < 0.5:
            fields[name] = generator.choice(ACTIVATIONS)
        elif isinstance(value, float) and any(word in name for word in NUMBERS) and generator.random() < 0.5:
            fields[name] = value * generator.choice((0.5, 0.8, 1.5))
    if "vocab_size" in fields:
        fields["vocab_size"] = generator.choice((37, 61, 97))
    for name in LAYERS:
        if name in fields and generator.random() < 0.5:
            fields[name] = generator.choice((1, 3))
    return copy.deepcopy(fields)


def fields_read(line: Case) -> set[str]:
    """The fields of this config that our side looks at."""
    values = CONFIG_MAPPING[line.family](**copy.deepcopy(line.fields)).to_dict()
    hf = HFConfig(values, {})
    family(line.family).config(hf)
    return set(hf._read)


@torch.no_grad()
def runs_in_transformers(case: Case) -> bool:
    """Whether transformers makes a model of this config, and numbers of a size that can be compared."""
    try:
        model = copy.deepcopy(reference(case))
        tokens = torch.arange(2 * case.n_prompt).view(2, -1) % 37
        inputs = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
        deviation = model(tokens, **inputs).logits.std()
    except Exception:  # whatever it says of a config that is not legal
        return False
    return MODERATE[0] < deviation.item() < MODERATE[1]


def is_accepted(case: Case) -> bool:
    """Whether we take this config and the case's prompt, instead of saying why not."""
    try:
        tree = read_config(family(case.family), config_of(reference(case)))
    except ValueError:
        return False
    per_layer = getattr(tree, "per_layer", None)
    # for whatever tokens are drawn
    has_all_rows = not isinstance(per_layer, PerLayerEmbed.Config) or per_layer.d_vocab >= tree.embed.d_vocab
    return has_all_rows and case.n_prompt <= tree.n_ctx
