"""Zamba2 (Glorioso et al. 2024, arXiv:2411.15242): Mamba-2, and several shared transformers in turn, which each layer adapts."""

from hooked_lm.components.blocks.mixer import MixerBlock
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.ssm.mamba2 import Mamba2
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.families.decoders import mamba2, zamba
from hooked_lm.families.decoders.zamba.shared import SharedBlock
from hooked_lm.families.decoders.zamba.wide import WideAttention
from hooked_lm.families.decoders.zamba2 import identities as identities
from hooked_lm.families.decoders.zamba2.adapters import AdaptedAttention, AdaptedGatedMLP
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "config", "rows"]

# `layers_block_type` says which layers have a transformer; derived fields, initialisation, the chunks of the scan, the number of
# returned logits, and a field that transformers does not use: its convolutions always have a bias
NO_EFFECT = (
    *("num_hidden_layers", "kv_channels", "num_query_groups", "time_step_max", "time_step_floor"),
    *("chunk_size", "use_mem_eff_path", "use_mamba_kernels", "num_logits_to_keep", "use_long_context", "use_conv_bias"),
    *("attention_hidden_size", "mamba_headdim", "mamba_expand", "rope_parameters"),
)


def config(hf: HFConfig) -> DecoderConfig:
    if not hf.tie_word_embeddings:  # transformers then ties no transformers either, whose copies have unused adapters
        raise ValueError(
            "tie_word_embeddings=False is not supported: transformers then shares no weights between layers"
        )
    norm, d_model, bias = llama_like.rms_norm(hf), hf.hidden_size, hf.add_bias_linear
    mixer = Mamba2.Config(
        d_model=d_model,
        n_heads=hf.n_mamba_heads,
        d_head=int(hf.mamba_expand * d_model) // hf.n_mamba_heads,
        d_state=hf.mamba_d_state,
        n_groups=hf.mamba_ngroups,
        conv_width=hf.mamba_d_conv,
        bias=bias,
        dt_limit=(hf.time_step_min, float("inf")),
        eps=1e-5,
    )
    mlp = AdaptedGatedMLP.Config(d_model, hf.intermediate_size, hf.hidden_act, bias, rank=hf.adapter_rank)
    wide = RMSNorm.Config(2 * d_model, hf.rms_norm_eps)
    blocks: dict[str, MixerBlock.Config | SharedBlock.Config] = {
        "linear_attention": MixerBlock.Config(mixer=mixer, ln1=norm),
        "hybrid": SharedBlock.Config(mixer=mixer, attn=_attention(hf), mlp=mlp, ln1=wide, ln2=norm, ln3=norm),
    }
    if unknown := set(hf.layers_block_type) - set(blocks):
        raise ValueError(f"layers_block_type {sorted(unknown)} are not supported; {', '.join(blocks)} are")
    # transformers counts the layers with a transformer in the order of this list, and has them where `layers_block_type` says
    hf.require(hybrid_layer_ids=[layer for layer, kind in enumerate(hf.layers_block_type) if kind == "hybrid"])
    return zamba.over_embedding(hf, [blocks[kind] for kind in hf.layers_block_type], hf.num_mem_blocks)


def _attention(hf: HFConfig) -> WideAttention.Config:
    d_head = hf.attention_head_dim
    sizes = {
        "d_model": 2 * hf.hidden_size,
        "n_heads": hf.num_attention_heads,
        "d_head": d_head,
        "n_key_value_heads": hf.num_key_value_heads,
        "scale": (d_head / 2) ** -0.5,
        "rotary": rotary(hf, d_head) if hf.use_mem_rope else None,
        "d_out": hf.hidden_size,
    }
    if hf.use_shared_attention_adapter:
        return AdaptedAttention.Config(**sizes, rank=hf.adapter_rank)
    return WideAttention.Config(**sizes)


def rows(tree: DecoderConfig) -> list[Row]:
    found = [Row("model.embed_tokens.weight", "embed.W_E"), Row("model.final_layernorm.weight", "ln_final.w")]
    first: dict[int, int] = {}  # the first layer of each set of shared weights
    hybrids = [layer for layer, block in enumerate(tree.blocks) if isinstance(block, SharedBlock.Config)]
    for layer, block in enumerate(tree.blocks):
        source, mixer = f"model.layers.{layer}.", f"model.layers.{layer}."
        if isinstance(block, SharedBlock.Config):
            origin, mixer = first.setdefault(block.shared_set, layer), source + "mamba_decoder."
            found += zamba.shared_rows(layer, origin, "shared_transformer.", _mlp_rows)
            same_set = [i for i, other in enumerate(hybrids) if tree.blocks[other].shared_set == block.shared_set]
            for index in same_set if layer != origin else ():
                found += _copied_adapters(layer, origin, index, block)
            found += _adapter_rows(f"model.layers.{origin}.shared_transformer.", layer, hybrids.index(layer), block)
            found += [Row(source + "linear.weight", f"blocks.{layer}.W_shared", "o m -> m o")]
        norm = "ln3" if isinstance(block, SharedBlock.Config) else "ln1"
        found += [Row(mixer + "input_layernorm.weight", f"blocks.{layer}.{norm}.w")]
        assert isinstance(block.mixer, Mamba2.Config)
        found += mamba2.mixer_rows(block.mixer, mixer + "mamba.", f"blocks.{layer}.mixer.")
    return [*found, *classic.head("lm_head", tree, "model.embed_tokens.weight")]


def _mlp_rows(source: str, target: str) -> list[Row]:
    return [
        Row(source + "gate_up_proj.weight", target + "W_{x}", "(x f) m -> m f", x=["gate", "in"]),
        Row(source + "gate_up_proj.bias", target + "b_{x}", "(x f) -> f", x=["gate", "in"]),
        *classic.linear(source + "down_proj", target, "out"),
    ]


def _adapter_rows(source: str, layer: int, index: int, block: SharedBlock.Config) -> list[Row]:
    """Rows of the adapters of a layer, which are the ones with this index in its set."""
    target, n = f"blocks.{layer}.", block.attn.n_heads
    mlp = f"{source}feed_forward.gate_up_proj_adapter_list.{index}."
    found = [
        Row(mlp + "0.weight", target + "mlp.adapter.W_down", "r m -> m r"),
        Row(mlp + "1.weight", target + "mlp.adapter.W_{x}", "(x f) r -> r f", x=["gate", "in"]),
    ]
    for name in "qkv":
        attn = f"{source}self_attn.linear_{name}_adapter_list.{index}."
        found += [
            Row(attn + "0.weight", f"{target}attn.{name}_adapter.W_down", "r m -> m r"),
            Row(attn + "1.weight", f"{target}attn.{name}_adapter.W_up", "(n h) r -> n r h", n=n),
        ]
    return found


def _copied_adapters(layer: int, origin: int, index: int, block: SharedBlock.Config) -> list[Row]:
    """Rows of the adapters with this index in a layer that are copies of those in the first layer of its set."""
    first = (f"model.layers.{origin}.", f"model.layers.{layer}.")
    adapters = _adapter_rows(f"{first[0]}shared_transformer.", layer, index, block)
    sources = dict.fromkeys(row.source for row in adapters)
    return [Row(source.replace(*first, 1), f"blocks.{layer}.copied_adapters", tied=source) for source in sources]
