"""What a decoder is made of. The tree of component configs is the truth; the flat config is the face users know."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from hooked_lm.components.activations import activation_name
from hooked_lm.components.attention import Attention
from hooked_lm.components.block import (
    AttentionOnlyBlock,
    AttentionPart,
    BlockConfig,
    MLPPart,
    ParallelBlock,
    PreNormBlock,
)
from hooked_lm.components.embed import Embed, PosEmbed, PosEmbedConfig, Unembed
from hooked_lm.components.mixer_block import MixerPart
from hooked_lm.components.mlp import MLP, GatedMLP, MLPConfig
from hooked_lm.components.moe import ClampedGatedMLP, MoE
from hooked_lm.components.norm import LayerNorm, NormConfig, RMSNorm
from hooked_lm.components.per_layer import PerLayerEmbed
from hooked_lm.components.position_bias import Alibi
from hooked_lm.components.rotary import Rotary


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder: embeddings, a tuple of blocks (they may differ), a final norm, an unembedding.

    `n_ctx` is the longest prompt. With `shortformer` the position embedding is added to the inputs of queries and keys
    instead of the stream (Press et al. 2020, arXiv:2012.15832). `per_layer` embeds the tokens for each layer besides.
    """

    n_ctx: int
    embed: Embed.Config
    blocks: tuple[Any, ...]  # what builds them: the configs of any kinds of blocks
    unembed: Unembed.Config
    pos_embed: PosEmbedConfig | None = None
    ln_final: NormConfig | None = None
    shortformer: bool = False
    per_layer: PerLayerEmbed.Config | None = None


