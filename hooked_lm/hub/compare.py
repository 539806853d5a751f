"""The same checkpoint here and in transformers."""

import os
from typing import Any

import torch

from hooked_lm.hub.load import from_pretrained_no_processing
from hooked_lm.hub.source import find
from hooked_lm.models.verify import Check, Verification


@torch.no_grad()
def verify(
    model_name: str | os.PathLike[str],
    n_tokens: int = 24,
    dtype: torch.dtype | str = torch.float32,
    device: Any = None,
    revision: str | None = None,
    local_files_only: bool = False,
) -> Verification:
    """Load a checkpoint here and in transformers, and compare logits, greedy tokens, and the identities of the sites.

    Logits may differ by 1e-4 of their largest value (four units of rounding in low precision). A greedy token counts as
    wrong where another one was likelier by more than that.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    options: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    model = from_pretrained_no_processing(model_name, dtype=dtype, device=device, **options)
    source = find(model_name, None, revision, local_files_only, {})
    hf_class = AutoModelForCausalLM._model_mapping[type(source.config)]
    theirs = hf_class.from_pretrained(source.folder, dtype=model.cfg.dtype, local_files_only=True)
    theirs = theirs.to(model.device).eval()
    theirs.generation_config = GenerationConfig(pad_token_id=0)
    length = min(16, model.cfg.n_ctx - 1)
    tokens = torch.randint(model.cfg.d_vocab, (2, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    tolerance = max(1e-4, 4 * torch.finfo(model.cfg.dtype).eps)
    reference = theirs(tokens).logits
    largest = reference.abs().max().clamp(min=1.0)
    error = ((model(tokens) - reference).abs().max() / largest).item()
    steps = min(n_tokens, model.cfg.n_ctx - length)
    greedy = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=steps, do_sample=False)
    predicted = model(greedy)[:, length - 1 : -1]
    lead = predicted.amax(-1) - predicted.gather(-1, greedy[:, length:, None])[..., 0]
    wrong = float((lead > tolerance * largest).sum())
    checks = [
        Check("logits as in transformers", (error,), tolerance),
        Check("wrong greedy tokens", (wrong,), 0.0),
    ]
    return Verification((*checks, *model.verify(tokens).checks))
