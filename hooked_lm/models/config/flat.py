"""The table of flat names of models of text: the config fields that users set and read, such as `d_model`.

Each line states a name's type, meaning, paths in the tree of component configs, default, and the names that it is derived
from while it is not set. `row.py` explains the columns, `docs/config.md` prints them. Values are read from the tree only
through these rows, so that names and tree agree; `flat_config.py` handles the setting of names. The names of models that read
images are in `flat_vision.py`.
"""

from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import torch

from hooked_lm.components.blocks.parallel import ParallelBlock, SharedNormBlock
from hooked_lm.components.norms.norm import RMSNorm
from hooked_lm.components.run_settings import FUSED
from hooked_lm.models.config import defaults, read
from hooked_lm.models.config.flat_config import FlatConfig, remembers
from hooked_lm.models.config.row import DECODER, DUAL_ENCODER, ENCODER, ENCODER_DECODER, OF_TEXT, fact, of_tree
from hooked_lm.models.config.tree import DecoderConfig, EncoderConfig, EncoderDecoderConfig

ROTARY, LLAMA3, YARN, LINEAR = (
    f"blocks.*.attn.rotary{part}"
    for part in ("", ".scaling[Llama3Scaling]", ".scaling[YarnScaling]", ".scaling[LinearScaling]")
)
NTK_SWITCHES = {"unless": ("use_NTK_by_parts_rope", "positional_embedding_type"), "kinds": (DECODER,)}
YARN_SWITCHES = {"unless": ("use_yarn_rope", "positional_embedding_type"), "kinds": (DECODER,)}
ROTARY_SWITCHES = {"unless": ("positional_embedding_type",), "kinds": (DECODER, ENCODER)}
BUCKETS = ("encoder.rel_pos_bias", "encoder.blocks.*.attn.position_bias[RelativeBias]")


