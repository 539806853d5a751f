"""Compiled programs become models that compute the same."""

import numpy as np
import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.compat import tracr
from tests.close import assert_close
from tests.compat.compiled import LABELS, compiled, stream


@pytest.mark.parametrize("causal", [True, False])
def test_the_same_logits(causal: bool) -> None:
    theirs = compiled(causal)
    ours = HookedTransformer(tracr.make_tracr_transformer_bridge_config(theirs))
    ours.load_state_dict(tracr.make_tracr_transformer_bridge_state_dict(theirs))
    tokens = [2, 0, 1, 1, 3]
    left = stream(theirs, tokens)
    expected = np.stack([left[:, LABELS.index("out:y")], left[:, LABELS.index("out:x")]], 1)
    logits = ours(torch.tensor([tokens]))[0].detach().numpy()
    assert_close(logits, expected)
    assert np.abs(expected - stream(compiled(not causal), tokens)[:, [6, 5]]).max() > 0.1


def test_output_of_a_program() -> None:
    theirs = compiled()
    assert tracr.infer_tracr_output_label(theirs) == "out"
    unembed = tracr.make_tracr_categorical_unembed(theirs)
    assert unembed.dtype == np.float32
    assert np.argwhere(unembed).tolist() == [[5, 1], [6, 0]]
    theirs.residual_labels = [
        label.replace("indices", "also").replace(":0", ":x").replace(":1", ":y") for label in LABELS
    ]
    with pytest.raises(ValueError, match=r"output_label=.*'also', 'out'"):
        tracr.infer_tracr_output_label(theirs)
    assert np.argwhere(tracr.make_tracr_categorical_unembed(theirs, "also")).tolist() == [[3, 1], [4, 0]]
    with pytest.raises(ValueError, match="no direction tokens:y, tokens:x"):
        tracr.make_tracr_categorical_unembed(theirs, "tokens")


def test_unsupported_programs_are_refused() -> None:
    normed = compiled()
    normed.model_config.layer_norm = True
    with pytest.raises(ValueError, match="has norms"):
        tracr.make_tracr_transformer_bridge_state_dict(normed)
    numerical = compiled()
    numerical.output_encoder = None
    with pytest.raises(ValueError, match="numerical"):
        tracr.make_tracr_transformer_bridge_config(numerical)
