"""Ling 3.0 (Inclusion AI 2026): Kimi Delta Attention with bounded decays in most layers, gated latent attention in the others,
and DeepSeek-V3's experts."""

from hooked_lm.components.attention.gated import GatedLatentAttention
from hooked_lm.families._shared import deepseek, llama_like, moe
from hooked_lm.families._shared.delta_net import LAYER, MIXER
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families.decoders import kimi_linear
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

IGNORED = (*llama_like.IGNORED, "model.layers.42.*")  # an extra layer for the prediction of several tokens
RENAMED = {r"\.attention\.o_proj\.": ".attention.dense."}  # transformers reads both names
# fields of that layer, and fields that repeat `layer_types`, `mlp_layer_types`, `linear_conv_kernel_dim` and `rope_parameters`
NO_EFFECT = (
    *(*deepseek.NO_EFFECT, "num_nextn_predict_layers", "mtp_loss_scaling_factor", "layer_group_size", "rope_theta"),
    *("first_k_dense_replace", "short_conv_kernel_size"),
)
ATTENTION = LAYER + "attention."


def config(hf: HFConfig) -> DecoderConfig:
    hf = kimi_linear.with_usual_names(hf).changed(q_lora_rank=None)
    lower_bound = hf.kda_lower_bound  # read also where it has no effect
    # transformers rounds the logarithms of the decays to the dtype of the model (BailingHybridForgetGate.forward); here they
    # have at least fp32, as in Kimi Linear
    mixer = kimi_linear.delta_attention(
        hf, hf.linear_num_heads, hf.linear_head_dim, lower_bound=lower_bound if hf.kda_safe_gate else None
    )
    attn = deepseek.attention(hf, adjacent_pairs=True)
    return kimi_linear.decoder(hf, mixer, GatedLatentAttention.Config(**vars(attn), gate_per_head=True))


def rows(tree: DecoderConfig) -> list[Row]:
    names = kimi_linear.NAMES | {"f": "g", "g": "gate"}
    return [
        *llama_like.outer_rows(tree, embed="model.word_embeddings"),
        *llama_like.norm_rows(),
        *kimi_linear.attention_rows(tree, ATTENTION, out="dense"),
        Row(ATTENTION + "g_proj.weight", "blocks.{l}.attn.W_gate", "(n o) m -> n m o", o=1),
        *kimi_linear.delta_rows(ATTENTION, names, out="dense"),
        Row(ATTENTION + "A_log", MIXER + "A_log"),
        *llama_like.mlp_rows(),
        *moe.sparse_rows(tree, correction="gate.expert_bias"),
    ]