@dataclass
class HookedTransformerConfig:
    """A decoder in flat names.

    Made by hand it describes a model to build: `HookedTransformerConfig(n_layers=2, d_model=64, n_heads=4, n_ctx=128,
    d_vocab=1000, act_fn="gelu")`. On a loaded model the same names answer for its tree, the first block speaking for
    all where blocks differ. The flags `use_attn_result`, `use_split_qkv_input`, `use_attn_in`, `use_hook_mlp_in` and
    `use_hook_tokens` say whether a cache without a filter holds those sites. `attn_scale` is what scores are divided
    by; a soft cap of -1 is none. Sizes that follow from others may be left out. Raises ValueError for sizes that
    contradict each other and for what this class cannot build.
    """

    n_layers: int
    d_model: int
    n_ctx: int
    d_head: int = -1
    model_name: str = "custom"
    n_heads: int = -1
    d_mlp: int | None = None
    act_fn: str | None = None
    d_vocab: int = -1
    eps: float = 1e-5
    use_attn_result: bool = False
    use_attn_scale: bool = True
    attn_scale: float = -1.0
    use_split_qkv_input: bool = False
    use_hook_mlp_in: bool = False
    use_attn_in: bool = False
    use_hook_tokens: bool = False
    ungroup_grouped_query_attention: bool = False
    use_local_attn: bool = False
    window_size: int | None = None
    attn_types: list[str] | None = None
    original_architecture: str | None = None
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None
    tokenizer_name: str | None = None
    tokenizer_prepends_bos: bool | None = None
    default_prepend_bos: bool = True
    default_padding_side: str = "right"
    init_mode: str = "gpt2"
    init_weights: bool = True
    initializer_range: float = -1.0
    seed: int | None = None
    normalization_type: str | None = "LN"
    final_rms: bool = False
    use_normalization_before_and_after: bool = False
    device: Any = None
    n_devices: int = 1
    dtype: Any = torch.float32
    attention_dir: str = "causal"
    attn_only: bool = False
    parallel_attn_mlp: bool = False
    gated_mlp: bool = False
    scale_attn_by_inverse_layer_idx: bool = False
    attn_scores_soft_cap: float = -1.0
    output_logits_soft_cap: float = -1.0
    use_qk_norm: bool = False
    positional_embedding_type: str = "standard"
    rotary_dim: int | None = None
    rotary_base: float = 10000.0
    rotary_adjacent_pairs: bool = False
    n_key_value_heads: int | None = None
    d_vocab_out: int = -1
    tie_word_embeddings: bool = False
    decoder_start_token_id: int | None = None
    n_params: int | None = None
    trust_remote_code: bool = False
    processed: tuple[str, ...] = ()  # the rewrites of weights that were done, in order
    tree: DecoderConfig | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str):
            name = self.dtype.removeprefix("torch.")
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise ValueError(f"unknown dtype {self.dtype!r}; one of torch's, such as 'float32' or 'bfloat16'")
            self.dtype = getattr(torch, name)
        self._check()
        if self.device is None:
            self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.tree is None:
            self._fill_sizes()
            if self.d_vocab > 0:
                self.tree = build_tree(self)
        if self.n_params is None:
            self.n_params = self.n_layers * self._params_per_layer()
        if self.initializer_range < 0:
            self.initializer_range = 0.8 / self.d_model**0.5

    def _check(self) -> None:
        """Raises ValueError for values that mean nothing."""
        for name, least in {"n_layers": 0, "d_model": 1, "n_ctx": 1}.items():
            if not isinstance(getattr(self, name), int) or getattr(self, name) < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {getattr(self, name)!r}")
        choices = {"attention_dir": ("causal", "bidirectional"), "default_padding_side": ("left", "right")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        types = self.attn_types
        if types is not None and (len(types) < self.n_layers or not {*types} <= {"local", "global"}):
            raise ValueError(f"attn_types must say 'local' or 'global' for each of {self.n_layers} layers, got {types}")

    def check_tree(self) -> None:
        """Raises ValueError if sizes were edited apart from the tree that a model is built from."""
        if self.tree is None:
            raise ValueError("d_vocab is missing: give it in the config, or give a tokenizer")
        flat = flat_names(self.tree) if self.tree.blocks else {}
        for name in ("n_layers", "d_model", "n_ctx", "n_heads", "d_head", "d_mlp", "d_vocab"):
            if name in flat and getattr(self, name) != flat[name]:
                raise ValueError(
                    f"cfg.{name} is {getattr(self, name)}, but the tree that models are built from has {flat[name]}; make "
                    f"a new config: dataclasses.replace(cfg, {name}={getattr(self, name)}, tree=None)"
                )

    def _fill_sizes(self) -> None:
        if self.n_heads == -1 and self.d_head == -1:
            raise ValueError("a model needs n_heads or d_head")
        if self.d_head == -1:
            self.d_head = self.d_model // self.n_heads
        if self.n_heads == -1:
            self.n_heads = self.d_model // self.d_head
        if self.d_mlp is None and not self.attn_only:
            self.d_mlp = 4 * self.d_model
        if self.act_fn is None and not self.attn_only:
            raise ValueError("a model with MLPs needs act_fn, e.g. 'gelu' or 'relu'")
        if self.d_vocab_out == -1:
            self.d_vocab_out = self.d_vocab
        if self.attn_scale == -1.0:
            self.attn_scale = self.d_head**0.5 if self.use_attn_scale else 1.0
        if self.positional_embedding_type == "rotary" and self.rotary_dim is None:
            self.rotary_dim = self.d_head
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.d_head):
            raise ValueError(f"rotary_dim must be even and at most d_head, {self.d_head}, got {self.rotary_dim}")

    def _params_per_layer(self) -> int:
        """Weights of a layer, without biases, norms and embeddings: the count that papers quote."""
        n_kv = self.n_key_value_heads or self.n_heads
        attention = 2 * self.d_model * self.d_head * (self.n_heads + n_kv)
        mlp = 0 if self.attn_only else (3 if self.gated_mlp else 2) * self.d_model * (self.d_mlp or 0)
        return attention + mlp

    @classmethod
    def from_tree(cls, tree: DecoderConfig, **flat: Any) -> "HookedTransformerConfig":
        """The face of a tree; `flat` adds what a tree does not say (names, device, dtype, defaults)."""
        return cls(**{**flat_names(tree), **flat}, tree=tree)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> "HookedTransformerConfig":
        """From flat names; raises TypeError for a name that is none of them."""
        known = {f.name for f in fields(cls)}
        if unknown := set(config_dict) - known:
            raise TypeError(f"unknown config fields {sorted(unknown)}; known are {sorted(known)}")
        return cls(**config_dict)

    @classmethod
    def unwrap(cls, config: "HookedTransformerConfig | dict[str, Any]") -> "HookedTransformerConfig":
        """A config, or the config of a dict."""
        return cls.from_dict(config) if isinstance(config, dict) else config

    def to_dict(self) -> dict[str, Any]:
        """The flat names and the tree; `from_dict` reads it back."""
        return dict(vars(self))


def build_tree(cfg: HookedTransformerConfig) -> DecoderConfig:
    """The tree that flat names describe."""
    if cfg.positional_embedding_type not in ("standard", "rotary", "shortformer"):
        raise ValueError(
            f"positional_embedding_type '{cfg.positional_embedding_type}' cannot be built from flat names; "
            "'standard', 'rotary' and 'shortformer' can"
        )
    rotary = cfg.positional_embedding_type == "rotary"
    return DecoderConfig(
        n_ctx=cfg.n_ctx,
        embed=Embed.Config(cfg.d_vocab, cfg.d_model),
        blocks=tuple(_block(cfg, layer) for layer in range(cfg.n_layers)),
        unembed=Unembed.Config(
            cfg.d_model,
            cfg.d_vocab_out,
            bias=True,
            soft_cap=_cap(cfg.output_logits_soft_cap),
            tied=cfg.tie_word_embeddings,
        ),
        pos_embed=None if rotary else PosEmbed.Config(cfg.n_ctx, cfg.d_model),
        ln_final=RMSNorm.Config(cfg.d_model, cfg.eps) if cfg.final_rms else _norm(cfg),
        shortformer=cfg.positional_embedding_type == "shortformer",
    )


