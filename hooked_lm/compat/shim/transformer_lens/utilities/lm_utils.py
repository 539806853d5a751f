"""Loss and accuracy of language models."""

from hooked_lm.models.loss import lm_accuracy, lm_cross_entropy_loss
