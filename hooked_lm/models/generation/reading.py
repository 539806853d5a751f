"""Reads a prompt in several forward passes, and keeps its activations."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.hooks import Cache, HookedRootModule, NamesFilter
from hooked_lm.hooks.generation_step import GenerationStep, current, run_generation, set_current
from hooked_lm.hooks.hook_spec import HookList
from hooked_lm.models.budget import memory_of, token_bytes
from hooked_lm.models.checks import check_cacheable, check_in_parts, check_options, first_bidirectional
from hooked_lm.models.generation.loop import Reader, TokenSequence
from hooked_lm.models.loss import Output, counted_losses, next_token_losses
from hooked_lm.models.prefix import Prefix, Prompt, as_prompt, changing_hooks, opened, versions

Opened = tuple[TokenSequence, KeyValueCache, Float[Tensor, "batch d_vocab"] | None]
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

    def pieces(
        self,
        n_new: int,
        options: dict[str, Any],
        keep: Callable[[Any, int, int], Any] = lambda output, start, end: output,
    ) -> list[Any]:
        """What `keep` returns of the model's output for each piece of the last `n_new` positions, from one column to another."""
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
                output = model(sequence.columns(start, end), **options)
            else:
                of_piece = None if pos_embed is None else pos_embed[:, start:end]
                output = model(resid[:, start:end], start_at_layer=0, shortformer_pos_embed=of_piece, **options)
            outputs.append(keep(output, start, end))
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
        self.sites = [name for name, _ in self.hooks]
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


def chunk_of(
    model: HookedRootModule,
    chunk: int | str | None,
    sequence: TokenSequence,
    cache: KeyValueCache | None,
    sites: Iterable[str] = (),
) -> int | None:
    """The number of tokens of a piece; None to read all at once.

    `chunk` is this number, or the memory of a pass: "auto" or a size, see `memory_of`. Then it is the largest number of tokens of
    which a layer and the logits fit, with attention scores where a hook, or one of the recorded `sites`, needs them; None if all
    fit. Raises ValueError for a prompt that cannot be read in such pieces, and for a size that not one token fits.
    """
    if isinstance(chunk, str):
        n_rows, n_keys = sequence.real.shape
        n_new = n_keys - (0 if cache is None else cache.length)
        points = [model.hook_dict[name] for name in sites]
        listening = (point for point in model.hook_points() if point.is_listening)
        shows_scores = (
            any(KEYS & {*point.dims} for point in (*points, *listening)) or model.cfg.fused_attention != "auto"
        )
        masked_rows = 1 if sequence.real.all() else n_rows
        of_token = n_rows * (
            max(map(token_bytes, model.blocks))
            + 4 * model.cfg.d_vocab_out
            + shows_scores * 16 * model.cfg.n_heads * n_keys  # four copies in fp32
        )
        of_token += 5 * masked_rows * n_keys  # the mask, as bits and in fp32
        of_keys = n_rows * n_keys * max(map(_key_bytes, model.blocks))
        budget = memory_of(chunk, model.device, "chunk") - of_keys
        if budget < of_token:
            needed = f"a token takes about {of_token:,} bytes in a pass, beside {of_keys:,} of keys in order"
            raise ValueError(f"chunk={chunk!r} is too small: {needed}")
        chunk = None if budget >= n_new * of_token else budget // of_token
    check_chunk(model, chunk, sequence, cache)
    return chunk


def _key_bytes(block: nn.Module) -> int:
    """The bytes of the keys of a token in a block, which attention puts in order."""
    weight = getattr(getattr(block, "attn", None), "W_K", None)
    return 0 if weight is None else weight.shape[0] * weight.shape[-1] * weight.element_size()


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
    start: Opened,
    names_filter: NamesFilter = None,
    chunk: int | str | None = None,
) -> Prefix:
    """A prompt that was `opened`, as a prefix, under the active hooks."""
    sequence, keys_values, known = start
    record = None if names_filter is None else SequenceRecord(model, names_filter, length=keys_values.length)
    n_tokens = chunk_of(model, chunk, sequence, keys_values, record.sites if record else ())
    reader = PromptReader(model, sequence, keys_values, record, n_tokens, known)
    logits = run_generation(reader.next_logits, model.hooks(record.hooks) if record else None)
    keys_values.freeze()
    hooks = tuple(hook.user_hook for hook in changing_hooks(model))
    cache, of_weights = record and record.cache(), (versions(model), model.embed.W_E.dtype)
    return Prefix(model, prompt, sequence, keys_values, logits, cache, hooks, *of_weights)


