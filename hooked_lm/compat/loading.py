"""Flat configs and weights of checkpoints, without building a model: the functions of `loading_from_pretrained`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hooked_lm.compat.state_dicts import transformer_lens_weights
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families.short_names import CHECKPOINTS, SHORT_NAMES
from hooked_lm.hub.hf_checkpoint import HFCheckpoint, check_model, from_model, from_source
from hooked_lm.hub.hf_load import fill
from hooked_lm.hub.names import published_steps
from hooked_lm.hub.options import Options, one_device
from hooked_lm.hub.source import find
from hooked_lm.hub.tl_checkpoint import find_tl
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.tree import DecoderConfig, EncoderDecoderConfig
from hooked_lm.models.placement import DevicePlan
from hooked_lm.models.weights.fold import process_weights
from hooked_lm.pretrained import HookedTransformer, class_of, from_pretrained_no_processing

# Organisations whose models are known without the organisation's name.
UNPREFIXED = ("openai-community/", "distilbert/")
# Hub ids that are known by another spelling, or by a name that is not on the hub.
RENAMED = {
    "EleutherAI/gpt-j-6b": "EleutherAI/gpt-j-6B",
    "EleutherAI/gpt-neo-125m": "EleutherAI/gpt-neo-125M",
    "bigcode/gpt_bigcode-santacoder": "bigcode/santacoder",
    **{f"huggyllama/llama-{size}": f"llama-{size}-hf" for size in ("7b", "13b", "30b", "65b")},
}
# Official names of models of unsupported kinds; loading one raises an error with the kind.
UNSUPPORTED: dict[str, tuple[str, ...]] = {
    **{f"Qwen/Qwen-{size}{kind}": (f"qwen-{size.replace('_', '.').lower()}{kind.lower()}",)
       for size in ("1_8B", "7B", "14B") for kind in ("", "-Chat")},
    **{f"google/gemma-3-{size}-{kind}": (f"gemma-3-{size}-{kind}",) for size in ("4b", "12b", "27b") for kind in ("it", "pt")},
    **{f"google/medgemma-{name}": (f"medgemma-{name}",) for name in ("4b-it", "4b-pt", "27b-it", "27b-text-it")},
    "facebook/hubert-base-ls960": ("hubert-base-ls960",),
    **{f"facebook/wav2vec2-{size}": (f"wav2vec2-{size}", f"w2v2-{size}") for size in ("base", "large")},
}  # fmt: skip


def official_name(repository: str) -> str:
    """The official name of a hub id."""
    if repository in RENAMED:
        return RENAMED[repository]
    return next((repository.removeprefix(prefix) for prefix in UNPREFIXED if repository.startswith(prefix)), repository)


OFFICIAL_MODEL_NAMES = sorted({*map(official_name, SHORT_NAMES.values()), *UNSUPPORTED}, key=str.casefold)
OFFICIAL_NAME_OF = {short: official_name(repository) for short, repository in SHORT_NAMES.items()} | {
    short: name for name, shorts in UNSUPPORTED.items() for short in shorts
}
MODEL_ALIASES = {
    official: [short for short, name in OFFICIAL_NAME_OF.items() if name == official and short != official]
    for official in OFFICIAL_MODEL_NAMES
}
DEFAULT_MODEL_ALIASES = [next(iter(MODEL_ALIASES[name]), name) for name in OFFICIAL_MODEL_NAMES]
NON_HF_HOSTED_MODEL_NAMES: list[str] = []  # all supported models are on the hub
NEED_REMOTE_CODE_MODELS: tuple[str, ...] = ()  # code of a checkpoint is never run
STANFORD_CRFM_CHECKPOINTS = list(CHECKPOINTS["stanford-crfm/*"][1])
PYTHIA_CHECKPOINTS = list(CHECKPOINTS["EleutherAI/pythia-*"][1])
PYTHIA_V0_CHECKPOINTS = list(CHECKPOINTS["EleutherAI/pythia-*-v0"][1])
DTYPE_FROM_STRING = {
    **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")},
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

# ---- names ---------------------------------------------------------------------------------------------------------------


def make_model_alias_map() -> dict[str, str]:
    """The official names by all names in lower case."""
    return {
        **{name.lower(): name for name in OFFICIAL_MODEL_NAMES},
        **OFFICIAL_NAME_OF,
    }


def get_official_model_name(model_name: str) -> str:
    """The official name of a short name; directories, and hub ids without a short name, are returned unchanged.

    Raises ValueError for other names.

    >>> get_official_model_name("gpt2-small"), get_official_model_name("somebody/gpt2-tuned")
    ('gpt2', 'somebody/gpt2-tuned')
    """
    found = make_model_alias_map().get(official_name(model_name).lower())
    if found is None and "/" not in model_name and model_name != "demo" and not Path(model_name).is_dir():
        raise ValueError(f"{model_name!r} is not a known short name, a hub id (owner/name), or a directory")
    return found or model_name


def get_checkpoint_labels(model_name: str, **kwargs: Any) -> tuple[list[int], str]:
    """The published checkpoints of a training run and their unit: steps and "step", or tokens and "token".

    Raises ValueError if none are known.
    """
    revision, local_files_only = kwargs.pop("revision", None), kwargs.pop("local_files_only", False)
    options = Options(revision=revision, local_files_only=local_files_only, hf_kwargs=kwargs)
    checkpoint = find_tl(find(model_name, **options.download), options)
    if checkpoint is not None and (steps := checkpoint.steps()):
        return [step.value for step in steps], steps[0].label_type
    return list(published_steps(model_name)[1]), "step"


# ---- configs -------------------------------------------------------------------------------------------------------------


def get_pretrained_model_config(
    model_name: str,
    hf_cfg: Mapping[str, Any] | None = None,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    fold_ln: bool = False,
    device: Any = None,
    n_devices: int = 1,
    default_prepend_bos: bool | None = None,
    dtype: torch.dtype | str = torch.float32,
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    **kwargs: Any,
) -> HookedTransformerConfig:
    """The config of the model that `from_pretrained` would return, without loading weights.

    With `fold_ln` it is the config of the folded model. `hf_cfg`, the config of a transformers model, determines the vocabulary
    size. The heads of encoders are identified by their weights, so they are missing for checkpoints on the hub. Raises the
    errors of `from_pretrained`.

    >>> cfg = get_pretrained_model_config("demo")
    >>> cfg.n_layers, cfg.d_model, cfg.normalization_type
    (4, 128, 'LN')
    """
    options = Options(
        revision=kwargs.pop("revision", None),
        local_files_only=kwargs.pop("local_files_only", False),
        checkpoint_index=checkpoint_index,
        checkpoint_value=checkpoint_value,
        hf_kwargs=kwargs,
        device=one_device(device),
        dtype=dtype,
        first_n_layers=first_n_layers,
        n_ctx=n_ctx,
        default_prepend_bos=default_prepend_bos,
    )
    source = find(model_name, **options.download)
    if (checkpoint := find_tl(source, options)) is not None:
        flat_cfg = checkpoint.flat_config({}, checkpoint.step())
        return _folded(flat_cfg) if fold_ln else flat_cfg
    if hf_cfg is not None and "vocab_size" in hf_cfg:
        options = replace(options, hf_kwargs={**kwargs, "vocab_size": hf_cfg["vocab_size"]})
    folder = source.folder(weights=False)
    has_weights = any(folder.glob("*.safetensors*")) or any(folder.glob("pytorch_model*"))
    return _hf_config(from_source(source, options, weights=False), has_weights, fold_ln)


def _hf_config(checkpoint: HFCheckpoint, has_weights: bool, fold_ln: bool) -> HookedTransformerConfig:
    """The flat config of a checkpoint in the format of transformers; reads at most the names of its weights."""
    tree = checkpoint.tree(checkpoint.tensors() if has_weights else {})
    model_class = class_of(tree)
    cfg = checkpoint.flat_config(model_class.config_class, _plain(tree), {}, checkpoint.options.device)
    return _folded(cfg) if fold_ln and model_class is HookedTransformer else cfg


def _plain(part: Any) -> Any:
    """The config tree for weights as TransformerLens saves them, with offsets and scales folded into the weights."""
    if isinstance(part, tuple) and not hasattr(part, "_fields"):
        return tuple(_plain(each) for each in part)
    if not is_dataclass(part):
        return part
    changed = {field.name: _plain(getattr(part, field.name)) for field in fields(part)}
    if isinstance(part, (LayerNorm.Config, RMSNorm.Config, PosEmbed.Config)):
        changed["offset"] = type(changed["offset"])(0)
    if isinstance(part, (DecoderConfig, EncoderDecoderConfig)) and part.embed.scale != 1.0:
        changed["embed"] = replace(changed["embed"], scale=1.0)
        changed["unembed"] = replace(changed["unembed"], tied=False)
    if isinstance(part, DecoderConfig) and part.unembed.scale != 1.0:
        changed["unembed"] = replace(changed["unembed"], scale=1.0, tied=False)
    return replace(part, **changed)


def _folded(cfg: HookedTransformerConfig) -> HookedTransformerConfig:
    """The config of the model after `fold_ln`, found on one without memory."""
    model = HookedTransformer(replace(cfg, device="meta", tokenizer_name=None))
    process_weights(model, center_writing_weights=False, center_unembed=False, fold_value_biases=False)
    return replace(model.cfg, device=cfg.device, tokenizer_name=cfg.tokenizer_name)


def convert_hf_model_config(model_name: str, **kwargs: Any) -> dict[str, Any]:
    """The flat config of a checkpoint as a dict; see `get_pretrained_model_config`."""
    named = get_pretrained_model_config(model_name, **kwargs).to_dict()
    return {name: value for name, value in named.items() if name not in ("tree", "processed")}


def get_num_params_of_pretrained(model_name: str) -> int:
    """The number of weights in the layers of a checkpoint, as in `cfg.n_params`."""
    n_params = get_pretrained_model_config(model_name).n_params
    assert n_params is not None  # it is filled in
    return n_params


@dataclass
class Config:
    """The sizes of a GPT-2, for courses in which it is implemented."""

    d_model: int = 768
    debug: bool = True
    layer_norm_eps: float = 1e-5
    d_vocab: int = 50257
    init_range: float = 0.02
    n_ctx: int = 1024
    d_head: int = 64
    d_mlp: int = 3072
    n_heads: int = 12
    n_layers: int = 12


def get_basic_config(model_name: str, **kwargs: Any) -> Config:
    """The sizes of a checkpoint."""
    named = get_pretrained_model_config(model_name, **kwargs).to_dict()
    return Config(**{name: named[name] for name in asdict(Config()) if name in named})


# ---- weights -------------------------------------------------------------------------------------------------------------


def get_pretrained_state_dict(
    official_model_name: str,
    cfg: HookedTransformerConfig,
    hf_model: Any = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """The weights of a checkpoint by the parameter names of TransformerLens, with zeros for absent biases.

    They can be loaded into a model of this config in hooked_lm and in TransformerLens. They are those of the config's training
    step, or of `hf_model` if given. Raises the errors of `from_pretrained`.
    """
    dtype = kwargs.pop("torch_dtype", dtype)
    if hf_model is not None:
        return {name: value.to(dtype) for name, value in convert_hf_weights(hf_model, cfg).items()}
    step = cfg.checkpoint_value if cfg.from_checkpoint else None
    model = from_pretrained_no_processing(
        official_model_name, checkpoint_value=step, dtype=dtype, device="cpu", **kwargs
    )
    return _public(model, cfg)


def convert_hf_weights(hf_model: Any, cfg: Any) -> dict[str, Tensor]:
    """The weights of a transformers model by the parameter names of TransformerLens; views of its weights if possible.

    `cfg` is the flat config of the model to load them into. If it has `n_key_value_heads`, keys and values are named `_W_K`
    and `_W_V`. Layers beyond `cfg.n_layers`, and positions beyond `cfg.n_ctx`, are omitted. Raises TypeError for an object
    that is not a model of transformers.
    """
    check_model(hf_model)
    checkpoint = from_model(find(hf_model.config.name_or_path), Options(hf_model=hf_model))
    tensors = checkpoint.tensors()
    tree = checkpoint.tree(tensors)
    model_class = class_of(tree)
    flat_cfg = model_class.config_class.from_tree(tree, dtype=hf_model.dtype, device="meta", init_weights=False)
    model = model_class(flat_cfg)
    fill(model, tensors, checkpoint.family, tree, DevicePlan({"": hf_model.device}), lambda name: False)
    return _public(model, cfg)


@torch.no_grad()
def _public(model: Any, cfg: Any) -> dict[str, Tensor]:
    state = transformer_lens_weights(model, is_grouped=cfg.n_key_value_heads is not None)
    beyond = tuple(f"blocks.{layer}." for layer in range(cfg.n_layers, model.cfg.n_layers))
    state = {name: value for name, value in state.items() if not beyond or not name.startswith(beyond)}
    if "pos_embed.W_pos" in state:
        state["pos_embed.W_pos"] = state["pos_embed.W_pos"][: cfg.n_ctx]
    return state


def fill_missing_keys(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """The dictionary, completed by the model's norms, biases and tables that it lacks.

    The dictionary is changed in place. Raises ValueError, without changing it, if a matrix is missing.
    """
    missing = {name: value for name, value in model.state_dict().items() if name not in state_dict}
    matrices = [name for name in missing if name.rpartition(".")[2].lstrip("_").startswith("W_")]
    if matrices:
        raise ValueError(f"the dictionary has no {', '.join(matrices)}: only norms, biases and tables can be filled in")
    state_dict.update(missing)
    return state_dict
