"""What SAELens does with a HookedTransformer, in one dict of tensors: called here, and by itself with the original.

`python sae_lens_run.py FOLDER OUT` puts FOLDER, which has TransformerLens itself, first on the path, and writes to OUT the
weights of a model and everything that `everything` finds on it.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FIELDS: dict[str, Any] = {"n_layers": 3, "d_model": 32, "n_ctx": 16, "d_head": 8, "n_heads": 4, "d_vocab": 40, "d_mlp": 64,
                          "act_fn": "gelu_new", "seed": 0, "device": "cpu"}  # fmt: skip
RESID, HEADS, READ, OUT = (
    "blocks.1.hook_resid_pre",
    "blocks.1.attn.hook_z",
    "blocks.2.mlp.hook_in",
    "blocks.2.hook_mlp_out",
)
POST = f"{RESID}.hook_sae_acts_post"


def everything(model: Any, saes: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Values by name, and lists of names: the keys of caches, in order."""
    from sae_lens.evals import get_recons_loss
    from sae_lens.training.activation_scaler import ActivationScaler

    tokens = torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(3))
    found: dict[str, Tensor] = {"plain": model(tokens)}
    names: dict[str, list[str]] = {"plain": list(model.run_with_cache(tokens)[1])}
    for name, sae in saes.items():
        for error in (False, True):
            logits, cache = model.run_with_cache_with_saes(tokens, saes=sae, use_error_term=error)
            key = f"{name} error={error}"
            found[key], names[key] = logits, list(cache)
            found |= {f"{key}: {site}": cache[site] for site in cache}
        found[f"{name} but 5"] = model.run_with_saes(tokens, saes=sae, exclude_special_tokens=[5])
    chosen = [saes["standard"], saes["heads"], saes["transcoder"]]
    with model.saes(chosen, use_error_term=True):
        _, cache = model.run_with_cache(tokens, return_type="loss", incl_bwd=True)
        names["gradients"] = list(cache)
        found |= {f"gradients: {site}": cache[site] for site in cache}
        found["edited"] = model.run_with_hooks(tokens, fwd_hooks=[(POST, lambda value, hook: 2 * value)])
    found["edited topk"] = model.run_with_hooks_with_saes(
        tokens, saes=saes["topk"], fwd_hooks=[(POST, lambda value, hook: 2 * value)]
    )
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "stop_at_eos": False,
        "verbose": False,
        "use_past_kv_cache": False,
    }
    found["generated"] = model.generate(tokens[:1, :4], **options).float()
    with model.saes(chosen):
        names["under saes"] = list(model.run_with_cache(tokens)[1])
        found["generated under saes"] = model.generate(tokens[:1, :4], **options).float()
    for name in ("standard", "topk"):
        figures = get_recons_loss(saes[name], model, ActivationScaler(), tokens, compute_kl=True, compute_ce_loss=True)
        found |= {f"{name} {figure}": value for figure, value in figures.items()}
    names["afterwards"] = list(model.run_with_cache(tokens)[1])
    found["afterwards"] = model(tokens)
    return {name: value.detach().clone().contiguous() for name, value in found.items()}, names


def dictionaries(made: Callable[..., Any]) -> dict[str, Any]:
    """By what they are."""
    return {
        "standard": made(RESID, 32),
        "topk": made(RESID, 32, "topk", k=6),
        "jumprelu": made(RESID, 32, "jumprelu"),
        "heads": made(HEADS, 32, reshape_activations="hook_z"),
        "queries": made("blocks.1.attn.hook_q", 8),
        "read": made(READ, 32),
        "normalized": made("blocks.2.ln2.hook_normalized", 32),
        "transcoder": made(READ, 32, "transcoder", out=OUT, apply_b_dec_to_input=False),
    }


def main(folder: str, out: Path) -> None:
    sys.path[:0] = [folder, str(Path(__file__).parent)]
    from sae_lens import HookedSAETransformer
    from saes import made
    from safetensors.torch import save_file
    from transformer_lens import HookedTransformerConfig

    model = HookedSAETransformer(HookedTransformerConfig(**FIELDS))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
    found, names = everything(model, dictionaries(made))
    weights = {f"weights: {name}": value.clone().contiguous() for name, value in model.named_parameters()}
    save_file({**found, **weights}, out, {"names": json.dumps(names)})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
