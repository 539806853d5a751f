"""Forward passes, caches and generation of a random GPT-2-small-sized model, against Hugging Face's."""

import logging
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hooked_lm import HookedTransformer
from tests.benchmarks.timing import Figure, compare


def models() -> tuple[HookedTransformer, GPT2LMHeadModel, GPT2LMHeadModel]:
    """Ours, Hugging Face's with its fused attention, and with the explicit one: the same random weights."""
    torch.manual_seed(0)
    sdpa = GPT2LMHeadModel(GPT2Config(attn_implementation="sdpa")).eval()
    eager = GPT2LMHeadModel(GPT2Config(attn_implementation="eager")).eval()
    eager.load_state_dict(sdpa.state_dict())
    with tempfile.TemporaryDirectory() as directory:
        sdpa.save_pretrained(directory)
        ours = HookedTransformer.from_pretrained_no_processing(directory)
    return ours, sdpa, eager


@torch.no_grad()
def forward_figures() -> list[Figure]:
    ours, sdpa, eager = models()
    figures = []
    for batch, pos, bound, pairs in [(1, 16, 0.90, 41), (4, 128, 0.97, 15)]:
        tokens = torch.randint(0, 50257, (batch, pos))
        size = f"{batch}x{pos}"

        def everything(tokens: torch.Tensor = tokens) -> object:
            return eager(tokens, output_hidden_states=True, output_attentions=True)

        def plain(tokens: torch.Tensor = tokens) -> object:
            return ours(tokens)

        figures += [
            compare(f"forward {size}", plain, "HF sdpa", lambda t=tokens: sdpa(t), bound, pairs),
            compare(
                f"last logits only {size}",
                lambda t=tokens: ours(t, logits_to_keep=1),
                "HF sdpa, the same",
                lambda t=tokens: sdpa(t, logits_to_keep=1),
                0.80,
                pairs,
            ),
            compare(
                f"run_with_cache {size}",
                lambda t=tokens: ours.run_with_cache(t),
                "HF eager, states and attentions",
                everything,
                1.0,
                pairs,
            ),
            compare(
                f"cache of resid_post {size}",
                lambda t=tokens: ours.run_with_cache(t, names_filter="blocks.*.hook_resid_post"),
                "our forward",
                plain,
                1.03,
                pairs,
            ),
            compare(
                f"cache that stops at layer 6 of 12, {size}",
                lambda t=tokens: ours.run_with_cache(t, names_filter=("resid_post", 5), return_type=None),
                "our forward",
                plain,
                0.5,
                pairs,
            ),
        ]
    return figures


def generation_figures() -> list[Figure]:
    ours, sdpa, _ = models()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    prompt = torch.randint(0, 50256, (1, 16))
    asked = {"max_new_tokens": 64, "do_sample": False}
    return [
        compare(
            "greedy generation, 16 + 64 tokens",
            lambda: ours.generate(prompt, stop_at_eos=False, verbose=False, **asked),
            "HF generate",
            lambda: sdpa.generate(
                prompt, attention_mask=torch.ones_like(prompt), min_new_tokens=64, pad_token_id=0, **asked
            ),
            0.75,
            7,
        )
    ]
