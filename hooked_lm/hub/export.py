"""Converts models to the format of transformers."""

import copy
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from hooked_lm.extras import quiet_torchao
from hooked_lm.families import DUAL_ENCODERS, VISION_ENCODERS, VISION_LANGUAGES, family
from hooked_lm.hub.composite import described
from hooked_lm.hub.hf_checkpoint import read_config
from hooked_lm.hub.hf_load import concrete_rows
from hooked_lm.hub.model_classes import Model, kept_part
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.tree import (
    DecoderConfig,
    DualEncoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    VisionConfig,
    VisionLanguageConfig,
)
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.encoder import Encoder
from hooked_lm.models.encoder_decoder import EncoderDecoder
from hooked_lm.models.vision.encoder import VisionEncoder
from hooked_lm.models.vision.vision_language import VisionLanguage
from hooked_lm.models.weights.quantize import refuse_quantized
from hooked_lm.weights import plan_export, slots, write_safetensors
from hooked_lm.weights.rows import unprefixed
from hooked_lm.weights.write import Planned

if TYPE_CHECKING:
    from transformers import AutoModel, PreTrainedConfig


@quiet_torchao()
def to_hf(model: Model) -> Any:
    """Returns a transformers model with copies of these weights, bit for bit.

    Raises ValueError for a model with processed (e.g. folded) weights, and for one not loaded from a transformers checkpoint.
    """
    import transformers
    from transformers.utils import logging

    config, tensors = exported(model)
    hf_class = getattr(transformers, config.architectures[0])
    shows_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        own = {name: planned.make().clone(memory_format=torch.contiguous_format) for name, planned in tensors.items()}
        theirs = hf_class.from_pretrained(None, config=config, state_dict=own, dtype=model.cfg.dtype)
        _restore(theirs, tensors)
        return theirs.to(model.device)
    finally:
        if shows_bars:
            logging.enable_progress_bar()


@torch.no_grad()
def _restore(theirs: nn.Module, tensors: Mapping[str, Planned]) -> None:
    """Copies again what transformers overwrote in a model that it has just loaded.

    `_init_weights` of some families does so, such as YoutuPreTrainedModel's with the row of the padding token of a tied
    embedding, and ZayaPreTrainedModel's with a buffer. Raises RuntimeError for values that cannot be copied.
    """
    if changed := _changed(theirs, tensors):
        for name, tensor in changed.items():
            tensor.copy_(tensors[name].make())
        if lost := _changed(theirs, tensors):
            raise RuntimeError(
                f"transformers overwrites {', '.join(sorted(lost))} while it builds a {type(theirs).__name__}: write the model "
                "with save_pretrained"
            )


def _changed(theirs: nn.Module, tensors: Mapping[str, Planned]) -> dict[str, Tensor]:
    """The weights of a model of transformers that differ from these tensors, under the names in a file.

    Left out are those that it would write in other shapes, as the convolutions of OLMo Hybrid.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found = dict[str, Tensor]()
    for name, tensor in revert_weight_conversion(theirs, theirs.state_dict()).items():
        planned = tensors[name].make() if name in tensors else tensor
        if tensor.shape == planned.shape and not _same(tensor, planned):
            found[name] = tensor
    return found


def _same(tensor: Tensor, planned: Tensor) -> bool:
    """Whether all numbers are equal in the dtype of the first."""
    return torch.allclose(tensor, planned.to(tensor.device, tensor.dtype), rtol=0, atol=0, equal_nan=True)


def save_pretrained(model: Model, path: str | os.PathLike[str]) -> None:
    """Writes a model in HF format: `config.json`, `model.safetensors`, and the tokenizer's files if it has one.

    The path may be the checkpoint that the model was loaded from. Files are first written to a temporary directory next to
    it, the weights one tensor at a time, and then moved: if writing fails, no new files remain and an existing checkpoint is
    unchanged. Raises ValueError as `to_hf` does, and OSError if the path is not writable.
    """
    folder = folder_of(path)
    config, tensors = exported(model)
    if (folder / "hooked_lm.json").is_file():
        raise FileExistsError(f"{path} holds a model that model.save wrote (hooked_lm.json): choose another folder")
    with moved_when_done(folder) as unfinished:
        write_safetensors(tensors, unfinished / "model.safetensors")
        if model.saved_tokenizer is not None:
            model.saved_tokenizer.save_pretrained(unfinished)
        config.save_pretrained(unfinished)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder of a model that a path means, with the user's home and links resolved. Raises ValueError for an empty path."""
    if not os.fspath(path):
        raise ValueError("the path of the model's folder is empty: name a folder, such as '.'")
    return Path(path).expanduser().resolve()


