"""GPT-J (Wang and Komatsuzaki 2021, GPT-J-6B): attention and MLP in parallel after one norm, rotary in adjacent pairs."""

from hooked_lm.components.attention.multihead import Attention
from hooked_lm.components.blocks.parallel import SharedNormBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.embeddings.rotary import Rotary
from hooked_lm.components.mlp import MLP
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "transformer."
IGNORED = ("*.attn.bias", "*.attn.masked_bias", "*.attn.embed_positions")
NO_EFFECT = ("n_ctx", "rotary", "scale_attn_weights")  # unused fields of an older implementation


def config(hf: HFConfig) -> DecoderConfig:
    attn = Attention.Config(
        hf.n_embd, hf.n_head, hf.n_embd // hf.n_head, rotary=Rotary(hf.rotary_dim, adjacent_pairs=True)
    )
    norm = LayerNorm.Config(hf.n_embd, hf.layer_norm_epsilon)
    mlp = MLP.Config(hf.n_embd, hf.n_inner or 4 * hf.n_embd, hf.activation_function)
    return DecoderConfig(
        n_ctx=hf.n_positions,
        embed=Embed.Config(hf.vocab_size, hf.n_embd),
        blocks=(SharedNormBlock.Config(attn=attn, ln1=norm, mlp=mlp),) * hf.n_layer,
        ln_final=norm,
        unembed=Unembed.Config(hf.n_embd, hf.vocab_size, bias=True, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    return [*outer_rows(tree), *classic.attention("transformer.h.{l}.attn.", out="out_proj")]


def outer_rows(tree: DecoderConfig) -> list[Row]:
    """Rows of all weights but those of attention."""
    source = "transformer.h.{l}."
    return [
        Row("transformer.wte.weight", "embed.W_E"),
        *classic.norm(source + "ln_1", "blocks.{l}.ln1"),
        *classic.into_mlp(source + "mlp.fc_in"),
        *classic.out_of_mlp(source + "mlp.fc_out"),
        *classic.norm("transformer.ln_f", "ln_final"),
        *classic.head("lm_head", tree, "transformer.wte.weight"),
    ]
