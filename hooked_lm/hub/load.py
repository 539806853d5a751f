"""From a checkpoint to a model."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hooked_lm.components.attention.attend import Attend
from hooked_lm.families import family
from hooked_lm.families._reader import HFConfig
from hooked_lm.hub.model_classes import Kind, Model, Tree, kind_of
from hooked_lm.hub.options import checkpoint_step, one_device, real_dtype, with_limits
from hooked_lm.hub.plausible import check_kinds, check_layers, check_values
from hooked_lm.hub.source import Source, find, find_tokenizer, has_tokenizer, in_present_names, local_folder, spelled
from hooked_lm.hub.tl_checkpoint import find_flat, flat_model
from hooked_lm.models.decoder import HookedTransformer
from hooked_lm.models.weights.fold import process_weights
from hooked_lm.weights import Row, expand, load, slots


def from_pretrained(
    model_name: str | os.PathLike[str],
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    refactor_factored_attn_matrices: bool = False,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    hf_model: Any = None,
    device: Any = None,
    n_devices: int = 1,
    tokenizer: Any = None,
    move_to_device: bool = True,
    fold_value_biases: bool = True,
    default_prepend_bos: bool | None = None,
    default_padding_side: str | None = None,
    dtype: torch.dtype | str = torch.float32,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    *,
    cls: type | None = None,
    device_map: Any = None,
    revision: str | None = None,
    local_files_only: bool = False,
    mmap: bool = True,
    **hf_kwargs: Any,
) -> Any:
    """A model with a checkpoint's weights: a HookedTransformer, HookedEncoder or HookedEncoderDecoder, as it is one.

    On a CPU and in the checkpoint's own dtype the weights are views of the mapped file: nothing is copied before it
    is changed. Folding and other dtypes pay for what they change. Checkpoints that have a config in flat names, as
    TransformerLens's own, are read too; see `hooked_lm.hub.tl_checkpoint`.

    >>> from hooked_lm import hub
    >>> model = hub.from_pretrained("demo")
    >>> model.cfg.original_architecture
    'GPT2LMHeadModel'

    Args:
        model_name: a hub id, a local directory, a short name such as "gpt2-small", or "demo". A Path, and a string such as
            "./demo", is always a directory.
        fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases: rewrites of
            a decoder's weights that leave the predictions as they are; see `hooked_lm.models.weights.fold`.
        checkpoint_index, checkpoint_value: the n-th, or the one at that step, of a training run's published
            checkpoints (Pythia, Stanford CRFM's GPT-2, and those in a folder `checkpoints` of flat ones).
        hf_model: a transformers or PEFT model whose weights to take instead; it is left as it is.
        device, device_map: one device; the first GPU if there is one.
        default_prepend_bos: whether text begins with BOS unless a call says otherwise; the family's habit if None.
        tokenizer: instead of the checkpoint's own.
        move_to_device: False leaves the weights on the CPU.
        dtype: of the weights; "auto" for the checkpoint's own.
        first_n_layers: leave out the layers after these.
        n_ctx: the longest prompt, instead of the checkpoint's.
        mmap: False copies the weights into memory, so that the files may change or go.
        cls: the class that the model must be of; ValueError if it is of another.
        hf_kwargs: fields of the HF config to override, or `token`, `cache_dir`, `force_download`.

    Raises:
        ValueError: a model type that is not supported, a config field nobody reads, weights that do not fit, an option
            that cannot be honoured.
    """
    dtype = hf_kwargs.pop("torch_dtype", dtype)
    device = one_device(device, device_map, n_devices, move_to_device)
    rewrites = (fold_ln, center_writing_weights, center_unembed, fold_value_biases, refactor_factored_attn_matrices)
    flat = None if hf_model is not None else find_flat(model_name, revision, local_files_only, hf_kwargs)
    if flat is not None:
        at = flat.step(checkpoint_index, checkpoint_value)
        asked = (device, first_n_layers, n_ctx, default_prepend_bos, default_padding_side)
        return _rewritten(flat_model(flat, at, cls, dtype, tokenizer, mmap, *asked), rewrites)
    step, revision = checkpoint_step(spelled(model_name), checkpoint_index, checkpoint_value, revision)
    source = find(model_name, hf_model, revision, local_files_only, hf_kwargs)
    module = family(source.config.model_type)
    tensors = in_present_names(source.tensors(mmap), getattr(module, "RENAMED", {}))
    full = read_tree(module, source, tensors)
    kind = kind_of(full, cls, str(model_name))
    cfg = kind.config.from_tree(
        with_limits(full, first_n_layers, n_ctx),
        dtype=real_dtype(dtype, tensors),
        device="meta",
        init_weights=False,
        **facts(source, step, checkpoint_index, default_prepend_bos, default_padding_side),
        **source.generation_facts(field.name for field in fields(kind.config)),
    )
    if tokenizer is None:
        tokenizer = find_tokenizer(source, revision, local_files_only, hf_kwargs)
    model = _unfilled(kind, cfg, tokenizer)
    fill(model, tensors, module, full, device, copy=hf_model is not None)
    model.cfg.tokenizer_name = cfg.tokenizer_name
    model.hf_config = source.config.to_dict() | {"architectures": source.architectures()}
    return _rewritten(model, rewrites)


def _unfilled(kind: Kind, cfg: Any, tokenizer: Any) -> Model:
    """The model of a config, without weights. Raises ValueError for sizes that no tensor can have."""
    try:
        return kind.model(replace(cfg, tokenizer_name=None) if tokenizer is None else cfg, tokenizer=tokenizer)
    except (RuntimeError, OverflowError, MemoryError) as error:
        sizes = ", ".join(
            f"{name}={getattr(cfg, name)}" for name in ("d_model", "n_heads", "d_head", "d_mlp", "d_vocab")
        )
        raise ValueError(f"the config describes weights that cannot be made ({sizes}): {error}") from error


def _rewritten(model: Model, rewrites: tuple[bool, ...]) -> Model:
    """A loaded model, ready to be used; only decoders are rewritten."""
    if isinstance(model, HookedTransformer):
        process_weights(model, *rewrites)
    return model.eval()


def from_pretrained_no_processing(
    model_name: str | os.PathLike[str],
    fold_ln: bool = False,
    center_writing_weights: bool = False,
    center_unembed: bool = False,
    refactor_factored_attn_matrices: bool = False,
    fold_value_biases: bool = False,
    **kwargs: Any,
) -> Any:
    """`from_pretrained` with the weights exactly as the checkpoint has them."""
    return from_pretrained(
        model_name,
        fold_ln=fold_ln,
        center_writing_weights=center_writing_weights,
        center_unembed=center_unembed,
        refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        fold_value_biases=fold_value_biases,
        **kwargs,
    )


def read_tree(module: ModuleType, source: Source, tensors: Mapping[str, Tensor]) -> Tree:
    """The tree of a checkpoint's config, and of its tensors, which tell its heads."""
    tree = read_config(module, source.config, source.architectures(), tensors)
    if tensors:
        check_layers(module, tree, tensors)
    return module.fitted(tree, tensors) if hasattr(module, "fitted") else tree


def facts(
    source: Source, step: int | None, index: int | None, prepend_bos: bool | None, padding_side: str | None
) -> dict[str, Any]:
    """What a model's config says beside its tree; what is not known is left to the defaults."""
    folder = local_folder(source.name) if source.folder is not None else None
    facts = {
        "model_name": source.name.rpartition("/")[2],
        "original_architecture": next(iter(source.architectures()), source.config.model_type),
        "tokenizer_name": source.name if folder is None or has_tokenizer(folder) else None,
        "from_checkpoint": step is not None,
        "checkpoint_index": index,
        "checkpoint_value": step,
        "checkpoint_label_type": None if step is None else "step",
        "default_prepend_bos": prepends_bos(source.config.model_type) if prepend_bos is None else prepend_bos,
        "default_padding_side": padding_side,
        "initializer_range": getattr(source.config, "initializer_range", None),
    }
    return {name: value for name, value in facts.items() if value is not None}


def prepends_bos(model_type: str) -> bool:
    """Whether text for a model of this family begins with BOS unless a call says otherwise."""
    return getattr(family(model_type), "PREPENDS_BOS", True)


def read_config(
    module: ModuleType, config: Any, architectures: Sequence[str] = (), tensors: Collection[str] = ()
) -> Tree:
    """The tree of an HF config, and of the transformers class and the names of the weights, which tell its heads.

    Raises ValueError for a field that is not at its default and that nobody reads.
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


def concrete_rows(module: ModuleType, tree: Tree, layers: Iterable[int]) -> list[Row]:
    """The rows of a family for these layers; rows for the two sides of an encoder-decoder have ranges of their own."""
    return expand(module.rows(tree), l=list(layers))


def fill(
    model: Model,
    tensors: Mapping[str, Tensor],
    module: ModuleType,
    full: Tree,
    device: torch.device,
    copy: bool,
) -> None:
    """Put a checkpoint's weights into a model that has none; `full` is the tree of all of the checkpoint's layers."""
    n_layers, parameters = len(model.blocks), slots(model)
    rows = concrete_rows(module, full, range(n_layers))
    beyond = range(n_layers, len(full.blocks))
    left_out = (
        {row.theirs for row in concrete_rows(module, full, beyond) if row.ours.startswith("blocks.")}
        if beyond
        else set()
    )
    tied = [row for row in rows if row.tied is not None and row.ours not in parameters]
    for row in tied:
        _check_tied(tensors, row, module.PREFIX)
    load(
        model,
        tensors,
        [row for row in rows if row.ours in parameters],
        dtype=model.cfg.dtype,
        device=device,
        ignore=[*module.IGNORED, *left_out, *(row.theirs for row in tied)],
        prefix=module.PREFIX,
        copy=copy,
        own_dtype=[name for name, slot in parameters.items() if slot.tensor.dtype != model.cfg.dtype],
    )
    for module_of_ours in model.modules():
        if isinstance(module_of_ours, Attend):
            module_of_ours.make_contiguous()
    stranded = [name for name, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if stranded:
        raise ValueError(f"the checkpoint gives no values for {', '.join(stranded)} of {type(model).__name__}")
    model.cfg.device = str(device)


def _check_tied(tensors: Mapping[str, Tensor], row: Row, prefix: str) -> None:
    """Where a file holds a tied weight all the same, it must be the one that it is tied to."""
    assert row.tied is not None
    source = row.tied if row.tied in tensors else row.tied.removeprefix(prefix)
    if row.theirs in tensors and source in tensors and not torch.equal(tensors[row.theirs], tensors[source]):
        raise ValueError(f"{row.theirs!r} differs from {source!r}, but the config says that they are tied")
