"""Reads a prompt in several forward passes, and keeps its activations."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.hooks import Cache, HookedRootModule, NamesFilter
from hooked_lm.hooks.generation_step import GenerationStep, current, run_generation, set_current
from hooked_lm.hooks.hook_spec import HookList
from hooked_lm.models.checks import check_cacheable, check_in_parts, first_bidirectional
from hooked_lm.models.generation.loop import Reader, TokenSequence
from hooked_lm.models.prefix import Prefix, Prompt, as_prompt, changing_hooks, opened, versions

KEYS = {"key_pos", "block"}  # axes of keys, of old tokens and new ones


class PromptReader(Reader):
    """Runs a decoder on its prompt, in pieces of `chunk` tokens if it is given, and then on its continuation."""

    def __init__(
        self,
        model: HookedRootModule,
        sequence: TokenSequence,
        cache: KeyValueCache | None,
        record: "SequenceRecord | None" = None,
        chunk: int | None = None,
        known: Float[Tensor, "batch d_vocab"] | None = None,
    ) -> None:
        super().__init__(model, sequence, cache, known)
        self.record, self.chunk = record, chunk

    def read(self, n_new: int, options: dict[str, Any]) -> Float[Tensor, "batch pos d_vocab"]:
        """The model's logits at the last `n_new` positions, or only at the last one; in pieces, at those of the last."""
        return self.pieces(n_new, options)[-1]

    def pieces(self, n_new: int, options: dict[str, Any]) -> list[Any]:
        """The model's output at the last `n_new` positions, piece by piece; only the last one that has logits to keep."""
        model, sequence, n, now, outputs = self.model, self.sequence, len(self.sequence), current(), []
        resid, pos_embed = None, None
        if n_new > sequence.tokens.shape[1]:
            resid, pos_embed = model.get_residual(sequence.all_embeds(model), attention_mask=sequence.real)
        for start in range(n - n_new, n, self.chunk or n_new):
            end = min(n, start + (self.chunk or n_new))
            if now is not None and end - start < n_new:
                set_current(now.piece(end, end - start))
            options["attention_mask"] = sequence.real[:, :end].long()
            if resid is None:
                outputs.append(model(sequence.columns(start, end), **options))
            else:
                of_piece = None if pos_embed is None else pos_embed[:, start:end]
                outputs.append(model(resid[:, start:end], start_at_layer=0, shortformer_pos_embed=of_piece, **options))
            if self.record:
                self.record.keep(end)
        return outputs


class SequenceRecord:
    """The activations of every token of a sequence, from the forward pass that first processed the token.

    If a layer is bidirectional, those of the last forward pass, as each new token changes them. Sites of images are stored
    once, from the forward pass that read them. The first `length` positions were read before.
    """

    def __init__(
        self,
        model: HookedRootModule,
        names_filter: NamesFilter,
        device: torch.device | str | None = None,
        length: int = 0,
    ) -> None:
        self.model = model
        self.seen, self.hooks, _ = model.get_caching_hooks(names_filter, device=device)
        self.pieces: dict[str, list[Tensor]] = {}  # in the order in which the sites were reached
        self.keeps_last = first_bidirectional(model.blocks) is not None
        self.length = length

    def keep(self, length: int) -> None:
        """Stores the activations of the new positions, after a forward pass that reached `length` positions."""
        if self.keeps_last:
            self.pieces, self.length = {}, 0
        n_new, self.length = length - self.length, length
        for name, value in self.seen.items():
            if (axis := self._axis(name)) is None:
                self.pieces[name] = [value]
                continue
            new = value.narrow(axis, -n_new, n_new)
            self.pieces.setdefault(name, []).append(new if new.shape == value.shape else new.clone())
        self.seen.clear()

    def cache(self) -> Any:
        """A cache of all activations, concatenated along the positions; the pieces are given up one by one."""
        return self.model.make_cache({name: self._joined(name) for name in list(self.pieces)}, True)

    def _joined(self, name: str) -> Tensor:
        pieces = self.pieces.pop(name)
        if len(pieces) == 1:
            return pieces[0]
        if self.model.hook_dict[name].dims[-1] in KEYS:  # keys of later tokens are not attended to
            masked = float("-inf") if name.endswith("_scores") else 0.0
            pieces = [F.pad(piece, (0, pieces[-1].shape[-1] - piece.shape[-1]), value=masked) for piece in pieces]
        return torch.cat(pieces, self._axis(name) or 0)

    def _axis(self, name: str) -> int | None:
        """The axis of new positions; None if each forward pass has all of the value, as that of an image, or of all keys."""
        point = self.model.hook_dict[name]
        axes = [axis for axis, dim in enumerate(point.dims) if dim in ("pos", "query_pos")]
        if not point.grows or (not axes and KEYS & {*point.dims}):
            return None
        if not axes:
            raise ValueError(
                f"'{name}' has no position axis, so steps cannot be concatenated; its axes are {point.dims}"
            )
        return axes[0]


