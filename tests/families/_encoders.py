"""An encoder and that of transformers on the same input: everything that either of them gives.

The sites that an encoder must have are told here too, beside those of `_sites`.
"""

import copy
from typing import Any

import torch
from torch import Tensor

from hooked_lm.components.attention.disentangled import DisentangledAttention
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.encoder_embed import ConcatenatedEncoderEmbed, EncoderEmbed
from hooked_lm.components.embeddings.extra_embed import BoxEmbed
from hooked_lm.components.embeddings.extra_embed import sizes as sizes_of_kinds
from hooked_lm.components.heads import MLMHead, TwoLayerMLMHead
from hooked_lm.families._shared.deberta_like.conv import ConvPostNormBlock
from hooked_lm.families.encoders.convbert.mixed import MixedAttention
from hooked_lm.families.encoders.mobilebert.narrow import NarrowBlock, SeveralMLPsBlock
from hooked_lm.families.encoders.mobilebert.trigram import TrigramEmbed
from hooked_lm.families.encoders.squeezebert.grouped import GroupedAttention
from hooked_lm.families.encoders.xmod.adapter import AdapterPostNormBlock
from hooked_lm.models.config.tree import EncoderConfig
from tests.families._case import Case, reference
from tests.families._models import hooked
from tests.families._sites import KEY, QUERY, STREAM, Sites, below, norm, sites_of, sizes_of

# what transformers calls that which a return type gives
OUTPUTS = {
    "last_hidden_state": "embeddings",
    "pooler_output": "pooled",
    "logits": "logits",
    "prediction_logits": "logits",
    "seq_relationship_logits": "nsp",
    "sop_logits": "nsp",
}
Outputs = dict[str, Tensor]
FIRST_WORD = 4  # pad tokens have no position in some families, and are below
ESM_MASK = 32


def prompt(case: Case, batch: int = 3, length: int | None = None) -> Tensor:
    """Random token ids, no pad token among them; one row has a mask token as ESM knows it."""
    shape, cfg = (batch, length or case.n_prompt), hooked(case).cfg
    tokens = torch.randint(FIRST_WORD, cfg.d_vocab, shape, generator=torch.Generator().manual_seed(1))
    tokens[0, 1] = ESM_MASK
    return tokens


def types(case: Case, tokens: Tensor) -> dict[str, Tensor]:
    """Random token types, for a model that has several, what else its tokens have, and which have global attention."""
    embed, generator = hooked(case).tree.embed, torch.Generator().manual_seed(3)
    found = {}
    if embed.n_types > 1:
        found["token_type_ids"] = torch.randint(embed.n_types, tokens.shape, generator=generator)
    for ids in embed.extra_ids:  # 0 may be the id of padding, whose embedding has no gradient in transformers
        drawn = [torch.randint(1, n, tokens.shape, generator=generator) for n in sizes_of_kinds(ids)]
        found[ids.name] = torch.stack(drawn, -1).view(*tokens.shape, *ids.per_token)
        if isinstance(ids, BoxEmbed.Config):
            first, last = found[ids.name].chunk(2, -1)
            found[ids.name] = torch.cat([torch.minimum(first, last), torch.maximum(first, last)], -1)
    return found | global_mask(case, tokens)


def global_mask(case: Case, tokens: Tensor) -> dict[str, Tensor]:
    """Tokens of global attention, other ones in each row, for a model that can have them."""
    if hooked(case).global_tokens is None:
        return {}
    chosen = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(6)) < 0.25
    chosen[-1, 1:] = False
    return {"global_attention_mask": chosen.long()}


def of_transformers(model: Any, tokens: Tensor, **inputs: Tensor) -> Outputs:
    """What transformers gives, by our return types."""
    found = model(tokens, **inputs)
    outputs = {name: found[key] for key, name in OUTPUTS.items() if found.get(key) is not None}
    if "start_logits" in found:
        outputs["logits"] = torch.stack([found.start_logits, found.end_logits], -1)
    return outputs


def ours(model: Any, tokens: Tensor, like: Outputs, **inputs: Tensor) -> Outputs:
    """The same of our model."""
    return {name: model(tokens, return_type=name, **inputs) for name in like}


