"""From flat names to the tree of a decoder, and back."""

from math import isclose
from typing import Any

from hooked_lm.components.activations import XIELU, activation_name
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi
from hooked_lm.components.blocks.block import (
    AttentionOnlyBlock,
    AttentionPart,
    BlockConfig,
    MLPPart,
    ParallelBlock,
    PreNormBlock,
)
from hooked_lm.components.blocks.mixer import MixerPart
from hooked_lm.components.embed import Embed, PosEmbed, Unembed
from hooked_lm.components.mlp import MLP, GatedMLP, MLPConfig
from hooked_lm.components.moe import ClampedGatedMLP, MoE
from hooked_lm.components.norm import LayerNorm, NormConfig, RMSNorm
from hooked_lm.components.rotary import LinearScaling, Llama3Scaling, Rotary, Scaling, YarnScaling
from hooked_lm.components.router import SoftmaxRouter
from hooked_lm.models.config.tree import DecoderConfig


def check_sizes(c: Any, n_layers: int = 0) -> None:
    """Raises ValueError for flat names that mean nothing, or contradict each other; `n_layers` is the least number."""
    for name, least in {
        "n_layers": n_layers,
        "d_model": 1,
        "n_ctx": 1,
        "n_heads": 1,
        "d_head": 1,
        "d_vocab": 0,
    }.items():
        value = getattr(c, name)
        is_unset = value == -1 and name in ("n_heads", "d_head", "d_vocab")
        if not isinstance(value, int) or isinstance(value, bool) or (value < least and not is_unset):
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if c.attention_dir not in ("causal", "bidirectional"):
        raise ValueError(f"attention_dir must be one of ('causal', 'bidirectional'), got {c.attention_dir!r}")
    if (c.num_experts is None) != (c.experts_per_token is None):
        raise ValueError("num_experts and experts_per_token go together")
    types = c.attn_types
    if types is not None and (len(types) < c.n_layers or not {*types} <= {"local", "global"}):
        raise ValueError(f"attn_types must say 'local' or 'global' for each of {c.n_layers} layers, got {types}")
    stretched = [name for name in ("use_NTK_by_parts_rope", "use_yarn_rope") if getattr(c, name)]
    stretched += ["rotary_scaling_factor"] if c.rotary_scaling_factor != 1.0 else []
    if len(stretched) > 1:
        raise ValueError(f"{' and '.join(stretched)} exclude each other: positions are stretched in one way")


def build_tree(cfg: Any) -> DecoderConfig:
    """The tree that flat names describe."""
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
        embed=Embed.Config(cfg.d_vocab, cfg.d_model, norm=_norm(cfg) if cfg.post_embedding_ln else None),
        blocks=tuple(_block(cfg, layer) for layer in range(cfg.n_layers)),
        unembed=Unembed.Config(
            cfg.d_model,
            cfg.d_vocab_out,
            bias=True,
            soft_cap=_cap(cfg.output_logits_soft_cap),
            tied=cfg.tie_word_embeddings,
        ),
        pos_embed=PosEmbed.Config(cfg.n_ctx, cfg.d_model) if learned else None,
        ln_final=RMSNorm.Config(cfg.d_model, cfg.eps) if cfg.final_rms else _norm(cfg),
        shortformer=cfg.positional_embedding_type == "shortformer",
    )


def _block(cfg: Any, layer: int) -> BlockConfig:
    norm, post = _norm(cfg), _norm(cfg) if cfg.use_normalization_before_and_after else None
    attn = _attention(cfg, layer)
    if cfg.attn_only:
        return AttentionOnlyBlock.Config(attn=attn, ln1=norm, ln1_post=post)
    kind = ParallelBlock if cfg.parallel_attn_mlp else PreNormBlock
    return kind.Config(attn=attn, ln1=norm, ln1_post=post, mlp=_mlp(cfg), ln2=norm, ln2_post=post)


def _attention(cfg: Any, layer: int) -> Attention.Config:
    scale = (1 / cfg.attn_scale if cfg.use_attn_scale else 1.0) / (
        layer + 1 if cfg.scale_attn_by_inverse_layer_idx else 1
    )
    local = cfg.use_local_attn and (cfg.attn_types is None or cfg.attn_types[layer] == "local")
    if local and cfg.window_size is None:
        raise ValueError("use_local_attn needs window_size, the number of positions a query sees")
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


def _rotary(cfg: Any, local: bool) -> Rotary:
    """Local layers may have a base of their own, and are not stretched then, nor divided by a plain factor."""
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


