"""The methods of a decoder other than its forward pass: caching runs, parts of a run, generation."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.embed import Unembed
from hooked_lm.components.embeddings.transformed_unembed import untied
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.readable import is_on_host, is_readable
from hooked_lm.hooks import Cache, NamesFilter
from hooked_lm.hooks.hook_spec import HookSpec, hook_list, parse_hook
from hooked_lm.hooks.padding import Masks
from hooked_lm.hooks.select import Site
from hooked_lm.hooks.slice import Slice
from hooked_lm.keywords import check_keywords
from hooked_lm.models.base import BaseModel, is_outside_blocks
from hooked_lm.models.checks import check_cacheable, check_loss, check_stream, is_ids, n_streams
from hooked_lm.models.compiled import Compiled
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.generation import decoder as generation
from hooked_lm.models.generation.reading import forward_in_chunks, read_prefix, run_in_chunks
from hooked_lm.models.generation.replies import reply
from hooked_lm.models.generation.rollouts import rollouts
from hooked_lm.models.loss import Output, lm_cross_entropy_loss
from hooked_lm.models.prefix import Prefix, PrefixedPrompt, Prompt, as_prompt, check_hooks_of_prefix, opened
from hooked_lm.models.stack import Stream, apply_config_flags, checked_ids
from hooked_lm.models.text.chat import Chat
from hooked_lm.models.text.methods import DecoderText
from hooked_lm.models.verification.identities import decoder_identities
from hooked_lm.models.verification.verify import Verification, drawn_tokens, verify
from hooked_lm.models.vision.inputs import VisionInputs
from hooked_lm.models.weights.fold import FoldMethods
from hooked_lm.models.weights.state import sync_config
from hooked_lm.models.weights.views import WeightViews

EXACT = {"attention_mask", "past_kv_cache", "start_at_layer"}  # arguments with which a mask is not inferred from ids
OF_CHUNKS = ("fwd_hooks", "device", "remove_batch_dim", "prepend_bos", "padding_side", "attention_mask")
Mask = Int[Tensor, "batch key_pos"] | Bool[Tensor, "batch key_pos"]


class DecoderMethods(DecoderText, WeightViews, FoldMethods, BaseModel):
    """The methods of a `Decoder` other than `forward`."""

    cfg: HookedTransformerConfig
    embedded: Any  # these four are those of its forward pass
    infers_padding: Any
    _context: Any
    _with_positions: Any

    generate = generation.generate
    generate_stream = generation.generate_stream
    rollouts = rollouts
    _run_in_chunks = forward_in_chunks
    _reply = reply

    def prefix(  # type: ignore[override]
        self,
        prompt: Prompt,
        names_filter: NamesFilter = None,
        *,
        chunk: int | str | None = None,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Mask | None = None,
    ) -> Prefix:
        """Reads the beginning of prompts once; `prefix + text` is a prompt of which only the new positions are computed.

        `model(prefix + text)`, `run_with_cache`, `run_with_hooks` and `generate` equal, at the new positions, the run on all
        tokens, under the hooks that are active here and there. No gradients flow into the prefix. The arguments after
        `names_filter` are those of `generate`; `prefix.cache` has the activations of these sites.

        Raises ValueError for attention in both directions, and for an active hook that counts positions from the end.

        >>> from hooked_lm import HookedTransformer
        >>> model = HookedTransformer.from_pretrained("demo")
        >>> prefix = model.prefix("The capital of France is Paris. The capital of")
        >>> model(prefix + [" Italy is", " Spain is"]).shape[:2]
        torch.Size([2, 2])
        >>> model.generate(
        ...     prefix + " Italy is", max_new_tokens=1, do_sample=False, verbose=False
        ... )
        'The capital of France is Paris. The capital of Italy is Rome'
        """
        check_cacheable(self.blocks)
        check_hooks_of_prefix(self)
        how = {"prepend_bos": prepend_bos, "padding_side": padding_side, "attention_mask": attention_mask}
        return read_prefix(self, prompt, opened(self, as_prompt(prompt), 0, how), names_filter, chunk)

    # ---- runs that keep values ---------------------------------------------------------------------------------------

    def run_with_cache(  # type: ignore[override]
        self,
        input: Any = None,
        return_type: str | None = "logits",
        *model_args: Any,
        names_filter: NamesFilter = None,
        stop_at_layer: int | None = None,
        chunk: int | str | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Returns the output of a forward pass and an ActivationCache of the points that `names_filter` selects.

        With `return_type=None` and a filter, the run stops after the last layer that the filter or an active hook needs.
        With `chunk` the prompt is read in pieces of so many tokens, without gradients, which takes the memory of one beside that
        of keys, values and what is returned. See `HookedRootModule.run_with_cache` for the other arguments.
        """
        if chunk is not None:
            given = {**kwargs, **({} if stop_at_layer is None else {"stop_at_layer": 0})}
            check_keywords("run_with_cache with chunk", given, OF_CHUNKS)
            if return_type is None and names_filter is not None:
                kwargs["stop"] = self._last_layer_needed(
                    names_filter, [*map(parse_hook, hook_list(kwargs.get("fwd_hooks", ())))]
                )
            output, cache = run_in_chunks(self, input, chunk, names_filter, return_type, **kwargs)
            cache.labels = input.labels if isinstance(input, Chat | PrefixedPrompt) else None
            return output, cache
        early = return_type is None and stop_at_layer is None
        if early and names_filter is not None and kwargs.get("past_kv_cache") is None:
            hooks = [*hook_list(kwargs.get("fwd_hooks", ())), *hook_list(kwargs.get("bwd_hooks", ()))]
            stop_at_layer = self._last_layer_needed(names_filter, [parse_hook(hook) for hook in hooks])
        if model_args:
            model_args = (return_type, *model_args)
        elif return_type != "logits":  # the forward of a subclass may lack the argument
            kwargs["return_type"] = return_type
        if stop_at_layer is not None:
            kwargs["stop_at_layer"] = stop_at_layer
        output, cache = super().run_with_cache(input, *model_args, names_filter=names_filter, **kwargs)
        if isinstance(cache, Cache) and isinstance(input, Chat | PrefixedPrompt) and input.labels is not None:
            positions = Slice.unwrap(kwargs.get("pos_slice"))
            cache.labels = [[row[i] for i in positions.indices(len(row)).tolist()] for row in input.labels]
        if isinstance(cache, Cache) and not (model_args or cache.attention_masks or kwargs.keys() & EXACT):
            cache.keep_masks(self._padding_on_the_right(input, kwargs.get("prepend_bos")), kwargs.get("pos_slice"))
        return (None if early else output), cache

    def _padding_on_the_right(self, ids: object, prepend_bos: bool | None) -> Masks:
        """The mask of ids that are padded on the right, which no real token attends to, so that the run did not infer it."""
        if self.tokenizer is None or not isinstance(ids, Tensor) or not is_ids(ids):
            return {}
        real = self.tokens.attention_mask(self._ids(ids), prepend_bos, "right").bool()
        is_plain = not is_readable(real) or (is_on_host(real) and bool(real.all()))
        return {} if is_plain else {self.stack.blocks: real}

    def _last_layer_needed(self, names_filter: Site, hooks: Sequence[HookSpec]) -> int | None:
        """The `stop_at_layer` that suffices for these sites, these and all active hooks; None if one is after the blocks."""
        stop, given = 0, [point for hook in hooks for point in self.points_for(hook.site, hook.when)]
        for point in {*self.points(names_filter), *given, *(p for p in self.hook_points() if p.is_listening)}:
            head, *rest = (point.name or "").split(".")
            if head == "blocks":
                stop = max(stop, int(rest[0]) + 1)
            elif head in ("ln_final", "unembed"):
                return None
        return stop

    # ---- graphs ------------------------------------------------------------------------------------------------------

    def compiled(
        self, taps: Site | None = None, edits: Mapping[str, Tensor] | None = None, backend: str = "auto"
    ) -> Compiled:
        """An object that runs this model as one graph for each shape of its token ids.

        Args:
            taps: sites whose values the graph keeps, as in a `names_filter`.
            edits: site -> a buffer that the graph adds to its value; fill it in place, zeros change nothing.
            backend: "cudagraph" (of the eager kernels), "inductor" (`torch.compile`), "traced" (the operations as they are), or
                "auto": the first on a CUDA device, the second on a CPU with a C++ compiler, else the third.

        >>> import torch
        >>> from hooked_lm.models.decoder import Decoder
        >>> model = Decoder(
        ...     dict(n_layers=1, d_model=16, n_heads=2, n_ctx=8, d_vocab=10, act_fn="gelu")
        ... )
        >>> steer = torch.zeros(16, device=model.device)
        >>> run = model.compiled(
        ...     taps=["resid_post0"], edits={"blocks.0.hook_resid_pre": steer}, backend="traced"
        ... )
        >>> with torch.no_grad():
        ...     logits = run(torch.tensor([[5, 3, 1]]))
        >>> logits.shape, run.taps["resid_post", 0].shape
        (torch.Size([1, 3, 10]), torch.Size([1, 3, 16]))
        """
        return Compiled(self, taps, edits, backend)

    # ---- flags -------------------------------------------------------------------------------------------------------

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether a cache without a filter holds `hook_result`."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether a cache without a filter holds `hook_q_input`, `hook_k_input` and `hook_v_input`."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether a cache without a filter holds `hook_mlp_in`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether a cache without a filter holds `hook_attn_in`."""
        self.cfg.use_attn_in = use_attn_in

    def set_ungroup_grouped_query_attention(self, ungroup_grouped_query_attention: bool) -> None:
        """Whether keys and values of a grouped-query model are repeated for each query head, [batch, pos, head, ...]."""
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention
        apply_config_flags(self)

    # ---- parts of a run ----------------------------------------------------------------------------------------------

    def input_to_embed(
        self,
        input: str | Sequence[str] | Int[Tensor, "*batch pos"],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Mask | None = None,
        past_kv_cache: KeyValueCache | None = None,
    ) -> tuple[
        Float[Tensor, "batch pos d_model"],
        Int[Tensor, "batch pos"],
        Float[Tensor, "batch pos d_model"] | None,
        Int[Tensor, "batch key_pos"] | None,
    ]:
        """Returns the stream before the first block, token ids, the position embedding of a shortformer, padding mask.

        The mask is None if none was given, and the ids were not asked for padding: it is on the right, without a cache.
        """
        resid, tokens, context = self.embedded(input, prepend_bos, padding_side, attention_mask, past_kv_cache)
        mask = None if context.real is None else context.real.long()
        if mask is None and (attention_mask is not None or self.infers_padding(padding_side, past_kv_cache)):
            mask = tokens.new_ones(tokens.shape[0], context.n_key)  # all are real
        return resid, tokens, context.pos_embed, mask

    def get_residual(
        self,
        embed: Float[Tensor, "batch pos d_model"],
        pos_offset: int = 0,
        prepend_bos: bool | None = None,
        attention_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        return_shortformer_pos_embed: bool = True,
        device: torch.device | str | None = None,
    ) -> Any:
        """Returns the stream of token embeddings at positions from `pos_offset`, and a shortformer's position embedding."""
        check_stream(embed, self.cfg.d_model)
        context = self._context(embed, attention_mask, None, pos_offset)
        context.n_past = pos_offset
        if context.real is not None:
            context.real = F.pad(context.real, (pos_offset, 0), value=True)
        resid = self._with_positions(embed, tokens, context)
        return (resid, context.pos_embed) if return_shortformer_pos_embed else resid

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab"],
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Tensor | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, "*batch_pos"]:
        """Returns the next-token cross entropy of real tokens in nats: the mean, or [batch, pos - 1] with `per_token`."""
        return lm_cross_entropy_loss(logits, tokens.to(logits.device), attention_mask, per_token)

    def checked_tokens(self, tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
        """Token ids with negative ones counted from the end; ValueError for an id that the model does not read."""
        return checked_ids(tokens, self.cfg.d_vocab)

    def stack_of(self, name: str) -> tuple[str, int]:
        """The stack of a site with this short name; see `BaseModel.stack_of`."""
        return (name, 0) if is_outside_blocks(self, name) else super().stack_of(name)

    # ---- weights -----------------------------------------------------------------------------------------------------

    def untie(self) -> None:
        """Gives a tied or factored unembedding a separate `W_U`."""
        if isinstance(self.unembed, Unembed) and (own := untied(self.unembed)) is not self.unembed:
            self.unembed = own
            sync_config(self)
            self.setup()

    def verify(self, tokens: Int[Tensor, "batch pos"] | None = None) -> Verification:
        """Checks the identities between this model's sites, on random tokens by default; see `verification.verify`."""
        tokens = drawn_tokens(self.cfg) if tokens is None else tokens
        return verify(self, (tokens,), lambda at, logits: decoder_identities(self, at, logits, tokens.to(self.device)))

    # ---- what its forward pass rarely does ---------------------------------------------------------------------------

    def _resumed(
        self,
        input: object,
        tokens: Int[Tensor, "batch pos"] | VisionInputs | None,
        pos_embed: Tensor | None,
        mask: Tensor | None,
        cache: KeyValueCache | None,
    ) -> tuple[Stream, Int[Tensor, "batch pos"] | None, Context]:
        """A given residual stream, checked, its token ids if they are known, and the context of the run."""
        check_stream(input, self.cfg.d_model, self.cfg.d_model * n_streams(self))
        context = self._context(input, mask, cache)
        context.pos_embed = pos_embed
        if self.tree.per_layer is not None and isinstance(tokens, Tensor):
            context.per_layer = self.per_layer(tokens, self.embed(tokens))
        if pos_embed is None and self.tree.shortformer:
            self._with_positions(input, None, context)
        return input, tokens, context  # type: ignore[return-value]  # a model that reads images gives their ids

    def _loss(
        self, logits: Tensor, tokens: Tensor | None, context: Context, return_type: str | None, per_token: bool
    ) -> Any:
        """The loss, alone or beside the logits, as `return_type` says."""
        if return_type is None:
            return None
        tokens = check_loss(logits, tokens)
        loss = self.loss_fn(logits, tokens, context.new_real(), per_token=per_token)
        return loss if return_type == "loss" else Output(logits, loss)
