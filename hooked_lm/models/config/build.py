"""Builds config trees from flat names: decoders, BERT-like encoders, T5-like encoder-decoders."""

from dataclasses import replace
from types import SimpleNamespace

from hooked_lm.components.activations import XIELU
from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi, SharedBias
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.cross import PreNormCrossBlock
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock
from hooked_lm.components.blocks.parallel import ParallelBlock
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.encoder_embed import EncoderEmbed, TokenTypeEmbed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.embeddings.rotary import Rotary, Scaling
from hooked_lm.components.embeddings.rotary_scaling import LinearScaling, Llama3Scaling, YarnScaling
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.heads import Classifier, MLMHead, NSPHead, Pooler
from hooked_lm.components.mlp import MLP, GatedMLP, MLPConfig
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import NormConfig, RMSNorm
from hooked_lm.components.vision.heads import ClassToken
from hooked_lm.components.vision.patch_embed import ImagePosEmbed, PatchEmbed
from hooked_lm.components.vision.projector import MLPProjector
from hooked_lm.models.config.read import RELATIVE, Tree
from hooked_lm.models.config.row import DECODER, ENCODER, ENCODER_DECODER, VISION
from hooked_lm.models.config.tree import (
    DecoderConfig,
    EncoderConfig,
    EncoderDecoderConfig,
    SideBlockConfig,
    StackConfig,
    VisionConfig,
    VisionLanguageConfig,
)


def tree_of_kind(kind: str, c: SimpleNamespace, is_sketch: bool = False) -> Tree | None:
    """The tree of a kind of models with these flat names; None while names that it needs are missing.

    A sketch is a tree with the sizes of a model that flat names alone do not describe, for `edited`.
    """
    is_known = c.d_vocab >= 0
    if kind == DECODER:
        needs_act_fn = c.act_fn is None and not c.attn_only and c.n_layers > 0
        return decoder(c) if is_known and c.positional_embedding_type != RELATIVE and not needs_act_fn else None
    if kind == ENCODER:
        return encoder(c, is_sketch) if is_known else None
    if kind == ENCODER_DECODER:
        return encoder_decoder(c, is_sketch) if is_known else None
    if kind == VISION:
        return vision(c, is_sketch) if c.image_size is not None or is_sketch else None
    return None  # flat names do not describe two towers


def _check_together(c: SimpleNamespace) -> None:
    """Raises ValueError for flat names that contradict each other."""
    if (c.num_experts is None) != (c.experts_per_token is None):
        raise ValueError("num_experts and experts_per_token go together")
    types = c.attn_types
    if types is not None and (len(types) < c.n_layers or not {*types} <= {"local", "global"}):
        raise ValueError(f"attn_types must say 'local' or 'global' for each of {c.n_layers} layers, got {types}")
    stretched = [name for name in ("use_NTK_by_parts_rope", "use_yarn_rope") if getattr(c, name)]
    stretched += ["rotary_scaling_factor"] if c.rotary_scaling_factor != 1.0 else []
    if len(stretched) > 1:
        raise ValueError(f"{' and '.join(stretched)} exclude each other: positions are stretched in one way")


def decoder(cfg: SimpleNamespace) -> DecoderConfig:
    """The decoder tree for these flat names. Raises ValueError for invalid combinations."""
    _check_together(cfg)
    if cfg.n_heads == cfg.d_head == -1:
        raise ValueError("a model needs n_heads or d_head")
    dim = cfg.rotary_dim
    if dim is not None and (dim % 2 or not 0 < dim <= cfg.d_head):
        raise ValueError(f"rotary_dim must be even and at most d_head, {cfg.d_head}, got {dim}")
    kinds = ("standard", "rotary", "shortformer", "alibi", "none")
    if cfg.positional_embedding_type not in kinds:
        raise ValueError(
            f"positional_embedding_type '{cfg.positional_embedding_type}' cannot be built from flat names; {kinds} can"
        )
    learned = cfg.positional_embedding_type in ("standard", "shortformer")
    return DecoderConfig(
        n_ctx=cfg.n_ctx,
        embed=Embed.Config(
            cfg.d_vocab,
            cfg.d_model,
            norm=_norm(cfg, unfolded(cfg.normalization_type)) if cfg.post_embedding_ln else None,
        ),
        blocks=tuple(_block(cfg, layer) for layer in range(cfg.n_layers)),
        unembed=Unembed.Config(
            cfg.d_model,
            cfg.d_vocab_out,
            bias=True,
            soft_cap=_cap(cfg.output_logits_soft_cap),
            tied=cfg.tie_word_embeddings,
        ),
        pos_embed=PosEmbed.Config(cfg.n_ctx, cfg.d_model) if learned else None,
        ln_final=_final_norm(cfg),
        shortformer=cfg.positional_embedding_type == "shortformer",
    )