def theirs(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    return copy.deepcopy(reference(case)).to(dtype)


# ---- sites -----------------------------------------------------------------------------------------------------------


@sites_of.register
def _(cfg: EncoderEmbed.Config) -> Sites:
    words = STREAM if cfg.d_embed == cfg.d_model else "batch pos d_embed"
    names = {"hook_embed": cfg.embed, "hook_token_type_embed": cfg.token_type_embed, "hook_pos_embed": cfg.pos_embed}
    names |= {"hook_extra_embed": cfg.extra}
    sites = {name: words for name, part in names.items() if part is not None}
    sites |= {"hook_concat": "batch pos d_concat"} if isinstance(cfg, ConcatenatedEncoderEmbed.Config) else {}
    if isinstance(cfg.embed, TrigramEmbed.Config):
        sites["embed.hook_narrow_embed"] = "batch pos d_embed"
    return sites | below("ln", norm(cfg.norm, words))


@sites_of.register
def _(cfg: MLMHead.Config) -> Sites:
    words = STREAM if cfg.d_out == cfg.d_model else "batch pos d_out"
    return {"hook_pre": words, "hook_post": words} | below("ln", norm(cfg.norm, words))


@sites_of.register
def _(cfg: TwoLayerMLMHead.Config) -> Sites:
    inner = dict.fromkeys(("inner.hook_pre", "inner.hook_post"), "batch pos d_inner")
    return inner | sites_of.dispatch(MLMHead.Config)(cfg)


@sites_of.register
def _(cfg: DisentangledAttention.Config) -> Sites:
    sites = {"hook_q": QUERY, "hook_k": KEY, "hook_v": KEY, "hook_z": QUERY, "hook_result": "batch pos head d_model"}
    maps = ["hook_attn_scores", "hook_pattern", *["hook_c2p"] * cfg.c2p, *["hook_p2c"] * cfg.p2c]
    return sites | dict.fromkeys(maps, "batch head query_pos key_pos")


@sites_of.register
def _(cfg: MixedAttention.Config) -> Sites:
    heads = {"hook_k": KEY, "hook_v": KEY, "hook_z": QUERY, "hook_result": "batch pos head d_model"}
    maps = dict.fromkeys(("hook_attn_scores", "hook_pattern"), "batch head query_pos key_pos")
    kernels = dict.fromkeys(("hook_kernel_scores", "hook_kernel"), "batch pos head offset")
    return {"hook_q": QUERY} | heads | maps | below("conv", heads | kernels)


@sites_of.register
def _(cfg: GroupedAttention.Config) -> Sites:
    heads = {"hook_q": QUERY, "hook_k": KEY, "hook_v": KEY, "hook_z": QUERY, "hook_result": "batch pos head d_model"}
    return heads | dict.fromkeys(("hook_attn_scores", "hook_pattern"), "batch head query_pos key_pos")


@sites_of.register
def _(cfg: ConvPostNormBlock.Config) -> Sites:
    sites = sites_of.dispatch(PostNormBlock.Config)(cfg)
    sites |= dict.fromkeys(("hook_conv_pre", "hook_conv_out", "hook_resid_conv"), STREAM)
    return sites | below("ln3", norm(cfg.ln3))


@sites_of.register
def _(cfg: SeveralMLPsBlock.Config) -> Sites:
    sites = sites_of.dispatch(PostNormBlock.Config)(cfg)
    one = dict.fromkeys(("hook_mlp_out", "hook_resid_post", "hook_normalized_resid_post"), STREAM)
    one |= below("mlp", sites_of(cfg.mlp)) | below("ln", norm(cfg.ffn_norm))
    for i in range(cfg.n_ffn):
        sites |= below(f"ffn.{i}", one)
    return sites


@sites_of.register
def _(cfg: NarrowBlock.Config) -> Sites:
    wide = {"hook_resid_pre", *(f"hook_{name}" for name in ("attn_in", "q_input", "k_input", "v_input"))}
    several = sites_of.dispatch(SeveralMLPsBlock.Config)(cfg)
    sites = {name: words if name in wide else narrow(words) for name, words in several.items()}
    sites |= dict.fromkeys(("hook_narrow_out", "hook_resid_post", "hook_normalized_resid_post"), STREAM)
    sites |= dict.fromkeys(("hook_narrow_post", "hook_normalized_narrow_post"), narrow(STREAM)) | below(
        "ln3", norm(cfg.ln3)
    )
    one = {"hook_out": narrow(STREAM)} | below("ln", norm(cfg.bottleneck.norm, narrow(STREAM)))
    is_run = cfg.qk_bottleneck is not None and not cfg.attends_narrow
    return sites | below("bottleneck", one) | (below("qk_bottleneck", one) if is_run else {})


def narrow(words: str) -> str:
    return words.replace("d_model", "d_narrow")


@sites_of.register
def _(cfg: AdapterPostNormBlock.Config) -> Sites:
    sites = sites_of.dispatch(PostNormBlock.Config)(cfg)
    sites |= dict.fromkeys(("hook_resid_mlp", "hook_adapter_in", "hook_adapter_out"), STREAM)
    return sites | below("adapter_ln", norm(cfg.adapter_ln)) | below("adapter", sites_of(cfg.adapter))


@sites_of.register
def _(cfg: EncoderConfig) -> Sites:
    sites = {"hook_tokens": "batch pos", "hook_full_embed": STREAM}
    sites |= {} if cfg.global_tokens is None else {"global_tokens.hook_mask": "batch pos"}
    sites |= below("embed", sites_of(cfg.embed)) | below("ln_final", norm(cfg.ln_final))
    if cfg.rel_pos_bias is not None:
        sites |= {"rel_pos_bias.hook_bias": "batch head query_pos key_pos"}
    for layer, block in enumerate(cfg.blocks):
        sites |= below(f"blocks.{layer}", sites_of(block))
    if cfg.mlm_head is not None:
        sites |= below("mlm_head", sites_of(cfg.mlm_head))
    if cfg.unembed is not None:
        words = STREAM if cfg.unembed.d_model == cfg.embed.d_model else "batch pos d_out"
        sites |= {"unembed.hook_in": words, "unembed.hook_out": "batch pos d_vocab"}
    if cfg.pooler is not None:
        sites |= {"pooler.hook_pooler_out": "batch d_model"} | below(
            "pooler.ln", norm(cfg.pooler.norm, "batch d_model")
        )
    if cfg.nsp_head is not None:
        sites |= {"nsp_head.hook_nsp_out": "batch class"}
    if cfg.classifier is not None:
        sites |= {"classifier.hook_out": "batch class"}
    if cfg.token_classifier is not None:
        sites |= {"token_classifier.hook_out": "batch pos class"}
        if cfg.token_classifier.transform is not None:
            sites |= below("token_classifier.transform", sites_of(cfg.token_classifier.transform))
    return sites


@sizes_of.register(DisentangledAttention.Config)
@sizes_of.register(GroupedAttention.Config)
def _(cfg: Any) -> dict[str, int]:
    return {"head": cfg.n_heads, "kv_head": cfg.n_heads, "d_head": cfg.d_head}


@sizes_of.register
def _(cfg: MixedAttention.Config) -> dict[str, int]:
    return {"head": cfg.n_heads, "kv_head": cfg.n_heads, "d_head": cfg.d_head, "offset": cfg.n_offsets}


def sizes(tree: EncoderConfig, site: str, batch: int, pos: int) -> dict[str, int]:
    """How long each axis of a site is in a run of this size."""
    axes = {"batch": batch, "pos": pos, "query_pos": pos, "key_pos": pos, "1": 1, "d_embed": tree.embed.d_embed}
    axes |= {"d_model": tree.embed.d_model} | sizes_of(getattr(tree.blocks[0], "attn", None))
    if tree.unembed is not None:
        axes |= {"d_vocab": tree.unembed.d_vocab, "d_out": tree.unembed.d_model}
    axes["d_concat"] = getattr(tree.embed, "d_concat", 0)
    axes["d_inner"] = getattr(tree.mlm_head, "d_inner", 0)
    heads = (tree.nsp_head, tree.classifier, tree.token_classifier)
    part = site.split(".")[0]
    for name, head in zip(("nsp_head", "classifier", "token_classifier"), heads, strict=True):
        if part == name and head is not None:
            axes["class"] = head.n_classes
    if isinstance(tree.embed.embed, TrigramEmbed.Config):
        axes["d_embed"] = tree.embed.embed.d_embed
    if part == "blocks":
        block = tree.blocks[int(site.split(".")[1])]
        axes |= sizes_of(getattr(block, "attn", None)) | sizes_of(block.mlp)
        if isinstance(block, NarrowBlock.Config):
            axes["d_narrow"] = block.d_narrow
        if isinstance(block, AdapterPostNormBlock.Config):
            axes |= sizes_of(block.adapter) if ".adapter." in site else {}
    return axes
