"""The families whose checkpoints become a HookedVisionEncoder, one file per `model_type`."""
