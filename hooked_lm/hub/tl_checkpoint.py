"""Checkpoints of TransformerLens: a `config.json` with flat names, and a file of weights by TransformerLens names.

They are recognised by a config with flat names and without `model_type`. Fields about training are ignored. The weights are
in a file `*final.pth`, or in the only one; earlier checkpoints are in the folder `checkpoints`, with the training step or
the number of tokens at the end of the file name.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hooked_lm.hub.config_checks import check_values, naming
from hooked_lm.hub.hf_load import unfilled
from hooked_lm.hub.model_classes import Loaded
from hooked_lm.hub.options import Options, real_dtype, with_limits
from hooked_lm.hub.source import TOKENIZER_FILES, Source, find, tokenizer_in
from hooked_lm.hub.tl_weights import check_layers_alike, in_public_names
from hooked_lm.keywords import check_keywords
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.flat_config import FOREIGN_FIELDS
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.models.placement import place
from hooked_lm.models.weights.state import check_state, load_state
from hooked_lm.weights import Checkpoint, open_checkpoint
from hooked_lm.weights.mapped import in_file

NEEDED = ("n_layers", "d_model", "n_ctx", "d_vocab", "normalization_type")
# Config fields about running or training a model, not about its architecture.
ABOUT_A_RUN = {
    *("model_name", "trust_remote_code", "device", "n_devices", "dtype", "seed", "n_params", "processed", "tree"),
    *("init_mode", "init_weights", "initializer_range", "tokenizer_prepends_bos", "ungroup_grouped_query_attention"),
    *("from_checkpoint", "checkpoint_index", "checkpoint_label_type", "checkpoint_value"),
    *("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in", "use_hook_tokens", "fused_attention"),
}
READ = {field.name for field in fields(HookedTransformerConfig)} - ABOUT_A_RUN | FOREIGN_FIELDS.keys()
# Other spellings of fields -> the fields by our names.
SPELLINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "normalization": lambda value: {"normalization_type": value},
    "ln_eps": lambda value: {"eps": value},
    "architecture": lambda value: {"original_architecture": value},
    "shortformer_pos": lambda value: {"positional_embedding_type": "shortformer"} if _is_true(value) else {},
}
WEIGHTS = (".pth", ".safetensors")
STEPS = "checkpoints/"
FROM_TOKENS = 10**9  # a label that is larger counts tokens, not steps


@dataclass(frozen=True)
class Step:
    """One checkpoint of a training run: its index, its label (a step or a number of tokens), and its file."""

    index: int
    value: int
    label_type: str
    file: str


@dataclass(frozen=True)
class TLCheckpoint:
    """A TransformerLens checkpoint; `folder` has its config, `names` are the config fields by our names."""

    source: Source
    folder: Path
    names: dict[str, Any]
    options: Options

    def whole_config(self) -> HookedTransformerConfig:
        """The flat config of all layers. Raises ValueError for missing or contradictory sizes."""
        if missing := [name for name in NEEDED if name not in self.names]:
            raise ValueError(f"the config of {self.source.name!r} does not say {', '.join(missing)}")
        check_values(self.names, f"the config of {self.source.name!r}")
        whole = HookedTransformerConfig.from_dict({**self.names, "init_weights": False, "device": "meta"})
        whole.check_tree()
        return whole

    def flat_config(self, tensors: Mapping[str, Tensor], step: Step | None) -> HookedTransformerConfig:
        """The flat config of the model, limited to the options' `first_n_layers` and `n_ctx`."""
        whole, options = self.whole_config(), self.options
        assert whole.tree is not None
        prepend_bos = options.default_prepend_bos
        facts: dict[str, Any] = {
            "model_name": Path(self.source.name).name,
            "original_architecture": whole.original_architecture or "neel",
            "tokenizer_name": whole.tokenizer_name,
            "default_prepend_bos": whole.default_prepend_bos if prepend_bos is None else prepend_bos,
            "default_padding_side": options.default_padding_side or whole.default_padding_side,
            "from_checkpoint": step is not None,
            "eos_token_id": whole.eos_token_id,
        }
        if step is not None:
            labels = {"index": step.index, "value": step.value, "label_type": step.label_type}
            facts |= {f"checkpoint_{name}": value for name, value in labels.items()}
        tree = with_limits(whole.tree, options)
        assert isinstance(tree, DecoderConfig)
        dtype = real_dtype(options.dtype, tensors)
        return HookedTransformerConfig.from_tree(
            tree, dtype=dtype, device=str(options.device), init_weights=False, **facts
        )

    # ---- files -------------------------------------------------------------------------------------------------------

    def step(self) -> Step | None:
        """The step selected by `checkpoint_index` or `checkpoint_value`; None without either, for the final weights."""
        index, value = self.options.checkpoint_index, self.options.checkpoint_value
        if index is None and value is None:
            return None
        if index is not None and value is not None:
            raise ValueError("give checkpoint_index or checkpoint_value, not both")
        steps = self.steps()
        if not steps:
            raise ValueError(f"no checkpoints of {self.source.name!r}: it has no files {STEPS}*_<number>.pth")
        if index is not None:
            if not -len(steps) <= index < len(steps):
                raise IndexError(f"checkpoint_index {index} is out of range: there are {len(steps)}")
            return steps[index]
        found = next((step for step in steps if step.value == value), None)
        if found is None:
            near = sorted((step.value for step in steps), key=lambda label: abs(label - (value or 0)))[:2]
            raise ValueError(f"no checkpoint at {steps[0].label_type} {value}; the nearest are {near}")
        return found

    def steps(self) -> list[Step]:
        """The checkpoints of the training run, first to last."""
        named = [(re.search(r"_(\d+)$", Path(file).stem), file) for file in self._files() if file.startswith(STEPS)]
        labelled = sorted((int(match[1]), file) for match, file in named if match is not None)
        label_type = "token" if labelled and labelled[-1][0] > FROM_TOKENS else "step"
        return [Step(index, value, label_type, file) for index, (value, file) in enumerate(labelled)]

    def tensors(self, step: Step | None) -> Checkpoint:
        """The weights by their names in the file."""
        file = self.source.file(self._last() if step is None else step.file)
        return open_checkpoint(file, mmap=self.options.mmap)

    def tokenizer(self) -> Any:
        """The tokenizer in the directory, or the one that the config names; None if it names none."""
        found, name = tokenizer_in(self.folder, self.source.repository), self.names.get("tokenizer_name")
        if found is not None or not name:
            return found
        found = find(name, TOKENIZER_FILES, **{**self.options.download, "revision": None}).tokenizer()
        if found is None:
            raise ValueError(
                f"the tokenizer {name!r} of {self.source.name!r} was found neither in a directory nor on the hub: give one with "
                "tokenizer=..."
            )
        return found

    def _last(self) -> str:
        """The file of the final weights: the one whose name ends in "final", or the only one."""
        files = [file for file in self._files() if not file.startswith(STEPS)]
        final = [file for file in files if Path(file).stem.endswith("final")]
        found = [file for file in final if "/" not in file] or final or files
        if len(found) != 1:
            there = ", ".join(found) or "none"
            raise ValueError(f"{self.source.name!r} should have one file of weights, or one *final.pth; it has {there}")
        return found[0]

    def _files(self) -> list[str]:
        """The paths of all weight files."""
        return [file for file in self.source.files() if file.endswith(WEIGHTS)]


