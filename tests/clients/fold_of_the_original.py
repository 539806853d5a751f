"""How far folding moves the log probabilities of small models with norms that have weights: prints a dict as JSON.

Run with the original on the path, or with the shim: both have the same interface.
"""

import json
import warnings

import torch

warnings.simplefilter("ignore")

from transformer_lens import HookedTransformer, HookedTransformerConfig  # noqa: E402

TOKENS = torch.tensor([[1, 2, 3, 4]])
SIZES = {"n_layers": 2, "d_model": 16, "d_head": 8, "n_heads": 2, "n_ctx": 8, "act_fn": "relu", "device": "cpu"}


def moved(**fields: object) -> float:
    cfg = HookedTransformerConfig(**{**SIZES, **fields})  # type: ignore[arg-type]
    model, folded = HookedTransformer(cfg), HookedTransformer(cfg)
    generator = torch.Generator().manual_seed(0)
    state = {
        name: value + 0.3 * torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in model.state_dict().items()
        if not name.endswith(("mask", "IGNORE"))
    }
    model.load_state_dict(state, strict=False)
    options = {"center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
    folded.load_and_process_state_dict(model.state_dict(), fold_ln=True, **options)
    return (folded(TOKENS).log_softmax(-1) - model(TOKENS).log_softmax(-1)).abs().max().item()


found = {}
for direction in ("causal", "bidirectional"):
    for d_mlp, d_vocab in ((16, 11), (24, 16), (24, 11)):
        found[f"{direction} {d_mlp} {d_vocab}"] = moved(attention_dir=direction, d_mlp=d_mlp, d_vocab=d_vocab)
print(json.dumps(found))
