"""The language models of composite checkpoints, which read images or sounds besides text.

One rule finds the language model of any composite: its config is the innermost `thinker_config` or `text_config`, and the
position of its embedding among the tensor names shows the prefix of its tensors. All else is left out: towers, projectors,
generators. On text alone the language model computes what the composite does.

Parts inside of the language model that only images use are left out too: a family names them in `text_names`.
"""

import copy
import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hooked_lm.families import family, model_class
from hooked_lm.hub.renamed import Renamed, present_name
from hooked_lm.models.config.read import Tree
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row, expand

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PARTS = ("thinker_config", "text_config")
OUTER = ("", "thinker.")  # before all names of a file
TOWERS = ("language_model.", "text_model.", "llm.", "transformer.")  # the module of the language model
# As transformers writes Kimi-K2.5 and Qianfan-OCR: the old names of the layers of their vision towers are given to all layers.
RENAMED_LAYERS = {r"^(model\.)?(blocks|encoder\.layers)\.(?=\d)": r"\1layers."}
# Composite -> fields that it sets in the config of its language model and that have no effect on text alone.
FOR_IMAGES = {
    "paligemma": ("use_bidirectional_attention", "num_image_tokens"),
    **dict.fromkeys(("idefics3", "smolvlm"), ("perceiver_config", "pixel_shuffle_factor")),
}
# Composite that has the fields of its language model in its own config -> the model type of that language model
FLAT = {"phi4_multimodal": "phi3"}


def text_config(config: "PreTrainedConfig") -> "PreTrainedConfig | None":
    """A copy of the config of a composite's language model; None for any other config.

    The language model is tied if its config or that of the composite says so: which of them counts depends on where the head
    is, and a head in the file that differs decides.
    """
    part = _inner(config)
    if part is None:
        return _flat(config) if config.model_type in FLAT else None
    inner = part
    while (deeper := _inner(inner)) is not None:
        inner = deeper
    owners = (config, inner) if part is inner else (inner,)
    text, defaults = copy.deepcopy(inner), type(inner)().to_dict()
    for field in FOR_IMAGES.get(config.model_type, ()):
        if field in defaults:
            setattr(text, field, defaults[field])
        elif hasattr(text, field):
            delattr(text, field)
    text.tie_word_embeddings = any(bool(getattr(owner, "tie_word_embeddings", False)) for owner in owners)
    return text


def text_family(config: "PreTrainedConfig", text: "PreTrainedConfig") -> ModuleType:
    """The family of a composite's language model. Raises ValueError if there is none, or if it is that of an encoder."""
    of = f"the language model of this {config.model_type}"
    try:
        found = family(text.model_type)
    except ValueError as error:
        raise ValueError(f"{of} cannot be loaded: {error}") from error
    if model_class(text.model_type) == "HookedEncoder":
        raise ValueError(f"{of} is a {text.model_type}, an encoder: only language models that write text are loaded")
    return found


