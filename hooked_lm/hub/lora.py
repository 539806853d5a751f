"""LoRA adapters in the format of peft, switched on for the runs of a `with` block.

An adapter changes a matrix W of a checkpoint to W + scale B A. The rows of a family say which parameters are parts of W, and by
which rearrangement. A rearrangement is linear, so the same one brings scale B A to what is added to each parameter.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.axes import axes_of
from hooked_lm.files import writable_folder
from hooked_lm.hub.adapter import CONFIG, PICKLE, WEIGHTS, find_adapter
from hooked_lm.hub.export import family_of
from hooked_lm.hub.hf_load import concrete_rows
from hooked_lm.hub.source import find
from hooked_lm.models.base import BaseModel
from hooked_lm.models.weights.weight_scope import Holder, WeightChange, WeightScope
from hooked_lm.notebook_repr import NotebookRepr
from hooked_lm.weights import Row, open_checkpoint, slots
from hooked_lm.weights.parameters import Slot

MODULE, LAYER = "base_model.model.", "base_layer."
HALVES = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.weight)?$")
# Fields that say how an adapter was trained or where, and those that are read here. Any other one that is set is refused.
WITHOUT_EFFECT = {
    *(
        "auto_mapping",
        "base_model_name_or_path",
        "peft_type",
        "peft_version",
        "revision",
        "task_type",
        "inference_mode",
    ),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "lora_dropout"),
    *("fan_in_fan_out", "bias", "init_lora_weights", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
}
READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
PLAIN_STARTS = (
    True,
    False,
    None,
    "gaussian",
    "eva",
    "orthogonal",
)  # that leave the weights under the adapter as they are
MERGED = "load it merged instead: from_pretrained(folder)"


@dataclass(eq=False)
class LowRank:
    """The change of one matrix of a checkpoint: scale B A, [out, in]."""

    A: Float[Tensor, "rank d_in"]
    B: Float[Tensor, "d_out rank"]
    scale: float
    is_embedding: bool = False

    def product(self) -> Float[Tensor, "d_out d_in"]:
        """scale B A, in fp32 or wider."""
        dtype = torch.promote_types(self.B.dtype, torch.float32)
        return (self.B.to(dtype) @ self.A.to(dtype)) * self.scale


class LoRA(NotebookRepr):
    """A LoRA adapter (Hu et al. 2021, arXiv:2106.09685) that `model.with_adapter` switches on in a `with` block.

    `LoRA.load(folder)` reads what peft saved, `LoRA.new(model, rank=4)` is a new one, which changes nothing until its matrices
    are trained (`parameters()`), and `save(folder)` writes what peft reads. `parts` are the low-rank matrices by the names of the
    matrices that they change, as the checkpoint names them; `replaced` are weights that the adapter has in full.

    >>> import torch
    >>> from hooked_lm import HookedTransformer
    >>> from hooked_lm.hub import LoRA
    >>> model = HookedTransformer.from_pretrained_no_processing("demo")
    >>> lora = LoRA.new(model, rank=2, targets=["c_fc"])
    >>> with model.with_adapter(lora):
    ...     model("The capital of France is", return_type="loss").backward()
    >>> lora, sum(part.B.grad.abs().sum() > 0 for part in lora.parts.values()).item()
    (LoRA(4 matrices of rank 2, from a new adapter), 4)
    """

    def __init__(
        self, parts: Mapping[str, LowRank], replaced: Mapping[str, Tensor], config: Mapping[str, Any], name: str
    ) -> None:
        self.parts, self.replaced, self.config, self.name = dict(parts), dict(replaced), dict(config), name

    @classmethod
    def new(
        cls,
        model: BaseModel,
        rank: int = 4,
        *,
        alpha: float | None = None,
        targets: str | Iterable[str] | None = None,
        seed: int = 0,
    ) -> "LoRA":
        """A new adapter of a model: A is drawn at random, B is zero.

        Args:
            rank, alpha: the rank of the changes, and their scale, which is alpha / rank; None: 2 rank.
            targets: the ends of names of linear layers in the checkpoint, such as "q_proj"; None: all that are in blocks.
            seed: of A.

        Raises ValueError for a target that the model lacks, and as `model.with_adapter`.
        """
        if rank < 1:
            raise ValueError(f"rank must be at least 1, got {rank}")
        rows, known = _rows(model), slots(model)
        linear: dict[str, Row] = {}
        for row in rows:
            in_block = row.target in known and row.target.startswith("blocks.") and row.source.endswith(".weight")
            if in_block and _inputs_first(row, known[row.target]) is not None:
                linear.setdefault(row.source, row)
        ends = None if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)
        chosen = {name: row for name, row in linear.items() if ends is None or _ends_with(_module(name), ends)}
        if missing := [end for end in ends or () if not any(_ends_with(_module(name), (end,)) for name in linear)]:
            there = sorted({_module(name).rpartition(".")[2] for name in linear})
            raise ValueError(
                f"no linear layer in a block has a name that ends with {missing[0]!r}; there are {', '.join(there)}"
            )
        generator, alpha = torch.Generator().manual_seed(seed), 2.0 * rank if alpha is None else alpha
        parts = {}
        for name, row in chosen.items():
            slot = known[row.target]
            shape = row.source_shape(slot.tensor.shape)
            d_in, d_out = shape if _inputs_first(row, slot) else shape[::-1]
            A = torch.rand(rank, d_in, generator=generator).sub_(0.5).mul_(2 / math.sqrt(d_in)).to(slot.tensor.device)
            B = torch.zeros(d_out, rank, device=slot.tensor.device)
            parts[name] = LowRank(A.requires_grad_(), B.requires_grad_(), alpha / rank)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "use_rslora": False}
        config |= {"task_type": "CAUSAL_LM", "base_model_name_or_path": model.cfg.model_name}
        config |= {"target_modules": sorted({_module(name).rpartition(".")[2] for name in parts})}
        config["fan_in_fan_out"] = any(_inputs_first(row, known[row.target]) for row in chosen.values())
        return cls(parts, {}, config, "a new adapter")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "LoRA":
        """The adapter in a folder, or in a repository of the hub: `adapter_config.json` and its weights.

        Raises ValueError if there is none, for another kind than LoRA, and for an option that is not supported, by its name.
        """
        source = find(path)
        source.check()
        if (folder := find_adapter(source)) is None:
            raise ValueError(
                f"{str(path)!r} is no adapter: there is no {CONFIG} in it, or there is a whole model beside it"
            )
        file = folder / CONFIG
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            kind = config["peft_type"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not the config of an adapter: {error}") from error
        if kind != "LORA":
            raise ValueError(
                f"{file} is of an adapter of type {kind}, and with_adapter switches on LoRA alone; {MERGED}"
            )
        _check_config(config, str(file))
        weights = open_checkpoint(folder / (WEIGHTS if (folder / WEIGHTS).is_file() else PICKLE))
        return cls(*_read(weights, config, str(file)), config, str(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the adapter to a folder as peft does, which `load`, peft and `from_pretrained` (merged) read."""
        from safetensors.torch import save_file

        folder = writable_folder(Path(path))
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"{MODULE}{name}": tensor for name, tensor in self.replaced.items()}
        for name, part in self.parts.items():
            embedding, end = ("embedding_", "") if part.is_embedding else ("", ".weight")
            tensors |= {f"{MODULE}{_module(name)}.lora_{embedding}{half}{end}": getattr(part, half) for half in "AB"}
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")

    def parameters(self) -> list[Tensor]:
        """The matrices A and B, for an optimiser; from here on they have gradients, also those of a loaded adapter."""
        return [half.requires_grad_() for part in self.parts.values() for half in (part.A, part.B)]

    def scope(self, model: BaseModel) -> WeightScope:
        """The scope that `model.with_adapter` returns."""
        found: dict[str, tuple[Sequence[Holder], list[WeightChange]]] = {}
        for target, holders, change in self._changes(model):
            found.setdefault(target, (holders, []))[1].append(change)
        return WeightScope(model, found, f"the adapter {self.name}")

    def _changes(self, model: BaseModel) -> Iterator[tuple[str, Sequence[Holder], WeightChange]]:
        rows, known = _rows(model), slots(model)
        of: dict[str, list[Row]] = {}
        for row in rows:
            of.setdefault(row.source, []).append(row)
        tied = {name for row in rows if row.tied is not None for name in (row.source, row.tied)}
        prefix = str(_family(model).PREFIX)
        changes: list[tuple[str, LowRank | Tensor]] = [*self.replaced.items(), *self.parts.items()]
        for name, part in changes:
            found = name if name in of else prefix + name
            targets = [row for row in of.get(found, ()) if row.target in known]
            if found in tied:
                raise ValueError(
                    f"the adapter {self.name} changes {name!r}, which the model ties to another weight (embedding and "
                    f"unembedding): that is not supported in a `with` block; {MERGED}"
                )
            if not targets:
                near = get_close_matches(name, of, n=1, cutoff=0.5)
                hint = f"; the nearest that it has is {near[0]!r}" if near else ""
                raise ValueError(
                    f"the adapter {self.name} changes {name!r}, and no row of a {type(model).__name__} "
                    f"({model.cfg.model_name}) reads that{hint}. Is it an adapter of this model? Otherwise {MERGED}"
                )
            for row in targets:
                slot = known[row.target]
                _check_fits(row, slot, part, self.name)
                yield (
                    row.target,
                    slot.holders,
                    _Added(row, slot, part) if isinstance(part, LowRank) else _Put(row, part),
                )

    def __repr__(self) -> str:
        ranks = sorted({len(part.A) for part in self.parts.values()})
        of_rank = f" of rank {' and '.join(map(str, ranks))}" if ranks else ""
        more = f" and {len(self.replaced)} whole weights" if self.replaced else ""
        return f"LoRA({len(self.parts)} matrices{of_rank}{more}, from {self.name})"