def encoder(cfg: SimpleNamespace, is_sketch: bool = False) -> EncoderConfig:
    """The tree of a BERT with these flat names. Raises ValueError for encoders of another kind.

    With `is_sketch` it is the BERT with the sizes of an encoder of any kind.
    """
    _check_together(cfg)
    _check_layers(cfg)
    kind = (cfg.positional_embedding_type, cfg.normalization_type, cfg.attention_dir)
    is_bert = kind == ("standard", "LN", "bidirectional") and not (
        cfg.attn_only or cfg.gated_mlp or cfg.parallel_attn_mlp
    )
    if not (is_sketch or is_bert):
        raise ValueError(
            "flat names build encoders like BERT: positional_embedding_type='standard', normalization_type='LN', "
            f"attention_dir='bidirectional' and plain MLPs, not {kind}; give a tree for others"
        )
    norm, act_fn = LayerNorm.Config(cfg.d_model, cfg.eps), cfg.act_fn or "gelu"
    mlp = MLP.Config(cfg.d_model, cfg.d_mlp or 4 * cfg.d_model, act_fn)
    types = TokenTypeEmbed.Config(cfg.n_token_types, cfg.d_model) if cfg.n_token_types else None
    return EncoderConfig(
        n_ctx=cfg.n_ctx,
        embed=EncoderEmbed.Config(
            Embed.Config(cfg.d_vocab, cfg.d_model), PosEmbed.Config(cfg.n_ctx, cfg.d_model), types, norm
        ),
        blocks=tuple(
            PostNormBlock.Config(attn=_attention(cfg, layer), ln1=norm, mlp=mlp, ln2=norm)
            for layer in range(cfg.n_layers)
        ),
        mlm_head=MLMHead.Config(cfg.d_model, cfg.d_model, act_fn, norm),
        unembed=Unembed.Config(cfg.d_model, cfg.d_vocab, bias=True, tied=cfg.tie_word_embeddings),
        pooler=Pooler.Config(cfg.d_model),
        nsp_head=NSPHead.Config(cfg.d_model),
    )


