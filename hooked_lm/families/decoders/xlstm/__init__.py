"""xLSTM 7B (Beck et al. 2025, arXiv:2503.13427): the matrix LSTM of xLSTM (arXiv:2405.04517) in place of attention."""

from hooked_lm.components.blocks.mixer import MixerMLPBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.mlp import GatedMLP
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.mamba import N_CTX
from hooked_lm.families.decoders.xlstm import identities as identities
from hooked_lm.families.decoders.xlstm.mlstm import MLSTM
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

PREFIX = "backbone."
IGNORED = ()
# kernels and their precision, and duplicates of other fields
NO_EFFECT = (
    *("*_kernel", "*_dtype", "*chunk*size", "mode", "return_last_states", "norm_reduction_force_float32"),
    "embedding_dim",
)


def config(hf: HFConfig) -> DecoderConfig:
    if hf.use_bias:
        raise ValueError("use_bias=True is not supported for xlstm: its RMS norms would have biases")
    if hf.weight_mode != "single":  # xLSTMPreTrainedModel._init_weights of transformers fails for others
        raise ValueError(f"weight_mode={hf.weight_mode!r} is not supported for xlstm; 'single' is")
    if hf.num_hidden_layers != hf.num_blocks:
        raise ValueError(
            f"num_hidden_layers={hf.num_hidden_layers} and num_blocks={hf.num_blocks} differ: they are the same"
        )
    d_model, n_heads, multiple = hf.hidden_size, hf.num_heads, hf.ffn_round_up_to_multiple_of
    norm = RMSNorm.Config(d_model, hf.norm_eps)
    mixer = MLSTM.Config(
        d_model=d_model,
        n_heads=n_heads,
        d_head=int(d_model * hf.v_dim_factor) // n_heads,
        d_state=int(d_model * hf.qk_dim_factor) // n_heads,
        gate_cap=hf.gate_soft_cap,
        eps=hf.norm_eps,
        denominator_eps=hf.eps,
    )
    d_mlp = int((d_model * hf.ffn_proj_factor + multiple - 1) // multiple * multiple)
    block = MixerMLPBlock.Config(mixer=mixer, ln1=norm, mlp=GatedMLP.Config(d_model, d_mlp, "silu"), ln2=norm)
    return DecoderConfig(
        n_ctx=N_CTX,
        embed=Embed.Config(hf.vocab_size, d_model),
        blocks=(block,) * hf.num_blocks,
        ln_final=norm,
        unembed=Unembed.Config(d_model, hf.vocab_size, soft_cap=hf.output_logit_soft_cap),
    )


def rows(tree: DecoderConfig) -> list[Row]:
    layer, target = "backbone.blocks.{l}.", "blocks.{l}.mixer."
    source, mlp = layer + "mlstm_layer.", "blocks.{l}.mlp."
    names = {"q": "Q", "k": "K", "v": "V", "ogate_preact": "gate", "igate_preact": "i", "fgate_preact": "f"}
    return [
        Row("backbone.embeddings.weight", "embed.W_E"),
        Row(layer + "norm_mlstm.weight", "blocks.{l}.ln1.w"),
        *(row for name, ours in names.items() for row in classic.linear(source + name, target, ours)),
        Row(source + "multihead_norm.weight", target + "norm.w", "(n h) -> n h"),
        *classic.linear(source + "out_proj", target, "out"),
        Row(layer + "norm_ffn.weight", "blocks.{l}.ln2.w"),
        *classic.linear(layer + "ffn.proj_up_gate", mlp, "gate"),
        *classic.linear(layer + "ffn.proj_up", mlp, "in"),
        *classic.linear(layer + "ffn.proj_down", mlp, "out"),
        Row("backbone.out_norm.weight", "ln_final.w"),
        *classic.head("lm_head", tree, "backbone.embeddings.weight"),
    ]
