"""Finds and reads checkpoints in the format of transformers: directories, hub repositories, and model objects."""

import copy
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hooked_lm.families import DUAL_ENCODERS, VISION_ENCODERS, VISION_LANGUAGES, family, is_supported
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.files import OF_DAMAGE
from hooked_lm.hub import composite, composite_tower
from hooked_lm.hub.config_checks import check_counts, check_kinds, check_layers, check_values
from hooked_lm.hub.names import checkpoint_step, hub_id
from hooked_lm.hub.options import NOT_QUANTIZED, Options, real_dtype, with_limits
from hooked_lm.hub.processor import processor_in
from hooked_lm.hub.quantized import Dequantized, Quantization, quantization
from hooked_lm.hub.renamed import recut, rename_tensors
from hooked_lm.hub.source import Repository, Source, has_tokenizer, tokenizer_in
from hooked_lm.keywords import check_keywords
from hooked_lm.models.config.flat_config import FlatConfig
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.tree import DecoderConfig, VisionConfig, VisionLanguageConfig
from hooked_lm.weights import open_checkpoint
from hooked_lm.weights.loading import shape_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

GENERATION_FACTS = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id")


@dataclass(frozen=True)
class HFCheckpoint:
    """A checkpoint with its HF config and its family. `name` is what errors call the config.

    `open_weights` returns the weights by the names in the file, `find_tokenizer` the tokenizer or None, `find_processor`
    the processor of images, or None and why. `architectures` are
    the transformers classes of the weights, `generation` is the generation config, and `labels` are fields of the flat config
    that neither config has. Of a composite checkpoint, `config` and `family` are those of its language model, or of its vision
    tower, and `whole` is the config of the composite. `quantization` says how the file stores weights that `open_weights`
    dequantises.
    """

    name: str
    config: "PreTrainedConfig"
    family: ModuleType
    architectures: list[str]
    generation: dict[str, Any]
    labels: dict[str, Any]
    open_weights: Callable[[], Mapping[str, Tensor]]
    find_tokenizer: Callable[[], Any]
    find_processor: Callable[[], tuple[Any, str | None]]
    options: Options
    whole: "PreTrainedConfig | None" = None
    quantization: Quantization | None = None

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        """The weights by the names in the file."""
        return self.open_weights()

    @property
    def reader_of_all(self) -> str | None:
        """The model class that reads all of a composite whose language model is read alone; None if there is none."""
        model_type = (self.whole or self.config).model_type
        return next((name for name in VISION_LANGUAGES.values() if is_supported(model_type, name)), None)

    @property
    def whole_type(self) -> str | None:
        """The model type of a composite, whether all of it is read or its language model alone; None for any other model."""
        is_whole = self.whole is None and self.options.reads_images in VISION_LANGUAGES.values()
        return self.config.model_type if is_whole else self.whole and self.whole.model_type

    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by current transformers names."""
        text_names = getattr(self.family, "text_names", None)
        if self.whole is not None and self.options.reads_images is not None:
            return composite_tower.tower(self.weights, self.family, read_config(self.family, self.config))
        if self.whole is not None or text_names is not None:
            tree = self._fitted(read_config(self.family, self.config), self.weights)
            names = text_names(HFConfig(self.config.to_dict(), {})) if text_names else {}
            return composite.language_model(self.weights, self.family, tree, names)
        weights = rename_tensors(self.weights, getattr(self.family, "RENAMED", {}))
        if not hasattr(self.family, "cuts"):
            return weights
        tree = read_config(self.family, self.config)
        return recut(weights, self.family.cuts(tree, {name: shape_of(weights, name) for name in weights}))

    def tree(self, tensors: Mapping[str, Tensor]) -> Tree:
        """The config tree; the tensor names show which heads the checkpoint has."""
        tree = read_config(self.family, self.config, self.architectures, tensors)
        if tensors:
            check_layers(self.family, tree, tensors)
        if isinstance(tree, VisionLanguageConfig) or (self.whole is not None and isinstance(tree, DecoderConfig)):
            tree = composite.adjusted_to_tensors(tree, self.family, tensors)
        if isinstance(tree, VisionLanguageConfig) or (self.whole is not None and isinstance(tree, VisionConfig)):
            tree = composite_tower.adjusted_to_tensors(tree, self.family, tensors)
        return self._fitted(tree, tensors)

    def _fitted(self, tree: Tree, tensors: Mapping[str, Tensor]) -> Tree:
        """The tree after what the family corrects according to the tensors."""
        return self.family.adjusted_to_tensors(tree, tensors) if hasattr(self.family, "adjusted_to_tensors") else tree

    def flat_config(
        self,
        flat_class: type[FlatConfig],
        tree: Tree,
        tensors: Mapping[str, Tensor],
        device: torch.device | str = "meta",
    ) -> Any:
        """The flat config of the model, limited to the options' `first_n_layers` and `n_ctx`."""
        return flat_class.from_tree(
            with_limits(tree, self.options),
            dtype=real_dtype(self.options.dtype, tensors),
            device=str(device),
            init_weights=False,
            **self._facts(),
            **({"left_out": tensors.left_out} if isinstance(tensors, composite.CompositePart) else {}),
            **self._generation_facts({field.name for field in fields(flat_class)}),
        )

    def _facts(self) -> dict[str, Any]:
        """The fields of the flat config that are not in the tree; unknown ones keep their defaults."""
        prepends, packed = self.options.default_prepend_bos, self.quantization
        facts = {
            **self.labels,
            "dequantized_from": packed.name if packed else getattr(self.config, "dequantized_from", None),
            "kept_quantized": packed is not None and self.options.quantize is not None,
            "original_architecture": next(iter(self.architectures), self.config.model_type),
            "default_prepend_bos": getattr(self.family, "PREPENDS_BOS", True) if prepends is None else prepends,
            "default_padding_side": self.options.default_padding_side,
            "initializer_range": getattr(self.config, "initializer_range", None),
        }
        return {name: value for name, value in facts.items() if value is not None}

    def _generation_facts(self, known: Collection[str]) -> dict[str, Any]:
        """Special tokens from the checkpoint's configs; single tokens in `bad_words_ids` are suppressed.

        As in transformers, a decoder without a start token of its own starts with that of texts.
        """
        given = {**self.config.to_dict(), **self.generation}
        if given.get("decoder_start_token_id") is None:
            given["decoder_start_token_id"] = given.get("bos_token_id")
        facts = {name: given[name] for name in GENERATION_FACTS if given.get(name) is not None}
        if banned := given.get("bad_words_ids"):
            facts["suppress_tokens"] = tuple(ids[0] for ids in banned if len(ids) == 1)
        return {name: value for name, value in facts.items() if name in known}