def find_tl(source: Source, options: Options) -> TLCheckpoint | None:
    """Returns the checkpoint if its config has flat names; None for other configs, and if there is none."""
    try:
        file = source.file("config.json")
    except ValueError:  # the hub did not give the file
        return None
    config = _flat_names(file)
    if config is None:
        return None
    check_keywords("from_pretrained", options.overrides, sorted(READ | SPELLINGS.keys()))
    with naming(str(file)):
        names = our_names(config) | our_names(options.overrides)
    return TLCheckpoint(source, file.parent, names, options)


def load_tl(checkpoint: TLCheckpoint, class_of: Callable[[Tree], type[Loaded]]) -> Loaded:
    """Returns the model of a checkpoint with unchanged weights. `class_of` maps a tree to a model class."""
    step = checkpoint.step()
    tensors = checkpoint.tensors(step)
    with naming(str(checkpoint.folder / "config.json")):
        cfg, whole = checkpoint.flat_config(tensors, step), checkpoint.whole_config()
    assert cfg.tree is not None
    model_class = class_of(cfg.tree)
    given = checkpoint.options.tokenizer
    tokenizer = checkpoint.tokenizer() if given is None else given
    beyond = tuple(f"blocks.{layer}." for layer in range(cfg.n_layers, whole.n_layers))
    with naming(str(checkpoint.folder / "config.json")):
        sketch = unfilled(model_class, replace(cfg, device="meta"), tokenizer)
    with naming(tensors.where):
        weights = in_public_names(tensors, whole)
        check_layers_alike(weights, whole)
        weights = {name: weight for name, weight in weights.items() if not name.startswith(beyond)}
        check_state(sketch, weights)  # before memory is taken for sizes that are wrong
    model = model_class(cfg, tokenizer=tokenizer)
    load_state(model, weights)
    if checkpoint.options.placement is not None:
        plan = checkpoint.options.placement.plan(model)
        for name, weight in model.named_parameters():
            if plan.is_on_disk(name):
                weight.data = in_file(weight.data)
        place(model, plan)
    return model


def _is_true(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"shortformer_pos must be true or false, got {value!r}")
    return value


def _flat_names(file: Path) -> dict[str, Any] | None:
    """Returns a config with flat names; None for any other file, which the HF loader then checks."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_flat = isinstance(config, dict) and "model_type" not in config and {"n_layers", "d_model"} <= config.keys()
    return config if is_flat else None


def our_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns config fields by the names of `HookedTransformerConfig`, without fields about training.

    >>> our_names(
    ...     {"n_layers": 2, "normalization": "LNPre", "shortformer_pos": True, "lr": 0.001}
    ... )
    {'n_layers': 2, 'normalization_type': 'LNPre', 'positional_embedding_type': 'shortformer'}
    """
    names = {name: value for name, value in config.items() if name in READ and value is not None}
    if "normalization_type" in config:  # None means that there are no norms
        names["normalization_type"] = config["normalization_type"]
    for spelling, meaning in SPELLINGS.items():
        if spelling in config:
            names |= meaning(config[spelling])
    return names
