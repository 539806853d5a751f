"""What is asked of the tools of TransformerLens 4.3: by a process in which they run, and by the test that knows the answers."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hooked_lm import HookedTransformer, pretrained

TEXT = "When Mary and John went to the store, John gave a drink to Mary"
TEMPLATE = "When [A] and [B] went to the store, [B] gave a drink to [A]"
NAMES = ["Mary", "John", "Tom", "Lucy"]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"intermediate_size": 48, "num_key_value_heads": 4},
    "gemma2": {"intermediate_size": 48, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 3},
}
BLOCKS = ["resid_pre", "resid_mid", "attn_out", "mlp_out", "block_every"]
HEADS = ["out", "q", "k", "v", "pattern"]
SWEEPS = [
    *BLOCKS,
    *(f"attn_head_{what}_{where}" for what in HEADS for where in ("by_pos", "all_pos")),
    "attn_head_pattern_dest_src_pos",
    "attn_head_all_pos_every",
    "attn_head_by_pos_every",
]
SINGULAR = ["OV", "w_in", "w_out"]
COMPONENTS = ["q", "k", "v"]
DETECTIONS: list[tuple[tuple[str, Any], ...]] = [
    (),
    (("exclude_bos", True),),
    (("exclude_current_token", True), ("error_measure", "abs")),
    (("heads", ((0, 1), (1, 3))),),
]


def options(given: Any) -> dict[str, Any]:
    """The arguments of one call."""
    return {name: list(value) if name == "heads" else value for name, value in given}


def demo() -> HookedTransformer:
    return HookedTransformer.from_pretrained("demo")


def models() -> dict[str, tuple[HookedTransformer, Tensor, Tensor]]:
    """Tiny random models, and ids of a clean and a corrupted prompt."""
    found = {}
    for family, fields in FAMILIES.items():
        cfg = AutoConfig.for_model(family, **SIZES, **fields, pad_token_id=None, bos_token_id=1, eos_token_id=2)
        torch.manual_seed(0)
        theirs = AutoModelForCausalLM.from_config(cfg).eval()
        for weight in theirs.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
        model = pretrained.from_pretrained_no_processing("tiny", hf_model=theirs)
        ids = torch.randint(3, model.cfg.d_vocab, (2, 2, 5), generator=torch.Generator().manual_seed(0))
        found[family] = (model, ids[0], ids[1])
    return found


def metric(logits: Tensor) -> Tensor:
    return (logits[:, -1, 5] - logits[:, -1, 7]).mean()


def batches(model: HookedTransformer) -> list[dict[str, Tensor]]:
    return [{"tokens": model.to_tokens(text)} for text in (TEXT, "The next day, Anna slept late because")]


def readings(cache: Any) -> dict[str, Any]:
    """What methods of a cache give; of theirs and of ours by the same calls."""
    stack = cache.decompose_resid()
    found = {
        "accumulated_resid": cache.accumulated_resid(incl_mid=True, apply_ln=True),
        "accumulated_resid, 1": cache.accumulated_resid(1, pos_slice=-1),
        "decompose_resid": stack,
        "decompose_resid, attn": cache.decompose_resid(mode="attn", apply_ln=True, pos_slice=(1, 3)),
        "labels": cache.decompose_resid(return_labels=True)[1],
        "apply_ln_to_stack": cache.apply_ln_to_stack(stack),
        "stack_activation": cache.stack_activation("z"),
    }
    if not cache.model.cfg.use_normalization_before_and_after:
        # theirs knows of no norm behind a block: heads and neurons are those before it, and there is a constant sum of biases
        found |= {
            "stack_head_results": cache.stack_head_results(incl_remainder=True, apply_ln=True),
            "get_neuron_results": cache.get_neuron_results(1, neuron_slice=(0, 4)),
            "stack_neuron_results": cache.stack_neuron_results(2, pos_slice=-1),
        }
        found["full"] = cache.get_full_resid_decomposition(expand_neurons=False, apply_ln=True)
    return found