def from_source(source: Source, options: Options, weights: bool = True) -> HFCheckpoint:
    """The checkpoint in a directory or a repository; without `weights` only configs and tokenizers are downloaded."""
    step, revision = checkpoint_step(source.name, options)
    folder = source.at(revision).folder(weights)
    written = _hf_config(folder, options.overrides)
    packed = _quantization(written, str(folder / "config.json"))
    config, module, whole = _parts(written, options)
    if packed is not None and options.dtype == "auto":  # that of the weights before they were quantised
        options = replace(options, dtype=config.dtype or written.dtype or torch.bfloat16)
    if whole is not None and options.overrides:
        raise ValueError(
            f"{', '.join(options.overrides)} cannot be given for a {whole.model_type}: the fields of its language model are in "
            "a config of their own; change its config.json"
        )
    generation = folder / "generation_config.json"
    has_name = isinstance(source, Repository) or has_tokenizer(folder)
    return HFCheckpoint(
        str(folder / "config.json"),
        config,
        module,
        architectures=list((whole or config).architectures or []),
        generation=_read_generation(generation) if generation.is_file() else {},
        labels=_labels(source.name, has_name, step, options),
        open_weights=partial(_stored_weights, folder, options, packed),
        find_tokenizer=partial(tokenizer_in, folder, source.repository),
        find_processor=partial(processor_in, folder),
        options=options,
        whole=whole,
        quantization=packed,
    )


def _stored_weights(folder: Path, options: Options, packed: Quantization | None) -> Mapping[str, Tensor]:
    """The weights of a folder by the names in its files; quantised ones as ordinary weights."""
    tensors = open_checkpoint(folder, mmap=options.mmap)
    if packed is None:
        return tensors
    dtype, keep = real_dtype(options.dtype, {}), options.quantize is not None
    return Dequantized(tensors, packed.formats, dtype, packed.unused, keep)


def _quantization(config: "PreTrainedConfig", name: str) -> Quantization | None:
    """How a config, or that of a part, says that weights are quantised. This is taken out of it: the loaded weights are not.

    Raises ValueError for what is not understood.
    """
    parts = [part for part in vars(config).values() if hasattr(part, "model_type")]
    found = [vars(part).pop("quantization_config", None) for part in (config, *parts)]
    options = next((each for each in found if each), None)
    if options is None:
        return None
    try:
        return quantization(options)
    except OF_DAMAGE as error:
        raise ValueError(f"quantization_config in {name}: {error}; {NOT_QUANTIZED}") from error


