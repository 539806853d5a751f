"""Stack: the blocks of one residual stream, with position embeddings, masks and final norm."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from hooked_lm.components.attention.position_bias import FirstSharedBias
from hooked_lm.components.blocks.wiring import wiring_of
from hooked_lm.components.context import Context
from hooked_lm.components.kv_cache import KeyValueCache
from hooked_lm.components.norms.norm import NormConfig, add_norm, norm_of
from hooked_lm.components.readable import is_on_host, is_readable
from hooked_lm.components.streams import MergedRMSNorm
from hooked_lm.hooks import HookPoint, is_listening
from hooked_lm.hooks.padding import note_mask
from hooked_lm.models.checks import check_cacheable, check_layers, check_mask, ids_on_device, real_of, unknown_id
from hooked_lm.models.loss import from_the_end
from hooked_lm.models.weights.init import check_filled

Stream = Float[Tensor, "batch pos d_model"]


@dataclass(frozen=True)
class Stack:
    """One stack of blocks of a model, as the attribute names of its parts.

    `ln_tokens` normalises the embeddings, position embeddings (`pos_embed`) are added, `ln_embed` normalises the sum, the
    `blocks` run, with a shared bias on their attention scores (`score_bias`), and `ln_final` normalises the result. All parts
    but the blocks may be absent. A decoder or an encoder has one stack, an encoder-decoder two.
    """

    blocks: str = "blocks"
    ln_final: str = "ln_final"
    pos_embed: str = "pos_embed"
    ln_embed: str | None = None
    score_bias: str | None = None
    ln_tokens: str | None = None
    label: str = ""  # prefix of head labels, as in "EL0H1"

    def build_positions(
        self, model: nn.Module, pos: Any, ln_embed: NormConfig | None = None, ln_tokens: NormConfig | None = None
    ) -> None:
        """Adds the position embedding and the norms of the embeddings to a model; None means absent."""
        if self.ln_tokens is not None:
            add_norm(model, self.ln_tokens, ln_tokens)
        if pos is not None:
            setattr(model, self.pos_embed, pos.build())
            setattr(model, f"hook_{self.pos_embed}", HookPoint("batch", "pos", "d_model"))
        if self.ln_embed is not None:
            add_norm(model, self.ln_embed, ln_embed)

    def build_blocks(
        self, model: nn.Module, blocks: Sequence[Any], ln_final: NormConfig | None, score_bias: Any = None
    ) -> None:
        """Adds the blocks, their shared bias and the final norm to a model."""
        if self.score_bias is not None:
            setattr(model, self.score_bias, None if score_bias is None else score_bias.build())
        setattr(model, self.blocks, nn.ModuleList(block.build(layer) for layer, block in enumerate(blocks)))
        FirstSharedBias.give(model._modules.get(self.score_bias or ""), self.blocks_of(model))  # type: ignore[arg-type]
        add_norm(model, self.ln_final, ln_final)

    def blocks_of(self, model: nn.Module) -> nn.ModuleList:
        """The blocks of this stack in a model."""
        return getattr(model, self.blocks)

    def site_after(self, model: nn.Module, layer: int) -> str:
        """The site of the stream after a block; after the last, of what the final norm normalises."""
        blocks = self.blocks_of(model)
        if layer == len(blocks) - 1 and isinstance(norm_of(model, self.ln_final), MergedRMSNorm):
            return f"{self.ln_final}.hook_in"
        return f"{self.blocks}.{layer}.{wiring_of(blocks[layer]).last}"

    def positions(self, model: nn.Module, embed: Stream, tokens: Tensor | None, context: Context) -> Stream | None:
        """The position embeddings of the tokens, after their hook point; None if the model adds none."""
        if self.pos_embed not in model._modules:
            return None
        tokens = embed.new_zeros(embed.shape[:2], dtype=torch.long) if tokens is None else tokens
        positions = getattr(model, self.pos_embed)(tokens, context.n_past, context.real).to(embed.dtype)
        point = getattr(model, f"hook_{self.pos_embed}")
        return point(positions.expand_as(embed).contiguous()) if is_listening(point) else positions

    def with_positions(self, model: nn.Module, embed: Stream, tokens: Tensor | None, context: Context) -> Stream:
        """The stream before the first block: embeddings plus positions, normalised if the model has norms there."""
        embed = embed if self.ln_tokens is None else norm_of(model, self.ln_tokens)(embed)
        positions = self.positions(model, embed, tokens, context)
        resid = embed if positions is None else embed + positions
        return resid if self.ln_embed is None else norm_of(model, self.ln_embed)(resid)

    def run(
        self, model: nn.Module, resid: Stream, context: Context, start: int | None = None, stop: int | None = None
    ) -> Float[Tensor, "batch pos width"]:
        """The stream after the blocks `start:stop`. The cache is unchanged if the run fails."""
        blocks, cache = self.blocks_of(model), context.cache
        if start is not None or stop is not None or cache is not None:
            check_layers(start, stop, len(blocks), cache)
        if self.score_bias is not None and (shared := getattr(model, self.score_bias)) is not None:
            context.score_bias = shared.bias(context, resid.dtype)  # type: ignore[attr-defined]
        with nullcontext() if cache is None else cache.appending(context.real):
            for block in list(blocks)[start:stop]:
                resid = block(resid, context)
        return resid

    def normalized(self, model: nn.Module, resid: Float[Tensor, "batch pos width"]) -> Stream:
        """The stream after the final norm."""
        return norm_of(model, self.ln_final)(resid)

    def real(
        self, model: nn.Module, mask: Tensor | None, new: Tensor, cache: KeyValueCache | None = None
    ) -> Bool[Tensor, "batch key_pos"] | None:
        """Which of the cached and new tokens are real; None if all are, so that fused attention needs no mask.

        `mask` covers the new tokens, or all. Raises ValueError for another shape, and for a cache of a bidirectional model.
        """
        (batch, n_pos), n_past = new.shape[:2], 0 if cache is None else cache.length
        if mask is not None:
            check_mask(mask, batch, n_pos, n_past)
        real = None if mask is None else real_of(mask)
        if cache is not None:
            check_cacheable(self.blocks_of(model))
            real = cache.full_mask(real, batch, n_pos)
        if real is None or (is_on_host(real) and bool(real.all())):
            return None
        if is_readable(real):
            note_mask(self.blocks, real[:, n_past:])
        return real.to(new.device)


def checked_ids(tokens: Tensor, d_vocab: int) -> Tensor:
    """Token ids with negative ones replaced: they count from the end of the vocabulary.

    Raises ValueError for the first id outside -d_vocab .. d_vocab - 1; ids on a GPU are checked there, see `ids_on_device`.
    Inside `torch.compile` nothing is checked, as that would break the graph.
    """
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise TypeError(f"token ids must be integers, got a tensor of {tokens.dtype}")
    if type(tokens) is not Tensor or not tokens.is_cpu or torch.compiler.is_compiling() or tokens.numel() == 0:
        return ids_on_device(tokens, d_vocab)
    low, high = torch.stack(tokens.aminmax()).tolist()
    if -d_vocab <= low and high < d_vocab:
        return from_the_end(tokens, d_vocab) if low < 0 else tokens
    raise unknown_id(tokens, d_vocab)


def apply_config_flags(model: Any) -> None:
    """Applies the flags of a model's config, if one changed since the last run. ValueError for weights that nobody filled."""
    cfg = model.cfg
    copies = cfg.use_attn_in, cfg.use_split_qkv_input, cfg.use_attn_result
    flags = (cfg.fused_attention, *copies, cfg.n_ctx, cfg.ungroup_grouped_query_attention)
    if flags != model.flags:
        model.unfilled = check_filled(model, model.unfilled)
        model.apply_flags()
        model.flags = flags
