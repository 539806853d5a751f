"""A model as Tracr leaves one: arrays by the names of modules, of random weights."""

from types import SimpleNamespace
from typing import Any

import numpy as np

LABELS = ["tokens:a", "tokens:b", "tokens:BOS", "indices:0", "indices:1", "out:x", "out:y", "one"]


def compiled(causal: bool = True, **changes: Any) -> Any:
    """Two layers of two heads of size 3, and an MLP of 5, on a stream with the directions LABELS."""
    generator = np.random.default_rng(0)
    sizes = {"attn/query": (8, 6), "attn/key": (8, 6), "attn/value": (8, 6), "attn/linear": (6, 8)}
    sizes |= {"mlp/linear_1": (8, 5), "mlp/linear_2": (5, 8)}
    params = {
        f"transformer/layer_{layer}/{name}": {"w": generator.normal(size=size) / 3, "b": generator.normal(size=size[1])}
        for layer in range(2)
        for name, size in sizes.items()
    }
    params["token_embed"] = {"embeddings": generator.normal(size=(4, 8))}
    params["pos_embed"] = {"embeddings": generator.normal(size=(6, 8))}
    config = SimpleNamespace(num_layers=2, num_heads=2, key_size=3, mlp_hidden_size=5, causal=causal, layer_norm=False)
    return SimpleNamespace(
        params=params,
        model_config=config,
        residual_labels=LABELS,
        output_encoder=SimpleNamespace(encoding_map={"y": 0, "x": 1}),
        **changes,
    )


def stream(model: Any, tokens: list[int]) -> np.ndarray:
    """What a compiled model leaves in its stream [pos, d_model], head by head."""
    x = model.params["token_embed"]["embeddings"][tokens] + model.params["pos_embed"]["embeddings"][: len(tokens)]
    for layer in range(2):
        part = {
            name: model.params[f"transformer/layer_{layer}/{name}"]
            for name in ("attn/query", "attn/key", "attn/value", "attn/linear", "mlp/linear_1", "mlp/linear_2")
        }
        q, k, v = (x @ part[f"attn/{name}"]["w"] + part[f"attn/{name}"]["b"] for name in ("query", "key", "value"))
        mixed = []
        for head in (slice(0, 3), slice(3, 6)):
            scores = q[:, head] @ k[:, head].T / np.sqrt(3)
            if model.model_config.causal:
                scores = np.where(np.tri(len(tokens)), scores, -np.inf)
            pattern = np.exp(scores - scores.max(1, keepdims=True))
            mixed.append(pattern / pattern.sum(1, keepdims=True) @ v[:, head])
        x = x + np.concatenate(mixed, 1) @ part["attn/linear"]["w"] + part["attn/linear"]["b"]
        hidden = np.maximum(x @ part["mlp/linear_1"]["w"] + part["mlp/linear_1"]["b"], 0)
        x = x + hidden @ part["mlp/linear_2"]["w"] + part["mlp/linear_2"]["b"]
    return x
