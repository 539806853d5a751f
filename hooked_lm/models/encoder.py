"""An encoder: bidirectional attention over a whole text, with the heads of its checkpoint."""

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from hooked_lm.components.attention.disentangled import RelativeContext
from hooked_lm.components.embeddings.embed import TiedUnembed
from hooked_lm.components.embeddings.extra_embed import checked_extra_ids
from hooked_lm.components.readable import check
from hooked_lm.hooks import HookPoint
from hooked_lm.models.base import BaseModel
from hooked_lm.models.checks import check_length, check_rows, checked_global_mask
from hooked_lm.models.config.flat import HookedEncoderConfig, HookedTransformerConfig
from hooked_lm.models.config.tree import EncoderConfig
from hooked_lm.models.encoder_outputs import EncoderOutputs, check_return_type
from hooked_lm.models.stack import Stack, Stream, apply_config_flags, checked_ids
from hooked_lm.models.text.encoder import EncoderText, Text
from hooked_lm.models.text.tokenizer import Tokenizer
from hooked_lm.models.verification.identities import encoder_identities
from hooked_lm.models.verification.verify import Verification, drawn_masks, drawn_tokens, verify
from hooked_lm.models.weights.views import EncoderWeightViews

Ids = Int[Tensor, "*batch pos"]
Types = Int[Tensor, "*rows type_pos"]  # as the ids are, which is checked
ExtraIds = Int[Tensor, "*tokens each"]
Mask = Int[Tensor, "*masks mask_pos"] | Bool[Tensor, "*masks mask_pos"]
GlobalMask = Int[Tensor, "*global_masks global_pos"] | Bool[Tensor, "*global_masks global_pos"]