@contextmanager
def moved_when_done(folder: Path, last: str = "config.json") -> Iterator[Path]:
    """Yields a new directory next to `folder`; finally renames it to `folder`, or moves its files there if that exists.

    The file `last` is moved last.
    """
    if file := next((path for path in (folder, *folder.parents) if path.exists() and not path.is_dir()), None):
        raise FileExistsError(f"a model is written to a directory, and {file} is a file")
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"nothing can be written to {folder}")
    made = [parent for parent in folder.parents if not parent.exists()]
    unfinished = folder.parent / f".{folder.name}.{uuid4().hex[:8]}.unfinished"
    try:
        try:
            unfinished.mkdir(parents=True)
        except OSError as error:
            raise type(error)(f"cannot write a model to {folder}: {error.strerror}") from None
        yield unfinished
        if not folder.exists():
            unfinished.rename(folder)
        else:
            _move_files(unfinished, folder, last)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # another process wrote files into it
            for parent in made:
                parent.rmdir()
        raise


def _move_files(source: Path, target: Path, last: str) -> None:
    """Moves all files of one directory into another, `last` as the last; an interrupt takes effect after the move."""
    try:
        _move_all(source, target, last)
    except KeyboardInterrupt:
        _move_all(source, target, last)
        raise


def _move_all(source: Path, target: Path, last: str) -> None:
    for file in sorted(source.iterdir(), key=lambda file: (file.name == last, file.name)):
        file.replace(target / file.name)  # never write into a file that may be memory-mapped
    source.rmdir()


def exported(model: Model) -> tuple[Any, dict[str, Planned]]:
    """Returns a model's HF config, and its weights by HF tensor name; tensors are computed on request."""
    if model.hf_config is None:
        raise ValueError(
            "this model was built from a config, not from a transformers checkpoint: it belongs to no HF architecture. "
            "model.save(path) writes it, and the load of its class reads it"
        )
    refuse_quantized(model, "to_hf and save_pretrained", "write the model before quantize()")
    if processed := model.cfg.processed:
        raise ValueError(
            f"the weights of this model were rewritten ({', '.join(processed)}); load it with "
            "from_pretrained_no_processing to write it back, or keep it as it is with model.save(path)"
        )
    if model.cfg.left_out is not None:
        raise ValueError(
            f"this is the {kept_part(model)} of a {model.cfg.original_architecture}, which cannot be written back: left out were "
            f"{described(model.cfg.left_out)}. Keep that checkpoint; model.cfg.left_out = None writes the {kept_part(model)} "
            f"alone, as a {model.hf_config['model_type']}"
        )
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model.hf_config["model_type"]].from_dict(copy.deepcopy(model.hf_config))
    config.dtype, tree = model.cfg.dtype, model.cfg.tree
    if model.cfg.dequantized_from is not None:
        config.dequantized_from = model.cfg.dequantized_from
    assert tree is not None
    kind = type(tree)
    module = family_of(config.model_type, tree)
    if kind in _CURRENT:
        tree = _CURRENT[kind](model, config)
    parameters = slots(model)
    rows = [row for row in concrete_rows(module, tree, range(len(model.blocks))) if row.target in parameters]
    if kind in _AUTO_CLASS and _is_bare(config, *_AUTO_CLASS[kind](model)):
        rows = unprefixed(rows, module.PREFIX)
    return config, plan_export(model, rows)


def family_of(model_type: str, tree: Tree) -> ModuleType:
    """The family of a model with this tree; a model type may have one of text, and another that reads images."""
    return family(model_type, *_FAMILIES.get(type(tree), {}).values())


def _with_all_layers(model: VisionLanguage, config: "PreTrainedConfig") -> VisionLanguageConfig:
    """The tree of a vision-language model. Raises ValueError for one without its last layers."""
    if (n_layers := config.get_text_config().num_hidden_layers) != len(model.blocks):
        raise ValueError(
            f"this model has {len(model.blocks)} of the {n_layers} layers of its checkpoint: it cannot be written back"
        )
    return model.tree


def _with_unembedding(model: EncoderDecoder, config: "PreTrainedConfig") -> EncoderDecoderConfig:
    """The tree of an encoder-decoder; names the class that has an unembedding, whichever the checkpoint named."""
    from transformers import AutoModelForSeq2SeqLM

    config.architectures = [AutoModelForSeq2SeqLM._model_mapping[type(config)].__name__]
    return model.tree


