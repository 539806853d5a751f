"""DeepSeek-V4 (DeepSeek-AI 2026, huggingface.co/deepseek-ai/DeepSeek-V4-Flash-Base): attention to near tokens one by one and to
far ones through keys that pool several tokens; hyper-connections with a doubly stochastic mixing; the first layers choose
experts by token ids."""

from dataclasses import replace

from hooked_lm.components.blocks.hyper import GatedRMSNorm, HyperBlock, HyperConnection, StreamGate, StreamMixer
from hooked_lm.components.bounded_mlp import BoundedGatedMLP
from hooked_lm.components.experts.moe import MoE
from hooked_lm.components.experts.router import GroupedSigmoidRouter
from hooked_lm.families._shared import classic, llama_like, moe
from hooked_lm.families._shared.llama_like import PREFIX
from hooked_lm.families._shared.reader import HFConfig
from hooked_lm.families._shared.rotary import rotary
from hooked_lm.families.decoders.deepseek_v4 import identities as identities
from hooked_lm.families.decoders.deepseek_v4.compressed import CompressedAttention, PoolIndexer
from hooked_lm.families.decoders.deepseek_v4.hash_moe import HashHyperBlock, HashMoE, RepeatedIds
from hooked_lm.families.decoders.deepseek_v4.key_pool import KeyPool
from hooked_lm.families.decoders.deepseek_v4.tied_kv import TiedKVAttention
from hooked_lm.models.config.tree import DecoderConfig
from hooked_lm.weights import Row

__all__ = ["IGNORED", "NO_EFFECT", "PREFIX", "RENAMED", "config", "rows"]

IGNORED = (*llama_like.IGNORED, "mtp.*", "model.mtp.*")  # for multi-token prediction
# rope_parameters repeat the fields of rotary
ROTARY = ("rope_theta", "compress_rope_theta", "partial_rotary_factor", "qk_rope_head_dim")
NO_EFFECT = (*moe.NO_EFFECT, *ROTARY, "num_nextn_predict_layers", "router_jitter_noise")
# From the published names to those that transformers writes.
RENAMED = {
    r"^embed\.": "model.embed_tokens.",
    r"^(layers|norm)\.": r"model.\1.",
    r"^hc_head_(fn|base|scale)$": r"model.hc_head.hc_\1",
}


def config(hf: HFConfig) -> DecoderConfig:
    hf.ignored_by_transformers(attention_bias=False, n_shared_experts=1, norm_topk_prob=True, num_key_value_heads=1)
    norm, (d_model, n_streams, eps) = llama_like.rms_norm(hf), (hf.hidden_size, hf.hc_mult, hf.hc_eps)
    gate = StreamGate.Config(d_model, n_streams, hf.rms_norm_eps, eps)
    mix = StreamMixer.Config(d_model, n_streams, hf.rms_norm_eps, eps, n_iterations=hf.hc_sinkhorn_iters)
    hc = HyperConnection.Config(gate, replace(gate, magnitude=2.0, eps=0.0), mix)
    mlp, by_ids = _experts(hf), HashMoE.Config(**vars(_experts(hf, corrected=False)), d_vocab=hf.vocab_size)
    blocks = [
        HyperBlock.Config(attn=_attention(hf, kind), ln1=norm, mlp=mlp, ln2=norm, hc=hc, first=layer == 0)
        for layer, kind in enumerate(hf.layer_types[: hf.num_hidden_layers])
    ]
    blocks = [
        HashHyperBlock.Config(**{**vars(block), "mlp": by_ids}) if kind == "hash_moe" else block
        for block, kind in zip(blocks, hf.mlp_layer_types, strict=True)
    ]
    ln_final = GatedRMSNorm.Config(d_model, hf.rms_norm_eps, n_streams=n_streams, gate_eps=eps)
    ids = RepeatedIds.Config(len(blocks)) if "hash_moe" in hf.mlp_layer_types else None
    return replace(llama_like.around(hf, blocks, ln_final), per_layer=ids)


def _attention(hf: HFConfig, kind: str) -> TiedKVAttention.Config:
    label = "main" if kind == "sliding_attention" else "compress"
    if (scaling := hf.rope_parameters[label].get("rope_type")) in ("dynamic", "longrope"):
        raise ValueError(f"rope_type {scaling!r} is not supported: its angles depend on the length of the prompt")
    turned, eps = rotary(hf, hf.head_dim, label, adjacent_pairs=True, partial=True), hf.rms_norm_eps
    attn = TiedKVAttention.Config(
        d_model=hf.hidden_size,
        n_heads=hf.num_attention_heads,
        d_head=hf.head_dim,
        d_q_latent=hf.q_lora_rank,
        d_o_latent=hf.o_lora_rank,
        n_groups=hf.o_groups,
        rotary=turned,
        eps=eps,
        window=hf.sliding_window,
    )
    indexer = PoolIndexer.Config(
        d_model=hf.hidden_size,
        d_query=hf.q_lora_rank,
        n_heads=hf.index_n_heads,
        d_head=hf.index_head_dim,
        top_k=hf.index_topk,
        rotary=turned,
        eps=eps,
        rate=hf.compress_rates["compressed_sparse_attention"],
    )
    if kind == "sliding_attention":
        return attn
    pool = KeyPool.Config(hf.hidden_size, hf.head_dim, hf.compress_rates[kind], turned, eps=eps)
    if kind == "heavily_compressed_attention":
        return CompressedAttention.Config(**vars(attn), pool=pool)
    return CompressedAttention.Config(**vars(attn), pool=replace(pool, overlapping=True), indexer=indexer)


