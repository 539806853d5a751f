"""An encoder-decoder: source and target in, logits out."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.components.embeddings.embed import TiedUnembed, soft_capped
from hooked_lm.components.norms.norm import norm_of
from hooked_lm.components.stack_context import EncodedSource, EncoderDecoderCache, StackContext
from hooked_lm.hooks import HookPoint, is_listening
from hooked_lm.models.base import BaseModel
from hooked_lm.models.caches.activation_cache import NamedCache
from hooked_lm.models.checks import check_length, check_loss, check_options, check_rows, checked_global_mask
from hooked_lm.models.config.flat import HookedEncoderDecoderConfig, HookedTransformerConfig
from hooked_lm.models.config.tree import EncoderDecoderConfig, StackConfig
from hooked_lm.models.generation.encoder_decoder import generate
from hooked_lm.models.loss import Output, lm_cross_entropy_loss
from hooked_lm.models.stack import Stack, Stream, apply_config_flags
from hooked_lm.models.text.encoder_decoder import DecoderInput, SourceAndTargetText
from hooked_lm.models.text.source_and_target import SourceAndTarget
from hooked_lm.models.text.tokenizer import Tokenizer
from hooked_lm.models.verification.identities import encoder_decoder_identities
from hooked_lm.models.verification.verify import Verification, drawn_masks, drawn_tokens, verify
from hooked_lm.models.weights.views import CrossWeightViews

Source = str | Sequence[str] | Int[Tensor, "*batch pos"]
Input = Source | SourceAndTarget
Mask = Int[Tensor, "rows pos"] | Bool[Tensor, "rows pos"]
GlobalMask = Int[Tensor, "*global_rows global_pos"] | Bool[Tensor, "*global_rows global_pos"]
TargetMask = Int[Tensor, "rows all_pos"] | Bool[Tensor, "rows all_pos"]


class EncoderDecoder(SourceAndTargetText, CrossWeightViews, BaseModel):
    """An encoder-decoder transformer in which every intermediate value has a name, built from a config.

    Sites are `encoder.{i}...` and `decoder.{i}...`; `hook_encoder_out` is the input of the decoder's cross-attention.
    `hooked_lm.HookedEncoderDecoder` adds loading and saving of checkpoints.

    >>> import torch
    >>> from hooked_lm.models.encoder_decoder import EncoderDecoder
    >>> cfg = dict(
    ...     n_layers=2,
    ...     d_model=16,
    ...     n_heads=2,
    ...     n_ctx=32,
    ...     d_vocab=10,
    ...     act_fn="relu",
    ...     decoder_start_token_id=0,
    ... )
    >>> model = EncoderDecoder(cfg)
    >>> model(torch.tensor([[5, 3, 1]]), torch.tensor([[0, 7]])).shape
    torch.Size([1, 2, 10])
    """

    config_class = HookedEncoderDecoderConfig
    cfg: HookedEncoderDecoderConfig
    encoder_stack, decoder_stack = (
        Stack(
            side,
            f"{side}_final_ln",
            pos_embed,
            f"{side}_embed_ln",
            f"{side}_rel_pos_bias",
            f"{side}_token_ln",
            side[0].upper(),
        )
        for side, pos_embed in (("encoder", "pos_embed"), ("decoder", "decoder_pos_embed"))
    )
    stacks = (encoder_stack, decoder_stack)
    cache_class = NamedCache

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, Any],
        tokenizer: Tokenizer | None = None,
        move_to_device: bool = True,
    ) -> None:
        super().__init__()
        flat = HookedEncoderDecoderConfig.unwrap(cfg)
        if not isinstance(flat, HookedEncoderDecoderConfig):
            raise TypeError(
                f"an encoder-decoder is built from a HookedEncoderDecoderConfig, not a {type(flat).__name__} with "
                f"positional_embedding_type {flat.positional_embedding_type!r}"
            )
        self._set_config(flat, tokenizer)
        with self._initial_device(move_to_device):
            self._make_encoder(self.tree, self.tree.encoder)
            self._make_decoder(self.tree, self.tree.decoder)
            self.unembed = self.tree.unembed.build(self.decoder_embed or self.embed)
            self.spare_embed = None if self.tree.spare_embed is None else self.tree.spare_embed.build()
        if isinstance(self.unembed, TiedUnembed) and self.decoder_embed is not None:
            self.unembed.tied_to = "decoder_embed.W_E"
        self._finish()

    def _make_encoder(self, tree: EncoderDecoderConfig, side: StackConfig) -> None:
        self.hook_tokens = HookPoint("batch", "pos", on_demand=True)
        self.global_tokens = None if tree.global_tokens is None else tree.global_tokens.build()
        self.embed = tree.embed.build()
        self.hook_embed = HookPoint("batch", "pos", "d_model")
        self.encoder_stack.build_positions(self, side.pos_embed, side.ln_embed, side.ln_tokens)
        self.encoder_stack.build_blocks(self, side.blocks, side.ln_final, side.rel_pos_bias)
        self.hook_encoder_out = HookPoint("batch", "pos", "d_model")
        for point in (module for module in self.modules() if isinstance(module, HookPoint)):
            point.grows = False

    def _make_decoder(self, tree: EncoderDecoderConfig, side: StackConfig) -> None:
        self.hook_decoder_tokens = HookPoint("batch", "pos", on_demand=True)
        self.decoder_embed = None if tree.decoder_embed is None else tree.decoder_embed.build()
        self.hook_decoder_embed = HookPoint("batch", "pos", "d_model")
        self.decoder_stack.build_positions(self, side.pos_embed, side.ln_embed, side.ln_tokens)
        self.ngram_embed = None if tree.ngram_embed is None else tree.ngram_embed.build()
        self.decoder_stack.build_blocks(self, side.blocks, side.ln_final, side.rel_pos_bias)

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Input | None,
        decoder_input: DecoderInput | None = None,
        return_type: str | None = "logits",
        one_zero_attention_mask: Mask | None = None,
        loss_per_token: bool = False,
        *,
        attention_mask: Mask | None = None,
        decoder_attention_mask: TargetMask | None = None,
        global_attention_mask: GlobalMask | None = None,
        past_kv_cache: EncoderDecoderCache | None = None,
        logits_to_keep: int | None = None,
    ) -> Any:
        """Runs the model on a source and a target, each text or token ids [batch, pos] or [pos].

        Args:
            input: the source, or source and target in one; None if the cache already holds the encoder's output.
            decoder_input: the target, with its start token; None means the start token only. Text gets start and end token,
                so the loss equals that of transformers with the text as labels. For the logits after an unfinished text
                give ids, `model.to_decoder_tokens(text, end=False)[0]`.
            return_type: "logits" [batch, decoder pos, d_vocab], "loss" (mean cross entropy of the decoder's next tokens,
                in nats), "both" or None.
            one_zero_attention_mask, attention_mask: synonyms: 1 for real tokens of the source, 0 for padding.
            loss_per_token: the loss of every position [batch, decoder pos - 1] instead of the mean.
            decoder_attention_mask: the mask of the target; with a cache it may include the cached tokens.
            global_attention_mask: 1 for tokens of the source that have global attention among those within windows, by default
                none. Hooks can set it in any run, at the site "global_tokens.hook_mask".
            past_kv_cache: encoder output, keys and values of earlier tokens; those of the new tokens are appended.
            logits_to_keep: unembed only this many last positions.

        Raises ValueError for an input that is empty or longer than n_ctx, and for token ids out of range.
        """
        check_options(return_type, logits_to_keep)
        if isinstance(input, SourceAndTarget):
            if decoder_input is not None:
                raise ValueError("a SourceAndTarget has its target: leave decoder_input out")
            decoder_input, input = input.target, input.source
        if one_zero_attention_mask is not None and attention_mask is not None:
            raise ValueError("one_zero_attention_mask and attention_mask are synonyms: give one of them")
        source_mask = one_zero_attention_mask if attention_mask is None else attention_mask
        source = self._source(input, source_mask, past_kv_cache, global_attention_mask)
        tokens, mask = self._target_tokens(decoder_input, decoder_attention_mask, source.resid.shape[0])
        if tokens.shape[0] != source.resid.shape[0]:
            raise ValueError(f"the source has {source.resid.shape[0]} rows, and the decoder's input {tokens.shape[0]}")
        resid, context = self._decoded(tokens, mask, source, past_kv_cache)
        if return_type is None and not is_listening(*(m for m in self.unembed.modules() if isinstance(m, HookPoint))):
            return None
        logits = self.unembed(resid if logits_to_keep is None else resid[:, -logits_to_keep:])
        logits = soft_capped(logits, self.tree.unembed.soft_cap)
        if return_type in ("logits", None):
            return logits if return_type else None
        check_loss(logits, tokens)
        loss = lm_cross_entropy_loss(logits, tokens, context.new_real(), loss_per_token)
        return loss if return_type == "loss" else Output(logits, loss)

    def encode(
        self, input: Source, attention_mask: Mask | None = None, global_attention_mask: GlobalMask | None = None
    ) -> Stream:
        """Returns the encoder's output, [batch, pos, d_model]."""
        return self._source(input, attention_mask, None, global_attention_mask).resid

    def _source(
        self,
        input: Source | None,
        mask: Tensor | None,
        cache: EncoderDecoderCache | None,
        global_mask: Tensor | None = None,
    ) -> EncodedSource:
        """The encoder's output, from the cache if it holds one."""
        if cache is not None:
            self._check_cache(cache)
        if cache is not None and cache.source is not None:
            if input is not None or global_mask is not None:
                given = "input" if input is not None else "global_attention_mask"
                raise ValueError(f"the cache already holds the encoder's output: give {given}=None")
            return cache.source
        if input is None:
            raise ValueError("there is no input for the encoder, and no cache that holds its output")
        tokens, mask = self._source_tokens(input, mask)
        check_length(tokens, 0, self.room(self.tree.encoder))
        apply_config_flags(self)
        real = self.encoder_stack.real(self, mask, tokens)
        check_rows(real)
        context = StackContext(tokens.shape[0], tokens.shape[1], tokens.device, real)
        global_mask, tokens = checked_global_mask(self, global_mask, tokens), self.hook_tokens(tokens)
        if self.global_tokens is not None:
            context.global_tokens = self.global_tokens(tokens, global_mask, real)
        embed = self.hook_embed(self.embed(tokens))
        resid = self.encoder_stack.with_positions(self, embed, tokens, context)
        resid = self.encoder_stack.normalized(self, self.encoder_stack.run(self, resid, context))
        return EncodedSource(self.hook_encoder_out(resid), real, cache_kv=cache is not None and not cache.frozen)

    def room(self, side: StackConfig) -> int:
        """The longest input of the encoder or the decoder."""
        longest = self.cfg.longest_input
        return longest if side.n_ctx is None else min(longest, side.n_ctx)

    def _check_cache(self, cache: EncoderDecoderCache) -> None:
        """Raises ValueError for a cache of another class or number of layers."""
        if not isinstance(cache, EncoderDecoderCache) or len(cache) != len(self.decoder):
            raise ValueError(
                f"past_kv_cache is an EncoderDecoderCache for {len(self.decoder)} layers, got a {type(cache).__name__} for "
                f"{len(cache)}"
            )

    def _decoded(
        self, tokens: Tensor, mask: Tensor | None, source: EncodedSource, cache: EncoderDecoderCache | None
    ) -> tuple[Stream, StackContext]:
        """The decoder's stream after the final norm, and its context."""
        n_past = 0 if cache is None else cache.length
        check_length(tokens, n_past, self.room(self.tree.decoder))
        apply_config_flags(self)
        real = self.decoder_stack.real(self, mask, tokens, cache)
        check_rows(real)
        context = StackContext(tokens.shape[0], tokens.shape[1], tokens.device, real, cache, source)
        embed = self.hook_decoder_embed((self.decoder_embed or self.embed)(self.hook_decoder_tokens(tokens)))
        resid = self.decoder_stack.with_positions(self, embed, tokens, context)
        if self.ngram_embed is not None:
            following = self.decoder_pos_embed.at(context.positions + 1)
            resid = self.ngram_embed(resid, following, norm_of(self, "decoder_embed_ln"))
        resid = self.decoder_stack.run(self, resid, context)
        if cache is not None and not cache.frozen:
            cache.source = source
        return self.decoder_stack.normalized(self, resid), context

    generate = generate

    def verify(
        self,
        tokens: Int[Tensor, "batch pos"] | None = None,
        decoder_tokens: Int[Tensor, "batch target_pos"] | None = None,
    ) -> Verification:
        """Checks the identities between this model's sites, on random tokens by default; see `verification.verify`."""
        tokens = drawn_tokens(self.cfg) if tokens is None else tokens
        if decoder_tokens is None:
            decoder_tokens = drawn_tokens(self.cfg, self.cfg.d_vocab_out, most=9, seed=1)
        inputs = (tokens, decoder_tokens)
        masks = drawn_masks(self, tokens)
        return verify(self, inputs, lambda at, logits: encoder_decoder_identities(self, at, logits), **masks)

    # ---- config ------------------------------------------------------------------------------------------------------

    @property
    def tree(self) -> EncoderDecoderConfig:
        """The component configs of the model."""
        assert self.cfg.tree is not None  # made with the config
        return self.cfg.tree
