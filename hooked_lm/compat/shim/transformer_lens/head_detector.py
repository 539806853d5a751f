"""Heads whose attention matches a pattern."""

from hooked_lm.analysis.reading.head_detector import (
    HEAD_NAMES,
    compute_head_attention_similarity_score,
    detect_head,
    get_duplicate_token_head_detection_pattern,
    get_induction_head_detection_pattern,
    get_previous_token_head_detection_pattern,
)
from hooked_lm.compat.types import ErrorMeasure, HeadName, LayerHeadTuple, LayerToHead, get_supported_heads
from hooked_lm.models.caches.activation_cache import ActivationCache
from hooked_lm.pretrained import HookedTransformer
from transformer_lens.utils import is_lower_triangular, is_square
