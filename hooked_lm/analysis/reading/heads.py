"""Attention heads: scores of known kinds of heads, and statistics of attention patterns.

Patterns are reduced while the model runs, some rows at a time, so memory does not grow with the square of a prompt's length.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.analysis.reading.head_kinds import KINDS, Kind, Row, TargetRows
from hooked_lm.analysis.untrained import check_control, untrained_twin
from hooked_lm.components.blocks.wiring import has_part
from hooked_lm.engine.conversations import reads_chats
from hooked_lm.engine.decoders import decoder
from hooked_lm.engine.prompts import Prompts, some_rows
from hooked_lm.engine.prompts import rows_of as inputs_of
from hooked_lm.errors import ArgumentError
from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.columns import row_blocks
from hooked_lm.models.decoder import Decoder
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.vision.inputs import Rows as Input
from hooked_lm.models.vision.inputs import VisionInputs, ids_of
from hooked_lm.results import Label
from hooked_lm.results.control import UNTRAINED, Control
from hooked_lm.results.scores import Scores, provenance

Pattern = Float[Tensor, "prompt head query_pos key_pos"]
# the layer, the indices of the prompts, rows of their patterns, which
See = Callable[[int, list[int], Pattern, slice], None]
NUMBERS = 1 << 24  # approximate limit of the numbers in a layer's patterns per batch


class HeadRows(list[Tensor]):
    """`Row`s, of different lengths, and the prompts with images that they are of, if they have some."""

    images: VisionInputs | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ChanceScores(Scores):
    """Scores with their values by chance, `chance` [*grid, prompt]."""

    chance: Float[Tensor, "..."] | None = None
    GRID: ClassVar[tuple[str, ...]] = ("values", "chance")

    def _check(self) -> None:
        if self.chance is None or self.chance.shape != self.values.shape:
            shape = None if self.chance is None else list(self.chance.shape)
            raise ValueError(f"chance is {shape}; expected the shape of the values, {list(self.values.shape)}")

    def above_chance(self) -> Scores:
        """The scores minus those by chance, for each prompt."""
        assert self.chance is not None
        return Scores(self.values - self.chance, self.axes, about=self.about)

    @property
    def control(self) -> Control | None:
        """What the same method finds in an untrained model, if it was run."""
        return Control.of(self.about)

    def _summary(self) -> list[str]:
        return [] if self.control is None else [repr(self.control)]


@reads_chats
def head_scores(
    model: Decoder,
    prompts: Prompts | None = None,
    *,
    kinds: Sequence[str] | Mapping[str, Kind] = tuple(KINDS),
    n_prompts: int = 16,
    length: int = 40,
    seed: int = 0,
    chance: str = "uniform",
    control: str | None = "auto",
) -> ChanceScores:
    """Previous-token, duplicate-token and induction scores of each head (Olsson et al. 2022, arXiv:2209.11895).

    The score is the attention, between 0 and 1, to the tokens that a head of this kind attends to, averaged over the queries of
    a prompt that have such tokens.

    Args:
        prompts: texts, ids [batch, pos], or `VisionInputs`; padding is left out. None: random tokens, repeated once
            (`repeated_random_tokens` of `n_prompts`, `length` and `seed`), in which repetition is the only structure.
        kinds: names; or a mapping of names to functions from a prompt's ids [pos] to a boolean lower triangle [query, key] of
            the keys that each query is expected to attend to. The ids of image tokens are negative, and all different: no
            image token repeats another.
        chance: "uniform": the score of uniform attention; or "shuffled": the score of the head itself at the same positions when
            the prompt's tokens, except leading special tokens, are shuffled. Only token-dependent attention exceeds "shuffled"; a
            head that always attends to the previous position does not.
        control: "untrained": also the scores of the model's untrained twin, for `scores.control`: the largest score above chance,
            of any of the kinds; "auto": of a small model; None.

    Returns scores with the axes kind, layer, head, for each prompt; NaN where a layer has no attention, or fewer heads. Raises
    ValueError for unknown kinds, prompts without a target (such as a text without repeated tokens), prompts of fewer than two
    tokens or more than n_ctx, and prompts with images that would be shuffled.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> scores = head_scores(model, n_prompts=4)
    >>> scores.select(kind="induction").top(3)["layer"].tolist()
    [1, 1, 1]
    """
    wanted = _kinds(kinds)
    if chance not in ("uniform", "shuffled"):
        raise ValueError(f"chance must be 'uniform' or 'shuffled', got {chance!r}")
    check_control(control)
    check_model(model)
    settings = {"kinds": list(wanted), "chance": chance, "seed": seed}
    if prompts is None:
        rows = HeadRows(repeated_random_tokens(model, n_prompts, length, seed))
        settings |= {"tokens": "random, repeated", "length": length}
    else:
        rows = rows_of(model, prompts)
    looks = _looks(rows, wanted)
    if chance == "uniform":
        by_chance = _of_layers(model, lambda layer: _uniform(model, layer, rows, looks))
    else:
        by_chance = _attention_to(model, _shuffled(model, rows, seed), looks)
    found = ChanceScores(
        _attention_to(model, rows, looks),
        {"kind": list(wanted), **_layers_and_heads(model)},
        chance=by_chance,
        about=provenance(model, of="attention weight", **settings),
    )
    if (twin := untrained_twin(model, control)) is None:
        return found
    of_twin = head_scores(
        decoder(twin, "heads are read of"),
        prompts,
        kinds=wanted,
        n_prompts=n_prompts,
        length=length,
        seed=seed,
        chance=chance,
        control=None,
    )
    return _beside(found, of_twin)


def _beside(found: ChanceScores, of_twin: ChanceScores) -> ChanceScores:
    """The scores with those of the untrained twin as their control; warns if they are as large."""
    own, other = (float(each.above_chance().mean.nan_to_num().max()) for each in (found, of_twin))
    control = Control.compared(UNTRAINED, "largest score above chance", own, other, "training")
    control.warn_if_as_well()
    return replace(found, about={**found.about, **control.about()})


def _kinds(kinds: Sequence[str] | Mapping[str, Kind]) -> Mapping[str, Kind]:
    if isinstance(kinds, Mapping):
        found = kinds
    else:
        names = [kinds] if isinstance(kinds, str) else list(kinds)
        if unknown := [name for name in names if name not in KINDS]:
            raise ValueError(f"there is no kind of head {unknown[0]!r}; the kinds are {', '.join(KINDS)}")
        found = {name: KINDS[name] for name in names}
    if not found:
        raise ValueError("kinds is empty: name at least one kind of head")
    return found


@dataclass(frozen=True)
class _Looks:
    """The targets of each kind in each prompt, and the number of queries that have one."""

    targets: Sequence[Sequence[TargetRows]]  # of each prompt, by kind
    n_queries: Int[Tensor, "kind prompt"]

    def rows(self, prompt: int, queries: slice) -> Bool[Tensor, "kind query_pos pos"]:
        """The targets of some queries of a prompt."""
        return torch.stack([of_kind(queries) for of_kind in self.targets[prompt]])


def _looks(rows: HeadRows, kinds: Mapping[str, Kind]) -> _Looks:
    targets = [[_target_rows(row, *kind) for kind in kinds.items()] for row in rows]
    found = _Looks(targets, torch.zeros(len(kinds), len(rows), dtype=torch.long))
    for prompt, row in enumerate(rows):
        for queries in row_blocks(len(row), len(row)):
            found.n_queries[:, prompt] += found.rows(prompt, queries).any(-1).sum(-1).cpu()
        if without := [name for name, n in zip(kinds, found.n_queries[:, prompt], strict=True) if not n]:
            raise ValueError(
                f"prompt {prompt} has no token at which a head of the kind {without[0]!r} would look at something: "
                "leave the prompt or the kind out, or give no prompts for random tokens that repeat"
            )
    return found


def _target_rows(row: Row, name: str, kind: Kind) -> TargetRows:
    """The rows of a kind's targets; those of our own kinds are computed when they are needed."""
    if kind in KINDS.values():
        return partial(kind, row)
    targets = kind(row)
    if targets.shape != (len(row), len(row)) or bool(targets.triu(1).any()):
        raise ValueError(
            f"kind {name!r} must give a lower triangle [{len(row)}, {len(row)}]: keys that a query can see"
        )
    return targets.bool().__getitem__


