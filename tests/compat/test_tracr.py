"""Compiled programs become models that compute the same."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hooked_lm import HookedTransformer
from hooked_lm.analysis.circuits.acdc import acdc
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


def copying() -> Any:
    """The program that answers each token with the one at position 0, and carries an idle MLP."""
    labels = ["tokens:a", "tokens:b", "indices:0", "indices:1", "indices:2", "out:a", "out:b", "one"]
    zero = {"attn/query": (8, 2), "attn/key": (8, 2), "attn/value": (8, 2), "attn/linear": (2, 8)}
    zero |= {"mlp/linear_1": (8, 2), "mlp/linear_2": (2, 8)}
    params = {
        f"transformer/layer_0/{name}": {"w": np.zeros(size), "b": np.zeros(size[1])} for name, size in zero.items()
    }
    params["transformer/layer_0/attn/query"]["w"][7, 0] = params["transformer/layer_0/attn/key"]["w"][2, 0] = 10.0
    params["transformer/layer_0/attn/value"]["w"][[0, 1], [0, 1]] = 1.0
    params["transformer/layer_0/attn/linear"]["w"][[0, 1], [5, 6]] = 4.0
    params["token_embed"] = {"embeddings": np.eye(8)[:2]}
    params["pos_embed"] = {"embeddings": np.eye(8)[2:5] + np.eye(8)[7]}
    config = SimpleNamespace(num_layers=1, num_heads=1, key_size=2, mlp_hidden_size=2, causal=False, layer_norm=False)
    encoder = SimpleNamespace(encoding_map={"a": 0, "b": 1})
    return SimpleNamespace(params=params, model_config=config, residual_labels=labels, output_encoder=encoder)


def test_acdc_finds_the_circuit_of_a_program_where_the_answers_differ() -> None:
    """Where they do not, no edge matters to the last, and the search says so."""
    theirs = copying()
    model = HookedTransformer(tracr.make_tracr_transformer_bridge_config(theirs))
    model.load_state_dict(tracr.make_tracr_transformer_bridge_state_dict(theirs, "out"))
    clean, other, same = (torch.tensor([row]) for row in ([0, 1, 1], [1, 0, 1], [0, 0, 1]))
    assert model(torch.cat([clean, other, same]))[:, -1].argmax(-1).tolist() == [0, 1, 0]
    for threshold in (0.001, 0.01, 0.1):
        circuit = acdc(model, other, clean, threshold=threshold)
        assert set(circuit.graph.named(circuit.edges)) == {("input", "L0H0<v>"), ("L0H0", "logits")}
    with pytest.warns(UserWarning, match="hardly differ"):
        assert acdc(model, same, clean, threshold=0.01).n_edges == 0
