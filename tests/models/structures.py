"""Small random decoders of every structure that a config tree can say."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from hooked_lm import HookedTransformer
from hooked_lm.components.activations import XIELU
from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.attention.position_bias import Alibi
from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.components.blocks.one_sublayer import AttentionOnlyBlock
from hooked_lm.components.blocks.parallel import ParallelBlock, SharedNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.mlp import MLP, GatedMLP, MLPConfig
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.components.norms.norm import NormConfig, RMSNorm
from hooked_lm.models.config.flat import HookedTransformerConfig
from hooked_lm.models.config.tree import DecoderConfig

D_MODEL, D_HEAD, D_MLP, D_VOCAB, N_CTX = 12, 4, 10, 20, 8

NORMS: dict[str, NormConfig | None] = {
    "LN": LayerNorm.Config(D_MODEL),
    "LN without bias": LayerNorm.Config(D_MODEL, bias=False),
    "LNPre": LayerNorm.Config(D_MODEL, weight=False, bias=False),
    "LN, offset 1": LayerNorm.Config(D_MODEL, offset=1.0),
    "RMS": RMSNorm.Config(D_MODEL),
    "RMS, offset 1": RMSNorm.Config(D_MODEL, offset=1.0),
    "RMSPre": RMSNorm.Config(D_MODEL, weight=False),
    "none": None,
}
MLPS: list[MLPConfig] = [
    MLP.Config(D_MODEL, D_MLP, "gelu"),
    MLP.Config(D_MODEL, D_MLP, "relu", bias=False),
    MLP.Config(D_MODEL, D_MLP, "solu", mid_norm=LayerNorm.Config(D_MLP)),
    GatedMLP.Config(D_MODEL, D_MLP, "silu"),
    GatedMLP.Config(D_MODEL, D_MLP, "gelu", bias=True),
    GatedMLP.Config(D_MODEL, D_MLP, "relu2", mid_norm=RMSNorm.Config(D_MLP)),
    MLP.Config(D_MODEL, D_MLP, XIELU.Config(), bias=False),
]
SEEDS = st.integers(0, 2**32)  # of trees: a strategy may not build configs, whose checks draw numbers
LAYER_NORMS = ("LN", "LN without bias", "LNPre", "LN, offset 1")
POSITIONS = ("learned", "rotary", "shortformer", "alibi", "none")
QK_NORMS: dict[str, Callable[[int], NormConfig | None]] = {  # of so many heads
    "none": lambda n: None,
    "RMS": lambda n: RMSNorm.Config(D_HEAD),
    "LN of each head": lambda n: LayerNorm.Config(D_HEAD, bias=False, n_heads=n),
    "RMS of all heads": lambda n: RMSNorm.Config(D_HEAD, n_heads=n, joint=True),
}


@dataclass(frozen=True)
class Kinds:
    """What is drawn from; the default is everything."""

    norms: tuple[str, ...] = tuple(NORMS)
    posts: tuple[str, ...] = ("none", "none", "LN", "RMS, offset 1")
    positions: tuple[str, ...] = POSITIONS
    qk_norms: tuple[str, ...] = ("none", *QK_NORMS)
    extras: tuple[str, ...] = ("none", "none", "none", "sinks", "clip", "z_norm", "v_norm", "rotary_first")
    blocks: tuple[type, ...] = (AttentionOnlyBlock, PreNormBlock, ParallelBlock, SharedNormBlock)
    soft_caps: tuple[float | None, ...] = (None, 5.0)


def random_tree(seed: int, kinds: Kinds = Kinds()) -> DecoderConfig:
    """Any tree of one or two blocks, which may differ."""
    pick = random.Random(seed).choice
    positions, norm = pick(kinds.positions), NORMS[pick(kinds.norms)]
    learned = positions in ("learned", "shortformer")
    return DecoderConfig(
        n_ctx=N_CTX,
        embed=Embed.Config(D_VOCAB, D_MODEL, scale=pick([1.0, 3.0])),
        blocks=tuple(random_block(pick, kinds, norm, positions) for _ in range(pick([1, 2]))),
        unembed=Unembed.Config(
            D_MODEL,
            D_VOCAB,
            bias=pick([True, False]),
            soft_cap=pick(kinds.soft_caps),
            scale=pick([1.0, 0.5]),
            tied=pick([True, False]),
        ),
        pos_embed=PosEmbed.Config(N_CTX, D_MODEL) if learned else None,
        ln_final=pick([norm, NORMS[pick(kinds.norms)]]),
        shortformer=positions == "shortformer",
    )


def random_block(pick: Callable[..., Any], kinds: Kinds, norm: NormConfig | None, positions: str) -> Any:
    n_heads, n_kv = pick([(2, 2), (4, 2), (3, 1)])
    qk_norm, extra = QK_NORMS[pick(kinds.qk_norms)], pick(kinds.extras)
    attn = Attention.Config(
        d_model=D_MODEL,
        n_heads=n_heads,
        d_head=D_HEAD,
        n_key_value_heads=n_kv,
        qkv_bias=pick([True, False]),
        out_bias=pick([True, False]),
        rotary=Rotary(D_HEAD) if positions == "rotary" else None,
        qk_norm=qk_norm(n_heads),
        k_norm=qk_norm(n_kv),
        rotary_first=extra == "rotary_first",
        z_norm=RMSNorm.Config(D_HEAD, n_heads=n_heads, joint=True) if extra == "z_norm" else None,
        v_norm=RMSNorm.Config(D_HEAD, weight=False) if extra == "v_norm" else None,
        clip=1.0 if extra == "clip" else None,
        sinks=extra == "sinks",
        position_bias=Alibi(n_heads) if positions == "alibi" else None,
        window=pick([None, 3]),
        soft_cap=pick(kinds.soft_caps),
    )
    posts, scale = [NORMS[pick(kinds.posts)] for _ in range(2)], pick([1.0, 0.5])
    kind = pick(kinds.blocks)
    if kind is AttentionOnlyBlock:
        return kind.Config(attn=attn, ln1=norm, ln1_post=posts[0], residual_scale=scale)
    return kind.Config(
        attn=attn,
        ln1=norm,
        ln1_post=posts[0],
        mlp=pick(MLPS),
        ln2=None if kind is SharedNormBlock else norm,
        ln2_post=posts[1],
        residual_scale=scale,
    )


def random_model(tree: DecoderConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> HookedTransformer:
    """A model of that structure in which no weight, gain or bias is zero or one."""
    model = HookedTransformer(HookedTransformerConfig.from_tree(tree, device="cpu", dtype=dtype, init_weights=False))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".w"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(std=0.3, generator=generator)
    return model


def random_tokens(batch: int = 2, n_pos: int = 6) -> torch.Tensor:
    return torch.randint(0, D_VOCAB, (batch, n_pos), generator=torch.Generator().manual_seed(1))
