"""Compiled: a model's forward pass and decode step as one graph for each shape, with chosen sites read and edited inside it."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.hooks import HookPoint
from hooked_lm.hooks.select import Site
from hooked_lm.models.base import BaseModel
from hooked_lm.models.traced import Add, DecodeStep, TappedForward, TracedGraph
from hooked_lm.models.weights.quantized_weight import QuantizedWeight
from hooked_lm.models.weights.weight_scope import open_scopes

BACKENDS = ("auto", "inductor", "cudagraph", "traced")
PLAIN = (bool, int, float, str)
OF_RUNS = ("settings", "training")  # attributes of components that follow the config, or that no run reads
ROOM = 256  # the positions of a decode step are a multiple of this, so that prompts of similar lengths share a graph


class Compiled:
    """Runs a model as one graph for each shape of its token ids; made by `model.compiled(...)`.

    The first run of a shape is traced under ordinary hooks: those of taps copy the value of a site into a buffer, those of edits
    add a buffer to it. Later runs replay the graph: on a CUDA device a CUDA graph, on a CPU the code of inductor.

    `taps` holds the values of the last run by site, after the edits; the next run overwrites them. `edits` holds the buffers,
    which the caller fills in place; zeros change nothing. Whatever a graph cannot do (other hooks, gradients, options of the
    forward pass, models that cannot be traced) runs eagerly, with the same taps and edits, and warns once of each reason. A graph
    follows changes of weights in place, and is made anew after weights, modules or what these read were replaced or moved.
    """

    def __init__(
        self,
        model: BaseModel,
        taps: Site | None = None,
        edits: Mapping[str, Tensor] | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.model, self.backend = model, backend
        self.sites = [] if taps is None else model.names(taps)
        self.edits = {name: buffer for site, buffer in (edits or {}).items() for name in model.names(site)}
        for site, buffer in self.edits.items():
            _check_edit(model, site, buffer)
        self.taps: Mapping[str, Tensor] = {}
        self._graphs: dict[tuple[object, ...], TracedGraph] = {}
        self._made_of: _Snapshot | None = None
        self._cache: KeyValueCache | None = None  # of the last prompt
        self._n_rows = 0  # of the last prompt
        self._step: TracedGraph | None = None  # which continues it, unless steps run eagerly
        self._left = 0  # the tokens that there is still room for
        self._warned: set[str] = set()

    # ---- forward pass ------------------------------------------------------------------------------------------------

    def __call__(self, tokens: Int[Tensor, "*batch pos"], **options: object) -> Any:
        """The logits [batch, pos, d_vocab] of token ids; with options of the forward pass, what it returns for them."""
        is_ids = isinstance(tokens, Tensor) and tokens.dtype == torch.long and tokens.ndim == 2 and tokens.numel() > 0
        why = f"the option {next(iter(options))}=" if options else self._obstacle()
        if why is not None or not is_ids:
            self._warn(why or "an input that is not a tensor of token ids [batch, pos]")
            return self._eager(tokens, **options)
        tokens = self._checked(tokens)
        key = ("forward", *tokens.shape)
        if key not in self._graphs:
            expected = self._eager(tokens)
            run = TappedForward(self.model, self.edits)
            run.keep(self.taps)
            self._graphs[key] = TracedGraph(run, tokens, expected, self.backend)
        graph = self._graphs[key]
        if graph.failure is not None:
            self._warn(graph.failure)
            return self._eager(tokens)
        logits = graph.replay(tokens)
        self.taps = self.model.make_cache(graph.run.kept(), True)
        return logits

    def _eager(self, input: object, **options: object) -> Any:
        """An ordinary run with hooks that edit and keep the same sites."""
        kept, hooks, _ = self.model.get_caching_hooks(self.sites) if self.sites else ({}, [], [])
        edits = [(site, Add(partial(self.edits.__getitem__, site))) for site in self.edits]
        with self.model.hooks([*edits, *hooks]):
            result = self.model(input, **options)
        self.taps = self.model.make_cache(kept, True)
        return result

    def _checked(self, tokens: Tensor) -> Tensor:
        """The ids on the model's device. ValueError for one out of range, unless it is on a GPU, where the kernel fails."""
        return tokens if tokens.is_cuda else self.model.checked_tokens(tokens).to(self.model.device)

    # ---- decoding ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self,
        tokens: Int[Tensor, "batch pos"],
        max_new_tokens: int,
        attention_mask: Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch d_vocab"]:
        """The logits of the first new token; keeps the keys and values of a prompt, with room for `max_new_tokens`.

        The prompt runs eagerly. Rows of different lengths are padded on the left, with a mask. Raises ValueError if the prompt
        and the new tokens exceed n_ctx, and for a mask that ends with padding.
        """
        if attention_mask is not None and not bool(attention_mask[:, -1].all()):
            row = int((attention_mask[:, -1] == 0).nonzero()[0])
            raise ValueError(
                f"row {row} of attention_mask ends with padding, after which no token can follow: pad the prompt on the left, as "
                "model.to_tokens(texts, padding_side='left') does"
            )
        n_pos, n_ctx = tokens.shape[1] + max_new_tokens, self.model.cfg.longest_input
        if max_new_tokens < 1 or n_pos > n_ctx:
            raise ValueError(
                f"the prompt has {tokens.shape[1]} tokens and n_ctx is {n_ctx}, so max_new_tokens must be 1 to "
                f"{n_ctx - tokens.shape[1]}, got {max_new_tokens}"
            )
        cache = KeyValueCache(len(self.model.blocks))
        logits = self._eager(tokens, attention_mask=attention_mask, past_kv_cache=cache)[:, -1]
        kept = self.taps
        room = min(-(-n_pos // ROOM) * ROOM, n_ctx)
        self._cache, self._left, self._n_rows = cache, max_new_tokens, len(tokens)
        self._step = self._step_after(cache, room, logits.argmax(-1, keepdim=True))
        self.taps = kept
        return logits

    def _step_after(self, cache: KeyValueCache, room: int, token: Int[Tensor, "batch 1"]) -> TracedGraph | None:
        """The graph of a decode step, with these past tokens; None, and a warning, if steps run eagerly."""
        why = self._obstacle() or _cannot_roll(self.model, cache, room)
        if why is not None:
            self._warn(why)
            return None
        key = ("step", len(token), room)
        graph = self._graphs.get(key)
        if graph is None or not isinstance(graph.run, DecodeStep):
            run = DecodeStep(self.model, self.edits, cache, room)
            like, hooks, _ = self.model.get_caching_hooks(self.sites) if self.sites else ({}, [], [])
            with self.model.hooks(hooks):
                run(token)
            run.keep(like)
            run.fill(cache)
            cache.freeze()
            expected = self._eager(token, past_kv_cache=cache)
            cache.unfreeze()
            graph = self._graphs[key] = TracedGraph(run, token, expected, self.backend)
        else:
            graph.run.fill(cache)
        if graph.failure is not None:
            self._warn(graph.failure)
            return None
        return graph

    @torch.no_grad()
    def step(self, tokens: Int[Tensor, " batch"]) -> Float[Tensor, "batch d_vocab"]:
        """The logits after one more token for each row, which joins the past ones.

        Attention patterns and scores among the taps have one column for every position that there is room for.
        """
        if self._left < 1 or self._cache is None:
            raise ValueError("there is no room for another token: call prefill(tokens, max_new_tokens) first")
        if tuple(tokens.shape) != (n := self._n_rows,):
            raise ValueError(
                f"tokens must be one id for each row of the prompt, [{n}]; got shape {tuple(tokens.shape)}"
            )
        tokens = self._checked(tokens[:, None])
        self._left -= 1
        graph, why = self._step, self._obstacle()
        if graph is None:
            return self._eager(tokens, past_kv_cache=self._cache)[:, -1]
        if why is None and graph not in self._graphs.values():
            why = "weights or modules that were replaced after the prompt"
        if why is None:
            logits = graph.replay(tokens)
        else:
            self._warn(why)
            logits = graph.run(tokens)
        self.taps = self.model.make_cache(graph.run.kept(), True)
        return logits[:, -1]

    # ---- what a graph cannot do --------------------------------------------------------------------------------------

    def _obstacle(self) -> str | None:
        """Why the next run cannot be a graph; None if it can. Graphs of replaced modules or moved weights are dropped."""
        if scopes := open_scopes(self.model):
            return f"{scopes[-1].name}, which is switched on"
        if self._made_of is None or not self._made_of.is_current():
            self._graphs.clear()
            self._made_of = _Snapshot(self.model, self.edits)
        if torch.is_grad_enabled() and (
            self._made_of.needs_grad() or any(e.requires_grad for e in self.edits.values())
        ):
            return "gradients; run it inside torch.no_grad() if none are needed"
        if self._made_of.is_quantized:
            return "quantised weights"
        if self.model.offloaded is not None:
            return "offloaded weights, which each run copies"
        if self._made_of.has_hooks():
            return "a hook that is not among its taps and edits"
        if torch.is_autocast_enabled(self.model.device.type):
            return "autocast"
        if self.model.tokenizer is not None and self.model.padding_side == "left":
            return "a tokenizer that pads on the left, for which the ids are searched for padding"
        return None

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            warnings.warn(f"the compiled model runs eagerly because of {why}", stacklevel=3)


class _Snapshot:
    """The modules, their attributes, weights, edits and settings of a model when its graphs were made."""

    def __init__(self, model: BaseModel, edits: Mapping[str, Tensor]) -> None:
        self.model, self.settings = model, dict(vars(model.cfg))
        self.modules = list(model.modules())
        self.places = [(part, name, part[name]) for m in self.modules for part in _parts(m) for name in part]
        self.attributes = [(vars(m), name, value) for m in self.modules for name, value in _attributes(m)]
        kinds: set[Any] = {*map(type, self.modules)}
        self.forwards = {kind: kind.forward for kind in kinds}
        self.softmax = F.softmax, Tensor.softmax
        weights = [value for *_, value in self.places if isinstance(value, Tensor)]
        self.is_quantized = any(isinstance(weight, QuantizedWeight) for weight in weights)
        tensors = [*edits.values(), *(weight for weight in weights if not isinstance(weight, QuantizedWeight))]
        self.tensors = [(tensor, tensor.data_ptr()) for tensor in tensors]

    def is_current(self) -> bool:
        """Whether nothing was replaced, moved or set."""
        return (
            all(part.get(name) is value for part, name, value in self.places)
            and sum(len(part) for module in self.modules for part in _parts(module)) == len(self.places)
            and all(_is_same(own.get(name), value) for own, name, value in self.attributes)
            and sum(1 for module in self.modules for _ in _attributes(module)) == len(self.attributes)
            and all(of.forward is forward for of, forward in self.forwards.items())
            and (F.softmax, Tensor.softmax) == self.softmax
            and all(tensor.data_ptr() == address for tensor, address in self.tensors)
            and vars(self.model.cfg) == self.settings
        )

    def needs_grad(self) -> bool:
        """Whether a weight or an edit requires a gradient."""
        return any(tensor.requires_grad for tensor, _ in self.tensors)

    def has_hooks(self) -> bool:
        """Whether a hook would run in this context."""
        return (
            any(p.is_listening for p in self.model.hook_points())
            or any(m._forward_hooks or m._forward_pre_hooks for m in self.modules)
            or bool(of_all_modules._global_forward_hooks or of_all_modules._global_forward_pre_hooks)
        )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a forward pass may read of a module beside its parts: activations, scales, a replaced `forward`, its `cfg`."""
    if isinstance(module, HookPoint):
        return
    for name, value in vars(module).items():
        is_of_runs = name != "forward" if isinstance(module, BaseModel) else name.startswith("_") or name in OF_RUNS
        if not is_of_runs:
            yield name, value


def _is_same(value: object, before: object) -> bool:
    is_value = isinstance(value, PLAIN) or is_dataclass(value)  # else an object, which is known by its identity
    return value is before or (is_value and type(value) is type(before) and value == before)


def _parts(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._modules, module._parameters, module._buffers


def _check_edit(model: BaseModel, site: str, buffer: object) -> None:
    """Raises TypeError or ValueError for what cannot be added at a site."""
    if not isinstance(buffer, Tensor):
        raise TypeError(f"the edit of '{site}' must be a tensor to add to its value, got {type(buffer).__name__}")
    if buffer.device != model.device:
        raise ValueError(
            f"the edit of '{site}' is on {buffer.device}, but the model is on {model.device}; move it there"
        )


def _cannot_roll(model: BaseModel, cache: KeyValueCache, room: int) -> str | None:
    """Why a step cannot have a cache of constant length, after a prompt; None if it can."""
    if cache.states or not any(entry.length for entry in cache.entries):
        return "layers that keep states rather than keys and values"
    if cache.position_shifts:
        return "images among the past tokens"
    for module in model.modules():
        for rotary in vars(getattr(module, "cfg", None) or object).values():
            if isinstance(rotary, Rotary) and rotary.scaling is not None:
                short, long = rotary.scaling(rotary, 1), rotary.scaling(rotary, room)
                if not torch.equal(short[0], long[0]) or short[1] != long[1]:
                    return "rotary angles that depend on the number of tokens"
    return None