def from_model(source: Source, options: Options) -> HFCheckpoint:
    """The weights of the options' `hf_model`, with the tokenizer of `source`."""
    check_model(options.hf_model)
    step, revision = checkpoint_step(source.name, options)
    if options.overrides:
        raise ValueError(f"{', '.join(options.overrides)} cannot be given with hf_model: it has a config already")
    hf_model = _merged(options.hf_model)
    generation = getattr(hf_model, "generation_config", None)
    config, module, whole = _parts(hf_model.config, options)
    return HFCheckpoint(
        f"the config of hf_model, a {type(hf_model).__name__}",
        config,
        module,
        architectures=[type(hf_model).__name__],
        generation={} if generation is None else {k: v for k, v in generation.to_dict().items() if v is not None},
        labels=_labels(hub_id(source.name), True, step, options),
        open_weights=partial(_saved_weights, hf_model),
        find_tokenizer=source.at(revision).tokenizer,
        find_processor=source.at(revision).processor,
        options=options,
        whole=whole,
    )


def check_model(hf_model: object) -> None:
    """Raises TypeError for an object that is not a model of transformers, whose config says which family it is of."""
    from transformers import PreTrainedConfig

    if not isinstance(hf_model, nn.Module) or not isinstance(getattr(hf_model, "config", None), PreTrainedConfig):
        raise TypeError(f"hf_model must be a model of transformers, with its config, got {type(hf_model).__name__}")


def _labels(name: str, has_tokenizer: bool, step: int | None, options: Options) -> dict[str, Any]:
    return {
        "model_name": name.rpartition("/")[2],
        "tokenizer_name": name if has_tokenizer else None,
        "from_checkpoint": step is not None,
        "checkpoint_index": options.checkpoint_index,
        "checkpoint_value": step,
        "checkpoint_label_type": None if step is None else "step",
    }


def _saved_weights(hf_model: "PreTrainedModel") -> Mapping[str, Tensor]:
    """The weights of a transformers model by the names that it saves them under.

    Raises ValueError for an RWKV whose weights a run in evaluation mode has divided by powers of two.
    """
    from transformers.core_model_loading import revert_weight_conversion

    rescaled = any(getattr(module, "layers_are_rescaled", False) for module in hf_model.modules())
    if rescaled and 0 < hf_model.config.rescale_every < hf_model.config.num_hidden_layers:
        raise ValueError(
            "transformers divided the weights of hf_model in a run (rescale_every): load it before the run, or run it once in "
            "training mode"
        )
    return revert_weight_conversion(hf_model, hf_model.state_dict())


def read_json(file: Path) -> dict[str, Any]:
    """The fields of a `config.json`. Raises ValueError for a file that is not a JSON object."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{file} is not a model's config: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{file} is not a model's config: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a model's config: it holds a {type(config).__name__}")
    return config


def _read_generation(file: Path) -> dict[str, Any]:
    """The fields of a `generation_config.json`. Raises ValueError for special tokens that are no ids."""
    written = read_json(file)
    for name in GENERATION_FACTS:
        value = written.get(name)
        ids = value if isinstance(value, list) and name == "eos_token_id" else [] if value is None else [value]
        if any(type(id) is not int for id in ids):
            raise ValueError(f"{name}={value!r} in {file} must be the id of a token")
    banned = written.get("bad_words_ids") or []
    if not isinstance(banned, list) or any(
        not isinstance(ids, list) or any(type(i) is not int for i in ids) for ids in banned
    ):
        raise ValueError(f"bad_words_ids={banned!r} in {file} must be lists of ids of tokens, such as [[4], [7, 9]]")
    return written


def _parts(
    config: "PreTrainedConfig", options: Options
) -> "tuple[PreTrainedConfig, ModuleType, PreTrainedConfig | None]":
    """The config of the model to load and its family; the whole config if the model is part of a composite, else None."""
    if options.reads_images is not None:
        reads_all = is_supported(config.model_type, options.reads_images)
        wants_tower = not reads_all and options.reads_images in VISION_ENCODERS.values()
        if wants_tower and (vision := composite_tower.vision_config(config)) is not None:
            return vision, composite_tower.tower_family(config, vision), config
        return config, family(config.model_type, options.reads_images), None
    if is_supported(config.model_type):
        return config, family(config.model_type), None
    if is_supported(config.model_type, *DUAL_ENCODERS.values()):
        return config, family(config.model_type, *DUAL_ENCODERS.values()), None
    if (text := composite.text_config(config)) is not None:
        return text, composite.text_family(config, text), config
    if is_supported(config.model_type, *VISION_ENCODERS.values()):
        return config, family(config.model_type, *VISION_ENCODERS.values()), None
    return config, family(config.model_type), None


def _written(file: Path) -> dict[str, Any]:
    """The fields of a checkpoint's `config.json`. Raises ValueError if there is none, or if it names no model type."""
    if not file.is_file():
        if (file.parent / "hooked_lm.json").is_file():
            raise ValueError(
                f"{file.parent} holds a model that model.save wrote, and none in HF format: from_pretrained and load read it, "
                "model.verify() checks it"
            )
        interrupted = (
            "; model.save writes it last: was it interrupted?" if (file.parent / "model.safetensors").is_file() else ""
        )
        raise ValueError(
            f"no config.json in {file.parent}, so it is no model in HF format, and no hooked_lm.json, which model.save "
            f"writes{interrupted}"
        )
    written = read_json(file)
    model_type = written.get("model_type")
    if model_type is None:
        raise ValueError(f"{file} names no model_type: it is not the config of a transformers model")
    if not isinstance(model_type, str):
        raise ValueError(f"model_type={model_type!r} in {file} must be the name of an architecture")
    classes = written.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(each, str) for each in classes)):
        raise ValueError(f"architectures={classes!r} in {file} must be a list of names of classes")
    return written