def _block(cfg: HookedTransformerConfig, layer: int) -> BlockConfig:
    norm, post = _norm(cfg), _norm(cfg) if cfg.use_normalization_before_and_after else None
    attn = _attention(cfg, layer)
    if cfg.attn_only:
        return AttentionOnlyBlock.Config(attn=attn, ln1=norm, ln1_post=post)
    kind = ParallelBlock if cfg.parallel_attn_mlp else PreNormBlock
    return kind.Config(attn=attn, ln1=norm, ln1_post=post, mlp=_mlp(cfg), ln2=norm, ln2_post=post)


def _attention(cfg: HookedTransformerConfig, layer: int) -> Attention.Config:
    scale = 1 / cfg.attn_scale / (layer + 1 if cfg.scale_attn_by_inverse_layer_idx else 1)
    local = cfg.use_local_attn and (cfg.attn_types is None or cfg.attn_types[layer] == "local")
    if local and cfg.window_size is None:
        raise ValueError("use_local_attn needs window_size, the number of positions a query sees")
    rotary = None
    if cfg.positional_embedding_type == "rotary":
        rotary = Rotary(cfg.rotary_dim or cfg.d_head, float(cfg.rotary_base), cfg.rotary_adjacent_pairs)
    return Attention.Config(
        d_model=cfg.d_model,
        n_heads=cfg.n_heads,
        d_head=cfg.d_head,
        n_key_value_heads=cfg.n_key_value_heads,
        scale=scale,
        qkv_bias=True,
        out_bias=True,
        rotary=rotary,
        qk_norm=RMSNorm.Config(cfg.d_head, cfg.eps) if cfg.use_qk_norm else None,
        window=cfg.window_size if local else None,
        soft_cap=_cap(cfg.attn_scores_soft_cap),
        causal=cfg.attention_dir == "causal",
    )


def _mlp(cfg: HookedTransformerConfig) -> MLPConfig:
    act_fn, d_mlp = cfg.act_fn or "", cfg.d_mlp or 4 * cfg.d_model
    if cfg.gated_mlp:
        return GatedMLP.Config(cfg.d_model, d_mlp, act_fn, bias=True)
    if act_fn == "solu_ln":
        return MLP.Config(cfg.d_model, d_mlp, "solu", mid_norm=LayerNorm.Config(d_mlp, cfg.eps))
    return MLP.Config(cfg.d_model, d_mlp, act_fn)


def _norm(cfg: HookedTransformerConfig) -> NormConfig | None:
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
    """What the flat names say of a tree."""
    block = tree.blocks[0]
    flat = {
        "n_layers": len(tree.blocks),
        "d_model": tree.embed.d_model,
        "n_ctx": tree.n_ctx,
        "d_vocab": tree.embed.d_vocab,
        "d_vocab_out": tree.unembed.d_vocab,
        "tie_word_embeddings": tree.unembed.tied,
        "output_logits_soft_cap": tree.unembed.soft_cap or -1.0,
        "normalization_type": norm_type(block.ln1),
        "final_rms": isinstance(tree.ln_final, RMSNorm.Config),
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
    rotary = next((attn.rotary for attn in attns if attn.rotary is not None), None)  # some layers may have none
    has_alibi = isinstance(attn.position_bias, Alibi)
    return {
        "d_head": attn.d_head,
        "n_heads": attn.n_heads,
        "n_key_value_heads": attn.n_key_value_heads if attn.n_kv != attn.n_heads else None,
        "attn_scale": attn.d_head**0.5 if attn.scale is None else 1 / attn.scale,
        "attn_scores_soft_cap": attn.soft_cap or -1.0,
        "use_qk_norm": attn.qk_norm is not None,
        "use_local_attn": any(windows),
        "window_size": next((window for window in windows if window), None),
        "attn_types": ["local" if w else "global" for w in windows] if any(windows) and everywhere else None,
        "attention_dir": "causal" if attn.causal else "bidirectional",
        "positional_embedding_type": "rotary" if rotary else "alibi" if has_alibi else _positions(tree),
        "rotary_dim": rotary.dim if rotary else None,
        "rotary_base": rotary.theta if rotary else 10000.0,
        "rotary_adjacent_pairs": rotary.adjacent_pairs if rotary else False,
    }


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
    mlp = mlps[0].expert if isinstance(mlps[0], MoE.Config) else mlps[0]
    mid_norm = isinstance(mlp, MLP.Config) and mlp.mid_norm is not None
    return {
        "attn_only": False,
        "d_mlp": mlp.d_mlp,
        "act_fn": activation_name(mlp.act_fn) + ("_ln" if mid_norm else ""),
        "gated_mlp": isinstance(mlp, (GatedMLP.Config, ClampedGatedMLP.Config)),
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