def _attention_to(model: Decoder, rows: HeadRows, looks: _Looks) -> Float[Tensor, "kind layer head prompt"]:
    """The attention of each head to the targets, averaged over queries that have a target."""
    sums = [torch.zeros(len(looks.n_queries), n, len(rows)) for n in head_counts(model)]

    def see(layer: int, which: list[int], pattern: Pattern, queries: slice) -> None:
        looked_at = torch.stack([looks.rows(i, queries) for i in which]).to(pattern.device)
        for number, targeted in enumerate(looked_at.unbind(1)):
            sums[layer][number][:, which] += (pattern * targeted[:, None]).sum((-2, -1)).T.cpu()

    see_patterns(model, rows, see)
    return _of_layers(model, lambda layer: sums[layer] / looks.n_queries[:, None])


def _uniform(model: Decoder, layer: int, rows: HeadRows, looks: _Looks) -> Float[Tensor, "kind head prompt"]:
    """The scores of a layer's heads if their attention were uniform over the visible keys."""
    attn, found = model.blocks[layer].attn, torch.zeros(looks.n_queries.shape)
    for i, row in enumerate(rows):
        seen: TargetRows = partial(attn.visible_keys, len(row))
        if rows.images is not None:  # tokens of an image may see each other
            with torch.no_grad():
                context = model.embedded(_input(model, rows, [i]))[2]
            seen = context.full_mask(attn.causal, attn.window)[0, 0].__getitem__
        for queries in row_blocks(len(row), len(row)):
            visible = seen(queries).to(row.device)
            found[:, i] += (looks.rows(i, queries) / visible.sum(-1, keepdim=True) * visible).sum((-2, -1)).cpu()
    return (found / looks.n_queries)[:, None].expand(-1, attn.cfg.n_heads, -1)


