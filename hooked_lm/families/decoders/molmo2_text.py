"""The language model of Molmo 2 (Ai2 2025): Qwen3 or OLMo 2 with fused projections; tokens of images have a table of embeddings
of their own, and are not predicted."""

from dataclasses import replace

from hooked_lm.components.blocks.block import PreNormBlock
from hooked_lm.families._shared import classic, llama_like
from hooked_lm.families._shared.llama_like import IGNORED, PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.families.decoders import olmo2
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "JOINED", "PREFIX", "RENAMED", "config", "rows"]

PREPENDS_BOS = False
# names in files -> names of transformers
RENAMED = {
    r"\bblocks\.(?=\d)": "layers.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ff_norm\.": ".post_attention_layernorm.",
    r"\bln_f\.": "norm.",
    r"\.attn_out\.": ".o_proj.",
    r"\.ff_out\.": ".down_proj.",
}
# As transformers saves them again the parts are halves (core_model_loading.py: Concatenate.reverse_op).
JOINED = {"model.embed_tokens.weight": ("model.wte.embedding", "model.wte.new_embedding")}


def config(hf: HFConfig) -> DecoderConfig:
    hf.ignored_by_transformers(tie_word_embeddings=False)
    per_head, norm, turn = hf.qk_norm_type == "qwen3", llama_like.rms_norm(hf), rotary(hf, hf.head_dim)
    qk_norm, k_norm = (llama_like.head_norm(hf), None) if per_head else olmo2.joint_norms(hf)
    attn = llama_like.attention(hf, rotary=turn, qkv_bias=hf.attention_bias, qk_norm=qk_norm, k_norm=k_norm)
    plain, scaled = replace(attn, rotary=replace(turn, scaling=None)), hf.rope_scaling_layers
    before, after = (None, norm) if hf.norm_after else (norm, None)
    block = PreNormBlock.Config(
        attn=attn, ln1=before, ln1_post=after, mlp=llama_like.gated_mlp(hf), ln2=before, ln2_post=after
    )
    blocks = [replace(block, attn=attn if layer in scaled else plain) for layer in range(hf.num_hidden_layers)]
    tree = llama_like.around(hf, blocks, norm)
    return replace(tree, embed=replace(tree.embed, d_vocab=hf.vocab_size + hf.additional_vocab_size))


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, attn = "model.layers.{l}.", "blocks.{l}.", tree.blocks[0].attn
    heads = {"Q": attn.n_heads, "K": attn.n_kv, "V": attn.n_kv}
    norm = "(n h) -> n h" if attn.qk_norm.joint else None
    return [
        *llama_like.outer_rows(tree),
        *llama_like.norm_rows(),
        Row(source + "input_layernorm.weight", target + "ln1_post.w"),
        Row(source + "post_attention_layernorm.weight", target + "ln2_post.w"),
        Row(source + "self_attn.att_proj.weight", target + "attn.W_{x}", "(x h) m -> x m h", x=heads),
        Row(source + "self_attn.att_proj.bias", target + "attn.b_{x}", "(x h) -> x h", x=heads),
        *(Row(f"{source}self_attn.{x}_norm.weight", f"{target}attn.{x}_norm.w", norm) for x in "qk"),
        *classic.out_of_attention(source + "self_attn.o_proj"),
        Row(source + "mlp.ff_proj.weight", target + "mlp.W_{x}", "(x f) m -> m f", x=["in", "gate"]),
        *classic.out_of_mlp(source + "mlp.down_proj"),
    ]
