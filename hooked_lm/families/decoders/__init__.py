"""The families whose checkpoints become a HookedTransformer, one file per `model_type`."""
