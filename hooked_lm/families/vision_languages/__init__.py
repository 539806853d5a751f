"""The families whose checkpoints become a HookedVisionLanguage, one file per `model_type`."""
