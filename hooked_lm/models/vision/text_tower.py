"""A text tower: tokens in, one vector for each text out."""

from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from hooked_lm.components.context import Context
from hooked_lm.components.readable import is_readable
from hooked_lm.hooks import HookPoint
from hooked_lm.models.checks import check_length, check_rows
from hooked_lm.models.config.tree import TextTowerConfig
from hooked_lm.models.loss import from_the_end
from hooked_lm.models.stack import Stack, checked_ids

Ids = Int[Tensor, "batch pos"]
Mask = Int[Tensor, "batch pos"] | Bool[Tensor, "batch pos"]


class TextContext(Context):
    """Positions and masks of one run over texts. Padding attends to real tokens alone, as it may be what a text is read at."""

    def changed_mask(
        self, allowed: Bool[Tensor, "batch 1 query_pos key_pos"], window: int | None
    ) -> Bool[Tensor, "batch 1 query_pos key_pos"]:
        if self.real is None:
            return allowed
        others = allowed & self.real[:, None, None, :]
        return torch.where(others.any(-1, keepdim=True), others, allowed)  # a first token has only itself


class TextTower(nn.Module):
    """The side of a dual encoder that reads texts: embeddings, blocks, a final norm, one position of it, a projection.

    Positions count all tokens, padding too.
    """

    stack = Stack()
    stacks: ClassVar[tuple[Stack, ...]] = (stack,)

    def __init__(self, tree: TextTowerConfig) -> None:
        super().__init__()
        self.tree = tree
        self.hook_tokens = HookPoint("batch", "pos", on_demand=True)
        self.embed = tree.embed.build()
        self.hook_embed = HookPoint("batch", "pos", "d_model")
        self.stack.build_positions(self, tree.pos_embed)
        self.stack.build_blocks(self, tree.blocks, tree.ln_final)
        self.pooler = tree.pooler.build()
        self.projection = tree.projection.build()

    def forward(self, tokens: Ids, attention_mask: Mask | None = None) -> Float[Tensor, "batch d_out"]:
        """The vectors of texts, before they are normalised."""
        check_length(tokens, 0, self.tree.n_ctx)
        real = self.stack.real(self, attention_mask, tokens)
        check_rows(real)
        check = checked_ids if is_readable(tokens) else from_the_end
        tokens = check(self.hook_tokens(tokens), self.tree.embed.d_vocab)
        unmasked = TextContext(tokens.shape[1], tokens.device)
        resid = self.stack.with_positions(self, self.hook_embed(self.embed(tokens)), tokens, unmasked)
        context = unmasked if real is None else TextContext(tokens.shape[1], tokens.device, real)
        normalized = self.stack.normalized(self, self.stack.run(self, resid, context))
        return self.projection(self.pooler(normalized, tokens))