def adapter_scope(model: BaseModel, adapter: "LoRA | str | os.PathLike[str]") -> WeightScope:
    """The scope of `model.with_adapter`: an adapter, or that of a folder, is switched on inside of it."""
    return (adapter if isinstance(adapter, LoRA) else LoRA.load(adapter)).scope(model)


class _Added:
    """A weight plus its part of scale B A."""

    def __init__(self, row: Row, slot: Slot, part: LowRank) -> None:
        self.row, self.part, self.is_transposed = row, part, bool(_inputs_first(row, slot))
        self.tensors = (part.A, part.B)

    def __call__(self, weight: Tensor) -> Tensor:
        product = self.part.product()
        delta = self.row.to_target(product.T if self.is_transposed else product, weight.shape)
        return weight + delta.to(weight.device, weight.dtype)


class _Put:
    """A weight that the adapter has in full."""

    def __init__(self, row: Row, tensor: Tensor) -> None:
        self.row, self.tensor, self.tensors = row, tensor, (tensor,)

    def __call__(self, weight: Tensor) -> Tensor:
        return self.row.to_target(self.tensor, weight.shape).to(weight.device, weight.dtype)


def _rows(model: BaseModel) -> list[Row]:
    """The concrete rows of a model's family. Raises ValueError for a model whose weights are not those of a checkpoint."""
    if model.hf_config is None:
        raise ValueError(
            "an adapter names the weights of a transformers checkpoint, and this model was not loaded from one: load it with "
            "from_pretrained_no_processing"
        )
    if processed := model.cfg.processed:
        raise ValueError(
            f"the weights of this model were rewritten ({', '.join(processed)}), so an adapter of the checkpoint does not fit "
            "them: load the model with from_pretrained_no_processing"
        )
    return concrete_rows(_family(model), model.cfg.tree, range(len(model.blocks)))


