"""Small models of every kind, and a tokenizer of words, for the tests of this folder."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hooked_lm import HookedTransformer, HookedTransformerConfig

N_LAYERS, N_CTX, D_VOCAB = 3, 24, 50
ROTARY = {"positional_embedding_type": "rotary", "normalization_type": "RMS"}
KINDS: dict[str, dict[str, Any]] = {
    "standard": {"act_fn": "gelu"},
    "tied": {"act_fn": "gelu_new", "tie_word_embeddings": True},
    "attn_only": {"attn_only": True, "normalization_type": None},
    "rotary": {"act_fn": "silu", "gated_mlp": True, "n_key_value_heads": 2, "use_qk_norm": True, **ROTARY},
    "adjacent": {"act_fn": "relu", "rotary_adjacent_pairs": True, "rotary_dim": 4, "rotary_base": 50.0, **ROTARY},
    "parallel": {"act_fn": "relu", "parallel_attn_mlp": True, "attn_scores_soft_cap": 2.0, "output_logits_soft_cap": 3.0},
    "windowed": {"act_fn": "gelu", "use_local_attn": True, "window_size": 3, "attn_types": ["local", "global", "local"]},
    "post_norm": {"act_fn": "gelu", "use_normalization_before_and_after": True, "n_key_value_heads": 1, **ROTARY},
    "solu": {"act_fn": "solu_ln", "normalization_type": "LNPre", "final_rms": True},
    "shortformer": {"act_fn": "gelu", "positional_embedding_type": "shortformer"},
    "sinks": {"act_fn": "gelu", "use_attention_sinks": True, "clip_qkv": 1.5, "post_embedding_ln": True},
    "alibi": {"act_fn": "relu", "positional_embedding_type": "alibi"},
    "no_positions": {"act_fn": "relu", "positional_embedding_type": "none"},
    "ntk": {"act_fn": "relu", "use_NTK_by_parts_rope": True, "NTK_original_ctx_len": 12, **ROTARY},
    "yarn": {"act_fn": "relu", "use_yarn_rope": True, "yarn_factor": 4.0, **ROTARY,
             "yarn_original_max_position_embeddings": 32},
    "local_base": {"act_fn": "gelu", "use_local_attn": True, "window_size": 3, "rotary_base_local": 20.0, **ROTARY,
                   "attn_types": ["local", "global", "local"]},
    "inverse_scale": {"act_fn": "gelu", "scale_attn_by_inverse_layer_idx": True, "use_attn_scale": False},
}  # fmt: skip
BOTH_WAYS = {"act_fn": "gelu", "attention_dir": "bidirectional"}


def toy(kind: str | dict[str, Any] = "standard", tokenizer: Any = None, **fields: Any) -> HookedTransformer:
    """A model with weights large enough for everything in it to matter."""
    sizes = {"n_layers": N_LAYERS, "d_model": 32, "n_heads": 4, "n_ctx": N_CTX, "d_vocab": D_VOCAB, "seed": 1}
    chosen = KINDS[kind] if isinstance(kind, str) else kind
    cfg = HookedTransformerConfig(**{**sizes, "initializer_range": 0.3, "device": "cpu", **chosen, **fields})
    model = HookedTransformer(cfg, tokenizer=tokenizer)
    with torch.no_grad():
        for i, (name, weight) in enumerate(model.named_parameters()):
            if ".W_" not in name:  # biases and norms too
                weight += 0.2 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(i))
    return model.requires_grad_(False)


def ids(batch: int = 3, n_pos: int = 10, seed: int = 0) -> Tensor:
    return torch.randint(D_VOCAB, (batch, n_pos), generator=torch.Generator().manual_seed(seed))


def padded(rows: list[Tensor], side: str, filler: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of unequal length as a batch, and which of it is real."""
    width = max(map(len, rows))
    tokens = torch.full((len(rows), width), filler)
    mask = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        span = slice(width - len(row), None) if side == "left" else slice(len(row))
        tokens[i, span], mask[i, span] = row, 1
    return tokens, mask


def words() -> PreTrainedTokenizerFast:
    """A tokenizer of `w3` ... `w49`; BOS, EOS and padding are one token, as GPT-2's are."""
    vocab = {"<s>": 0, "<unk>": 1, "<other>": 2, **{f"w{i}": i for i in range(3, D_VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>", pad_token="<s>")
