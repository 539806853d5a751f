"""Metrics of causal experiments: one number per prompt, computed from the logits of a run. See `hooked_lm.engine.metrics`."""

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

__all__ = [
    "Metric", "accuracy", "kl_divergence", "log_probability", "logit", "logit_difference", "loss", "probability", "rank",
]  # fmt: skip