# ---- attention statistics ------------------------------------------------------------------------------------------


@reads_chats
def attention_statistics(model: Decoder, prompts: Prompts) -> Scores:
    """Statistics of each head's attention: means over the queries of a prompt, except the first, which sees only itself.

    - "entropy" in nats: 0 for a head that attends to one token, log n for uniform attention to n tokens.
    - "distance" in tokens: the mean distance from query to key; negative to a later key, which image tokens may see.
    - "first_token": the attention to the first token, a common attention sink (Xiao et al. 2023, arXiv:2309.17453).

    `prompts` are texts, ids [batch, pos], or `VisionInputs`; padding is left out. For attention with learned sinks, entropy and
    distance are computed from the attention to tokens, normalised to 1.

    Returns Scores with the axes statistic, layer, head, for each prompt; NaN where a layer has no attention. Raises ValueError
    for prompts of fewer than two tokens or more than n_ctx.

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> found = attention_statistics(model, "When Mary and John left, John")
    >>> found
    Scores(statistic 3 x layer 4 x head 8, 1 prompt; means ...)
    """
    check_model(model)
    rows = rows_of(model, prompts)
    found = [torch.zeros(3, n, len(rows)) for n in head_counts(model)]

    def see(layer: int, which: list[int], pattern: Pattern, queries: slice) -> None:
        positions = torch.arange(pattern.shape[-1], device=pattern.device, dtype=pattern.dtype)
        after_first = positions[queries] > 0
        pattern, n = pattern[:, :, after_first], len(positions) - 1
        total = pattern.sum(-1).clamp(min=torch.finfo(pattern.dtype).tiny)
        distance = positions[queries][after_first] - pattern @ positions / total
        entropy = torch.special.entr(pattern / total[..., None]).sum(-1)
        statistics = torch.stack([entropy, distance, pattern[..., 0]]).sum(-1) / n
        found[layer][:, :, which] += statistics.transpose(1, 2).cpu()

    see_patterns(model, rows, see)
    axes: dict[str, Sequence[Label]] = {"statistic": ["entropy", "distance", "first_token"], **_layers_and_heads(model)}
    about = provenance(model, of="attention statistics")
    return Scores(_of_layers(model, lambda layer: found[layer]), axes, about=about)


# ---- prompts -------------------------------------------------------------------------------------------------------