def _mlp(cfg: Any) -> MLPConfig | MoE.Config:
    act_fn, d_mlp = XIELU.Config() if cfg.act_fn == "xielu" else cfg.act_fn or "", cfg.d_mlp or 4 * cfg.d_model
    if cfg.num_experts is not None:
        kind = GatedMLP if cfg.gated_mlp else MLP
        expert = kind.Config(cfg.d_model, d_mlp, act_fn, bias=False)
        return MoE.Config(expert, cfg.num_experts, cfg.experts_per_token, SoftmaxRouter(cfg.norm_topk_prob))
    if cfg.gated_mlp:
        return GatedMLP.Config(cfg.d_model, d_mlp, act_fn, bias=True)
    if act_fn == "solu_ln":
        return MLP.Config(cfg.d_model, d_mlp, "solu", mid_norm=_mid_norm(cfg, d_mlp))
    return MLP.Config(cfg.d_model, d_mlp, act_fn)


def _mid_norm(cfg: Any, d_mlp: int) -> NormConfig:
    """The norm of the neurons; it has weights where the norms of the stream are layer norms with weights."""
    has_weights = cfg.normalization_type == "LN"
    return LayerNorm.Config(d_mlp, cfg.eps, weight=has_weights, bias=has_weights)


def _norm(cfg: Any) -> NormConfig | None:
    match cfg.normalization_type:
        case None:
            return None
        case "LN" | "LNPre" as kind:
            return LayerNorm.Config(cfg.d_model, cfg.eps, weight=kind == "LN", bias=kind == "LN")
        case "RMS" | "RMSPre" as kind:
            return RMSNorm.Config(cfg.d_model, cfg.eps, weight=kind == "RMS")
        case other:
            raise ValueError(f"unknown normalization_type {other!r}: None, 'LN', 'LNPre', 'RMS' or 'RMSPre'")


def _cap(flat: float) -> float | None:
    return flat if flat > 0 else None


def flat_names(tree: DecoderConfig) -> dict[str, Any]:
    """What the flat names say of a tree: of its first block, where blocks differ."""
    flat: dict[str, Any] = {
        "n_layers": len(tree.blocks),
        "d_model": tree.embed.d_model,
        "n_ctx": tree.n_ctx,
        "d_vocab": tree.embed.d_vocab,
        "d_vocab_out": tree.unembed.d_vocab,
        "tie_word_embeddings": tree.unembed.tied,
        "output_logits_soft_cap": tree.unembed.soft_cap or -1.0,
        "final_rms": isinstance(tree.ln_final, RMSNorm.Config),
        "post_embedding_ln": tree.embed.norm is not None,
    }
    if not tree.blocks:
        return flat | {"normalization_type": norm_type(tree.ln_final), "positional_embedding_type": _positions(tree)}
    block = tree.blocks[0]
    flat |= {
        "normalization_type": norm_type(block.ln1),
        "eps": block.ln1.eps if block.ln1 else 1e-5,
        "use_normalization_before_and_after": block.ln1_post is not None,
        "parallel_attn_mlp": isinstance(block, ParallelBlock.Config),
    }
    return flat | _attention_names(tree) | _mlp_names(tree) | _mixer_names(tree)


def _attention_names(tree: DecoderConfig) -> dict[str, Any]:
    """What the flat names say of attention: of the first layer that has some. Without any, `n_heads` stays -1."""
    attns = [block.attn for block in tree.blocks if isinstance(block, AttentionPart.Config)]
    if not attns:
        return {"positional_embedding_type": _positions(tree)}
    attn, windows = attns[0], [attn.window for attn in attns]
    everywhere = len(attns) == len(tree.blocks)
    scales = [attn.d_head**-0.5 if attn.scale is None else attn.scale for attn in attns]
    rotary = next((attn.rotary for attn in attns if attn.rotary is not None), None)  # some layers may have none
    has_alibi = isinstance(attn.position_bias, Alibi)
    return {
        "d_head": attn.d_head,
        "n_heads": attn.n_heads,
        "n_key_value_heads": attn.n_key_value_heads if attn.n_kv != attn.n_heads else None,
        "attn_scale": 1 / scales[0],
        "use_attn_scale": scales[0] != 1.0 or attn.d_head == 1,
        "scale_attn_by_inverse_layer_idx": everywhere
        and len(scales) > 1
        and all(isclose(scale * (layer + 1), scales[0]) for layer, scale in enumerate(scales)),
        "attn_scores_soft_cap": attn.soft_cap or -1.0,
        "use_qk_norm": attn.qk_norm is not None,
        "use_attention_sinks": attn.sinks,
        "clip_qkv": attn.clip,
        "use_local_attn": any(windows),
        "window_size": next((window for window in windows if window), None),
        "attn_types": ["local" if w else "global" for w in windows] if any(windows) and everywhere else None,
        "attention_dir": "causal" if attn.causal else "bidirectional",
        "positional_embedding_type": "rotary" if rotary else "alibi" if has_alibi else _positions(tree),
        "rotary_dim": rotary.dim if rotary else None,
        "rotary_base": rotary.theta if rotary else 10000.0,
        "rotary_adjacent_pairs": rotary.adjacent_pairs if rotary else False,
    } | _stretching(attns)


