"""What an encoder is made of: the tree of component configs, and its face in flat names."""

from dataclasses import dataclass, field
from typing import Any

from hooked_lm.components.attention import Attention
from hooked_lm.components.block import PostNormBlock, PreNormBlock
from hooked_lm.components.embed import Embed, PosEmbed, Unembed
from hooked_lm.components.encoder_embed import EncoderEmbed
from hooked_lm.components.heads import LinearHead, MLMHead, NSPHead, Pooler
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norm import LayerNorm, NormConfig
from hooked_lm.components.relative_bias import RelativeBias
from hooked_lm.models.config import DecoderConfig, HookedTransformerConfig
from hooked_lm.models.config import flat_names as decoder_names

EncoderBlockConfig = PreNormBlock.Config | PostNormBlock.Config


@dataclass(frozen=True)
class EncoderConfig:
    """An encoder: embeddings, blocks that see both ways, and the heads that a checkpoint has.

    `rel_pos_bias` is a bias on the scores that all blocks share. `shares` says of each block whose weights it has, where
    blocks share them; each has sites of its own. `mlm_head` and `unembed` belong together.
    """

    n_ctx: int
    embed: EncoderEmbed.Config
    blocks: tuple[EncoderBlockConfig, ...]
    ln_final: NormConfig | None = None
    rel_pos_bias: RelativeBias.Config | None = None
    shares: tuple[int, ...] | None = None
    mlm_head: MLMHead.Config | None = None
    unembed: Unembed.Config | None = None
    pooler: Pooler.Config | None = None
    nsp_head: NSPHead.Config | None = None
    classifier: LinearHead.Config | None = None


@dataclass
class HookedEncoderConfig(HookedTransformerConfig):
    """An encoder in flat names.

    Made by hand it describes a BERT (Devlin et al. 2018, arXiv:1810.04805) to build: `HookedEncoderConfig(n_layers=2,
    d_model=64, n_heads=4, n_ctx=128, d_vocab=1000, act_fn="gelu")`, with heads for masked tokens and next sentences, and
    with one for `n_labels` classes of texts if there are any.
    """

    n_types: int = 2
    n_labels: int = 0
    attention_dir: str = "bidirectional"
    eps: float = 1e-12
    tree: EncoderConfig | None = field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.tree is None:
            self._fill_sizes()
            if self.d_vocab < 1:
                raise ValueError("an encoder needs d_vocab")
            self.tree = build_tree(self)
        super().__post_init__()

    @classmethod
    def from_tree(cls, tree: EncoderConfig, **flat: Any) -> "HookedEncoderConfig":  # type: ignore[override]
        """The face of a tree; `flat` adds what a tree does not say (names, device, dtype, defaults)."""
        return cls(**{**flat_names(tree), **flat}, tree=tree)

    def check_tree(self) -> None:
        """Raises ValueError if sizes were edited apart from the tree that a model is built from."""
        assert self.tree is not None
        flat = flat_names(self.tree)
        for name in ("n_layers", "d_model", "n_ctx", "n_heads", "d_head", "d_mlp", "d_vocab"):
            if getattr(self, name) != flat[name]:
                raise ValueError(
                    f"cfg.{name} is {getattr(self, name)}, but the tree that models are built from has {flat[name]}; make "
                    f"a new config: dataclasses.replace(cfg, {name}={getattr(self, name)}, tree=None)"
                )


def build_tree(cfg: HookedEncoderConfig) -> EncoderConfig:
    """The BERT that flat names describe."""
    if (cfg.positional_embedding_type, cfg.normalization_type) != ("standard", "LN"):
        raise ValueError(
            "flat names build encoders with positional_embedding_type='standard' and normalization_type='LN', not "
            f"{cfg.positional_embedding_type!r} and {cfg.normalization_type!r}; give a tree for others"
        )
    norm, act_fn = LayerNorm.Config(cfg.d_model, cfg.eps), cfg.act_fn or "gelu"
    scale = 1 / cfg.attn_scale if cfg.use_attn_scale else 1.0
    attn = Attention.Config(
        cfg.d_model, cfg.n_heads, cfg.d_head, scale=scale, qkv_bias=True, out_bias=True, causal=False
    )
    mlp = MLP.Config(cfg.d_model, cfg.d_mlp or 4 * cfg.d_model, act_fn)
    return EncoderConfig(
        n_ctx=cfg.n_ctx,
        embed=EncoderEmbed.Config(
            Embed.Config(cfg.d_vocab, cfg.d_model), PosEmbed.Config(cfg.n_ctx, cfg.d_model), cfg.n_types, norm
        ),
        blocks=(PostNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * cfg.n_layers,
        mlm_head=MLMHead.Config(cfg.d_model, cfg.d_model, act_fn, norm),
        unembed=Unembed.Config(cfg.d_model, cfg.d_vocab_out, bias=True, tied=cfg.tie_word_embeddings),
        pooler=Pooler.Config(cfg.d_model),
        nsp_head=NSPHead.Config(cfg.d_model),
        classifier=LinearHead.Config(cfg.d_model, cfg.n_labels) if cfg.n_labels else None,
    )


def flat_names(tree: EncoderConfig) -> dict[str, Any]:
    """What the flat names say of a tree: those of a decoder with the same blocks, and those of encoders alone."""
    unembed = tree.unembed or Unembed.Config(tree.embed.d_out, tree.embed.embed.d_vocab)
    embed = Embed.Config(tree.embed.embed.d_vocab, tree.embed.d_out)
    like = DecoderConfig(tree.n_ctx, embed, tree.blocks, unembed, tree.embed.pos_embed, tree.ln_final)
    flat = decoder_names(like) | {
        "n_types": tree.embed.n_types or 0,
        "n_labels": tree.classifier.n_labels if tree.classifier else 0,
        "attention_dir": "bidirectional",
    }
    if tree.rel_pos_bias is not None:
        flat["positional_embedding_type"] = "relative_positional_bias"
    return flat
