"""A decoder-only language model: tokens in, logits out, with a hook point at every step."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from hooked_lm.components.context import Context
from hooked_lm.components.embeddings.embed import soft_capped
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.hooks import HookPoint, is_listening
from hooked_lm.models import checks
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.models.decoder_methods import DecoderMethods, Mask
from hooked_lm.models.generation.loop import Input
from hooked_lm.models.stack import Stack, Stream, apply_config_flags, checked_ids
from hooked_lm.models.text.tokenizer import Tokenizer
from hooked_lm.models.vision.inputs import VisionInputs


class Decoder(DecoderMethods):
    """A decoder-only transformer in which every intermediate value has a name, built from a config.

    `hooked_lm.HookedTransformer` adds loading and saving of checkpoints.

    >>> import torch
    >>> from hooked_lm.models.decoder import Decoder
    >>> cfg = dict(n_layers=1, d_model=16, n_heads=2, n_ctx=8, d_vocab=10, act_fn="gelu")
    >>> model = Decoder(cfg)
    >>> model(torch.tensor([[5, 3, 1]])).shape
    torch.Size([1, 3, 10])
    """

    config_class = HookedTransformerConfig
    stack = Stack()
    stacks = (stack,)
    context_class = Context  # of its runs

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, Any],
        tokenizer: Tokenizer | None = None,
        move_to_device: bool = True,
        default_padding_side: str | None = None,
    ) -> None:
        super().__init__()
        self._set_config(self.config_class.unwrap(cfg), tokenizer, default_padding_side)
        with self._initial_device(move_to_device):
            self.make_embedding(self.tree)
            self.stack.build_positions(self, self.tree.pos_embed)
            if self.tree.per_layer is not None:
                self.per_layer = self.tree.per_layer.build()
            self.stack.build_blocks(self, self.tree.blocks, self.tree.ln_final)
            self.unembed = self.tree.unembed.build(self.embed)
        self._finish()

    def make_embedding(self, tree: DecoderConfig) -> None:
        """Adds the token embedding and its sites."""
        self.hook_tokens = HookPoint("batch", "pos", on_demand=True)
        self.embed = tree.embed.build()
        self.hook_embed = HookPoint("batch", "pos", "d_model")

    @property
    def tree(self) -> DecoderConfig:
        """The component configs of the model."""
        assert self.cfg.tree is not None  # checked when it was built
        return self.cfg.tree

    def forward(
        self,
        input: Input | None = None,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        start_at_layer: int | None = None,
        tokens: Int[Tensor, "batch pos"] | VisionInputs | None = None,
        shortformer_pos_embed: Float[Tensor, "batch pos d_model"] | None = None,
        attention_mask: Mask | None = None,
        stop_at_layer: int | None = None,
        past_kv_cache: KeyValueCache | None = None,
        logits_to_keep: int | None = None,
        input_ids: Int[Tensor, "*batch pos"] | None = None,
    ) -> Any:
        """Runs the model on text, token ids [batch, pos] or [pos], or (with `start_at_layer`) a residual stream.

        Args:
            return_type: "logits", "loss" (mean next-token cross entropy in nats), "both" or None.
            loss_per_token: the loss of every position [batch, pos - 1] instead of the mean.
            prepend_bos, padding_side: how text is tokenized; the model's defaults if None.
            start_at_layer, stop_at_layer: run only these blocks, as bounds of a slice; with `stop_at_layer` returns the
                residual stream [batch, pos, d_model] (several: [batch, pos, stream * d_model]).
            tokens: the ids of a residual stream, for the loss and for per-layer embeddings.
            shortformer_pos_embed: with `start_at_layer`, the position embedding of a shortformer model.
            attention_mask: [batch, pos], 1 for real tokens and 0 for padding; with a cache it may include the cached tokens.
            past_kv_cache: keys and values of earlier tokens; those of the new tokens are appended.
            logits_to_keep: unembed only this many last positions.
            input_ids: synonym of `input`, for the output of a transformers tokenizer: `model(**tokenizer(text))`.

        Negative ids count from the end of the vocabulary. If padded ids come without a mask, it is inferred where it affects
        real tokens: with left padding, and with a cache (see `Tokens.attention_mask`).

        Raises ValueError for a prompt that is empty or longer than n_ctx, and for token ids out of range; TypeError for
        no input or two.
        """
        if input is None or input_ids is not None:
            input = checks.one_input(input, input_ids)
        if return_type not in checks.RETURN_TYPES or logits_to_keep is not None:
            checks.check_options(return_type, logits_to_keep)
        if start_at_layer is not None or stop_at_layer is not None:  # before any hook is called
            checks.check_layers(start_at_layer, stop_at_layer, len(self.blocks), past_kv_cache)
        if start_at_layer is None:
            resid, tokens, context = self.embedded(input, prepend_bos, padding_side, attention_mask, past_kv_cache)
        else:
            resid, tokens, context = self._resumed(input, tokens, shortformer_pos_embed, attention_mask, past_kv_cache)
        resid = self.stack.run(self, resid, context, start_at_layer, stop_at_layer)
        if stop_at_layer is not None:
            return resid
        # the stream may have a wider dtype than the weights
        normalized = self.stack.normalized(self, resid).to(self.embed.W_E.dtype)
        if return_type is None and not is_listening(*(m for m in self.unembed.modules() if isinstance(m, HookPoint))):
            return None
        logits = self.unembed(normalized if logits_to_keep is None else normalized[:, -logits_to_keep:])
        logits = self.cap_logits(logits)
        return logits if return_type == "logits" else self._loss(logits, tokens, context, return_type, loss_per_token)

    def embedded(
        self,
        input: Any,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        attention_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Stream, Int[Tensor, "batch pos"], Context]:
        """The stream before the first block, the token ids, and the context of the run."""
        reads_mask = attention_mask is None and self.infers_padding(padding_side, cache)
        is_here = isinstance(input, Tensor) and input.device == self.embed.W_E.device
        if is_here and input.ndim == 2 and input.dtype == torch.long and not reads_mask:
            tokens = input
        else:
            tokens, attention_mask = self._tokens_and_mask(input, prepend_bos, padding_side, attention_mask, cache)
        context = self._context(tokens, attention_mask, cache)
        tokens = checked_ids(self.hook_tokens(tokens), self.cfg.d_vocab)
        embed = self.hook_embed(self.embed(tokens))
        if self.tree.per_layer is not None:
            context.per_layer = self.per_layer(tokens, embed)
        return self._with_positions(embed, tokens, context), tokens, context

    def infers_padding(self, padding_side: str | None, cache: KeyValueCache | None) -> bool:
        """Whether padding is inferred from token ids: on the right, and without a cache, it affects no real token."""
        return self.tokenizer is not None and (cache is not None or (padding_side or self.padding_side) == "left")

    def _context(self, new: Tensor, mask: Tensor | None, cache: KeyValueCache | None, n_past: int = 0) -> Context:
        """Positions and masks of a run over new tokens, or their stream."""
        n_past = n_past if cache is None else cache.length
        if new.numel() == 0 or n_past + new.shape[1] > min(self.cfg.n_ctx, self.tree.n_ctx):
            checks.check_length(new, n_past, self.cfg.longest_input)
        apply_config_flags(self)
        return self.context_class(new.shape[1], new.device, self.stack.real(self, mask, new, cache), cache)

    def _with_positions(self, embed: Stream, tokens: Tensor | None, context: Context) -> Stream:
        """The stream; what a shortformer adds to queries and keys goes into the context instead."""
        if not self.tree.shortformer:
            return self.stack.with_positions(self, embed, tokens, context)
        positions = self.stack.positions(self, embed, tokens, context)
        context.pos_embed = None if positions is None else positions.expand_as(embed)
        return embed

    def cap_logits(self, logits: Float[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch d_vocab"]:
        """The logits after the soft cap of `cfg`, which is read at each call; they themselves if it has none."""
        cap = self.cfg.output_logits_soft_cap
        return soft_capped(logits, cap if cap > 0 else None)
