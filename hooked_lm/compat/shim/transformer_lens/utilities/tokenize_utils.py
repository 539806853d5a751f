"""Tokens."""

from hooked_lm.compat.downloads import keep_single_column
from hooked_lm.compat.tensors import get_cumsum_along_dim
from hooked_lm.compat.tokenizers import get_input_with_manually_prepended_bos, get_tokenizer_with_bos
from hooked_lm.utils import get_attention_mask, get_tokens_with_bos_removed, tokenize_and_concatenate
