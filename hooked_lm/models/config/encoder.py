"""What an encoder is made of: the tree of component configs, and its face in flat names."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from hooked_lm.components.activations import activation_name
from hooked_lm.components.attention.disentangled import RelativeEmbed
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.relative_bias import RelativeBias
from hooked_lm.components.blocks.block import PostNormBlock
from hooked_lm.components.embed import Embed, PosEmbed, Unembed
from hooked_lm.components.encoder_embed import EncoderEmbed, TokenTypeEmbed
from hooked_lm.components.heads import Classifier, ContactHead, MLMHead, NSPHead, Pooler, TokenClassifier
from hooked_lm.components.mlp import MLP, GatedMLP
from hooked_lm.components.norm import LayerNorm, NormConfig
from hooked_lm.components.stored_rotary import StoredRotary
from hooked_lm.models.config.decoder import HookedTransformerConfig
from hooked_lm.models.config.flat import check_sizes, norm_type
from hooked_lm.models.config.settled import DERIVED, remembers


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder: embeddings, a tuple of blocks (they may differ), perhaps a final norm, and the heads that there are.

    `n_ctx` is the longest text. `rel_pos_bias` is a bias on the scores, `rel_embed` a table of relative positions, and
    `rotary` holds frequencies, that all layers share. `shares` names for each block the set of weights that it has: blocks
    of one set share them. `layout` says which it is where a family has several ways to name its weights.
    """

    n_ctx: int
    embed: EncoderEmbed.Config
    blocks: tuple[Any, ...]  # what builds them: the configs of any kinds of blocks
    ln_final: NormConfig | None = None
    rel_pos_bias: RelativeBias.Config | None = None
    rel_embed: RelativeEmbed.Config | None = None
    rotary: StoredRotary.Config | None = None
    shares: tuple[tuple[int, int], ...] | None = None
    mlm_head: MLMHead.Config | None = None
    unembed: Unembed.Config | None = None
    pooler: Pooler.Config | None = None
    nsp_head: NSPHead.Config | None = None
    classifier: Classifier.Config | None = None
    token_classifier: TokenClassifier.Config | None = None
    contact_head: ContactHead.Config | None = None
    layout: int = 0


@remembers
@dataclass
class HookedEncoderConfig(HookedTransformerConfig):
    """An encoder in flat names.

    Made by hand it describes a BERT (Devlin et al. 2018, arXiv:1810.04805) with both of its heads: `HookedEncoderConfig(
    n_layers=2, d_model=64, n_heads=4, n_ctx=128, d_vocab=1000, act_fn="gelu")`. `n_token_types` are those that tell the
    first text from the second; 0 leaves them out.
    """

    READ_AT_EVERY_RUN: ClassVar[frozenset[str]] = frozenset()

    n_token_types: int = 2
    attention_dir: str = "bidirectional"
    eps: float = 1e-12
    tie_word_embeddings: bool = True
    tree: EncoderConfig | None = field(default=None, repr=False)  # type: ignore[assignment]

    @staticmethod
    def build(c: Any) -> Any:
        """The encoder of flat names; None as long as the size of the vocabulary is unknown."""
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
    def unwrap(cls, config: HookedTransformerConfig | dict[str, Any]) -> "HookedEncoderConfig":
        """A config, or that of a dict, or what a decoder's flat names say of an encoder."""
        if isinstance(config, HookedTransformerConfig) and not isinstance(config, cls):
            left_out = {"tree", *(DERIVED.keys() - config.given().keys())}  # follows anew
            given = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in left_out}
            return cls(**given | {"attention_dir": "bidirectional"})
        return cls.from_dict(config) if isinstance(config, dict) else config  # type: ignore[return-value]


