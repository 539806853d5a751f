"""Values under every name that TransformerBridge of transformer-lens 3.9.0 and we both answer to, on tiny random models.

The original runs in a process of its own, with its folder first on the path.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from torch import Tensor

from hooked_lm.compat.bridge import TransformerBridge
from tests.close import assert_apart, assert_close

THEIRS = Path(sys.prefix) / "transformer-lens-3.9.0"
TOKENS = [[1, 2, 3, 4, 5, 6], [7, 3, 9, 9, 2, 1]]
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 20,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
CONFIGS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=20, n_positions=16),
    "llama": transformers.LlamaConfig(**GROUPED),
    "gemma2": transformers.Gemma2Config(**GROUPED, head_dim=4),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=4),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5),
    "gptj": transformers.GPTJConfig(n_layer=2, n_head=2, n_embd=16, rotary_dim=4, vocab_size=20, n_positions=16),
    "mixtral": transformers.MixtralConfig(**GROUPED, num_local_experts=4),
    "bert": transformers.BertConfig(**SIZES),
}
# Where one name means two things: in the original these are what stands beside them, by our names.
ELSEWHERE = {
    "gptj": {"attn.hook_attn_scores": "attn.hook_pattern"},
    "bert": {
        "attn.hook_attn_scores": "attn.hook_pattern",
        "hook_attn_out": "hook_normalized_resid_mid",
        "hook_resid_mid": "hook_resid_post",
        "hook_resid_post": "hook_normalized_resid_post",
    },
}
# Their sites that have no counterpart: what enters one norm or one projection beside others, what leaves a norm that several
# read, a sublayer's output before its norm, angles. The last are aliases of theirs that name something else than they say.
WITHOUT = {
    *(f"{norm}.hook_in" for norm in ("ln1", "ln1_post", "ln2", "norm", "attn.q_norm", "attn.k_norm", "embed_ln")),
    *(f"{norm}.hook_out" for norm in ("ln1", "attn.q_norm", "attn.k_norm")),
    *("attn.hook_in", "attn.q.hook_in", "attn.k.hook_in", "attn.v.hook_in", "attn.hook_out", "attn.o.hook_out"),
    *("mlp.in.hook_in", "mlp.gate.hook_in", "mlp.hook_in"),
    *("attn.hook_cos", "attn.hook_sin", "attn.hook_q_normed", "attn.hook_k_normed", "attn.hook_hidden_states"),
    *(
        "rotary_emb.hook_in",
        "rotary_emb.hook_cos",
        "rotary_emb.hook_sin",
        "pos_embed.hook_in",
        "token_type_embed.hook_in",
    ),
    *("mixer.in_proj.hook_out", "mixer.x_proj.hook_in", "mixer.x_proj.hook_out", "mixer.out_proj.hook_in"),
    *("mixer.hook_in_proj", "mixer.hook_x_proj"),
    *("mlp.hook_pre", "mlp.hook_post", "mixer.hook_ssm_out"),
}
SCRIPT = """
import sys, torch, transformers
from safetensors.torch import save_file
from transformer_lens.model_bridge import TransformerBridge
folder, auto, tokens = sys.argv[1], sys.argv[2], torch.tensor(eval(sys.argv[3]))
model = getattr(transformers, auto).from_pretrained(folder, attn_implementation="eager").eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
bridge = TransformerBridge.boot_transformers("tiny", hf_model=model, tokenizer=tokenizer, device="cpu")
with torch.no_grad():
    logits, cache = bridge.run_with_cache(tokens)
    values = {"logits": logits, **{name: value for name, value in cache.items() if isinstance(value, torch.Tensor)}}
    save_file({name: value.detach().clone().contiguous() for name, value in values.items()}, folder + "/values")
"""


def drawn(config: Any, folder: Path) -> str:
    """Write a random model with its tokenizer; returns the transformers class that reads it."""
    auto = "AutoModelForMaskedLM" if config.model_type == "bert" else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_gain = "norm" in name.lower() and name.endswith("weight") and weight.ndim == 1
            weight.copy_(
                0.3 * torch.randn(weight.shape, generator=generator) + is_gain * (config.model_type != "gemma2")
            )
    model.tie_weights()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(20)}, unk_token="t0"))
    special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t3", "unk_token": "t0"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)
    return auto


def originals(folder: Path, auto: str) -> dict[str, Tensor]:
    """What the original leaves at its sites."""
    environment = os.environ | {"PYTHONPATH": str(THEIRS), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SCRIPT, str(folder), auto, json.dumps(TOKENS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return load_file(folder / "values")


def site_of(name: str) -> str:
    """A site without the block that it stands in."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def in_our_shape(site: str, value: Tensor, ours: Tensor) -> Tensor:
    """Norms of queries and keys have heads first, routers have all tokens in one row; what is masked may hold anything."""
    if "_norm.hook" in site:
        value = value.transpose(1, 2)
    if "mlp.gate" in site:
        value = value.reshape(ours.shape)
    return value.masked_fill(ours == float("-inf"), float("-inf")) if "scores" in site else value


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_shared_name_means_the_same_value(name: str, tmp_path: Path) -> None:
    auto = drawn(CONFIGS[name], tmp_path)
    theirs = originals(tmp_path, auto)
    ours: Any = TransformerBridge.boot_transformers(str(tmp_path), device="cpu")
    with torch.no_grad():
        logits, cache = ours.run_with_cache(torch.tensor(TOKENS), names_filter="*")
    assert_close(logits, theirs.pop("logits"))
    compared, without = 0, set()
    for site, expected in theirs.items():
        other = ELSEWHERE.get(name, {}).get(site_of(site))
        if other is not None:
            assert_apart(cache[site].reshape(expected.shape), expected, msg=site)
        known = site if other is None else site.replace(site_of(site), other)
        if known not in cache:
            without.add(site_of(site))
            continue
        found = cache[known]
        expected = in_our_shape(site, expected, found)
        assert_close(found, expected, msg=site)
        compared += 1
    assert without <= WITHOUT, without - WITHOUT
    assert compared > 30, compared
