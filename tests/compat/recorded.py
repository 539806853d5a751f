"""A program for HookedTransformer: which sites are recorded changes no bit of the logits. Run by `test_lending.py`."""

import warnings
from typing import Any

import torch
import transformers
from torch import Tensor

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = {"bos_token_id": 1, "eos_token_id": 2}
GROUPED = {
    **SIZES,
    "intermediate_size": 48,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
    "pad_token_id": None,
}
MODELS = {
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40},
    "llama": GROUPED,
    "gemma2": {**GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
}
FLAGS = ("use_attn_result", "use_split_qkv_input", "use_hook_mlp_in")


def same(model: Any, tokens: Tensor) -> int:
    """Compares the logits of a plain run with those of runs in which sites are recorded or hooked; returns how many."""
    plain, n_runs = model(tokens), 0
    filters = [None, lambda name: True, "blocks.1.attn.hook_pattern", lambda name: name.endswith("hook_scale")]
    for names_filter in [*filters, *([name] for name in model.hook_dict)]:
        assert torch.equal(plain, model.run_with_cache(tokens, names_filter=names_filter)[0]), names_filter
        n_runs += 1
    for site in [lambda name: True, *model.hook_dict]:
        assert torch.equal(plain, model.run_with_hooks(tokens, fwd_hooks=[(site, lambda value, hook: value)])), site
        n_runs += 1
    for name, point in model.hook_dict.items():
        assert point.name == name
        point.add_hook(lambda value, hook: None)
    assert torch.equal(plain, model(tokens))
    model.reset_hooks()
    return n_runs


def main() -> None:
    from transformer_lens import HookedTransformer

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(3, 61, (2, 11))
    for kind, sizes in MODELS.items():
        config = transformers.AutoConfig.for_model(kind, **sizes, **ENDS)
        hf_model = transformers.AutoModelForCausalLM.from_config(config).eval()
        model = HookedTransformer.from_pretrained("tiny", hf_model=hf_model)
        assert model.cfg.fused_attention == "never"
        with torch.no_grad():
            found = [same(model, tokens)]
            for flag in FLAGS:
                getattr(model, f"set_{flag}")(True)
            found.append(same(model, tokens))
        same(model, tokens)  # with gradients
        print(kind, *found)


if __name__ == "__main__":
    main()
