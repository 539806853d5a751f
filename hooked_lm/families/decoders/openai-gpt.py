"""GPT (Radford et al. 2018, Improving Language Understanding by Generative Pre-Training): post-norm blocks."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.post_norm import PostNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.pos_embed import PosEmbed
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import gpt2
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "transformer."
IGNORED = ("*.attn.bias", "transformer.position_ids")
NO_EFFECT = ("n_ctx",)  # an old name of n_positions

# "gelu" means the tanh approximation
ACTIVATIONS = {"gelu": "gelu_new", "relu": "relu", "silu": "silu", "swish": "silu"}


def config(hf: HFConfig) -> DecoderConfig:
    if hf.afn not in ACTIVATIONS:
        raise ValueError(f"afn {hf.afn!r} is none of {', '.join(ACTIVATIONS)}")
    attn = Attention.Config(hf.n_embd, hf.n_head, hf.n_embd // hf.n_head, qkv_bias=True, out_bias=True)
    norm = LayerNorm.Config(hf.n_embd, hf.layer_norm_epsilon)
    mlp = MLP.Config(hf.n_embd, 4 * hf.n_embd, ACTIVATIONS[hf.afn])
    return DecoderConfig(
        n_ctx=hf.n_positions,
        embed=Embed.Config(hf.vocab_size, hf.n_embd),
        pos_embed=PosEmbed.Config(hf.n_positions, hf.n_embd),
        blocks=(PostNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm),) * hf.n_layer,
        unembed=Unembed.Config(hf.n_embd, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        Row("transformer.tokens_embed.weight", "embed.W_E"),
        Row("transformer.positions_embed.weight", "pos_embed.W_pos"),
        *gpt2.block_rows(),
        *classic.head("lm_head", tree, "transformer.tokens_embed.weight"),
    ]