def build_tree(cfg: Any) -> EncoderConfig:
    """The BERT that flat names describe."""
    kind = (cfg.positional_embedding_type, cfg.normalization_type, cfg.attention_dir)
    if kind != ("standard", "LN", "bidirectional") or cfg.attn_only or cfg.gated_mlp or cfg.parallel_attn_mlp:
        raise ValueError(
            "flat names build encoders like BERT: positional_embedding_type='standard', normalization_type='LN', "
            f"attention_dir='bidirectional' and plain MLPs, not {kind}; give a tree for others"
        )
    norm, act_fn = LayerNorm.Config(cfg.d_model, cfg.eps), cfg.act_fn or "gelu"
    attn = Attention.Config(
        cfg.d_model,
        cfg.n_heads,
        cfg.d_head,
        scale=1 / cfg.attn_scale if cfg.use_attn_scale else 1.0,
        qkv_bias=True,
        out_bias=True,
        causal=False,
    )
    mlp = MLP.Config(cfg.d_model, cfg.d_mlp or 4 * cfg.d_model, act_fn)
    types = TokenTypeEmbed.Config(cfg.n_token_types, cfg.d_model) if cfg.n_token_types else None
    return EncoderConfig(
        n_ctx=cfg.n_ctx,
        embed=EncoderEmbed.Config(
            Embed.Config(cfg.d_vocab, cfg.d_model), PosEmbed.Config(cfg.n_ctx, cfg.d_model), types, norm
        ),
        blocks=(PostNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * cfg.n_layers,
        mlm_head=MLMHead.Config(cfg.d_model, cfg.d_model, act_fn, norm),
        unembed=Unembed.Config(cfg.d_model, cfg.d_vocab, bias=True, tied=cfg.tie_word_embeddings),
        pooler=Pooler.Config(cfg.d_model),
        nsp_head=NSPHead.Config(cfg.d_model),
    )


def flat_names(tree: EncoderConfig) -> dict[str, Any]:
    """What the flat names say of a tree; the first block speaks for all."""
    block = tree.blocks[0]
    attn, mlp = block.attn, block.mlp
    windows = [block.attn.window for block in tree.blocks]
    sets = tree.shares or [(layer,) for layer in range(len(tree.blocks))]
    own = dict(zip(reversed(sets), reversed(tree.blocks), strict=True))  # blocks of one set share weights
    return {
        "n_params": sum(n_weights(block) for block in own.values()),
        "n_layers": len(tree.blocks),
        "d_model": tree.embed.d_model,
        "n_ctx": tree.n_ctx,
        "n_token_types": tree.embed.n_types,
        "d_vocab": tree.embed.d_vocab,
        "d_vocab_out": tree.embed.d_vocab if tree.unembed is None else tree.unembed.d_vocab,
        "tie_word_embeddings": tree.unembed is not None and tree.unembed.tied,
        "normalization_type": norm_type(block.ln2),
        "eps": block.ln2.eps if block.ln2 else 1e-12,
        "d_head": attn.d_head,
        "n_heads": attn.n_heads,
        "attn_scale": attn.d_head**0.5 if attn.scale is None else 1 / attn.scale,
        "use_attn_scale": attn.scale != 1.0 or attn.d_head == 1,
        "attention_dir": "bidirectional",
        "use_local_attn": any(windows),
        "window_size": next((window for window in windows if window), None),
        "attn_types": ["local" if window else "global" for window in windows] if any(windows) else None,
        "rotary_dim": attn.rotary.dim if attn.rotary else None,
        "rotary_base": attn.rotary.theta if attn.rotary else 10000.0,
        "positional_embedding_type": _positions(tree),
        "d_mlp": mlp.d_mlp,
        "act_fn": activation_name(mlp.act_fn),
        "gated_mlp": isinstance(mlp, GatedMLP.Config),
    }


def _positions(tree: EncoderConfig) -> str:
    """The flat name of the kind of position embedding."""
    if tree.rel_pos_bias is not None or tree.rel_embed is not None:
        return "relative_positional_bias"
    if tree.blocks[0].attn.rotary is not None:
        return "rotary"
    return "none" if tree.embed.pos_embed is None else "standard"


def n_weights(block: Any) -> int:
    """The entries of a block's matrices."""
    attn, mlp = block.attn, block.mlp
    n_attn = 2 * attn.d_model * attn.d_head * (attn.n_heads + attn.n_kv)
    return n_attn + (3 if isinstance(mlp, GatedMLP.Config) else 2) * mlp.d_model * mlp.d_mlp
