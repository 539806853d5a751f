"""Models compiled by Tracr."""

from hooked_lm.compat.tracr import (
    infer_tracr_output_label,
    make_tracr_categorical_unembed,
    make_tracr_transformer_bridge_config,
    make_tracr_transformer_bridge_state_dict,
)
