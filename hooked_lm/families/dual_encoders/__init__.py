"""The families whose checkpoints become a HookedDualEncoder, one file per `model_type`."""
