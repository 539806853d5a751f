"""Decoders with layer norms: GPT-2 and its time."""

from tests.families._case import DYNAMIC, LINEAR, SIZES, Case, embed_padding

GPT2 = {
    "vocab_size": 61,
    "n_positions": 40,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "layer_norm_epsilon": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

GPT = {**GPT2, "tie_word_embeddings": True}  # of the same field names
WITHOUT_MLP = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
NEO = {
    **{name: size for name, size in SIZES.items() if not name.startswith("num_")},
    "num_layers": 3,
    "num_heads": 4,
    "layer_norm_epsilon": 0.02,
    "window_size": 5,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
}
OPT = {**WITHOUT_MLP, "ffn_dim": 48, "word_embed_proj_dim": 32}
BLOOM = {
    "vocab_size": 61,
    "hidden_size": 32,
    "n_layer": 2,
    "n_head": 4,
    "layer_norm_epsilon": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIX_HEADS = {"hidden_size": 48, "n_head": 6}  # no power of two
MPT = {"vocab_size": 61, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 40, "layer_norm_epsilon": 0.02}
FALCON = {**WITHOUT_MLP, "ffn_hidden_size": 48, "layer_norm_epsilon": 0.02}
NEW_FALCON = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
CTRL = {**GPT2, "dff": 48}
XGLM = {
    "vocab_size": 61,
    "max_position_embeddings": 40,
    "d_model": 32,
    "ffn_dim": 48,
    "num_layers": 2,
    "attention_heads": 4,
    "pad_token_id": None,  # its embedding has no gradient
    "bos_token_id": 0,
    "eos_token_id": 2,
}

# Fields that are refused when they are not at their default.
REFUSED = {
    "gpt2": {"add_cross_attention"},
    "gpt-sw3": {"add_cross_attention"},
    "gpt_bigcode": {"add_cross_attention"},
    "xglm": {"add_cross_attention"},
}

# fmt: off
CASES: list[Case] = [
    Case("gpt2", "tied",                 GPT2),
    Case("gpt2", "untied-narrow-mlp",    {**GPT2, "tie_word_embeddings": False, "n_inner": 20}),
    Case("gpt2", "inverse-layer-scale",  {**GPT2, "n_layer": 3, "scale_attn_by_inverse_layer_idx": True}),
    Case("gpt2", "unscaled-scores-relu", {**GPT2, "scale_attn_weights": False, "activation_function": "relu"}),
    Case("gpt-sw3", "untied-wide-mlp", {**GPT2, "tie_word_embeddings": False, "n_inner": 56, "n_layer": 3}),
    Case("gpt_neox", "parallel",           {**SIZES, "layer_norm_eps": 0.02}),
    Case("gpt_neox", "all-rotary-no-bias", {**SIZES, "rotary_pct": 1.0, "attention_bias": False}),
    Case("gpt_neox", "linear", {**SIZES, "rope_scaling": {"type": "linear", "factor": 3.0}, "rotary_emb_base": 100}),
    Case("openai-gpt", "tied",              GPT),
    Case("openai-gpt", "three-layers-relu", {**GPT, "n_layer": 3, "afn": "relu"}),
    Case("gpt_neo", "global-and-local", NEO),
    Case("gptj", "half-rotary",     {**GPT2, "rotary_dim": 4, "tie_word_embeddings": False}),
    Case("gptj", "all-rotary-tied", {**GPT2, "rotary_dim": 8, "tie_word_embeddings": True}),
    Case("codegen", "half-rotary",       {**GPT2, "rotary_dim": 4, "tie_word_embeddings": False}),
    Case("codegen", "two-heads-a-shard", {**GPT2, "n_head": 8, "rotary_dim": 4, "tie_word_embeddings": False}),
    Case("gpt_neox_japanese", "tied", {**WITHOUT_MLP, "intermediate_multiple_size": 2, "layer_norm_eps": 0.02}),
    Case("opt", "tied",                  OPT),
    Case("opt", "post-norm-projected",   {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    Case("opt", "projected-untied",      {**OPT, "word_embed_proj_dim": 40, "tie_word_embeddings": False}),
    Case("opt", "no-biases-plain-norms", {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    Case("opt", "no-final-norm-gelu",    {**OPT, "_remove_final_layer_norm": True, "activation_function": "gelu"}),
    Case("bloom", "tied",             BLOOM),
    Case("bloom", "six-heads",        {**BLOOM, **SIX_HEADS}),
    Case("bloom", "normed-residuals", {**BLOOM, "apply_residual_connection_post_layernorm": True}),
    Case("mpt", "tied",      MPT),
    Case("mpt", "six-heads", {**MPT, "d_model": 48, "n_heads": 6, "expansion_ratio": 2, "norm_type": "layernorm"}),
    Case("mpt", "untied-clipped-scaled", {**MPT, "tie_word_embeddings": False, "attn_config": {"clip_qkv": 1.0,
         "softmax_scale": 0.7}}),
    Case("falcon", "one-kv-one-norm",       FALCON, attention="sdpa"),
    Case(  # the eager path of transformers adds the linear biases twice
        "falcon",
        "all-kv-alibi-biased-sequential",
        {**FALCON, "multi_query": False, "alibi": True, "bias": True, "parallel_attn": False},
        attention="sdpa",
    ),
    Case("falcon", "one-kv-alibi-twelve-heads", {**FALCON, "alibi": True, "hidden_size": 48, "num_attention_heads": 12,
         "tie_word_embeddings": False}, attention="sdpa"),
    Case("falcon", "new-grouped-two-norms", NEW_FALCON, attention="sdpa"),
    Case("falcon", "new-grouped-one-norm-biased", {**NEW_FALCON, "num_ln_in_parallel_attn": 1, "bias": True},
         attention="sdpa"),
    Case("falcon", "all-kv-parallel-dynamic", {**FALCON, **DYNAMIC, "multi_query": False, "bias": True}, n_prompt=64,
         attention="sdpa"),
    Case("gpt_bigcode", "one-kv",        GPT2),
    Case("gpt_bigcode", "all-kv-untied", {**GPT2, "multi_query": False, "tie_word_embeddings": False}),
    Case("ctrl", "tied", CTRL),
    Case("xglm", "tied",           XGLM, adjust=embed_padding),
    Case("xglm", "blank-position", {**XGLM, "pad_token_id": 5}, adjust=embed_padding),
    Case("biogpt", "tied", SIZES),
    Case("persimmon", "half-rotary", {**SIZES, "layer_norm_eps": 0.02}),
    Case("persimmon", "linear-gelu", {**SIZES, **LINEAR, "hidden_act": "gelu", "num_attention_heads": 2}),
]
# fmt: on
