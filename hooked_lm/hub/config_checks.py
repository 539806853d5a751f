"""Checks of a checkpoint's config before a model is built from it. Errors name the field and its value."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hooked_lm.files import OF_DAMAGE
from hooked_lm.models.config.read import Tree
from hooked_lm.weights.rows import Row, placeholders

MOST = 2**31 - 1
LARGEST = 2**63 - 1  # of any integer
MOST_MODULES = 20_000  # layers or experts; configs of Doge without experts say 16,384

# Fields, of any family, that count modules (MODULES) or are sizes of weights (SIZES).
MODULES = frozenset(
    (
        *("n_layer", "n_layers", "num_layers", "num_hidden_layers"),
        *("num_decoder_layers", "encoder_layers", "decoder_layers"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    )
)
OPTIONAL = frozenset(("num_local_experts",))  # 0: no experts
SIZES = MODULES | frozenset(
    (
        *("hidden_size", "n_embd", "d_model", "dim", "vocab_size", "embedding_size"),
        *("n_head", "n_heads", "num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads"),
        *("encoder_attention_heads", "decoder_attention_heads", "head_dim", "d_kv", "state_size"),
        *("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim", "d_ff", "dff", "hidden_dim"),
        *("encoder_ffn_dim", "decoder_ffn_dim", "n_positions", "max_position_embeddings"),
    )
)
# Fields that count what there has to be one of, where the model reads them: keys that a token attends to, experts, their groups.
COUNTS = frozenset(
    (
        *("sliding_window", "attention_window_size", "window_size", "local_attention", "attention_chunk_size"),
        *("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"),
        *("n_group", "topk_group", "num_expert_group", "index_topk"),
        # by which families divide
        *(
            "num_hidden_groups",
            "num_mem_blocks",
            "n_mamba_heads",
            "attention_head_dim",
            "attention_heads",
            "head_ratio",
        ),
        *("num_encoder_attention_heads", "num_decoder_attention_heads", "query_pre_attn_scalar", "patch_size"),
        *("decoder_sparse_step", "moe_layer_interval", "attn_layer_period", "expert_layer_period", "image_size"),
        *("adapter_reduction_factor", "block_multiple_of", "ffn_round_up_to_multiple_of", "spatial_merge_size"),
        "mm_tokens_per_image",
    )
)


def check_values(config: Mapping[str, Any], name: str) -> None:
    """Raises ValueError for invalid sizes, counts and constants. Error messages refer to the config by `name`.

    >>> check_values({"n_layer": 12, "n_head": 0}, "this config")
    Traceback (most recent call last):
    ...
    ValueError: n_head=0 in this config must be a whole number from 1 to 2147483647
    """
    for field, value in _numbers(config):
        if field in SIZES and value is not None:
            least, most = int(field not in OPTIONAL), MOST_MODULES if field in MODULES else MOST
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(f"{field}={_short(value)} in {name} must be a whole number from {least} to {most}")
        elif field.endswith(("eps", "epsilon")) and value is not None:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ValueError(f"{field}={_short(value)} in {name} must be a finite number of at least 0")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field}={value!r} in {name} must be a finite number")
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{field}={_short(value)} in {name} must be a number of at most 64 bits")


@contextmanager
def naming(config: str) -> Iterator[None]:
    """Whatever is wrong with a config is a ValueError that names it.

    >>> with naming("a/config.json"):
    ...     {"n_layers": 2}["d_model"]
    Traceback (most recent call last):
    ...
    ValueError: a/config.json: KeyError: 'd_model'
    """
    try:
        yield
    except OF_DAMAGE as error:
        if not isinstance(error, ValueError):
            raise ValueError(f"{config}: {type(error).__name__}: {error}") from error
        raise error if config in str(error) else ValueError(f"{config}: {error}") from error


def check_kinds(config: Mapping[str, Any], defaults: Mapping[str, Any], name: str) -> None:
    """Raises ValueError for fields with text, bools or nested fields if their default is a number."""
    for field, default in defaults.items():
        is_number = isinstance(default, (int, float)) and not isinstance(default, bool)
        if is_number and isinstance(config.get(field), (str, Mapping, bool)):
            raise ValueError(f"{field}={_short(config[field])} in {name} must be a number, as {default!r} is")


def check_counts(config: Mapping[str, Any], tree_of: Callable[[Mapping[str, Any]], Any], name: str) -> None:
    """Raises ValueError for counts below 1 on which the model depends: `tree_of` returns the model's config for such fields.

    >>> windows = {"attention": "all", "sliding_window": 0}
    >>> check_counts(windows, lambda fields: fields["attention"], "this config")
    >>> check_counts(windows, lambda fields: fields["sliding_window"], "this config")
    Traceback (most recent call last):
    ...
    ValueError: sliding_window=0 in this config must be a whole number of at least 1
    """
    for path, value in _counts(config):
        others = (_with(config, path, n) for n in (1, 2))
        if any(_outcome(tree_of, other) != _outcome(tree_of, config) for other in others):
            raise ValueError(f"{'.'.join(path)}={value} in {name} must be a whole number of at least 1")


def _counts(config: Mapping[Any, Any]) -> Iterator[tuple[tuple[str, ...], int]]:
    """The paths and values of counts below 1, those in nested configs included."""
    for field, value in config.items():
        if isinstance(value, Mapping):
            yield from (((field, *path), below) for path, below in _counts(value))
        elif field in COUNTS and isinstance(value, int) and not isinstance(value, bool) and value < 1:
            yield (field,), value


def _with(config: Mapping[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    """The config with another value of one field."""
    field, *inner = path
    return {**config, field: _with(config[field], tuple(inner), value) if inner else value}


def _outcome(tree_of: Callable[[Mapping[str, Any]], Any], config: Mapping[str, Any]) -> Any:
    """What a family makes of a config: a tree, or an error of whatever kind."""
    try:
        return tree_of(config)
    except Exception as error:
        return repr(error)


def check_layers(module: ModuleType, tree: Tree, tensors: Collection[str]) -> None:
    """Raises ValueError if the config has more layers than the checkpoint, before any are allocated."""
    stacks: dict[str, list[Row]] = {}
    for row in module.rows(tree):
        if "l" in placeholders(row.target) and "l" in placeholders(row.source):
            stacks.setdefault(row.target.partition("{l}")[0], []).append(row)
    for stack, rows in stacks.items():
        n_layers = max(_n_layers(row, len(tree.blocks)) for row in rows)
        if n_layers and not _holds(rows, n_layers - 1, tensors, module.PREFIX):
            held = next(layer for layer in range(n_layers) if not _holds(rows, layer, tensors, module.PREFIX))
            raise ValueError(
                f"the config describes {n_layers} layers ({stack.rstrip('.')}), but the checkpoint holds tensors of {held}"
            )


def _n_layers(row: Row, default: int) -> int:
    own = row.axes.get("l", default)
    return own if isinstance(own, int) else 1 + max((int(layer) for layer in own), default=-1)


def _holds(rows: list[Row], layer: int, tensors: Collection[str], prefix: str) -> bool:
    """Whether a checkpoint has any tensor of a layer; of several experts only the first is checked."""
    for row in rows:
        name = row.source.replace("{l}", str(layer))
        for other in placeholders(name):
            labels = row.axes.get(other, 1)
            name = name.replace(f"{{{other}}}", str(0 if isinstance(labels, int) else next(iter(labels), "")))
        if name in tensors or name.removeprefix(prefix) in tensors:
            return True
    return False


def _numbers(config: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields fields and values: each entry of per-layer lists of sizes, and the fields nested in `rope_*`."""
    for field, value in config.items():
        if isinstance(value, list) and field in SIZES and len(value) > 1:  # one for each layer
            yield from ((field, each) for each in value)
        elif isinstance(value, Mapping) and field.startswith("rope_") and depth < 2:
            yield from _numbers(value, depth + 1)
        else:
            yield field, value


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) < 60 else shown[:60] + "..."