def vision(cfg: SimpleNamespace, is_sketch: bool = False) -> VisionConfig:
    """The tree of a ViT with these flat names. Raises ValueError for towers of another kind.

    With `is_sketch` it is the ViT with the sizes of a tower of any kind.
    """
    _check_together(cfg)
    kind = (cfg.positional_embedding_type, cfg.normalization_type, cfg.attention_dir)
    if not is_sketch and (kind != ("standard", "LN", "bidirectional") or cfg.gated_mlp):
        raise ValueError(
            "flat names build towers like ViT: positional_embedding_type='standard', normalization_type='LN', "
            f"attention_dir='bidirectional' and plain MLPs, not {kind}; give a tree for others"
        )
    norm, n_rows = LayerNorm.Config(cfg.d_model, cfg.eps), (cfg.image_size or cfg.patch_size) // cfg.patch_size
    if not n_rows or (cfg.image_size or 0) % cfg.patch_size:
        raise ValueError(
            f"image_size={cfg.image_size} is no multiple of patch_size={cfg.patch_size}: patches must fill an image"
        )
    attn = replace(_attention(cfg, 0), causal=False, window=None)
    mlp = MLP.Config(cfg.d_model, cfg.d_mlp or 4 * cfg.d_model, cfg.act_fn or "gelu")
    return VisionConfig(
        n_ctx=cfg.n_ctx,
        embed=PatchEmbed.Config(cfg.d_model, cfg.patch_size, cfg.n_channels, n_class_tokens=cfg.n_class_tokens),
        pos_embed=ImagePosEmbed.Config(n_rows, n_rows, cfg.d_model, cfg.n_class_tokens),
        blocks=(PreNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * cfg.n_layers,
        ln_final=norm,
        pooler=ClassToken.Config(cfg.d_model) if cfg.n_class_tokens else None,
        classifier=Classifier.Config(cfg.d_model, cfg.n_classes) if cfg.n_classes else None,
    )


def vision_language(cfg: SimpleNamespace, decoder: DecoderConfig, tower: VisionConfig) -> VisionLanguageConfig:
    """The tree of a LLaVA that reads the normalised output of a tower."""
    return VisionLanguageConfig(
        **vars(decoder),
        vision=tower,
        projector=MLPProjector.Config(tower.embed.d_model, cfg.d_model),
        image_token=cfg.image_token,
        text_type="",
        vision_type="",
    )


def encoder_decoder(cfg: SimpleNamespace, is_sketch: bool = False) -> EncoderDecoderConfig:
    """The tree of a T5 with these flat names. Raises ValueError for encoder-decoders of another kind.

    With `is_sketch` it is the T5 with the sizes of an encoder-decoder of any kind.
    """
    _check_together(cfg)
    _check_layers(cfg)
    if not is_sketch and (cfg.positional_embedding_type, cfg.normalization_type) != ("relative_positional_bias", "RMS"):
        raise ValueError(
            "flat names build encoder-decoders with positional_embedding_type='relative_positional_bias' and "
            f"normalization_type='RMS', not {cfg.positional_embedding_type!r} and {cfg.normalization_type!r}; "
            "give a tree for others"
        )
    scale = _scale(cfg)
    sizes = (cfg.d_model, cfg.n_heads, cfg.d_head)
    norm = RMSNorm.Config(cfg.d_model, cfg.eps)
    kind = GatedMLP if cfg.gated_mlp else MLP
    mlp = kind.Config(cfg.d_model, cfg.d_mlp or 4 * cfg.d_model, cfg.act_fn or "relu", bias=False)

    def attn(causal: bool) -> Attention.Config:
        return Attention.Config(*sizes, scale=scale, position_bias=SharedBias(), causal=causal)

    def stack(blocks: tuple[SideBlockConfig, ...], bidirectional: bool) -> StackConfig:
        buckets = (cfg.n_heads, cfg.relative_attention_num_buckets, cfg.relative_attention_max_distance)
        return StackConfig(blocks, rel_pos_bias=RelativeBias.Config(*buckets, bidirectional), ln_final=norm)

    cross = CrossAttention.Config(*sizes, scale=scale)
    encoder = PreNormBlock.Config(attn=attn(causal=False), ln1=norm, mlp=mlp, ln2=norm)
    decoder = PreNormCrossBlock.Config(attn=attn(causal=True), ln1=norm, cross_attn=cross, ln2=norm, mlp=mlp, ln3=norm)
    unembed_scale = cfg.d_model**-0.5 if cfg.tie_word_embeddings else 1.0
    return EncoderDecoderConfig(
        n_ctx=cfg.n_ctx,
        embed=Embed.Config(cfg.d_vocab, cfg.d_model),
        encoder=stack((encoder,) * cfg.n_layers, bidirectional=True),
        decoder=stack((decoder,) * cfg.n_decoder_layers, bidirectional=False),
        unembed=Unembed.Config(cfg.d_model, cfg.d_vocab, scale=unembed_scale, tied=cfg.tie_word_embeddings),
    )


# ---- parts -----------------------------------------------------------------------------------------------------------


def _block(cfg: SimpleNamespace, layer: int) -> AttentionOnlyBlock.Config | PreNormBlock.Config | ParallelBlock.Config:
    norm = _norm(cfg, cfg.normalization_type)
    post = _norm(cfg, unfolded(cfg.normalization_type)) if cfg.use_normalization_before_and_after else None
    attn = _attention(cfg, layer)
    if cfg.attn_only:
        return AttentionOnlyBlock.Config(attn=attn, ln1=norm, ln1_post=post)
    kind = ParallelBlock if cfg.parallel_attn_mlp else PreNormBlock
    return kind.Config(attn=attn, ln1=norm, ln1_post=post, mlp=_mlp(cfg), ln2=norm, ln2_post=post)


def _attention(cfg: SimpleNamespace, layer: int) -> Attention.Config:
    scale = _scale(cfg) / (layer + 1 if cfg.scale_attn_by_inverse_layer_idx else 1)
    local = cfg.use_local_attn and (cfg.attn_types is None or cfg.attn_types[layer] == "local")
    if local and cfg.window_size is None:
        raise ValueError("use_local_attn needs window_size, the number of positions that a query attends to")
    return Attention.Config(
        d_model=cfg.d_model,
        n_heads=cfg.n_heads,
        d_head=cfg.d_head,
        n_key_value_heads=cfg.n_key_value_heads,
        scale=scale,
        qkv_bias=True,
        out_bias=True,
        rotary=_rotary(cfg, local) if cfg.positional_embedding_type == "rotary" else None,
        position_bias=Alibi(cfg.n_heads) if cfg.positional_embedding_type == "alibi" else None,
        sinks=cfg.use_attention_sinks,
        clip=cfg.clip_qkv,
        qk_norm=RMSNorm.Config(cfg.d_head, cfg.eps) if cfg.use_qk_norm else None,
        window=cfg.window_size if local else None,
        soft_cap=_cap(cfg.attn_scores_soft_cap),
        causal=cfg.attention_dir == "causal",
    )


def _rotary(cfg: SimpleNamespace, local: bool) -> Rotary:
    """The rotary embedding of a layer. Local layers are not scaled if they have a separate base, nor by a linear factor."""
    dim = cfg.rotary_dim or cfg.d_head
    base = float(cfg.rotary_base if cfg.rotary_base_local is None or not local else cfg.rotary_base_local)
    scaling: Scaling | None = None
    if local and (cfg.rotary_base_local is not None or cfg.yarn_global_attn_only):
        pass
    elif cfg.use_NTK_by_parts_rope:
        parts = (cfg.NTK_by_parts_factor, cfg.NTK_by_parts_low_freq_factor, cfg.NTK_by_parts_high_freq_factor)
        scaling = Llama3Scaling(*parts, cfg.NTK_original_ctx_len)
    elif cfg.use_yarn_rope:
        trained, fast, slow = cfg.yarn_original_max_position_embeddings, cfg.yarn_beta_fast, cfg.yarn_beta_slow
        factor = cfg.yarn_attention_factor
        scaling = YarnScaling(cfg.yarn_factor, trained, fast, slow, factor, truncate=cfg.yarn_truncate)
    elif cfg.rotary_scaling_factor != 1.0 and not local:
        scaling = LinearScaling(cfg.rotary_scaling_factor)
    return Rotary(dim, base, cfg.rotary_adjacent_pairs, scaling)


def _mlp(cfg: SimpleNamespace) -> MLPConfig | MoE.Config:
    act_fn, d_mlp = XIELU.Config() if cfg.act_fn == "xielu" else cfg.act_fn or "", cfg.d_mlp or 4 * cfg.d_model
    if cfg.num_experts is not None:
        kind = GatedMLP if cfg.gated_mlp else MLP
        expert = kind.Config(cfg.d_model, d_mlp, act_fn, bias=False)
        return MoE.Config(expert, cfg.num_experts, cfg.experts_per_token, SoftmaxRouter(cfg.norm_topk_prob))
    mid_norm = None
    if act_fn == "solu_ln":
        act_fn, mid_norm = "solu", _mid_norm(cfg, d_mlp)
    kind = GatedMLP if cfg.gated_mlp else MLP
    return kind.Config(cfg.d_model, d_mlp, act_fn, bias=True, mid_norm=mid_norm)


def _mid_norm(cfg: SimpleNamespace, d_mlp: int) -> NormConfig:
    """The norm of the MLP activations; it has weights if the model's norms are layer norms with weights."""
    has_weights = cfg.normalization_type == "LN"
    return LayerNorm.Config(d_mlp, cfg.eps, weight=has_weights, bias=has_weights)


def unfolded(normalization_type: str | None) -> str | None:
    """The type of norms whose output no matrix reads: their weights cannot be folded, so a folded model has them, too."""
    return None if normalization_type is None else normalization_type.removesuffix("Pre")


def _norm(cfg: SimpleNamespace, normalization_type: str | None) -> NormConfig | None:
    match normalization_type:
        case None:
            return None
        case "LN" | "LNPre" as kind:
            return LayerNorm.Config(cfg.d_model, cfg.eps, weight=kind == "LN", bias=kind == "LN")
        case "RMS" | "RMSPre" as kind:
            return RMSNorm.Config(cfg.d_model, cfg.eps, weight=kind == "RMS")
        case other:
            raise ValueError(f"unknown normalization_type {other!r}: None, 'LN', 'LNPre', 'RMS' or 'RMSPre'")


def _final_norm(cfg: SimpleNamespace) -> NormConfig | None:
    has_weights = cfg.normalization_type not in ("LNPre", "RMSPre")
    return (
        RMSNorm.Config(cfg.d_model, cfg.eps, weight=has_weights)
        if cfg.final_rms
        else _norm(cfg, cfg.normalization_type)
    )


def _cap(flat: float) -> float | None:
    return flat if flat > 0 else None


def _check_layers(cfg: SimpleNamespace) -> None:
    if cfg.n_layers < 1:
        raise ValueError(f"n_layers must be a whole number of at least 1, got {cfg.n_layers!r}")


def _scale(cfg: SimpleNamespace) -> float:
    return float(1 / cfg.attn_scale) if cfg.use_attn_scale else 1.0
