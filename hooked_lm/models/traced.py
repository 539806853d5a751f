"""A forward pass or a decode step under hooks that read and write buffers, as a graph that can be replayed."""

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.kv_cache import KeyValueCache, KeyValueCacheEntry
from hooked_lm.hooks import HookPoint
from hooked_lm.models.base import BaseModel


class Add:
    """A hook that adds a buffer to a value."""

    def __init__(self, buffer: Callable[[], Tensor]) -> None:
        self.buffer = buffer

    def __call__(self, value: Tensor, hook: HookPoint) -> Tensor:
        return value + self.buffer()


class CopyToBuffer:
    """A hook that copies a value into a buffer."""

    records = True  # changes nothing, so the run needs no copy

    def __init__(self, buffer: Callable[[], Tensor]) -> None:
        self.buffer = buffer

    def __call__(self, value: Tensor, hook: HookPoint) -> None:
        self.buffer().copy_(value)


class TappedRun(nn.Module, ABC):
    """A run that adds the buffers of `edits` at their sites, and copies the values of taps into buffers."""

    def __init__(self, model: BaseModel, edits: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model = model
        self.edits = {site: f"edit_{i}" for i, site in enumerate(edits)}
        self.taps: dict[str, str] = {}
        for site, name in self.edits.items():
            self.register_buffer(name, edits[site])

    def keep(self, like: Mapping[str, Tensor]) -> None:
        """Adds taps, with buffers like the values of their sites."""
        self.taps = {site: f"tap_{i}" for i, site in enumerate(like)}
        for site, name in self.taps.items():
            self.register_buffer(name, torch.empty_like(like[site], memory_format=torch.contiguous_format))

    def hooks(self) -> list[tuple[str, Add | CopyToBuffer]]:
        """The hooks of the edits and then of the taps, which find their buffers at each call, as tracing replaces them."""
        edits = [(site, Add(partial(self.get_buffer, name))) for site, name in self.edits.items()]
        return [*edits, *((site, CopyToBuffer(partial(self.get_buffer, name))) for site, name in self.taps.items())]

    def kept(self) -> dict[str, Tensor]:
        """The buffers of the taps, by site."""
        return {site: self.get_buffer(name) for site, name in self.taps.items()}

    def state(self) -> list[Tensor]:
        """The buffers that a run reads and changes."""
        return []

    @abstractmethod
    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
        """The logits of these tokens."""


class TappedForward(TappedRun):
    """A forward pass of whole texts."""

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
        with self.model.hooks(self.hooks()):
            return self.model(tokens)


class DecodeStep(TappedRun):
    """The forward pass of one more token for each row, after a cache of constant length whose oldest position it drops.

    The cached positions are on the right; those before them count as padding.
    """

    real: Bool[Tensor, "batch past"]

    def __init__(self, model: BaseModel, edits: Mapping[str, Tensor], cache: KeyValueCache, room: int) -> None:
        super().__init__(model, edits)
        self.room, self.n_layers = room, len(cache)
        self.layers = [layer for layer, entry in enumerate(cache.entries) if entry.length]
        first, *_ = (past for layer in self.layers for past in _past(cache, layer))
        self.register_buffer("real", torch.zeros(len(first), room - 1, dtype=torch.bool, device=first.device))
        for layer in self.layers:
            for name, past in zip(("keys", "values"), _past(cache, layer), strict=True):
                self.register_buffer(f"{name}_{layer}", past.new_zeros(past.shape[0], room - 1, *past.shape[2:]))
        self.fill(cache)

    def state(self) -> list[Tensor]:
        """The keys, values and mask of the past tokens."""
        return [self.real, *(self.get_buffer(f"{name}_{i}") for i in self.layers for name in ("keys", "values"))]

    def fill(self, cache: KeyValueCache) -> None:
        """Copies the past tokens of an ordinary cache of the same number of rows."""
        past, mask = cache.length, cache.previous_attention_mask
        for buffer in self.state():
            buffer.zero_()
        self.real[:, -past:] = True if mask is None else mask
        for layer in self.layers:
            for name, value in zip(("keys", "values"), _past(cache, layer), strict=True):
                self.get_buffer(f"{name}_{layer}")[:, -past:] = value

    def forward(self, tokens: Int[Tensor, "batch 1"]) -> Float[Tensor, "batch 1 d_vocab"]:
        cache = KeyValueCache(self.n_layers)
        for layer in self.layers:
            cache.entries[layer] = _RollingEntry(self.get_buffer(f"keys_{layer}"), self.get_buffer(f"values_{layer}"))
        real = torch.cat([self.real, self.real.new_ones(len(tokens), 1)], 1)
        with self.model.hooks(self.hooks()):
            logits = self.model(tokens, attention_mask=real, past_kv_cache=cache)
        self.real.copy_(real[:, 1:])
        return logits


def _past(cache: KeyValueCache, layer: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a layer that has some."""
    keys, values = cache[layer].past_keys, cache[layer].past_values
    assert keys is not None, "the layer has a length"
    assert values is not None, "it has as many values as keys"
    return keys, values


class _RollingEntry(KeyValueCacheEntry):
    """Keys and values in full buffers, of which each new position replaces the oldest."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys.shape[1])
        self._buffers, self.length = (keys, values), keys.shape[1]

    def append(
        self, keys: Float[Tensor, "batch new kv_head d_head"], values: Float[Tensor, "batch new kv_head d_value"]
    ) -> tuple[Float[Tensor, "batch pos kv_head d_head"], Float[Tensor, "batch pos kv_head d_value"]]:
        """All keys and values, the new ones last; the buffers keep the last of them."""
        all_keys, all_values = (torch.cat(pair, 1) for pair in zip(self._buffers, (keys, values), strict=True))
        for buffer, joined in zip(self._buffers, (all_keys, all_values), strict=True):
            buffer.copy_(joined[:, -self.length :])
        return all_keys, all_values


class TracedGraph:
    """A run, traced for the shape of its tokens and compared with the logits that an eager run computed from them.

    `failure` says why it cannot be used; None if it can. The buffers of its state are as before the comparison.
    """

    def __init__(self, run: TappedRun, tokens: Tensor, expected: Tensor, backend: str) -> None:
        self.run, self.failure = run, None
        self.replay: Callable[[Tensor], Tensor] = run
        before = [buffer.clone() for buffer in run.state()]
        try:
            self.replay = _compiled(run, tokens, backend)
            _restore(run.state(), before)
            self.failure = _difference(self.replay(tokens), expected)
        except Exception as error:  # tracing and compiling raise errors of many kinds
            self.failure = (
                f"a graph that could not be made: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
            )
        _restore(run.state(), before)


def _restore(buffers: list[Tensor], before: list[Tensor]) -> None:
    for buffer, value in zip(buffers, before, strict=True):
        buffer.copy_(value)


def _difference(found: Tensor, expected: Tensor) -> str | None:
    """What is wrong with the logits of a graph; None if they equal the eager ones to rounding."""
    off, scale = (found - expected).abs().max().item(), expected.abs().max().item()
    if off <= torch.finfo(expected.dtype).eps ** 0.5 * max(scale, 1.0):
        return None
    return f"a graph whose logits differ from the eager ones by {off:.1e}"


def _compiled(run: TappedRun, tokens: Tensor, backend: str) -> Callable[[Tensor], Tensor]:
    """The traced run, in the form in which this backend replays it."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # a failure prints the graph so far
        traced: Any = torch.export.export(run, (tokens,), strict=False).module()
    if backend == "auto":
        backend = "cudagraph" if tokens.is_cuda else "inductor" if _has_compiler() else "traced"
    if backend == "cudagraph":
        return _CudaGraph(traced, tokens)
    return torch.compile(traced, fullgraph=True, dynamic=False) if backend == "inductor" else traced


def _has_compiler() -> bool:
    """Whether inductor finds a compiler of C++."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++"))


class _CudaGraph:
    """The kernels of a function of token ids, captured once."""

    def __init__(self, function: Callable[[Tensor], Tensor], tokens: Tensor) -> None:
        self.tokens = tokens.clone()
        side = torch.cuda.Stream(tokens.device)
        side.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(side):  # libraries allocate their workspaces outside of the capture
            for _ in range(2):
                function(self.tokens)
        torch.cuda.current_stream(tokens.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = function(self.tokens)

    def __call__(self, tokens: Tensor) -> Tensor:
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.output.clone()
