"""How well next tokens are predicted."""

from hooked_lm.models.loss import lm_accuracy, lm_cross_entropy_loss
