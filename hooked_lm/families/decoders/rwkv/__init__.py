"""RWKV-4 (Peng et al. 2023, arXiv:2305.13048): averages over the past that are computed like a state, and shifted tokens.

A layer of the checkpoint is two blocks here, each with a mixer: time mixing, then channel mixing, which also reads the token
before.
"""

from hooked_lm.components.blocks.mixer import MixerBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.norms.layer_norm import LayerNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.mamba import N_CTX
from hooked_lm.families.decoders.rwkv import identities as identities
from hooked_lm.families.decoders.rwkv.channel_mix import ChannelMix
from hooked_lm.families.decoders.rwkv.wkv import WKV
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "rwkv."
IGNORED = ()
# Length of training texts. After every `rescale_every` layers transformers (RwkvModel in modeling_rwkv.py) halves the stream and
# the weights that write to it: the logits are the same but for the eps of the norms.
NO_EFFECT = ("context_length", "rescale_every")


def config(hf: HFConfig) -> DecoderConfig:
    norm = LayerNorm.Config(hf.hidden_size, hf.layer_norm_epsilon)
    layer = (
        WKV.Config(hf.hidden_size, hf.attention_hidden_size),
        ChannelMix.Config(hf.hidden_size, hf.intermediate_size),
    )
    return DecoderConfig(
        n_ctx=N_CTX,
        embed=Embed.Config(hf.vocab_size, hf.hidden_size, norm=norm),
        blocks=tuple(MixerBlock.Config(mixer=mixer, ln1=norm) for mixer in layer) * hf.num_hidden_layers,
        ln_final=LayerNorm.Config(hf.hidden_size, 1e-5),
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    return [
        Row("rwkv.embeddings.weight", "embed.W_E"),
        *classic.norm("rwkv.blocks.0.pre_ln", "embed.ln"),
        *(row for layer in range(len(tree.blocks) // 2) for row in _layer_rows(layer)),
        *classic.norm("rwkv.ln_out", "ln_final"),
        *classic.head("head", tree, "rwkv.embeddings.weight"),
    ]


def _layer_rows(layer: int) -> list[Row]:
    """Rows of a layer of the checkpoint."""
    source, time, channel = f"rwkv.blocks.{layer}.", f"blocks.{2 * layer}.", f"blocks.{2 * layer + 1}."
    names = {
        "attention": {"key": "K", "value": "V", "receptance": "R"},
        "feed_forward": {"key": "in", "receptance": "gate"},
    }
    rows = [*classic.norm(source + "ln1", time + "ln1"), *classic.norm(source + "ln2", channel + "ln1")]
    for part, block, out in (("attention", time, "output"), ("feed_forward", channel, "value")):
        for name, target in names[part].items():
            rows.append(Row(f"{source}{part}.time_mix_{name}", f"{block}mixer.mix_{target}", "1 1 m -> m"))
            rows += classic.linear(f"{source}{part}.{name}", block + "mixer.", target)
        rows += classic.linear(f"{source}{part}.{out}", block + "mixer.", "out")
    return [
        *rows,
        Row(source + "attention.time_decay", time + "mixer.decay"),
        Row(source + "attention.time_first", time + "mixer.bonus"),
    ]
