"""Finds and reads checkpoints in the format of transformers: directories, hub repositories, and model objects."""

import copy
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from hooked_lm.families import family
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.hub.config_checks import check_kinds, check_layers, check_values
from hooked_lm.hub.files import download, has_tokenizer, read_json, repository, tokenizer_in, tokenizer_of
from hooked_lm.hub.names import checkpoint_step, hub_id
from hooked_lm.hub.options import Options, Tree, real_dtype, with_limits
from hooked_lm.weights import open_checkpoint

WEIGHT_FILES = ("model*.safetensors", "pytorch_model*.bin")
GENERATION_FACTS = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id")


@dataclass(frozen=True)
class HFCheckpoint:
    """A directory or an HF model object, with its HF config and family; `step` is the training step, if one was chosen."""

    name: str
    folder: Path | None
    hf_model: Any
    config: Any
    family: ModuleType
    step: int | None
    options: Options

    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by current transformers names."""
        return in_present_names(self._tensors_on_disk(), getattr(self.family, "RENAMED", {}))

    def _tensors_on_disk(self) -> Mapping[str, Tensor]:
        if self.hf_model is None:
            assert self.folder is not None
            return open_checkpoint(self.folder, mmap=self.options.mmap)
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self.hf_model, self.hf_model.state_dict())

    def tree(self, tensors: Mapping[str, Tensor]) -> Tree:
        """The config tree; the tensor names show which heads the checkpoint has."""
        tree = read_config(self.family, self.config, self.architectures(), tensors)
        if tensors:
            check_layers(self.family, tree, tensors)
        return self.family.fitted(tree, tensors) if hasattr(self.family, "fitted") else tree

    def architectures(self) -> list[str]:
        """The names of the transformers classes of the weights, as in the config."""
        if self.hf_model is not None:
            return [type(self.hf_model).__name__]
        return list(self.config.architectures or [])

    def tokenizer(self) -> Any:
        """The tokenizer in the directory, or that of an HF model's name; None if there is none."""
        if self.folder is not None:
            return tokenizer_in(self.folder)
        return tokenizer_of(replace(self.options, model_name=self.name))

    def flat_config(self, flat_class: Any, tree: Tree, tensors: Mapping[str, Tensor], device: Any = "meta") -> Any:
        """The flat config of the model, limited to the options' `first_n_layers` and `n_ctx`."""
        return flat_class.from_tree(
            with_limits(tree, self.options),
            dtype=real_dtype(self.options.dtype, tensors),
            device=str(device),
            init_weights=False,
            **self._facts(),
            **self._generation_facts({field.name for field in fields(flat_class)}),
        )

    def _facts(self) -> dict[str, Any]:
        """The fields of the flat config that are not in the tree; unknown ones keep their defaults."""
        options, family_prepends = self.options, getattr(self.family, "PREPENDS_BOS", True)
        local = options.folder if self.hf_model is None else None
        facts = {
            "model_name": self.name.rpartition("/")[2],
            "original_architecture": next(iter(self.architectures()), self.config.model_type),
            "tokenizer_name": self.name if local is None or has_tokenizer(local) else None,
            "from_checkpoint": self.step is not None,
            "checkpoint_index": options.checkpoint_index,
            "checkpoint_value": self.step,
            "checkpoint_label_type": None if self.step is None else "step",
            "default_prepend_bos": family_prepends
            if options.default_prepend_bos is None
            else options.default_prepend_bos,
            "default_padding_side": options.default_padding_side,
            "initializer_range": getattr(self.config, "initializer_range", None),
        }
        return {name: value for name, value in facts.items() if value is not None}

    def _generation_facts(self, known: Collection[str]) -> dict[str, Any]:
        """Special tokens from the checkpoint's configs; single tokens in `bad_words_ids` are suppressed."""
        given = {**self.config.to_dict(), **self._generation_config()}
        facts = {name: given[name] for name in GENERATION_FACTS if given.get(name) is not None}
        if banned := given.get("bad_words_ids"):
            facts["suppress_tokens"] = tuple(ids[0] for ids in banned if len(ids) == 1)
        return {name: value for name, value in facts.items() if name in known}

    def _generation_config(self) -> dict[str, Any]:
        if self.hf_model is not None:
            config = getattr(self.hf_model, "generation_config", None)
            return {} if config is None else {k: v for k, v in config.to_dict().items() if v is not None}
        file = (self.folder or Path()) / "generation_config.json"
        return read_json(file) if file.is_file() else {}