def _stretching(attns: list[Any]) -> dict[str, Any]:
    """The flat names of how the rotary embedding of layers that see everything is stretched, and of the local base."""
    rotaries = {kind: [a.rotary for a in attns if a.rotary and bool(a.window) == kind] for kind in (True, False)}
    local, everywhere = ([*rotaries[kind], None][0] for kind in (True, False))
    flat: dict[str, Any] = {}
    if local is not None and everywhere is not None and local.theta != everywhere.theta:
        flat |= {"rotary_base": everywhere.theta, "rotary_base_local": local.theta}
    scaling = everywhere.scaling if everywhere is not None else None
    if isinstance(scaling, Llama3Scaling):
        flat |= {
            "use_NTK_by_parts_rope": True,
            "NTK_by_parts_factor": scaling.factor,
            "NTK_by_parts_low_freq_factor": scaling.low_freq_factor,
            "NTK_by_parts_high_freq_factor": scaling.high_freq_factor,
            "NTK_original_ctx_len": scaling.trained_n_ctx,
        }
    if isinstance(scaling, YarnScaling):
        flat |= {
            "use_yarn_rope": True,
            "yarn_factor": scaling.factor,
            "yarn_attention_factor": scaling.attention_factor,
            "yarn_beta_fast": scaling.beta_fast,
            "yarn_beta_slow": scaling.beta_slow,
            "yarn_original_max_position_embeddings": scaling.trained_n_ctx,
            "yarn_truncate": scaling.truncate,
            "yarn_global_attn_only": local is not None and local.scaling is None and local.theta == everywhere.theta,
        }
    if isinstance(scaling, LinearScaling):
        flat |= {"rotary_scaling_factor": scaling.factor}
    return flat


def _positions(tree: DecoderConfig) -> str:
    """The flat name of the kind of position embedding."""
    if isinstance(tree.pos_embed, PosEmbed.Config):
        return "shortformer" if tree.shortformer else "standard"
    return "none" if tree.pos_embed is None else "sinusoidal"


def _mlp_names(tree: DecoderConfig) -> dict[str, Any]:
    """What the flat names say of MLPs: of the first layer that has one."""
    mlps = [block.mlp for block in tree.blocks if isinstance(block, MLPPart.Config)]
    if not mlps:
        return {"attn_only": True}
    mixture = next((mlp for mlp in mlps if isinstance(mlp, MoE.Config)), None)
    mlp = mlps[0].expert if isinstance(mlps[0], MoE.Config) else mlps[0]
    mid_norm = isinstance(mlp, MLP.Config) and mlp.mid_norm is not None
    return {
        "attn_only": False,
        "d_mlp": mlp.d_mlp,
        "act_fn": activation_name(mlp.act_fn) + ("_ln" if mid_norm else ""),
        "gated_mlp": isinstance(mlp, (GatedMLP.Config, ClampedGatedMLP.Config)),
        "num_experts": None if mixture is None else mixture.n_experts,
        "experts_per_token": None if mixture is None else mixture.top_k,
        "norm_topk_prob": mixture is not None and getattr(mixture.router, "renormalize", False),
    }


def _mixer_names(tree: DecoderConfig) -> dict[str, Any]:
    """The count of weights, which no flat name tells of layers that have a mixer, or experts."""
    has_experts = any(isinstance(block, MLPPart.Config) and isinstance(block.mlp, MoE.Config) for block in tree.blocks)
    if not has_experts and not any(isinstance(block, MixerPart.Config) for block in tree.blocks):
        return {}
    return {"n_params": sum(_n_weights(block) for block in tree.blocks)}


def _n_weights(block: Any) -> int:
    """The entries of a block's matrices."""
    n = 0
    if isinstance(block, MixerPart.Config):
        n += block.mixer.n_weights
    if isinstance(block, AttentionPart.Config):
        n += 2 * block.attn.d_model * block.attn.d_head * (block.attn.n_heads + block.attn.n_kv)
    if isinstance(block, MLPPart.Config):
        n += _n_mlp_weights(block.mlp)
    return n


def _n_mlp_weights(mlp: MLPConfig | ClampedGatedMLP.Config | MoE.Config) -> int:
    if isinstance(mlp, MoE.Config):
        shared = 0 if mlp.shared is None else _n_mlp_weights(mlp.shared) + mlp.shared_gate * mlp.d_model
        return mlp.n_experts * (mlp.d_model + _n_mlp_weights(mlp.expert)) + shared
    return (2 if isinstance(mlp, MLP.Config) else 3) * mlp.d_model * mlp.d_mlp


def norm_type(cfg: NormConfig | None) -> str | None:
    """The flat name of a norm's kind."""
    if cfg is None:
        return None
    return ("LN" if isinstance(cfg, LayerNorm.Config) else "RMS") + ("" if cfg.weight else "Pre")