def _experts(hf: HFConfig, corrected: bool = True) -> MoE.Config:
    if hf.scoring_func not in ("sigmoid", "sqrtsoftplus"):
        raise ValueError(f"scoring_func={hf.scoring_func!r} is not supported; sigmoid and sqrtsoftplus are")
    width = hf.moe_intermediate_size
    expert = BoundedGatedMLP.Config(hf.hidden_size, width, hf.hidden_act, limit=hf.swiglu_limit, before_act=True)
    router = GroupedSigmoidRouter(scale=hf.routed_scaling_factor, score=hf.scoring_func, corrected=corrected)
    shared = replace(expert, bias=hf.mlp_bias)
    return MoE.Config(expert, hf.n_routed_experts, hf.num_experts_per_tok, router, shared=shared)


def rows(tree: DecoderConfig) -> list[Row]:
    source, target, e = "model.layers.{l}.", "blocks.{l}.", moe.n_experts(tree)
    n, n_groups = tree.blocks[0].hc.read.n_streams, tree.blocks[0].attn.n_groups
    parts, one = {"read": n, "write": n, "mix": n * n}, {"read": 1, "write": 1, "mix": 1}
    attn, of_attn, ffn, mlp = source + "attn.", target + "attn.", source + "ffn.", target + "mlp."
    names = {"w1": "gate", "w3": "in", "w2": "out"}
    pools = {"compressor.": "", "indexer.compressor.": "indexer."}
    return [
        Row("model.embed_tokens.weight", "embed.W_E"),
        Row("model.norm.weight", "ln_final.w"),
        *classic.head("head", tree, "model.embed_tokens.weight"),
        Row(source + "attn_norm.weight", target + "ln1.w"),
        Row(source + "ffn_norm.weight", target + "ln2.w"),
        Row("model.hc_head.hc_fn", "ln_final.gate.W", "x (s m) -> s m x"),
        Row("model.hc_head.hc_base", "ln_final.gate.b"),
        Row("model.hc_head.hc_scale", "ln_final.gate.scale"),
        *(
            row
            for x, y in {"hc_attn_": "attn_hc.{x}.", "hc_ffn_": "mlp_hc.{x}."}.items()
            for row in (
                Row(source + x + "fn", target + y + "W", "x (s m) -> s m x", x=parts),
                Row(source + x + "base", target + y + "b", "x -> x", x=parts),
                Row(source + x + "scale", target + y + "scale", "x -> x", x=one),
            )
        ),
        Row(attn + "wq_a.weight", of_attn + "W_DQ", "d m -> m d"),
        Row(attn + "q_norm.weight", of_attn + "q_norm.w"),
        Row(attn + "wq_b.weight", of_attn + "W_UQ", "(n h) d -> n d h"),
        Row(attn + "wkv.weight", of_attn + "W_K", "(n h) m -> n m h"),
        Row(attn + "norm.weight", of_attn + "k_norm.w"),
        Row(attn + "attn_sink", of_attn + "sinks"),
        Row(attn + "wo_a.weight", of_attn + "W_DO", "(g r) (n h) -> (g n) h r", g=n_groups),
        Row(attn + "wo_b.weight", of_attn + "W_UO", "m (g r) -> g r m"),
        *(
            row
            for x, y in pools.items()
            for row in (
                Row(attn + x + "wkv.weight", of_attn + y + "to_pool.W_K", "(s h) m -> s m h"),
                Row(attn + x + "wgate.weight", of_attn + y + "to_pool.W_gate", "(s h) m -> s m h"),
                Row(attn + x + "ape", of_attn + y + "pool.b_gate", "r (s h) -> r s h"),
                Row(attn + x + "norm.weight", of_attn + y + "pool.norm.w"),
            )
        ),
        Row(attn + "indexer.wq_b.weight", of_attn + "indexer.W_Q", "(n h) d -> n d h"),
        Row(attn + "indexer.weights_proj.weight", of_attn + "indexer.W_weights", "n m -> m n"),
        Row(ffn + "gate.weight", mlp + "W_router", "e m -> m e"),
        Row(ffn + "gate.bias", mlp + "b_choice"),
        Row(ffn + "gate.tid2eid", mlp + "experts_of_token"),
        *(
            Row(f"{ffn}experts.{{e}}.{x}.weight", f"{mlp}experts.{{e}}.W_{y}", "o m -> m o", e=e)
            for x, y in names.items()
        ),
        *(row for x, y in names.items() for row in classic.linear(f"{ffn}shared_experts.{x}", mlp + "shared.", y)),
    ]