def repeated_random_tokens(
    model: Decoder, n_prompts: int = 16, length: int = 40, seed: int = 0
) -> Int[Tensor, "prompt pos"]:
    """Random tokens, repeated once: a BOS if the model prepends one, then `length` distinct tokens twice.

    Special tokens, and tokens of images, are not drawn. Raises ValueError if the vocabulary or n_ctx is too small.

    >>> from hooked_lm import HookedTransformer
    >>> tokens = repeated_random_tokens(
    ...     HookedTransformer.from_pretrained("demo"), n_prompts=2, length=5
    ... )
    >>> tokens.shape, bool((tokens[:, 1:6] == tokens[:, 6:]).all())
    (torch.Size([2, 11]), True)
    """
    if n_prompts < 1 or length < 1:
        raise ValueError(f"n_prompts and length must be positive, got {n_prompts} and {length}")
    bos, known, special = list[int](), model.cfg.d_vocab, set[int]()
    if model.tokenizer is not None:
        bos = model.tokens.bos_ids if model.cfg.default_prepend_bos else []
        known, special = min(known, len(model.tokenizer)), special | set(model.tokenizer.all_special_ids)
    if (total := len(bos) + 2 * length) > model.cfg.n_ctx:
        raise ValueError(f"length={length} repeated makes {total} tokens, and the model takes {model.cfg.n_ctx}")
    ids = torch.arange(known)[None]
    is_image = model.images_among(ids)
    special |= set() if is_image is None else set(ids[is_image].tolist())
    ordinary = torch.tensor([token for token in range(known) if token not in special])
    if length > len(ordinary):
        raise ValueError(f"length={length} is too long: there are {len(ordinary)} tokens that are not special")
    generator = torch.Generator().manual_seed(seed)
    once = [ordinary[torch.randperm(len(ordinary), generator=generator)[:length]] for _ in range(n_prompts)]
    return torch.stack([torch.cat([torch.tensor(bos, dtype=torch.long), row, row]) for row in once])


def _shuffled(model: Decoder, rows: HeadRows, seed: int) -> HeadRows:
    """The tokens of each prompt in random order, except for leading special tokens."""
    if rows.images is not None:
        raise ValueError(
            "chance='shuffled' needs prompts without images, whose tokens have places: give chance='uniform'"
        )
    generator = torch.Generator().manual_seed(seed)
    special = set() if model.tokenizer is None else set(model.tokenizer.all_special_ids)
    found = HeadRows()
    for row in rows:
        n_first = next((i for i, token in enumerate(row.tolist()) if token not in special), len(row))
        order = torch.randperm(len(row) - n_first, generator=generator) + n_first
        found.append(torch.cat([row[:n_first], row[order.to(row.device)]]))
    return found


def rows_of(model: Decoder, prompts: Prompts) -> HeadRows:
    """The ids of each prompt without padding, from texts or ids [batch, pos] or [pos]; raises ValueError for other lengths
    than 2 to n_ctx. Ids of image tokens are negative, and all different."""
    if isinstance(prompts, VisionInputs):
        rows = _rows_with_images(model, prompts)
    elif isinstance(prompts, Tensor):
        if prompts.ndim not in (1, 2) or prompts.is_floating_point() or not len(prompts):
            raise ArgumentError(f"prompts must be texts, or ids [batch, pos] or [pos], got {tuple(prompts.shape)}")
        tokens = prompts if prompts.ndim == 2 else prompts[None]
        mask = model.tokens.attention_mask(tokens)
        rows = HeadRows(row[real.bool()] for row, real in zip(tokens, mask, strict=True))
    elif isinstance(prompts, Chat):
        rows = HeadRows(prompts[i].tokens[0] for i in range(len(prompts)))
    else:
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts:
            raise ArgumentError("prompts is empty: give at least one")
        rows = HeadRows(model.to_tokens(text, truncate=False)[0] for text in texts)  # type: ignore[arg-type]
    for i, row in enumerate(rows):
        if not 2 <= len(row) <= model.cfg.n_ctx:
            raise ArgumentError(f"prompt {i} has {len(row)} tokens; expected 2 to {model.cfg.n_ctx}, the model's n_ctx")
    return rows


