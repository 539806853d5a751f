"""MiniMax-Text-01 (MiniMax 2025, arXiv:2501.08313): lightning attention beside softmax attention, experts, and DeepNorm."""

from collections.abc import Mapping

import torch
from torch import Tensor

from hooked_lm.components.blocks.deep_norm import DeepNormBlock, DeepNormMixerBlock
from hooked_lm.components.embeddings.embed import Embed, Unembed
from hooked_lm.components.experts.router import SoftmaxRouter
from hooked_lm.components.ssm.lightning import LightningAttention
from hooked_lm.families._shared import classic, delta_net, llama_like, moe
from hooked_lm.families._shared.delta_net import LAYER, MIXER
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import n_ctx
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "adjusted_to_tensors", "config", "rows"]

SLOPES = LAYER + "self_attn.slope_rate"
# They and their products follow from the config. transformers keeps them as buffers, which have the dtype of the model: in
# bfloat16 its decays are rounded (MiniMaxLightningAttention).
IGNORED = (*llama_like.IGNORED, SLOPES.replace("{l}", "*"), "*.query_decay", "*.key_decay", "*.diagonal_decay")
NO_EFFECT = (*moe.NO_EFFECT, "router_jitter_noise", "block_size")  # the length of the chunks of the same recurrence


def config(hf: HFConfig) -> DecoderConfig:
    """The stream between blocks is the input of each block after its first norm: that norm is the last of the block before."""
    norm, d_head = llama_like.rms_norm(hf), llama_like.head_dim(hf)
    attn = llama_like.attention(hf, window=hf.sliding_window)
    mlp = moe.experts(hf, hf.num_local_experts, SoftmaxRouter(renormalize=True))
    full, linear = _weights(hf, "full_attn"), _weights(hf, "linear_attn")

    def mixer(layer: int) -> LightningAttention.Config:
        slopes = _slopes(hf.num_attention_heads, layer, hf.num_hidden_layers)
        return LightningAttention.Config(hf.hidden_size, hf.num_attention_heads, d_head, slopes, hf.hidden_act)

    last = _weights(hf, "mlp")
    blocks = [
        DeepNormBlock.Config(attn=attn, ln1=norm, mlp=mlp, ln2=norm, mid_weights=full, post_weights=last)
        if attends
        else DeepNormMixerBlock.Config(
            mixer=mixer(layer), ln1=norm, mlp=mlp, ln2=norm, mid_weights=linear, post_weights=last
        )
        for layer, attends in enumerate(delta_net.attending(hf))
    ]
    return DecoderConfig(
        n_ctx=n_ctx(hf),
        embed=Embed.Config(hf.vocab_size, hf.hidden_size, norm=norm),
        blocks=tuple(blocks),
        unembed=Unembed.Config(hf.hidden_size, hf.vocab_size, tied=hf.tie_word_embeddings),
    )


def _weights(hf: HFConfig, part: str) -> tuple[float, float]:
    """The weights of the stream and of the output of a sublayer."""
    return float(hf.get(f"{part}_alpha_factor")), float(hf.get(f"{part}_beta_factor"))


def _slopes(n_heads: int, layer: int, n_layers: int) -> tuple[float, ...]:
    """The slopes of a layer's heads: those of ALiBi, smaller in later layers."""
    factor = 1 - layer / (n_layers - 1 + 1e-5) + 1e-5
    return tuple(2 ** (-8 * (head + 1) / n_heads) * factor for head in range(n_heads))


def adjusted_to_tensors(tree: DecoderConfig, tensors: Mapping[str, Tensor]) -> DecoderConfig:
    """The same tree. Raises ValueError for files with other slopes, up to the rounding of bfloat16."""
    for layer, block in enumerate(tree.blocks):
        name = SLOPES.format(l=layer)
        if isinstance(block, DeepNormMixerBlock.Config) and name in tensors:
            assert isinstance(block.mixer, LightningAttention.Config), "the only mixer"
            given, ours = tensors[name].flatten().double().cpu(), torch.tensor(block.mixer.slopes).double()
            if given.shape != ours.shape or not torch.allclose(given, ours, rtol=0.01, atol=0.0):
                raise ValueError(f"{name} is {given.tolist()}; the slopes of this architecture are {ours.tolist()}")
    return tree


def rows(tree: DecoderConfig) -> list[Row]:
    source, last = LAYER + "self_attn.", len(tree.blocks) - 1
    norms = {f"model.layers.{layer + 1}.input_layernorm": f"blocks.{layer}.ln2" for layer in range(last)}
    norms |= {"model.layers.0.input_layernorm": "embed.ln", "model.norm": f"blocks.{last}.ln2"}
    mixers = [block.mixer for block in tree.blocks if isinstance(block, DeepNormMixerBlock.Config)]
    heads = {mixer.n_heads for mixer in mixers if isinstance(mixer, LightningAttention.Config)}
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        *(Row(f"{name}.weight", f"{target}.w") for name, target in norms.items()),
        *classic.head("lm_head", tree, "model.embed_tokens.weight"),
        Row(LAYER + "post_attention_layernorm.weight", "blocks.{l}.ln1.w"),
        *classic.attention(source),
        # the queries, keys and values of each head follow each other
        *(
            Row(source + "qkv_proj.weight", MIXER + "W_{x}", "(n x h) m -> m (n h)", n=n, x=["Q", "K", "V"])
            for n in heads
        ),
        Row(source + "norm.weight", MIXER + "norm.w"),
        *classic.linear(source + "output_gate", MIXER, "gate"),
        *classic.linear(source + "out_proj", MIXER, "out"),
        *moe.sparse_rows(tree, "block_sparse_moe", ("w1", "w3", "w2")),
    ]