def check_chunk(
    model: HookedRootModule, chunk: int | None, sequence: TokenSequence, cache: KeyValueCache | None
) -> None:
    """Raises ValueError for a prompt that cannot be read in pieces of so many tokens."""
    if chunk is None:
        return
    if chunk < 1:
        raise ValueError(f"chunk is a number of tokens, at least 1, got {chunk}")
    if cache is None:
        raise ValueError("chunks are read through the key/value cache: omit use_past_kv_cache=False, or chunk")
    check_cacheable(model.blocks)
    check_in_parts(model, min(cache.length + chunk, len(sequence)), len(sequence))
    if sequence.images and not cache.length:
        raise ValueError("a prompt with images is read at once, as an image may not be cut: omit chunk")


def read_prefix(
    model: HookedRootModule,
    prompt: object,
    start: tuple[TokenSequence, KeyValueCache, Float[Tensor, "batch d_vocab"] | None],
    names_filter: NamesFilter = None,
    chunk: int | None = None,
) -> Prefix:
    """A prompt that was `opened`, as a prefix, under the active hooks."""
    sequence, keys_values, known = start
    check_chunk(model, chunk, sequence, keys_values)
    record = None if names_filter is None else SequenceRecord(model, names_filter, length=keys_values.length)
    reader = PromptReader(model, sequence, keys_values, record, chunk, known)
    logits = run_generation(reader.next_logits, model.hooks(record.hooks) if record else None)
    keys_values.freeze()
    hooks = tuple(hook.user_hook for hook in changing_hooks(model))
    return Prefix(model, prompt, sequence, keys_values, logits, record and record.cache(), hooks, versions(model))


def run_in_chunks(
    model: HookedRootModule,
    input: Prompt,
    chunk: int,
    names_filter: NamesFilter = None,
    return_type: str | None = "logits",
    fwd_hooks: HookList = (),
    device: torch.device | str | None = None,
    remove_batch_dim: bool = False,
    **how: object,
) -> tuple[Tensor | None, Cache]:
    """The logits (None with `return_type=None`) and the cache of `run_with_cache`, from a forward pass for each chunk."""
    if return_type not in ("logits", None):
        raise ValueError(f"a run in chunks returns 'logits' or None, got return_type={return_type!r}")

    def run() -> tuple[Tensor | None, Cache]:
        sequence, keys_values, _ = opened(model, as_prompt(input), None, how)
        check_chunk(model, chunk, sequence, keys_values)
        n_new, record = (
            len(sequence) - keys_values.length,
            SequenceRecord(model, names_filter, device, keys_values.length),
        )
        set_current(GenerationStep(0, sequence.real, n_new, sequence, sequence.labels))
        with model.hooks(record.hooks):
            reader = PromptReader(model, sequence, keys_values, record, chunk)
            outputs = reader.pieces(n_new, {"past_kv_cache": keys_values, "return_type": return_type})
        cache = record.cache()
        if not sequence.real.all():
            cache.keep_masks({model.stack.blocks: sequence.real[:, -n_new:]})
        return (torch.cat(outputs, 1) if return_type else None), (
            cache.remove_batch_dim() if remove_batch_dim else cache
        )

    return run_generation(run, model.hooks(fwd_hooks))
