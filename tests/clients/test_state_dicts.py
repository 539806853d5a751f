"""Weights of models that TransformerLens 3.9 made load into ours and ours into theirs; both have the same logits.

The original runs in a process of its own (`originals.py`); files stand between.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hooked_lm import HookedEncoder, HookedEncoderDecoder, HookedTransformer, HookedTransformerConfig
from hooked_lm.compat.state_dicts import for_transformer_lens
from tests.close import assert_apart, assert_close

ORIGINAL = Path(sys.prefix) / "transformer-lens-3.9.0"
TOKENS = torch.randint(30, (3, 12), generator=torch.Generator().manual_seed(3))
KINDS = {"decoder": HookedTransformer, "encoder": HookedEncoder, "both": HookedEncoderDecoder}

SIZES = {
    "n_layers": 2, "d_model": 16, "n_ctx": 20, "n_heads": 4, "d_head": 4, "d_vocab": 30, "d_mlp": 24, "act_fn": "gelu",
    "device": "cpu",
}  # fmt: skip
ROTARY = {"positional_embedding_type": "rotary"}
LLAMA = dict(ROTARY, normalization_type="RMS", gated_mlp=True, act_fn="silu", final_rms=True, n_key_value_heads=2)
LOCAL = {"use_local_attn": True, "window_size": 4, "attn_types": ["global", "local"]}
AROUND = {"use_normalization_before_and_after": True, "act_fn": "gelu_pytorch_tanh"}
T5 = {
    "positional_embedding_type": "relative_positional_bias", "relative_attention_num_buckets": 8, "act_fn": "relu",
    "relative_attention_max_distance": 16, "attention_dir": "bidirectional", "use_attn_scale": False, "eps": 1e-6,
    "normalization_type": "RMS", "decoder_start_token_id": 0,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "gpt2": {"act_fn": "gelu_new"},
    "gpt_neo": dict(LOCAL, use_attn_scale=False),
    "stanford_gpt2": {"scale_attn_by_inverse_layer_idx": True},
    "neox": dict(ROTARY, parallel_attn_mlp=True, rotary_dim=2),
    "gptj": dict(ROTARY, parallel_attn_mlp=True, rotary_adjacent_pairs=True),
    "bloom": {"positional_embedding_type": "alibi", "post_embedding_ln": True},
    "llama": LLAMA,
    "llama31": dict(LLAMA, use_NTK_by_parts_rope=True, NTK_original_ctx_len=8),
    "qwen3": dict(LLAMA, use_qk_norm=True),
    "gemma2": dict(LLAMA, **LOCAL, **AROUND, attn_scores_soft_cap=5.0, output_logits_soft_cap=3.0, attn_scale=3.0),
    "gemma3": dict(LLAMA, **LOCAL, **AROUND, use_qk_norm=True, rotary_base_local=100, rotary_scaling_factor=8.0),
    "gemma2_folded": dict(LLAMA, **LOCAL, **AROUND, normalization_type="RMSPre"),
    "bloom_folded": {"positional_embedding_type": "alibi", "post_embedding_ln": True, "normalization_type": "LNPre"},
    "olmo3": dict(LLAMA, **LOCAL, use_yarn_rope=True, yarn_factor=4.0, yarn_original_max_position_embeddings=8,
                  yarn_global_attn_only=True, yarn_attention_factor=1.2),
    "gpt_oss": dict(LLAMA, use_yarn_rope=True, yarn_factor=4.0, yarn_original_max_position_embeddings=8,
                    yarn_truncate=False, use_attention_sinks=True),
    "olmo": dict(LLAMA, clip_qkv=0.3, n_key_value_heads=None),
    "mixtral": dict(LLAMA, num_experts=4, experts_per_token=2),
    "qwen_moe": dict(LLAMA, num_experts=4, experts_per_token=2, norm_topk_prob=True),
    "solu": {"act_fn": "solu_ln"},
    "solu_folded": {"act_fn": "solu_ln", "normalization_type": "LNPre"},
    "both_ways": {"attention_dir": "bidirectional"},
    "another_output": {"d_vocab_out": 7},
} | {
    f"attention_{positions}_{norm}": {"attn_only": True, "positional_embedding_type": positions, "normalization_type": norm}
    for positions in ("standard", "rotary", "shortformer", "alibi")
    for norm in (None, "LN", "LNPre", "RMS", "RMSPre")
} | {
    f"{act_fn}_{gated}": {"act_fn": act_fn, "gated_mlp": gated, "normalization_type": "LNPre" if gated else "RMSPre"}
    for act_fn in ("relu", "gelu", "silu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "solu", "relu2", "xielu")
    for gated in (False, True)
}  # fmt: skip
CASES = {name: {"kind": "decoder", "fields": {**SIZES, **fields}} for name, fields in FIELDS.items()} | {
    "bert": {"kind": "encoder", "fields": {**SIZES, "attention_dir": "bidirectional", "eps": 1e-12}},
    # its biases are never anything but zeros, in T5 there are none
    "t5": {"kind": "both", "fields": {**SIZES, **T5, "tie_word_embeddings": True}, "without": ["", ".b_"]},
    "t5_gated": {"kind": "both", "fields": {**SIZES, **T5, "gated_mlp": True}, "without": ["", ".b_"]},
}
EXACT = {"fold_ln": False, "center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}


def run_original(folder: Path, cases: dict[str, Any]) -> None:
    (folder / "cases.json").write_text(json.dumps(cases))
    program = [
        sys.executable,
        "-W",
        "ignore",
        str(Path(__file__).with_name("originals.py")),
        str(ORIGINAL),
        str(folder),
    ]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    run_original(folder, CASES)
    return folder


def loaded(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    weights = load_file(folder / f"{name}.theirs.safetensors")
    logits = weights.pop("logits")
    return json.loads((folder / f"{name}.fields.json").read_text()), weights, logits


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    if isinstance(model, HookedEncoderDecoder):
        return model(TOKENS, TOKENS[:, :5])
    return model(TOKENS, return_type="logits")


def model_of(name: str, fields: dict[str, Any]) -> Any:
    return KINDS[CASES[name]["kind"]](HookedTransformerConfig.from_dict(fields))


@pytest.mark.parametrize("name", CASES)
def test_their_weights_in_our_model(theirs: Path, name: str) -> None:
    fields, weights, expected = loaded(theirs, name)
    model = model_of(name, fields)
    assert_apart(logits_of(model), expected)  # before
    model.load_state_dict(weights)
    assert_close(logits_of(model), expected)
    if name in PROCESSED:
        processed = model_of(name, fields)
        processed.load_and_process_state_dict(weights, **EXACT)
        assert_close(logits_of(processed), expected)
        assert processed.cfg.processed == ()


PROCESSED = ["gpt2", "neox", "llama", "gemma2", "mixtral", "gpt_oss", "olmo", "solu", "attention_shortformer_LN"]
FLAGS = ["fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases", "refactor_factored_attn_matrices"]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("name", PROCESSED)
def test_folding_their_weights_leaves_the_predictions(theirs: Path, name: str, flag: str) -> None:
    """Also where the original's folding changes them: with sinks, clipped values, and shortformers."""
    fields, weights, expected = loaded(theirs, name)
    model = model_of(name, fields)
    if flag == "refactor_factored_attn_matrices" and fields["positional_embedding_type"] == "rotary":
        with pytest.raises(ValueError, match="refactor_factored"):
            model.load_and_process_state_dict(weights, **{**EXACT, flag: True})
        return
    model.load_and_process_state_dict(weights, **{**EXACT, flag: True})
    assert_close(logits_of(model).log_softmax(-1), expected.log_softmax(-1))


