"""Other values of a config's field, by its name and by the value that it has.

Nothing here says whether a config is legal: transformers decides that.
"""

import inspect
import math
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import NoneType
from typing import Any, get_args

from transformers import MODEL_MAPPING
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

Fields = Mapping[str, Any]
ACTIVATIONS = ("gelu", "gelu_new", "silu", "relu", "tanh")
LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_encoder_layers", "depth"),
    *("encoder_layers", "decoder_layers", "num_blocks"),
)

# Pattern of names -> values; other fields get values that are near the present one.
VALUES: dict[str, tuple[Any, ...]] = {
    "|".join(LAYERS): (1, 2, 3, 4, 5),
    "hidden_size|n_embd|d_model|dim|emb_dim": (24, 32, 48, 64),
    r".*(heads|n_head|num_kv_heads|kv_n_heads)": (1, 2, 3, 4, 6, 8),
    r"(head_dim|.*_head_dim|d_kv|kv_channels|.*head_size|attention_head_dim)": (4, 6, 8, 12, 16),
    r".*vocab_size": (43, 61, 64, 97),
    r"max_.*position_embeddings|n_positions|max_seq_len|model_max_length|max_sequence_length": (30, 40, 48, 64),
    r".*(eps|epsilon)|moe_norm_min": (0.01, 0.05, 0.2),
    r".*(_act|_act_fn|activation|activation_function)|afn|name": ACTIVATIONS,
    "feed_forward_proj": (*ACTIVATIONS, *(f"gated-{act}" for act in ACTIVATIONS)),
    r".*theta|rotary_emb_base": (10.0, 100.0, 500.0, 10000.0),
    r".*soft_?cap(ping)?": (0.7, 2.0, 9.0),
    "tie_word_embeddings|use_sliding_window": (True, False),  # where a config lacks it
    r".*(window|window_size|chunk_size)|local_attention": (1, 3, 4, 6, 9),
    "conv_kernel_size": (3, 5, 7),
    r".*groups?": (1, 2, 3, 4, 8),
    r".*rank": (2, 3, 7, 12),
    "pad_token_id": (0, 1),
    "embedding_size": (12, 24, 40),
    "normalization_type": ("layer_norm", "no_norm"),
    "norm_type": ("layer_norm", "rms_norm", "layernorm", "low_precision_layernorm"),
    "vision_feature_layer": (-1, -2, 1, [-2, 1]),
    "vision_feature_select_strategy": ("default", "full"),
    "pos_att_type": (["c2p"], ["p2c"], ["c2p", "p2c"], "c2p|p2c", []),
    "scoring_func": ("sigmoid", "softmax", "sqrtsoftplus"),
    "norm_rel_ebd": ("none", "layer_norm"),
    "position_buckets": (-1, 3, 6),
    "max_relative_positions": (-1, 5, 12),
    "relative_attention_num_buckets": (4, 8, 14, 32),
    "relative_attention_max_distance": (9, 12, 128),
    "type_vocab_sizes": ([3, 2, 4], [2, 5, 3, 2]),
    "global_block_size": (2, 4, 8),  # of others transformers rounds the sum of their reciprocals
    "num_labels": (1, 2, 3, 5),
    "(attention|mlp)_bias": (True, False),  # where a config lacks it
    r".*shared_expert.*size": (0, 12, 20, 28),
    r".*(num|n)_shared_expert.*|num_dense_layers|first_k_dense_replace|num_kv_shared_layers": (0, 1, 2, 3),
}
MLPS = ("dense", "sparse", "moe")  # types of layers by their MLP
BY_LAYER = r".*(_layers|layer_indices|layer_ids|_indexes)"  # lists of the numbers of layers
EQUAL = (
    ("num_attention_heads", "num_key_value_heads"),
    ("n_heads", "kv_n_heads"),
    *(("attention_bias", "mlp_bias"), ("mlp_bias", "attention_bias")),
    ("qk_rope_head_dim", "head_dim"),
)
RATIOS = (("hidden_size", "num_heads"), ("hidden_size", "head_dim"))
FACTORS = (
    *(("head_dim", "num_attention_heads"), ("num_heads", "head_dim")),
    *(("linear_num_key_heads", "linear_key_head_dim"), ("linear_num_value_heads", "linear_value_head_dim")),
)
NEEDS = (  # pattern of names, a field beside it, the value with which it has no effect, and one with which it has
    ("n_group|topk_group", "topk_method", "greedy", "group_limited_greedy"),
    ("sliding_window|layer_types", "use_sliding_window", False, True),
    ("layer_types", "sliding_window", None, 4),
)
ONE_OF = {"default_language": "languages"}  # a field -> one beside it that lists its values
NEVER_NONE = r"time_step_limit|.*eps"  # in transformers it fails in every layer that reads it
ROPE = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class Place:
    """Where a field is: the class of its config, and the values of the fields beside it."""

    of: type
    beside: Fields

    @property
    def n_layers(self) -> int:
        return next((n for name in LAYERS if isinstance(n := self.beside.get(name), int)), 2)

    @property
    def n_pairs(self) -> int:
        """How many pairs of a head are rotary, if all are."""
        now = self.beside
        heads = next((now[n] for n in ("num_attention_heads", "n_heads", "n_head") if isinstance(now.get(n), int)), 1)
        width = next((now[n] for n in ("hidden_size", "n_embd", "d_model") if isinstance(now.get(n), int)), 32)
        return int(now.get("qk_rope_head_dim") or now.get("head_dim") or width // heads) // 2

    def n_pairs_turned(self, turning: Fields) -> int:
        """How many of them are, by the parameters of a rotary embedding."""
        return int(self.n_pairs * turning.get("partial_rotary_factor", 1.0))


def another(name: str, now: Any, place: Place, generator: random.Random) -> Any:
    """Another value for a field; the same one where none is known."""
    options = annotations(place.of).get(name, ())
    can_be_none = NoneType in options and not re.fullmatch(NEVER_NONE, name) and not isinstance(now, (bool, NoneType))
    if can_be_none and generator.random() < 0.2:
        return None
    if name == "rope_parameters" and isinstance(now, dict):
        return rope(now, place, generator)
    for pattern, values in VALUES.items():
        if re.fullmatch(pattern, name) and not isinstance(now, (bool, list, dict)):
            return generator.choice([value for value in values if value != now])
        if pattern == name:
            return generator.choice([value for value in values if value != now])
    if isinstance(now, list):
        return of_list(name, now, place, generator)
    if now is None and (words := spelled(place.of, name)):
        return generator.choice(words)
    if now is None:
        now = start(options)
        if isinstance(now, bool):
            return generator.choice((True, False))
        return now if now is None else near(now, generator)
    if isinstance(now, str):
        known = place.beside.get(ONE_OF.get(name, ""), spelled(place.of, name))
        others = [word for word in known if word != now]
        return generator.choice(others) if others else now
    return near(now, generator)


def together(name: str, value: Any, place: Place, generator: random.Random) -> Fields:
    """The values of fields that have to fit a new value, or that give it an effect."""
    matching = [row[1:] for row in NEEDS if re.fullmatch(row[0], name)]
    needed: dict[str, Any] = {other: fit for other, unfit, fit in matching if place.beside.get(other, fit) == unfit}
    needed |= groups(name, value, place.beside, generator)
    before, turning = place.beside.get(name), place.beside.get("rope_parameters")
    if not isinstance(value, int) or not isinstance(before, int):
        return needed
    found = needed | in_proportion(name, value, before, place.beside)
    if isinstance(turning, dict) and "mrope_section" in turning:
        n_pairs = Place(place.of, {**place.beside, **found, name: value}).n_pairs_turned(turning)
        if sum(turning["mrope_section"]) != n_pairs:
            found["rope_parameters"] = {**turning, "mrope_section": sections(n_pairs, generator)}
    return found


def groups(name: str, value: int | None, beside: Fields, generator: random.Random) -> dict[str, int | None]:
    """At least as many groups as are chosen; neither, if one of them is None."""
    other = {"n_group": "topk_group", "topk_group": "n_group"}.get(name)
    if other is None or other not in beside:
        return {}
    now = beside[other]
    if value is None or now is None:
        return {other: value}
    if name == "topk_group":
        return {other: value * generator.choice((1, 2))} if now < value else {}
    return {other: value // generator.choice((1, 2)) or 1} if now > value else {}


def in_proportion(name: str, value: int, before: int, beside: Fields) -> dict[str, Any]:
    """Numbers that have to fit a new one: an equal number, one in the same ratio, or another factor of the same product."""
    found = {other: value for one, other in EQUAL if name == one and beside.get(other) == before}
    for one, other in RATIOS:
        if name == one and isinstance(count := beside.get(other), int):
            found[other] = count * value // before
            break
    for pair in FACTORS:
        other = next((other for other in pair if name in pair and other != name), "")
        count = beside.get(other)
        if isinstance(count, int) and value and count * before % value == 0:
            found[other] = count * before // value
    return found


def start(options: tuple[type, ...]) -> Any:
    """A value of one of these types."""
    return next((value for kind, value in ((bool, True), (int, 4), (float, 0.7)) if kind in options), None)


def near(now: Any, generator: random.Random) -> Any:
    """Another number of the same kind and, by and large, of the same size."""
    if isinstance(now, bool):
        return not now
    if isinstance(now, int):
        found = {1, 2, now - 1, now + 1, now // 2, 2 * now, now + now // 2} - {now}
        return generator.choice(sorted(n for n in found if n > 0 or now == 1)) if now >= 0 else 4
    if isinstance(now, float):
        if now == 0 or math.isinf(now):
            return 0.7
        return round(now * generator.choice((0.5, 0.8, 1.5, 2.0)), 4)
    return now


def of_list(name: str, now: list[Any], place: Place, generator: random.Random) -> list[Any]:
    """Another list of the same kind: of layers by number, of words, of numbers."""
    n_layers = place.n_layers
    if re.fullmatch(BY_LAYER, name) and all(isinstance(x, int) for x in now) and len(now) != n_layers:
        return sorted(generator.sample(range(n_layers), generator.randint(0, n_layers)))
    if not now:
        return now
    if all(isinstance(x, str) for x in now):
        words = sorted({*now, *spelled(place.of, name)})
        return [generator.choice(words) for _ in now]
    if all(isinstance(x, int) and x in (0, 1) for x in now):
        return [generator.choice((0, 1)) for _ in now]
    return [generator.choice((x, near(x, generator))) for x in now]


def rope(now: dict[str, Any], place: Place, generator: random.Random) -> dict[str, Any]:
    """A rotary embedding that is stretched in another way; one for each type of layers, if there was."""
    if any(isinstance(part, dict) for part in now.values()):
        return {kind: rope(part, place, generator) if isinstance(part, dict) else part for kind, part in now.items()}
    kept = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "alpha", "type"}
    kept |= {"llama_4_scaling_beta", "max_position_embeddings"}
    found = {name: value for name, value in now.items() if name in kept - {"rope_type", "type"}}
    if "rope_theta" in found:
        found["rope_theta"] = generator.choice((10.0, 100.0, 500.0, 10000.0))
    if "partial_rotary_factor" in found:
        found["partial_rotary_factor"] = generator.choice((0.25, 0.5, 1.0, found["partial_rotary_factor"]))
    n_pairs = place.n_pairs_turned(found)
    if "mrope_section" in found and (sum(found["mrope_section"]) != n_pairs or generator.random() < 0.5):
        found["mrope_section"] = sections(n_pairs, generator)
    if "llama_4_scaling_beta" in found:
        found |= {"llama_4_scaling_beta": generator.choice((0.3, 0.9)), **trained(generator)}
    kind = "default" if "mrope_section" in now and generator.random() < 0.5 else generator.choice(ROPE)
    return {**found, "rope_type": kind, **STRETCHED[kind](n_pairs, generator)}


def sections(n_pairs: int, generator: random.Random) -> list[int]:
    """Pairs for time, height and width; in some families the last two have to be equal, in others the first two."""
    one, other = generator.choices(range(n_pairs // 2 + 1), k=2)
    other = generator.choice((one, other))
    return generator.sample([one, other, n_pairs - one - other], 3)


def trained(generator: random.Random) -> dict[str, Any]:
    return {"original_max_position_embeddings": generator.choice((5, 12, 16, 64))}


def some(generator: random.Random, **values: tuple[Any, ...]) -> dict[str, Any]:
    """About half of these optional parameters."""
    return {name: generator.choice(among) for name, among in values.items() if generator.random() < 0.4}


def factor(generator: random.Random) -> dict[str, Any]:
    return {"factor": generator.choice((1.5, 2.0, 4.0))}


def factors(n_pairs: int, generator: random.Random) -> list[float]:
    return [generator.choice((1.0, 1.3, 2.0, 4.0, 9.0)) for _ in range(n_pairs)]


def llama3(n_pairs: int, generator: random.Random) -> dict[str, Any]:
    between = {"low_freq_factor": generator.choice((0.5, 1.0)), "high_freq_factor": generator.choice((2.0, 4.0))}
    return {**factor(generator), **between, **trained(generator)}


def yarn(n_pairs: int, generator: random.Random) -> dict[str, Any]:
    options = some(
        generator,
        beta_fast=(8.0, 32.0),
        beta_slow=(0.5, 2.0),
        attention_factor=(0.7, 1.3),
        mscale=(0.7, 1.2),
        mscale_all_dim=(0.6, 1.1),
        truncate=(True, False),
    )
    return {**factor(generator), **trained(generator), **options}


def longrope(n_pairs: int, generator: random.Random) -> dict[str, Any]:
    lists = {"short_factor": factors(n_pairs, generator), "long_factor": factors(n_pairs, generator)}
    return {**lists, **trained(generator), **some(generator, factor=(1.5, 4.0), attention_factor=(0.7, 1.3))}


STRETCHED = {
    "default": lambda n_pairs, generator: {},
    "linear": lambda n_pairs, generator: factor(generator),
    "dynamic": lambda n_pairs, generator: factor(generator),
    "llama3": llama3,
    "yarn": yarn,
    "longrope": longrope,
    "proportional": lambda n_pairs, generator: some(generator, factor=(1.5, 4.0), partial_rotary_factor=(0.25, 0.5)),
}


# ---- what transformers says of a field ----------------------------------------------------------------------------------


@cache
def annotations(of: type) -> dict[str, tuple[Any, ...]]:
    """The types that a field may have, by the annotations of its config class."""
    kinds: dict[str, Any] = {}
    for each in reversed(of.__mro__):
        kinds |= inspect.get_annotations(each)
    return {name: get_args(kind) or (kind,) for name, kind in kinds.items()}


@cache
def source(of: type) -> str:
    """The text of the modules that define the config and the models of a type."""
    config = sys.modules[of.__module__]
    modeling = config.__name__.replace("configuration_", "modeling_")
    if find_spec(modeling) is None:  # its models are those of another type
        modeling = MODEL_MAPPING[of].__module__
    __import__(modeling)
    return inspect.getsource(config) + inspect.getsource(sys.modules[modeling])


def is_read(of: type, name: str) -> bool:
    """Whether the modules of transformers name a field."""
    return re.search(rf"\b{name}\b", source(of)) is not None


@cache
def spelled(of: type, name: str) -> tuple[str, ...]:
    """The words that a field may have: by its type, by what it is compared with, and types of layers that are named."""
    literals = [word for kind in annotations(of).get(name, ()) if get_args(kind) for word in get_args(kind)]
    literals += [word for word in annotations(of).get(name, ()) if isinstance(word, str)]
    text = source(of)
    compared = re.findall(rf"\b{name}\b\s*(?:==|!=|in)\s*[\[({{]?\"([\w-]+)\"", text)
    is_mlp = name.startswith("mlp")
    layers = [word for word in ALLOWED_LAYER_TYPES if f'"{word}"' in text and (word in MLPS) == is_mlp]
    layers = layers if "type" in name and "embedding" not in name else []
    return tuple(sorted({word for word in (*literals, *compared, *layers) if isinstance(word, str)}))
