"""The families whose checkpoints become a HookedEncoder, one file per `model_type`."""