def given_back(tmp_path: Path, models: dict[str, Any]) -> dict[str, tuple[list[str], Tensor]]:
    """What the original says of our models: names that did not fit, and logits."""
    cases = {}
    for name, model in models.items():
        fields, weights = for_transformer_lens(model)
        del fields["dtype"]
        cases[name] = {"kind": next(k for k, kind in KINDS.items() if isinstance(model, kind)), "fields": fields}
        save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / f"{name}.safetensors")
    run_original(tmp_path, cases)
    return {
        name: (
            json.loads((tmp_path / f"{name}.misfits.json").read_text()),
            load_file(tmp_path / f"{name}.logits.safetensors")["logits"],
        )
        for name in models
    }


def filled(model: Any) -> Any:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            gate = getattr(model.cfg, "gated_mlp", False) and name.endswith((".mlp.b_in", ".mlp.b_gate"))
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.0 if gate else 0.3))
    return model


def from_huggingface() -> dict[str, Any]:
    """Models with what flat configs have no name for: offsets of norms, scales of embeddings, no biases."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
                 "max_position_embeddings": 20, "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip
    torch.manual_seed(0)
    classes = {"hf_llama": "Llama", "hf_gemma2": "Gemma2", "hf_mixtral": "Mixtral"}
    models: dict[str, Any] = {}
    for name, kind in classes.items():
        hf = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
        models[name] = HookedTransformer.from_pretrained_no_processing(kind, hf_model=hf)
    return models


def test_our_weights_in_their_model(tmp_path: Path) -> None:
    models = {name: filled(model_of(name, case["fields"])) for name, case in CASES.items()}
    for name in PROCESSED:
        models[f"{name}_processed"] = filled(model_of(name, CASES[name]["fields"]))
        models[f"{name}_processed"].process_weights_()
    models |= from_huggingface() | {"demo": HookedTransformer.from_pretrained("demo")}
    for name, (misfits, logits) in given_back(tmp_path, models).items():
        assert misfits == [], name
        assert_close(logits, logits_of(models[name]), msg=name)


@pytest.mark.parametrize(
    ("fields", "damage", "message"),
    [
        (dict(SIZES, gated_mlp=True), lambda m: m.blocks[1].mlp.b_gate.data.fill_(1), "b_gate"),
        (SIZES, lambda m: setattr(m.blocks[1].attn, "forward", m.blocks[0].attn.forward), "other logits"),
    ],
)
def test_what_their_names_cannot_say_is_refused(
    fields: dict[str, Any], damage: Callable[[Any], Any], message: str
) -> None:
    model = filled(HookedTransformer(fields))
    for_transformer_lens(model)
    damage(model)
    with pytest.raises(ValueError, match=message):
        for_transformer_lens(model)
