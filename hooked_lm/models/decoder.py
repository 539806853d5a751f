"""HookedTransformer: a decoder-only language model, tokens in, logits out, a hook point at every step between."""

import os
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.blocks.block import AttentionPart
from hooked_lm.components.context import Context
from hooked_lm.components.embed import Unembed, soft_capped
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.norm import add_norm, norm_of
from hooked_lm.hooks import Cache, HookedRootModule, HookPoint, NamesFilter, is_listening
from hooked_lm.hooks.select import Site
from hooked_lm.models.aliases import aliases
from hooked_lm.models.base import PlacedModel, tokenizer_for
from hooked_lm.models.caches.decoder import ActivationCache
from hooked_lm.models.checks import (
    check_cacheable,
    check_layers,
    check_length,
    check_options,
    check_stream,
    one_input,
    real_of,
)
from hooked_lm.models.config.decoder import DecoderConfig, HookedTransformerConfig
from hooked_lm.models.generation import decoder as generation
from hooked_lm.models.loss import lm_cross_entropy_loss
from hooked_lm.models.names import site_name
from hooked_lm.models.text.decoder import TextMethods
from hooked_lm.models.text.tokens import checked_ids
from hooked_lm.models.verification.decoder import Verification, verify
from hooked_lm.models.weights.decoder_views import WeightViews
from hooked_lm.models.weights.fold import FoldMethods
from hooked_lm.models.weights.state import sync_config

Mask = Int[Tensor, "batch key_pos"] | Bool[Tensor, "batch key_pos"]
Input = str | Sequence[str] | Int[Tensor, "*batch pos"] | Float[Tensor, "batch pos d_model"]


class Output(NamedTuple):
    """What `return_type="both"` gives."""

    logits: Float[Tensor, "batch pos d_vocab"]
    loss: Float[Tensor, "*batch_pos"]


def _fits(mask: Tensor, batch: int, n_pos: int, n_past: int) -> bool:
    """Whether a mask is that of the new tokens, or of these and the cached ones."""
    return mask.ndim == 2 and mask.shape[0] == batch and (mask.shape[1] == n_pos or mask.shape[1] == n_past + n_pos)


