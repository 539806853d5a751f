"""Metrics of causal experiments: one number per prompt, computed from the logits of a run.

A metric is any callable from logits [batch, pos, d_vocab] to numbers [batch]; a callable of your own may also return one number
for all prompts. The metrics of this module index the logits once and compute on the result, so a sweep can find out which
logits are needed and computes no others.

Shared arguments:
- answers: an id, or, with `model=`, a string that is one token; a list or a tensor [batch], with one for each prompt; a nested
  list or a tensor [batch, n], with several for each prompt (one row: the same for all prompts).
- positions: an int (-1 is the last position); a list, over which the mean is taken; or a tensor [batch] with one position for
  each prompt.

Numbers are computed in fp32 or wider. Calling a metric raises ValueError for logits that are not [batch, pos, d_vocab] or have
another number of prompts than the tensors given, and IndexError for positions and tokens that are out of range.
"""

from hooked_lm.engine.faithfulness import faithfulness
from hooked_lm.engine.metrics import (
    Metric,
    accuracy,
    kl_divergence,
    log_probability,
    logit,
    logit_difference,
    loss,
    probability,
    rank,
)
from hooked_lm.keywords import answer_keywords

__all__ = [
    "Metric", "accuracy", "faithfulness", "kl_divergence", "log_probability", "logit", "logit_difference", "loss", "probability",
    "rank",
]  # fmt: skip

answer_keywords(__name__)