def _family(model: BaseModel) -> ModuleType:
    assert model.hf_config is not None
    return family_of(str(model.hf_config["model_type"]), model.cfg.tree)


def _check_config(config: Mapping[str, Any], file: str) -> None:
    """Raises ValueError for an option that changes what the adapter computes and that is not read here."""
    if config.get("init_lora_weights") not in PLAIN_STARTS:
        raise ValueError(
            f"init_lora_weights={config['init_lora_weights']!r} in {file}: training began by changing the weights under the "
            f"adapter, which are those of the model here; {MERGED}"
        )
    unread = {name: value for name, value in config.items() if value and name not in WITHOUT_EFFECT | READ}
    if unread:
        options = ", ".join(f"{name}={value!r}" for name, value in unread.items())
        raise ValueError(f"{options} in {file}: not supported in a `with` block; {MERGED}")


def _read(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], file: str
) -> tuple[dict[str, LowRank], dict[str, Tensor]]:
    """The low-rank matrices, and the whole weights, by the names of the weights in the checkpoint."""
    halves: dict[str, dict[str, Tensor]] = {}
    embeddings, whole = set[str](), {}
    for key in weights:
        name = key.removeprefix(MODULE)
        if (match := HALVES.fullmatch(name)) is not None:
            module, is_embedding, half, _ = match.groups()
            halves.setdefault(module, {})[half] = weights[key]
            embeddings |= {module} if is_embedding else set()
        elif ".lora_" in name:
            raise ValueError(f"{key!r} beside {file} is a part of an adapter that is not supported; {MERGED}")
        else:
            whole[name.replace(LAYER, "")] = weights[key]
    parts = {}
    for module, of in halves.items():
        if of.keys() != {"A", "B"}:
            raise ValueError(f"beside {file} there is lora_{next(iter(of))} of {module!r} without its other half")
        rank = len(of["A"])
        ranks, alphas = (config.get(f"{name}_pattern") or {} for name in ("rank", "alpha"))
        if (stated := _of_pattern(ranks, module, config.get("r", 8))) != rank:
            raise ValueError(f"lora_A of {module!r} has rank {rank}, and {file} says {stated}")
        alpha = _of_pattern(alphas, module, config.get("lora_alpha", 8))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        parts[f"{module}.weight"] = LowRank(of["A"], of["B"], scale, module in embeddings)
    return parts, whole