class CompositePart(Renamed):
    """The tensors of one model of a composite, by the names that they have in a checkpoint of it alone.

    `left_out` maps the composite's other modules to their numbers of tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        names: Mapping[str, str | tuple[str, ...]],
        left_out: Mapping[str, int],
    ) -> None:
        super().__init__(tensors, names)
        self.left_out = dict(sorted(left_out.items()))


def language_model(
    tensors: Mapping[str, Tensor], module: ModuleType, tree: Tree, text_names: Mapping[str, str | None]
) -> CompositePart:
    """The tensors of the language model among those of a composite; `text_names` are those of its family.

    Raises ValueError if there is no embedding of the language model, and for tensors of it that no row reads.
    """
    rows = expand(module.rows(tree), l=list(range(len(tree.blocks))))
    finder = _Finder(module, rows, tensors, text_names)
    names, unread, left_out = dict[str, str](), list[str](), Counter[str]()
    for name in tensors:
        if (rest := finder.below_tower(name)) is None:
            left_out[left_out_module(name)] += 1
        elif part := finder.for_images(rest):
            left_out[name.removesuffix(rest) + part] += 1
        elif (present := finder.present(rest)) is None:
            unread.append(name)
        else:
            names[present] = name
    if unread:
        more = f" and {len(unread) - 4} more" if len(unread) > 4 else ""
        kind = module.__name__.rpartition(".")[2]
        raise ValueError(
            f"the language model has tensors that a {kind} has not: {', '.join(unread[:4])}{more}; left out is only what lies "
            f"outside of it (of {finder.prefix + '*' if finder.is_nested else 'its modules'})"
        )
    joined = {
        whole: tuple(names.pop(part) for part in parts)
        for whole, parts in finder.joined.items()
        if names.keys() >= {*parts}
    }
    return CompositePart(tensors, {**names, **joined}, united(left_out))


def adjusted_to_tensors(tree: DecoderConfig, module: ModuleType, tensors: Mapping[str, Tensor]) -> DecoderConfig:
    """The tree, untied if the file has a head that differs from the embedding, as in transformers."""
    sources = {row.target: row.source for row in module.rows(tree)}
    head, embedding = sources["unembed.W_U"], sources["embed.W_E"]
    if not tree.unembed.tied or head not in tensors or torch.equal(tensors[head], tensors[embedding]):
        return tree
    return replace(tree, unembed=replace(tree.unembed, tied=False))


def described(left_out: Mapping[str, int]) -> str:
    """What was left out, as a phrase.

    >>> described({"multi_modal_projector": 4, "vision_tower": 391})
    'multi_modal_projector (4 tensors), vision_tower (391 tensors)'
    """
    return ", ".join(f"{name} ({n} tensor{'s' * (n != 1)})" for name, n in left_out.items()) or "nothing"


def _flat(config: "PreTrainedConfig") -> "PreTrainedConfig":
    """The config of the language model of a composite in `FLAT`: all fields but the configs of the towers."""
    from transformers import CONFIG_MAPPING

    towers = {name for name, value in config.to_dict().items() if name.endswith("_config") and isinstance(value, dict)}
    fields = {name: value for name, value in config.to_dict().items() if name not in (*towers, "model_type")}
    return CONFIG_MAPPING[FLAT[config.model_type]](**fields)


def _inner(config: "PreTrainedConfig") -> "PreTrainedConfig | None":
    return next((part for name in PARTS if (part := getattr(config, name, None)) is not None), None)


def left_out_module(name: str) -> str:
    """The module of a composite that has this tensor, in the words of the file."""
    parts = name.split(".")
    return ".".join(parts[: 2 if parts[0] in ("model", "thinker") else 1])


def united(left_out: Mapping[str, int]) -> dict[str, int]:
    """The same, with one entry for modules that differ in numbers alone.

    >>> united({"layers.3": 2, "layers.8": 2, "layers.9": 2, "tower": 7})
    {'layers.{3,8-9}': 6, 'tower': 7}
    """
    total, numbers = Counter[str](), dict[str, list[set[int]]]()
    for name, n in left_out.items():
        found = [int(part) for part in name.split(".") if part.isdigit()]
        kind = ".".join("{}" if part.isdigit() else part for part in name.split("."))
        total[kind] += n
        for seen, number in zip(numbers.setdefault(kind, [set() for _ in found]), found, strict=True):
            seen.add(number)
    return {kind.format(*(_spans(seen) for seen in numbers[kind])): n for kind, n in total.items()}


def _spans(numbers: Collection[int]) -> str:
    """A number as it is, several in braces: `{3,8-9}`."""
    starts = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    spans = [f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    return spans[0] if len(numbers) == 1 else f"{{{','.join(spans)}}}"


class _Finder:
    """Tells the tensors of a language model from those of the other modules, by the rows of its family.

    `prefix` is that of the language model's tensors. It is only the outer one ("" or "thinker.") where the modules of the
    language model lie beside the towers.
    """

    def __init__(
        self,
        module: ModuleType,
        rows: Iterable[Row],
        tensors: Collection[str],
        text_names: Mapping[str, str | None],
    ) -> None:
        self._base, self._ignored = module.PREFIX, module.IGNORED
        renamed = {old: new for old, new in text_names.items() if new is not None}
        self._renamed = {**getattr(module, "RENAMED", {}), **renamed}
        self._for_images = [re.compile(old) for old in text_names if old not in renamed]
        embedding = next(row.source for row in rows if row.target == "embed.W_E")
        self.joined: Mapping[str, tuple[str, ...]] = getattr(module, "JOINED", {})
        self._sources = {row.source for row in rows}.union(*self.joined.values())
        embedding = self.joined.get(embedding, (embedding,))[0]
        self._beside = {source.split(".")[0] for source in self._sources if not source.startswith(self._base)}
        self._roots = self._beside | {source.removeprefix(self._base).split(".")[0] for source in self._sources}
        prefix = next(self._prefixes(embedding, tensors), None)
        if prefix is None:
            raise ValueError(
                f"no tensor has the name of a language model's embedding, which would end in {embedding!r}; the first are "
                + ", ".join(sorted(tensors)[:3])
            )
        self.prefix, self.is_nested = prefix, prefix not in OUTER
        self._outer = next(outer for outer in reversed(OUTER) if prefix.startswith(outer))

    def _prefixes(self, embedding: str, tensors: Collection[str]) -> Iterator[str]:
        """The prefixes with which the file holds the embedding."""
        for outer, model, tower in product(OUTER, ("model.", ""), TOWERS):
            prefix = outer + model + tower
            if prefix + embedding in tensors or prefix + embedding.removeprefix(self._base) in tensors:
                yield prefix
        yield from (outer for outer in OUTER if outer + embedding in tensors)
        yield from (outer for outer in OUTER if outer + embedding.removeprefix(self._base) in tensors)

    def below_tower(self, name: str) -> str | None:
        """The name of a tensor of the language model, without the prefix; None for a tensor of another module."""
        if self.is_nested and name.startswith(self.prefix):
            return name.removeprefix(self.prefix)
        if not name.startswith(self._outer):
            return None
        rest = name.removeprefix(self._outer)
        roots = self._beside if self.is_nested else self._roots
        present = present_name(rest, self._renamed).removeprefix("" if self.is_nested else self._base)
        return rest if present.split(".")[0] in roots else None

    def for_images(self, rest: str) -> str | None:
        """The part of the language model that has this tensor, if only images use that part; else None."""
        found = next((match for part in self._for_images if (match := part.search(rest))), None)
        return None if found is None else rest[: found.end()]

    def present(self, rest: str) -> str | None:
        """The name of a tensor in a checkpoint of the language model alone; None if no row reads it."""
        spelled = present_name(rest, self._renamed)
        spellings = dict.fromkeys((spelled, present_name(spelled, RENAMED_LAYERS)))
        names = [name for spelling in spellings for name in (spelling, self._base + spelling)]
        for name in names:
            if name in self._sources:
                return name
        return next((name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in self._ignored)), None)