@remembers
@dataclass(repr=False)
class HookedTransformerConfig(FlatConfig):
    """The config of a decoder, as flat names.

    `HookedTransformerConfig(n_layers=2, d_model=64, n_heads=4, n_ctx=128, d_vocab=1000, act_fn="gelu")` describes a model to
    build. On a loaded model the names describe its tree; if blocks differ, they describe the first one. Sizes that can be
    derived from others may be left out.

    Setting a field (here, by `dataclasses.replace` or by assignment) updates the tree and all fields derived from it, except
    those that were set explicitly. Raises ValueError for values that contradict each other, that would have no effect, or
    that no model can be built from; after an assignment the error may come only when a model is built.

    >>> from dataclasses import replace
    >>> cfg = HookedTransformerConfig(
    ...     n_layers=2, d_model=64, n_heads=4, n_ctx=128, d_vocab=1000, act_fn="gelu"
    ... )
    >>> cfg.d_mlp, replace(cfg, d_model=32).d_mlp, replace(cfg, d_model=32, d_mlp=256).d_mlp
    (256, 128, 256)
    """

    kind: ClassVar[str] = DECODER

    # fmt: off
    origin: InitVar[Any] = field(default=None, kw_only=True)  # must be the first field: see `remembers`
    n_layers: int = of_tree("number of layers; of an encoder-decoder, of its encoder",
                            "encoder.blocks", "blocks", read=len, least=0)
    d_model: int = of_tree("width of the residual stream", "embed.d_model", least=1)
    n_ctx: int = of_tree("longest input, in tokens", "n_ctx", least=1)
    d_head: int = of_tree("width of a head", "blocks.*.attn.d_head", default=-1, least=1,
                          follows=lambda d_model, n_heads: d_model // n_heads)
    model_name: str = fact("name of the model", "custom")
    n_heads: int = of_tree("query heads of a layer", "blocks.*.attn.n_heads", default=-1, least=1,
                           follows=lambda d_model, d_head: d_model // d_head)
    d_mlp: int | None = of_tree("width of an MLP, or of an expert", "blocks.*.mlp", default=None, unless=("attn_only",),
                                read=lambda mlp: read.one_mlp(mlp).d_mlp,
                                follows=lambda d_model, attn_only: None if attn_only else 4 * d_model)
    act_fn: str | None = of_tree("activation of the MLPs, such as 'gelu'", "blocks.*.mlp", default=None, read=read.act_fn,
                                 unless=("attn_only",))
    d_vocab: int = of_tree("size of the vocabulary; -1: that of the tokenizer", "embed.d_vocab", default=-1, least=0,
                          kinds=(*OF_TEXT, DUAL_ENCODER))
    eps: float = of_tree("constant that norms add to the variance", "blocks.*.ln1.eps", "blocks.*.ln1_post.eps", "ln_final.eps",
                         default=1e-5, unless=("normalization_type",))
    use_attn_result: bool = fact("a cache without a filter has `hook_result`", False)
    use_attn_scale: bool = of_tree("whether scores are divided by `attn_scale`", "blocks.*.attn", default=True,
                                   read=lambda attn: read.scale_of(attn) != 1.0 or attn.d_head == 1)
    attn_scale: float | int = of_tree("what scores are divided by", "blocks.*.attn", default=-1.0,
                                      read=lambda attn: 1 / read.scale_of(attn), unless=("use_attn_scale",),
                                      follows=lambda d_head, use_attn_scale: d_head**0.5 if use_attn_scale else 1.0)
    use_split_qkv_input: bool = fact("a cache without a filter has `hook_q_input`, `hook_k_input`, `hook_v_input`", False)
    use_hook_mlp_in: bool = fact("a cache without a filter has `hook_mlp_in`", False)
    use_attn_in: bool = fact("a cache without a filter has `hook_attn_in`", False)
    use_hook_tokens: bool = fact("a cache without a filter has `hook_tokens`", False)
    fused_attention: str = fact("'auto': fused kernels where nothing listens inside; 'never': always in steps, so that no bit "
                                "of a result depends on what listens", factory=lambda: defaults.fused_attention, choices=FUSED)
    ungroup_grouped_query_attention: bool = fact("keys and values are shown for each query head", False)
    use_local_attn: bool = of_tree("whether queries see a window of keys only, in layers that `attn_types` calls local",
                                   "blocks.*.attn.window", default=False, reads_all=True,
                                   read=any, unless=("attn_types",), kinds=(DECODER, ENCODER))
    window_size: int | None = of_tree("positions that a query of a local layer sees", "blocks.*.attn.window", default=None,
                                      reads_all=True, read=lambda windows: next(filter(None, windows), None),
                                      unless=("use_local_attn",), kinds=(DECODER, ENCODER))
    attn_types: list[str] | None = of_tree("'local' or 'global' for each layer; None: all are alike", "blocks", default=None,
                                           read=read.layer_types, unless=("use_local_attn",), kinds=(DECODER, ENCODER),
                                           spelling=lambda value, c: None if "local" not in (value or ())[: c.n_layers]
                                           else list(value[: c.n_layers]))
    original_architecture: str | None = fact("architecture that the checkpoint names", None)
    from_checkpoint: bool = fact("whether the weights are those of a step of training, not the final ones", False)
    checkpoint_index: int | None = fact("index of that step among the ones that were kept", None)
    checkpoint_label_type: str | None = fact("what `checkpoint_value` counts: 'step' or 'token'", None)
    checkpoint_value: int | None = fact("steps or tokens of training up to that step", None)
    tokenizer_name: str | None = fact("name of the tokenizer to load", None)
    tokenizer_prepends_bos: bool | None = fact("whether the tokenizer puts a BOS token in front of texts by itself", None)
    default_prepend_bos: bool = fact("whether texts start with a BOS token", True)
    default_padding_side: str | None = fact("where shorter texts are padded; None: on the side of the tokenizer",
                                            factory=lambda: defaults.padding_side, choices=("left", "right", None))
    init_mode: str = fact("how new weights are drawn: 'gpt2', 'xavier_uniform', 'xavier_normal', 'kaiming_uniform', "
                          "'kaiming_normal', 'muP'", "gpt2")
    init_weights: bool = fact("whether a new model gets random weights", True)
    initializer_range: float | int = fact("deviation of new weights if `init_mode` is 'gpt2', otherwise a gain", -1.0,
                                          follows=lambda d_model, init_mode: 0.8 / d_model**0.5 if init_mode == "gpt2" else 1.0)
    seed: int | None = fact("seed of new weights, for a generator of their own", None)
    normalization_type: str | None = of_tree("None, 'LN', 'RMS', or without weights 'LNPre', 'RMSPre'",
                                             "blocks.*.ln1", "ln_final", default="LN", reads_all=True,
                                             read=lambda norms: read.norm_type(next(filter(None, norms), None)))
    final_rms: bool = of_tree("whether the final norm is an RMSNorm", "ln_final", default=False, kinds=(DECODER,),
                              read=lambda norm: isinstance(norm, RMSNorm.Config),
                              spelling=lambda value, c: value or (c.normalization_type or "").startswith("RMS"))
    use_normalization_before_and_after: bool = of_tree("whether what a layer adds is normalised too", "blocks.*.ln1_post",
                                                       default=False, read=lambda norm: norm is not None,
                                                       unless=("normalization_type",), kinds=(DECODER,))
    post_embedding_ln: bool = of_tree("whether embedded tokens are normalised", "embed.norm", default=False, kinds=(DECODER,),
                                      read=lambda norm: norm is not None, unless=("normalization_type",))
    device: Any = fact("device of the weights; None: a GPU if there is one", None)
    load_in_4bit: bool = fact("always False; `model.quantize` gives weights fewer bits", False, choices=(False,))
    n_devices: int = fact("always 1; a model on several has `model.device_map`", 1, choices=(1,))
    dtype: Any = fact("dtype of the weights, or its name, such as 'bfloat16'", torch.float32)
    attention_dir: str = of_tree("'causal' or 'bidirectional'; of an encoder-decoder, that of the encoder",
                                 "blocks.*.attn.causal", default="causal", choices=("causal", "bidirectional"),
                                 read=lambda causal: "causal" if causal else "bidirectional")
    attn_only: bool = of_tree("whether layers have no MLP", "blocks.*", default=False, kinds=(DECODER,), reads_all=True,
                              read=lambda blocks: not any(hasattr(block, "mlp") for block in blocks))
    parallel_attn_mlp: bool = of_tree("whether attention and MLP of a layer have the same input", "blocks.*", default=False,
                                      read=lambda block: isinstance(block, ParallelBlock.Config | SharedNormBlock.Config),
                                      unless=("attn_only",), kinds=(DECODER,))
    gated_mlp: bool = of_tree("whether MLPs multiply two projections; with `num_experts` always", "blocks.*.mlp", default=False,
                              read=read.is_gated, unless=("attn_only",))
    scale_attn_by_inverse_layer_idx: bool = of_tree("whether scores of layer n are also divided by n + 1", "blocks",
                                                    default=False, read=read.scales_by_layer, kinds=(DECODER,),
                                                    spelling=lambda value, c: value and c.n_layers > 1)
    attn_scores_soft_cap: float | int = of_tree("scores become cap * tanh(scores / cap); -1: no cap", "blocks.*.attn.soft_cap",
                                                default=-1.0, read=lambda cap: cap or -1.0, kinds=(DECODER,),
                                                spelling=lambda value, c: max(value, 0.0))
    output_logits_soft_cap: float | int = of_tree("logits become cap * tanh(logits / cap); -1: no cap",
                                                  "unembed.soft_cap", default=-1.0, live=True,
                                                  read=lambda cap: cap or -1.0, kinds=(DECODER,),
                                                  spelling=lambda value, c: max(value, 0.0))
    use_qk_norm: bool = of_tree("whether queries and keys are normalised", "blocks.*.attn.qk_norm", default=False,
                                read=lambda norm: norm is not None, kinds=(DECODER,))
    use_attention_sinks: bool = of_tree("whether each head has an attention sink: a learned score without a value",
                                        "blocks.*.attn.sinks",
                                        default=False, kinds=(DECODER,))
    clip_qkv: float | int | None = of_tree("bound that entries of queries, keys and values are clipped to; None: none",
                                           "blocks.*.attn.clip",
                                           default=None, kinds=(DECODER,))
    num_experts: int | None = of_tree("experts of a mixture; None: MLPs are plain", "blocks.*.mlp.n_experts", default=None,
                                      unless=("attn_only",), kinds=(DECODER,))
    experts_per_token: int | None = of_tree("experts that each token is sent to", "blocks.*.mlp.top_k", default=None,
                                            unless=("attn_only",), kinds=(DECODER,))
    norm_topk_prob: bool = of_tree("whether the weights of the chosen experts sum to 1", "blocks.*.mlp.router.renormalize",
                                   default=False, unless=("num_experts", "attn_only"), kinds=(DECODER,))
    positional_embedding_type: str = of_tree("'standard', 'rotary', 'shortformer', 'alibi', 'none'; of encoder-decoders "
                                             "'relative_positional_bias'; read from trees also 'sinusoidal'", "",
                                             default="standard", read=read.position_type)
    rotary_dim: int | None = of_tree("entries of a head that are rotated", f"{ROTARY}.dim", default=None, **ROTARY_SWITCHES,
                                     follows=lambda d_head, positional_embedding_type:
                                     d_head if positional_embedding_type == "rotary" else None)
    rotary_base: float | int = of_tree("base of the rotary angles", "blocks.*.attn", default=10000.0, reads_all=True,
                                       read=read.rotary_base, **ROTARY_SWITCHES)
    rotary_base_local: float | int | None = of_tree("base of the angles in local layers; None: that of the others",
                                                    "blocks.*.attn", default=None,
                                                    reads_all=True, read=read.rotary_base_local, kinds=(DECODER,),
                                                    unless=("use_local_attn", "positional_embedding_type"),
                                                    spelling=lambda value, c: c.rotary_base if value is None else value)
    rotary_scaling_factor: float | int = of_tree("what positions of layers without a window are divided by", f"{LINEAR}.factor",
                                                 default=1.0, **ROTARY_SWITCHES)
    rotary_adjacent_pairs: bool = of_tree("whether neighbouring entries are rotated together, instead of the halves",
                                          f"{ROTARY}.adjacent_pairs", default=False, **ROTARY_SWITCHES)
    use_NTK_by_parts_rope: bool = of_tree("whether angles are stretched as in Llama 3", LLAMA3, default=False,
                                          read=bool, **ROTARY_SWITCHES)
    NTK_by_parts_low_freq_factor: float | int = of_tree("wavelengths above context / this are stretched",
                                                        f"{LLAMA3}.low_freq_factor", default=1.0, **NTK_SWITCHES)
    NTK_by_parts_high_freq_factor: float | int = of_tree("wavelengths below context / this are kept",
                                                         f"{LLAMA3}.high_freq_factor", default=4.0, **NTK_SWITCHES)
    NTK_by_parts_factor: float | int = of_tree("factor by which long wavelengths are stretched",
                                               f"{LLAMA3}.factor", default=8.0, **NTK_SWITCHES)
    NTK_original_ctx_len: int = of_tree("context length in training, in tokens", f"{LLAMA3}.trained_n_ctx", default=8192,
                                        **NTK_SWITCHES)
    use_yarn_rope: bool = of_tree("whether angles are stretched by YaRN", YARN, default=False, read=bool, **ROTARY_SWITCHES)
    yarn_factor: float | int = of_tree("factor by which YaRN stretches wavelengths",
                                       f"{YARN}.factor", default=1.0, **YARN_SWITCHES)
    yarn_attention_factor: float | int | None = of_tree("what queries and keys are multiplied by; None: from the factor",
                                                        f"{YARN}.attention_factor", default=None, **YARN_SWITCHES)
    yarn_beta_fast: float | int = of_tree("rotations in the trained context from which angles are kept", f"{YARN}.beta_fast",
                                          default=32.0, **YARN_SWITCHES)
    yarn_beta_slow: float | int = of_tree("rotations up to which angles are stretched fully", f"{YARN}.beta_slow", default=1.0,
                                          **YARN_SWITCHES)
    yarn_original_max_position_embeddings: int = of_tree("context length in training, in tokens", f"{YARN}.trained_n_ctx",
                                                         default=4096, **YARN_SWITCHES)
    yarn_truncate: bool = of_tree("whether the bounds of the ramp are rounded to whole dimensions", f"{YARN}.truncate",
                                  default=True, **YARN_SWITCHES)
    yarn_global_attn_only: bool = of_tree("whether layers with a window are left as they are", "blocks.*.attn", default=False,
                                          reads_all=True, read=read.stretches_full_only, unless=("use_local_attn",),
                                          kinds=(DECODER,))
    relative_attention_num_buckets: int | None = of_tree("number of buckets of distances",
                                                         *(f"{path}.n_buckets" for path in BUCKETS),
                                                         default=None, unless=("positional_embedding_type",),
                                                         kinds=(ENCODER_DECODER,))
    relative_attention_max_distance: int | None = of_tree("distances from here share a bucket",
                                                          *(f"{path}.max_distance" for path in BUCKETS), default=None,
                                                          unless=("positional_embedding_type",), kinds=(ENCODER_DECODER,))
    n_key_value_heads: int | None = of_tree("heads of keys and values; None: as many as query heads", "blocks.*.attn",
                                            default=None, kinds=(DECODER,),
                                            read=lambda attn: attn.n_kv if attn.n_kv != attn.n_heads else None,
                                            spelling=lambda value, c: value or c.n_heads)
    d_vocab_out: int = of_tree("number of logits", "unembed.d_vocab", default=-1, follows=lambda d_vocab: d_vocab,
                              kinds=OF_TEXT)
    tie_word_embeddings: bool = of_tree("whether the unembedding is the token embedding", "", default=False, read=read.is_tied,
                                      kinds=OF_TEXT)
    decoder_start_token_id: int | None = fact("the token that a decoder's input starts with, of encoder-decoders", None)
    eos_token_id: int | list[int] | None = fact("the tokens that end a text, where the checkpoint says so", None)
    n_params: int | None = fact("entries of the layers' matrices, without biases, norms and embeddings", None, "",
                                read=read.n_params, follows=read.n_params_from_sizes)
    trust_remote_code: bool = fact("whether code of the checkpoint may run; it never does", False)
    left_out: dict[str, int] | None = fact("modules of a composite checkpoint that were not loaded, and how many tensors each "
                                           "has; None: the checkpoint is not of a composite", None)
    dequantized_from: str | None = fact("how the weights were quantised in the checkpoint; None: they were not", None)
    kept_quantized: bool = fact("whether quantised weights are in memory as the checkpoint has them", False)
    processed: tuple[str, ...] = fact("the rewrites of weights that were done, in order", ())
    # fmt: on
    tree: DecoderConfig | None = field(default=None, repr=False)


@remembers
@dataclass(repr=False)
class HookedEncoderConfig(HookedTransformerConfig):
    """The config of an encoder, as flat names.

    `HookedEncoderConfig(n_layers=2, d_model=64, n_heads=4, n_ctx=128, d_vocab=1000, act_fn="gelu")` describes a BERT (Devlin
    et al. 2018, arXiv:1810.04805) to build, with the heads for masked tokens and next sentences.
    """

    kind: ClassVar[str] = ENCODER

    # fmt: off
    n_token_types: int = of_tree("segments (first text, second text) that have an embedding; 0: none", "embed.n_types", default=2,
                                 kinds=(ENCODER,))
    # fmt: on
    attention_dir: str = "bidirectional"
    eps: float = 1e-12
    tie_word_embeddings: bool = True
    tree: EncoderConfig | None = field(default=None, repr=False)  # type: ignore[assignment]

    @classmethod
    def adopted(cls, config: FlatConfig) -> FlatConfig:
        """An encoder config unchanged; the flat names of a decoder config as one."""
        is_other = isinstance(config, HookedTransformerConfig) and not isinstance(config, cls)
        return cls(**config.flat_values() | {"attention_dir": "bidirectional"}) if is_other else config


@remembers
@dataclass(repr=False)
class HookedEncoderDecoderConfig(HookedTransformerConfig):
    """The config of an encoder-decoder, as flat names. If encoder and decoder differ, shared names describe the encoder.

    `HookedEncoderDecoderConfig(n_layers=2, d_model=64, n_heads=4, n_ctx=128, d_vocab=1000, act_fn="relu")` describes a T5
    (Raffel et al. 2019, arXiv:1910.10683) to build.
    """

    kind: ClassVar[str] = ENCODER_DECODER

    # fmt: off
    n_decoder_layers: int = of_tree("number of layers of the decoder",
                                    "decoder.blocks", default=-1, read=len, kinds=(ENCODER_DECODER,),
                                    follows=lambda n_layers: n_layers)
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    pad_token_id: int | None = fact("the token that pads shorter texts", None, kinds=(ENCODER_DECODER,))
    forced_bos_token_id: int | None = fact("the token that generated text starts with", None, kinds=(ENCODER_DECODER,))
    suppress_tokens: tuple[int, ...] = fact("tokens that are never generated", (), kinds=(ENCODER_DECODER,))
    # fmt: on
    attention_dir: str = "bidirectional"
    positional_embedding_type: str = read.RELATIVE
    normalization_type: str | None = "RMS"
    eps: float = 1e-6
    tie_word_embeddings: bool = True
    tree: EncoderDecoderConfig | None = field(default=None, repr=False)  # type: ignore[assignment]

    @classmethod
    def adopted(cls, config: FlatConfig) -> FlatConfig:
        """A decoder config with relative position biases as one of this class; other configs unchanged."""
        if isinstance(config, cls) or not isinstance(config, HookedTransformerConfig):
            return config
        if config.positional_embedding_type != read.RELATIVE:
            return config
        unset = {f"relative_attention_{name}" for name in ("num_buckets", "max_distance")}
        values = {n: v for n, v in config.flat_values().items() if not (n in unset and v is None)}
        return cls(**values | {"attention_dir": "bidirectional"})


# `dataclasses.replace` reads `origin` from the old config; the field's default had hidden the property.
HookedTransformerConfig.origin = FlatConfig.origin  # type: ignore[method-assign]