def _of_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that matches the end of a module's name, as peft finds it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _ends_with(module: str, ends: Sequence[str]) -> bool:
    return any(module == end or module.endswith(f".{end}") for end in ends)


def _inputs_first(row: Row, slot: Slot) -> bool | None:
    """Whether the checkpoint's matrix is [in, out], as that of a Conv1D and of an embedding; None if it is no matrix.

    The axes of the parameter say which are inputs, and the row where they are in the matrix.
    """
    module, leaf = slot.holders[0]
    axes = axes_of(module, leaf)
    if axes is None or not axes.inputs or not axes.outputs:
        return None
    if row.pattern is None:
        return 0 in axes.inputs if slot.tensor.ndim == 2 else None
    how = row.rearrangement(0)
    inputs = {axis for dim in axes.inputs for axis in how.right[dim]}
    return bool(inputs & {*how.left[0]}) if len(how.left) == 2 else None


def _check_fits(row: Row, slot: Slot, part: "LowRank | Tensor", name: str) -> None:
    """Raises ValueError if a change has not the shape of the weight, or is no change of a matrix."""
    if isinstance(part, LowRank):
        if _inputs_first(row, slot) is None:
            raise ValueError(
                f"the adapter {name} changes {row.source!r}, which is no matrix of a linear layer; {MERGED}"
            )
        d_out, d_in = len(part.B), part.A.shape[1]
        shape: tuple[int, ...] = (d_in, d_out) if _inputs_first(row, slot) else (d_out, d_in)
    else:
        shape = tuple(part.shape)
    try:
        row.to_target(torch.empty(shape, device="meta"), slot.tensor.shape)
    except ValueError as error:
        raise ValueError(f"the adapter {name} does not fit this model: {error}") from error
