"""Checkpoints of TransformerLens itself: a `config.json` of flat names, and a file of weights in the public names.

They are told from others by their config, which has sizes in flat names and no `model_type`. What else stands in it, of the
training, is passed over. The weights are a file `*final.pth`, or the only one; those of the training run lie in the folder
`checkpoints`, each with its step, or its count of tokens, at the end of its name.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hooked_lm.hub.model_classes import kind_of
from hooked_lm.hub.options import real_dtype, with_limits
from hooked_lm.hub.plausible import check_values
from hooked_lm.hub.source import (
    DOWNLOAD_OPTIONS,
    TOKENIZER_FILES,
    Source,
    check_no_code,
    find_tokenizer,
    local_folder,
    repository,
    spelled,
)
from hooked_lm.hub.tl_weights import in_public_names
from hooked_lm.models.config.decoder import ELSEWHERE, DecoderConfig, HookedTransformerConfig
from hooked_lm.models.weights.state import load_state
from hooked_lm.weights import open_checkpoint

NEEDED = ("n_layers", "d_model", "n_ctx", "d_vocab", "normalization_type")
# Fields of a config that say how a model was run or trained, and not what it is.
ABOUT_A_RUN = {
    *("model_name", "trust_remote_code", "device", "n_devices", "dtype", "seed", "n_params", "processed", "tree"),
    *("init_mode", "init_weights", "initializer_range", "tokenizer_prepends_bos", "ungroup_grouped_query_attention"),
    *("from_checkpoint", "checkpoint_index", "checkpoint_label_type", "checkpoint_value"),
    *("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in", "use_attn_in", "use_hook_tokens", "fused_attention"),
}
READ = {field.name for field in fields(HookedTransformerConfig)} - ABOUT_A_RUN | ELSEWHERE.keys()
# Other spellings, and what they mean by our names.
SPELLINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "normalization": lambda value: {"normalization_type": value},
    "ln_eps": lambda value: {"eps": value},
    "architecture": lambda value: {"original_architecture": value},
    "shortformer_pos": lambda value: {"positional_embedding_type": "shortformer"} if value else {},
}
WEIGHTS = (".pth", ".safetensors")
STEPS = "checkpoints/"
FROM_TOKENS = 10**9  # a label that is larger counts tokens, not steps


@dataclass(frozen=True)
class Step:
    """One checkpoint of a training run: its place in the run, its label, and its file."""

    index: int
    value: int
    label_type: str
    file: str


@dataclass(frozen=True)
class FlatSource:
    """A directory of that kind, or a repository of the hub of which the config is in the cache."""

    name: str
    folder: Path
    is_local: bool
    revision: str | None
    local_files_only: bool
    options: dict[str, Any]  # for the hub
    names: dict[str, Any]  # what the config says of the model

    def config(
        self,
        step: Step | None = None,
        dtype: torch.dtype | str = torch.float32,
        device: Any = "cpu",
        first_n_layers: int | None = None,
        n_ctx: int | None = None,
        default_prepend_bos: bool | None = None,
        default_padding_side: str | None = None,
    ) -> HookedTransformerConfig:
        """The flat config of the model; ValueError for sizes that are missing or contradict each other."""
        if missing := [name for name in NEEDED if name not in self.names]:
            raise ValueError(f"the config of {self.name!r} does not say {', '.join(missing)}")
        check_values(self.names, f"the config of {self.name!r}")
        whole = HookedTransformerConfig.from_dict({**self.names, "init_weights": False, "device": "meta"})
        whole.check_tree()
        assert whole.tree is not None
        facts: dict[str, Any] = {
            "model_name": Path(self.name).name,
            "original_architecture": whole.original_architecture or "neel",
            "tokenizer_name": whole.tokenizer_name,
            "default_prepend_bos": whole.default_prepend_bos if default_prepend_bos is None else default_prepend_bos,
            "default_padding_side": default_padding_side or whole.default_padding_side,
            "from_checkpoint": step is not None,
            "eos_token_id": whole.eos_token_id,
        }
        if step is not None:
            labels = {"index": step.index, "value": step.value, "label_type": step.label_type}
            facts |= {f"checkpoint_{name}": value for name, value in labels.items()}
        tree = with_limits(whole.tree, first_n_layers, n_ctx)
        assert isinstance(tree, DecoderConfig)
        return HookedTransformerConfig.from_tree(
            tree, dtype=real_dtype(dtype, {}), device=str(device), init_weights=False, **facts
        )

    # ---- files -------------------------------------------------------------------------------------------------------

    def step(self, index: int | None, value: int | None) -> Step | None:
        """The checkpoint that `checkpoint_index` or `checkpoint_value` means; None for the last weights."""
        if index is None and value is None:
            return None
        if index is not None and value is not None:
            raise ValueError("give one of checkpoint_index and checkpoint_value, not two of them")
        steps = self.steps()
        if not steps:
            raise ValueError(f"no checkpoints of {self.name!r}: it has no files {STEPS}*_<number>.pth")
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

    def tensors(self, step: Step | None, mmap: bool) -> Mapping[str, Tensor]:
        """The weights under the names in the file."""
        return open_checkpoint(self._path(self._last() if step is None else step.file), mmap=mmap)

    def _last(self) -> str:
        """The file of the trained model: the one whose name ends in "final", or the only one."""
        files = [file for file in self._files() if not file.startswith(STEPS)]
        final = [file for file in files if Path(file).stem.endswith("final")]
        found = [file for file in final if "/" not in file] or final or files
        if len(found) != 1:
            there = ", ".join(found) or "none"
            raise ValueError(f"{self.name!r} should have one file of weights, or one *final.pth; it has {there}")
        return found[0]

    def _files(self) -> list[str]:
        """The paths of all weights in the repository."""
        here = (path for path in self.folder.rglob("*") if path.suffix in WEIGHTS)
        files = sorted(path.relative_to(self.folder).as_posix() for path in here)
        if self.is_local or self.local_files_only:
            return files
        from huggingface_hub import HfApi

        try:
            listed = HfApi(token=self.options.get("token")).list_repo_files(self.name, revision=self.revision)
        except Exception as error:  # what a dead line raises, depends on the library below
            if files:
                return files
            raise ValueError(f"the hub did not list the files of {self.name!r}: {error}") from error
        return [file for file in listed if file.endswith(WEIGHTS)]

    def _path(self, file: str) -> Path:
        return self.folder / file if self.is_local else _fetched(self, file)


def _fetched(source: FlatSource, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    options = {"revision": source.revision, "local_files_only": source.local_files_only, **source.options}
    try:
        return Path(hf_hub_download(source.name, file, **options))
    except (OSError, ValueError) as error:
        raise ValueError(f"the hub did not give {file} of {source.name!r}: {error}") from error


def find_flat(
    model_name: str | os.PathLike[str], revision: str | None, local_files_only: bool, hf_kwargs: Mapping[str, Any]
) -> FlatSource | None:
    """What a name or directory means, if its config is of this kind; None if it is of another, or not there at all."""
    check_no_code(hf_kwargs)
    options = {name: hf_kwargs[name] for name in DOWNLOAD_OPTIONS if name in hf_kwargs}
    folder, name = local_folder(model_name), spelled(model_name)
    is_local = folder is not None
    if folder is None:
        from huggingface_hub import hf_hub_download

        name = repository(name, revision, options, ("*",))
        try:
            there = {"revision": revision, "local_files_only": local_files_only, **options}
            folder = Path(hf_hub_download(name, "config.json", **there)).parent
        except (OSError, ValueError):
            return None
    config = _json(folder / "config.json")
    if config is None:
        return None
    overrides = {key: value for key, value in hf_kwargs.items() if key not in (*DOWNLOAD_OPTIONS, "trust_remote_code")}
    if unknown := overrides.keys() - READ - SPELLINGS.keys():
        raise ValueError(f"unknown options {', '.join(sorted(unknown))}: neither ours nor fields of a flat config")
    names = our_names(config) | our_names(overrides)
    return FlatSource(name, folder, is_local, revision, local_files_only, options, names)


def _json(file: Path) -> dict[str, Any] | None:
    """A config in flat names; None for every other file."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # whoever reads it next says what is wrong
        return None
    is_flat = isinstance(config, dict) and "model_type" not in config and {"n_layers", "d_model"} <= config.keys()
    return config if is_flat else None