def run_in_chunks(
    model: HookedRootModule,
    input: Prompt,
    chunk: int | str,
    names_filter: NamesFilter = None,
    return_type: str | None = "logits",
    fwd_hooks: HookList = (),
    device: torch.device | str | None = None,
    remove_batch_dim: bool = False,
    stop: int | None = None,
    **how: object,
) -> tuple[Any, Cache]:
    """The output and the cache of `run_with_cache`, from a forward pass for each chunk; all may end before the layer `stop`."""

    def run() -> tuple[Any, Cache]:
        start = opened(model, as_prompt(input), None, how)
        record = SequenceRecord(model, names_filter, device, start[1].length)
        with model.hooks(record.hooks):
            output, real = _in_chunks(model, start, chunk, return_type, False, record, stop)
        cache = record.cache()
        if not start[0].real.all():
            cache.keep_masks({model.stack.blocks: real})
        return output, cache.remove_batch_dim() if remove_batch_dim else cache

    return run_generation(run, model.hooks(fwd_hooks))


def forward_in_chunks(
    model: HookedRootModule,
    input: Prompt,
    return_type: str | None = "logits",
    loss_per_token: bool = False,
    *,
    chunk: int | str,
    prepend_bos: bool | None = None,
    padding_side: str | None = None,
    attention_mask: Tensor | None = None,
) -> Any:
    """The output of a forward pass with these arguments, from one for each chunk, without gradients."""
    how = {"prepend_bos": prepend_bos, "padding_side": padding_side, "attention_mask": attention_mask}

    def run() -> Any:
        return _in_chunks(model, opened(model, as_prompt(input), None, how), chunk, return_type, loss_per_token)[0]

    return run_generation(run)


def _in_chunks(
    model: HookedRootModule,
    start: Opened,
    chunk: int | str,
    return_type: str | None,
    per_token: bool,
    record: SequenceRecord | None = None,
    stop: int | None = None,
) -> tuple[Any, Bool[Tensor, "batch new"]]:
    """The output at the new positions of a prompt, and which of them are real; a loss keeps the logits of one piece."""
    check_options(return_type, None)
    sequence, keys_values, _ = start
    n_known = keys_values.length
    n_new, tokens = len(sequence) - n_known, sequence.tokens
    set_current(GenerationStep(0, sequence.real, n_new, sequence, sequence.labels))
    options: dict[str, Any] = {"past_kv_cache": keys_values, "return_type": return_type and "logits"}
    if stop is not None:
        options["stop_at_layer"] = keys_values.until = max(stop, _first_mixing(model) + 1)
    if return_type in ("loss", "both") and sequence.embeds is not None:
        raise ValueError("a loss needs token ids, and this prompt has embeddings")
    losses: list[Tensor] = []

    def keep(output: Tensor | None, first: int, end: int) -> Tensor | None:
        if return_type in ("loss", "both") and output is not None:
            losses.append(next_token_losses(output, tokens[:, first + 1 : end + 1].to(output.device)))
        return output if return_type in ("logits", "both") else None

    reader = PromptReader(model, sequence, keys_values, record, chunk_of(model, chunk, sequence, keys_values))
    outputs, real = reader.pieces(n_new, options, keep), sequence.real[:, n_known:]
    logits = torch.cat(outputs, 1) if return_type in ("logits", "both") else None
    if not losses:
        return logits, real
    loss = counted_losses(torch.cat(losses, 1), tokens[:, n_known:].to(losses[0].device), real, per_token)
    return (loss if logits is None else Output(logits, loss)), real


def _first_mixing(model: HookedRootModule) -> int:
    """The first layer whose tokens depend on earlier ones, without which a cache would not know how many there were."""
    return next(i for i, block in enumerate(model.blocks) if any(hasattr(block, name) for name in ("attn", "mixer")))
