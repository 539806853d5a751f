"""Checks and normalises the arguments of a sweep: prompts, layers, positions, sources of values."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from hooked_lm.callers import warn_caller
from hooked_lm.engine.cells_before_blocks import is_of_images, patch_labels, rows_and_positions, shapes_at
from hooked_lm.engine.edit import dense
from hooked_lm.engine.first_change import note_tokens
from hooked_lm.engine.stacks import refuse_dual_encoder, refuse_vision_encoder, tokens_at
from hooked_lm.hooks import HookedRootModule, UnknownSite
from hooked_lm.hooks.head_labels import parse_head_label
from hooked_lm.hooks.indices import Indices, indices_in, plain_indices
from hooked_lm.hooks.token_labels import PADDING, Named
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.chat_of_messages import as_prompts, conversations_in
from hooked_lm.models.vision.dual_encoder import DualEncoder
from hooked_lm.models.vision.inputs import PromptRows, Rows, SomeRows, VisionInputs, ids_of
from hooked_lm.results import Label

Tokens = str | Sequence[str] | Int[Tensor, "..."]  # texts, or ids [batch, pos] or [pos] (lengths are compared in words)
Messages = (
    Mapping[str, Any] | Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]]
)  # of one conversation, or several
Prompts = Tokens | VisionInputs | Chat | Messages  # or ids with the images among them, or conversations
AxisSelection = Named | Indices  # "each": an axis of all; indices: an axis of these; None: no axis, all together
PAIRED = ("clean", "corrupted")  # the prompts of an experiment on pairs
STUDY = "; hooked_lm.studies.study_pairs, and hooked-lm patch --pairs, run pairs of different lengths"
Values = str | Tensor | Mapping[str, Tensor]  # "clean", "corrupted", "mean", "zero", a tensor, or a cache
OTHER_RUN = {"denoise": "clean", "noise": "corrupted"}  # by direction, the run whose values are put into the other
HeadSelection = AxisSelection | Sequence[str]  # or labels such as "L1H7": an axis of these


def rows_of(model: HookedRootModule, prompts: Prompts, name: str = "prompts", reads_pairs: bool = False) -> PromptRows:
    """What the model reads of prompts: ids [batch, pos], with their images if they have some. Raises as `tokens_of` does.

    `reads_pairs`: whether the caller knows what a dual encoder reads, images and texts with a batch each.
    """
    refuse_vision_encoder(model, "this function")
    if not reads_pairs:
        refuse_dual_encoder(model, "this function")
    if isinstance(model, DualEncoder):
        if not isinstance(prompts, VisionInputs):
            raise TypeError(
                f"the {name} of a {type(model).__name__} are VisionInputs(texts, {{'pixel_values': images}}), got a "
                f"{type(prompts).__name__}"
            )
        return model.inputs(prompts)
    if (several := conversations_in(prompts)) is not None:
        prompts = as_prompts(model, several)
    if isinstance(prompts, Chat):
        ids = _of_equal_length(prompts, name)
        return ids if prompts.inputs is None else replace(prompts.inputs, attention_mask=None)
    if not isinstance(prompts, VisionInputs):
        return tokens_of(model, prompts, name)  # type: ignore[arg-type]  # messages are a Chat now
    if not getattr(model, "sites_of_images", ()):
        raise TypeError(f"the {name} have images, which a {type(model).__name__} does not read")
    mask = prompts.attention_mask if isinstance(prompts.tokens, Tensor) else None  # texts of one length have no padding
    return replace(prompts, tokens=tokens_of(model, prompts.tokens, name), attention_mask=mask)


def _of_equal_length(chat: Chat, name: str) -> Int[Tensor, "batch pos"]:
    """The token ids; ValueError if some conversations are longer than others."""
    lengths = [sum(label != PADDING for label in row) for row in chat.labels]
    if len(set(lengths)) != 1:
        raise ValueError(f"all {name} must have the same number of tokens; these conversations have {lengths}")
    return chat.tokens


def some_rows(model: HookedRootModule, rows: SomeRows, which: slice | Sequence[int]) -> SomeRows:
    """Some of the prompts, with their images."""
    if not isinstance(rows, VisionInputs):
        return rows[which]  # type: ignore[return-value]
    return model.rows(rows, range(len(rows))[which] if isinstance(which, slice) else which)


def tokens_of(model: Any, prompts: Tokens, name: str = "prompts") -> Int[Tensor, "batch pos"]:
    """Token ids [batch, pos] of texts or ids.

    Raises TypeError for other types, ValueError for prompts of different lengths and for empty prompts.
    """
    if isinstance(prompts, Tensor):
        if prompts.ndim not in (1, 2) or prompts.numel() == 0:
            raise ValueError(f"{name} must be ids [batch, pos] or [pos], got {tuple(prompts.shape)}")
        if prompts.is_floating_point() or prompts.is_complex() or prompts.dtype == torch.bool:
            raise TypeError(f"{name} must be whole numbers, got {str(prompts.dtype).removeprefix('torch.')}")
        ids = prompts if prompts.ndim == 2 else prompts[None]
        if getattr(model, "tokenizer", None) is not None and getattr(model, "padding_side", "left") == "right":
            _warn_of_padding(ids, model.tokens.pad_id, name)
        return ids
    texts = [prompts] if isinstance(prompts, str) else list(prompts) if isinstance(prompts, Sequence) else [prompts]
    if strange := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(
            f"{name} must be a text, a list of texts, a tensor of ids, or VisionInputs for a model that reads images; got "
            f"{kind_of(strange[0])}{' in a list' * isinstance(prompts, Sequence)}"
        )
    if not texts:
        raise ValueError(f"{name} is empty: give at least one")
    both = [model.to_tokens(text, truncate=False) for text in texts]  # a forward pass refuses too many
    rows = [ids[0][0] if isinstance(ids, tuple) else ids[0] for ids in both]  # a tuple is (ids, mask)
    lengths = [len(row) for row in rows]
    if len(set(lengths)) != 1:
        what, hint = (f"{name} prompts", STUDY) if name in PAIRED else (name, _instead(model, name, lengths))
        raise ValueError(f"all {what} must have the same number of tokens; these have {lengths}{hint}")
    return torch.stack(rows)


def _warn_of_padding(ids: Int[Tensor, "batch pos"], pad: int, name: str) -> None:
    """Warns of rows that begin with more pad tokens than others, which a model that looks for padding on the right reads as
    text."""
    n_pad = (ids == pad).cumprod(1).sum(1)
    rows = (n_pad > n_pad.min()).nonzero().flatten().tolist()
    if rows:
        warn_caller(
            f"{name}: rows {rows[:10]} of {len(ids)} begin with more pad tokens ({pad}) than the others, and the model reads "
            "them as text, as padding_side is 'right': load it with default_padding_side='left', or give prompts of one length"
        )


def _instead(model: HookedRootModule, name: str, lengths: Sequence[int]) -> str:
    """What to do with prompts of different lengths. Padding changes nothing before it where attention is causal."""
    if getattr(getattr(model, "cfg", None), "attention_dir", "") != "causal":
        return "; call the function for those of one length"
    return (
        f"; call the function for those of one length, or give ids, {name}=model.to_tokens({name}, padding_side='right'), with a "
        f"metric at the last token of each, such as metrics.logit(answers, positions=torch.tensor({[n - 1 for n in lengths]}), "
        "model=model)"
    )


def kind_of(value: object) -> str:
    """A value in an error: the type, and the shape of a tensor, without its numbers; a short value unchanged.

    >>> kind_of(3), kind_of(torch.zeros(2, 3)), kind_of({"pixel_values": torch.zeros(9)})
    ('3', 'a tensor (2, 3)', "a dict of 'pixel_values'")
    """
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {', '.join(map(repr, list(value)[:4])) or 'nothing'}"
    return shown if len(shown := repr(value)) <= 60 else f"a {type(value).__name__}"


def chosen(which: AxisSelection, size: int, what: str) -> list[int] | None:
    """The selected indices of an axis, for "each", an int, several ints or a slice. None: no axis, all together.

    Raises IndexError for an index out of range, ValueError for a repeated index, an empty selection and another word,
    TypeError for other types.
    """
    if which is None:
        return None
    if isinstance(which, str):
        if which != "each":
            raise ValueError(f"{what} must be 'each', some indices or None, got {which!r}")
        return list(range(size))
    some = plain_indices(what, which)
    if some == []:
        raise ValueError(f"{what} is empty: give some, or None for all together")
    indices = indices_in(what, some, size)
    if len(set(indices)) < len(indices):
        twice = next(index for index in indices if indices.count(index) > 1)
        raise ValueError(f"{what} {twice} is given twice in {some}")
    return indices


def labelled_heads(heads: HeadSelection) -> list[tuple[int, int]] | None:
    """The layer and index of each head, if heads are labels such as "L1H7"; otherwise None.

    Raises ValueError for a mixture of labels and indices, and for a head that is given twice.
    """
    several = [heads] if isinstance(heads, str) else heads if isinstance(heads, (list, tuple)) else []
    if heads == "each" or not any(isinstance(head, str) for head in several):
        return None
    if numbers := [head for head in several if not isinstance(head, str)]:
        raise ValueError(f"heads are labels such as 'L1H7', or indices; got {numbers[0]!r} among labels")
    found = [parse_head_label(str(head)) for head in several]
    if len(set(found)) < len(found):
        raise ValueError(f"a head is given twice in {several}")
    return found


def position_labels(model: Any, rows: Rows) -> list[Label]:
    """Labels of the positions: "10  Mary" where all prompts have the same token, the number alone where they differ, and
    numbers alone without a tokenizer.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> position_labels(
    ...     model, model.to_tokens(["The capital of France is", "The capital of Italy is"])
    ... )
    ['0 <|endoftext|>', '1 The', '2  capital', '3  of', 4, '5  is']
    """
    if getattr(model, "tokenizer", None) is None:
        return list(range(rows.shape[1]))
    ids = ids_of(rows)
    is_shared = (ids == ids[:1]).all(0).tolist()
    return [
        f"{pos} {model.to_single_str_token(token)}" if shared else pos
        for pos, (token, shared) in enumerate(zip(ids[0].tolist(), is_shared, strict=True))
    ]


def position_axis(model: Any, rows: Rows, site: str) -> tuple[str, list[Label]]:
    """The name and labels of the positions of a site: tokens that the prompts share, or patches of images."""
    if isinstance(rows, VisionInputs) and is_of_images(model, site):
        return "patch", patch_labels(model, rows, rows_and_positions(model, rows, site)[1])
    return "position", position_labels(model, rows)


def values_of(model: HookedRootModule, tokens: Rows, sites: Sequence[str]) -> Mapping[str, Tensor]:
    """The values at these sites in a forward pass."""
    with torch.no_grad():
        return model.run_with_cache(tokens, names_filter=list(sites), return_type=None, return_cache_object=False)[1]


def site_of_layer(model: HookedRootModule, name: str, layer: int) -> str | None:
    """The full name of a site in a layer; None if the layer lacks it."""
    crossing = name.startswith("decoder.cross_attn.")
    try:
        site = ("decoder." + name.rpartition(".")[2], layer, "cross_attn") if crossing else (name, layer)
        return model.names(site)[0]
    except UnknownSite:
        return None


def present(model: HookedRootModule, names: Sequence[str], layers: Iterable[int]) -> list[str]:
    """Those of these short names that a site of at least one of the layers has."""
    some = list(layers)
    return [name for name in names if any(site_of_layer(model, name, layer) for layer in some)]


def check_has_mean(site: str, value: Tensor) -> None:
    """Raises ValueError for integer values, such as token ids, which have no meaningful mean."""
    if not (value.is_floating_point() or value.is_complex()):
        kind = str(value.dtype).removeprefix("torch.")
        raise ValueError(f"'{site}' holds whole numbers ({kind}), which have no mean: take the values of another run")


def check_source(model: HookedRootModule, value: Tensor, site: str, batch: int, n_pos: int) -> None:
    """Raises ValueError if a clean value does not fit a corrupted run of `batch` prompts of `n_pos` tokens, or this model."""
    dims, shape = model.hook_dict[site].dims, tuple(value.shape)
    if len(shape) != len(dims):
        raise ValueError(
            f"the clean '{site}' has shape {shape}; expected [{', '.join(dims)}]: keep the batch dimension"
        )
    lengths = dict(zip(dims, shape, strict=True))
    if (clean_pos := lengths.get("pos", lengths.get("query_pos", n_pos))) != n_pos:
        raise ValueError(
            f"clean and corrupted prompts differ in length: '{site}' of the clean run has {clean_pos} positions, "
            f"the corrupted tokens have {n_pos}; patching position by position needs prompts that line up"
        )
    if lengths.get("batch", batch) not in (1, batch):
        raise ValueError(
            f"the clean run has {lengths['batch']} prompts, the corrupted run {batch}: give the same number"
        )
    for dim, size in {"d_model": model.cfg.d_model, "head": model.cfg.n_heads}.items():
        if lengths.get(dim, size) != size:
            raise ValueError(
                f"the clean '{site}' has {dim} {lengths[dim]}, this model {size}: it comes from another model"
            )


def check_direction(direction: str) -> None:
    """Raises ValueError for an unknown direction."""
    if direction not in OTHER_RUN:
        raise ValueError(f"direction must be 'denoise' or 'noise', got {direction!r}")


def replacement(replace_with: Values | None, direction: str) -> Values:
    """What replaces values: a tensor, a cache, or a word as in `replacement_word`; TypeError for other types."""
    if isinstance(replace_with, (Tensor, Mapping)):
        check_direction(direction)
        return replace_with
    if not isinstance(replace_with, str | None):
        got = type(replace_with).__name__
        raise TypeError(f"replace_with must be a word, such as 'clean' or 'mean', a tensor or a cache, got a {got}")
    return replacement_word(replace_with, direction)


def replacement_word(replace_with: str | None, direction: str) -> str:
    """The word for what replaces values: "mean", "zero", or the other run, "clean" or "corrupted", which None means.

    Raises ValueError for another word, and for the run that the direction changes, whose own values would change nothing.
    """
    check_direction(direction)
    other = OTHER_RUN[direction]
    if not isinstance(replace_with, str | None):
        raise TypeError(f"replace_with must be {other!r}, 'mean' or 'zero' here, got {kind_of(replace_with)}")
    if replace_with is None:
        return other
    if replace_with in (other, "mean", "zero"):
        return replace_with
    if replace_with in OTHER_RUN.values():
        raise ValueError(
            f"direction={direction!r} changes the {replace_with} run, so replace_with={replace_with!r} would change nothing: "
            f"give {other!r}, or another direction"
        )
    raise ValueError(f"replace_with must be one of {other!r}, 'mean', 'zero', got {replace_with!r}")


class Source:
    """The source of new values: another run ("clean" or "corrupted"), its mean over prompts, zeros, a tensor, or a cache.

    `source` is as `replacement` returns it. `shapes` are those of values whose batch are images, if they are known. Raises
    ValueError if the other run is missing.
    """

    def __init__(
        self,
        model: HookedRootModule,
        source: Values,
        other: Rows | None,
        tokens: Rows,
        sites: Sequence[str],
        shapes: Mapping[str, torch.Size] | None = None,
    ) -> None:
        self.model, self.source = model, source
        self.cache: Mapping[str, Tensor] = {}
        if isinstance(source, str) and source != "zero":
            if other is None:
                raise ValueError(
                    f"replace_with={source!r} needs the values of the clean prompts: give clean=..., or Pairs in place of both; "
                    "'zero', a tensor and a cache need no other prompts"
                )
            self.cache = values_of(model, other, sites)
            note_tokens(self.cache.values(), other)
        elif isinstance(source, Mapping):
            self.cache = source
        self.batch, self.tokens, self.sites = len(tokens), tokens, sites
        if shapes is not None:
            self._shapes = shapes

    @cached_property
    def _shapes(self) -> Mapping[str, torch.Size]:
        """The shapes of the values at the sites whose batch are images."""
        return shapes_at(self.model, self.tokens, self.sites)

    def value(self, site: str) -> Tensor:
        """The new value of a site, with all of its axes; those of length 1 broadcast."""
        dims = self.model.hook_dict[site].dims
        if isinstance(self.source, Tensor):
            given = dense(self.source)
            return given.reshape((1,) * (len(dims) - given.ndim) + tuple(given.shape))
        if isinstance(self.source, str) and self.source == "zero":
            return torch.zeros((1,) * len(dims))
        if site not in self.cache:
            raise UnknownSite(f"the cache has no '{site}'")
        value = self.cache[site]
        if isinstance(self.source, Mapping):
            here = self._shapes.get(site)
            if here is None:
                check_source(self.model, value, site, self.batch, tokens_at(self.model, self.tokens, site).shape[1])
            elif value.shape != here:
                raise ValueError(
                    f"the clean '{site}' has shape {tuple(value.shape)}, that of these images is {tuple(here)}"
                )
        if isinstance(self.source, str) and self.source == "mean":
            check_has_mean(site, value)
            return value.mean(0, keepdim=True)
        return value