def find_hf(options: Options, weights: bool = True) -> HFCheckpoint:
    """The checkpoint that the options specify; without `weights` only configs and tokenizers are downloaded."""
    asked = (options.checkpoint_index, options.checkpoint_value, options.revision)
    step, revision = checkpoint_step(options.name, *asked)
    options, name, folder = replace(options, revision=revision), options.name, options.folder
    if options.hf_model is not None:
        if options.overrides:
            raise ValueError(
                f"{', '.join(options.overrides)} cannot be given beside hf_model: it brings its own config"
            )
        hf_model = _merged(options.hf_model)
        module = family(hf_model.config.model_type)
        return HFCheckpoint(hub_id(name), None, hf_model, hf_model.config, module, step, options)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{name!r} is no directory here")
    if folder is None:
        name = repository(options, WEIGHT_FILES if weights else ("*",))
        folder = download(name, options, weights)
    config, module = _hf_config(folder, options.overrides)
    return HFCheckpoint(name, folder, None, config, module, step, options)


def _hf_config(folder: Path, overrides: Mapping[str, Any]) -> tuple[Any, ModuleType]:
    """The HF config of a directory, and its family. Raises ValueError for unsupported families and invalid configs."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"no config.json in {folder}: not a model in HF format")
    written = read_json(file)
    model_type = written.get("model_type")
    if model_type is None:
        raise ValueError(f"{file} names no model_type: it is not the config of a transformers model")
    module = family(str(model_type))
    check_values({**written, **overrides}, str(file))
    from transformers import AutoConfig

    try:
        config, unused = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, return_unused_kwargs=True, **overrides
        )
    except Exception as error:  # each config class raises errors of other kinds
        raise ValueError(f"{file} is not the config of a {model_type}: {error}") from error
    if unused:
        raise ValueError(f"unknown options {', '.join(unused)}: neither ours nor fields of a {model_type} config")
    return config, module


def _merged(hf_model: Any) -> Any:
    """The HF model; for a PEFT model, a copy with the adapters merged into the weights."""
    if not hasattr(hf_model, "peft_config"):
        return hf_model
    if not hasattr(hf_model, "merge_and_unload"):
        raise ValueError(f"the adapters of this {type(hf_model).__name__} cannot be merged into its weights")
    return copy.deepcopy(hf_model).merge_and_unload()


def read_config(
    module: ModuleType, config: Any, architectures: Sequence[str] = (), tensors: Collection[str] = ()
) -> Tree:
    """The tree of an HF config; the transformers class and the tensor names determine an encoder's heads.

    Raises ValueError for fields that differ from their default and that the family does not read.
    """
    values, names = config.to_dict() | {"architectures": list(architectures)}, set(tensors)
    defaults, name = type(config)().to_dict(), f"this {config.model_type} config"
    check_values(values, name)
    check_kinds(values, defaults, name)
    hf = HFConfig(values, defaults, {name.removeprefix(module.PREFIX) for name in names})
    tree = module.config(hf)
    if unread := hf.unread(getattr(module, "NO_EFFECT", ())):
        raise ValueError(
            f"fields of this {config.model_type} config that would change the model and that are not supported: "
            + ", ".join(f"{field}={value!r}" for field, value in unread.items())
        )
    return tree


class _Renamed(Mapping[str, Tensor]):
    """Tensors under other names."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def in_present_names(tensors: Mapping[str, Tensor], renamed: Mapping[str, str]) -> Mapping[str, Tensor]:
    """Tensors by current names; `renamed` maps regular expressions of old names to their replacements."""

    def today(name: str) -> str:
        for old, new in renamed.items():
            name = re.sub(old, new, name)
        return name

    names = {today(name): name for name in tensors}
    return tensors if all(new == old for new, old in names.items()) else _Renamed(tensors, names)