def _auto_class_of_encoder(model: Encoder) -> tuple[str, str]:
    return "AutoModel" if model.unembed is None else "AutoModelForMaskedLM", ""


def _auto_class_of_tower(model: VisionEncoder) -> tuple[str, str]:
    ending = "WithProjection" if model.projection is not None else ""
    return "AutoModel" if model.classifier is None else "AutoModelForImageClassification", ending


def _is_bare(config: "PreTrainedConfig", auto: str, ending: str) -> bool:
    """Whether the encoder's transformers class has no heads; its tensor names then have no prefix.

    Adds the class that `auto` has, with this ending, to a config that names none.
    """
    import transformers

    bare = _class_for(transformers.AutoModel, config)
    config.architectures = config.architectures or [_class_for(getattr(transformers, auto), config) + ending]
    return bool(config.architectures[0] == bare)


def _class_for(auto: "type[AutoModel]", config: "PreTrainedConfig") -> str:
    """The name of the transformers class that `auto` has for a config, or else of the one that is named like it."""
    import transformers

    known, named = auto._model_mapping, type(config).__name__.removesuffix("Config") + "Model"
    if type(config) not in known and not hasattr(transformers, named):
        raise ValueError(f"transformers has no class for a {config.model_type} alone: it is part of larger models only")
    return str(known[type(config)].__name__ if type(config) in known else named)


def _cut(config: "PreTrainedConfig", n_layers: int) -> None:
    """Sets the number of layers in an HF config, and shortens its per-layer lists."""
    notes = vars(config)
    try:
        config.num_hidden_layers = n_layers
        for name in ("layer_types", "attention_layers"):
            if notes.get(name):
                setattr(config, name, list(notes[name])[:n_layers])
        if notes.get("attention_types"):  # pairs of a pattern and its number of repetitions
            config.attention_types = [[notes["attention_layers"], 1]]
        if notes.get("attn_layer_indices"):
            config.attn_layer_indices = [layer for layer in notes["attn_layer_indices"] if layer < n_layers]
    except Exception as error:
        raise ValueError(
            f"a {config.model_type} config cannot say that there are {n_layers} layers: {error}"
        ) from error


def _current_tree(model: Decoder, config: "PreTrainedConfig") -> DecoderConfig:
    """Returns the tree of a decoder whose layers or tying may have changed, and updates the HF config to match."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    n_layers, tied = len(model.blocks), model.cfg.tie_word_embeddings
    of_text, of_images = AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
    own = next((table[type(config)].__name__ for table in (of_text, of_images) if type(config) in table), None)
    if own is None or (type(config) not in of_text and not own.endswith("ForCausalLM")):
        raise ValueError(f"transformers has no class for a {config.model_type} alone: it is part of larger models only")
    if config.num_hidden_layers != n_layers:
        n_described = len(read_config(family(config.model_type), config).blocks)  # a layer may be several blocks
        if n_described != n_layers:
            _cut(config, n_layers * config.num_hidden_layers // n_described)
        try:
            says = read_config(family(config.model_type), type(config).from_dict(config.to_dict()))
        except Exception as error:
            raise ValueError(
                f"a {config.model_type} config cannot say that there are {n_layers} layers: {error}"
            ) from error
        if says.blocks != model.tree.blocks:
            raise ValueError(
                f"a {config.model_type} config of {n_layers} layers would describe other layers than these"
            )
    config.tie_word_embeddings = tied
    config.architectures = [own]
    return replace(model.tree, unembed=replace(model.tree.unembed, tied=tied))


# By the kind of a model's tree: where its family is beside those of text; the tree that its weights have, which may be another
# than that of the checkpoint; and of encoders the class in transformers that fits the heads, with an ending of its name.
_FAMILIES: Mapping[type, Mapping[str, Any]] = {
    VisionLanguageConfig: VISION_LANGUAGES, DualEncoderConfig: DUAL_ENCODERS, VisionConfig: VISION_ENCODERS,
}  # fmt: skip
_CURRENT: Mapping[type, Callable[..., Any]] = {
    DecoderConfig: _current_tree, VisionLanguageConfig: _with_all_layers, EncoderDecoderConfig: _with_unembedding,
}  # fmt: skip
_AUTO_CLASS: Mapping[type, Callable[..., tuple[str, str]]] = {
    EncoderConfig: _auto_class_of_encoder, VisionConfig: _auto_class_of_tower,
}  # fmt: skip
