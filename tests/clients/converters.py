"""Run in a process of its own: the converters of TransformerLens beside ours, on tiny random models, family by family.

`python converters.py FOLDER` prints for each family, as JSON, the names that only theirs has, those that only ours has, and those
with other values.
"""

import json
import sys
import warnings
from types import SimpleNamespace

FOLDER = sys.argv[1]
sys.path.insert(0, FOLDER)
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers as hf  # noqa: E402
from transformer_lens.pretrained import weight_conversions  # noqa: E402

from hooked_lm.compat.loading import convert_hf_weights  # noqa: E402

SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": None}
LONG = {**SIZES, "max_position_embeddings": 40, "intermediate_size": 48}
GROUPED = {**LONG, "num_key_value_heads": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "gpt2": (hf.GPT2LMHeadModel, {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40, "vocab_size": 61}),
    "gptj": (hf.GPTJForCausalLM, {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 61}),
    "bloom": (hf.BloomForCausalLM, {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}),
    "opt": (hf.OPTForCausalLM, {**SIZES, "max_position_embeddings": 40, "ffn_dim": 128, "word_embed_proj_dim": 32}),
    "neox": (hf.GPTNeoXForCausalLM, LONG),
    "phi": (hf.PhiForCausalLM, LONG),
    "llama": (hf.LlamaForCausalLM, GROUPED),
    "mistral": (hf.MistralForCausalLM, GROUPED),
    "qwen2": (hf.Qwen2ForCausalLM, GROUPED),
    "qwen3": (hf.Qwen3ForCausalLM, {**GROUPED, "head_dim": 8}),
    "gemma": (hf.GemmaForCausalLM, {**GROUPED, "head_dim": 8}),
    "mixtral": (hf.MixtralForCausalLM, {**GROUPED, **EXPERTS}),
    "gpt_oss": (hf.GptOssForCausalLM, {**GROUPED, **EXPERTS, "head_dim": 8}),
    "phi3": (hf.Phi3ForCausalLM, GROUPED),
    "bert": (hf.BertForPreTraining, {**LONG, "pad_token_id": 0}),
    "t5": (hf.T5ForConditionalGeneration, {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
}
TABLES = (".mask", ".IGNORE", ".rotary_sin", ".rotary_cos")


def compared(family: str) -> dict[str, list[str]]:
    kind, fields = FAMILIES[family]
    model = kind(kind.config_class(**fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    cfg = SimpleNamespace(
        n_layers=2,
        n_heads=4,
        d_head=8,
        d_model=32,
        d_mlp=fields.get("intermediate_size", 128),
        d_vocab=model.config.vocab_size,
        d_vocab_out=model.config.vocab_size,
        n_ctx=40,
        n_key_value_heads=fields.get("num_key_value_heads"),
        num_experts=4,
        use_qk_norm=family == "qwen3",
        use_normalization_before_and_after=False,
        load_in_4bit=False,
        device="cpu",
        dtype=torch.float32,
    )
    theirs, ours = getattr(weight_conversions, f"convert_{family}_weights")(model, cfg), convert_hf_weights(model, cfg)
    theirs = {name: value for name, value in theirs.items() if not name.endswith(TABLES)}
    both = theirs.keys() & ours.keys()
    return {
        "theirs alone": sorted(theirs.keys() - ours.keys()),
        "ours alone": sorted(name for name in ours.keys() - theirs.keys() if ours[name].any()),
        "different": sorted(name for name in both if not torch.equal(theirs[name], ours[name])),
        "equal": sorted(name for name in both if theirs[name].any()),
    }


print(json.dumps({family: compared(family) for family in FAMILIES}))
