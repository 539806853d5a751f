"""The families whose checkpoints become a HookedEncoderDecoder, one file per `model_type`."""