def _rows_with_images(model: Decoder, prompts: VisionInputs) -> HeadRows:
    inputs = inputs_of(model, prompts)
    assert isinstance(inputs, VisionInputs), "as the prompts are"
    mask = model.tokens.attention_mask(inputs.tokens) if inputs.attention_mask is None else inputs.attention_mask
    is_image = model.images_among(inputs.tokens) if inputs.is_image is None else inputs.is_image
    assert is_image is not None, "a model that reads images"
    ids = torch.where(is_image, -1 - torch.arange(inputs.shape[1], device=is_image.device), inputs.tokens)
    rows = HeadRows(row[real.bool()] for row, real in zip(ids, mask, strict=True))
    rows.images = replace(inputs, attention_mask=mask)
    return rows


def _input(model: Decoder, rows: HeadRows, some: Sequence[int]) -> Input:
    """What the model reads of some prompts of one length."""
    if rows.images is None:
        return torch.stack([rows[i] for i in some]).to(model.device)
    part = some_rows(model, rows.images, some)
    assert isinstance(part, VisionInputs), "as all of them"
    real = part.of_rows()["attention_mask"].bool()
    marks: dict[str, Any] = {name: x[real].view(len(some), -1) for name, x in part.of_rows().items()}
    return replace(part, **marks).to(model.device)


# ---- patterns ------------------------------------------------------------------------------------------------------


def check_model(model: nn.Module) -> None:
    """Raises TypeError unless the model is a `Decoder`, and ValueError if it has no attention."""
    if not any(head_counts(decoder(model, "heads are read of"))):
        raise ValueError("this model has no attention: there are no heads to read")


def head_counts(model: Decoder) -> list[int]:
    """The number of heads of each layer; 0 for layers without attention."""
    return [block.attn.cfg.n_heads if has_part(block, "attn") else 0 for block in model.blocks]


def _layers_and_heads(model: Decoder) -> dict[str, range]:
    return {"layer": range(len(model.blocks)), "head": range(max(head_counts(model)))}


def _of_layers(
    model: Decoder, of_layer: Callable[[int], Float[Tensor, "of _ prompt"]]
) -> Float[Tensor, "of layer head prompt"]:
    """Stack the values of all layers; NaN for heads that a layer lacks."""
    counts = head_counts(model)
    some = {layer: of_layer(layer) for layer, n in enumerate(counts) if n}
    of, _, prompt = next(iter(some.values())).shape
    found = torch.full((of, len(counts), max(counts), prompt), torch.nan)
    for layer, values in some.items():
        found[:, layer, : counts[layer]] = values
    return found


@dataclass(frozen=True)
class _Look:
    """A hook that passes a layer's patterns to a function, some rows at a time."""

    see: See
    layer: int
    prompts: list[int]
    records = True  # a read-only hook, which needs no copy of the value
    in_blocks = True

    def query_columns(self, hook: HookPoint, shape: tuple[int, ...]) -> range:
        """All rows."""
        return range(shape[-2])

    def __call__(self, pattern: Tensor, hook: HookPoint) -> None:
        first = 0 if hook.columns is None else hook.columns.shown[0]
        self.see(self.layer, self.prompts, pattern.float(), slice(first, first + pattern.shape[-2]))


def see_patterns(model: Decoder, rows: HeadRows, see: See, layers: Sequence[int] | None = None) -> None:
    """Run prompts of any lengths, and call `see(layer, prompts, pattern, queries)` with rows of the patterns of each layer.

    Batches consist of prompts of one length, so there is no padding; NUMBERS limits their size.
    """
    counts = head_counts(model)
    which = [layer for layer, n in enumerate(counts) if n and (layers is None or layer in layers)]
    if not which:
        return
    for some in _batches([len(row) for row in rows], max(counts)):
        tokens = _input(model, rows, some)
        look = _Look(see, 0, some)
        hooks = [(f"blocks.{layer}.attn.hook_pattern", replace(look, layer=layer)) for layer in which]
        with torch.no_grad():
            real = torch.ones_like(ids_of(tokens))
            model.run_with_hooks(tokens, attention_mask=real, stop_at_layer=which[-1] + 1, fwd_hooks=hooks)


def _batches(lengths: list[int], n_heads: int) -> Iterator[list[int]]:
    """Yield the indices of the prompts of each batch."""
    for length in sorted(set(lengths)):
        same = [i for i, other in enumerate(lengths) if other == length]
        size = max(1, NUMBERS // (n_heads * length**2))
        yield from (same[start : start + size] for start in range(0, len(same), size))