class Encoder(EncoderText, EncoderWeightViews, EncoderOutputs, BaseModel):
    """An encoder (BERT and similar) in which every intermediate value has a name, built from a config.

    Absent heads are None: `mlm_head` with `unembed`, `pooler`, `nsp_head`, `classifier`, `token_classifier`,
    `contact_head`. `hooked_lm.HookedEncoder` adds loading and saving of checkpoints.

    >>> import torch
    >>> from hooked_lm.models.encoder import Encoder
    >>> model = Encoder(
    ...     dict(n_layers=2, d_model=16, n_heads=2, n_ctx=32, d_vocab=10, act_fn="gelu")
    ... )
    >>> model(torch.tensor([[5, 3, 1]])).shape
    torch.Size([1, 3, 10])
    """

    config_class = HookedEncoderConfig
    stack = Stack(score_bias="rel_pos_bias")
    stacks = (stack,)

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, Any],
        tokenizer: Tokenizer | None = None,
        move_to_device: bool = True,
        default_padding_side: str | None = None,
    ) -> None:
        super().__init__()
        self._set_config(HookedEncoderConfig.unwrap(cfg), tokenizer, default_padding_side)
        with self._initial_device(move_to_device):
            tree = self.tree
            self.hook_tokens = HookPoint("batch", "pos", on_demand=True)
            self.global_tokens = None if tree.global_tokens is None else tree.global_tokens.build()
            self.embed = tree.embed.build()
            self.hook_full_embed = HookPoint("batch", "pos", "d_model")
            self.rel_embed = None if tree.rel_embed is None else tree.rel_embed.build()
            self.rotary = None if tree.rotary is None else tree.rotary.build()
            self.stack.build_blocks(self, tree.blocks, tree.ln_final, tree.rel_pos_bias)
            self._make_heads(tree)
        self._finish()

    def _make_heads(self, tree: EncoderConfig) -> None:
        self.mlm_head = None if tree.mlm_head is None else tree.mlm_head.build()
        self.unembed = None if tree.unembed is None else tree.unembed.build(self.embed.embed)
        if isinstance(self.unembed, TiedUnembed):
            self.unembed.tied_to = "embed.embed.W_E"
        if self.unembed is not None and self.unembed.cfg.d_model != tree.embed.d_model:
            self.unembed.hook_in = HookPoint("batch", "pos", "d_out", on_demand=True)
        self.pooler = None if tree.pooler is None else tree.pooler.build()
        self.nsp_head = None if tree.nsp_head is None else tree.nsp_head.build()
        self.classifier = None if tree.classifier is None else tree.classifier.build()
        self.token_classifier = None if tree.token_classifier is None else tree.token_classifier.build()
        self.contact_head = None if tree.contact_head is None else tree.contact_head.build()

    # ---- forward -----------------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Text | Ids,
        return_type: str | None = "output",
        token_type_ids: Types | None = None,
        one_zero_attention_mask: Mask | None = None,
        *,
        attention_mask: Mask | None = None,
        global_attention_mask: GlobalMask | None = None,
        **extra_ids: ExtraIds,
    ) -> Any:
        """Runs the model on text or token ids [batch, pos] or [pos].

        Args:
            input: a text, a pair of texts as a tuple, a list of these, or ids. Ids without a mask are all real.
            return_type: "logits" of the main head: [batch, pos, d_vocab] for a masked language model, [batch, class] for a
                text classifier, [batch, pos, class] for a token classifier, else those of the next sentence head;
                "predictions", the same as words; "embeddings", the stream after the last norm [batch, pos, d_model];
                "pooled" [batch, d_model]; "nsp" [batch, 2], the logits of the next sentence head; None. The default,
                "output", means logits, or embeddings if no head has logits.
            token_type_ids: 0 for tokens of the first text and 1 for those of the second, [batch, pos]; all 0 for ids by default.
            one_zero_attention_mask, attention_mask: synonyms: 1 for real tokens, 0 for padding.
            global_attention_mask: 1 for tokens of global attention among those within windows, [batch, pos]; by default that of
                the head in transformers. Hooks can set it in any run, at the site "global_tokens.hook_mask".
            extra_ids: what tokens of some models have beside types, under the names of transformers, all 0 by default:
                `bbox` [batch, pos, 4] in LayoutLM; `input_shape_ids` and `input_pronunciation_ids` in RoCBert;
                `task_type_ids` in ERNIE. The types of TAPAS have several kinds, [batch, pos, kind].

        Raises ValueError for an input that is empty or longer than n_ctx, for ids out of range, and for a return type
        whose head is absent.
        """
        return_type = self.main_return_type if return_type == "output" else return_type
        check_return_type(self, return_type)
        if one_zero_attention_mask is not None and attention_mask is not None:
            raise ValueError("one_zero_attention_mask and attention_mask are synonyms: give one of them")
        mask = one_zero_attention_mask if attention_mask is None else attention_mask
        token_type_ids, extra_ids = self._by_kind(token_type_ids, extra_ids)
        tokens, types, mask = self._inputs(input, token_type_ids, mask)
        stream, context = self._encoded(tokens, types, mask, extra_ids, global_attention_mask)
        return self._returned(stream, context.real, tokens, return_type)

    def encoder_output(
        self,
        tokens: Ids,
        token_type_ids: Types | None = None,
        one_zero_attention_mask: Mask | None = None,
        **extra_ids: ExtraIds,
    ) -> Stream:
        """Returns the stream after the last norm, the input of the heads, [batch, pos, d_model]."""
        token_type_ids, extra_ids = self._by_kind(token_type_ids, extra_ids)
        return self._encoded(*self._inputs(tokens, token_type_ids, one_zero_attention_mask), extra_ids)[0]

    def _by_kind(self, types: Tensor | None, extra_ids: dict[str, Tensor]) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Token types and further ids; types of several kinds are further ids."""
        if types is None or all(ids.name != "token_type_ids" for ids in self.tree.embed.extra_ids):
            return types, extra_ids
        return None, {**extra_ids, "token_type_ids": types}

    def _encoded(
        self,
        tokens: Tensor,
        types: Tensor | None,
        mask: Tensor | None,
        extra_ids: dict[str, Tensor] | None = None,
        global_mask: Tensor | None = None,
    ) -> tuple[Stream, RelativeContext]:
        apply_config_flags(self)
        real, global_mask = self.stack.real(self, mask, tokens), checked_global_mask(self, global_mask, tokens)
        check_rows(real)
        context = RelativeContext(tokens.shape[0], tokens.shape[1], tokens.device, real)
        if extra_ids:
            context.extra_ids = checked_extra_ids(self.tree.embed.extra_ids, extra_ids, tokens)
        tokens = self.hook_tokens(tokens)
        if self.global_tokens is not None:
            context.global_tokens = self.global_tokens(tokens, global_mask, real)
        resid = self.hook_full_embed(self.embed(tokens, types, context))
        if self.rel_embed is not None:
            context.table = self.rel_embed()
            context.rows = self.rel_embed.rows(tokens.shape[1], tokens.device)
        if self.rotary is not None:
            self.rotary.put_into(context)
        return self.stack.normalized(self, self.stack.run(self, resid, context)), context

    def _inputs(
        self, input: Any, types: Tensor | None, mask: Tensor | None
    ) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"] | None, Tensor | None]:
        """Ids, token types and mask of any input; those given by the caller take precedence."""
        if isinstance(input, Tensor):
            tokens = self._ids(input)
            types = types if types is None or types.ndim == 2 else types[None]
        else:
            tokens, own_types, own_mask = self.to_tokens(input, False, truncate=False)
            mask = own_mask if mask is None else mask
            if types is None and self.tree.embed.n_types:
                types = own_types
        check_length(tokens, 0, self.cfg.longest_input)
        tokens = checked_ids(tokens, self.cfg.d_vocab).to(self.device)
        mask = mask if mask is None or mask.ndim == 2 else mask[None]
        return tokens, None if types is None else self._checked_types(types, tokens), mask

    def _checked_types(self, types: Tensor, tokens: Tensor) -> Tensor:
        n_types = self.tree.embed.n_types
        if types.shape != tokens.shape:
            raise ValueError(
                f"token_type_ids are {tuple(types.shape)}; expected {tuple(tokens.shape)}, the shape of the ids"
            )
        known = f"its {n_types} are 0 to {n_types - 1}" if n_types else "it has none: leave token_type_ids out"
        right = ((types >= 0) & (types < max(n_types, 1))).all()
        check(right, f"a type in token_type_ids is not of this model; {known}")
        return types.to(self.device, torch.long)

    def verify(self, tokens: Int[Tensor, "batch pos"] | None = None) -> Verification:
        """Checks the identities between this model's sites, on random tokens by default; see `verification.verify`."""
        tokens = drawn_tokens(self.cfg) if tokens is None else tokens
        masks = drawn_masks(self, tokens)
        return verify(self, (tokens,), lambda at, output: encoder_identities(self, at, output), **masks)

    @property
    def tree(self) -> EncoderConfig:
        """The component configs of the model."""
        assert self.cfg.tree is not None  # checked when it was built
        return self.cfg.tree