class HookedTransformer(TextMethods, WeightViews, FoldMethods, PlacedModel, HookedRootModule):
    """A decoder-only transformer in which every intermediate value has a name.

    `HookedTransformer.from_pretrained(name)` loads a checkpoint; `HookedTransformer(cfg)` builds a new model from a
    `HookedTransformerConfig` (or a dict of its flat names).

    >>> from hooked_lm import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("demo")
    >>> logits, cache = model.run_with_cache("The capital of France is")
    >>> cache["pattern", 0].shape == (1, model.cfg.n_heads, logits.shape[1], logits.shape[1])
    True
    """

    dataset: Any = None  # texts like those of its training, once `load_sample_training_dataset` was called

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, Any],
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: str | None = None,
    ) -> None:
        super().__init__()
        self.cfg = copy(HookedTransformerConfig.unwrap(cfg))  # the caller's may build others
        if default_padding_side is not None:
            self.cfg.default_padding_side = default_padding_side
        self.set_tokenizer(tokenizer_for(self.cfg, tokenizer))
        self.cfg.check_tree()
        tree = self.tree
        with torch.device(self.cfg.device if move_to_device else torch.get_default_device()):
            self.hook_tokens = HookPoint("batch", "pos", on_demand=True)
            self.embed = tree.embed.build()
            self.hook_embed = HookPoint("batch", "pos", "d_model")
            if tree.pos_embed is not None:
                self.pos_embed = tree.pos_embed.build()
                self.hook_pos_embed = HookPoint("batch", "pos", "d_model")
            if tree.per_layer is not None:
                self.per_layer = tree.per_layer.build()
            self.blocks = nn.ModuleList(block.build(layer) for layer, block in enumerate(tree.blocks))
            add_norm(self, "ln_final", tree.ln_final)
            self.unembed = tree.unembed.build(self.embed)
        if self.embed.W_E.dtype != self.cfg.dtype:
            super().to(self.cfg.dtype)
        if self.cfg.init_weights:
            self.init_weights()
        self.cfg.seal()
        self.setup()

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Input | None = None,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        start_at_layer: int | None = None,
        tokens: Int[Tensor, "batch pos"] | None = None,
        shortformer_pos_embed: Float[Tensor, "batch pos d_model"] | None = None,
        attention_mask: Mask | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: KeyValueCache | None = None,
        logits_to_keep: int | None = None,
        input_ids: Int[Tensor, "*batch pos"] | None = None,
    ) -> Any:
        """Run the model on text, token ids [batch, pos] or [pos], or (with `start_at_layer`) a residual stream.

        Args:
            return_type: "logits", "loss" (mean next-token cross entropy in nats), "both" or None.
            loss_per_token: the loss of every position [batch, pos - 1] instead of the mean.
            prepend_bos, padding_side: how text becomes tokens; the model's defaults if None.
            start_at_layer, stop_at_layer: run only these blocks, as bounds of a slice; with a stop the residual stream
                [batch, pos, d_model] is returned.
            tokens: the ids of a residual stream, for the loss, and for per-layer embeddings.
            shortformer_pos_embed: with `start_at_layer`, the position embedding of a shortformer model.
            attention_mask: [batch, pos], 1 for real tokens and 0 for padding; with a cache it may cover the past too.
            past_kv_cache: keys and values of earlier tokens; the new ones are appended.
            logits_to_keep: unembed only the last so many positions.
            input_ids: another name of `input`, for what a tokenizer of transformers gives: `model(**tokenizer(text))`.

        Negative ids count from the end of the vocabulary. Of ids that are padded the mask is read off the ids, if none is
        given, where it matters: padding on the left, and any padding with a cache (see `Tokens.attention_mask`).

        Raises ValueError for a prompt that is empty or longer than n_ctx, and for token ids out of range; TypeError for no
        input, and for two.
        """
        input = one_input(input, input_ids)
        check_options(return_type, logits_to_keep)
        check_layers(start_at_layer, stop_at_layer, len(self.blocks), past_kv_cache)
        if start_at_layer is None:
            resid, tokens, context = self.embedded(input, prepend_bos, padding_side, attention_mask, past_kv_cache)
        else:
            resid = self._checked_stream(input, past_kv_cache.length if past_kv_cache is not None else 0)
            context = self._context(resid, attention_mask, past_kv_cache)
            context.pos_embed = shortformer_pos_embed
            if self.tree.per_layer is not None and tokens is not None:
                context.per_layer = self.per_layer(tokens, self.embed(tokens))
            if shortformer_pos_embed is None and self.tree.shortformer:
                _, context.pos_embed = self._with_positions(resid, context)
        with nullcontext() if past_kv_cache is None else past_kv_cache.appending(context.real):
            for block in list(self.blocks)[start_at_layer:stop_at_layer]:
                resid = block(resid, context)
        if stop_at_layer is not None:
            return resid
        normalized = norm_of(self, "ln_final")(resid).to(self.embed.W_E.dtype)  # a stream may be wider than the weights
        if return_type is None and not is_listening(*(m for m in self.unembed.modules() if isinstance(m, HookPoint))):
            return None
        logits = self.unembed(normalized if logits_to_keep is None else normalized[:, -logits_to_keep:])
        logits = self.cap_logits(logits)
        return self._result(logits, tokens, context, return_type, loss_per_token)

    def cap_logits(self, logits: Float[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch d_vocab"]:
        """The logits after the soft cap of `cfg`, which is read at each call; they themselves if it has none."""
        cap = self.cfg.output_logits_soft_cap
        return soft_capped(logits, cap if cap > 0 else None)

    def _result(
        self, logits: Tensor, tokens: Tensor | None, context: Context, return_type: str | None, loss_per_token: bool
    ) -> Any:
        if return_type == "logits":
            return logits
        if return_type is None:
            return None
        if tokens is None:
            raise ValueError("a loss needs the token ids: give tokens=... beside the residual stream")
        if tokens.shape[1] != logits.shape[1]:
            raise ValueError(
                f"a loss needs logits and tokens of the same positions; there are {logits.shape[1]} (logits_to_keep "
                f"leaves some out) and {tokens.shape[1]}"
            )
        loss = self.loss_fn(logits, tokens, context.new_real(), per_token=loss_per_token)
        return loss if return_type == "loss" else Output(logits, loss)

    def loss_fn(
        self,
        logits: Float[Tensor, "batch pos d_vocab"],
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Tensor | None = None,
        per_token: bool = False,
    ) -> Float[Tensor, "*batch_pos"]:
        """Next-token cross entropy in nats, of real tokens: the mean, or [batch, pos - 1] with `per_token`."""
        return lm_cross_entropy_loss(logits, tokens.to(logits.device), attention_mask, per_token)

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
        """The stream before the first block, the token ids, a shortformer's position embedding, the padding mask."""
        resid, tokens, context = self.embedded(input, prepend_bos, padding_side, attention_mask, past_kv_cache)
        return resid, tokens, context.pos_embed, None if context.real is None else context.real.long()

    def embedded(
        self,
        input: Any,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_model"], Int[Tensor, "batch pos"], Context]:
        """The stream before the first block, the token ids, and what all layers share."""
        n_past = cache.length if cache is not None else 0
        tokens, attention_mask = self._tokens_and_mask(input, prepend_bos, padding_side, attention_mask, cache)
        check_length(tokens, n_past, self.cfg.n_ctx)
        context = self._context(tokens, attention_mask, cache)
        tokens = self.hook_tokens(tokens)
        tokens = checked_ids(tokens, self.cfg.d_vocab)
        embed = self.hook_embed(self.embed(tokens))
        if self.tree.per_layer is not None:
            context.per_layer = self.per_layer(tokens, embed)
        resid, context.pos_embed = self._with_positions(embed, context, tokens)
        return resid, tokens, context

    def get_residual(
        self,
        embed: Float[Tensor, "batch pos d_model"],
        pos_offset: int = 0,
        prepend_bos: bool | None = None,
        attention_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        return_shortformer_pos_embed: bool = True,
        device: Any = None,
    ) -> Any:
        """The stream of given token embeddings at the positions from `pos_offset` on, and a shortformer's addition."""
        context = self._context(self._checked_stream(embed, pos_offset), attention_mask, None)
        context.n_past = pos_offset
        if context.real is not None:
            context.real = F.pad(context.real, (pos_offset, 0), value=True)
        resid, pos_embed = self._with_positions(embed, context, tokens)
        return (resid, pos_embed) if return_shortformer_pos_embed else resid

    def _with_positions(
        self, embed: Tensor, context: Context, tokens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream, and (for shortformers only) what queries and keys are given besides."""
        if self.tree.pos_embed is None:
            return embed, None
        tokens = embed.new_zeros(embed.shape[:2], dtype=torch.long) if tokens is None else tokens
        pos_embed = self.pos_embed(tokens, context.n_past, context.real).to(embed.dtype)
        if is_listening(self.hook_pos_embed):
            pos_embed = self.hook_pos_embed(pos_embed.expand_as(embed).contiguous())
        if self.tree.shortformer:
            return embed, pos_embed.expand_as(embed)
        return embed + pos_embed, None

    def _context(self, new: Tensor, attention_mask: Tensor | None, cache: KeyValueCache | None) -> Context:
        """Positions and masks of this run; a mask without padding counts as none, which lets the fused kernel run free."""
        (batch, n_pos), n_past = new.shape[:2], cache.length if cache is not None else 0
        if attention_mask is not None and not _fits(attention_mask, batch, n_pos, n_past):
            raise ValueError(
                f"attention_mask is {tuple(attention_mask.shape)}; expected {(batch, n_pos)}, for the new tokens"
                + (f", or {(batch, n_past + n_pos)} with the cached ones" if n_past else "")
            )
        if cache is not None:
            check_cacheable(self.blocks)
        self._follow_flags()
        real = None if attention_mask is None else real_of(attention_mask).to(new.device)
        if cache is not None:
            real = cache.full_mask(real, batch, n_pos)
        if real is not None and not torch.compiler.is_compiling() and bool(real.all()):
            real = None
        return Context(n_pos, new.device, real, cache)

    def _checked_stream(self, input: Any, n_past: int = 0) -> Tensor:
        check_stream(input, self.cfg.d_model)
        check_length(input, n_past, self.cfg.n_ctx)
        return input

    # ---- generation --------------------------------------------------------------------------------------------------

    generate = generation.generate
    generate_stream = generation.generate_stream

    # ---- running with a cache ----------------------------------------------------------------------------------------

    def run_with_cache(  # type: ignore[override]
        self,
        input: Input,
        return_type: str | None = "logits",
        *model_args: Any,
        names_filter: NamesFilter = None,
        stop_at_layer: int | None = None,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """One forward pass, and an ActivationCache of what it left at the points that `names_filter` selects.

        With `return_type=None` and a filter the run stops after the last layer that it, or an open hook, needs. See
        `HookedRootModule.run_with_cache` for the other arguments.
        """
        early = return_type is None and stop_at_layer is None
        if early and names_filter is not None and kwargs.get("past_kv_cache") is None:
            stop_at_layer = self._last_layer_needed(names_filter)
        if model_args:
            model_args = (return_type, *model_args)
        elif return_type != "logits":  # a subclass's forward need not know what is not asked for
            kwargs["return_type"] = return_type
        if stop_at_layer is not None:
            kwargs["stop_at_layer"] = stop_at_layer
        output, cache = super().run_with_cache(input, *model_args, names_filter=names_filter, **kwargs)
        return (None if early else output), cache

    def _last_layer_needed(self, names_filter: Site) -> int | None:
        """The bound of the blocks to run for these sites and for all hooks; None if something comes after the blocks."""
        stop = 0
        for point in {*self.points(names_filter), *(p for p in self.hook_points() if p.is_listening)}:
            head, *rest = (point.name or "").split(".")
            if head == "blocks":
                stop = max(stop, int(rest[0]) + 1)
            elif head in ("ln_final", "unembed"):
                return None
        return stop

    def make_cache(self, cache_dict: dict[str, Tensor], has_batch_dim: bool) -> Cache:
        """An ActivationCache of this model."""
        return ActivationCache(cache_dict, self, has_batch_dim)

    # ---- sites -------------------------------------------------------------------------------------------------------

    def find_aliases(self, names: Collection[str]) -> dict[str, str]:
        """The names that other libraries have for the sites."""
        scales = [getattr(getattr(block, "cfg", None), "residual_scale", 1.0) for block in self.blocks]
        return aliases(names, self.cfg.n_layers, scaled=[i for i, scale in enumerate(scales) if scale != 1.0])

    def site_name(self, site: Any) -> str:
        """The full name of a site given as "z5" or ("z", 5); negative layers count from the end."""
        return site_name(site, self.cfg.n_layers)

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
        """Whether keys and values of a grouped-query model are made once for each query head, [batch, pos, head, ...]."""
        self.cfg.ungroup_grouped_query_attention = ungroup_grouped_query_attention
        self._follow_flags()

    def _follow_flags(self) -> None:
        """Tell the parts what `cfg` says now; its flags are plain attributes, read in each run."""
        self.follow_manner()
        flag = self.cfg.ungroup_grouped_query_attention
        for block in self.blocks:
            if isinstance(block, AttentionPart) and getattr(block.attn, "ungrouped", flag) != flag:
                block.attn.ungrouped = flag

    # ---- device and weights ------------------------------------------------------------------------------------------

    @property
    def tree(self) -> DecoderConfig:
        """What the model is made of."""
        assert self.cfg.tree is not None  # checked when it was built
        return self.cfg.tree

    def untie(self) -> None:
        """Give the unembedding a `W_U` of its own where it shares the embedding's, or where that is a product."""
        if isinstance(self.unembed, Unembed) and (own := self.unembed.untied()) is not self.unembed:
            self.unembed = own
            sync_config(self)
            self.setup()

    # ---- loading -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(cls, model_name: str | os.PathLike[str], *args: Any, **kwargs: Any) -> "HookedTransformer":
        """A model from a hub id, a local directory, a familiar short name, or "demo"; see `hooked_lm.hub`."""
        from hooked_lm import hub

        return hub.from_pretrained(model_name, *args, cls=cls, **kwargs)

    @classmethod
    def from_pretrained_no_processing(
        cls, model_name: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> "HookedTransformer":
        """The same with the weights exactly as they are in the checkpoint."""
        from hooked_lm import hub

        return hub.from_pretrained_no_processing(model_name, *args, cls=cls, **kwargs)

    def load_sample_training_dataset(self, **kwargs: Any) -> Any:
        """Some 10,000 texts like those that the model was trained on, kept in `dataset`; see `hooked_lm.hub.datasets`.

        Raises ValueError for an architecture whose training data have no such sample.
        """
        from hooked_lm.hub import datasets

        known = datasets.TRAINED_ON
        if self.cfg.original_architecture not in known:
            raise ValueError(
                f"no sample is known of what a {self.cfg.original_architecture} was trained on, only for {', '.join(known)}; "
                "set model.dataset to texts of your own"
            )
        self.dataset = datasets.get_dataset(known[self.cfg.original_architecture], **kwargs)
        return self.dataset

    def sample_datapoint(
        self, tokenize: bool = False, prepend_bos: bool | None = None, padding_side: str | None = None
    ) -> str | Int[Tensor, "1 pos"]:
        """One text of `dataset`, drawn at random with torch's generator, or its tokens; loads the dataset if there is none."""
        texts = self.dataset if self.dataset is not None else self.load_sample_training_dataset()
        text = texts[int(torch.randint(len(texts), ()))]["text"]
        return self.to_tokens(text, prepend_bos, padding_side) if tokenize else text

    def verify(self, tokens: Int[Tensor, "batch pos"] | None = None) -> Verification:
        """Check the identities between this model's sites; see `hooked_lm.models.verification.decoder`."""
        return verify(self, tokens)
