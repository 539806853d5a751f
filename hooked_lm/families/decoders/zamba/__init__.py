"""Zamba (Glorioso et al. 2024, arXiv:2405.16712): Mamba with heads; some layers add the output of a
transformer that they share, applied to the stream and the embedding, to the input of their mixer."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from hooked_lm.components.blocks.mixer import MixerBlock, MixerConfig
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders.zamba import identities as identities
from hooked_lm.families.decoders.zamba.mamba_heads import MambaHeads
from hooked_lm.families.decoders.zamba.shared import RepeatedEmbed, SharedBlock
from hooked_lm.families.decoders.zamba.wide import WideAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# `layers_block_type` says which layers have the transformer; initialisation, equivalent implementations, returned logits
NO_EFFECT = (
    *("num_hidden_layers", "attn_layer_period", "attn_layer_offset", "time_step_*", "num_logits_to_keep"),
    *("use_mamba_kernels", "use_associative_scan"),
)


def config(hf: HFConfig) -> DecoderConfig:
    norm, d_model = llama_like.rms_norm(hf), hf.hidden_size
    if hf.attention_hidden_size != 2 * d_model:
        raise ValueError(f"attention_hidden_size={hf.attention_hidden_size} is not supported; only {2 * d_model} is")
    mixer = MambaHeads.Config(
        d_model=d_model,
        d_inner=hf.mamba_expand * d_model,
        d_state=hf.mamba_d_state,
        dt_rank=hf.mamba_dt_rank,
        conv_width=hf.mamba_d_conv,
        act_fn=hf.hidden_mamba_act,
        bias=hf.mamba_proj_bias,
        conv_bias=hf.mamba_conv_bias,
        n_heads=hf.n_mamba_heads,
    )
    attn = WideAttention.Config(
        d_model=2 * d_model,
        n_heads=hf.num_attention_heads,
        d_head=hf.attention_head_dim,
        n_key_value_heads=hf.num_key_value_heads,
        scale=(hf.attention_head_dim / 2) ** -0.5,
        d_out=d_model,
    )
    wide = RMSNorm.Config(2 * d_model, hf.rms_norm_eps)
    blocks: dict[str, MixerBlock.Config | SharedBlock.Config] = {
        "linear_attention": MixerBlock.Config(mixer=mixer, ln1=norm),
        "hybrid": SharedBlock.Config(
            mixer=mixer, attn=attn, mlp=llama_like.gated_mlp(hf), ln1=wide, ln2=norm, ln3=norm
        ),
    }
    if unknown := set(hf.layers_block_type) - set(blocks):
        raise ValueError(f"layers_block_type {sorted(unknown)} are not supported; {', '.join(blocks)} are")
    return over_embedding(hf, [blocks[kind] for kind in hf.layers_block_type], 1)


def over_embedding(
    hf: HFConfig, blocks: Sequence[MixerBlock.Config | SharedBlock.Config], n_sets: int
) -> DecoderConfig:
    """The decoder with these blocks, of which those with a shared transformer use `n_sets` sets of weights in turn."""
    hybrids = [layer for layer, block in enumerate(blocks) if isinstance(block, SharedBlock.Config)]
    # `PreTrainedModel.get_expanded_tied_weights_keys` of transformers ties nothing if the unembedding is not tied
    n_sets = n_sets if hf.tie_word_embeddings else len(hybrids)
    blocks = [
        replace(block, shared_set=hybrids.index(layer) % n_sets) if isinstance(block, SharedBlock.Config) else block
        for layer, block in enumerate(blocks)
    ]
    tree = llama_like.around(hf, blocks, llama_like.rms_norm(hf))
    return replace(tree, per_layer=RepeatedEmbed.Config(len(blocks)))


def rows(tree: DecoderConfig) -> list[Row]:
    found = [Row("model.embed_tokens.weight", "embed.W_E"), Row("model.final_layernorm.weight", "ln_final.w")]
    first: dict[int, int] = {}  # the first layer of each set of shared weights
    for layer, block in enumerate(tree.blocks):
        source, target = f"model.layers.{layer}.", f"blocks.{layer}."
        if not isinstance(block, SharedBlock.Config):
            found += [
                Row(source + "input_layernorm.weight", target + "ln1.w"),
                *mixer_rows(block.mixer, source, target),
            ]
            continue
        found += shared_rows(layer, first.setdefault(block.shared_set, layer), "shared_transf.")
        found += [
            Row(source + "linear.weight", target + "W_shared", "o m -> m o"),
            Row(source + "mamba_decoder.input_layernorm.weight", target + "ln3.w"),
            *mixer_rows(block.mixer, source + "mamba_decoder.", target),
        ]
    return [*found, *classic.head("lm_head", tree, "model.embed_tokens.weight")]


def shared_rows(
    layer: int, first: int, name: str, mlp_rows: Callable[[str, str], list[Row]] = classic.gated_mlp
) -> list[Row]:
    """Rows of the shared transformer in a layer, whose weights are those of the layer `first`."""
    source, target = f"model.layers.{layer}.{name}", f"blocks.{layer}."
    found = [
        Row(source + "input_layernorm.weight", target + "ln1.w"),
        *classic.attention(source + "self_attn.", target + "attn."),
        Row(source + "pre_ff_layernorm.weight", target + "ln2.w"),
        *mlp_rows(source + "feed_forward.", target + "mlp."),
    ]
    if layer == first:
        return found
    origin = f"model.layers.{first}.{name}"
    return [row.between(row.source, row.target, origin + row.source.removeprefix(source)) for row in found]


def mixer_rows(mixer: MixerConfig, source: str, target: str) -> list[Row]:
    """Rows of a mixer."""
    assert isinstance(mixer, MambaHeads.Config), "Zamba has Mamba with heads"
    source, target, n = source + "mamba.", target + "mixer.", mixer.n_heads
    made = {"dt_down": mixer.dt_rank, "B": mixer.d_state, "C": mixer.d_state}
    return [
        Row(source + "in_proj.weight", target + "W_{x}", "(i x) m -> m i", x=["x", "gate"]),
        Row(source + "in_proj.bias", target + "b_{x}", "(i x) -> i", x=["x", "gate"]),
        Row(source + "conv1d.weight", target + "conv.W_conv", "i 1 k -> k i"),
        Row(source + "conv1d.bias", target + "conv.b_conv"),
        Row(source + "x_proj_weight", target + "W_{x}", "n x h -> n h x", x=made),
        Row(source + "dt_proj_weight", target + "W_dt_up", "n h r -> n r h"),
        Row(source + "dt_proj_bias", target + "dt_bias", "n h -> (n h)", n=n),
        Row(source + "A_log", target + "A_log", "n h s -> (n h) s", n=n),
        Row(source + "D", target + "D", "n h -> (n h)", n=n),
        *classic.linear(source + "out_proj", target, "out"),
    ]