def our_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config in flat names says of a model, in the names of `HookedTransformerConfig`.

    >>> our_names({"n_layers": 2, "normalization": "LNPre", "shortformer_pos": True, "lr": 0.001})
    {'n_layers': 2, 'normalization_type': 'LNPre', 'positional_embedding_type': 'shortformer'}
    """
    names = {name: value for name, value in config.items() if name in READ and value is not None}
    if "normalization_type" in config:  # None means that there are no norms
        names["normalization_type"] = config["normalization_type"]
    for spelling, meaning in SPELLINGS.items():
        if spelling in config:
            names |= meaning(config[spelling])
    return names


def flat_model(
    source: FlatSource,
    step: Step | None,
    cls: type | None,
    dtype: torch.dtype | str,
    tokenizer: Any,
    mmap: bool,
    *asked: Any,
) -> Any:
    """The model of a checkpoint, with its weights as they are; what is `asked` besides goes to `source.config`."""
    tensors = source.tensors(step, mmap)
    cfg = source.config(step, real_dtype(dtype, tensors), *asked)
    assert cfg.tree is not None
    kind = kind_of(cfg.tree, cls, source.name)
    weights = in_public_names(tensors, source.config())
    beyond = {f"blocks.{layer}" for layer in range(cfg.n_layers, source.names["n_layers"])}
    weights = {name: weight for name, weight in weights.items() if ".".join(name.split(".")[:2]) not in beyond}
    model = kind.model(cfg, tokenizer=_tokenizer(source) if tokenizer is None else tokenizer)
    load_state(model, weights)
    return model


def _tokenizer(source: FlatSource) -> Any:
    """The tokenizer that lies beside the weights, or the one that the config names; None if it names none."""
    beside = Source(source.name, source.folder, None, None)
    found = find_tokenizer(beside, None, source.local_files_only, source.options)
    name = source.names.get("tokenizer_name")
    if found is not None or not name:
        return found
    known = spelled(name) if local_folder(name) else repository(name, None, source.options, TOKENIZER_FILES)
    found = find_tokenizer(Source(known, None, None, None), None, source.local_files_only, source.options)
    if found is None:
        raise ValueError(
            f"{source.name!r} reads text with the tokenizer {name!r}, which is no directory here and which the hub did not "
            "give: give one with tokenizer=..."
        )
    return found
