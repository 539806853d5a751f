"""The flat config of a decoder, the face of its tree."""

from dataclasses import InitVar, dataclass, field, fields
from typing import Any, ClassVar

import torch

from hooked_lm.components.manner import FUSED
from hooked_lm.models.config import defaults
from hooked_lm.models.config.flat import build_tree, check_sizes, flat_names
from hooked_lm.models.config.settled import SettledConfig, remembers
from hooked_lm.models.config.tree import DecoderConfig

__all__ = ["DecoderConfig", "HookedTransformerConfig"]

# Fields of configs written by other libraries that mean nothing here, and the one value that may be given (...: any).
ELSEWHERE: dict[str, Any] = {
    "load_in_4bit": False,
    "quantization_method": None,
    "use_logn_attn": False,
    "use_dynamic_ntk_rope": False,
    "train_seq_length": ...,
    "uses_rms_norm": ...,
    "layer_norm_folding": ...,
}


@remembers
@dataclass
class HookedTransformerConfig(SettledConfig):
    """A decoder in flat names.

    Made by hand it describes a model to build: `HookedTransformerConfig(n_layers=2, d_model=64, n_heads=4, n_ctx=128,
    d_vocab=1000, act_fn="gelu")`. On a loaded model the same names answer for its tree, the first block speaking for
    all where blocks differ. The flags `use_attn_result`, `use_split_qkv_input`, `use_attn_in`, `use_hook_mlp_in` and
    `use_hook_tokens` say whether a cache without a filter holds those sites. With `fused_attention` "never" attention and
    norms are computed in steps even if nothing listens: the bits of a result do not depend on what is recorded.
    `attn_scale` is what scores are divided
    by; a soft cap of -1 is none. With `num_experts` the MLPs are mixtures of experts, `experts_per_token` of them for
    each token; `rotary_base_local` is the base of local layers, and positions of the others are divided by
    `rotary_scaling_factor`. `initializer_range` is the deviation of new weights if `init_mode` is "gpt2" (0.8 / sqrt(d_model)
    unless given), otherwise a gain (1). Sizes that follow from others may be left out.

    A field that is set (here, by `dataclasses.replace` or by assignment) takes effect: what follows from it follows anew,
    unless it was set too, and so does the tree. Raises ValueError for values that contradict each other, for one that would
    have no effect, and for what cannot be built.

    >>> from dataclasses import replace
    >>> cfg = HookedTransformerConfig(n_layers=2, d_model=64, n_heads=4, n_ctx=128, d_vocab=1000, act_fn="gelu")
    >>> cfg.d_mlp, replace(cfg, d_model=32).d_mlp, replace(cfg, d_model=32, d_mlp=256).d_mlp
    (256, 128, 256)
    """

    READ_AT_EVERY_RUN: ClassVar[frozenset[str]] = frozenset(("output_logits_soft_cap",))

    origin: InitVar[Any] = field(default=None, kw_only=True)  # stands first: see `remembers`
    n_layers: int
    d_model: int
    n_ctx: int
    d_head: int = -1
    model_name: str = "custom"
    n_heads: int = -1
    d_mlp: int | None = None
    act_fn: str | None = None
    d_vocab: int = -1
    eps: float = 1e-5
    use_attn_result: bool = False
    use_attn_scale: bool = True
    attn_scale: float | int = -1.0
    use_split_qkv_input: bool = False
    use_hook_mlp_in: bool = False
    use_attn_in: bool = False
    use_hook_tokens: bool = False
    fused_attention: str = field(default_factory=lambda: defaults.fused_attention)
    ungroup_grouped_query_attention: bool = False
    use_local_attn: bool = False
    window_size: int | None = None
    attn_types: list[str] | None = None
    original_architecture: str | None = None
    from_checkpoint: bool = False
    checkpoint_index: int | None = None
    checkpoint_label_type: str | None = None
    checkpoint_value: int | None = None
    tokenizer_name: str | None = None
    tokenizer_prepends_bos: bool | None = None
    default_prepend_bos: bool = True
    default_padding_side: str = "right"
    init_mode: str = "gpt2"
    init_weights: bool = True
    initializer_range: float | int = -1.0
    seed: int | None = None
    normalization_type: str | None = "LN"
    final_rms: bool = False
    use_normalization_before_and_after: bool = False
    post_embedding_ln: bool = False
    device: Any = None
    n_devices: int = 1
    dtype: Any = torch.float32
    attention_dir: str = "causal"
    attn_only: bool = False
    parallel_attn_mlp: bool = False
    gated_mlp: bool = False
    scale_attn_by_inverse_layer_idx: bool = False
    attn_scores_soft_cap: float | int = -1.0
    output_logits_soft_cap: float | int = -1.0
    use_qk_norm: bool = False
    use_attention_sinks: bool = False
    clip_qkv: float | int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    norm_topk_prob: bool = False
    positional_embedding_type: str = "standard"
    rotary_dim: int | None = None
    rotary_base: float | int = 10000.0
    rotary_base_local: float | int | None = None
    rotary_scaling_factor: float | int = 1.0
    rotary_adjacent_pairs: bool = False
    use_NTK_by_parts_rope: bool = False
    NTK_by_parts_low_freq_factor: float | int = 1.0
    NTK_by_parts_high_freq_factor: float | int = 4.0
    NTK_by_parts_factor: float | int = 8.0
    NTK_original_ctx_len: int = 8192
    use_yarn_rope: bool = False
    yarn_factor: float | int = 1.0
    yarn_attention_factor: float | int | None = None
    yarn_beta_fast: float | int = 32.0
    yarn_beta_slow: float | int = 1.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_truncate: bool = True
    yarn_global_attn_only: bool = False
    relative_attention_num_buckets: int | None = None  # of encoder-decoders
    relative_attention_max_distance: int | None = None
    n_key_value_heads: int | None = None
    d_vocab_out: int = -1
    tie_word_embeddings: bool = False
    decoder_start_token_id: int | None = None
    eos_token_id: int | list[int] | None = None  # what ends a text, where the checkpoint says so
    n_params: int | None = None
    trust_remote_code: bool = False
    processed: tuple[str, ...] = ()  # the rewrites of weights that were done, in order
    tree: DecoderConfig | None = field(default=None, repr=False)

    @staticmethod
    def build(c: Any) -> Any:
        """The decoder of flat names; None as long as they are not enough for one."""
        needs_act_fn = c.act_fn is None and not c.attn_only and c.n_layers > 0
        is_decoder = c.positional_embedding_type != "relative_positional_bias"
        return build_tree(c) if c.d_vocab >= 0 and is_decoder and not needs_act_fn else None

    @staticmethod
    def names_of(tree: Any) -> dict[str, Any]:
        """What the flat names say of a tree."""
        return flat_names(tree)

    @staticmethod
    def check(c: Any) -> None:
        """Raises ValueError for flat names that mean nothing."""
        check_sizes(c)

    def __post_init__(self, origin: Any) -> None:
        for name, allowed in {"default_padding_side": ("left", "right"), "fused_attention": FUSED}.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")

    def check_tree(self) -> None:
        """Raises ValueError unless a model can be built."""
        self.settle()
        if self.tree is not None:
            return
        if self.d_vocab == -1:
            raise ValueError("d_vocab is missing: give it in the config, or give a tokenizer")
        if self.act_fn is None and not self.attn_only:
            raise ValueError("a model with MLPs needs act_fn, e.g. 'gelu' or 'relu'")
        raise ValueError(
            f"positional_embedding_type '{self.positional_embedding_type}' is that of encoder-decoders: build a "
            "HookedEncoderDecoder from this config"
        )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> "HookedTransformerConfig":
        """From flat names; raises TypeError for a name that is none of them.

        Names that configs of other libraries have besides are passed over where they say what holds here anyway; ValueError if
        one of them says something else.
        """
        known = {f.name for f in fields(cls)}
        besides = {name: value for name, value in config_dict.items() if name not in known}
        if unknown := besides.keys() - ELSEWHERE.keys():
            raise TypeError(f"unknown config fields {sorted(unknown)}; known are {sorted(known)}")
        for name, value in besides.items():
            if ELSEWHERE[name] not in (value, ...):
                raise ValueError(f"{name}={value!r} is not supported: it must be {ELSEWHERE[name]!r} or left out")
        return cls(**{name: value for name, value in config_dict.items() if name in known})

    @classmethod
    def unwrap(cls, config: "HookedTransformerConfig | dict[str, Any]") -> "HookedTransformerConfig":
        """A config, or the config of a dict."""
        return cls.from_dict(config) if isinstance(config, dict) else config

    def to_dict(self) -> dict[str, Any]:
        """The flat names and the tree; `from_dict` reads it back."""
        return dict(vars(self))


# `dataclasses.replace` reads the fields of the config that it changes, this one first.
HookedTransformerConfig.origin = SettledConfig.origin  # type: ignore[method-assign]
