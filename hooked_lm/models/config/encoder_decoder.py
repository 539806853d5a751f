"""What an encoder-decoder is made of: the tree of component configs, and its face in flat names."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from hooked_lm.components.activations import activation_name
from hooked_lm.components.attention.cross import CrossAttention
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import SharedBias
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.blocks.block import PostNormBlock, PreNormBlock
from hooked_lm.components.blocks.cross import CrossBlockConfig, PreNormCrossBlock
from hooked_lm.components.embed import Embed, PosEmbedConfig, Unembed
from hooked_lm.components.mlp import MLP, GatedMLP, MLPConfig
from hooked_lm.components.moe import ClampedGatedMLP, MoE
from hooked_lm.components.norm import NormConfig, RMSNorm
from hooked_lm.models.config.decoder import HookedTransformerConfig
from hooked_lm.models.config.flat import check_sizes, norm_type
from hooked_lm.models.config.settled import DERIVED, remembers

RELATIVE = ("relative_attention_num_buckets", "relative_attention_max_distance")
SideBlockConfig = PreNormBlock.Config | PostNormBlock.Config | CrossBlockConfig


@dataclass(frozen=True)
class StackConfig:
    """The layers of an encoder, or of a decoder beside one, and what stands before and after them.

    `ln_embed` normalises the sum of token and position embedding. `rel_pos_bias` is a bias on the scores that the layers
    share; layers with biases of their own have them in their attention.
    """

    blocks: tuple[SideBlockConfig, ...]
    pos_embed: PosEmbedConfig | None = None
    ln_embed: NormConfig | None = None
    rel_pos_bias: RelativeBias.Config | None = None
    ln_final: NormConfig | None = None


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """An encoder, a decoder whose layers read its output, and an unembedding.

    `n_ctx` is the longest input of either. Without a `decoder_embed` both sides share one token embedding. A tied
    unembedding is that of the decoder's. A `spare_embed` is one that the checkpoint holds and nobody reads.
    """

    n_ctx: int
    embed: Embed.Config
    encoder: StackConfig
    decoder: StackConfig
    unembed: Unembed.Config
    decoder_embed: Embed.Config | None = None
    spare_embed: Embed.Config | None = None

    @property
    def blocks(self) -> tuple[SideBlockConfig, ...]:
        """Those of the encoder, then those of the decoder."""
        return self.encoder.blocks + self.decoder.blocks


@remembers
@dataclass
class HookedEncoderDecoderConfig(HookedTransformerConfig):
    """An encoder-decoder in flat names; those that it shares with decoders speak of the encoder, as far as sides differ.

    Made by hand it describes a T5 (Raffel et al. 2019, arXiv:1910.10683) to build: `HookedEncoderDecoderConfig(n_layers=2,
    d_model=64, n_heads=4, n_ctx=128, d_vocab=1000, act_fn="relu")`. `decoder_start_token_id` is what a decoder's input
    begins with; in generated text `forced_bos_token_id` comes first, `suppress_tokens` never.
    """

    READ_AT_EVERY_RUN: ClassVar[frozenset[str]] = frozenset()

    n_decoder_layers: int = -1
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    pad_token_id: int | None = None
    forced_bos_token_id: int | None = None
    suppress_tokens: tuple[int, ...] = ()
    attention_dir: str = "bidirectional"  # of the encoder
    positional_embedding_type: str = "relative_positional_bias"
    normalization_type: str | None = "RMS"
    eps: float = 1e-6
    tie_word_embeddings: bool = True
    tree: EncoderDecoderConfig | None = field(default=None, repr=False)  # type: ignore[assignment]

    @staticmethod
    def build(c: Any) -> Any:
        """The encoder-decoder of flat names; None as long as the size of the vocabulary is unknown."""
        return build_tree(c) if c.d_vocab >= 0 else None

    @staticmethod
    def check(c: Any) -> None:
        """Raises ValueError for flat names that mean nothing."""
        check_sizes(c, n_layers=1)

    @staticmethod
    def names_of(tree: Any) -> dict[str, Any]:
        """What the flat names say of a tree."""
        return flat_names(tree)

    @classmethod
    def unwrap(cls, config: HookedTransformerConfig | dict[str, Any]) -> HookedTransformerConfig:
        """A config, or that of a dict; flat names with relative positions become those of an encoder-decoder."""
        if isinstance(config, dict):
            return cls.from_dict(config)
        if not isinstance(config, cls) and config.positional_embedding_type == "relative_positional_bias":
            left_out = {"tree", *(DERIVED.keys() - config.given().keys())}  # follows anew
            given = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in left_out}
            given["attention_dir"] = "bidirectional"
            return cls(**{name: value for name, value in given.items() if not (name in RELATIVE and value is None)})
        return config


def build_tree(cfg: Any) -> EncoderDecoderConfig:
    """The T5 that flat names describe."""
    if (cfg.positional_embedding_type, cfg.normalization_type) != ("relative_positional_bias", "RMS"):
        raise ValueError(
            "flat names build encoder-decoders with positional_embedding_type='relative_positional_bias' and "
            f"normalization_type='RMS', not {cfg.positional_embedding_type!r} and {cfg.normalization_type!r}; "
            "give a tree for others"
        )
    scale = 1 / cfg.attn_scale if cfg.use_attn_scale else 1.0
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


def flat_names(tree: EncoderDecoderConfig) -> dict[str, Any]:
    """What the flat names say of a tree: of the encoder's first layer, where sides or layers differ."""
    block, decoder_embed = tree.encoder.blocks[0], tree.decoder_embed or tree.embed
    attn, mlp = block.attn, next((b.mlp for b in tree.encoder.blocks if not isinstance(b.mlp, MoE.Config)), block.mlp)
    expert = mlp.expert if isinstance(mlp, MoE.Config) else mlp
    bias = tree.encoder.rel_pos_bias
    if bias is None and isinstance(attn, Attention.Config) and isinstance(attn.position_bias, RelativeBias.Config):
        bias = attn.position_bias
    relative = {
        "relative_attention_num_buckets": bias.n_buckets,
        "relative_attention_max_distance": bias.max_distance,
    } if bias else {}  # fmt: skip
    return relative | {
        "n_params": sum(n_weights(block) for block in tree.blocks),
        "n_layers": len(tree.encoder.blocks),
        "n_decoder_layers": len(tree.decoder.blocks),
        "d_model": tree.embed.d_model,
        "n_ctx": tree.n_ctx,
        "d_vocab": tree.embed.d_vocab,
        "d_vocab_out": tree.unembed.d_vocab,
        "tie_word_embeddings": tree.unembed.tied and decoder_embed.d_vocab == tree.unembed.d_vocab,
        "normalization_type": norm_type(block.ln1),
        "eps": block.ln1.eps if block.ln1 else 1e-5,
        "d_head": attn.d_head,
        "n_heads": attn.n_heads,
        "attn_scale": attn.d_head**0.5 if attn.scale is None else 1 / attn.scale,
        "use_attn_scale": attn.scale != 1.0 or attn.d_head == 1,
        "attention_dir": "bidirectional",
        "positional_embedding_type": "standard" if bias is None else "relative_positional_bias",
        "d_mlp": expert.d_mlp,
        "act_fn": activation_name(expert.act_fn),
        "gated_mlp": isinstance(expert, (GatedMLP.Config, ClampedGatedMLP.Config)),
    }


def n_weights(block: SideBlockConfig) -> int:
    """The entries of a block's matrices."""
    attn = 4 * block.attn.d_model * block.attn.d_head * block.attn.n_heads
    return attn * (2 if hasattr(block, "cross_attn") else 1) + _n_mlp_weights(block.mlp)


def _n_mlp_weights(mlp: MLPConfig | ClampedGatedMLP.Config | MoE.Config) -> int:
    if isinstance(mlp, MoE.Config):
        return mlp.n_experts * (mlp.d_model + _n_mlp_weights(mlp.expert))
    return (2 if isinstance(mlp, MLP.Config) else 3) * mlp.d_model * mlp.d_mlp