def _hf_config(folder: Path, overrides: Mapping[str, Any]) -> Any:
    """The HF config of a directory. ValueError for unknown model types and invalid configs, TypeError for unknown options."""
    file = folder / "config.json"
    written = _written(file)
    model_type = written["model_type"]
    if is_supported(model_type):  # a composite's language model is checked when it is known
        check_values({**written, **overrides}, str(file))
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type not in CONFIG_MAPPING:
        family(model_type)  # which refuses it, or registers its config class with transformers
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{file} is the config of a {model_type}, which transformers {version('transformers')} does not have: upgrade it. "
            "A family of another package registers its config class (transformers.AutoConfig.register)"
        )
    try:
        config, unused = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True, return_unused_kwargs=True, **overrides
        )
    except Exception as error:  # each config class raises errors of other kinds
        raise ValueError(f"{file} is not the config of a {model_type}: {error}") from error
    check_keywords("from_pretrained", unused, [name for name in config.to_dict() if name not in unused])
    return config


def _merged(hf_model: "PreTrainedModel | PeftModel") -> "PreTrainedModel":
    """The HF model; for a PEFT model, a copy with the adapters merged into the weights."""
    if not hasattr(hf_model, "peft_config"):
        return hf_model
    if not hasattr(hf_model, "merge_and_unload"):
        raise ValueError(f"the adapters of this {type(hf_model).__name__} cannot be merged into its weights")
    return copy.deepcopy(hf_model).merge_and_unload()


def read_config(
    module: ModuleType,
    config: "PreTrainedConfig",
    architectures: Sequence[str] = (),
    tensors: Collection[str] = (),
) -> Tree:
    """The tree of an HF config; the transformers class and the tensor names determine an encoder's heads.

    Raises ValueError for fields that differ from their default and that the family does not read.
    """
    values = config.to_dict() | {"architectures": list(architectures)}
    inner = {tensor.removeprefix(module.PREFIX) for tensor in tensors}
    defaults, name = _defaults(config), f"this {config.model_type} config"
    check_values(values, name)
    check_kinds(values, defaults, name)
    check_counts(values, lambda fields: module.config(HFConfig(fields, defaults, inner)), name)
    hf = HFConfig(values, defaults, inner)
    tree = module.config(hf)
    if unread := hf.unread(getattr(module, "NO_EFFECT", ())):
        raise ValueError(
            f"fields of this {config.model_type} config that would change the model and that are not supported: "
            + ", ".join(f"{field}={value!r}" for field, value in unread.items())
            + (f"; {NOT_QUANTIZED}" if "quantization_config" in unread else "")
        )
    return tree


def _defaults(config: "PreTrainedConfig") -> dict[str, Any]:
    """The default of each field; in a config of a part, those of the kind that the part has."""
    from transformers import PreTrainedConfig

    parts = {name: _defaults(part) for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    return type(config)().to_dict() | parts
