"""The attributions of gim-explain, in one dict of tensors: called here, and by itself with the original.

`python gim_run.py FOLDER OUT` puts FOLDER, which has TransformerLens itself, first on the path, and writes what `everything`
finds to the file OUT.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LN, RMS = {"normalization_type": "LN"}, {"normalization_type": "RMS", "final_rms": True, "eps": 1e-5}
ROTARY = {"positional_embedding_type": "rotary"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {**LN, "act_fn": "gelu_new"},
    "parallel": {**LN, **ROTARY, "act_fn": "gelu", "parallel_attn_mlp": True, "rotary_dim": 4},
    "alibi": {**LN, "act_fn": "gelu", "positional_embedding_type": "alibi", "post_embedding_ln": True},
    "attn_only": {**LN, "attn_only": True, "act_fn": None},
    "shortformer": {"normalization_type": "LNPre", "act_fn": "solu_ln", "positional_embedding_type": "shortformer"},
    "llama": {**RMS, **ROTARY, "act_fn": "silu", "gated_mlp": True},
    "grouped": {**RMS, **ROTARY, "act_fn": "silu", "n_key_value_heads": 2, "use_qk_norm": True},
    "gemma2": {**RMS, **ROTARY, "act_fn": "gelu_pytorch_tanh", "use_normalization_before_and_after": True, "window_size": 4,
               "use_local_attn": True, "attn_types": ["local", "global"], "attn_scores_soft_cap": 5.0},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "softmax alone": {
        "freeze_norm": False,
        "q_scale": None,
        "k_scale": None,
        "v_scale": None,
        "softmax_temperature": 3.0,
    },
}
PROMPT = torch.tensor([[1, 7, 23, 5, 42, 11, 30, 9]])


def made(name: str, **more: Any) -> Any:
    from circuit_tracer_run import SIZES, filled
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    fields = {**SIZES, "n_layers": 2, "d_model": 32, "d_head": 8, **MODELS[name], **more}
    model = HookedTransformer(HookedTransformerConfig.from_dict(fields))
    return filled(model, without=("b_in", "b_gate") if fields.get("gated_mlp") else ())


def explained(model: Any, way: str) -> Tensor:
    """The attribution of each token to a logit of the last position, [pos]."""
    import gim

    found: Tensor = gim.explain(model, PROMPT, target_token_id=17, baseline_token_id=3, **WAYS[way])
    model.zero_grad()
    return found


def everything() -> dict[str, Tensor]:
    return {f"{name}, {way}": explained(made(name), way) for name in MODELS for way in WAYS}


def main(folder: str, out: Path) -> None:
    sys.path[:0] = [folder, str(Path(__file__).parent)]
    from safetensors.torch import save_file

    save_file({name: value.contiguous() for name, value in everything().items()}, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
